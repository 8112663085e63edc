"""Layout of DSV4-style metadata, in which nothing is dead: every column of every row is written and compared, pad rows
included (contract 7.1, 7.2). The mode is `geometry.padded_mode`."""

from __future__ import annotations

from collections.abc import Iterator

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Field, Layout, Row
from dsa_verify.contract.padded import LOW_RATIOS, check_padded_geometry, page_columns, write_location_dtype
from dsa_verify.contract.round_table import rows_per_request


def padded(geometry: Geometry, bucket: int) -> Layout:
    """The core tensors, then those of each compression ratio: c4 is `sparse_ratio`, c128 is `dense_ratio`, whatever
    their values, and with `low_ratios` c1 and c2. UsageError for a geometry that the contract leaves undefined."""
    check_padded_geometry(geometry)
    tokens = bucket * rows_per_request("padded", geometry)
    fields = (*_core(geometry, tokens), *_sparse(geometry, tokens), *_dense(geometry, tokens))
    if geometry.low_ratios:
        for ratio in LOW_RATIOS:
            fields += tuple(_low(geometry, tokens, ratio))
    return Layout(system="padded", geometry=geometry, bucket=bucket, tokens=tokens, fields=fields)


def _core(geometry: Geometry, tokens: int) -> Iterator[Field]:
    decode, extend = geometry.padded_mode == "decode", geometry.padded_mode == "draft_extend"
    block = rows_per_request("padded", geometry) if geometry.padded_mode == "draft_block" else 0
    limit = _length_limit(geometry)
    # A pad row of draft-extend is shorter than the draft (contract 7.1).
    shortest = 1 - geometry.draft_tokens if extend else 0 if decode else 1
    columns, window = page_columns(geometry), _aligned(geometry, geometry.window + block)
    yield _field(geometry, "page_table", (tokens, columns), 0, _entries(geometry, geometry.page_size))
    yield _field(geometry, "raw_out_loc", (tokens,), 0, geometry.slots, write_location_dtype(geometry))
    yield _field(geometry, "seq_lens_casual", (tokens,), shortest, limit)
    yield _field(geometry, "positions_casual", (tokens,), shortest - 1, limit - 1)
    yield _field(geometry, "swa_page_indices", (tokens, window), -1, geometry.slots)
    yield _field(geometry, "swa_topk_lengths", (tokens,), block, geometry.window + block + 1)


def _sparse(geometry: Geometry, tokens: int) -> Iterator[Field]:
    yield from _lengths(geometry, tokens, "c4", geometry.sparse_ratio, raw=True)
    yield from _indexed(geometry, tokens, "c4", geometry.sparse_ratio)


def _dense(geometry: Geometry, tokens: int) -> Iterator[Field]:
    yield from _lengths(geometry, tokens, "c128", geometry.dense_ratio, raw=True)
    width = _aligned(geometry, page_columns(geometry) * (geometry.page_size // geometry.dense_ratio))
    yield _field(geometry, "c128_page_indices", (tokens, width), -1, _entries(geometry, geometry.dense_ratio))


def _low(geometry: Geometry, tokens: int, ratio: int) -> Iterator[Field]:
    name = f"c{ratio}"
    yield from _lengths(geometry, tokens, name, ratio, raw=False)
    yield from _indexed(geometry, tokens, name, ratio)
    shape = (tokens, _aligned(geometry, geometry.topk))
    yield _field(geometry, f"{name}_full_indices", shape, -1, _entries(geometry, ratio))
    yield _field(geometry, f"{name}_full_raw_indices", shape, -1, geometry.topk)


def _lengths(geometry: Geometry, tokens: int, name: str, ratio: int, *, raw: bool) -> Iterator[Field]:
    """`raw` ratios write an unfinished group to slot 0, the low ones nowhere (-1)."""
    limit = (_length_limit(geometry) - 1) // ratio + 1
    if raw:
        yield _field(geometry, f"{name}_len_raw", (tokens,), 0, limit)
    yield _field(geometry, f"{name}_len_clamped", (tokens,), 1, max(limit, 2))
    yield _field(geometry, f"{name}_out_loc", (tokens,), 0 if raw else -1, _entries(geometry, ratio), "int64")


def _indexed(geometry: Geometry, tokens: int, name: str, ratio: int) -> Iterator[Field]:
    """What an indexer fills in: all -1 as prepared, so that the upper bound is what it may write."""
    yield _field(geometry, f"{name}_sparse_lengths", (tokens,), 1, geometry.topk + 1)
    shape = (tokens, _aligned(geometry, geometry.topk))
    yield _field(geometry, f"{name}_sparse_indices", shape, -1, _entries(geometry, ratio))


def _field(geometry: Geometry, name: str, shape: tuple[int, ...], low: int, high: int, dtype: str = "int32") -> Field:
    row = Row.REQUEST if geometry.padded_mode == "decode" else Row.TOKEN
    return Field(name=name, shape=shape, row=row, section="7.1", low=low, high=high, dtype=dtype)


def _length_limit(geometry: Geometry) -> int:
    """One more than the longest length that a row may see."""
    added = {"decode": 0, "draft_extend": 0}.get(geometry.padded_mode, rows_per_request("padded", geometry))
    return geometry.context + added + 1


def _entries(geometry: Geometry, ratio: int) -> int:
    """Entries of a pool that holds one for each `ratio` token slots."""
    return -(-geometry.slots // ratio)


def _aligned(geometry: Geometry, width: int) -> int:
    return -(-width // geometry.index_align) * geometry.index_align
