"""Machine: a Hypothesis state machine over the simulator, whose every step is a rule with scalar arguments.

Where the simulator draws from a seed, here Hypothesis chooses and, when something is wrong, shortens the history to the
few steps that matter. One machine run captures once (and again where the history says so) and replays into the same
graphs. What it prints for a failing history can be pasted and run: the error ends with the line to put above it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from simulated import check, jump, specs

from dsa_verify.base.device import choose_device
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Compare
from dsa_verify.contract.round import POISONS, Round
from dsa_verify.contract.schedule_variants import VARIANTS
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.diagnosis.other_findings import fault_finding, flaky_finding
from dsa_verify.graphs import open_backend
from dsa_verify.judge.judge import live_words
from dsa_verify.judge.schedule_laws import ScheduleLaw
from dsa_verify.replay.bucket import CapturedBucket
from dsa_verify.replay.observation import Observation
from dsa_verify.replay.replayer import Replayer
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.replay.subject_stages import SubjectError
from dsa_verify.systems.catalogue import get_system
from dsa_verify.systems.indexer import scheduled_lengths
from fuzz.engine.boundaries import boundaries
from fuzz.engine.coverage import Coverage
from fuzz.engine.expansion import RoundSpec
from fuzz.engine.simulator import EngineSimulator

_PLACES: Final = range(16)  # a place is taken modulo the batch
_SIMULATOR_SEED: Final = 0  # Hypothesis draws; what the simulator draws beside that should not change from run to run

# Not registered with Hypothesis: "ci" and "dev" are names that the projects using this one have profiles under.
_COMMON: Final[dict[str, Any]] = {
    "deadline": None,  # a capture takes as long as it takes
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "print_blob": False,
    # Not Phase.explain: it traces every line of every replay, and names lines where a sentence names the cause.
    "phases": (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
}
PROFILES: Final[dict[str, settings]] = {
    "ci": settings(max_examples=10, stateful_step_count=15, derandomize=True, database=None, **_COMMON),
    "dev": settings(max_examples=50, stateful_step_count=30, **_COMMON),
    "nightly": settings(max_examples=2000, stateful_step_count=100, **_COMMON),
}


@dataclasses.dataclass(slots=True, kw_only=True)
class MachineTally:
    """What a machine did, over all its runs. A requested round that was not executed met a failing subject.

    `runs`: histories begun, those of shrinking included; `captures`: of all buckets.
    """

    runs: int = 0
    captures: int = 0
    requested: int = 0
    executed: int = 0


class Machine(RuleBasedStateMachine):
    """Subclasses name a `setup`; `machine_of` makes one."""

    setup: ClassVar[ReplaySetup]
    tally: ClassVar[MachineTally]
    coverage: ClassVar[Coverage]

    def __init__(self) -> None:
        super().__init__()
        setup = self.setup
        self.tally.runs += 1
        # Freed pages are reused at once; that they move is a rule's doing.
        self.simulator = EngineSimulator(
            setup.system, setup.geometry, setup.buckets, _SIMULATOR_SEED, outside=False, reuse="lifo"
        )
        self.poison, self.bucket = POISONS[0], 0
        self._forget()

    # What an engine does ---------------------------------------------------------------------------------------------

    @rule(count=st.sampled_from(range(1, 5)), boundary=st.sampled_from(range(256)))
    def admit(self, count: int, boundary: int) -> None:
        lengths = self._boundary_lengths()
        for i in range(count):
            self.simulator.admit(self._fitting(lengths[(boundary + i) % len(lengths)]))

    @precondition(lambda self: self.simulator.live)
    @rule()
    def accept(self) -> None:
        self.simulator.accept()

    @precondition(lambda self: self.simulator.live)
    @rule(place=st.sampled_from(_PLACES), swap=st.booleans())
    def finish(self, place: int, swap: bool) -> None:
        self.simulator.finish(self._at(place), swap=swap)

    @precondition(lambda self: self.simulator.live)
    @rule()
    def preempt(self) -> None:
        self.simulator.preempt()

    @precondition(lambda self: self.simulator.waiting)
    @rule()
    def resume(self) -> None:
        self.simulator.resume()

    @precondition(lambda self: self.simulator.live)
    @rule(place=st.sampled_from(_PLACES), pages_only=st.booleans())
    def remap(self, place: int, pages_only: bool) -> None:
        (self.simulator.move_pages if pages_only else self.simulator.move_row)(self._at(place))

    @precondition(lambda self: self.simulator.live and self.simulator.most > 1)
    @rule(place=st.sampled_from(_PLACES))
    def share(self, place: int) -> None:
        self.simulator.share(self._at(place))

    @precondition(lambda self: self.simulator.live)
    @rule(place=st.sampled_from(_PLACES), boundary=st.sampled_from(range(256)))
    def jump_to_boundary(self, place: int, boundary: int) -> None:
        lengths = self._boundary_lengths()
        jump(self.simulator, self._at(place), lengths[boundary % len(lengths)])

    @precondition(lambda self: self.simulator.live)
    @rule(count=st.sampled_from(_PLACES))
    def shrink_the_batch(self, count: int) -> None:
        self.simulator.shrink(count % len(self.simulator.live))

    @rule(bucket=st.sampled_from(range(8)))
    def change_the_bucket(self, bucket: int) -> None:
        """The next replays pad to this bucket, where it is wide enough."""
        self.bucket = self.simulator.buckets[bucket % len(self.simulator.buckets)]

    @rule(name=st.sampled_from(POISONS))
    def poison_with(self, name: str) -> None:
        self.poison = name

    @rule()
    def recapture(self) -> None:
        self._forget()

    @rule(twice=st.booleans())
    def replay(self, twice: bool) -> None:
        simulator = self.simulator
        bucket = max(self.bucket, simulator.smallest_bucket(len(simulator.live)))
        self._run(dataclasses.replace(simulator.emit(bucket), poison=self.poison, twice=twice))

    # What none does --------------------------------------------------------------------------------------------------

    @rule(boundary=st.sampled_from(range(1 << 10)))
    def replay_boundary(self, boundary: int) -> None:
        known = boundaries(self.setup.system, self.setup.geometry, self.setup.buckets)
        self._run(self.simulator.at(known[boundary % len(known)]))

    # Invariants ------------------------------------------------------------------------------------------------------

    @invariant()
    def the_simulator_is_sound(self) -> None:
        check(self.simulator)

    @invariant()
    def live_values_are_legal(self) -> None:
        """Every value that a consumer may read is within the field's limits (contract 11.4)."""
        if self.captured is None:
            return
        for region in self.captured.judged_fields:
            field = self.captured.layout[region.name]
            if field.compare is not Compare.EXACT or field.dtype != "int32":
                continue
            values = region.got[live_words(region)].long()  # int32 does not hold every limit
            legal = ((values >= field.low) & (values < field.high)).all()
            assert legal, self._say(f"out of range: {field.name} holds a live value outside {field.low}..{field.high}")

    @invariant()
    def schedules_cover_their_tiles(self) -> None:
        """Contract 3.5, of the lengths that the subject itself gave."""
        if self.captured is None:
            return
        for name, schedule in self.captured.buffers.items():
            found = scheduled_lengths(name)
            if found is None or found[0] not in self.captured.buffers:
                continue
            lengths = self.captured.buffers[found[0]].clamp(min=1 if found[1] else 0)
            broken = _broken_law(self.setup.geometry, schedule, lengths)
            assert broken is None, self._say(f"{name}: {broken}")

    # Replaying -------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """The next replay captures first: its buffers hold what pad rows give, its pages are those of a fresh start."""
        self.rounds: list[Round] = []
        self.generations = self.setup.generations()
        self.captured: CapturedBucket | None = None
        self.replayer: Replayer | None = None

    def _run(self, round_: Round) -> None:
        self.tally.requested += 1
        self.rounds.append(round_)
        try:
            seen = self._replay(round_)
        except SubjectError as fault:
            raise AssertionError(self._say(fault_finding(self.setup, fault).sentence)) from fault
        self.tally.executed += 1
        self.coverage.observe(round_)
        assert self.replayer is not None
        self.captured = self.replayer.buckets[round_.bucket]
        if seen.first_wrong_round is not None:
            found = confirm(self.setup, self.rounds) or [flaky_finding(self.setup, seen.tallies, 1)]
            raise AssertionError(self._say("\n".join(finding.sentence for finding in found)))

    def _replay(self, round_: Round) -> Observation:
        if self.replayer is None:
            self.tally.captures += 1
            self.coverage.recaptured()
            self.replayer = self.setup.open(1)
        return self.replayer.run(self.setup.table([round_], generations=self.generations))

    def _say(self, sentence: str) -> str:
        return f"{sentence}\nTo run the history again, put this above it:\n{preamble(self.setup)}"

    def _at(self, place: int) -> int:
        return place % len(self.simulator.live)

    def _boundary_lengths(self) -> Sequence[int]:
        return [length for length in self.coverage.candidates.tolist() if length >= self.simulator.shortest]

    def _fitting(self, length: int) -> int:
        return min(length, self.simulator.longest)


def machine_of(setup: ReplaySetup) -> type[Machine]:
    """A machine that fuzzes `setup`; `.TestCase` is a test of it, `run` runs it."""

    def replay_outside(self: Machine, spec: RoundSpec) -> None:
        self._run(self.simulator.outside(spec))

    body = {
        "setup": setup,
        "tally": MachineTally(),
        "coverage": Coverage(setup.system, setup.geometry, setup.buckets),
        "replay_outside": rule(spec=specs(setup.system, setup.geometry, setup.buckets))(replay_outside),
    }
    return type("Machine", (Machine,), body)


def machine_for(
    system: str,
    preset: str = "tiny",
    geometry: dict[str, Any] | None = None,
    buckets: tuple[int, ...] = (4, 2),
    subject: str | None = None,
    fault: str | None = None,
    device: str = "auto",
) -> type[Machine]:
    """`machine_of` from names alone, as in the line that a failing machine gives."""
    backend = open_backend(choose_device(device))
    resolved = get_system(system).geometry(preset, geometry)
    return machine_of(ReplaySetup.make(get_system(system), resolved, buckets, 0, subject, fault, backend))


def preamble(setup: ReplaySetup) -> str:
    """The Python that makes the `Machine` of a printed history."""
    names = (
        setup.system.name,
        setup.geometry.preset,
        setup.geometry.overrides(),
        setup.buckets,
        setup.subject,
        setup.fault,
    )
    arguments = ", ".join(map(repr, (*names, str(setup.backend.device))))
    return (
        "from fuzz.engine.expansion import RoundSpec\n"
        f"from state_machine import machine_for; Machine = machine_for({arguments})"
    )


def run(machine: type[Machine], profile: settings = PROFILES["ci"]) -> MachineTally:
    """Run `machine` and say what it did; AssertionError, with the shortest failing history in its notes."""
    run_state_machine_as_test(machine, settings=profile)
    return machine.tally


def _broken_law(geometry: Geometry, schedule: torch.Tensor, lengths: torch.Tensor) -> str | None:
    variant = VARIANTS[geometry.schedule]
    if lengths.dim() not in variant.context_dims:
        lengths = lengths[:, -1] if lengths.dim() == 2 else lengths.unsqueeze(1)
    next_n = lengths.shape[1] if lengths.dim() == 2 else 1
    law = ScheduleLaw(variant, geometry.multiprocessors, rows=lengths.shape[0], next_n=next_n)
    breaks = law.judge(schedule.contiguous(), lengths.contiguous())
    return breaks[0].sentence if breaks else None
