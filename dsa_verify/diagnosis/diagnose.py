"""From the differing elements of a field to an explanation.

Every pattern is tried on each of the first differing elements; the one that explains most of them wins, the earlier one
on a tie.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dsa_verify.buffers.region import LOUD_WORD, Region
from dsa_verify.contract.explanation import Cause, Explanation
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.layout import Compare, Row
from dsa_verify.diagnosis.evidence import Element, Evidence
from dsa_verify.diagnosis.patterns import INT32_END, PATTERNS, replayed_before
from dsa_verify.diagnosis.places import describe_place, shown
from dsa_verify.diagnosis.sentences import sentence
from dsa_verify.judge.judge import Difference, Phase
from dsa_verify.judge.law_regions import law_of, scheduled
from dsa_verify.judge.schedule_laws import LawBreak
from dsa_verify.systems.indexer import scheduled_lengths


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """An explanation of a field's first wrong element. `place`, `got` and `want` name it and its values for people."""

    explanation: Explanation
    place: str
    got: str
    want: str

    @property
    def sentence(self) -> str:
        """Put it into words."""
        return sentence(self.explanation, place=self.place, got=self.got, want=self.want)


def diagnose_field(evidence: Evidence, differences: Sequence[Difference]) -> Diagnosed:
    """Explain the first differing elements of one field in one round."""
    field = evidence.layout[differences[0].region.name]
    elements = [Element(field, d.region, d.row, d.column, d.word, d.got, d.want) for d in differences]
    first = elements[0]
    if field.compare is Compare.ITEMS and first.row == 0:
        elements = [e for e in elements if e.row == 0]  # with a wrong head the rows it counts mean nothing
    again = differences[0].phase is Phase.SECOND_REPLAY
    return Diagnosed(
        explanation=Explanation(Diagnosis.NOT_IDEMPOTENT, Cause.SECOND_REPLAY) if again else _best(evidence, elements),
        place=describe_place(evidence, field, first.row, first.column),
        got=shown(field, first.got),
        want=shown(field, first.want),
    )


def _best(evidence: Evidence, elements: Sequence[Element]) -> Explanation:
    first, field = elements[0], elements[0].field
    if field.row is Row.LAW:
        says = f": {field.says}" if field.says else ""
        return Explanation(Diagnosis.LAW_BROKEN, Cause.DECLARED_LAW, {"law": field.name, "says": says})
    most, best = 0, Explanation(Diagnosis.WRONG_VALUE, Cause.NOT_RECOGNISED)
    for pattern in PATTERNS:
        of_first = pattern(evidence, first)
        if of_first is None:
            continue
        count = sum(1 for e in elements if (x := pattern(evidence, e)) is not None and x.kind is of_first.kind)
        if count > most:
            most, best = count, of_first
    if field.elements >= INT32_END and best.kind in (Diagnosis.NEVER_WRITTEN, Diagnosis.STALE, Diagnosis.FROZEN):
        best = best.with_facts(rows=field.rows, columns=field.columns, elements=field.elements)
    return best


def if_replayed_again(evidence: Evidence, first: Difference, found: Explanation) -> Mapping[int, Explanation]:
    """What to say instead of `found`, by what the element holds once the same inputs, after a loud poison, have been
    replayed again; empty unless the element is as at capture in the first replay of its bucket."""
    field = evidence.layout[first.region.name]
    at_capture = evidence.capture.value(field, first.row, first.column) == first.got
    if first.phase is not Phase.REPLAY or not at_capture or replayed_before(evidence):
        return {}
    told = {
        first.want: Explanation(Diagnosis.STALE, Cause.ONE_REPLAY_LATE),
        LOUD_WORD: Explanation(Diagnosis.NEVER_WRITTEN, Cause.NO_REPLAY_WRITES),
    }
    if found.cause is Cause.VALUE_AT_CAPTURE:
        told[first.got] = found.with_facts(replay="again")
    return told


def broken_law(evidence: Evidence, region: Region) -> LawBreak | None:
    """What the schedule in `region` does to its tiles, by the laws alone; None if it breaks none (contract 3.5)."""
    found = scheduled_lengths(region.name)
    assert found is not None, f"{region.name} is no schedule"
    name, clamped = found
    law = law_of(evidence.layout, evidence.now.want[name])
    lengths = scheduled(law.variant, evidence.now.want[name].cpu(), clamped)
    breaks = law.judge(region.got.cpu().contiguous(), lengths.contiguous())
    return breaks[0] if breaks else None
