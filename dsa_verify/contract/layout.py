"""Field and Layout: what a metadata tensor must hold, as data.

A `Field` says of one tensor which elements a consumer may read (live), what the others may hold (dead) and what a
row stands for, so that the judge can compare it and the diagnosis can name the request, draft position and page.
A `Layout` is the fields of one system at one batch bucket. Nothing here computes a value: the oracles do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from enum import Enum
from typing import Final

from dsa_verify.contract.geometry import Geometry

# Bytes of one element, by the dtype names of the contract.
DTYPE_BYTES: Final = {"int32": 4, "int64": 8, "float32": 4}


class Dead(Enum):
    """Elements that no consumer may read must hold this after a replay."""

    STALE = "stale"  # anything: a verifier must not compare them
    PAD = "pad"  # exactly `Field.dead_value`
    INTACT = "intact"  # exactly what they held before the replay


class Row(Enum):
    """Row (or element) r of a field stands for one of these."""

    REQUEST = "request"  # batch row r
    TOKEN = "token"  # draft position r mod N of batch row r div N (ragged: by the running sum of extend lengths)
    REQUEST_PREFIX = "request prefix"  # the sum over batch rows below r
    TOKEN_PREFIX = "token prefix"  # the sum over token rows below r
    MULTIPROCESSOR = "multiprocessor"  # where SM r of a schedule starts
    SLOT = "slot"  # physical row r of a pool
    ITEM = "item"  # entry r of a list; row 0 is its head
    LAW = "law"  # whether a law of a declaration holds, 1 or 0


class Compare(Enum):
    """A field is compared in one of these ways."""

    EXACT = "exact"  # bit by bit
    CLOSE = "close"  # float32: within `bound`, special values exactly
    ITEMS = "items"  # row 0 exactly, the rows it counts as a set, what lies beyond them not at all (contract 5)


class Live(Enum):
    """One of these bounds the live columns of a row that has a `column_step`."""

    TOKENS = "tokens"  # the request's live token bound
    CANDIDATES = "candidates"  # the pools that the request closes in this round (contract 4.2)
    ROWS = "rows"  # a bound of each row, which the oracle gives beside the field (live_rows_name)


def live_rows_name(field: str) -> str:
    """Return the name of what the oracle gives beside `field`: int32 [rows], how many first columns are live."""
    return f"{field}.live"


class Lifetime(Enum):
    """A field is written at one of these times."""

    CAPTURE = "capture"  # once, outside the graph; constant afterwards
    REPLAY = "replay"  # in every round


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A consumer asks this of the memory of a field, beside adjacent elements of each row.

    All rows must be adjacent, and the first byte must lie at a multiple of `alignment` bytes, as many as the consumer
    reads at once. `source` says where that is stated.
    """

    consumer: str
    source: str
    alignment: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One metadata tensor at one bucket.

    `shape` is (rows,) or (rows, columns). `column_step` is 0 where every column is live, else column c is live iff
    `column_start + c * column_step` is below the bound `live` of the row's request. `live_token_rows`: rows beyond this
    round's token total are dead. `rows_differ`: whether the token rows of a request may hold other values than one
    another in a table, which else is kept once a request. `low`/`high`: the legal values are low <= v < high. `alias`:
    this field is a view of that field's buffer (contract 1.1); it owns no memory. `shared`: one buffer serves all
    buckets, each seeing its first rows. `row_gap`: elements of memory behind each row that nobody may write. `bound`,
    of a float32 field: |got - want| <= bound * max(|want|, floor). `memory`: what a consumer asks of the memory (None:
    adjacent elements of each row). `section`: where this project's contract states the rule; empty for a system of a
    user's own. `says`: what a law of a declaration demands, in words.
    """

    name: str
    shape: tuple[int, ...]
    row: Row
    low: int
    high: int
    section: str = ""
    dtype: str = "int32"
    column_step: int = 0
    column_start: int = 0
    live: Live = Live.TOKENS
    compare: Compare = Compare.EXACT
    live_token_rows: bool = False
    rows_differ: bool = False
    dead: Dead = Dead.STALE
    dead_value: int = 0
    lifetime: Lifetime = Lifetime.REPLAY
    alias: str | None = None
    shared: bool = False
    row_gap: int = 0
    bound: float = 0.0
    floor: float = 1.0
    memory: Memory | None = None
    says: str = ""

    @property
    def kept_rows(self) -> int:
        """Return how many first rows may be written at capture only: engines leave the 0 of a sum as it is, and copies
        never carry it (contract 2.2)."""
        return 1 if self.row in (Row.REQUEST_PREFIX, Row.TOKEN_PREFIX) else 0

    @property
    def form(self) -> str:
        """Return the dtype and shape in words, with the section of the contract where there is one."""
        section = f", contract {self.section}" if self.section else ""
        return f"{self.dtype} {list(self.shape)}{section}"

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def one_row_per_request(self) -> bool:
        """Return True if the oracle keeps one row per request where the subject keeps N identical ones."""
        table = self.row is Row.TOKEN and self.column_step > 0 and self.live is Live.TOKENS
        return table and not self.rows_differ


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The fields of `system` at a bucket of `bucket` requests and `tokens` token rows, in reporting order.
    `ranks`: whether they are of several ranks."""

    system: str
    geometry: Geometry
    bucket: int
    tokens: int
    fields: tuple[Field, ...]
    ranks: bool = False

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __getitem__(self, name: str) -> Field:
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(field.name == name for field in self.fields)

    def without(self, names: Collection[str]) -> Layout:
        """Return this layout without the fields `names`; a view of one of them becomes a field of its own."""
        fields = tuple(
            dataclasses.replace(field, alias=None) if field.alias in names else field
            for field in self.fields
            if field.name not in names
        )
        return dataclasses.replace(self, fields=fields)

    def for_oracle(self) -> Layout:
        """Return the same fields with identical rows of a request stored once and nothing shared between buckets, and
        what only an oracle gives."""
        bounds = tuple(
            Field(name=live_rows_name(field.name), shape=field.shape[:1], row=field.row, low=0, high=field.columns + 1)
            for field in self.fields
            if field.live is Live.ROWS
        )
        fields = tuple(
            dataclasses.replace(
                field,
                shape=(self.bucket, *field.shape[1:]) if field.one_row_per_request else field.shape,
                shared=False,
                row_gap=0,
            )
            for field in self.fields
        )
        return dataclasses.replace(self, fields=fields + bounds)
