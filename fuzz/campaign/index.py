"""Store: an SQLite index over the shard folders of a campaign, for whoever wants to ask more than a report says.

The folders are the truth: the store can be deleted at any time and is made again with the same content. One process
writes it, the supervisor, a shard at a time and in one transaction each; WAL lets others read meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from dsa_verify.base.errors import HarnessError, UsageError
from fuzz.campaign.locks import held
from fuzz.campaign.shard_folder import (
    RESULT_FILE,
    SPEC_FILE,
    STATES,
    FindingRecord,
    ShardResult,
    files_of,
    not_ours,
    read_json,
    shard_folder,
    shard_numbers,
    write_json,
)

STORE_FILE: Final = "campaign.sqlite"
WAIVERS_FILE: Final = "waivers.json"  # {key of a finding: the issue that it is waived for}
# {key of a finding: [shown, repeats, sightings] when its case was replayed last}. One that more shards have seen since
# then is not gone.
RECHECKS_FILE: Final = "rechecks.json"
VERDICTS_LOCK: Final = "verdicts.lock"
LOCK_WAIT_S: Final = 2.0
LOCK_TRIES: Final = 5

_SCHEMA_VERSION: Final = 5
# Of a store that another version made: it is made again from the folders.
_FORGET: Final = f"""
DROP VIEW IF EXISTS findings;
DROP TABLE IF EXISTS sightings;
DROP TABLE IF EXISTS shards;
DROP TABLE IF EXISTS rechecks;
PRAGMA user_version = {_SCHEMA_VERSION};
"""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS shards (
    number INTEGER PRIMARY KEY, system TEXT, configuration TEXT, ended TEXT, requested INTEGER, executed INTEGER,
    wall_s REAL, canary_fault TEXT, canary_verdict TEXT, canary_why TEXT, provenance TEXT
);
CREATE TABLE IF NOT EXISTS coverage (configuration TEXT PRIMARY KEY, possible INTEGER, never TEXT);
CREATE TABLE IF NOT EXISTS attempts (
    shard INTEGER, attempt INTEGER, ended TEXT, text TEXT, rounds_lost INTEGER, PRIMARY KEY (shard, attempt)
);
CREATE TABLE IF NOT EXISTS sightings (
    key TEXT, shard INTEGER, planted INTEGER, system TEXT, subject TEXT, field TEXT, diagnosis TEXT, law TEXT,
    state TEXT, rank INTEGER, shown INTEGER, repeats INTEGER, sentence TEXT, rules TEXT, path TEXT, note TEXT,
    waiver TEXT,
    PRIMARY KEY (key, shard)
);
CREATE TABLE IF NOT EXISTS damage (shard INTEGER, text TEXT);
CREATE TABLE IF NOT EXISTS waivers (key TEXT PRIMARY KEY, issue TEXT);
CREATE TABLE IF NOT EXISTS rechecks (key TEXT PRIMARY KEY, shown INTEGER, repeats INTEGER, sightings INTEGER);
CREATE VIEW IF NOT EXISTS findings AS
    SELECT best.key, best.planted, best.system, best.subject, best.field, best.diagnosis, best.law,
        CASE
            WHEN rechecks.shown = 0 AND best.sightings <= rechecks.sightings THEN 'gone'
            WHEN waivers.issue IS NOT NULL THEN 'waived'
            ELSE best.state
        END AS state,
        COALESCE(waivers.issue, best.waiver) AS issue, best.shown, best.repeats, best.sentence, best.rules, best.path,
        best.note, best.shard, best.sightings
    FROM (
        SELECT *, COUNT(*) OVER (PARTITION BY key) AS sightings,
            ROW_NUMBER() OVER (PARTITION BY key ORDER BY rank DESC, shard) AS place
        FROM sightings
    ) AS best
    LEFT JOIN waivers ON waivers.key = best.key LEFT JOIN rechecks ON rechecks.key = best.key
    WHERE best.place = 1;
"""


# What comes of a file that is JSON and has the right keys, with values that nobody wrote.
_NOT_AS_WRITTEN: Final = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    sqlite3.IntegrityError,
)


class StoreLocked(HarnessError):
    """Another process would not let go of the store."""


class _Malformed(HarnessError):
    """The store is no database any more."""


class Store:
    """The index of the campaign in `root`. Every method that writes waits for a lock, up to LOCK_TRIES x LOCK_WAIT_S,
    and raises StoreLocked after that; what it would have written is in the folders. `in_memory`: for a folder that
    cannot be written."""

    def __init__(self, root: Path, *, in_memory: bool = False) -> None:
        self.root = root
        self._path: Path | str = ":memory:" if in_memory else root / STORE_FILE
        try:
            self._open()
        except _Malformed:
            for path in root.glob(f"{STORE_FILE}*"):
                path.unlink()  # an index; the folders have all of it
            self._open()

    def _open(self) -> None:
        with self._telling():
            self._connection = sqlite3.connect(self._path, timeout=LOCK_WAIT_S, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        try:
            self._patiently(lambda: self._connection.execute("PRAGMA journal_mode = WAL"))
            if self.rows("PRAGMA user_version") != [{"user_version": _SCHEMA_VERSION}]:
                self._patiently(lambda: self._connection.executescript(_FORGET))
            self._patiently(lambda: self._connection.executescript(_SCHEMA))
        except HarnessError:
            self._connection.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def rebuild(self) -> None:
        """The same content as if every shard had been indexed when it ended."""
        numbers = shard_numbers(self.root)
        with self._writing():
            for table in ("shards", "coverage", "attempts", "sightings", "damage", "waivers", "rechecks"):
                self._connection.execute(f"DELETE FROM {table}")
            for number in numbers:
                self._index(number)
            self._index_verdicts()

    def index(self, number: int) -> None:
        """Take in what the folder of shard `number` holds now; what cannot be read of it is named in `damage`."""
        with self._writing():
            self._index(number)

    def _index(self, number: int) -> None:
        folder = shard_folder(self.root, number)
        for table, column in (("shards", "number"), ("attempts", "shard"), ("sightings", "shard"), ("damage", "shard")):
            self._connection.execute(f"DELETE FROM {table} WHERE {column} = ?", (number,))
        # A file at a time: one that is damaged takes no other with it.
        with self._damage_of(number, folder / RESULT_FILE):
            result = ShardResult.read(folder)
            if result is not None:
                self._insert("shards", {**_shard_row(result), "number": number})
                if result.coverage is not None:
                    self._cover(result.configuration, result.coverage)
        if not self.rows("SELECT number FROM shards WHERE number = ?", number):
            with self._damage_of(number, folder / SPEC_FILE):
                self._insert("shards", _unfinished_row(number, folder))
        for path in files_of(folder, "attempts"):
            with self._damage_of(number, path):
                attempt = read_json(path) or {}
                row = {key: attempt[key] for key in ("attempt", "ended", "text")}
                self._insert("attempts", {"shard": number, **row, "rounds_lost": int(attempt["rounds_lost"])})
        for path in files_of(folder, "findings"):
            with self._damage_of(number, path):
                record = FindingRecord.read(path)
                if record is not None:
                    self._insert("sightings", {"shard": number, **self._sighting(folder, record)})

    def _sighting(self, folder: Path, record: FindingRecord) -> dict[str, Any]:
        key, path = record.key, record.shrunk or record.case
        return {
            "key": key.name,
            "planted": int(key.planted),
            "system": key.system,
            "subject": key.subject,
            "field": key.field,
            "diagnosis": key.diagnosis,
            "law": key.law,
            "state": record.state,
            "rank": STATES.index(record.state),
            "shown": record.shown,
            "repeats": record.repeats,
            "sentence": record.finding["sentence"],
            "rules": ", ".join(record.finding.get("contract", ())),
            "path": None if path is None else str((folder / path).relative_to(self.root)),
            "note": record.note,
            "waiver": record.waiver,
        }

    @contextlib.contextmanager
    def _damage_of(self, number: int, path: Path) -> Iterator[None]:
        """Note of shard `number` that `path` is not what was written there, and go on with the rest."""
        try:
            yield
        except HarnessError as error:
            if isinstance(error.__cause__, sqlite3.Error):
                raise  # the store's own trouble
            self._insert("damage", {"shard": number, "text": str(error)})
        except (OSError, *_NOT_AS_WRITTEN) as error:
            self._insert("damage", {"shard": number, "text": str(not_ours(path, error))})

    def _cover(self, configuration: str, seen: Mapping[str, Any]) -> None:
        """What no shard of the configuration has visited: kept as one, as a night has too many shards to ask each."""
        never = {tuple(key) for key in seen["never"]}
        for row in self.rows("SELECT never FROM coverage WHERE configuration = ?", configuration):
            never &= {tuple(key) for key in json.loads(row["never"])}
        self._connection.execute("DELETE FROM coverage WHERE configuration = ?", (configuration,))
        row = {"configuration": configuration, "possible": seen["possible"], "never": json.dumps(sorted(never))}
        self._insert("coverage", row)

    def _index_verdicts(self) -> None:
        for key, issue in (read_json(self.root / WAIVERS_FILE) or {}).items():
            self._insert("waivers", {"key": key, "issue": issue})
        for key, (shown, repeats, *sightings) in (read_json(self.root / RECHECKS_FILE) or {}).items():
            row = {"key": key, "shown": shown, "repeats": repeats, "sightings": sightings[0] if sightings else 0}
            self._insert("rechecks", row)

    def _insert(self, table: str, row: Mapping[str, Any]) -> None:
        places = ", ".join("?" * len(row))
        self._connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})", tuple(row.values()))

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """The rows that an SQL query gives."""
        with self._telling():
            return [dict(row) for row in self._connection.execute(query, values)]

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self._patiently(lambda: self._connection.execute("BEGIN IMMEDIATE"))
        try:
            with self._telling():
                yield
                self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if type(error) is sqlite3.DatabaseError:  # "malformed", or "not a database"
                raise _Malformed(f"{self._path}: {error}; remove it, it is made again") from error
            raise HarnessError(f"{self._path}: {error}; the folders beside it hold all that it did") from error

    def _patiently(self, work: Callable[[], object]) -> None:
        for attempt in range(LOCK_TRIES):
            try:
                with self._telling():
                    work()
                return
            except HarnessError as error:
                if not any(word in str(error.__cause__) for word in ("locked", "busy")):
                    raise
                time.sleep(LOCK_WAIT_S / 10 * attempt)
        raise StoreLocked(
            f"{self._path} has been locked by another process for {LOCK_TRIES} tries of {LOCK_WAIT_S:g} s; end that "
            "process; nothing is lost, the folders beside it hold all that it would"
        )


def _unfinished_row(number: int, folder: Path) -> dict[str, Any]:
    spec = read_json(folder / SPEC_FILE) or {"plan": {"rounds_a_shard": 0}}
    requested = int(spec["plan"]["rounds_a_shard"])
    return {"number": number, "ended": "unfinished", "requested": requested, "executed": 0}


def _shard_row(result: ShardResult) -> dict[str, Any]:
    canary = result.canary or {}
    return {
        "number": result.number,
        "system": result.system,
        "configuration": result.configuration,
        "ended": result.ended,
        "requested": int(result.requested),
        "executed": int(result.executed),
        "wall_s": result.wall_s,
        "canary_fault": canary.get("fault"),
        "canary_verdict": canary.get("verdict"),
        "canary_why": canary.get("why"),
        "provenance": json.dumps(dict(result.provenance), sort_keys=True) if result.provenance else None,
    }


# What is said of findings later --------------------------------------------------------------------------------------


def waive(root: Path, key: str, issue: str) -> None:
    """Let the finding `key` not count, for `issue`; UsageError if there is none, or it is planted."""
    with Store(root) as store:
        store.rebuild()
        known = [row["key"] for row in store.rows("SELECT key FROM findings WHERE planted = 0 ORDER BY key")]
    if key not in known:
        raise UsageError(f"finding {key!r} is unknown; known findings: {', '.join(known) or 'none'}")
    if not issue.strip():
        raise UsageError("issue: empty; say where the defect is tracked")
    _note(root, WAIVERS_FILE, key, issue)


def note_recheck(root: Path, key: str, shown: int, repeats: int, sightings: int) -> None:
    """How often the case of the finding `key`, seen in so many shards, showed it when it was replayed again."""
    _note(root, RECHECKS_FILE, key, [shown, repeats, sightings])


def _note(root: Path, name: str, key: str, what: Any) -> None:
    with held(root / VERDICTS_LOCK, wait=True):
        write_json(root / name, {**(read_json(root / name) or {}), key: what})
