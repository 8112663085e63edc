"""Replayer: captures every bucket of a run and replays rounds over them, subject beside oracle, judge after both.

One direction: inputs, poison, oracle, subject, judge. Nothing is read back from the device while rounds run. What was
seen is told once a table of rounds is through (observation.py); what the subject does wrong before any bit could be
compared is a `SubjectError` (subject_stages.py). How a bucket is captured is told in capture.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Collection, Iterator
from typing import Final

import torch

from dsa_verify.base.device_lost import device_errors
from dsa_verify.base.errors import DeviceLost, HarnessError, ReplayError
from dsa_verify.base.out_of_memory import translate_out_of_memory
from dsa_verify.base.torch_functions import replaced_functions
from dsa_verify.base.torch_state import TorchState
from dsa_verify.buffers.arena import Arena
from dsa_verify.buffers.input_buffers import InputBuffers
from dsa_verify.buffers.region import LOUD_WORD
from dsa_verify.contract import progress
from dsa_verify.contract.engine_form import NO_DIFFERENCES, EngineForm
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.glue_route import Route, route
from dsa_verify.contract.layout import Layout, Row
from dsa_verify.contract.round_table import RoundTable
from dsa_verify.contract.subject import SubjectFactory
from dsa_verify.contract.system import System
from dsa_verify.graphs import Backend, Graph
from dsa_verify.judge.judge import RING_ENTRIES, Phase, Tally
from dsa_verify.replay import compilations
from dsa_verify.replay.allocations import Allocations
from dsa_verify.replay.bucket import AddressChange, CapturedBucket, WrongRoute
from dsa_verify.replay.capture import Capture, HarnessGraphs
from dsa_verify.replay.observation import BucketSeen, Observation
from dsa_verify.replay.subject_stages import SubjectError, SubjectStages
from dsa_verify.waivers.waivers import Waiver

ORACLE_WORD: Final = -0x4D4D4D4E  # int32 of 0xB2B2B2B2: what the oracle has not written is no poison of the subject
# The first call of before_replay may make its constants lazily (contract 3.7); a later one must keep nothing.
WATCHED_ROUNDS: Final = range(1, 4)
# Rounds of a bucket whose schedules are held against the laws: all of the scripted ones, then one in so many. A check
# is a hundred small kernels, more than the rest of a round.
LAW_ROUNDS, LAW_EVERY = 17, 16


class Replayer:
    """Captures `buckets` on construction; `run` replays a table of rounds and says what was seen.

    `capacity`: rounds of one table at most. `remap_slots`: remapped requests of one round at most. `record`: keep
    what the oracle gave for the capture-time inputs, which the diagnosis compares with, judge the inputs before the
    subject could touch them, and hold a second replay against the first, not against the oracle. `resettable`: keep
    a copy of all outputs and page tables, which `reset` needs. `skip_tail_reset`: inputs whose pad tails are not reset.
    `leave_out`: fields that are not compared. `form`: what the subject has otherwise than the contract, and rightly
    so. `waivers`: known differences, which the judge does not see. `on_launch`: told of each table before anything of
    it is launched.
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
        resettable: bool = False,
        skip_tail_reset: Collection[str] = (),
        leave_out: Collection[str] = (),
        form: EngineForm = NO_DIFFERENCES,
        waivers: Collection[Waiver] = (),
        on_launch: Callable[[RoundTable], None] = lambda table: None,
    ):
        cuda = backend.device.type == "cuda"
        if cuda:
            gc.collect()  # what an earlier run left in reference cycles would take memory beside this one
        self.system, self.geometry, self.device = system, geometry, backend.device
        self._record, self._on_launch = record, on_launch
        self._stages = SubjectStages(max(buckets))
        self._slots = self._stages.slots
        self.address_changes: list[AddressChange] = []
        self.wrong_routes: list[WrongRoute] = []
        self.rounds_run = 0
        self._last: CapturedBucket | None = None
        # Largest first, as engines capture, so that a shared pool fits the later ones.
        order = sorted(buckets, reverse=True)
        sizes = {"capacity": capacity, "remap_slots": remap_slots}
        self.input_buffers = InputBuffers(
            system, geometry, order[0], self.device, **sizes, skip_tail_reset=skip_tail_reset
        )
        layouts = [without_pools(system.layout(geometry, bucket), leave_out) for bucket in order]
        self.arena = Arena(layouts, self.device, LOUD_WORD)
        self.oracle_arena = Arena([layout.for_oracle() for layout in layouts], self.device, ORACLE_WORD)
        # The oracle shares neither pool nor stream with what it judges.
        pools = (backend.new_pool(), backend.new_pool())
        self._oracle_stream = torch.cuda.Stream(self.device) if cuda else None
        self._capture = Capture(
            system=system,
            geometry=geometry,
            backend=backend,
            input_buffers=self.input_buffers,
            arena=self.arena,
            oracle_arena=self.oracle_arena,
            pools=pools,
            graphs=HarnessGraphs(self.device),
            stages=self._stages,
            form=form,
            waivers=waivers,
            record=record,
        )
        self._compilations = compilations.count_compilations()
        self.buckets: dict[int, CapturedBucket] = {}
        for layout in layouts:
            self.buckets[layout.bucket] = self._capture.open(form.layout(layout.without(leave_out)), factory)
        for captured in self.buckets.values():
            captured.ledger = captured.identities()
        # While rounds ran; what explains a finding compiles kernels of its own.
        self.compilations: list[compilations.Compilation] = []
        self._saved = [(tensor, tensor.clone()) for tensor in self._owned()] if resettable else None

    def run(
        self, table: RoundTable, on_rounds: Callable[[int], None] = lambda count: None, *, one_by_one: bool = False
    ) -> Observation:
        """Replay every round of `table`, judge what the buckets still hold, and say what was seen so far; synchronises
        once. `on_rounds(n)` is told that n more rounds were launched, after each of them if `one_by_one`."""

        def tick(captured: CapturedBucket, row: int) -> bool:
            on_rounds(1)
            return False

        self.replay(table, after_round=tick if one_by_one else None)
        self.finish()
        if not one_by_one:
            on_rounds(len(table))
        return self.observe()

    def replay(
        self,
        table: RoundTable,
        *,
        after_round: Callable[[CapturedBucket, int], bool] | None = None,
        after_first: Callable[[CapturedBucket, int], None] | None = None,
    ) -> None:
        """Replay every round of `table`; stops early when `after_round(captured, row)` returns True. `after_first` is
        called where a round is replayed twice, when the buffers hold what the first replay left."""
        self._on_launch(table)
        self.input_buffers.upload(table)
        progress.current().chunk(table, self.rounds_run)
        columns = (table.bucket, table.raw, table.twice, table.foreign)
        rounds = zip(*(column.tolist() for column in columns), strict=True)
        before, state = self._compilations(), TorchState.now()
        try:
            with translate_out_of_memory(), self._state_kept(state), compilations.in_rounds(self._stages.where):
                for i, (bucket, raw, twice, foreign) in enumerate(rounds):
                    between = None if after_first is None else functools.partial(after_first, self.buckets[bucket], i)
                    before_it = functools.partial(self._other_work, self.buckets[bucket], table, i) if foreign else None
                    self._round(self.buckets[bucket], raw, bool(twice), between, before_it)
                    if after_round is not None and after_round(self.buckets[bucket], i):
                        return
            self._stages.refuse_copies()
        finally:
            self.compilations += compilations.since(before)

    def finish(self) -> None:
        """Judge once more what every bucket but the last still holds: its outputs must live through the run. Of the
        last, judge what a round leaves for later."""
        self._judge_constants()
        for captured in self.buckets.values():
            if captured is not self._last:
                captured.judge_private_if_due()

    def poll(self) -> dict[int, Tally]:
        """Return what the judges have seen, by bucket; synchronises."""
        self._slots[progress.STAGE] = progress.DEVICE
        with device_errors():
            tallies = {}
            for captured in self.buckets.values():
                tallies[captured.bucket] = captured.judges.tally()
                self._check_identities(captured, self._stages.round)
        self._slots[progress.STAGE] = progress.OURS
        return tallies

    def observe(self) -> Observation:
        """Return what was seen so far; synchronises."""
        tallies = self.poll()
        with device_errors():
            buckets = {
                bucket: BucketSeen(
                    rounds=captured.rounds,
                    fields=len(captured.judged_fields),
                    tally=tallies[bucket],
                    waived=tuple((words, words.seen()) for words in captured.waived),
                    occurred=captured.occurred(),
                    eager_oracle=getattr(captured.oracle_graph, "why", ""),
                )
                for bucket, captured in self.buckets.items()
            }
        return Observation(
            buckets=buckets,
            address_changes=tuple(self.address_changes),
            wrong_routes=tuple(self.wrong_routes),
            compilations=tuple(self.compilations),
        )

    def reset(self) -> None:
        """Put outputs, inputs, page tables and counters back to how capture left them, as if no round had run. What
        the subject owns stays as it is. Only of a replayer that is `resettable`."""
        if self._saved is None:
            raise HarnessError("this replayer cannot be reset; open it with resettable=True")
        for tensor, saved in self._saved:
            tensor.copy_(saved)
        self.input_buffers.reset()
        self.address_changes.clear()
        self.wrong_routes.clear()
        self.compilations.clear()
        self.rounds_run, self._last = 0, None
        for captured in self.buckets.values():
            captured.reset()

    def _owned(self) -> list[torch.Tensor]:
        """Return what rounds write and `reset` of the input buffers does not put back."""
        tables = [inputs.req_to_token for inputs in self.input_buffers.inputs(max(self.buckets))]
        return [self.arena.words, self.oracle_arena.words, *tables]

    @contextlib.contextmanager
    def _state_kept(self, state: TorchState) -> Iterator[None]:
        """Raise SubjectError if `state` does not hold after many rounds, even if the harness failed of it."""
        first = self.rounds_run
        try:
            yield
        except (SubjectError, DeviceLost):
            state.put_back()
            raise
        except Exception as error:
            self._stages.refuse_change(state, f"one of rounds {first} to {self.rounds_run}", "rounds", None, error)
            raise
        self._stages.refuse_change(state, f"one of rounds {first} to {self.rounds_run - 1}", "rounds", None)

    # One round -------------------------------------------------------------------------------------------------

    def _round(
        self,
        captured: CapturedBucket,
        raw: int,
        twice: bool,
        between: Callable[[], None] | None,
        before_it: Callable[[], None] | None,
    ) -> None:
        stages, slots = self._stages, self._slots
        stages.round = slots[progress.ROUND] = self.rounds_run
        slots[progress.BEATS] += 1
        stages.bucket = captured.bucket
        with device_errors():
            if self._last is not captured:
                self._judge_constants()
                captured.judge_private_if_due()
            if before_it is not None:
                before_it()
            captured.prepare()
            captured.judge_filled()
            self._replay_oracle(captured)
            self._replay_subject(captured, raw)
            captured.judge_replay(Phase.REPLAY)
            if captured.rounds < LAW_ROUNDS or captured.rounds % LAW_EVERY == 0 or self._record:
                captured.judge_laws()
            if twice:
                self._replay_again(captured, raw, between)
        slots[progress.STAGE] = progress.OUTPUTS
        if not captured.pointers_hold():
            self._check_identities(captured, self.rounds_run)
        slots[progress.STAGE] = progress.OURS
        captured.rounds += 1
        captured.disturbed = False
        self.rounds_run += 1
        self._last = captured
        if self._record:
            self._judge_constants()

    def _other_work(self, captured: CapturedBucket, table: RoundTable, row: int) -> None:
        """Do what a server does before it replays `captured`: prepare another batch, then what the subject declares."""
        other = self._prepared_again(captured, table, row)
        state, stage, bucket = TorchState.now(), progress.BEFORE_REPLAY, captured.bucket
        try:
            if other is not None:
                other.judge_private_if_due()
                bucket, other.disturbed = other.bucket, True
                self._stages.enter(stage, bucket)
                other.subject.before_replay()
                self._stages.back(stage, bucket, state)
            work = getattr(captured.subject, "foreign_work", None)
            if work is not None:
                self._stages.enter(stage := progress.FOREIGN, bucket := captured.bucket)
                work()
                self._stages.back(stage, bucket, state)
        except (Exception, SystemExit) as error:
            state.put_back()
            self._stages.fail(error, stage, bucket)
        self._slots[progress.STAGE] = progress.OURS

    def _prepared_again(self, captured: CapturedBucket, table: RoundTable, row: int) -> CapturedBucket | None:
        """Return the bucket whose eager work may be done once more on the inputs that the last round left: the one that
        was replayed then, or else the next narrower one, whose requests are the first of them."""
        if self._last is None or not row:
            return None
        other: CapturedBucket | None = self._last
        if other is captured:
            narrower = [each for bucket, each in self.buckets.items() if bucket < captured.bucket]  # widest first
            other = narrower[0] if narrower else None
            if other is not None and not table.seq_lens[row - 1, : other.bucket].any():
                return None  # a schedule over nothing but empty requests may be undefined (contract 3.6)
        return None if other is None or other.routed is not None else other

    def _replay_again(self, captured: CapturedBucket, raw: int, between: Callable[[], None] | None) -> None:
        if between is not None:
            between()
        if not self._record:
            self._replay_subject(captured, raw)
            captured.judge_replay(Phase.SECOND_REPLAY)
            return
        first = captured.keep_first_replay(self.input_buffers.round_index)
        self._replay_subject(captured, raw)
        captured.shown.update(Phase.SECOND_REPLAY)
        first.compare()

    def _judge_constants(self) -> None:
        """Judge what the rounds of the last bucket did to inputs that no round writes: too much to look at in each."""
        if self._last is not None:
            self._last.judge_constants()

    def _replay_oracle(self, captured: CapturedBucket) -> None:
        try:
            self._replay_beside(captured.oracle_graph)
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

    def _replay_subject(self, captured: CapturedBucket, raw: int) -> None:
        state = TorchState.now() if self._record or captured.rounds < WATCHED_ROUNDS.stop else None
        stages, slots = self._stages, self._slots
        slots[progress.STAGE], slots[progress.BUCKET] = stage, bucket = progress.BEFORE_REPLAY, captured.bucket
        try:
            work = self._routed(captured, raw)
            if captured.rounds in WATCHED_ROUNDS:
                with Allocations() as watch:
                    captured.subject.before_replay()
                self._refuse_kept(watch, captured)
            else:
                captured.subject.before_replay()
            stages.back(stage, bucket, state)
            captured.judge_ready()
            slots[progress.STAGE] = stage = progress.REPLAY
            work()
            stages.back(stage, bucket, state)
        except (Exception, SystemExit) as error:
            stages.fail(error, stage, bucket)
        slots[progress.STAGE] = progress.OURS

    def _routed(self, captured: CapturedBucket, raw: int) -> Callable[[], None]:
        """The graph's replay, or the same work done eagerly where the subject takes that route."""
        subject = captured.routed
        if subject is None:
            return captured.subject_graph.replay
        taken = subject.route(raw)
        expected = route(subject.release, subject.glue_conditions(raw))
        if taken is not expected and len(self.wrong_routes) < RING_ENTRIES:
            wrong = WrongRoute(bucket=captured.bucket, round=self.rounds_run, raw=raw, taken=taken, expected=expected)
            self.wrong_routes.append(wrong)
        return captured.subject_graph.replay if taken is Route.GLUE else subject.in_graph

    def _refuse_kept(self, watch: Allocations, captured: CapturedBucket) -> None:
        kept = watch.kept()
        if kept:
            name, size = kept[0]
            message = (
                f"before_replay keeps {len(kept)} new allocation(s), the first {size} bytes made by {name}; "
                "write into the captured buffer instead"
            )
            kind = "allocates in replay"
            raise SubjectError("before_replay", captured.bucket, message, kind=kind, round_=self.rounds_run)

    def _check_identities(self, captured: CapturedBucket, round_: int) -> None:
        """Note what differs from the ledger, once for each output."""
        seen = {(change.bucket, change.field) for change in self.address_changes}
        self.address_changes += [
            change for change in captured.address_changes(round_) if (change.bucket, change.field) not in seen
        ]


def without_pools(layout: Layout, leave_out: Collection[str]) -> Layout:
    """Return `layout` without the pools that are not compared: they grow with ids of slots, and nothing follows."""
    return layout.without([field.name for field in layout if field.row is Row.SLOT and field.name in leave_out])
