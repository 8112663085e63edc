"""MtpOracle: the metadata of every draft step, each derived anew from the raw inputs (contract 2)."""

from __future__ import annotations

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.systems.mtp import destination_buffers, destinations
from oracles.decode import DecodeOracle


class MtpOracle:
    """One decode oracle a destination: nothing is copied, so no copy can be wrong in both sides alike."""

    name = "oracle"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        """Keeps the buffers of `Layout.for_oracle()` and writes the constants."""
        self._steps = [DecodeOracle() for _ in range(destinations(geometry))]
        for step, oracle in enumerate(self._steps):
            oracle.allocate(geometry, inputs, destination_buffers(buffers, step))

    def before_replay(self) -> None:
        """Do nothing: everything is in the graph."""

    def in_graph(self) -> None:
        """All steps see the same lengths; there is no shift from step to step (contract 2.3)."""
        for oracle in self._steps:
            oracle.in_graph()
