"""Shard folder: what one shard of a campaign leaves on disk, and the only truth about it.

    owner           held by whoever supervises the shard (locks.py)
    spec.json       what the shard is a pure function of
    lock            held by the process that runs it
    journal.json    the case that was launched last: there only while it runs
    progress.json   rounds done and checked, there only while an attempt runs; its age is the heartbeat
    repeat/         journal and progress of a process that repeats a case that ended another
    attempts/       one file for each attempt that ended otherwise than with a result, and what it lost
    cases/          the cases of findings
    findings/       one file for each finding, named for its key, so that finding it twice writes it once
    result.json     at the end

Every file but the log and the locks is written whole or not at all: a kill leaves the old one or the new one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dsa_verify.base.atomic_write import write_atomically
from dsa_verify.base.errors import STATUS_NO_ROOM, HarnessError
from dsa_verify.contract.finding import Finding

# Beside the shards.
CAMPAIGN_LOCK: Final = "campaign.lock"
STOP_FILE: Final = "stop"  # while it is there, they end
WAIVERS_FILE: Final = "waivers.json"  # {key of a finding: the issue that it is waived for}
# {key of a finding: [shown, repeats, sightings] when its case was replayed last}. One that more shards have seen since
# then is not gone.
RECHECKS_FILE: Final = "rechecks.json"
OWNER_FILE: Final = "owner"
JOURNAL_FILE: Final = "journal.json"
PROGRESS_FILE: Final = "progress.json"
RESULT_FILE: Final = "result.json"
SPEC_FILE: Final = "spec.json"
LOCK_FILE: Final = "lock"
REPEAT_FOLDER: Final = "repeat"
# How sure a finding is, least first. What a ledger waives is "gone" from a shard that had to show it, which another one
# may do; both are also said of findings later (verdicts.py).
STATES: Final = ("gone", "waived", "found", "flaky", "confirmed", "shrunk")


def write_json(path: Path, data: Mapping[str, Any], *, durable: bool = True) -> None:
    write_atomically(path, json.dumps(data, indent=1) + "\n", durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return what `write_json` wrote; None if it is not there."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:  # no JSON, or no text
        raise damaged(path, error) from None
    if not isinstance(data, dict):
        raise damaged(path, f"it holds a {type(data).__name__}")
    return data


def damaged(path: Path, why: object) -> HarnessError:
    """Return the error that says that `path` does not hold what was written there."""
    return HarnessError(f"{path} is corrupt ({why}). Delete it; the work will be repeated.")


def read_progress(at: Path) -> dict[str, int]:
    """Return {rounds, checked} of the process that runs in `at`; 0 before it has said anything."""
    try:
        found = read_json(at / PROGRESS_FILE) or {}
    except HarnessError:  # not written durably: the machine went down
        found = {}
    return {"rounds": 0, "checked": 0, **found}


def signs_of_life(folder: Path) -> tuple[int, ...]:
    """Return what changes while a process runs in `folder`, or repeats a case for it: when its files were written,
    whatever the clock that says so."""
    return tuple(
        _written_ns(at / name) for at in (folder, folder / REPEAT_FOLDER) for name in (JOURNAL_FILE, PROGRESS_FILE)
    )


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def shard_folder(root: Path, number: int) -> Path:
    return root / "shards" / f"{number:06d}"


def shard_numbers(root: Path) -> list[int]:
    """Numbers of the shards that have a folder in `root`, ascending."""
    return sorted(int(path.name) for path in (root / "shards").glob("[0-9]*") if path.name.isdigit())


def campaign_root(folder: Path) -> Path:
    return folder.parent.parent


# Findings ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FindingKey:
    """Two sightings with the same key are one finding."""

    system: str
    subject: str
    field: str | None
    diagnosis: str
    law: str | None
    planted: bool = False

    @classmethod
    def of(cls, finding: Mapping[str, Any], *, planted: bool = False) -> FindingKey:
        """Return the key of a Finding as a dictionary."""
        return cls(
            system=finding["system"],
            subject=finding["subject"],
            field=finding.get("field"),
            diagnosis=finding["diagnosis"],
            law=finding.get("law"),
            planted=planted,
        )

    @property
    def name(self) -> str:
        """Return the name of its file: readable, and different for different keys."""
        parts = ["planted" if self.planted else None, self.system, self.field, self.diagnosis, self.law]
        slug = re.sub(r"[^a-z0-9_]+", "-", "-".join(part for part in parts if part).lower())
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{slug[:100]}-{digest[:8]}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FindingRecord:
    """One finding of one shard. `finding`: a Finding as a dictionary, but for where its case is. `shown` of `repeats`:
    how often its case showed it again. `case`, `shrunk`: paths in the shard's folder. `note`: why it got no further.
    `waiver`: the one that this is what came of."""

    key: FindingKey
    state: str
    finding: Mapping[str, Any]
    case: str | None = None
    shrunk: str | None = None
    shown: int = 0
    repeats: int = 0
    note: str | None = None
    waiver: str | None = None

    @classmethod
    def of(cls, finding: Finding, *, case: str, planted: bool = False) -> FindingRecord:
        """Return the record of a finding that was just found."""
        facts = {name: value for name, value in finding.to_dict().items() if name not in ("case", "reproduce")}
        return cls(key=FindingKey.of(facts, planted=planted), state="found", finding=facts, case=case)

    @property
    def is_final(self) -> bool:
        """Return whether no more can be made of it; of one confirmed without a note, a killed process was about to."""
        return self.state in ("flaky", "shrunk") or (self.state == "confirmed" and self.note is not None)

    def write(self, folder: Path) -> None:
        write_json(folder / "findings" / f"{self.key.name}.json", dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> FindingRecord | None:
        data = read_json(path)
        try:
            return None if data is None else cls(**{**data, "key": FindingKey(**data["key"])})
        except (TypeError, KeyError) as error:
            raise damaged(path, error) from None


def findings_in(folder: Path) -> list[FindingRecord]:
    """The findings of a shard, by name."""
    records = (FindingRecord.read(path) for path in files_of(folder, "findings"))
    return [record for record in records if record is not None]


def attempts_in(folder: Path) -> list[dict[str, Any]]:
    """Return the attempts that ended otherwise than with a result, in order."""
    found = (read_json(path) for path in files_of(folder, "attempts"))
    return [attempt for attempt in found if attempt is not None]


def files_of(folder: Path, kind: str) -> list[Path]:
    """The files of a shard's `findings` or `attempts`, by name."""
    return sorted((folder / kind).glob("[!.]*.json"))


class CaseNotSaved(HarnessError):
    """A finding whose case could not be written: nothing could be made of it, so the shard is to be run again."""

    status = STATUS_NO_ROOM


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
    """A shard ended like this. `ended`: "complete"; "stopped" (the campaign's time was over, redone on resuming); else
    why its rounds were not all run. `executed`: rounds that were judged. `canary`: {fault, verdict, finding, why}.
    `coverage`: {configuration, visited, never, digest}. `failed`: the harness's own failure, which gives no verdict.
    `provenance`: what the subject says about its code (subject.py)."""

    number: int
    system: str
    configuration: str
    ended: str
    requested: int
    executed: int
    wall_s: float = 0.0
    canary: Mapping[str, Any] | None = None
    coverage: Mapping[str, Any] | None = None
    failed: bool = False
    provenance: Mapping[str, str] | None = None

    @property
    def final(self) -> bool:
        """Return whether resuming leaves it as it is."""
        return self.ended != "stopped" and not self.failed

    def write(self, folder: Path) -> None:
        write_json(folder / RESULT_FILE, dataclasses.asdict(self))

    @classmethod
    def read(cls, folder: Path) -> ShardResult | None:
        data = read_json(folder / RESULT_FILE)
        try:
            return None if data is None else cls(**data)
        except TypeError as error:
            raise damaged(folder / RESULT_FILE, error) from None
