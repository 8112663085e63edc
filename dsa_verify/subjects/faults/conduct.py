"""Faults of conduct: the subject raises, synchronises, allocates, fails only once, or takes the device down."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Diagnosis as D
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.glue_route import Route
from dsa_verify.contract.subject import Buffers, Inputs, Routed, Subject
from dsa_verify.subjects.faults.fault import ALL, fault
from dsa_verify.subjects.faults.wrapper import Wrapper

FAR_AWAY = 1 << 40  # elements: no address space of a device reaches there
FIRST_ROUNDS = 3  # replays before a fault of conduct strikes; the warm-up makes the first two


@fault(
    "glues_idle",
    "an idle batch is prepared by the captured graph (subjects that have a route)",
    D.WRONG_ROUTE,
    systems=("padded",),
)
class GluesIdle(Wrapper):
    """An idle batch goes through the graph as any other does."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        if not isinstance(self.inner, Routed):
            raise UsageError(
                f"fault 'glues_idle' has no effect on subject {self.inner.name!r}, which has no route; use subject glue"
            )
        super().allocate(geometry, inputs, buffers)

    def route_of(self, inner: Routed) -> Callable[[int], Route]:
        return lambda raw_batch: Route.GLUE if raw_batch == 0 else inner.route(raw_batch)


@fault("raises_in_capture", "in_graph raises", D.RAISES, anywhere=True)
class RaisesInCapture(Wrapper):
    """Raises on its third call, which is the one under capture."""

    def __init__(self, inner: Subject, field: str):
        super().__init__(inner, field)
        self._calls = 0

    def in_graph(self) -> None:
        self._calls += 1
        if self._calls > 2:
            raise ValueError("planted: this body does not like to be captured")
        self.inner.in_graph()


@fault("synchronises_in_capture", "in_graph reads a length on the host", D.SYNCHRONISES, anywhere=True)
class SynchronisesInCapture(Wrapper):
    def in_graph(self) -> None:
        self.inner.in_graph()
        self.longest = self.inputs.seq_lens.max().item()


@fault(
    "foreign_clobbers",
    "eager work between replays writes into a workspace of the graph",
    D.BOUNDARY,
    field="cache_seqlens_int32",
)
class ForeignClobbers(Wrapper):
    """Eager work between replays leaves a number in a workspace that the graph takes for 0."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self._workspace = torch.zeros(1, dtype=self.target.dtype, device=self.target.device)

    def in_graph(self) -> None:
        self.inner.in_graph()
        self.target.add_(self._workspace)

    def foreign_work(self) -> None:
        self._workspace.fill_(1)


@fault("allocates_in_replay", "before_replay keeps a new tensor each time", D.ALLOCATES, anywhere=True)
class AllocatesInReplay(Wrapper):
    def before_replay(self) -> None:
        self.inner.before_replay()
        self.fresh = torch.empty_like(self.inputs.seq_lens)


@fault(
    "flaky",
    "one field is wrong once, and never again in this process",
    D.FLAKY,
    field="cache_seqlens_int32",
    anywhere=True,
)
class WrongOnce(Wrapper):
    """Adds one to the field in a single round of the whole process."""

    struck = False

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self._error = torch.zeros(1, dtype=torch.int32, device=inputs.seq_lens.device)
        self._replays = 0

    def before_replay(self) -> None:
        self.inner.before_replay()
        self._replays += 1
        strike = self._replays > FIRST_ROUNDS and not WrongOnce.struck
        self._error.fill_(int(strike))
        WrongOnce.struck = WrongOnce.struck or strike

    def in_graph(self) -> None:
        self.inner.in_graph()
        self.target.add_(self._error)


@fault("lost_device", "a replay ends in an illegal memory access", systems=ALL, anywhere=True)
class IllegalAccess(Wrapper):
    """A kernel really writes beyond all memory on a GPU; elsewhere the driver's error is raised in its words."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self._replays = 0

    def before_replay(self) -> None:
        self.inner.before_replay()
        self._replays += 1
        if self._replays <= FIRST_ROUNDS:
            return
        device = self.inputs.seq_lens.device
        if device.type != "cuda":
            raise RuntimeError("CUDA error: an illegal memory access was encountered (planted)")
        from dsa_verify.subjects.faults.illegal_kernel import write_far_away

        write_far_away[(1,)](torch.empty(1, dtype=torch.int32, device=device), FAR_AWAY)
        torch.cuda.synchronize(device)
