"""Trials: whether a candidate still shows the finding that is being shrunk or explained.

Only a confirmation from nothing counts (confirm.py): a subject may remember what it replayed before, and a fault that
is planted in it may count. But capturing costs many times what a round does, so candidates over the same captures can
be screened first, in one replayer that is reused for all of them. Before each, everything that the harness owns is
put back to how capture left it: outputs, inputs, page tables, counters. What the subject owns stays as it is, so a
screening may err both ways; it is a hint where to look, and whoever relies on it confirms.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Final

from dsa_verify.base.errors import HarnessError, UsageError
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Scenario
from dsa_verify.contract.subject import SubjectFactory
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.graphs import Backend
from dsa_verify.replay.setup import ReplaySetup, remap_slots_of
from dsa_verify.replay.subject_stages import SubjectError
from dsa_verify.rounds.case_file import parse_case
from dsa_verify.rounds.matrix import is_undefined
from dsa_verify.systems.catalogue import get_system
from dsa_verify.waivers.waivers import NO_WAIVERS, Ledger

Captures = tuple[Geometry, tuple[int, ...]]
# Candidates over the same captures that are confirmed at once: opening a screen for so few would cost more.
UNSCREENED: Final = 2
SCREEN_REMAPS: Final = 4  # remapped requests of one round at least, so that most candidates fit one replayer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Two findings with the same signature are one and the same. `stage`: of a finding without a field, what its
    sentence begins with ("raises in capture"), since any other failure of the subject is another finding; "": any.
    `law`: of a finding that is nothing but a broken law, which."""

    system: str
    field: str | None
    diagnosis: str
    stage: str = ""
    law: str = ""

    @classmethod
    def of(cls, finding: Finding) -> Signature:
        stage = finding.sentence.partition(":")[0] if finding.field is None else ""
        law = (finding.law or "") if finding.diagnosis is Diagnosis.LAW_BROKEN else ""
        return cls(system=finding.system, field=finding.field, diagnosis=finding.diagnosis.value, stage=stage, law=law)

    def matches(self, finding: Finding) -> bool:
        other = Signature.of(finding)
        return self == (other if self.stage else dataclasses.replace(other, stage=""))


class OutOfTime(Exception):
    """The budget of the trials is spent."""


class Trials:
    """Tries candidates on `backend` until `clock` has gone on by `budget_s`.

    `subject`: a factory to use instead of the subject that candidates name. `ledger`: what is waived. `on_launch`: told
    of each candidate before anything of it is launched. `screened`, `confirmed`: replays so far; `undecided`:
    candidates about which the harness could say nothing, which then do not show the finding.
    """

    def __init__(
        self,
        signature: Signature,
        backend: Backend,
        *,
        subject: SubjectFactory | None,
        budget_s: float,
        clock: Callable[[], float],
        ledger: Ledger = NO_WAIVERS,
        on_launch: Callable[[Scenario], None] = lambda candidate: None,
    ) -> None:
        self._ledger, self._on_launch = ledger, on_launch
        self.signature = signature
        self.screened = self.confirmed = self.undecided = 0
        self._backend, self._subject, self._clock = backend, subject, clock
        self._start = clock()
        self._budget_s = budget_s
        self._known: dict[Scenario, Finding | None] = {}
        self._candidates: Counter[Captures] = Counter()
        self._screened_out: set[Scenario] = set()
        self._screen: _Screen | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds since these trials began."""
        return self._clock() - self._start

    def finding(self, candidate: Scenario) -> Finding | None:
        """Return what `candidate` shows of the signature, replayed from nothing; None if it does not or is no legal
        case.

        Raises OutOfTime before a new replay, and DeviceLost.
        """
        if candidate not in self._known:
            self._spend()
            self.confirmed += 1
            self._known[candidate] = self._confirm(candidate) if is_legal(candidate) else None
        return self._known[candidate]

    def may_show(self, candidate: Scenario, base: Scenario) -> bool:
        """Return whether `candidate`, derived from `base`, is worth a confirmation."""
        if candidate in self._known:
            return self._known[candidate] is not None
        if candidate in self._screened_out or not is_legal(candidate):
            return False
        # A subject that fails leaves a replayer that cannot be reused.
        if self.signature.field is None or _captures(candidate) != _captures(base):
            return True
        self._candidates[_captures(base)] += 1
        return self._candidates[_captures(base)] <= UNSCREENED or self._passes_screen(candidate, base)

    def _passes_screen(self, candidate: Scenario, base: Scenario) -> bool:
        self._spend()
        screen = self._screen_of(base)
        if screen is None or not screen.fits(candidate):
            return True
        self.screened += 1
        self._on_launch(candidate)
        if screen.may_show(candidate):
            return True
        self._screened_out.add(candidate)
        return False

    def _spend(self) -> None:
        if self.seconds >= self._budget_s:
            raise OutOfTime

    def _setup(self, scenario: Scenario) -> ReplaySetup:
        return ReplaySetup.of_case(scenario, self._backend, self._ledger, subject=self._subject)

    def _confirm(self, candidate: Scenario) -> Finding | None:
        self._on_launch(candidate)
        try:
            findings = confirm(self._setup(candidate), candidate.rounds)
        except UsageError:  # the subject or its fault has no such geometry
            return None
        except HarnessError:
            self.undecided += 1
            return None
        return next(filter(self.signature.matches, findings), None)

    def _screen_of(self, base: Scenario) -> _Screen | None:
        """A screen over the captures of `base`; None where it would not even recognise `base`."""
        if self._screen is None or self._screen.captures != _captures(base):
            self._on_launch(base)
            self._screen = _Screen(self._setup(base), base, self.signature.field)
        return self._screen if self._screen.works else None


def is_legal(scenario: Scenario) -> bool:
    """Return whether the case reader accepts `scenario`, its system lays it out, and the contract defines it."""
    try:
        parse_case(scenario.to_json())
        for bucket in scenario.buckets:
            get_system(scenario.system).layout(scenario.geometry, bucket)
    except UsageError:
        return False
    undefined = (is_undefined(get_system(scenario.system), scenario.geometry, round_) for round_ in scenario.rounds)
    return bool(scenario.rounds) and not any(undefined)


def _captures(scenario: Scenario) -> Captures:
    return scenario.geometry, scenario.buckets


class _Screen:
    """One replayer for many cases. `works`: whether it shows the case it was opened for twice in a row."""

    def __init__(self, setup: ReplaySetup, base: Scenario, field: str | None):
        self.captures = _captures(base)
        self._setup, self._field = setup, field
        self._rounds, self._slots = len(base.rounds), max(remap_slots_of(base.rounds), SCREEN_REMAPS)
        try:
            table = setup.table(base.rounds, self._slots)
            self._replayer = setup.open(self._rounds, self._slots, record=True, resettable=True, first=table)
        except (SubjectError, HarnessError):
            self.works = False
            return
        self.works = True
        self.works = self.may_show(base) and self.may_show(base)

    def fits(self, candidate: Scenario) -> bool:
        return len(candidate.rounds) <= self._rounds and remap_slots_of(candidate.rounds) <= self._slots

    def may_show(self, candidate: Scenario) -> bool:
        """Return whether the first wrong round of `candidate` has something wrong with the field."""
        self._replayer.reset()
        try:
            seen = self._replayer.run(self._setup.table(candidate.rounds, self._slots))
        except (SubjectError, HarnessError):
            self.works = False
            return True
        wrong = [(each.round, each.region.name) for tally in seen.tallies.values() for each in tally.first]
        wrong += [(change.round, change.field) for change in seen.address_changes]
        first = min((round_ for round_, _ in wrong), default=0)
        return (first, self._field) in wrong
