"""Merge: unites the shards of campaigns of one plan that were run in several folders."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from dsa_verify.base.atomic_write import write_atomically
from dsa_verify.base.errors import UsageError
from fuzz.campaign.locks import held
from fuzz.campaign.plan import PLAN_FILE, load_or_create_plan, read_plan
from fuzz.campaign.shard_folder import (
    CAMPAIGN_LOCK,
    RECHECKS_FILE,
    STATES,
    WAIVERS_FILE,
    ShardResult,
    findings_in,
    read_json,
    shard_folder,
    shard_numbers,
)


def merge(sources: Sequence[Path], into: Path) -> int:
    """Unite the shards of `sources`, which must follow one plan, in the campaign `into`, and return how many were
    taken.

    A shard is taken from the first folder in which it has ended, or else in which it was begun: it is a pure function
    of the plan, so any will do. What another folder has found beyond that is kept: a subject may be flaky, or another
    version of itself.
    """
    plans = {source: read_plan(source) for source in sources}
    if (into / PLAN_FILE).exists():
        plans[into] = read_plan(into)
    first, plan = next(iter(plans.items()))
    for source, other in plans.items():
        if other != plan:
            raise UsageError(f"{source}: follows another plan than {first}; merge campaigns of one plan only")
    taken = 0
    with held(into / CAMPAIGN_LOCK):
        load_or_create_plan(into, dataclasses.asdict(plan), {})
        for source in sources:
            taken += sum(_take_shard(source, into, number) for number in shard_numbers(source))
            for name in (WAIVERS_FILE, RECHECKS_FILE):
                both = {**(read_json(source / name) or {}), **(read_json(into / name) or {})}
                if both:
                    write_atomically(into / name, json.dumps(both, indent=1) + "\n")
    return taken


def _take_shard(source: Path, into: Path, number: int) -> bool:
    """Return whether the shard was taken from `source`; its findings are, in either case."""
    theirs, ours = shard_folder(source, number), shard_folder(into, number)
    if ours.exists():
        mine, other = ShardResult.read(ours), ShardResult.read(theirs)
        if (mine is not None and mine.final) or other is None or not other.final:
            _add_findings(theirs, ours)
            return False
    fresh = ours.with_name(f".{ours.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(theirs, fresh)
    _add_findings(ours, fresh)
    shutil.rmtree(ours, ignore_errors=True)
    fresh.rename(ours)
    return True


def _add_findings(source: Path, into: Path) -> None:
    """Add what the shard in `source` found, and that in `into` did not, or is less sure of."""
    known = {record.key: record for record in findings_in(into)}
    for record in findings_in(source):
        if record.key in known and STATES.index(known[record.key].state) >= STATES.index(record.state):
            continue
        for path in (record.case, record.shrunk):
            if path is not None:
                write_atomically(into / path, (source / path).read_text(encoding="utf-8"))
        record.write(into)
