"""Round and Scenario, and the text of a scenario: a case, which `rounds/case_file.py` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from dsa_verify.contract.geometry import Geometry

CASE_SCHEMA: Final = 1
SEED_LIMIT: Final = 1 << 31
POISONS: Final = ("loud", "plausible", "stale")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One replay.

    `bucket`: the batch size whose graph is replayed; `seq_lens`, `requests`: one entry a live request (their number is
    the raw batch), lengths in tokens and rows of `req_to_token`. `lens`: by name, what the round says of each request
    beside them, as the system has it (`System.lens`), one entry each; each is an attribute, too (`round.extend_lens`).
    `remap`: request rows that move to other pages before this round.
    `prefixes`: (row, origin, pages) of rows in `remap` that a prefix cache serves: the first `pages` allocator pages of
    `row` are those that request row `origin` had in the round before, itself or another; only those behind are new.
    `poison`: what the outputs hold before the replay. `twice`: replay the subject a second time on the same inputs;
    nothing may change. `foreign`: other work runs before this round, the eager preparation of another bucket
    and what the subject has for `foreign_work`. `seed`: of systems that are `seeded`, what the values that a round does
    not list are hashed from (systems/dcp_inputs.py).
    """

    bucket: int
    seq_lens: tuple[int, ...]
    requests: tuple[int, ...]
    lens: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict, hash=False)
    remap: tuple[int, ...] = ()
    prefixes: tuple[tuple[int, int, int], ...] = ()
    poison: str = "loud"
    twice: bool = False
    foreign: bool = False
    seed: int = 0

    def __getattr__(self, name: str) -> tuple[int, ...]:
        """A count that the round says."""
        lens: Mapping[str, tuple[int, ...]] = object.__getattribute__(self, "lens")
        if name not in lens:
            raise AttributeError(f"this round says no {name!r}; it says {', '.join(lens) or 'nothing of the kind'}")
        return lens[name]

    @property
    def raw_batch(self) -> int:
        return len(self.seq_lens)

    def replace(self, **changes: Any) -> Round:
        """Return this round with other fields or counts; a count is no longer said where it is None."""
        fields = {name: changes.pop(name) for name in [*changes] if name in _FIELDS}
        lens = {name: values for name, values in {**self.lens, **changes}.items() if values is not None}
        return dataclasses.replace(self, **{"lens": lens, **fields})

    def with_remap(self, rows: Iterable[int]) -> Round:
        """Return this round with `rows` moving, those that take a prefix still taking it."""
        remap = tuple(rows)
        return dataclasses.replace(self, remap=remap, prefixes=tuple(p for p in self.prefixes if p[0] in remap))


_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(Round))


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
        """Return the text of the case file; `read_case` gives back an equal scenario."""
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


def one_each(requests: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    """Return `values`, with that of the first batch row of each request in all of its rows."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(request, value) for request, value in zip(requests, values, strict=True))


def _round_to_dict(round_: Round) -> dict[str, Any]:
    data: dict[str, Any] = {
        "bucket": round_.bucket,
        "seq_lens": round_.seq_lens,
        "requests": round_.requests,
        "poison": round_.poison,
        **round_.lens,
    }
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
