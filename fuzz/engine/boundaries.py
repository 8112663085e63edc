"""Boundaries: every value of contract 10 that a round can hold, by name, with how to tell and how to make one.

What only a run can choose (N, S, the captured batches, widths, views) is no matter of a round: the matrix turns over
those. What takes two rounds (shrinking lengths, alternating buckets) is counted by coverage.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.ragged import capture_lens, padded_to_bucket
from dsa_verify.contract.round import Round
from dsa_verify.contract.schedule_variants import VARIANTS, Unit, units_per_request
from dsa_verify.contract.system import System
from dsa_verify.contract.topk_plan import PLAN_RULES, is_written
from dsa_verify.rounds.matrix import undefined_when_empty
from dsa_verify.systems.indexer import schedule_slots
from fuzz.engine.limits import most_requests

Array = npt.NDArray[np.int64]

_LENGTHS: Final = (0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 385, 511, 512, 513)
_BATCHES: Final = (*range(4), *range(30, 35), 64, 65, *range(127, 130), 512, 513, 2048, 2049, 4096, 16384)
_INT32: Final = 1 << 31
_PART: Final = 1 << 16  # lengths worked out at a time
ONE_TWICE: Final = "of two batch rows one"
OTHER_PAGES: Final = "on other pages"


class Kind(StrEnum):
    """A boundary is a value of one of these."""

    LENGTH = "length"  # value: of some live request
    BATCH = "batch"  # value: live requests of the bucket
    EMPTY = "empty request"  # which request has length 0
    TILES = "schedule tiles"  # value: in all (contract 3)
    LONG_ROWS = "plan rows"  # value: rows longer than the threshold `extra` (contract 5)
    WRITE = "write start"  # value: write start modulo the pool, of a request that writes `extra` tokens (contract 4.2)
    EXTEND = "extend"  # which relation of lengths and extend lengths
    ROW = "request row"  # value: named by a live request
    SUM = "length sum"  # at least value
    ALIAS = "requests"  # which relation between batch rows and requests


Mark = tuple[Kind, int, int, str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """One value of contract 10. `bucket`: where it is reached; 0: in any."""

    kind: Kind
    value: int = 0
    extra: int = 0
    which: str = ""
    bucket: int = 0

    @property
    def name(self) -> str:
        """Return a name for people, unique among the boundaries of a run."""
        text = f"{self.kind.value} {self.which or self.value}"
        text += {Kind.LONG_ROWS: f" above {self.extra}", Kind.WRITE: f" with {self.extra}"}.get(self.kind, "")
        return text + (f" of bucket {self.bucket}" if self.kind is Kind.BATCH else "")

    @property
    def mark(self) -> Mark:
        """Return what `marks` of a round that holds this boundary contains."""
        return self.kind, self.value, self.extra, self.which, self.bucket if self.kind is Kind.BATCH else 0


@functools.lru_cache(maxsize=64)
def boundary_lengths(system: System, geometry: Geometry) -> tuple[int, ...]:
    """Return every legal length that a formula turns at, with its neighbours; ascending."""
    n, pool, topk = geometry.draft_tokens, geometry.pool_size, geometry.topk
    centres = [geometry.columns, geometry.context, n, topk, topk + 3, topk + pool, 2 * pool]
    centres += [k * unit for unit in (geometry.page_size, geometry.allocator_page, 128) for k in (1, 2)]
    last_page = geometry.context // geometry.allocator_page * geometry.allocator_page
    shortest = system.shortest_length(geometry)
    # Where the write start of a plan passes from one pooled page to the next, and where the length itself does.
    pages = [page + start for page in (geometry.allocator_page, last_page) for start in (0, shortest)]
    centres += [page + step for page in pages for step in (0, -pool, pool)]
    if geometry.indexer:
        split = VARIANTS[geometry.schedule].split
        centres += [split, 2 * split, *_thresholds(geometry)]
    centres += [k * unit for unit in system.units(geometry) for k in (1, 2)]
    values = {*_LENGTHS, *(centre + step for centre in centres for step in (-1, 0, 1))}
    if system.adds_draft:
        values |= {value - n for value in values}
    return tuple(sorted(value for value in values if shortest <= value <= geometry.context))


@functools.lru_cache(maxsize=64)
def boundaries(system: System, geometry: Geometry, buckets: tuple[int, ...]) -> tuple[Boundary, ...]:
    """Return all boundaries that a round over `buckets` can reach, in a fixed order."""
    found = [Boundary(kind=Kind.LENGTH, value=value) for value in boundary_lengths(system, geometry)]
    for bucket in buckets:
        most = most_requests(system, geometry, bucket)
        sizes = sorted({*_BATCHES, bucket // 2, bucket - 1, bucket})
        found += [Boundary(kind=Kind.BATCH, value=raw, bucket=bucket) for raw in sizes if 0 <= raw <= most]
    found += _empty(system, geometry, buckets)
    found += _write_starts(system, geometry)
    found += _extends(system, geometry, buckets)
    found += [Boundary(kind=Kind.ROW, value=row) for row in _rows(geometry)]
    if max(buckets) * geometry.context >= _INT32:
        found.append(Boundary(kind=Kind.SUM, value=_INT32, bucket=max(buckets)))
    if max(most_requests(system, geometry, bucket) for bucket in buckets) > 1:
        found.append(Boundary(kind=Kind.ALIAS, which=ONE_TWICE))
    found.append(Boundary(kind=Kind.ALIAS, which=OTHER_PAGES))
    return (*found, *_sums(system, geometry, buckets))


def _empty(system: System, geometry: Geometry, buckets: Sequence[int]) -> Iterator[Boundary]:
    if system.shortest_length(geometry):
        return
    yield Boundary(kind=Kind.EMPTY, which="first")
    yield Boundary(kind=Kind.EMPTY, which="last")
    full = [b for b in buckets if not undefined_when_empty(system, geometry, b)]
    if full:
        yield Boundary(kind=Kind.EMPTY, which="all", bucket=full[0])
    if max(most_requests(system, geometry, bucket) for bucket in buckets) > 2:
        yield Boundary(kind=Kind.EMPTY, which="middle")


def _write_starts(system: System, geometry: Geometry) -> Iterator[Boundary]:
    if not geometry.indexer or geometry.pool_size == 1:
        return
    n = geometry.draft_tokens
    counts = range(1, n + 1) if "accept_lens" in system.lens(geometry) else (n,)
    for residue in range(geometry.pool_size):
        if system.shortest_length(geometry) + residue <= geometry.context:
            yield from (Boundary(kind=Kind.WRITE, value=residue, extra=count) for count in counts)


def _extends(system: System, geometry: Geometry, buckets: Sequence[int]) -> Iterator[Boundary]:
    if not system.takes(geometry, "extend_lens"):
        return
    n = geometry.draft_tokens
    if system.shortest_length(geometry) < n:
        yield Boundary(kind=Kind.EXTEND, which="longer than the length")
    if n <= geometry.context:
        yield Boundary(kind=Kind.EXTEND, which="equal to the length")
    if "extend_lens" in system.lens(geometry):
        full = [bucket for bucket in buckets if most_requests(system, geometry, bucket) == bucket]
        if full:
            yield Boundary(kind=Kind.EXTEND, which="nothing at all", bucket=full[0])
            yield Boundary(kind=Kind.EXTEND, which="all rows", bucket=full[0])
        if max(most_requests(system, geometry, bucket) for bucket in buckets) > 1:
            yield Boundary(kind=Kind.EXTEND, which="nothing by one request")


def _rows(geometry: Geometry) -> list[int]:
    last = geometry.request_rows - 1
    wraps = -(-_INT32 // geometry.token_columns)  # the first row whose offset int32 does not hold
    return sorted({1, last, *(row for row in (wraps - 1, wraps) if 1 <= row <= last)})


def _sums(system: System, geometry: Geometry, buckets: Sequence[int]) -> Iterator[Boundary]:
    """Totals over the batch, each at the first bucket that reaches it."""
    if not geometry.indexer:
        return
    slots = schedule_slots(geometry, system.context_columns(geometry))
    wanted = [(Kind.TILES, total, 0) for total in (0, 1)]
    wanted += [(Kind.TILES, k * slots + step, 0) for k in (1, 2) for step in (-1, 0, 1)]
    for threshold, cap in PLAN_RULES[geometry.plan_rules].thresholds:
        wanted += [(Kind.LONG_ROWS, cap + step, threshold) for step in (-1, 0, 1)]
    for kind, total, threshold in dict.fromkeys(wanted):
        for bucket in buckets:
            boundary = Boundary(kind=kind, value=total, extra=threshold, bucket=bucket)
            if lengths_of_total(boundary, system, geometry) is not None:
                yield boundary
                break


# Totals -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PerRequest:
    """A request of each length 0..context adds this to a total of its round: [context + 1]. `long_rows` by threshold of
    the plan rules; both empty without the indexer."""

    tiles: Array
    long_rows: dict[int, Array]

    def of(self, boundary: Boundary) -> Array:
        return self.tiles if boundary.kind is Kind.TILES else self.long_rows[boundary.extra]


@functools.lru_cache(maxsize=8)
def per_request(system: System, geometry: Geometry, rows: int) -> PerRequest:
    """Return the facts of requests that own `rows` token rows; looked up rather than worked out for every round."""
    if not geometry.indexer:
        return PerRequest(tiles=np.zeros(0, np.int64), long_rows={})
    lengths = np.arange(geometry.context + 1)
    parts = [
        _token_lengths(system, geometry, part, rows) for part in np.array_split(lengths, len(lengths) // _PART + 1)
    ]
    return PerRequest(
        tiles=_tiles(system, geometry, lengths, parts),
        long_rows={t: np.concatenate([(part > t).sum(1) for part in parts]) for t in _thresholds(geometry)},
    )


def _thresholds(geometry: Geometry) -> list[int]:
    return [threshold for threshold, _ in PLAN_RULES[geometry.plan_rules].thresholds]


def _token_lengths(system: System, geometry: Geometry, lengths: Array, rows: int) -> Array:
    """Return what the token rows of each request see, with the indexer: [requests, rows] (contract 1)."""
    seen: Array = np.maximum(lengths[:, None] - system.written_back(geometry) + np.arange(rows) + 1, 0)
    return seen


def _tiles(system: System, geometry: Geometry, lengths: Array, parts: Sequence[Array]) -> Array:
    """Return the tiles of each request in `paged_mqa_schedule_metadata`, which all systems have (contract 3.2, 3.3)."""
    variant, n = VARIANTS[geometry.schedule], geometry.draft_tokens
    if system.context_columns(geometry) > 1:
        units = 1 if variant.unit is Unit.REQUEST else units_per_request(variant, n)
        return units * -(-(lengths + n) // variant.split)
    return np.concatenate([(-(-part // variant.split)).sum(1) for part in parts])


@functools.lru_cache(maxsize=2)
def totals(round_: Round, system: System, geometry: Geometry) -> tuple[int, dict[int, int]]:
    """Return tiles, and token rows above each threshold of the plan rules, pad requests included; with the indexer."""
    lengths, pads = list(round_.seq_lens), round_.bucket - round_.raw_batch
    if "verify_lens" in system.lens(geometry):
        # A pad request, or the last one, owns what the others leave (contract 9).
        tokens = system.capacity(geometry, round_.bucket)
        owned = np.array(padded_to_bucket(round_.lens.get("verify_lens", ()), round_.bucket, tokens)[0])
        before = np.array([*lengths, *[system.pad_length(geometry)] * pads]) - (np.cumsum(owned) - owned)
        rows = np.repeat(before, owned) + np.arange(tokens) + 1
        tiles = int((-(-rows // VARIANTS[geometry.schedule].split)).sum())
        return tiles, {t: int((rows > t).sum()) for t in _thresholds(geometry)}
    table = per_request(system, geometry, geometry.draft_tokens)
    lengths += [system.pad_length(geometry)] * bool(pads)
    counts = np.ones(len(lengths), np.int64)
    counts[len(lengths) - 1 :] = max(pads, 1)
    long_rows = {t: int((rows[lengths] * counts).sum()) for t, rows in table.long_rows.items()}
    return int((table.tiles[lengths] * counts).sum()), long_rows


def has_plan(system: System, geometry: Geometry, bucket: int) -> bool:
    """Return whether a top-k plan is written for `bucket` requests (contract 5)."""
    rows = system.capacity(geometry, bucket)
    return geometry.indexer and is_written(rows, PLAN_RULES[geometry.plan_rules].max_clusters)


def full_rows(system: System, geometry: Geometry, bucket: int) -> tuple[int, ...]:
    """Return token rows of each request of a full batch that leaves none over."""
    if "verify_lens" in system.lens(geometry):
        return capture_lens(system.capacity(geometry, bucket), bucket, geometry.draft_tokens)
    return (geometry.draft_tokens,) * bucket


def lengths_of_total(boundary: Boundary, system: System, geometry: Geometry) -> tuple[int, ...] | None:
    """Lengths of a full batch with `full_rows` whose total is exactly that of `boundary`; None if there are none."""
    bucket, low = boundary.bucket, system.shortest_length(geometry)
    if most_requests(system, geometry, bucket) < bucket:
        return None
    if boundary.kind is Kind.LONG_ROWS and not has_plan(system, geometry, bucket):
        return None
    owned = full_rows(system, geometry, bucket)
    values = {rows: per_request(system, geometry, rows).of(boundary)[low:] for rows in set(owned)}
    left = boundary.value - sum(int(values[rows][0]) for rows in owned)
    lengths = [low] * bucket
    # Each request as long as may be, until nothing is left for the rest.
    for b, rows in enumerate(owned):
        if left <= 0:
            break
        longer = int(np.searchsorted(values[rows], values[rows][0] + left, side="right")) - 1
        lengths[b] = low + longer
        left -= int(values[rows][longer] - values[rows][0])
    if left or (not any(lengths) and undefined_when_empty(system, geometry, bucket)):
        return None
    return tuple(lengths)


# Recognising one ----------------------------------------------------------------------------------------------------


def marks(round_: Round, system: System, geometry: Geometry) -> set[Mark]:
    """Return the marks of every boundary that `round_` holds, and of other values of the same kinds."""
    lengths, requests, n = round_.seq_lens, round_.requests, geometry.draft_tokens
    found: set[Mark] = {(Kind.BATCH, round_.raw_batch, 0, "", round_.bucket)}
    found |= {(Kind.LENGTH, length, 0, "", 0) for length in lengths}
    found |= {(Kind.ROW, row, 0, "", 0) for row in requests}
    found |= {(Kind.EMPTY, 0, 0, which, 0) for which in _empties(lengths, round_.bucket)}
    if len(set(requests)) < len(requests):
        found.add((Kind.ALIAS, 0, 0, ONE_TWICE, 0))
    if set(round_.remap) & set(requests):
        found.add((Kind.ALIAS, 0, 0, OTHER_PAGES, 0))
    if sum(lengths) >= _INT32:
        found.add((Kind.SUM, _INT32, 0, "", 0))
    if system.takes(geometry, "extend_lens"):
        found |= {(Kind.EXTEND, 0, 0, which, 0) for which in _relations(round_, n)}
    if geometry.indexer:
        found.update(_totals(round_, system, geometry))
        shortest = system.shortest_length(geometry)
        counts = round_.lens.get("accept_lens", (n,) * len(lengths))
        residues = [(length - shortest) % geometry.pool_size for length in lengths]
        found |= {(Kind.WRITE, residue, count, "", 0) for residue, count in zip(residues, counts, strict=True)}
    return found


def _empties(lengths: Sequence[int], bucket: int) -> Iterator[str]:
    if lengths:
        yield from ["first"] * (lengths[0] == 0)
        yield from ["last"] * (lengths[-1] == 0)
        yield from ["middle"] * (0 in lengths[1:-1])
        yield from ["all"] * (not any(lengths) and len(lengths) == bucket)


def _relations(round_: Round, n: int) -> Iterator[str]:
    lengths, extends = round_.seq_lens, round_.lens.get("extend_lens", (n,) * round_.raw_batch)
    yield from ["longer than the length"] * any(map(int.__gt__, extends, lengths))
    yield from ["equal to the length"] * any(map(int.__eq__, extends, lengths))
    yield from ["nothing by one request"] * (0 in extends and any(extends))
    # A pad request extends by N (contract 0.2), so these two take a full batch.
    if len(extends) == round_.bucket:
        yield from ["nothing at all"] * (not any(extends))
        yield from ["all rows"] * all(extend == n for extend in extends)


def _totals(round_: Round, system: System, geometry: Geometry) -> Iterator[Mark]:
    tiles, long_rows = totals(round_, system, geometry)
    yield Kind.TILES, tiles, 0, "", 0
    if has_plan(system, geometry, round_.bucket):
        for threshold, rows in long_rows.items():
            yield Kind.LONG_ROWS, rows, threshold, "", 0
