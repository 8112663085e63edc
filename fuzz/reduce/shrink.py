"""Shrink: makes a case that shows a finding as small and as plain as it gets, without losing the finding.

Hypothesis shrinks what it drew, the structure; this shrinks what it became, the expanded rounds, and knows what is
simpler here: fewer rounds, requests and remaps, the loud poison, lengths on a lower boundary, low request rows, the
smallest buckets and draft. Passes follow each other until none achieves anything. At first candidates are screened in
a replayer that is reused (trials.py), and only what passes is confirmed from nothing; at the end, when a confirmation
costs little, every candidate that was left out is confirmed. So nothing that is accepted rests on a screening, and
the result is a local minimum: one more step of any pass would lose the finding. The same case gives the same result,
if time suffices.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round, Scenario
from dsa_verify.contract.static_inputs import PAD_REQUEST, StaticInput
from dsa_verify.contract.subject import SubjectFactory
from dsa_verify.graphs import Backend
from dsa_verify.rounds.matrix import boundaries
from dsa_verify.run.verify import CASE_WINDOWS
from dsa_verify.systems.catalogue import get_system
from dsa_verify.waivers.waivers import NO_WAIVERS, Ledger
from fuzz.engine.boundaries import boundary_lengths
from fuzz.reduce.trials import OutOfTime, Signature, Trials

BUDGET_S: Final = 60.0
_SMALLEST_FIRST: Final = 3  # sizes and lengths that are tried from the least on before larger steps are
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """`scenario` shows `finding`, confirmed from nothing. `screened`, `confirmed`: candidates replayed in a reused
    replayer and from nothing. `accepted`: steps taken. `undecided`: candidates about which the harness could say
    nothing. `finished`: False if the budget ended it before all steps were tried."""

    scenario: Scenario
    finding: Finding
    screened: int
    confirmed: int
    accepted: int
    undecided: int
    seconds: float
    finished: bool


def shrink(
    scenario: Scenario,
    signature: Signature,
    backend: Backend,
    *,
    subject: SubjectFactory | None = None,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
    on_launch: Callable[[Scenario], None] = lambda candidate: None,
    on_accept: Callable[[Scenario], None] = lambda scenario: None,
    ledger: Ledger = NO_WAIVERS,
) -> Shrunk:
    """Return a case no larger than `scenario` that shows a finding of `signature` in its first wrong round.

    `subject`: a factory instead of the subject that `scenario` names. `on_accept`: called with each smaller case.
    `on_launch`: with each candidate, before anything of it is launched. `ledger`: what is waived. At most one replay
    begins before `budget_s` is over and ends after it. UsageError if no end of `scenario` shows the signature, or none
    did in time; DeviceLost as soon as a candidate takes the device down.
    """
    trials = Trials(
        signature, backend, subject=subject, budget_s=budget_s, clock=clock, ledger=ledger, on_launch=on_launch
    )
    search: _Search | None = None
    finished = True
    try:
        search = _Search(trials, *_start(trials, scenario), on_accept)
        for screening in (True, False):
            search.screening = screening
            search.run_to_fixpoint()
    except OutOfTime:
        finished = False
    if search is None:
        raise UsageError(f"budget_s: {budget_s:g} is over before the case showed its finding once; allow more time")
    return Shrunk(
        scenario=dataclasses.replace(search.best, found=search.finding.sentence),
        finding=search.finding,
        screened=trials.screened,
        confirmed=trials.confirmed,
        accepted=search.accepted,
        undecided=trials.undecided,
        seconds=trials.seconds,
        finished=finished,
    )


def _start(trials: Trials, scenario: Scenario) -> tuple[Scenario, Finding]:
    """The shortest end of `scenario`, of some lengths, that shows the signature: the finding was in its last round."""
    scenario = dataclasses.replace(scenario, found=None)
    count = len(scenario.rounds)
    for window in [*(window for window in CASE_WINDOWS if window < count), count]:
        candidate = dataclasses.replace(scenario, rounds=scenario.rounds[count - window :])
        found = trials.finding(candidate)
        if found is not None:
            return candidate, found
    signature = trials.signature
    raise UsageError(
        f"the case does not show {signature.diagnosis!r} of {signature.field or signature.stage or 'the subject'} when "
        "it is replayed from nothing; give a case that does, with the subject and fault it was found with"
    )


class _Search:
    """The smallest case so far, and what the passes need to go on from it."""

    def __init__(self, trials: Trials, best: Scenario, finding: Finding, on_accept: Callable[[Scenario], None]) -> None:
        self.best, self.finding = best, finding
        self.accepted = 0
        self.screening = True
        self._trials, self._on_accept = trials, on_accept

    def run_to_fixpoint(self) -> None:
        """Go through the passes until a whole turn achieves nothing."""
        before = None
        while before != self.best:
            before = self.best
            for shorten in PASSES:
                shorten(self)

    def attempt(self, candidate: Scenario) -> bool:
        """Go on from `candidate` if it shows the signature."""
        if candidate == self.best:
            return False
        if self.screening and not self._trials.may_show(candidate, self.best):
            return False
        found = self._trials.finding(candidate)
        if found is None:
            return False
        self.best, self.finding = candidate, found
        self.accepted += 1
        self._on_accept(candidate)
        return True

    # Candidates derived from the best --------------------------------------------------------------------------------

    @property
    def rounds(self) -> tuple[Round, ...]:
        return self.best.rounds

    def attempt_rounds(self, rounds: Sequence[Round]) -> bool:
        return self.attempt(dataclasses.replace(self.best, rounds=tuple(rounds)))

    def attempt_all(self, change: Callable[[Round], Round]) -> bool:
        """Attempt the case with every round changed."""
        return self.attempt_rounds([change(round_) for round_ in self.rounds])

    def attempt_round(self, i: int, change: Callable[[Round], Round]) -> bool:
        """Attempt the case with round `i` changed."""
        return self.attempt_rounds([*self.rounds[:i], change(self.rounds[i]), *self.rounds[i + 1 :]])

    def attempts(self, i: int, change: Callable[[Round, Any], Round]) -> Callable[[Any], bool]:
        """Return what attempts the case in which round `i` is `change(round, value)`, for a value."""
        return lambda value: self.attempt_round(i, lambda round_: change(round_, value))

    def attempt_each(self, change: Callable[[Round], Round]) -> None:
        """Attempt all rounds changed at once, or else as many as may be, one by one from the last."""
        if not self.attempt_all(change) and len(self.rounds) > 1:
            for i in reversed(range(len(self.rounds))):
                self.attempt_round(i, change)

    def attempt_geometry(self, **changes: Any) -> bool:
        """The geometry changed, counts cut to what they may be in it."""
        try:
            geometry = self.best.geometry.replace(**changes)
        except UsageError:
            return False
        most = {name: spec.high - 1 for name, spec in get_system(self.best.system).lens(geometry).items()}
        rounds = tuple(_with_at_most(most, round_) for round_ in self.rounds)
        return self.attempt(dataclasses.replace(self.best, geometry=geometry, rounds=rounds))


# Passes --------------------------------------------------------------------------------------------------------------


def drop_rounds(search: _Search) -> None:
    """Drop the rounds after the finding at once, then halves, quarters, ... of the rest, the earliest first."""
    if search.finding.round is not None:
        search.attempt_rounds(search.rounds[: search.finding.round + 1])
    _drop_parts(search.rounds, search.attempt_rounds, least=1)


def drop_requests(search: _Search) -> None:
    """Tails of all rounds, single batch rows of all rounds, then parts of each round."""
    for count in _from_the_least(0, _most_requests(search)):
        if search.attempt_all(partial(_keep, rows=range(count))):
            break
    for row in reversed(range(_most_requests(search))):
        search.attempt_all(partial(_keep, rows=[b for b in range(_most_requests(search)) if b != row]))
    for i in reversed(range(len(search.rounds))):
        _drop_parts(range(search.rounds[i].raw_batch), search.attempts(i, _keep))


def plain_inputs(search: _Search) -> None:
    """No remaps, no prefixes taken, no second replay, no foreign work, the loud or else the stale poison, seed 0."""
    search.attempt_each(lambda round_: round_.with_remap(()))
    for i, round_ in enumerate(search.rounds):
        _drop_parts(round_.remap, search.attempts(i, Round.with_remap))
    search.attempt_each(_set(prefixes=()))
    for i, round_ in enumerate(search.rounds):
        _drop_parts(round_.prefixes, search.attempts(i, _with_prefixes))
        for at in range(len(search.rounds[i].prefixes)):
            _take_less(search, i, at)
    search.attempt_each(_set(twice=False))
    search.attempt_each(_set(foreign=False))
    search.attempt_each(_set(poison="loud"))
    search.attempt_each(lambda round_: round_ if round_.poison == "loud" else _set(poison="stale")(round_))
    search.attempt_each(_set(seed=0))
    search.attempt(dataclasses.replace(search.best, seed=0))


def drop_buckets(search: _Search) -> None:
    """Drop the buckets that no round uses."""
    for bucket in search.best.buckets:
        rest = tuple(each for each in search.best.buckets if each != bucket)
        if rest and all(round_.bucket != bucket for round_ in search.rounds):
            search.attempt(dataclasses.replace(search.best, buckets=rest))


def smaller_buckets(search: _Search) -> None:
    """Make each bucket as small as its rounds allow."""
    for bucket in sorted(search.best.buckets):
        raw = max((round_.raw_batch for round_ in search.rounds if round_.bucket == bucket), default=0)
        for size in _from_the_least(max(raw, 1), bucket):
            if search.attempt(resized(search.best, bucket, size)):
                break


def smaller_geometry(search: _Search) -> None:
    """Make drafts smaller, and leave no difference from the preset that is not needed, but for smaller sizes."""
    for name, least in _least_sizes(search.best.geometry).items():
        for size in _from_the_least(least, getattr(search.best.geometry, name)):
            if search.attempt_geometry(**{name: size}):
                break
    needless = needless_overrides(search.best.geometry)
    if search.attempt_geometry(**needless):
        return
    for name, value in needless.items():
        search.attempt_geometry(**{name: value})


def plain_requests(search: _Search) -> None:
    """Requests 1, 2, 3, ... as they come, or of each round anew, or else each as low as it may be; few request rows."""
    live = [row for row in named_requests(search.best) if row != PAD_REQUEST]
    search.attempt(with_requests(search.best, {row: i for i, row in enumerate(live, 1)}))
    search.attempt_each(lambda round_: _set(requests=tuple(range(1, round_.raw_batch + 1)))(round_))
    for row in named_requests(search.best):
        _lower(search, row)
    # A size that the case does not mention is left alone: it would be one thing more to read.
    if "request_rows" in search.best.geometry.overrides():
        fewest = max([1, *named_requests(search.best)]) + 1
        if fewest < search.best.geometry.request_rows:
            search.attempt_geometry(request_rows=fewest)


def plain_lens(search: _Search) -> None:
    """Counts as where a round does not say them, else the greatest, else 1; needed ones 1, else the greatest; those of
    request rows as low as may be."""
    for name, spec in get_system(search.best.system).lens(search.best.geometry).items():
        if not spec.needed:
            search.attempt_each(_set(**{name: None}))
        most = spec.high - 1
        least = min(max(spec.low, 1), most)
        for i, round_ in enumerate(search.rounds):
            for b, value in enumerate(round_.lens.get(name, ())):
                if spec.of_row:
                    _lower_value(search, spec, i, b)
                    continue
                for plain in (least, most) if spec.needed else (most, least):
                    if value == plain or search.attempts(i, partial(put, name, b))(plain):
                        break


def short_lengths(search: _Search) -> None:
    """Make all lengths 1, or else each as low as it may be, by the boundaries first (contract 10)."""
    least = get_system(search.best.system).shortest_length(search.best.geometry)
    search.attempt_each(lambda round_: _set(seq_lens=(max(least, 1),) * round_.raw_batch)(round_))
    for i in reversed(range(len(search.rounds))):
        for b in range(search.rounds[i].raw_batch):
            _shorten(search, i, b, least)


PASSES: Final[tuple[Callable[[_Search], None], ...]] = (
    drop_rounds,
    drop_buckets,
    drop_requests,
    smaller_buckets,
    smaller_geometry,
    plain_inputs,
    plain_lens,
    plain_requests,
    short_lengths,
)


def _shorten(search: _Search, i: int, b: int, least: int) -> None:
    attempt = search.attempts(i, partial(put, "seq_lens", b))
    length, plain = search.rounds[i].seq_lens[b], max(least, 1)
    # 1 is the plainest; 0 is an idle request, which is a case of its own.
    if length <= plain or attempt(plain) or (least < plain and attempt(least)):
        return
    turns = [plain, *(value for value in turning_lengths(search.best) if plain < value < length), length]
    # Where the finding does not stay with every greater length, bisection may miss the least ones.
    if any(attempt(value) for value in turns[1 : 1 + _SMALLEST_FIRST] if value < length):
        return
    bad, good = closest(0, len(turns) - 1, lambda at: attempt(turns[at]))
    closest(turns[bad], turns[good], attempt)


def _lower_value(search: _Search, spec: StaticInput, i: int, b: int) -> None:
    attempt = search.attempts(i, partial(put, spec.name, b))
    value = search.rounds[i].lens[spec.name][b]
    if value > spec.low and not attempt(spec.low):
        closest(spec.low, value, attempt)


def _lower(search: _Search, row: int) -> None:
    """Call request `row` by the lowest number that no other has, as far as the finding stays."""
    case, named = search.best, named_requests(search.best)
    values = [*(each for each in range(1, row) if each not in named), row]

    def attempt(at: int) -> bool:
        return search.attempt(with_requests(case, {row: values[at]}))

    few = range(len(values) - 1)[:_SMALLEST_FIRST]
    if not any(map(attempt, few)):
        closest(len(few) - 1, len(values) - 1, attempt)


def _drop_parts(items: Sequence[T], attempt: Callable[[Sequence[T]], bool], *, least: int = 0) -> None:
    """Leave out all of `items`, then halves, quarters, ... down to single ones, as `attempt` allows."""
    kept = list(items)
    size = len(kept) - least
    while size > 0:
        at = 0
        while at + size <= len(kept) and len(kept) - size >= least:
            rest = kept[:at] + kept[at + size :]
            if attempt(rest):
                kept = rest
            else:
                at += size
        size = min(size // 2, len(kept) - least)


def _take_less(search: _Search, i: int, at: int) -> None:
    """Make prefix `at` of round `i` as short as the finding allows."""
    prefixes = search.rounds[i].prefixes
    row, origin, pages = prefixes[at]
    attempt = search.attempts(i, _with_prefixes)
    for fewer in _from_the_least(1, pages):
        if attempt((*prefixes[:at], (row, origin, fewer), *prefixes[at + 1 :])):
            return


def _most_requests(search: _Search) -> int:
    return max(round_.raw_batch for round_ in search.rounds)


def _from_the_least(least: int, size: int) -> list[int]:
    """Sizes below `size` that are worth a try, ascending; a next turn goes on from there."""
    few = range(least, least + _SMALLEST_FIRST)
    return [each for each in sorted({*few, size // 2}) if least <= each < size]


# Pieces that explain.py needs, too -----------------------------------------------------------------------------------


def turning_lengths(scenario: Scenario) -> list[int]:
    """Return legal lengths at which any formula turns; ascending."""
    shortest = get_system(scenario.system).shortest_length(scenario.geometry)
    values = {
        *boundaries(scenario.geometry).tolist(),
        *boundary_lengths(get_system(scenario.system), scenario.geometry),
    }
    return sorted(value for value in values if value >= shortest)


def resized(scenario: Scenario, bucket: int, size: int) -> Scenario:
    """Return `scenario` with `size` in the place of `bucket`."""
    return dataclasses.replace(
        scenario,
        buckets=tuple(dict.fromkeys(size if each == bucket else each for each in scenario.buckets)),
        rounds=tuple(
            dataclasses.replace(round_, bucket=size) if round_.bucket == bucket else round_
            for round_ in scenario.rounds
        ),
    )


def named_requests(scenario: Scenario) -> list[int]:
    """Return the request rows that `scenario` mentions, each once, in the order in which they come."""
    return list(dict.fromkeys(row for round_ in scenario.rounds for row in _named_in(round_)))


def _named_in(round_: Round) -> Sequence[int]:
    return (*round_.requests, *round_.remap, *(origin for _, origin, _ in round_.prefixes))


def with_requests(scenario: Scenario, names: dict[int, int]) -> Scenario:
    """Return `scenario` with its request rows called otherwise."""
    return dataclasses.replace(
        scenario,
        rounds=tuple(
            dataclasses.replace(
                round_,
                requests=tuple(names.get(row, row) for row in round_.requests),
                remap=tuple(names.get(row, row) for row in round_.remap),
                prefixes=tuple(
                    (names.get(row, row), names.get(origin, origin), pages) for row, origin, pages in round_.prefixes
                ),
            )
            for round_ in scenario.rounds
        ),
    )


def _least_sizes(geometry: Geometry) -> dict[str, int]:
    """Return the sizes that a case is tried with less of, and the least value of each."""
    return {"draft_tokens": 1} | {size.name: size.low for size in geometry.sizes if size.shrinks}


def needless_overrides(geometry: Geometry) -> dict[str, Any]:
    """Return where `geometry` differs from its preset without being smaller, and what the preset has there."""
    preset, least = geometry.of_preset(), _least_sizes(geometry)
    found = {}
    for name, value in geometry.overrides().items():
        usual = getattr(preset, name)
        smaller = type(value) is int and value < usual
        if name not in least and not smaller:
            found[name] = usual
    return found


def closest(bad: int, good: int, shows: Callable[[int], bool]) -> tuple[int, int]:
    """Neighbours (bad, good), the latter shown by `shows`, found by bisection between the two; either may be higher."""
    while abs(good - bad) > 1:
        middle = (bad + good) // 2
        if shows(middle):
            good = middle
        else:
            bad = middle
    return bad, good


def put(name: str, b: int, round_: Round, value: int) -> Round:
    """Return `round_` with `value` as entry `b` of `name`."""
    values = list(getattr(round_, name))
    values[b] = value
    return _set(**{name: tuple(values)})(round_)


def _set(**changes: Any) -> Callable[[Round], Round]:
    return lambda round_: round_.replace(**changes)


def _with_at_most(most: Mapping[str, int], round_: Round) -> Round:
    """Return `round_` with counts of `most`, and with none that is larger."""
    said = round_.lens.items()
    return round_.replace(**{n: tuple(min(v, most[n]) for v in values) if n in most else None for n, values in said})


def _with_prefixes(round_: Round, prefixes: Sequence[tuple[int, int, int]]) -> Round:
    return dataclasses.replace(round_, prefixes=tuple(prefixes))


def _keep(round_: Round, rows: Sequence[int]) -> Round:
    """Return `round_` with these batch rows only, as far as it has them."""
    kept = [row for row in rows if row < round_.raw_batch]
    changes = {name: tuple(getattr(round_, name)[row] for row in kept) for name in ("seq_lens", "requests")}
    lens = {name: tuple(values[row] for row in kept) for name, values in round_.lens.items()}
    return round_.replace(**changes, **lens)
