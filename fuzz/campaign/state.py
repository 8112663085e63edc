"""CampaignState: everything that the shard folders of a campaign say, read in one pass.

The folders are the only truth, and reading them writes nothing. A file that is damaged is named in `damage` of its
shard; it hides neither another file nor another shard. A campaign that runs reads a shard again when it has ended.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dsa_verify.base.errors import HarnessError
from fuzz.campaign.shard_folder import (
    RECHECKS_FILE,
    RESULT_FILE,
    SPEC_FILE,
    STATES,
    WAIVERS_FILE,
    FindingKey,
    FindingRecord,
    ShardResult,
    damaged,
    files_of,
    read_json,
    shard_folder,
    shard_numbers,
)

T = TypeVar("T")
# A file that is JSON and has the right keys, with values that nobody wrote, raises one of these.
_NOT_AS_WRITTEN = (KeyError, TypeError, ValueError, AttributeError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A finding as one shard saw it. `path`: of its smallest case, from the campaign's folder."""

    shard: int
    record: FindingRecord
    path: str | None

    @property
    def key(self) -> FindingKey:
        return self.record.key


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """The folder of one shard says this. `ended` is "unfinished" while there is no result, and None if not even its
    specification can be read. `canary`: {fault, verdict, why} of the fault that it planted. `attempts`: of each process
    that left no result {attempt, ended, text, rounds_lost}. `damage` has a text for each file that cannot be read."""

    number: int
    ended: str | None = None
    requested: int = 0
    executed: int = 0
    canary: Mapping[str, Any] | None = None
    provenance: str | None = None
    attempts: tuple[Mapping[str, Any], ...] = ()
    sightings: tuple[Sighting, ...] = ()
    damage: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationCoverage:
    """`possible` counts what a configuration can visit; `never` is what none of its shards has visited."""

    possible: int
    never: frozenset[tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """The case of a finding, seen in so many shards, showed it in `shown` of `repeats` replays."""

    shown: int
    repeats: int
    sightings: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CampaignState:
    """The shards of the campaign in `root` by number, the coverage by configuration, and what was said of findings
    later, by their keys: the issue that one is waived for, and how its last recheck ended.

    Coverage is kept for each configuration and not for each shard, as a night has too many shards to keep it of all.
    """

    root: Path
    shards: Mapping[int, ShardState]
    coverage: Mapping[str, ConfigurationCoverage]
    waivers: Mapping[str, str]
    rechecks: Mapping[str, Recheck]

    @classmethod
    def read(cls, root: Path) -> CampaignState:
        """Read all folders of the campaign in `root`. HarnessError if a file of verdicts cannot be read."""
        shards: dict[int, ShardState] = {}
        coverage: dict[str, ConfigurationCoverage] = {}
        for number in shard_numbers(root):
            shards[number] = _read_shard(root, number, coverage)
        waivers = _read_verdicts(root / WAIVERS_FILE, _text)
        rechecks = _read_verdicts(root / RECHECKS_FILE, lambda counts: _recheck(*counts))
        return cls(root=root, shards=shards, coverage=coverage, waivers=waivers, rechecks=rechecks)

    def with_shards(self, numbers: Iterable[int]) -> CampaignState:
        """Return the state with the shards `numbers` as their folders are now."""
        coverage = dict(self.coverage)
        fresh = {number: _read_shard(self.root, number, coverage) for number in numbers}
        return dataclasses.replace(self, shards={**self.shards, **fresh}, coverage=coverage)


# Shards --------------------------------------------------------------------------------------------------------------


class _ShardReader:
    """Reads the files of one shard and collects a text for each that is damaged."""

    def __init__(self, root: Path, number: int) -> None:
        self.root, self.number, self.folder = root, number, shard_folder(root, number)
        self.damage: list[str] = []

    def attempt(self, path: Path, read: Callable[[], Any]) -> Any:
        """Return what `read` makes of `path`; None if it is damaged, which is then noted."""
        try:
            return read()
        except HarnessError as error:
            self.damage.append(str(error))
        except (OSError, *_NOT_AS_WRITTEN) as error:
            self.damage.append(str(damaged(path, error)))
        return None

    def each(self, kind: str, read: Callable[[Path], Any], identity: Callable[[Any], Any]) -> tuple[Any, ...]:
        """Return what `read` makes of each file of `kind`; one that repeats the identity of another is damaged."""
        found: dict[Any, Any] = {}

        def add(path: Path) -> None:
            item = read(path)
            if item is None:
                return  # it was removed just now
            if identity(item) in found:
                raise ValueError("another file says the same of itself")
            found[identity(item)] = item

        for path in files_of(self.folder, kind):
            self.attempt(path, lambda path=path: add(path))  # type: ignore[misc]
        return tuple(found.values())


def _read_shard(root: Path, number: int, coverage: dict[str, ConfigurationCoverage]) -> ShardState:
    """Read one file at a time, so that a damaged one takes no other with it. Adds to `coverage` what is covered."""
    reader = _ShardReader(root, number)
    path = reader.folder / RESULT_FILE
    result = reader.attempt(path, lambda: ShardResult.read(reader.folder))
    state = None if result is None else reader.attempt(path, lambda: _ended_shard(number, result))
    if state is None:
        state = reader.attempt(reader.folder / SPEC_FILE, lambda: _unfinished_shard(number, reader.folder))
    elif result.coverage is not None:
        reader.attempt(path, lambda: _cover(coverage, result))
    attempts = reader.each("attempts", _read_attempt, lambda attempt: attempt["attempt"])
    sightings = reader.each("findings", lambda path: _read_sighting(reader, path), lambda sighting: sighting.key)
    return dataclasses.replace(
        state or ShardState(number=number), attempts=attempts, sightings=sightings, damage=tuple(reader.damage)
    )


def _ended_shard(number: int, result: ShardResult) -> ShardState:
    canary = result.canary or {}
    return ShardState(
        number=number,
        ended=_text(result.ended),
        requested=int(result.requested),
        executed=int(result.executed),
        canary={
            "fault": _optional_text(canary.get("fault")),
            "verdict": _text(canary["verdict"]),
            "why": _optional_text(canary.get("why")),
        }
        if canary.get("verdict") is not None
        else None,
        provenance=json.dumps(dict(result.provenance), sort_keys=True) if result.provenance else None,
    )


def _unfinished_shard(number: int, folder: Path) -> ShardState:
    spec = read_json(folder / SPEC_FILE) or {"plan": {"rounds_a_shard": 0}}
    return ShardState(number=number, ended="unfinished", requested=int(spec["plan"]["rounds_a_shard"]))


def _cover(coverage: dict[str, ConfigurationCoverage], result: ShardResult) -> None:
    seen = result.coverage or {}
    never = frozenset(tuple(key) for key in seen["never"])
    known = coverage.get(_text(result.configuration))
    coverage[result.configuration] = ConfigurationCoverage(
        possible=int(seen["possible"]), never=never if known is None else never & known.never
    )


def _read_attempt(path: Path) -> dict[str, Any] | None:
    data = read_json(path)
    kinds: dict[str, Callable[[Any], Any]] = {"attempt": int, "ended": _text, "text": _text, "rounds_lost": int}
    return None if data is None else {name: kind(data[name]) for name, kind in kinds.items()}


def _read_sighting(reader: _ShardReader, file: Path) -> Sighting | None:
    record = FindingRecord.read(file)
    if record is None:
        return None
    _check_record(record)
    case = record.shrunk or record.case
    path = None if case is None else str((reader.folder / case).relative_to(reader.root))
    return Sighting(shard=reader.number, record=record, path=path)


def _check_record(record: FindingRecord) -> None:
    """Raise one of _NOT_AS_WRITTEN for a record that a report could not say."""
    STATES.index(record.state)
    _text(record.finding["sentence"])
    ", ".join(record.finding.get("contract", ()))
    if type(record.shown) is not int or type(record.repeats) is not int:
        raise TypeError(f"{record.shown!r} of {record.repeats!r} is no rate")
    for text in (record.note, record.waiver):
        _optional_text(text)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


# What was said of findings later -------------------------------------------------------------------------------------


def _read_verdicts(path: Path, read: Callable[[Any], T]) -> dict[str, T]:
    """Return what `read` makes of each value in the file. HarnessError if it cannot be read."""
    try:
        return {key: read(value) for key, value in (read_json(path) or {}).items()}
    except _NOT_AS_WRITTEN as error:
        raise damaged(path, error) from None


def _recheck(shown: int, repeats: int, sightings: int = 0) -> Recheck:
    """`sightings` is missing in files of before it was counted."""
    return Recheck(shown=int(shown), repeats=int(repeats), sightings=int(sightings))
