"""The case file: a scenario on disk.

A case is JSON text that a person can read and edit. It is read strictly: an unknown key, a wrong type or a value
outside its limit is refused with one line that names the path, the value, the limit and the remedy.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from dsa_verify.base.errors import UsageError
from dsa_verify.base.small_file import cannot_be_read, check_case
from dsa_verify.contract.geometry import MAX_BATCH, PRESETS, Geometry
from dsa_verify.contract.round import CASE_SCHEMA, POISONS, SEED_LIMIT, Round, Scenario, one_each
from dsa_verify.contract.system import System
from dsa_verify.systems.catalogue import SYSTEMS, reference_of, system_of_case

MAX_ROUNDS_IN_A_CASE: Final = 65_536
MAX_BUCKETS: Final = 64
MAX_INTEGER_DIGITS: Final = 32  # more than any limit here has


def _nobody(name: str) -> bool:
    return False


def read_case(path: Path, *, trusts: Callable[[str], bool] = _nobody) -> Scenario:
    """Return the scenario in `path`; UsageError with one line if it is not a valid case.

    The subject that it names is not looked up. Whoever replays the case decides whether to run it (trust.py). A system
    must be known, since it says what a round is: `trusts(name)` says whether the code that the case names may run.
    """
    check_case(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise cannot_be_read(path, reason) from error
    try:
        return parse_case(text, name=path.stem, trusts=trusts)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def parse_case(text: str, *, name: str = "", trusts: Callable[[str], bool] = _nobody) -> Scenario:
    """Return the scenario in JSON `text`; UsageError names the first wrong path. `trusts`: as in `read_case`."""
    body = _Reader(_load_json(text), "")
    schema = body.integer("schema", 0, 1 << 31)
    if schema != CASE_SCHEMA:
        raise UsageError(f"schema: {schema} is not {CASE_SCHEMA}, the one this version reads; update dsa-verify")
    body.only("schema", "system", "preset", "geometry", "buckets", "seed", "subject", "fault", "found", "rounds")
    system = system_of_case(body.get("system", str), trusts) or SYSTEMS[body.choice("system", list(SYSTEMS))]
    overrides = body.get("geometry", dict, {})
    geometry = system.geometry(body.choice("preset", list(PRESETS)), overrides, where="geometry.")
    if not system.drafts and geometry.draft_tokens != 1:
        raise UsageError(f"geometry.draft_tokens: {geometry.draft_tokens} has no effect in {system.name}; remove it")
    buckets = body.integers("buckets", 1, MAX_BATCH, "the largest batch", MAX_BUCKETS)
    if not buckets:
        raise UsageError("buckets: the list is empty; name at least one bucket")
    if len(set(buckets)) != len(buckets):
        raise UsageError(f"buckets: {list(buckets)} names a bucket twice; name each once")
    rounds = body.get("rounds", list)
    if len(rounds) > MAX_ROUNDS_IN_A_CASE:
        raise UsageError(f"rounds: {len(rounds)} rounds exceed {MAX_ROUNDS_IN_A_CASE}; split the case")
    return Scenario(
        system=reference_of(system),
        geometry=geometry,
        buckets=buckets,
        rounds=tuple(_read_round(item, f"rounds[{i}]", system, geometry, buckets) for i, item in enumerate(rounds)),
        seed=body.integer("seed", 0, (1 << 63) - 1, default=0),
        subject=body.get("subject", str, None),
        fault=body.get("fault", str, None),
        found=body.get("found", str, None),
        name=name,
    )


def _load_json(text: str) -> Any:
    if text.startswith("\ufeff"):
        raise UsageError("not JSON (it begins with a byte order mark); save it as UTF-8 without one")
    try:
        return json.loads(text, parse_int=_bounded_int, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON ({error}); a case is the text that a finding wrote") from error
    except RecursionError as error:
        raise UsageError("not a case (it nests too deeply); a case is the text that a finding wrote") from error


def _bounded_int(digits: str) -> int:
    # Python refuses to read or to print very long integers, each time with another error.
    if len(digits) > MAX_INTEGER_DIGITS:
        raise UsageError(
            f"{_short_text(digits)}: an integer of {len(digits)} characters exceeds {MAX_INTEGER_DIGITS}; shorten it"
        )
    return int(digits)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise UsageError(f"{_short(key)}: the key is given twice in one object; keep one")
        result[key] = value
    return result


def _read_round(data: Any, path: str, system: System, geometry: Geometry, buckets: Sequence[int]) -> Round:
    body = _Reader(data, path)
    said = system.lens(geometry)
    names = [field.name for field in dataclasses.fields(Round)]
    at = names.index("lens")
    names[at : at + 1] = said
    for key in body.data:
        if key not in names and (key in system.refusals or key in _counts()):
            raise UsageError(f"{body.at(key)}: {system.why_not(key)}")
    body.only(*names)
    bucket = body.integer("bucket", 1, MAX_BATCH)
    if bucket not in buckets:
        raise UsageError(f"{path}.bucket: {bucket} is not captured; buckets are {list(buckets)}, add it there")
    rows = geometry.request_rows
    seq_lens = body.integers("seq_lens", 0, geometry.context, "context")
    if len(seq_lens) > bucket:
        raise UsageError(f"{path}.seq_lens: raw batch {len(seq_lens)} exceeds bucket {bucket}; use a larger bucket")
    requests = body.integers("requests", 0, rows - 1, "the last request row")
    system.check_lengths(geometry, seq_lens, where=f"{path}.")
    lens = {
        key: body.integers(key, spec.low, spec.high - 1, spec.limit) for key, spec in said.items() if key in body.data
    }
    if system.check_round is not None:
        system.check_round(geometry, bucket, lens, f"{path}.")
    for key, values in {"requests": requests, **lens}.items():
        if len(values) != len(seq_lens):
            raise UsageError(f"{path}.{key}: {len(values)} entries for {len(seq_lens)} seq_lens; give one a request")
        if key in said and said[key].of_row and one_each(requests, values) != values:
            raise UsageError(
                f"{path}.{key}: two batch rows of one request have different values, which belong to its row; give "
                "both the same"
            )
    # Row 0 is the pad request and stays all zero (contract 0.1).
    remap = body.integers("remap", 1, rows - 1, "the last request row", default=())
    return Round(
        bucket=bucket,
        seq_lens=seq_lens,
        requests=requests,
        lens=lens,
        remap=remap,
        prefixes=_read_prefixes(body, geometry, remap),
        poison=body.choice("poison", POISONS, default="loud"),
        twice=body.get("twice", bool, False),
        foreign=body.get("foreign", bool, False),
        seed=_read_seed(body, system),
    )


def _read_prefixes(body: _Reader, geometry: Geometry, remap: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    entries = body.get("prefixes", list, [])
    limits = (
        (geometry.request_rows - 1, "the last request row"),
        (geometry.request_rows - 1, "the last request row"),
        (geometry.pages_per_row, "the pages of a row"),
    )
    found: dict[int, tuple[int, int, int]] = {}
    for i, entry in enumerate(entries):
        where = f"{body.at('prefixes')}[{i}]"
        if type(entry) is not list or len(entry) != 3 or any(type(value) is not int for value in entry):
            raise UsageError(f"{where}: {_short(entry)} is not three integers; write [row, origin row, pages]")
        for j, (value, (high, name)) in enumerate(zip(entry, limits, strict=True)):
            _in_range(value, 1, high, name, f"{where}[{j}]")
        row, origin, pages = entry
        if row not in remap:
            raise UsageError(f"{where}: row {row} does not move in this round; name it in remap, too")
        if row in found:
            raise UsageError(f"{where}: row {row} takes a second prefix; give each row one")
        found[row] = (row, origin, pages)
    return tuple(found.values())


def _read_seed(body: _Reader, system: System) -> int:
    if "seed" in body.data and not system.seeded:
        raise UsageError(f"{body.at('seed')}: {system.why_not('seed')}")
    return body.integer("seed", 0, SEED_LIMIT - 1, 0)


def _counts() -> frozenset[str]:
    """Return the counts of all shipped systems, some of which another may be asked for by mistake."""
    usual = [(system, system.geometry(system.preset("cpu"))) for system in SYSTEMS.values()]
    return frozenset(name for system, geometry in usual for name in (*system.lens(geometry), *system.refusals))


_REQUIRED: Final = object()
_KIND_NAMES: Final = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "an integer"}


class _Reader:
    """One JSON object of a case: fetches a key, checks it, and names its path in the error."""

    def __init__(self, data: Any, path: str):
        self.path = path
        if not isinstance(data, dict):
            raise UsageError(f"{path or 'the case'}: {_short(data)} is not an object; write {{...}}")
        self.data: dict[str, Any] = data

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def only(self, *keys: str) -> None:
        for key in self.data:
            if key not in keys:
                where = f"{self.path}: " if self.path else ""
                raise UsageError(f"{where}{_short(key)} is an unknown key; known keys here: {', '.join(keys)}")

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        if key not in self.data:
            if default is _REQUIRED:
                raise UsageError(f"{self.at(key)}: missing; add {_KIND_NAMES[kind]}")
            return default
        value = self.data[key]
        if type(value) is not kind:
            raise UsageError(f"{self.at(key)}: {_short(value)} is not {_KIND_NAMES[kind]}; write {_KIND_NAMES[kind]}")
        return value

    def choice(self, key: str, choices: Sequence[str], default: Any = _REQUIRED) -> str:
        value: str = self.get(key, str, default)
        if value not in choices:
            raise UsageError(f"{self.at(key)}: {_short(value)} is unknown; use one of {', '.join(choices)}")
        return value

    def integer(self, key: str, low: int, high: int, default: Any = _REQUIRED) -> int:
        return _in_range(self.get(key, int, default), low, high, "the limit", self.at(key))

    def integers(
        self,
        key: str,
        low: int,
        high: int,
        high_name: str,
        most: int = 2 * MAX_BATCH + 1,
        default: Any = _REQUIRED,
    ) -> tuple[int, ...]:
        values = self.get(key, list, default)
        if len(values) > most:
            raise UsageError(f"{self.at(key)}: {len(values)} entries exceed {most}; shorten the list")
        for i, value in enumerate(values):
            where = f"{self.at(key)}[{i}]"
            if type(value) is not int:
                raise UsageError(f"{where}: {_short(value)} is not an integer; write an integer")
            _in_range(value, low, high, high_name, where)
        return tuple(values)


def _in_range(value: int, low: int, high: int, high_name: str, where: str) -> int:
    if value > high:
        raise UsageError(f"{where}: {value} exceeds {high_name} {high}; use {low}..{high}")
    if value < low:
        raise UsageError(f"{where}: {value} is below {low}; use {low}..{high}")
    return value


def _short(value: Any) -> str:
    """Return `value` as JSON on one line, cut; a list or an object, which may be huge, by its kind alone."""
    if isinstance(value, list | dict):
        return _KIND_NAMES[type(value)]
    return _short_text(json.dumps(value))


def _short_text(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
