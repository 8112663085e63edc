"""Target-verify refreshes at some time what the indexer reads; these are the other three lives of a schedule (contract
3.4, 3.7).

The first is everything in the graph (`basic.TargetVerify`). `ready_before_graph` names the fields that a consumer may
read before the graph replays, and that the verifier therefore judges then as well.
"""

from __future__ import annotations

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.pipelines.basic import TargetVerify
from dsa_verify.subjects.pipelines.indexer import IndexerMetadata


class _WithIndexer(TargetVerify):
    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        if self._indexer is None:
            raise UsageError(f"subject {self.name!r}: the geometry has no indexer to refresh; set indexer=true")
        self._metadata: IndexerMetadata = self._indexer


class OutOfGraph(_WithIndexer):
    """Everything in place before the replay; the graph holds no metadata work."""

    name = "out_of_graph"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.ready_before_graph = tuple(buffers)

    def before_replay(self) -> None:
        self._launch()
        self._metadata.refresh()

    def in_graph(self) -> None:
        pass


class Cached(OutOfGraph):
    """This does as the published engine: schedules are built afresh, as at init, and copied into the captured ones."""

    name = "cached"

    def before_replay(self) -> None:
        self._launch()
        self._metadata.refresh(schedules=False)
        for name in self._metadata.schedule_names:
            fresh = torch.empty_like(self._buffers[name])
            self._metadata.refresh_schedule(name, fresh)
            self._buffers[name].copy_(fresh)


class Residual(_WithIndexer):
    """Schedules eagerly from the raw lengths before the replay; the graph does the rest and builds no schedule."""

    name = "residual"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.ready_before_graph = self._metadata.schedule_names

    def before_replay(self) -> None:
        self._metadata.schedules_from_raw()

    def in_graph(self) -> None:
        self._launch()
        self._metadata.refresh(schedules=False)
