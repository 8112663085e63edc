"""Verdicts: what people and rechecks say of a campaign's findings after they were found, kept beside the shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from dsa_verify.base.errors import UsageError
from fuzz.campaign.locks import held
from fuzz.campaign.shard_folder import RECHECKS_FILE, WAIVERS_FILE, read_json, write_json
from fuzz.campaign.state import CampaignState

VERDICTS_LOCK: Final = "verdicts.lock"


def waive(root: Path, key: str, issue: str) -> None:
    """Waive the finding `key` for `issue`. UsageError if there is no such finding, or if it is a planted one."""
    shards = CampaignState.read(root).shards.values()
    keys = {sighting.key for shard in shards for sighting in shard.sightings}
    known = sorted(each.name for each in keys if not each.planted)
    if key not in known:
        raise UsageError(f"finding {key!r} is unknown; known findings: {', '.join(known) or 'none'}")
    if not issue.strip():
        raise UsageError("issue: empty; say where the defect is tracked")
    _note(root, WAIVERS_FILE, key, issue)


def note_recheck(root: Path, key: str, shown: int, repeats: int, sightings: int) -> None:
    """Note that the case of the finding `key`, seen in so many shards, showed it in `shown` of `repeats` replays."""
    _note(root, RECHECKS_FILE, key, [shown, repeats, sightings])


def _note(root: Path, name: str, key: str, what: Any) -> None:
    with held(root / VERDICTS_LOCK, wait=True):
        write_json(root / name, {**(read_json(root / name) or {}), key: what})
