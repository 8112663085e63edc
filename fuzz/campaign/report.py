"""Campaign report: what a campaign has done, found and lost, from its state to a dictionary, to lines, to a status."""

from __future__ import annotations

import json
import shlex
from collections import Counter
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
from fuzz.campaign.plan import read_plan
from fuzz.campaign.shard_folder import STATES, FindingKey
from fuzz.campaign.state import CampaignState, ShardState, Sighting

REPORT_SCHEMA: Final = 1
_FAILED: Final = ("harness failed", "no room", "given up")
# A canary that is masked: the subject's own finding came out at the other end in its place.
_ALIVE: Final = ("reported", "masked")


def summary(state: CampaignState) -> dict[str, Any]:
    """Summarise `state` for JSON. `status` is what a campaign that ended now would end with."""
    shards = [state.shards[number] for number in sorted(state.shards)]
    counted = [shard for shard in shards if shard.ended is not None]
    canaries = [_canary(shard, shard.canary) for shard in counted if shard.canary is not None]
    attempts = [attempt for shard in shards for attempt in _attempts(shard)]
    last = [_attempts(shard)[-1] for shard in counted if shard.ended == "unfinished" and shard.attempts]
    plan = read_plan(state.root)
    facts: dict[str, Any] = {
        "schema": REPORT_SCHEMA,
        "plan": plan.to_dict(),
        "replay_options": plan.replay_options(state.root),
        "shards": len(counted),
        "shards_ended": dict(Counter(shard.ended for shard in counted)),
        "rounds_requested": sum(shard.requested for shard in counted),
        "rounds_executed": sum(shard.executed for shard in counted),
        "rounds_lost_in_flight": sum(attempt["rounds_lost"] for attempt in attempts),
        "findings": _findings(state),
        "canaries": dict(Counter(canary["verdict"] for canary in canaries)),
        "canaries_missing": [c for c in canaries if c["verdict"] not in _ALIVE or not c["stored"]],
        "attempts": attempts,
        "failed": [attempt for attempt in last if attempt["ended"] in _FAILED],
        "damage": [{"shard": shard.number, "text": text} for shard in shards for text in sorted(shard.damage)],
        "coverage": _coverage(state),
        "provenance": _provenances(counted),
    }
    return {**facts, "status": status_of(facts)}


def _attempts(shard: ShardState) -> list[dict[str, Any]]:
    """Return the attempts of a shard in order."""
    in_order = sorted(shard.attempts, key=lambda attempt: attempt["attempt"])
    return [{"shard": shard.number, **attempt} for attempt in in_order]


def _canary(shard: ShardState, canary: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a canary. The finding that it stands for must be stored: what a shard claims of itself is no proof."""
    stored = {
        "reported": any(each.key.planted and each.record.state == "shrunk" for each in shard.sightings),
        "masked": any(not each.key.planted for each in shard.sightings),
    }
    return {"number": shard.number, **canary, "stored": int(stored.get(canary["verdict"], False))}


def _findings(state: CampaignState) -> list[dict[str, Any]]:
    """List each finding once, as the shard saw it that is surest of it, in the order of those shards."""
    by_key: dict[FindingKey, list[Sighting]] = {}
    for number in sorted(state.shards):
        for sighting in state.shards[number].sightings:
            if not sighting.key.planted:
                by_key.setdefault(sighting.key, []).append(sighting)
    findings = [_finding(key.name, sightings, state) for key, sightings in by_key.items()]
    return sorted(findings, key=lambda finding: (finding["shard"], finding["key"]))


def _finding(name: str, sightings: Sequence[Sighting], state: CampaignState) -> dict[str, Any]:
    # The first of those that are as sure.
    best = max(sightings, key=lambda sighting: STATES.index(sighting.record.state))
    key, record = best.key, best.record
    recheck, issue, said = state.rechecks.get(name), state.waivers.get(name), record.state
    if recheck is not None and recheck.shown == 0 and len(sightings) <= recheck.sightings:
        said = "gone"
    elif issue is not None:
        said = "waived"
    return {
        "key": name,
        "planted": 0,
        "system": key.system,
        "subject": key.subject,
        "field": key.field,
        "diagnosis": key.diagnosis,
        "law": key.law,
        "state": said,
        "issue": issue if issue is not None else record.waiver,
        "shown": record.shown,
        "repeats": record.repeats,
        "sentence": record.finding["sentence"],
        "rules": ", ".join(record.finding.get("contract", ())),
        "path": best.path,
        "note": record.note,
        "shard": best.shard,
        "sightings": len(sightings),
    }


def status_of(facts: Mapping[str, Any]) -> int:
    """Return the exit status: a harness that may be blind outweighs what it says it saw."""
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


def _coverage(state: CampaignState) -> list[dict[str, Any]]:
    """List by configuration what at least one of its shards has visited."""
    return [
        {"configuration": name, "visited": each.possible - len(each.never), "possible": each.possible}
        for name, each in sorted(state.coverage.items())
    ]


def _provenances(shards: Sequence[ShardState]) -> list[Mapping[str, str]]:
    """List what the shards' subjects say about their code, each answer once: it may have changed on the way."""
    return [json.loads(text) for text in dict.fromkeys(shard.provenance for shard in shards) if text is not None]


def visited(facts: Mapping[str, Any]) -> str:
    """Return the coverage of all configurations, in one figure."""
    possible = sum(each["possible"] for each in facts["coverage"])
    seen = sum(each["visited"] for each in facts["coverage"])
    return (
        f"{100 * seen / possible:.1f} % of what {len(facts['coverage'])} configuration(s) can visit"
        if possible
        else "none"
    )


# Lines ---------------------------------------------------------------------------------------------------------------


def status_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return where the campaign stands."""
    ended = ", ".join(f"{count} {name}" for name, count in facts["shards_ended"].items()) or "none"
    states = Counter(finding["state"] for finding in facts["findings"])
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
    """Return which shards have a damaged file; the other files of such a shard still count."""
    return [f"shard {each['shard']}: damaged: {each['text']}" for each in facts["damage"]]


def report_lines(facts: Mapping[str, Any], root: Path) -> list[str]:
    """Return all of it: every finding with its case, every attempt that was lost, what is missing, the verdict."""
    lines = status_lines(facts)
    for finding in facts["findings"]:
        lines += ["", *finding_lines(finding, root, facts["replay_options"])]
    if facts["attempts"]:
        lines += ["", "attempts that ended without a result of their own:"]
        lines += [f"  {attempt_line(each['shard'], each)}" for each in facts["attempts"]]
    if facts["coverage"]:
        lines += ["", "coverage:"]
        lines += [f"  {each['visited']} of {each['possible']}  {each['configuration']}" for each in facts["coverage"]]
    if facts["provenance"]:
        lines += ["", "subjects of:"]
        lines += ["  " + ", ".join(f"{name} {value}" for name, value in each.items()) for each in facts["provenance"]]
    lines += ["", *verdict_lines(facts)]
    return lines


def attempt_line(shard: int, attempt: Mapping[str, Any]) -> str:
    """Return how an attempt of `shard` ended."""
    return f"shard {shard}: {attempt['ended']}: {attempt['text']} ({attempt['rounds_lost']} rounds in flight lost)"


def finding_lines(finding: Mapping[str, Any], root: Path, replay_options: Sequence[str]) -> list[str]:
    """Return one finding. `replay_options`: what a replay of its case has to be given."""
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
    """Return what the exit status stands for."""
    lines = [
        f"shard {each['number']}: the planted fault {each['fault']} was not reported "
        f"({each['why'] or 'its finding is not stored'}): this campaign may be blind"
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
