"""Capture: opens one bucket after another: the oracle, the subject, and the harness's own work between them.

The order is that of engines: allocate, warm up, capture. What the harness launches in every round is captured, too,
since launching it piece by piece would cost more than the round.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Final

import torch

from dsa_verify.base.errors import CaptureError, HarnessError, UsageError
from dsa_verify.base.torch_functions import replaced_functions
from dsa_verify.base.torch_state import TorchState
from dsa_verify.buffers.arena import Arena
from dsa_verify.buffers.input_buffers import InputBuffers
from dsa_verify.buffers.poison import Poison
from dsa_verify.buffers.region import (
    Kind,
    Region,
    as_words,
    field_regions,
    guard_regions,
    input_regions,
    private_fields,
    wider_bucket_regions,
)
from dsa_verify.contract import progress
from dsa_verify.contract.engine_form import EngineForm
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Compare, Layout
from dsa_verify.contract.subject import Buffers, Inputs, Routed, Subject, SubjectFactory, current_outputs, make_subject
from dsa_verify.contract.system import System
from dsa_verify.graphs import Backend, Graph
from dsa_verify.graphs.capturing import CAPTURE_ERROR_MODE, no_collection
from dsa_verify.judge.judge import Judge, Phase
from dsa_verify.judge.law_regions import LawWatch
from dsa_verify.judge.normalise import normalisers
from dsa_verify.judge.output_check import wrong_outputs
from dsa_verify.judge.pad_rows import normalised_pad_rows
from dsa_verify.replay.bucket import CapturedBucket, Judges, Shown, Sides, host_copy, nothing
from dsa_verify.replay.subject_stages import SubjectError, SubjectStages
from dsa_verify.waivers.mask import WaiverMask
from dsa_verify.waivers.waivers import Waiver

_CONSTANT_INPUTS: Final = ("full_to_swa",)


class HarnessGraphs:
    """The harness's own launches on `device`, as graphs where it is a CUDA device.

    They run one after another and leave nothing in their temporaries, so all share one pool. Lifetime: a graph holds
    bare addresses, so what its body refers to lives as long as this object, which must live as long as the graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._bodies: list[Callable[[], None]] = []

    def of(self, body: Callable[[], None]) -> Callable[[], None]:
        """Return what does `body`, which may have been run once then: the caller undoes what it wrote."""
        if self._device.type != "cuda":
            return body
        body()  # compile outside the capture
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        mode = CAPTURE_ERROR_MODE
        with no_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
            body()
        self._bodies.append(body)
        return graph.replay

    def of_phases(self, look: Callable[[Phase], None]) -> Callable[[Phase], None]:
        """`look` after a first and a second replay."""
        if self._device.type != "cuda":
            return look
        graphs = {phase: self.of(functools.partial(look, phase)) for phase in (Phase.REPLAY, Phase.SECOND_REPLAY)}
        return lambda phase: graphs[phase]()

    def if_any(self, judge: Judge, body: Callable[[], None]) -> Callable[[], None]:
        """Return `of(body)`, or nothing where `judge` has nothing to look at."""
        return self.of(body) if judge.regions else nothing


@dataclasses.dataclass(frozen=True, slots=True)
class EagerWork:
    """What is done eagerly where a captured graph would be replayed. `why`: what kept it from being captured."""

    body: Callable[[], None]
    why: str

    def replay(self) -> None:
        """Do it."""
        self.body()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Capture:
    """The buckets of one replayer are captured into this.

    `pools`: the oracle's and the subject's, which share nothing. `record`: also judge the inputs before the subject
    could touch them, and keep what the oracle gave at capture.
    """

    system: System
    geometry: Geometry
    backend: Backend
    input_buffers: InputBuffers
    arena: Arena
    oracle_arena: Arena
    pools: tuple[object, object]
    graphs: HarnessGraphs
    stages: SubjectStages
    form: EngineForm
    waivers: Collection[Waiver]
    record: bool

    def open(self, layout: Layout, factory: SubjectFactory) -> CapturedBucket:
        """Capture the bucket of `layout`. SubjectError, or HarnessError where it is the oracle that fails."""
        sides = self._sides(layout, factory)
        memory = field_regions(layout, sides.outputs, sides.oracle_buffers, sides.control)
        shown = self._shown(sides, {region.name: region for region in memory})
        fields = field_regions(layout, {**sides.outputs, **shown.copies}, sides.oracle_buffers, sides.control)
        around = [
            *guard_regions(self.arena.guards, Kind.GUARD),
            *guard_regions(self.input_buffers.guards, Kind.GUARD),
            *wider_bucket_regions(self.arena, layout.bucket),
        ]
        laws = LawWatch(layout, {**sides.outputs, **shown.righted}, sides.oracle_buffers)
        judges = self._judges(sides, fields, around, laws)
        poison = Poison([*memory, *around], self.backend.device, self.input_buffers.round_index, sides.poison_kind)
        captured = self._captured(sides, shown, judges, laws, poison, memory)
        # Making the harness's graphs ran them once: back to the inputs and counters of a fresh start.
        self.input_buffers.reset()
        captured.reset()
        return captured

    def _sides(self, layout: Layout, factory: SubjectFactory) -> Sides:
        bucket = layout.bucket
        inputs, oracle_inputs = self.input_buffers.inputs(bucket)
        control, poison_kind = self.input_buffers.control(bucket)
        buffers, oracle_buffers = self.arena.at(bucket), self.oracle_arena.at(bucket)
        oracle, oracle_graph = self._captured_oracle(oracle_inputs, oracle_buffers)
        at_capture = host_copy(oracle_buffers) if self.record else {}
        waivers = [each for each in self.waivers if each.covers(self.geometry, bucket) and each.field in layout]
        frozen = {waiver.field: as_words(oracle_buffers[waiver.field]).clone() for waiver in waivers}
        subject, subject_graph = self._captured_subject(layout, factory, inputs, buffers)
        return Sides(
            layout=layout,
            subject=subject,
            oracle=oracle,
            inputs=inputs,
            oracle_inputs=oracle_inputs,
            buffers=buffers,
            oracle_buffers=oracle_buffers,
            outputs=current_outputs(subject, buffers),
            control=control,
            poison_kind=poison_kind,
            subject_graph=subject_graph,
            oracle_graph=oracle_graph,
            at_capture=at_capture,
            waivers=tuple(waivers),
            frozen=frozen,
        )

    def _captured_oracle(self, inputs: Inputs, buffers: Buffers) -> tuple[Subject, Graph]:
        oracle = self.system.make_oracle()
        try:
            oracle.allocate(self.geometry, inputs, buffers)
            oracle.in_graph()
            return oracle, self._oracle_graph(oracle)
        except UsageError:
            raise  # of a declaration, which says what to mend
        except Exception as error:
            broken = f"the oracle of {self.system.name} cannot be captured: {error}{replaced_functions('; ')}"
            raise HarnessError(broken) from error

    def _oracle_graph(self, oracle: Subject) -> Graph:
        try:
            return self.backend.capture(oracle.in_graph, pool=self.pools[0])
        except CaptureError as error:
            if not getattr(oracle, "may_run_eagerly", False):
                raise
            return EagerWork(oracle.in_graph, str(error))

    def _captured_subject(
        self, layout: Layout, factory: SubjectFactory, inputs: Inputs, buffers: Buffers
    ) -> tuple[Subject, Graph]:
        bucket, state, stages = layout.bucket, TorchState.now(), self.stages
        stages.enter(stage := progress.CONSTRUCT, bucket)
        try:
            subject = make_subject(factory)
            stages.back(stage, bucket, state)
            stages.enter(stage := progress.ALLOCATE, bucket)
            subject.allocate(self.geometry, inputs, buffers)
            stages.back(stage, bucket, state)
            _check_outputs(subject, buffers, layout)
            stages.enter(stage := progress.WARM_UP, bucket)
            # Engines warm up before they capture: kernels compile and caches fill outside the graph.
            for prepares in (True, self.geometry.warm_ups == "refreshed"):
                if prepares:
                    subject.before_replay()
                subject.in_graph()
            stages.back(stage, bucket, state)
            stages.enter(stage := progress.CAPTURE, bucket)
            graph = self.backend.capture(subject.in_graph, pool=self.pools[1])
            stages.back(stage, bucket, state)
            _check_outputs(subject, buffers, layout)
            stages.slots[progress.STAGE] = progress.OURS
            return subject, graph
        except (Exception, SystemExit) as error:
            state.put_back()
            stages.fail(error, stage, bucket)

    def _shown(self, sides: Sides, memory: Mapping[str, Region]) -> Shown:
        layout, outputs = sides.layout, sides.outputs
        forms = {
            **normalisers(layout, outputs, sides.oracle_buffers),
            **normalised_pad_rows(self.form, layout, outputs, sides.oracle_buffers, sides.oracle_inputs, sides.control),
        }
        waived = [
            WaiverMask(
                waiver,
                memory[waiver.field],
                outputs[waiver.field],
                forms[waiver.field].copy if waiver.field in forms else None,
                at_capture=sides.frozen[waiver.field],
                whole=layout[waiver.field].compare is Compare.ITEMS,
                round_index=self.input_buffers.round_index,
            )
            for waiver in sides.waivers
            if waiver.field in memory
        ]
        return Shown(forms=forms, waived=tuple(waived))

    def _judges(self, sides: Sides, fields: list[Region], around: list[Region], laws: LawWatch) -> Judges:
        own_inputs = input_regions(sides.inputs, sides.oracle_inputs)
        # Rows of wider buckets are as little this one's to write as its own.
        all_inputs = input_regions(*self.input_buffers.inputs(self.input_buffers.widest))
        changing = [region for region in all_inputs if region.name not in _CONSTANT_INPUTS]
        filling = [region for region in own_inputs if region.name not in _CONSTANT_INPUTS]
        ready = self._ready_names(sides.subject, sides.layout.bucket)

        def over(regions: list[Region]) -> Judge:
            return Judge(regions, self.backend.device, self.input_buffers.round_index)

        return Judges(
            replay=over([*fields, *around, *changing, *guard_regions(self.oracle_arena.guards, Kind.ORACLE_GUARD)]),
            private=over(private_fields(sides.layout, fields)),
            constants=over([region for region in all_inputs if region.name in _CONSTANT_INPUTS]),
            ready=over([region for region in fields if region.name in ready]),
            filled=over(filling if self.record else []),
            laws=over(laws.regions()),
        )

    def _ready_names(self, subject: Subject, bucket: int) -> tuple[str, ...]:
        """Return the fields that `subject` says are ready before the graph replays."""
        names = getattr(subject, "ready_before_graph", ())
        fields = [field.name for field in self.system.layout(self.geometry, bucket)]
        unknown = [names] if isinstance(names, str) else [name for name in names if name not in fields]
        if unknown:
            message = f"ready_before_graph: {unknown[0]!r} is no field; it is a tuple of names of {', '.join(fields)}"
            raise SubjectError("allocate", bucket, message, kind="wrong outputs")
        return tuple(names)

    def _captured(
        self, sides: Sides, shown: Shown, judges: Judges, laws: LawWatch, poison: Poison, memory: list[Region]
    ) -> CapturedBucket:
        """Return the bucket with what the harness launches in it, captured in the order in which it is listed."""
        bucket, input_buffers, graphs = sides.layout.bucket, self.input_buffers, self.graphs

        def prepare() -> None:
            input_buffers.step(bucket)
            poison.launch()
            shown.remember()

        def look(judge: Judge, phase: Phase) -> None:
            shown.update(phase)
            judge.launch(phase)

        def look_at_laws() -> None:
            laws.update()
            judges.laws.launch(Phase.REPLAY)

        righted = shown.righted
        return CapturedBucket(
            **{field.name: getattr(sides, field.name) for field in dataclasses.fields(sides)},
            prepare=graphs.of(prepare),
            judge_replay=graphs.of_phases(functools.partial(look, judges.replay)),
            judge_private=graphs.of(functools.partial(look, judges.private, Phase.BEFORE)),
            judge_constants=graphs.if_any(judges.constants, functools.partial(judges.constants.launch, Phase.REPLAY)),
            judge_ready=graphs.if_any(judges.ready, functools.partial(look, judges.ready, Phase.BEFORE_GRAPH)),
            judge_filled=graphs.if_any(judges.filled, functools.partial(judges.filled.launch, Phase.FILLED)),
            judge_laws=graphs.if_any(judges.laws, look_at_laws),
            judges=judges,
            shown=shown,
            laws=laws,
            fields={region.name: region for region in memory if region.name not in righted},
            routed=sides.subject if isinstance(sides.subject, Routed) else None,
        )


def _check_outputs(subject: Subject, buffers: Buffers, layout: Layout) -> None:
    wrong = wrong_outputs(layout, current_outputs(subject, buffers))
    if wrong:
        raise SubjectError("allocate", layout.bucket, "; ".join(wrong), kind="wrong outputs")
