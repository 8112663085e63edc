"""Round and Scenario, and the case file: a scenario on disk.

A case is JSON text that a person can read and edit. It is read strictly: an unknown key, a wrong type or a value
outside its limit is refused with one line that names the path, the value, the limit and the remedy.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from dsa_verify.base.errors import UsageError
from dsa_verify.base.small_file import cannot_be_read, check_case
from dsa_verify.contract.geometry import MAX_BATCH, PRESETS, Geometry
from dsa_verify.contract.kpool import check_lengths
from dsa_verify.contract.ragged import check_verify_lens

CASE_SCHEMA: Final = 1
MAX_ROUNDS_IN_A_CASE: Final = 65_536
MAX_BUCKETS: Final = 64
SEED_LIMIT: Final = 1 << 31
MAX_INTEGER_DIGITS: Final = 32  # more than any limit here has
POISONS: Final = ("loud", "plausible", "stale")
KNOWN_SYSTEMS: Final = ("decode", "target_verify", "draft_extend", "mtp", "padded", "ragged_verify", "dcp")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One replay.

    `bucket`: the batch size whose graph is replayed; `seq_lens`, `requests`: one entry a live request (their number is
    the raw batch), lengths in tokens and rows of `req_to_token`. `extend_lens`: draft-extend only, tokens of each
    request, all N where it is None. `accept_lens`: draft-extend with a pooled indexer only, accepted tokens of each
    request, 1 to N, all N where it is None. `remap`: request rows that move to other pages before this round.
    `prefixes`: (row, origin, pages) of rows in `remap` that a prefix cache serves: the first `pages` allocator pages of
    `row` are those that request row `origin` had in the round before, itself or another; only those behind are new.
    `verify_lens`: ragged_verify only, tokens to verify of each request, 1 to N (contract 9). `replay_floors`: padded
    with `request_floors` only, the first position of each request that the replay may read, one a request row; all
    `replay_floor` where it is None (contract 7.1).
    `poison`: what the outputs hold before the replay. `twice`: replay the subject a second time on the same inputs;
    nothing may change. `foreign`: other work runs before this round, the eager preparation of another bucket
    and what the subject has for `foreign_work`. `seed`: dcp only, what the values that a round does not list are hashed
    from (expand.py).
    """

    bucket: int
    seq_lens: tuple[int, ...]
    requests: tuple[int, ...]
    extend_lens: tuple[int, ...] | None = None
    accept_lens: tuple[int, ...] | None = None
    verify_lens: tuple[int, ...] | None = None
    replay_floors: tuple[int, ...] | None = None
    remap: tuple[int, ...] = ()
    prefixes: tuple[tuple[int, int, int], ...] = ()
    poison: str = "loud"
    twice: bool = False
    foreign: bool = False
    seed: int = 0

    @property
    def raw_batch(self) -> int:
        return len(self.seq_lens)

    def with_remap(self, rows: Iterable[int]) -> Round:
        """This round with `rows` moving, those that take a prefix still taking it."""
        remap = tuple(rows)
        return dataclasses.replace(self, remap=remap, prefixes=tuple(p for p in self.prefixes if p[0] in remap))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A geometry, the buckets that are captured, and the rounds that are replayed over them.

    `subject` and `fault` name what the case was found with; a reader may override them. `found` is the sentence of
    the finding, for people only.
    """

    system: str
    geometry: Geometry
    buckets: tuple[int, ...]
    rounds: tuple[Round, ...]
    seed: int = 0
    subject: str | None = None
    fault: str | None = None
    found: str | None = None
    name: str = ""

    def to_json(self) -> str:
        """The text of the case file; `read_case` gives back an equal scenario."""
        head: dict[str, Any] = {
            "schema": CASE_SCHEMA,
            "system": self.system,
            "preset": self.geometry.preset,
            "geometry": self.geometry.overrides(),
            "buckets": list(self.buckets),
            "seed": self.seed,
        }
        for key in ("subject", "fault", "found"):
            if (value := getattr(self, key)) is not None:
                head[key] = value
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        rounds = ",\n".join("    " + json.dumps(_round_to_dict(round_)) for round_ in self.rounds)
        return "{\n" + ",\n".join(lines) + f',\n  "rounds": [\n{rounds}\n  ]\n}}\n'


def read_case(path: Path) -> Scenario:
    """The scenario in `path`; UsageError with one line if it is not a valid case.

    The subject that it names is not looked up. Whoever replays the case decides whether to run it (trust.py).
    """
    check_case(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise cannot_be_read(path, reason) from error
    try:
        return parse_case(text, name=path.stem)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def parse_case(text: str, *, name: str = "") -> Scenario:
    """The scenario in the JSON `text`; UsageError names the first path that is wrong."""
    body = _Reader(_load_json(text), "")
    schema = body.integer("schema", 0, 1 << 31)
    if schema != CASE_SCHEMA:
        raise UsageError(f"schema: {schema} is not {CASE_SCHEMA}, the one this version reads; update dsa-verify")
    body.only("schema", "system", "preset", "geometry", "buckets", "seed", "subject", "fault", "found", "rounds")
    system = body.choice("system", KNOWN_SYSTEMS)
    overrides = _Reader(body.get("geometry", dict, {}), "geometry")
    overrides.only(*(field.name for field in dataclasses.fields(Geometry) if field.name != "preset"))
    geometry = Geometry.resolve(body.choice("preset", list(PRESETS)), overrides.data, where="geometry.")
    if system in ("decode", "mtp", "dcp") and geometry.draft_tokens != 1:
        raise UsageError(f"geometry.draft_tokens: {geometry.draft_tokens} has no effect in {system}; remove it")
    buckets = body.integers("buckets", 1, MAX_BATCH, "the largest batch", MAX_BUCKETS)
    if not buckets:
        raise UsageError("buckets: the list is empty; name at least one bucket")
    if len(set(buckets)) != len(buckets):
        raise UsageError(f"buckets: {list(buckets)} names a bucket twice; name each once")
    rounds = body.get("rounds", list)
    if len(rounds) > MAX_ROUNDS_IN_A_CASE:
        raise UsageError(f"rounds: {len(rounds)} rounds exceed {MAX_ROUNDS_IN_A_CASE}; split the case")
    return Scenario(
        system=system,
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


def _read_round(data: Any, path: str, system: str, geometry: Geometry, buckets: Sequence[int]) -> Round:
    body = _Reader(data, path)
    body.only(
        "bucket",
        "seq_lens",
        "requests",
        "extend_lens",
        "accept_lens",
        "verify_lens",
        "replay_floors",
        "remap",
        "prefixes",
        "poison",
        "twice",
        "foreign",
        "seed",
    )
    bucket = body.integer("bucket", 1, MAX_BATCH)
    if bucket not in buckets:
        raise UsageError(f"{path}.bucket: {bucket} is not captured; buckets are {list(buckets)}, add it there")
    rows = geometry.request_rows
    seq_lens = body.integers("seq_lens", 0, geometry.context, "context")
    if len(seq_lens) > bucket:
        raise UsageError(f"{path}.seq_lens: raw batch {len(seq_lens)} exceeds bucket {bucket}; use a larger bucket")
    requests = body.integers("requests", 0, rows - 1, "the last request row")
    if pooled_indexer(geometry):
        check_lengths(system, geometry, seq_lens, where=f"{path}.")  # type: ignore[arg-type]
    extend_lens = _read_optional_lens(body, "extend_lens", 0, geometry, not_for=_why_not_ragged(system, geometry))
    accept_lens = _read_optional_lens(body, "accept_lens", 1, geometry, not_for=_why_no_accepts(system, geometry))
    verify_lens = _read_optional_lens(body, "verify_lens", 1, geometry, not_for=_why_no_verify_lens(system))
    replay_floors = _read_floors(body, system, geometry)
    if system == "ragged_verify":
        check_verify_lens(geometry, bucket, verify_lens, where=f"{path}.")
    per_request = {
        "requests": requests,
        "extend_lens": extend_lens,
        "accept_lens": accept_lens,
        "verify_lens": verify_lens,
        "replay_floors": replay_floors,
    }
    for key, values in per_request.items():
        if values is not None and len(values) != len(seq_lens):
            raise UsageError(f"{path}.{key}: {len(values)} entries for {len(seq_lens)} seq_lens; give one a request")
    if replay_floors is not None and one_floor_each(requests, replay_floors) != replay_floors:
        raise UsageError(
            f"{path}.replay_floors: two batch rows of one request have different floors, which belong to its row "
            "(contract 7.1); give both the same"
        )
    # Row 0 is the pad request and stays all zero (contract 0.1).
    remap = body.integers("remap", 1, rows - 1, "the last request row", default=())
    return Round(
        bucket=bucket,
        seq_lens=seq_lens,
        requests=requests,
        extend_lens=extend_lens,
        accept_lens=accept_lens,
        verify_lens=verify_lens,
        replay_floors=replay_floors,
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


def pooled_indexer(geometry: Geometry) -> bool:
    """Return whether the layout has a write plan, which asks more of the lengths (contract 4.2)."""
    return geometry.indexer and geometry.pool_size > 1


def has_floors(system: str, geometry: Geometry) -> bool:
    """Return whether each request has a replay floor of its own (contract 7.1)."""
    return system == "padded" and geometry.request_floors


def one_floor_each(requests: Sequence[int], floors: Sequence[int]) -> tuple[int, ...]:
    """Return `floors`, with the floor of the first batch row of each request in all of its rows."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(request, floor) for request, floor in zip(requests, floors, strict=True))


def _read_floors(body: _Reader, system: str, geometry: Geometry) -> tuple[int, ...] | None:
    if "replay_floors" not in body.data:
        return None
    if not has_floors(system, geometry):
        why = "needs geometry.request_floors" if system == "padded" else f"has no effect in {system}"
        raise UsageError(f"{body.at('replay_floors')}: {why}; {'set it' if system == 'padded' else 'remove it'}")
    return body.integers("replay_floors", 0, geometry.context, "context")


def drawn_lens(system: str, geometry: Geometry) -> dict[str, int]:
    """Return the counts that a round of `system` gives each request beside its length, with the least value of each.

    The greatest value is N.
    """
    found = {}
    if system == "draft_extend" and not geometry.indexer:
        found["extend_lens"] = 0
    if system == "draft_extend" and pooled_indexer(geometry):
        found["accept_lens"] = 1
    if system == "ragged_verify":
        found["verify_lens"] = 1
    return found


def _why_not_ragged(system: str, geometry: Geometry) -> str | None:
    if system != "draft_extend":
        return f"has no effect in {system}; remove it"
    if geometry.indexer:
        return "the indexer's schedule covers all token rows, so every request extends by N; remove it"
    return None


def _why_no_accepts(system: str, geometry: Geometry) -> str | None:
    if system != "draft_extend" or not pooled_indexer(geometry):
        return "has an effect only in draft_extend with a pooled indexer; remove it"
    return None


def _read_seed(body: _Reader, system: str) -> int:
    if "seed" in body.data and system != "dcp":
        raise UsageError(f"{body.at('seed')}: has no effect in {system}; remove it")
    return body.integer("seed", 0, SEED_LIMIT - 1, 0)


def _why_no_verify_lens(system: str) -> str | None:
    return None if system == "ragged_verify" else f"has no effect in {system}; remove it"


def _read_optional_lens(
    body: _Reader, key: str, low: int, geometry: Geometry, *, not_for: str | None
) -> tuple[int, ...] | None:
    if key not in body.data:
        return None
    if not_for is not None:
        raise UsageError(f"{body.at(key)}: {not_for}")
    return body.integers(key, low, geometry.draft_tokens, "draft_tokens")


def _round_to_dict(round_: Round) -> dict[str, Any]:
    data: dict[str, Any] = {
        "bucket": round_.bucket,
        "seq_lens": round_.seq_lens,
        "requests": round_.requests,
        "poison": round_.poison,
    }
    for key in ("extend_lens", "accept_lens", "verify_lens", "replay_floors"):
        if (lens := getattr(round_, key)) is not None:
            data[key] = lens
    if round_.remap:
        data["remap"] = round_.remap
    if round_.prefixes:
        data["prefixes"] = round_.prefixes
    if round_.twice:
        data["twice"] = True
    if round_.foreign:
        data["foreign"] = True
    if round_.seed:
        data["seed"] = round_.seed
    return data


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
    """`value` as JSON on one line, cut; a list or an object, which may be huge, by its kind alone."""
    if isinstance(value, list | dict):
        return _KIND_NAMES[type(value)]
    return _short_text(json.dumps(value))


def _short_text(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
