"""Explain: which values of a small case its finding depends on, and how, in one sentence.

Each value that the case still holds is varied by itself, the rest left as it is, and every variation is replayed from
nothing: if the finding stays in all of them, the value is free. Of a length and of a request row also the range in
which the finding stays is looked for, by bisection between what was tried. "Free" means free in what was tried, the
neighbours, the extremes and a few values between, not in all values. What two values have to do with each other shows
only in that neither is free. The finding stays where it keeps its signature: what has another diagnosis has gone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import MAX_BATCH, MAX_DRAFT_TOKENS
from dsa_verify.contract.round import POISONS, Round, Scenario
from dsa_verify.contract.subject import SubjectFactory
from dsa_verify.graphs import Backend
from dsa_verify.systems.catalogue import get_system
from dsa_verify.waivers.waivers import NO_WAIVERS, Ledger
from fuzz.reduce.shrink import BUDGET_S, closest, named_requests, put, resized, turning_lengths, with_requests
from fuzz.reduce.trials import OutOfTime, Signature, Trials, is_legal

FREE: Final = "any"
_SPREAD: Final = 6  # boundaries or rows that are tried, beside the neighbours and the extremes
_ALSO: Final = 3  # other values that are named where they are not one range
_MORE_ROWS: Final = 16  # request rows beyond those of the case, where it has none to try
_NOT_VARIED: Final = ("draft_tokens", "request_rows")  # of the overrides: these have verdicts of their own


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on one value of the case: `what` it is, and where the finding `stays`: FREE, or in words."""

    what: str
    value: str
    stays: str

    @property
    def free(self) -> bool:
        return self.stays == FREE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """An account of what a finding depends on: `sentence` for people, `verdicts` in the order of the case. `finished`:
    False if the budget ended before every value was varied; `confirmed`: variations replayed."""

    sentence: str
    verdicts: tuple[Verdict, ...]
    confirmed: int
    seconds: float
    finished: bool


def explain(
    scenario: Scenario,
    signature: Signature,
    backend: Backend,
    *,
    subject: SubjectFactory | None = None,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
    ledger: Ledger = NO_WAIVERS,
) -> Explanation:
    """Return what the finding of `signature` depends on in `scenario`, which is best shrunk before: each of its values
    costs several replays. `subject`: a factory instead of the one that `scenario` names. `ledger`: what is waived.
    UsageError if `scenario` does not show the signature; DeviceLost."""
    trials = Trials(signature, backend, subject=subject, budget_s=budget_s, clock=clock, ledger=ledger)
    study = _Study(dataclasses.replace(scenario, found=None), trials)
    try:
        if not study.shows(study.case):
            raise UsageError(
                f"the case does not show {signature.diagnosis!r} of {signature.field or 'the subject'}, so there is "
                "nothing to explain; give a case that does"
            )
        study.run()
        finished = True
    except OutOfTime:
        finished = False
    return Explanation(
        sentence=study.sentence(finished),
        verdicts=tuple(study.verdicts),
        confirmed=trials.confirmed,
        seconds=trials.seconds,
        finished=finished,
    )


class _Study:
    """The verdicts on `case` so far."""

    def __init__(self, case: Scenario, trials: Trials) -> None:
        self.case, self._trials = case, trials
        self.verdicts: list[Verdict] = []
        self.lengths: list[list[str]] = []  # where the finding stays, by round and batch row
        self.phrases: list[str] = []

    def shows(self, candidate: Scenario) -> bool:
        return self._trials.finding(candidate) is not None

    def run(self) -> None:
        self._lengths()
        self._requests()
        for study in (self._lens, self._poison, self._flags, self._buckets, self._draft, self._geometry):
            study()

    def sentence(self, finished: bool) -> str:
        """Return the explanation, such as "2 rounds, 1 request: length 64 then 65; everything else is free"."""
        raw = [round_.raw_batch for round_ in self.case.rounds]
        counts = " then ".join(map(str, raw)) if len(set(raw)) > 1 else str(raw[0])
        head = f"{len(raw)} {_plural('round', len(raw))}, {counts} {_plural('request', max(raw))}"
        rest = (
            ("everything else is free" if self.phrases else "everything is free") if finished else "not all was tried"
        )
        return f"{head}: {'; '.join([*self.phrases, rest])}"

    def _judge(self, what: str, value: object, stays: str, phrase: str = "") -> None:
        """Add a verdict; `phrase` names in the sentence what is not free."""
        self.verdicts.append(Verdict(what=what, value=str(value), stays=stays))
        if stays != FREE:
            self.phrases.append(phrase or f"{what} {stays}")

    def _needed(self, candidates: Sequence[Scenario]) -> bool:
        """Return whether the finding is gone in one of `candidates`; those that are no legal cases say nothing."""
        return not all(self.shows(candidate) for candidate in candidates if is_legal(candidate))

    def _in_round(self, i: int) -> str:
        return f" in round {i}" if len(self.case.rounds) > 1 else ""

    def _with_round(self, i: int, changed: Round) -> Scenario:
        rounds = (*self.case.rounds[:i], changed, *self.case.rounds[i + 1 :])
        return dataclasses.replace(self.case, rounds=rounds)

    # Lengths ---------------------------------------------------------------------------------------------------------

    def _lengths(self) -> None:
        for i, round_ in enumerate(self.case.rounds):
            self.lengths.append([])
            for b, length in enumerate(round_.seq_lens):
                stays = self._range_of(length, partial(self._with_length, i, b))
                self.lengths[i].append(stays)
                self.verdicts.append(
                    Verdict(what=f"length of round {i}, batch row {b}", value=str(length), stays=stays)
                )
        everywhere = [stays for row in self.lengths for stays in row]
        if not everywhere:
            return
        most = max(map(len, self.lengths))
        if all(stays == FREE for stays in everywhere):
            self.phrases.append(f"{FREE} {_plural('length', most)}")
            return
        rounds = " then ".join(" and ".join(row) or "none" for row in self.lengths)
        self.phrases.append(f"{_plural('length', most)} {rounds}")

    def _with_length(self, i: int, b: int, value: int) -> Scenario:
        return self._with_round(i, put("seq_lens", b, self.case.rounds[i], value))

    def _range_of(self, length: int, variant: Callable[[int], Scenario]) -> str:
        """Say with which lengths in the place of `length` the finding stays."""
        least, most = get_system(self.case.system).shortest_length(self.case.geometry), self.case.geometry.context
        page = self.case.geometry.page_size
        near = {length + step for step in (-page, -1, 1, page)}
        tried = {*near, least, max(least, 1), *_spread(turning_lengths(self.case)), most}
        return self._stays(length, range(least, most + 1), tried, variant)

    def _stays(
        self,
        value: int,
        values: Sequence[int],
        tried: set[int],
        variant: Callable[[int], Scenario],
        *,
        ordered: bool = True,
    ) -> str:
        """Say with which of `values`, ascending, in the place of `value` the finding stays; some are `tried`.

        `ordered`: between two of them with which it stays it is likely to; otherwise only an unbroken range is one.
        """

        def shows(at: int) -> bool:
            return is_legal(variant(values[at])) and self.shows(variant(values[at]))

        here = values.index(value)
        known = [values.index(each) for each in sorted(tried - {value}) if each in values]
        legal = [at for at in known if is_legal(variant(values[at]))]
        gone = [at for at in legal if not shows(at)]
        if not legal:
            return str(value)
        if not gone:
            return FREE
        stays = sorted({here, *legal} - {*gone})
        if not ordered and any(stays[0] < at < stays[-1] for at in gone):
            return f"{value}{_also([values[at] for at in stays if at != here], [values[at] for at in gone])}"
        if len(gone) == 1 and legal[0] < gone[0] < legal[-1]:
            return f"any but {values[gone[0]]}"
        low, high = 0, len(values) - 1
        if below := [at for at in gone if at < here]:
            low = closest(below[-1], min(at for at in stays if at > below[-1]), shows)[1]
        if above := [at for at in gone if at > here]:
            high = closest(above[0], max(at for at in stays if at < above[0]), shows)[1]
        outside = [values[at] for at in stays if not low <= at <= high]
        return _range(values[low], values[high], values[0], values[-1]) + _also(outside)

    # Everything else -------------------------------------------------------------------------------------------------

    def _requests(self) -> None:
        rows = named_requests(self.case)
        if not rows:
            return
        wide = self._with_rows_to_try(max(rows))
        unused = {*range(1, wide.geometry.request_rows)} - {*rows}
        bound, tied = [], False
        for row in rows:
            values = sorted({row, *unused})
            here = values.index(row)
            near = values[max(here - 1, 0) : here + 2]
            tried = {values[0], *near, *_spread(values), values[-1]}
            stays = self._stays(row, values, tried, partial(self._with_request, wide, row), ordered=False)
            self.verdicts.append(Verdict(what=f"request row {row}", value=str(row), stays=stays))
            if stays != FREE:
                bound.append(stays)
            elif not tied:
                other = next(each for each in near if each != row)
                tied = self._needed(list(_renamed_once(self._with_row(wide, other), row, other)))
        if bound:
            self.phrases.append(f"{_plural('request row', len(bound))} {' and '.join(bound)}")
        else:
            together = ", the same wherever it is" if tied else ""
            self.phrases.append(f"any {_plural('request row', len(rows))}{together}")

    def _with_rows_to_try(self, last: int) -> Scenario:
        """Return the case, with more request rows where few lie behind `last` and more do not end the finding."""
        count = self.case.geometry.request_rows
        if last + 2 < count:
            return self.case
        for _, wide in self._with_geometry("request_rows", [count + _MORE_ROWS]):
            if self.shows(wide):
                return wide
            self._judge("request_rows", count, str(count))
        return self.case

    def _with_row(self, wide: Scenario, row: int) -> Scenario:
        """Return the case itself if it has `row`: with more rows all of them are on other pages."""
        return self.case if row < self.case.geometry.request_rows else wide

    def _with_request(self, wide: Scenario, row: int, other: int) -> Scenario:
        return with_requests(self._with_row(wide, other), {row: other})

    def _lens(self) -> None:
        for name, spec in get_system(self.case.system).lens(self.case.geometry).items():
            least, n = spec.low, spec.high - 1
            for i, round_ in enumerate(self.case.rounds if not spec.of_row else ()):
                for b, value in enumerate(round_.lens.get(name, ())):
                    tried = sorted({least, value - 1, value + 1, n} - {value})
                    variants = [self._with_round(i, put(name, b, round_, each)) for each in tried if least <= each <= n]
                    what = f"{name}[{b}]{self._in_round(i)}"
                    self._judge(what, value, str(value) if self._needed(variants) else FREE)

    def _poison(self) -> None:
        for i, round_ in enumerate(self.case.rounds):
            with_poison = {
                poison: self._with_round(i, dataclasses.replace(round_, poison=poison))
                for poison in POISONS
                if poison != round_.poison
            }
            stays = [round_.poison, *(poison for poison, case in with_poison.items() if self.shows(case))]
            text = FREE if len(stays) == len(POISONS) else " or ".join(stays)
            self._judge(f"poison{self._in_round(i)}", round_.poison, text, f"poison {text}{self._in_round(i)}")

    def _flags(self) -> None:
        for i, round_ in enumerate(self.case.rounds):
            where = self._in_round(i)
            floors = round_.lens.get("replay_floors", ())
            flags: tuple[tuple[str, str, Any, Any, str], ...] = (
                ("second replay", "twice", round_.twice, False, "replayed twice"),
                ("foreign work", "foreign", round_.foreign, False, "foreign work before it"),
                ("remap", "remap", round_.remap, (), "pages remapped"),
                ("prefixes", "prefixes", round_.prefixes, (), "first pages shared"),
                ("replay floors", "replay_floors", floors, None, f"replay floors {', '.join(map(str, floors))}"),
            )
            for what, field, value, plain, said in flags:
                if not value:
                    continue
                without = round_.with_remap(()) if field == "remap" else round_.replace(**{field: plain})
                needed = self._needed([self._with_round(i, without)])
                self._judge(f"{what}{where}", value, "needed" if needed else FREE, f"{said}{where}")
            if get_system(self.case.system).seeded:
                other = [self._with_round(i, dataclasses.replace(round_, seed=round_.seed + step)) for step in (1, 2)]
                self._judge(f"seed{where}", round_.seed, str(round_.seed) if self._needed(other) else FREE)

    def _buckets(self) -> None:
        buckets = self.case.buckets
        for bucket in buckets:
            others = [each for each in buckets if each != bucket]
            sizes = [size for size in (bucket - 1, bucket + 1, 2 * max(buckets)) if size not in buckets]
            stays = self._counted(bucket, {s: resized(self.case, bucket, s) for s in sizes if 1 <= s <= MAX_BATCH})
            self._judge(f"bucket {bucket}", bucket, stays, f"bucket {stays}")
            if others and all(round_.bucket != bucket for round_ in self.case.rounds):
                needed = self._needed([dataclasses.replace(self.case, buckets=tuple(others))])
                text = f"bucket {bucket} captured beside {', '.join(map(str, others))}"
                self._judge(f"capture of bucket {bucket}", bucket, "needed" if needed else FREE, text)

    def _draft(self) -> None:
        if not get_system(self.case.system).drafts:
            return
        n = self.case.geometry.draft_tokens
        sizes = [size for size in (n - 1, n + 1, 2 * n) if 1 <= size <= MAX_DRAFT_TOKENS]
        stays = self._counted(n, dict(self._with_geometry("draft_tokens", sizes)))
        self._judge("draft length", n, stays, f"N {stays}")

    def _geometry(self) -> None:
        preset = self.case.geometry.of_preset()
        for name, value in self.case.geometry.overrides().items():
            if name not in _NOT_VARIED:
                usual = [case for _, case in self._with_geometry(name, [getattr(preset, name)])]
                self._judge(name, value, str(value) if self._needed(usual) else FREE)

    def _with_geometry(self, name: str, values: Sequence[int]) -> Iterator[tuple[int, Scenario]]:
        """Yield the case with each of `values` that makes a geometry."""
        for value in values:
            try:
                geometry = self.case.geometry.replace(**{name: value})
            except UsageError:
                continue
            yield value, dataclasses.replace(self.case, geometry=geometry)

    def _counted(self, size: int, variants: dict[int, Scenario]) -> str:
        """Return where the finding stays but at `size`: FREE, that number alone, or as many or more."""
        shows = {other: self.shows(case) for other, case in variants.items() if is_legal(case)}
        if all(shows.values()):
            return FREE
        more = [shown for other, shown in shows.items() if other > size]
        return f"{size} or more" if more and all(more) else str(size)


def _renamed_once(case: Scenario, row: int, other: int) -> Iterator[Scenario]:
    """Yield `case` with one of several mentions of `row` changed; none where there is only one."""
    places = [
        (i, b) for i, round_ in enumerate(case.rounds) for b, request in enumerate(round_.requests) if request == row
    ]
    for i, b in places if len(places) > 1 else []:
        rounds = list(case.rounds)
        rounds[i] = put("requests", b, rounds[i], other)
        yield dataclasses.replace(case, rounds=tuple(rounds))


def _range(low: int, high: int, least: int, most: int) -> str:
    if low == high:
        return str(low)
    if high == most:
        return f"{low} or more"
    return f"at most {high}" if low == least else f"{low} to {high}"


def _spread(values: Sequence[int]) -> Sequence[int]:
    """Return at most _SPREAD of them, evenly."""
    return values[:: -(-len(values) // _SPREAD)]


def _also(values: Sequence[int], gone: Sequence[int] = ()) -> str:
    said = [f"{word} {_few(each)}" for word, each in (("also", values), ("not", gone)) if each]
    return f" ({'; '.join(said)})" if said else ""


def _few(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:_ALSO])) + (" and more" if len(values) > _ALSO else "")


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"
