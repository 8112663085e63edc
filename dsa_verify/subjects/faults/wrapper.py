"""Wrapper: a subject that passes everything on to another one, for faults to override a piece of."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.glue_route import Route
from dsa_verify.contract.subject import Buffers, Inputs, Routed, Subject, current_outputs


class Wrapper:
    """Wraps `inner`; `field` names the output that a fault spoils ("" if it spoils none). `siblings` are the wrappers
    of all buckets of the run, in the order of their capture."""

    def __init__(self, inner: Subject, field: str):
        self.inner, self.field = inner, field
        self.name = inner.name
        self.siblings: list[Wrapper] = []

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        self.geometry, self.inputs, self.buffers = geometry, inputs, buffers
        self.inner.allocate(geometry, self.inputs_for_inner(inputs), buffers)
        if self.field and self.field not in buffers.layout:
            # Another bucket has it (see `check_field`); in this one there is nothing to spoil.
            for name in ("before_replay", "in_graph"):
                setattr(self, name, getattr(self.inner, name))
        # What the verifier asks of a subject beyond the protocol, it must be able to ask through the fault.
        self.ready_before_graph: tuple[str, ...] = getattr(self.inner, "ready_before_graph", ())
        self.explain = getattr(self.inner, "explain", None)
        if hasattr(self.inner, "foreign_work") and not hasattr(self, "foreign_work"):
            self.foreign_work = self.inner.foreign_work
        if isinstance(self.inner, Routed):
            self.release, self.glue_conditions = self.inner.release, self.inner.glue_conditions
            self.route = self.route_of(self.inner)

    def route_of(self, inner: Routed) -> Callable[[int], Route]:
        """The `route` of a subject that has one."""
        return inner.route

    def inputs_for_inner(self, inputs: Inputs) -> Inputs:
        return inputs

    def before_replay(self) -> None:
        self.inner.before_replay()

    def in_graph(self) -> None:
        self.inner.in_graph()

    def outputs(self) -> Mapping[str, torch.Tensor]:
        return current_outputs(self.inner, self.buffers)

    @property
    def target(self) -> torch.Tensor:
        """The tensor of the spoiled field."""
        return self.outputs()[self.field]
