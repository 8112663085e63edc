"""Replayer: captures every bucket of a run and replays rounds over them, subject beside oracle, judge after both.

One direction: inputs, poison, oracle, subject, judge. Nothing is read back from the device while rounds run; the
caller polls. What the subject does wrong before any bit could be compared (it raises, synchronises in capture,
returns the wrong tensors, keeps allocations) is a `SubjectFault`, not a traceback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Final

import torch

from dsa_verify.base.errors import (
    CaptureError,
    DeviceLost,
    DsaVerifyError,
    HarnessError,
    NothingVerified,
    ReplayError,
    UsageError,
)
from dsa_verify.base.out_of_memory import memory_told_apart
from dsa_verify.base.torch_functions import replaced_functions
from dsa_verify.base.torch_state import TorchState
from dsa_verify.buffers.arena import Arena, Identity
from dsa_verify.buffers.input_buffers import Feed
from dsa_verify.buffers.poison import Poison
from dsa_verify.buffers.region import (
    LOUD_WORD,
    Control,
    Kind,
    Region,
    as_words,
    beyond_regions,
    field_regions,
    guard_regions,
    input_regions,
    private_fields,
)
from dsa_verify.contract import progress
from dsa_verify.contract.engine_form import CONTRACT_FORM, OwnForm
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.glue_route import Route, route
from dsa_verify.contract.layout import Compare, Layout, Row
from dsa_verify.contract.round_table import RoundTable
from dsa_verify.contract.subject import Buffers, Inputs, Routed, Subject, SubjectFactory, current_outputs, make_subject
from dsa_verify.graphs import Backend, Graph
from dsa_verify.graphs.capturing import CAPTURE_ERROR_MODE, no_collection
from dsa_verify.judge.judge import RING_ENTRIES, Judge, Phase, Tally
from dsa_verify.judge.law_regions import LawWatch
from dsa_verify.judge.normalise import CanonicalClose, CanonicalItems, canonical
from dsa_verify.judge.output_check import wrong_outputs
from dsa_verify.judge.pad_rows import OwnRows, own_rows
from dsa_verify.replay import compilations
from dsa_verify.replay.allocations import Allocations
from dsa_verify.replay.first_replay import FirstReplay
from dsa_verify.systems.system import System
from dsa_verify.waivers.mask import WaivedWords
from dsa_verify.waivers.waivers import Waiver

ORACLE_WORD: Final = -0x4D4D4D4E  # int32 of 0xB2B2B2B2: what the oracle has not written is no poison of the subject
# The first call of before_replay may make its constants lazily (contract 3.7); a later one must keep nothing.
WATCHED_ROUNDS: Final = range(1, 4)
# Rounds of a bucket whose schedules are held against the laws: all of the scripted ones, then one in so many. A check
# is a hundred small kernels, more than the rest of a round.
LAW_ROUNDS, LAW_EVERY = 17, 16
_CONSTANT_INPUTS: Final = ("full_to_swa",)
_STICKY: Final = ("illegal memory access", "misaligned address", "device-side assert", "unspecified launch failure")


class SubjectFault(DsaVerifyError):
    """The subject failed at `stage` (allocate, warm-up, capture, before_replay, replay) of `bucket`, or in one of many
    rounds (stage `rounds`), whose bucket is not known (None)."""

    status = 1

    def __init__(self, stage: str, bucket: int | None, message: str, *, kind: str, round_: int | None = None):
        super().__init__(message)
        self.stage, self.bucket, self.kind, self.round = stage, bucket, kind, round_


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AddressChange:
    """An output is no longer where (or what) it was when the graph captured it."""

    bucket: int
    field: str
    round: int
    change: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrongRoute:
    """A replay was prepared in another way than contract 7.4 has for its raw batch."""

    bucket: int
    round: int
    raw: int
    taken: Route
    expected: Route


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Lane:
    """Everything of one bucket that a round touches."""

    bucket: int
    layout: Layout
    subject: Subject
    oracle: Subject
    inputs: Inputs
    buffers: Buffers
    oracle_buffers: Buffers
    control: Control
    subject_graph: Graph
    oracle_graph: Graph
    prepare: Callable[[], None]
    judge: Callable[[Phase], None]
    judge_private: Callable[[], None]
    judge_constants: Callable[[], None] | None
    judge_ready: Callable[[], None] | None
    judge_filled: Callable[[], None] | None
    judge_laws: Callable[[], None] | None
    update_shown: Callable[[Phase], None]
    laws: LawWatch
    waived: tuple[WaivedWords, ...]
    routed: Routed | None
    judges: tuple[Judge, ...]
    filled: Judge
    fields: dict[str, Region]  # as they lie in memory, without those that a waiver covers words of
    shown: dict[str, CanonicalItems | CanonicalClose | OwnRows]
    ledger: dict[str, Identity]
    at_capture: dict[str, torch.Tensor]
    first_replay: FirstReplay | None = None
    disturbed: bool = False  # whether its own fields have been prepared for other inputs since its last round
    rounds: int = 0


class Replayer:
    """Captures `buckets` on construction; `run` replays a table of rounds, `poll` says what was seen so far.

    `capacity`: rounds of one table at most. `remap_slots`: remapped requests of one round at most. `record`: keep
    what the oracle gave for the capture-time inputs, which the diagnosis compares with, judge the inputs before the
    subject could touch them, and hold a second replay against the first, not against the oracle. `forget`: inputs
    whose pad tails are not reset. `leave_out`: fields that are not compared.
    `form`: what the subject has otherwise than the contract, and rightly so.
    `waivers`: known differences, which the judge does not see.
    """

    def __init__(
        self,
        system: System,
        geometry: Geometry,
        buckets: tuple[int, ...],
        factory: SubjectFactory,
        backend: Backend,
        *,
        capacity: int,
        remap_slots: int,
        record: bool = False,
        forget: Collection[str] = (),
        leave_out: Collection[str] = (),
        form: OwnForm = CONTRACT_FORM,
        waivers: Collection[Waiver] = (),
    ):
        if backend.device.type == "cuda":
            gc.collect()  # what an earlier run left in reference cycles would take memory beside this one
        self._record, self._waivers, self._form = record, waivers, form
        self.system, self.geometry, self.backend = system, geometry, backend
        self.device = backend.device
        self._slots, self._is_original = progress.current().slots, progress.mark_process()
        self.address_changes: list[AddressChange] = []
        self.wrong_routes: list[WrongRoute] = []
        self.rounds_run = 0
        self._round_number, self._bucket = 0, max(buckets)  # of the round in progress, or of the last one
        self._last: Lane | None = None
        # A graph holds bare addresses: what its body refers to must live as long as the graph.
        self._captured: list[Callable[[], None]] = []
        # Largest first, as engines capture, so that a shared pool fits the later ones.
        order = sorted(buckets, reverse=True)
        self.feed = Feed(
            system.name,
            geometry,
            order[0],
            self.device,
            capacity=capacity,
            remap_slots=remap_slots,
            forget=forget,
        )
        layouts = [without_pools(system.layout(geometry, bucket), leave_out) for bucket in order]
        self.arena = Arena(layouts, self.device, LOUD_WORD)
        self.oracle_arena = Arena([layout.for_oracle() for layout in layouts], self.device, ORACLE_WORD)
        # The oracle shares neither pool nor stream with what it judges.
        self._pools = (backend.new_pool(), backend.new_pool())
        cuda = self.device.type == "cuda"
        self._oracle_stream = torch.cuda.Stream(self.device) if cuda else None
        # The harness's graphs run one after another and leave nothing in their temporaries, so all share one pool.
        self._harness_pool = torch.cuda.graph_pool_handle() if cuda else None
        self._compilations = compilations.count_compilations()
        self.lanes: dict[int, Lane] = {}
        for layout in layouts:
            self.lanes[layout.bucket] = self._open_lane(form.layout(layout.without(leave_out)), factory)
        for lane in self.lanes.values():
            lane.ledger = self._identities(lane)
        # While rounds ran; what explains a finding compiles kernels of its own.
        self.compilations: list[compilations.Compilation] = []

    def run(
        self,
        table: RoundTable,
        *,
        after_round: Callable[[Lane, int], bool] | None = None,
        after_first: Callable[[Lane, int], None] | None = None,
    ) -> None:
        """Replay every round of `table`; stops early when `after_round(lane, row)` returns True. `after_first` is
        called where a round is replayed twice, when the buffers hold what the first replay left."""
        self.feed.upload(table)
        progress.current().chunk(table, self.rounds_run)
        columns = (table.bucket, table.raw, table.twice, table.foreign)
        rounds = zip(*(column.tolist() for column in columns), strict=True)
        before, state = self._compilations(), TorchState.now()
        try:
            with memory_told_apart(), self._state_kept(state), compilations.in_rounds(self._where):
                for i, (bucket, raw, twice, foreign) in enumerate(rounds):
                    between = None if after_first is None else functools.partial(after_first, self.lanes[bucket], i)
                    before_it = functools.partial(self._other_work, self.lanes[bucket], table, i) if foreign else None
                    self._round(self.lanes[bucket], raw, bool(twice), between, before_it)
                    if after_round is not None and after_round(self.lanes[bucket], i):
                        return
            self._refuse_copies()
        finally:
            self.compilations += compilations.since(before)

    def _where(self) -> tuple[int, int]:
        """The round in progress, and its bucket."""
        return self._round_number, self._bucket

    @contextlib.contextmanager
    def _state_kept(self, state: TorchState) -> Iterator[None]:
        """SubjectFault if `state` does not hold after many rounds, also if it was the harness that failed of it."""
        first = self.rounds_run
        try:
            yield
        except (SubjectFault, DeviceLost):
            state.put_back()
            raise
        except Exception as error:
            self._refuse_change(state, f"one of rounds {first} to {self.rounds_run}", "rounds", None, error)
            raise
        self._refuse_change(state, f"one of rounds {first} to {self.rounds_run - 1}", "rounds", None)

    def _refuse_change(
        self, state: TorchState, who: str, stage: str, bucket: int | None, cause: Exception | None = None
    ) -> None:
        changed = state.put_back()
        if changed:
            message = f"{who} changed the {changed}, for the whole process; put it back before returning"
            kind = "changes torch's state"
            raise SubjectFault(stage, bucket, message, kind=kind, round_=self._round_number) from cause

    def finish(self) -> None:
        """Judge once more what every bucket but the last still holds: its outputs must live through the run. Of the
        last, judge what a round leaves for later."""
        self._judge_constants()
        for lane in self.lanes.values():
            if lane is not self._last and lane.rounds and not lane.disturbed:
                lane.judge_private()

    def poll(self) -> dict[int, Tally]:
        """What the judges have seen, by bucket; synchronises."""
        self._slots[progress.STAGE] = progress.DEVICE
        with _device_errors():
            tallies = {}
            for lane in self.lanes.values():
                seen = [judge.poll() for judge in lane.judges]
                differing: Counter[Region] = Counter()
                for tally in seen:
                    differing.update(tally.differing)
                first = [difference for tally in seen for difference in tally.first]
                first.sort(key=lambda difference: (difference.round, difference.phase))
                tallies[lane.bucket] = Tally(compared=seen[0].compared, differing=differing, first=tuple(first))
                self._check_identities(lane, self._round_number)
        self._slots[progress.STAGE] = progress.OURS
        return tallies

    def to_explain(self) -> list[tuple[int, int, WaivedWords]]:
        """(first round, bucket, words) where a waiver has covered words of which it is not known yet whether they are
        what it is for, earliest first; synchronises."""
        found = []
        with _device_errors():
            for bucket, lane in self.lanes.items():
                for words in lane.waived:
                    first = -1 if words.explained or not words.waiver.sampled else words.seen().first_round
                    if first >= 0:
                        found.append((first, bucket, words))
        return sorted(found, key=lambda each: each[0])

    # One round -------------------------------------------------------------------------------------------------

    def _round(
        self,
        lane: Lane,
        raw: int,
        twice: bool,
        between: Callable[[], None] | None,
        before_it: Callable[[], None] | None,
    ) -> None:
        self._round_number = self._slots[progress.ROUND] = self.rounds_run
        self._slots[progress.BEATS] += 1
        self._bucket = lane.bucket
        with _device_errors():
            if self._last is not lane:
                self._judge_constants()
                if lane.rounds and not lane.disturbed:
                    lane.judge_private()
            if before_it is not None:
                before_it()
            lane.prepare()
            if lane.judge_filled is not None:
                lane.judge_filled()
            self._replay_oracle(lane)
            self._replay_subject(lane, raw)
            lane.judge(Phase.REPLAY)
            if lane.judge_laws is not None and self._law_is_due(lane):
                lane.judge_laws()
            if twice:
                self._replay_again(lane, raw, between)
        self._slots[progress.STAGE] = progress.OUTPUTS
        self._check_pointers(lane)
        self._slots[progress.STAGE] = progress.OURS
        lane.rounds += 1
        lane.disturbed = False
        self.rounds_run += 1
        self._last = lane
        if self._record:
            self._judge_constants()

    def _other_work(self, lane: Lane, table: RoundTable, row: int) -> None:
        """What a server does besides before it replays `lane`: the eager preparation of another batch, then whatever
        the subject declares."""
        other = self._prepared_again(lane, table, row)
        state, stage, bucket = TorchState.now(), progress.BEFORE_REPLAY, lane.bucket
        try:
            if other is not None:
                if other.rounds and not other.disturbed:
                    other.judge_private()
                bucket, other.disturbed = other.bucket, True
                self._enter(stage, bucket)
                other.subject.before_replay()
                self._back(stage, bucket, state)
            work = getattr(lane.subject, "foreign_work", None)
            if work is not None:
                self._enter(stage := progress.FOREIGN, bucket := lane.bucket)
                work()
                self._back(stage, bucket, state)
        except (Exception, SystemExit) as error:
            state.put_back()
            self._raise_fault(error, stage, bucket)
        self._slots[progress.STAGE] = progress.OURS

    def _prepared_again(self, lane: Lane, table: RoundTable, row: int) -> Lane | None:
        """The bucket whose eager work may be done once more on the inputs that the last round left: the one that was
        replayed then, or else the next narrower one, whose requests are the first of them."""
        if self._last is None or not row:
            return None
        other: Lane | None = self._last
        if other is lane:
            narrower = [each for bucket, each in self.lanes.items() if bucket < lane.bucket]  # widest first
            other = narrower[0] if narrower else None
            if other is not None and not table.seq_lens[row - 1, : other.bucket].any():
                return None  # a schedule over nothing but empty requests may be undefined (contract 3.6)
        return None if other is None or other.routed is not None else other

    def _replay_again(self, lane: Lane, raw: int, between: Callable[[], None] | None) -> None:
        if between is not None:
            between()
        if not self._record:
            self._replay_subject(lane, raw)
            lane.judge(Phase.SECOND_REPLAY)
            return
        if lane.first_replay is None:
            judge = lane.judges[0]
            lane.first_replay = FirstReplay(judge.regions, lane.waived, self.device, self.feed.round_index)
            lane.judges += (lane.first_replay.judge,)
        lane.first_replay.keep()
        self._replay_subject(lane, raw)
        lane.update_shown(Phase.SECOND_REPLAY)
        lane.first_replay.compare()

    def _judge_constants(self) -> None:
        """What the rounds of the last bucket did to inputs that no round writes: too much to look at in each."""
        if self._last is not None and self._last.judge_constants is not None:
            self._last.judge_constants()

    def _law_is_due(self, lane: Lane) -> bool:
        return self._record or lane.rounds < LAW_ROUNDS or lane.rounds % LAW_EVERY == 0

    def _replay_oracle(self, lane: Lane) -> None:
        try:
            self._replay_beside(lane.oracle_graph)
        except ReplayError as error:
            broken = f"the oracle of {self.system.name} cannot be replayed: {error}{replaced_functions('; ')}"
            raise HarnessError(broken) from error

    def _replay_beside(self, graph: Graph) -> None:
        """Replay on the oracle's own stream, between what came before and what comes after on the current one."""
        if self._oracle_stream is None:
            graph.replay()
            return
        self._oracle_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._oracle_stream):
            graph.replay()
        torch.cuda.current_stream(self.device).wait_stream(self._oracle_stream)

    def _replay_subject(self, lane: Lane, raw: int) -> None:
        state = TorchState.now() if self._record or lane.rounds < WATCHED_ROUNDS.stop else None
        slots = self._slots
        slots[progress.STAGE], slots[progress.BUCKET] = stage, bucket = progress.BEFORE_REPLAY, lane.bucket
        try:
            work = self._routed(lane, raw)
            if lane.rounds in WATCHED_ROUNDS:
                with Allocations() as watch:
                    lane.subject.before_replay()
                self._refuse_kept(watch, lane)
            else:
                lane.subject.before_replay()
            self._back(stage, bucket, state)
            if lane.judge_ready is not None:
                lane.judge_ready()
            slots[progress.STAGE] = stage = progress.REPLAY
            work()
            self._back(stage, bucket, state)
        except (Exception, SystemExit) as error:
            self._raise_fault(error, stage, bucket)
        slots[progress.STAGE] = progress.OURS

    def _routed(self, lane: Lane, raw: int) -> Callable[[], None]:
        """The graph's replay, or the same work done eagerly where the subject takes that route."""
        subject = lane.routed
        if subject is None:
            return lane.subject_graph.replay
        taken = subject.route(raw)
        expected = route(subject.release, subject.glue_conditions(raw))
        if taken is not expected and len(self.wrong_routes) < RING_ENTRIES:
            wrong = WrongRoute(bucket=lane.bucket, round=self.rounds_run, raw=raw, taken=taken, expected=expected)
            self.wrong_routes.append(wrong)
        return lane.subject_graph.replay if taken is Route.GLUE else subject.in_graph

    def _refuse_kept(self, watch: Allocations, lane: Lane) -> None:
        kept = watch.kept()
        if kept:
            name, size = kept[0]
            message = (
                f"before_replay keeps {len(kept)} new allocation(s), the first {size} bytes made by {name}; "
                "write into the captured buffer instead"
            )
            kind = "allocates in replay"
            raise SubjectFault("before_replay", lane.bucket, message, kind=kind, round_=self.rounds_run)

    def _check_pointers(self, lane: Lane) -> None:
        """The cheap half of the ledger, every round; `poll` does the rest."""
        outputs = current_outputs(lane.subject, lane.buffers)
        for name, identity in lane.ledger.items():
            tensor = outputs.get(name)
            if tensor is None or tensor.data_ptr() != identity.pointer:
                self._check_identities(lane, self.rounds_run)
                return

    def _check_identities(self, lane: Lane, round_: int) -> None:
        now = self._identities(lane)
        seen = {(change.bucket, change.field) for change in self.address_changes}
        for name, identity in lane.ledger.items():
            change = identity.change_to(now[name]) if name in now else "the output is gone"
            if change and (lane.bucket, name) not in seen:
                self.address_changes.append(AddressChange(bucket=lane.bucket, field=name, round=round_, change=change))

    # Opening a bucket --------------------------------------------------------------------------------------------

    def _open_lane(self, layout: Layout, factory: SubjectFactory) -> Lane:
        bucket, feed = layout.bucket, self.feed
        subject_inputs, oracle_inputs = feed.inputs(bucket)
        control, poison_kind = feed.control(bucket)
        buffers, oracle_buffers = self.arena.at(bucket), self.oracle_arena.at(bucket)
        oracle_graph, oracle = self._open_oracle(oracle_inputs, oracle_buffers)
        at_capture = host_copy(oracle_buffers) if self._record else {}
        waivers = [each for each in self._waivers if each.covers(self.geometry, bucket) and each.field in layout]
        frozen = {waiver.field: as_words(oracle_buffers[waiver.field]).clone() for waiver in waivers}
        subject, subject_graph = self._open_subject(layout, factory, subject_inputs, buffers)
        outputs = current_outputs(subject, buffers)
        raw = field_regions(layout, outputs, oracle_buffers, control)
        items: dict[str, CanonicalItems | CanonicalClose | OwnRows] = {
            **canonical(layout, outputs, oracle_buffers),
            **own_rows(self._form, layout, outputs, oracle_buffers, oracle_inputs, control),
        }
        regions = {region.name: region for region in raw}
        copies = {name: item.copy for name, item in items.items()}
        waived = [
            WaivedWords(
                waiver,
                regions[waiver.field],
                outputs[waiver.field],
                copies.get(waiver.field),
                at_capture=frozen[waiver.field],
                whole=layout[waiver.field].compare is Compare.ITEMS,
                round_index=feed.round_index,
            )
            for waiver in waivers
            if waiver.field in regions
        ]
        righted = {words.waiver.field: words.copy for words in waived}
        copies |= righted
        fields = field_regions(layout, {**outputs, **copies}, oracle_buffers, control)
        subject_regions = [
            *guard_regions(self.arena, Kind.GUARD),
            *guard_regions(feed, Kind.GUARD),
            *beyond_regions(self.arena, bucket),
        ]
        own_inputs = input_regions(subject_inputs, oracle_inputs)
        # Rows of wider buckets are as little this one's to write as its own.
        all_inputs = input_regions(*feed.inputs(feed.widest))
        constants = [region for region in all_inputs if region.name in _CONSTANT_INPUTS]
        changing = [region for region in all_inputs if region.name not in _CONSTANT_INPUTS]
        filling = [region for region in own_inputs if region.name not in _CONSTANT_INPUTS]
        laws = LawWatch(layout, {**outputs, **righted}, oracle_buffers)
        ready_names = self._ready_names(subject, bucket)
        judge, private, constant, ready, filled, lawful = (
            Judge(regions, self.device, feed.round_index)
            for regions in (
                [*fields, *subject_regions, *changing, *guard_regions(self.oracle_arena, Kind.ORACLE_GUARD)],
                private_fields(layout, fields),
                constants,
                [region for region in fields if region.name in ready_names],
                filling if self._record else [],
                laws.regions(),
            )
        )
        poison = Poison([*raw, *subject_regions], self.device, feed.round_index, poison_kind)

        def prepare() -> None:
            feed.step(bucket)
            poison.launch()
            for words in waived:
                words.remember()

        def update_shown(phase: Phase) -> None:
            for item in items.values():
                item.update()
            for words in waived:
                words.update(phase)

        def look(judge: Judge, phase: Phase) -> None:
            update_shown(phase)
            judge.launch(phase)

        def look_at_laws() -> None:
            laws.update()
            lawful.launch(Phase.REPLAY)

        def if_any(judge: Judge, body: Callable[[], None]) -> Callable[[], None] | None:
            return self._harness_graph(body) if judge.regions else None

        lane = Lane(
            bucket=bucket,
            layout=layout,
            subject=subject,
            oracle=oracle,
            inputs=subject_inputs,
            buffers=buffers,
            oracle_buffers=oracle_buffers,
            control=control,
            subject_graph=subject_graph,
            oracle_graph=oracle_graph,
            prepare=self._harness_graph(prepare),
            judge=self._judge_graphs(functools.partial(look, judge)),
            judge_private=self._harness_graph(lambda: look(private, Phase.BEFORE)),
            judge_constants=if_any(constant, lambda: constant.launch(Phase.REPLAY)),
            judge_ready=if_any(ready, lambda: look(ready, Phase.BEFORE_GRAPH)),
            judge_filled=if_any(filled, lambda: filled.launch(Phase.FILLED)),
            judge_laws=if_any(lawful, look_at_laws),
            update_shown=update_shown,
            laws=laws,
            waived=tuple(waived),
            routed=subject if isinstance(subject, Routed) else None,
            judges=(judge, private, constant, ready, filled, lawful),
            filled=filled,
            fields={name: region for name, region in regions.items() if name not in righted},
            shown=items,
            ledger={},
            at_capture=at_capture,
        )
        # Making the harness's graphs ran them once: back to the inputs and counters of a fresh start.
        self.feed.reset()
        for each in lane.judges:
            each.reset()
        for words in lane.waived:
            words.reset()
        return lane

    def _open_oracle(self, inputs: Inputs, buffers: Buffers) -> tuple[Graph, Subject]:
        oracle = self.system.make_oracle()
        try:
            oracle.allocate(self.geometry, inputs, buffers)
            oracle.in_graph()
            return self.backend.capture(oracle.in_graph, pool=self._pools[0]), oracle
        except Exception as error:
            broken = f"the oracle of {self.system.name} cannot be captured: {error}{replaced_functions('; ')}"
            raise HarnessError(broken) from error

    def _open_subject(
        self, layout: Layout, factory: SubjectFactory, inputs: Inputs, buffers: Buffers
    ) -> tuple[Subject, Graph]:
        bucket, state = layout.bucket, TorchState.now()
        self._enter(stage := progress.CONSTRUCT, bucket)
        try:
            subject = make_subject(factory)
            self._back(stage, bucket, state)
            self._enter(stage := progress.ALLOCATE, bucket)
            subject.allocate(self.geometry, inputs, buffers)
            self._back(stage, bucket, state)
            self._check_outputs(subject, buffers, layout)
            self._enter(stage := progress.WARM_UP, bucket)
            # Engines warm up before they capture: kernels compile and caches fill outside the graph.
            for prepares in (True, self.geometry.warm_ups == "refreshed"):
                if prepares:
                    subject.before_replay()
                subject.in_graph()
            self._back(stage, bucket, state)
            self._enter(stage := progress.CAPTURE, bucket)
            graph = self.backend.capture(subject.in_graph, pool=self._pools[1])
            self._back(stage, bucket, state)
            self._check_outputs(subject, buffers, layout)
            self._slots[progress.STAGE] = progress.OURS
            return subject, graph
        except (Exception, SystemExit) as error:
            state.put_back()
            self._raise_fault(error, stage, bucket)
            raise AssertionError from error  # _raise_fault always raises

    # What is noted while code of the subject runs ------------------------------------------------------------------

    def _enter(self, stage: int, bucket: int) -> None:
        self._slots[progress.STAGE], self._slots[progress.BUCKET] = stage, bucket

    def _back(self, stage: int, bucket: int, state: TorchState | None) -> None:
        """The subject has come back from `stage`, whose torch was as `state` before, where that was looked at."""
        self._end_if_copy(stage, bucket)
        if state is not None:
            self._refuse_change(state, progress.STAGES[stage], progress.STAGES[stage], bucket)

    def _end_if_copy(self, stage: int, bucket: int) -> None:
        """A copy of the process that the subject has made, and that came back, ends here."""
        if not self._is_original[0]:
            progress.current().end_copy(stage, bucket, self._slots[progress.ROUND])

    def _refuse_copies(self) -> None:
        slots = self._slots
        self._end_if_copy(slots[progress.STAGE], slots[progress.BUCKET])
        if slots[progress.COPIES]:
            slots[progress.COPIES] = 0
            stage, bucket, round_ = (
                slots[slot] for slot in (progress.COPY_STAGE, progress.COPY_BUCKET, progress.COPY_ROUND)
            )
            message = progress.copy_sentence(stage, round_)
            raise SubjectFault(progress.STAGES[stage], bucket, message, kind="forks", round_=max(round_, 0))

    def _check_outputs(self, subject: Subject, buffers: Buffers, layout: Layout) -> None:
        wrong = wrong_outputs(layout, current_outputs(subject, buffers))
        if wrong:
            raise SubjectFault("allocate", layout.bucket, "; ".join(wrong), kind="wrong outputs")

    def _ready_names(self, subject: Subject, bucket: int) -> tuple[str, ...]:
        """The fields that `subject` says are ready before the graph replays."""
        names = getattr(subject, "ready_before_graph", ())
        fields = [field.name for field in self.system.layout(self.geometry, bucket)]
        unknown = [names] if isinstance(names, str) else [name for name in names if name not in fields]
        if unknown:
            message = f"ready_before_graph: {unknown[0]!r} is no field; it is a tuple of names of {', '.join(fields)}"
            raise SubjectFault("allocate", bucket, message, kind="wrong outputs")
        return tuple(names)

    def _identities(self, lane: Lane) -> dict[str, Identity]:
        outputs = current_outputs(lane.subject, lane.buffers)
        return {field.name: Identity.of(outputs[field.name]) for field in lane.layout if field.name in outputs}

    def _raise_fault(self, error: Exception | SystemExit, number: int, bucket: int) -> None:
        self._end_if_copy(number, bucket)
        self._slots[progress.STAGE], stage = progress.OURS, progress.STAGES[number]
        if isinstance(error, (SubjectFault, DeviceLost, UsageError, NothingVerified)):
            raise error
        raise_if_lost(error)
        if isinstance(error, CaptureError):
            doing = f" while doing {error.operation}" if error.operation else ""
            kind = "raises in capture" if error.operation is None else "synchronises in capture"
            raise SubjectFault(stage, bucket, f"in_graph cannot be captured{doing}: {error}", kind=kind) from error
        message = f"{stage} raised {type(error).__name__}: {error}{_place_of(error)}"
        raise SubjectFault(stage, bucket, message, kind=f"raises in {stage}", round_=self.rounds_run) from error

    # The harness's own launches ----------------------------------------------------------------------------------

    def _harness_graph(self, body: Callable[[], None]) -> Callable[[], None]:
        """`body` as a graph on a CUDA device, where launching it piece by piece would cost more than the round."""
        if self.device.type != "cuda":
            return body
        body()  # compile outside the capture; the caller undoes what this wrote
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        mode = CAPTURE_ERROR_MODE
        with no_collection(), torch.cuda.graph(graph, pool=self._harness_pool, capture_error_mode=mode):
            body()
        self._captured.append(body)
        return graph.replay

    def _judge_graphs(self, look: Callable[[Phase], None]) -> Callable[[Phase], None]:
        if self.device.type != "cuda":
            return look
        graphs = {
            phase: self._harness_graph(functools.partial(look, phase)) for phase in (Phase.REPLAY, Phase.SECOND_REPLAY)
        }
        return lambda phase: graphs[phase]()


def without_pools(layout: Layout, leave_out: Collection[str]) -> Layout:
    """`layout` without the pools that are not compared: they are as large as ids of slots are high, and nothing else
    follows from them."""
    return layout.without([field.name for field in layout if field.row is Row.SLOT and field.name in leave_out])


def _place_of(error: BaseException) -> str:
    """Where in code that is nobody's library, and not this harness, the error was raised; empty if nowhere."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if "site-packages" not in each.filename and each.filename != __file__]
    return f" ({own[-1].name}, {own[-1].filename}:{own[-1].lineno})" if own else ""


@contextlib.contextmanager
def _device_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise_if_lost(error)
        raise


def host_copy(buffers: Buffers) -> dict[str, torch.Tensor]:
    """The tensors of `buffers` on the CPU as they are now, float32 as the int32 of its bits."""
    copies = {name: tensor.cpu().clone() for name, tensor in buffers.items()}
    return {name: copy.view(torch.int32) if copy.dtype is torch.float32 else copy for name, copy in copies.items()}


def raise_if_lost(error: BaseException) -> None:
    text = str(error)
    if any(sign in text for sign in _STICKY):
        raise DeviceLost(
            f"the device reported: {text.splitlines()[0]}; this process can verify nothing more"
        ) from error
