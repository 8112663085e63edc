"""Shard folder: what one shard of a campaign leaves on disk, and the only truth about it; the store is an index.

    spec.json       what the shard is a pure function of
    lock            held by the process that runs it, whose id it holds
    journal.json    the case that was launched last: there only while it runs
    progress.json   rounds done and checked, there only while an attempt runs; its age is the heartbeat
    repeat/         journal and progress of a process that repeats a case that ended another
    attempts/       one file for each attempt that ended otherwise than with a result, and what it lost
    cases/          the cases of findings
    findings/       one file for each finding, named for its key, so that finding it twice writes it once
    result.json     at the end

Every file is written whole or not at all: a kill at any moment leaves the old one or the new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dsa_verify.errors import HarnessError

STOP_FILE: Final = "stop"  # beside the shards: while it is there, they end
JOURNAL_FILE: Final = "journal.json"
PROGRESS_FILE: Final = "progress.json"
REPEAT_FOLDER: Final = "repeat"
# How sure a finding is, least first; "waived" and "gone" are said of it later (store.py).
STATES: Final = ("found", "flaky", "confirmed", "shrunk")
SETTLED: Final = frozenset({"flaky", "confirmed", "shrunk"})


class FolderInUse(HarnessError):
    """Another process writes this folder."""


def write_whole(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` by `text` at once; `durable`: it also survives the machine going down. OSError if there is no
    room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json(path: Path, data: Mapping[str, Any], *, durable: bool = True) -> None:
    write_whole(path, json.dumps(data, indent=1) + "\n", durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` wrote; None if it is not there."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise HarnessError(
            f"{path}: not what this tool wrote ({error}); remove it, and what it held is redone"
        ) from None
    return data


def read_progress(at: Path) -> dict[str, int]:
    """{rounds, checked} of the process that runs in `at`; 0 before it has said anything."""
    try:
        found = read_json(at / PROGRESS_FILE) or {}
    except HarnessError:  # not written durably: the machine went down
        found = {}
    return {"rounds": 0, "checked": 0, **found}


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock file `path` and write this process's id into it; FolderInUse if another process does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUse(f"{path.parent} is in use by process {holder(path)}; wait for it, or end it") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def holder(path: Path) -> int | None:
    """The process that last held the lock `path`."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return int(text) if text.isdigit() else None


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
    """What makes two sightings one finding."""

    system: str
    subject: str
    field: str | None
    diagnosis: str
    law: str | None
    planted: bool = False

    @classmethod
    def of(cls, finding: Mapping[str, Any], *, planted: bool = False) -> FindingKey:
        """Of a Finding as a dictionary."""
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
        """Of its file: readable, and different for different keys."""
        parts = ["planted" if self.planted else None, self.system, self.field, self.diagnosis, self.law]
        slug = re.sub(r"[^a-z0-9_]+", "-", "-".join(part for part in parts if part).lower())
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{slug[:100]}-{digest[:8]}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FindingRecord:
    """One finding of one shard. `finding`: a Finding as a dictionary, but for where its case is. `shown` of `repeats`:
    how often its case showed it again. `case`, `shrunk`: paths in the shard's folder. `note`: why it got no further."""

    key: FindingKey
    state: str
    finding: Mapping[str, Any]
    case: str | None = None
    shrunk: str | None = None
    shown: int = 0
    repeats: int = 0
    note: str | None = None

    def write(self, folder: Path) -> None:
        write_json(folder / "findings" / f"{self.key.name}.json", dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> FindingRecord | None:
        data = read_json(path)
        return None if data is None else cls(**{**data, "key": FindingKey(**data["key"])})


def findings_in(folder: Path) -> list[FindingRecord]:
    """The findings of a shard, by name."""
    records = (FindingRecord.read(path) for path in sorted((folder / "findings").glob("[!.]*.json")))
    return [record for record in records if record is not None]


def attempts_in(folder: Path) -> list[dict[str, Any]]:
    """The attempts that ended otherwise than with a result, in order."""
    found = (read_json(path) for path in sorted((folder / "attempts").glob("[!.]*.json")))
    return [attempt for attempt in found if attempt is not None]
