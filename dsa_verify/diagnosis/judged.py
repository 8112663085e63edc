"""Judged: an account of the differences of one region, by what kind of memory it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dsa_verify.base.errors import HarnessError
from dsa_verify.buffers.region import Kind
from dsa_verify.contract.explanation import Cause, Explanation
from dsa_verify.contract.finding import INPUT_RULE, LAW_RULE, MEMORY_RULE, Diagnosis, Facts, Finding
from dsa_verify.diagnosis.account import Account
from dsa_verify.diagnosis.diagnose import broken_law, diagnose_field, if_replayed_again
from dsa_verify.diagnosis.evidence import Evidence
from dsa_verify.diagnosis.other_memory import (
    explain_guard,
    explain_input,
    explain_other_replays,
    explain_tail,
    explain_wider_bucket,
)
from dsa_verify.judge.judge import RING_ENTRIES, Difference, Phase, differences_at, wrong_words
from dsa_verify.replay.bucket import CapturedBucket
from dsa_verify.systems.indexer import scheduled_lengths


def judged(base: Finding, evidence: Evidence, differences: Sequence[Difference], captured: CapturedBucket) -> Account:
    """Return the account of `differences`, which lie in one region. `base`: what is known without looking at them.

    HarnessError for an oracle that wrote beyond its own buffer.
    """
    first = differences[0]
    base = dataclasses.replace(
        base, field=first.region.name, section=_section(evidence, first), got=first.got, want=first.want
    )
    if (explanation := _of_other_memory(base, evidence, first)) is not None:
        return Account(base=base, explanation=explanation)
    if first.region.kind is Kind.LAW:
        broken = captured.laws.broken(first.region.name)[0]
        base = dataclasses.replace(base, law=broken.law.value, section=LAW_RULE)
        facts: Facts = {"field": first.region.name, "broken": broken.sentence}
        return Account(base=base, explanation=Explanation(Diagnosis.LAW_BROKEN, Cause.LAW, facts))
    return _of_a_field(base, evidence, differences, captured)


def _of_other_memory(base: Finding, evidence: Evidence, first: Difference) -> Explanation | None:
    """What is said of memory that is not a field's, and of a field outside the replay of its bucket; else None."""
    region, bucket = first.region, evidence.layout.bucket if base.bucket is None else base.bucket
    if region.kind is Kind.ORACLE_GUARD:
        raise HarnessError(f"the oracle wrote beyond its buffer {region.name}; no verdict can be drawn")
    if region.kind is Kind.GUARD:
        return explain_guard(first, base.differing)
    if region.kind is Kind.WIDER_BUCKET:
        return explain_wider_bucket(first, bucket, evidence.layout[region.name].rows, base.differing)
    if region.kind is Kind.LAW:
        return None
    if first.phase is Phase.FILLED:
        return explain_tail(first, evidence.now.raw, evidence.layout.bucket)
    if region.kind is Kind.INPUT:
        return explain_input(first)
    return explain_other_replays(first, bucket) if first.phase is Phase.BEFORE else None


def _of_a_field(
    base: Finding, evidence: Evidence, differences: Sequence[Difference], captured: CapturedBucket
) -> Account:
    first = differences[0]
    found = diagnose_field(evidence, differences)
    is_schedule = scheduled_lengths(first.region.name) is not None
    return Account(
        base=base,
        explanation=found.explanation,
        place=found.place,
        got=found.got,
        want=found.want,
        before_graph=first.phase is Phase.BEFORE_GRAPH,
        said=own_words(captured, first),
        law_break=broken_law(evidence, first.region) if is_schedule else None,
        difference=first,
        after_another_replay=if_replayed_again(evidence, first, found.explanation),
    )


def _section(evidence: Evidence, first: Difference) -> str | None:
    """Return the section of the contract that states what `first` breaks."""
    if first.phase is Phase.FILLED:
        return None  # the sentence says why a pad row is reset
    if first.region.kind is Kind.INPUT:
        return INPUT_RULE
    if first.region.kind is Kind.FIELD and first.phase is not Phase.BEFORE:
        return evidence.layout[first.region.name].section or None
    return MEMORY_RULE


def own_words(captured: CapturedBucket, difference: Difference) -> str:
    """Return what the subject itself has to say of a wrong element; empty for most."""
    own = getattr(captured.subject, "explain", None)
    name, column = difference.region.name, difference.column
    try:
        said = own(name, difference.row, column, difference.got, difference.want) if own is not None else None
    except Exception as error:  # a user's method may raise anything, and the finding stands without its words
        said = f"explain raised {type(error).__name__}: {error}"
    return said or ""


def first_differences(seen: Difference) -> list[Difference]:
    """Return the differences that a region shows now, the first RING_ENTRIES in row-major order, all like `seen`.

    The ring has whichever the device came to first; after a round the buffers still hold what its last look judged.
    """
    region = seen.region
    wrong, want = wrong_words(region)
    # Rows first: a whole table may have more elements than `nonzero` takes.
    rows = wrong.any(1).nonzero().flatten()[:RING_ENTRIES]
    places = wrong[rows].nonzero()[:RING_ENTRIES]
    at = list(zip(rows[places[:, 0]].tolist(), places[:, 1].tolist(), strict=True))
    return differences_at(region, want, at, seen.round, seen.phase) or [seen]
