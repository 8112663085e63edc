"""Accounts: what is wrong after a replay, in the order in which it is reported, without what follows from it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, TypeVar

from dsa_verify.buffers.region import Kind
from dsa_verify.contract.explanation import Cause, Explanation
from dsa_verify.contract.finding import MEMORY_RULE, Diagnosis, Facts
from dsa_verify.contract.glue_route import Route
from dsa_verify.diagnosis.account import Account
from dsa_verify.diagnosis.evidence import Evidence
from dsa_verify.diagnosis.judged import first_differences, judged
from dsa_verify.diagnosis.other_findings import new_finding
from dsa_verify.judge.judge import Difference, Phase
from dsa_verify.replay.bucket import AddressChange, CapturedBucket, WrongRoute
from dsa_verify.replay.replayer import Replayer
from dsa_verify.replay.setup import ReplaySetup

_Listed = TypeVar("_Listed", AddressChange, WrongRoute)
_ROUTES: Final = {Route.GLUE: "the captured graph", Route.EAGER: "eager work"}


def accounts_of(
    setup: ReplaySetup, replayer: Replayer, captured: CapturedBucket, evidence: Evidence, told: set[object]
) -> list[Account]:
    """Return what is wrong after this replay, but for what is in `told`, and add it there."""
    tallies = replayer.poll()
    by_region: dict[tuple[Phase, int], list[tuple[int, Difference]]] = defaultdict(list)
    counts: dict[int, int] = {}
    for bucket, tally in tallies.items():
        for region, count in tally.differing.items():
            counts[id(region)] = count
        for difference in tally.first:
            by_region[(difference.phase, id(difference.region))].append((bucket, difference))
    replaced = {change.field for change in replayer.address_changes}
    found = [_replaced(setup, change) for change in _untold(replayer.address_changes, told)]
    found += [_misrouted(setup, wrong) for wrong in _untold(replayer.wrong_routes, told)]
    # Wrong inputs come first: what follows from them is wrong, too.
    ordered = sorted(by_region.items(), key=lambda item: item[0][0] is not Phase.FILLED)
    fields = {entries[0][1].region.name for _, entries in ordered if entries[0][1].region.kind is Kind.FIELD}
    seen = [entries[0][1] for entries in by_region.values()]
    for key, entries in ordered:
        bucket, first = entries[0]
        if key in told:
            continue
        if first.region.kind is Kind.FIELD and first.region.name in replaced:
            continue
        if first.region.kind is Kind.LAW and first.region.name in fields:
            continue  # the field's own finding says what the schedule does to its tiles
        if _follows(first, seen):
            continue
        told.add(key)
        differences = [difference for _, difference in entries]
        if first.region.kind is Kind.FIELD and first.phase in (Phase.REPLAY, Phase.SECOND_REPLAY):
            differences = first_differences(first)
        base = new_finding(setup, Diagnosis.WRONG_VALUE, bucket, first.round)
        base = dataclasses.replace(base, differing=counts.get(id(first.region), 0))
        found.append(judged(base, evidence, differences, captured))
    return found


def _replaced(setup: ReplaySetup, change: AddressChange) -> Account:
    base = new_finding(setup, Diagnosis.BUFFER_REPLACED, change.bucket, change.round)
    base = dataclasses.replace(base, field=change.field, section=MEMORY_RULE)
    facts: Facts = {"field": change.field, "bucket": change.bucket, "change": change.change}
    return Account(base=base, explanation=Explanation(Diagnosis.BUFFER_REPLACED, Cause.BUFFER_REPLACED, facts))


def _misrouted(setup: ReplaySetup, wrong: WrongRoute) -> Account:
    taken, expected = _ROUTES[wrong.taken], _ROUTES[wrong.expected]
    facts: Facts = {"raw": wrong.raw, "bucket": wrong.bucket, "taken": taken, "expected": expected}
    return Account(
        base=new_finding(setup, Diagnosis.WRONG_ROUTE, wrong.bucket, wrong.round),
        explanation=Explanation(Diagnosis.WRONG_ROUTE, Cause.WRONG_ROUTE, facts),
    )


def _untold(items: Sequence[_Listed], told: set[object]) -> list[_Listed]:
    """Return those of `items` that are not in `told`, once each, and add them to it."""
    new = [item for item in dict.fromkeys(items) if item not in told]
    told.update(new)
    return new


def _follows(first: Difference, seen: Sequence[Difference]) -> bool:
    """Return whether what `first` says follows from another of `seen`, which lie in the same round."""
    region = first.region
    if first.phase is Phase.REPLAY:
        # What was wrong before the graph is still wrong after it.
        before = Phase.FILLED if region.kind is Kind.INPUT else Phase.BEFORE_GRAPH
        return any(each.phase is before and each.region.name == region.name for each in seen)
    if first.phase is Phase.SECOND_REPLAY:
        earlier = [each.region for each in seen if each.phase is Phase.REPLAY]
        if region.kind is Kind.FIELD:
            # The first replay has changed an input, so that the second had another.
            return any(each.kind is Kind.INPUT for each in earlier)
        return any((each.kind, each.name) == (region.kind, region.name) for each in earlier)
    return False
