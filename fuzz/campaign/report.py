"""Campaign report: what a campaign has done, found and lost, from its store to a dictionary, to lines, to a status."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dsa_verify.base.errors import (
    STATUS_EQUAL,
    STATUS_FLAKY,
    STATUS_HARNESS,
    STATUS_INTERRUPTED,
    STATUS_MISMATCH,
    STATUS_NOTHING_VERIFIED,
)
from fuzz.campaign.index import Store
from fuzz.campaign.plan import read_plan

REPORT_SCHEMA: Final = 1
_FAILED: Final = ("harness failed", "no room", "given up")
# A canary that is masked: the subject's own finding came out at the other end in its place.
_ALIVE: Final = ("reported", "masked")

# The finding that a canary stands for must be in the store: what a shard claims of itself is no proof.
_CANARIES: Final = """
SELECT number, canary_fault AS fault, canary_verdict AS verdict, canary_why AS why,
    CASE canary_verdict
        WHEN 'reported' THEN EXISTS (SELECT 1 FROM sightings WHERE shard = number AND planted = 1 AND state = 'shrunk')
        WHEN 'masked' THEN EXISTS (SELECT 1 FROM sightings WHERE shard = number AND planted = 0)
        ELSE 0
    END AS stored
FROM shards WHERE canary_verdict IS NOT NULL ORDER BY number
"""


def summary(store: Store) -> dict[str, Any]:
    """Of everything in `store`, for JSON; `status` is what a campaign that ended now would end with."""
    shards = store.rows("SELECT * FROM shards ORDER BY number")
    attempts = store.rows("SELECT * FROM attempts ORDER BY shard, attempt")
    canaries = store.rows(_CANARIES)
    last = {attempt["shard"]: attempt for attempt in attempts}
    failed = [
        last[shard["number"]]
        for shard in shards
        if shard["ended"] == "unfinished" and last.get(shard["number"], {}).get("ended") in _FAILED
    ]
    damage = store.rows("SELECT * FROM damage ORDER BY shard, text")
    plan = read_plan(store.root)
    facts: dict[str, Any] = {
        "schema": REPORT_SCHEMA,
        "plan": plan.to_dict(),
        "replay_options": plan.replay_options(store.root),
        "shards": len(shards),
        "shards_ended": _counts(shards, "ended"),
        "rounds_requested": sum(shard["requested"] for shard in shards),
        "rounds_executed": sum(shard["executed"] for shard in shards),
        "rounds_lost_in_flight": sum(attempt["rounds_lost"] for attempt in attempts),
        "findings": store.rows("SELECT * FROM findings WHERE planted = 0 ORDER BY shard, key"),
        "canaries": _counts(canaries, "verdict"),
        "canaries_missing": [c for c in canaries if c["verdict"] not in _ALIVE or not c["stored"]],
        "attempts": attempts,
        "failed": failed,
        "damage": damage,
        "coverage": _coverage(store),
        "provenance": _provenances(store),
    }
    return {**facts, "status": status_of(facts)}


def status_of(facts: Mapping[str, Any]) -> int:
    """The exit status: a harness that may be blind outweighs what it says it saw."""
    states = [finding["state"] for finding in facts["findings"]]
    alive = any(facts["canaries"].get(verdict) for verdict in _ALIVE) or bool(states)
    if facts["failed"] or facts["damage"] or facts["canaries_missing"] or (facts["rounds_executed"] and not alive):
        return STATUS_HARNESS
    if any(finding["issue"] and finding["state"] == "gone" for finding in facts["findings"]):
        return STATUS_MISMATCH  # a waiver fails when its bug is gone
    if any(state in ("found", "confirmed", "shrunk") for state in states):
        return STATUS_MISMATCH
    if "flaky" in states:
        return STATUS_FLAKY
    return STATUS_EQUAL if facts["rounds_executed"] else STATUS_NOTHING_VERIFIED


def _counts(rows: Sequence[Mapping[str, Any]], column: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row[column]] = counts.get(row[column], 0) + 1
    return counts


def _coverage(store: Store) -> list[dict[str, Any]]:
    """By configuration: what at least one of its shards has visited."""
    rows = store.rows("SELECT * FROM coverage ORDER BY configuration")
    return [
        {
            "configuration": row["configuration"],
            "visited": row["possible"] - len(json.loads(row["never"])),
            "possible": row["possible"],
        }
        for row in rows
    ]


def _provenances(store: Store) -> list[Mapping[str, str]]:
    """What the shards' subjects say about their code, each answer once: more than one if it was changed on the way."""
    rows = store.rows(
        "SELECT provenance FROM shards WHERE provenance IS NOT NULL GROUP BY provenance ORDER BY MIN(number)"
    )
    return [json.loads(row["provenance"]) for row in rows]


def visited(facts: Mapping[str, Any]) -> str:
    """The coverage of all configurations, in one figure."""
    possible = sum(each["possible"] for each in facts["coverage"])
    seen = sum(each["visited"] for each in facts["coverage"])
    return (
        f"{100 * seen / possible:.1f} % of what {len(facts['coverage'])} configuration(s) can visit"
        if possible
        else "none"
    )


# Lines ---------------------------------------------------------------------------------------------------------------


def status_lines(facts: Mapping[str, Any]) -> list[str]:
    """Where the campaign stands."""
    ended = ", ".join(f"{count} {name}" for name, count in facts["shards_ended"].items()) or "none"
    states = _counts(facts["findings"], "state")
    found = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
    canaries = ", ".join(f"{count} {verdict}" for verdict, count in facts["canaries"].items()) or "none yet"
    return [
        f"shards:         {facts['shards']} ({ended})",
        f"rounds:         {facts['rounds_executed']:,} executed of {facts['rounds_requested']:,} requested",
        f"findings:       {found}",
        f"planted faults: {canaries}",
        f"coverage:       {visited(facts)}",
        f"lost in flight: {facts['rounds_lost_in_flight']:,} rounds in {len(facts['attempts'])} attempt(s)",
    ]


def damaged_lines(facts: Mapping[str, Any]) -> list[str]:
    """Which shards have a file that is not what was written there; of each, the others count."""
    return [f"shard {each['shard']}: damaged: {each['text']}" for each in facts["damage"]]


def report_lines(facts: Mapping[str, Any], root: Path) -> list[str]:
    """All of it: every finding with its case, every attempt that was lost, what is missing, the verdict."""
    lines = status_lines(facts)
    for finding in facts["findings"]:
        lines += ["", *finding_lines(finding, root, facts["replay_options"])]
    if facts["attempts"]:
        lines += ["", "attempts that ended without a result of their own:"]
        lines += [
            f"  shard {each['shard']}: {each['ended']}: {each['text']} ({each['rounds_lost']} rounds in flight lost)"
            for each in facts["attempts"]
        ]
    if facts["coverage"]:
        lines += ["", "coverage:"]
        lines += [f"  {each['visited']} of {each['possible']}  {each['configuration']}" for each in facts["coverage"]]
    if facts["provenance"]:
        lines += ["", "subjects of:"]
        lines += ["  " + ", ".join(f"{name} {value}" for name, value in each.items()) for each in facts["provenance"]]
    lines += ["", *verdict_lines(facts)]
    return lines


def finding_lines(finding: Mapping[str, Any], root: Path, replay_options: Sequence[str]) -> list[str]:
    """One finding. `replay_options`: what a replay of its case has to be given."""
    rate = f", shown again {finding['shown']} of {finding['repeats']} times" if finding["repeats"] else ""
    waived = f" for {finding['issue']}" if finding["issue"] else ""
    lines = [
        f"{finding['state'].upper()}{waived} {finding['key']} (in {finding['sightings']} shard(s){rate})",
        f"  {finding['sentence']}",
    ]
    if finding["rules"]:
        lines.append(f"  rule: {finding['rules']}")
    if finding["note"]:
        lines.append(f"  {finding['note']}")
    if finding["path"]:
        command = ["dsa-verify", "replay", str(root / finding["path"]), *replay_options]
        lines.append(f"  reproduce: {shlex.join(command)}")
    return lines


def verdict_lines(facts: Mapping[str, Any]) -> list[str]:
    """What the exit status stands for."""
    lines = [
        f"shard {each['number']}: the planted fault {each['fault']} was not reported "
        f"({each['why'] or 'it is not in the store'}): this campaign may be blind"
        for each in facts["canaries_missing"]
    ]
    lines += [f"shard {each['shard']}: {each['ended']}: {each['text']}" for each in facts["failed"]]
    lines += damaged_lines(facts)
    lines += [
        f"{finding['key']} is waived for {finding['issue']} and gone: remove the waiver"
        for finding in facts["findings"]
        if finding["issue"] and finding["state"] == "gone"
    ]
    waived = sum(finding["state"] == "waived" for finding in facts["findings"])
    words = {
        STATUS_EQUAL: f"no finding beyond {waived} waived" if waived else "no finding",
        STATUS_MISMATCH: "findings",
        STATUS_HARNESS: "the harness failed, or may be blind: no verdict",
        STATUS_NOTHING_VERIFIED: "nothing was verified",
        STATUS_FLAKY: "only flaky findings",
        STATUS_INTERRUPTED: "interrupted; resume with the same command",
    }
    status = facts["status"]
    return [*lines, f"{facts['rounds_executed']:,} rounds: {words[status]}; exit status {status}"]
