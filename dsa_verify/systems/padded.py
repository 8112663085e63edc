"""Layout of DSV4-style metadata, in which nothing is dead: every column of every row is written and compared, pad rows
included (contract 7.1, 7.2). The mode is `geometry.padded_mode`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from dsa_verify.contract.edge_kind import TABLES, EdgeKind
from dsa_verify.contract.geometry import MAX_CONTEXT_TOKENS, Geometry
from dsa_verify.contract.layout import Field, Layout, Row
from dsa_verify.contract.padded import (
    LOW_RATIOS,
    PADDED_MODES,
    check_padded_geometry,
    page_columns,
    write_location_dtype,
)
from dsa_verify.contract.size import Size
from dsa_verify.contract.static_inputs import StaticInput
from dsa_verify.contract.system import OF_OTHERS, Dealer, Fields, Shapes, System
from dsa_verify.systems.shapes import DRAFTS, both_ends, swing

if TYPE_CHECKING:
    import torch

BUCKETS: Final = (48, 14)  # of the matrix
TOPK: Final = 129  # rounded up to the alignment of a table, it fills no block of buckets on any device


def _narrow(window: int) -> int:
    """A window that ends within the aligned width of its table, so that columns are left behind it."""
    return window - window // 4


# The kind of step; the sliding window; tokens of one compressed entry, and whether ratios 1 and 2 exist too; the first
# position that a replay may read of any request, and whether each request has one of its own instead (pad rows keep
# `replay_floor`); and what widths are rounded up to (contract 7).
SIZES: Final = (
    Size(name="padded_mode", default="decode", choices=PADDED_MODES),
    Size(name="window", default=128, low=1, high=1024, presets={"tiny_v4": 8, "small_v4": 16}),
    Size(name="sparse_ratio", default=4, low=1, high=1024, power_of_two=True),
    Size(name="dense_ratio", default=128, low=1, high=1024, power_of_two=True, presets={"tiny_v4": 8}),
    Size(name="low_ratios", default=False, note="low ratios"),
    Size(name="replay_floor", default=0, high=MAX_CONTEXT_TOKENS),
    Size(name="request_floors", default=False),
    Size(name="index_align", default=64, low=1, high=128, presets={"tiny_v4": 8}),
)


def token_rows(geometry: Geometry) -> int:
    """Return token rows of each request."""
    n = geometry.draft_tokens
    return {"decode": 1, "verify": n, "draft_block": n - 1, "draft_extend": n}[geometry.padded_mode]


def padded(geometry: Geometry, bucket: int) -> Layout:
    """The core tensors, then those of each compression ratio: c4 is `sparse_ratio`, c128 is `dense_ratio`, whatever
    their values, and with `low_ratios` c1 and c2. UsageError for a geometry that the contract leaves undefined."""
    check_padded_geometry(geometry)
    tokens = bucket * token_rows(geometry)
    fields = (*_core(geometry, tokens), *_sparse(geometry, tokens), *_dense(geometry, tokens))
    if geometry.low_ratios:
        for ratio in LOW_RATIOS:
            fields += tuple(_low(geometry, tokens, ratio))
    return Layout(system="padded", geometry=geometry, bucket=bucket, tokens=tokens, fields=fields)


def _core(geometry: Geometry, tokens: int) -> Iterator[Field]:
    decode, extend = geometry.padded_mode == "decode", geometry.padded_mode == "draft_extend"
    block = token_rows(geometry) if geometry.padded_mode == "draft_block" else 0
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
    """Yield what an indexer fills in: all -1 as prepared, so that the upper bound is what it may write."""
    yield _field(geometry, f"{name}_sparse_lengths", (tokens,), 1, geometry.topk + 1)
    shape = (tokens, _aligned(geometry, geometry.topk))
    yield _field(geometry, f"{name}_sparse_indices", shape, -1, _entries(geometry, ratio))


def _field(geometry: Geometry, name: str, shape: tuple[int, ...], low: int, high: int, dtype: str = "int32") -> Field:
    row = Row.REQUEST if geometry.padded_mode == "decode" else Row.TOKEN
    return Field(name=name, shape=shape, row=row, section="7.1", low=low, high=high, dtype=dtype)


def _length_limit(geometry: Geometry) -> int:
    """Return one more than the longest length that a row may see."""
    added = {"decode": 0, "draft_extend": 0}.get(geometry.padded_mode, token_rows(geometry))
    return geometry.context + added + 1


def _entries(geometry: Geometry, ratio: int) -> int:
    """Entries of a pool that holds one for each `ratio` token slots."""
    return -(-geometry.slots // ratio)


def _aligned(geometry: Geometry, width: int) -> int:
    align: int = geometry.index_align
    return -(-width // align) * align


def written_back(geometry: Geometry) -> int:
    """Return how far before the end of its length a request writes its first token in a step (contract 7.1)."""
    return {"decode": 1, "verify": 0, "draft_block": 0, "draft_extend": geometry.draft_tokens}[geometry.padded_mode]


def _inputs(geometry: Geometry) -> tuple[StaticInput, ...]:
    floors = StaticInput(
        name="replay_floors",
        dtype="int32",
        pad=geometry.replay_floor,
        high=geometry.context + 1,
        limit="context",
        of_row=True,
    )
    return ((floors,) if geometry.request_floors else ()) + (out_cache_loc(geometry, token_rows(geometry)),)


def out_cache_loc(geometry: Geometry, rows: int) -> StaticInput:
    """Return where each of the `rows` tokens of a request is stored."""
    # A token that is not to be stored has slot 0, of which the contract speaks in 0.1, 7.1 and 8.2. Other engines' -1
    # is no location there: the owner of -1 would be the last rank, and it would store at row -1 (8.1, 8.2).
    return StaticInput(name="out_cache_loc", dtype="int64", low=1, high=geometry.slots, rows=rows, drawn=False)


def _derive(
    geometry: Geometry, drawn: Mapping[str, torch.Tensor], req_to_token: torch.Tensor, seed: torch.Tensor
) -> Mapping[str, torch.Tensor]:
    """The slots of the tokens of this step: an engine allocates them before it prepares metadata (contract 7.1)."""
    from dsa_verify.buffers.derived_inputs import slots_at  # imports torch

    first = drawn["seq_lens"].long() - written_back(geometry)
    return {"out_cache_loc": slots_at(req_to_token, drawn, first, token_rows(geometry))}


def _full_to_swa(geometry: Geometry, device: torch.device) -> torch.Tensor:
    from dsa_verify.buffers.derived_inputs import full_to_swa  # imports torch

    return full_to_swa(geometry, device)


def _turn(geometry: Geometry, i: int, fixed: frozenset[str]) -> Fields:
    """Floors of each request; of our own pipelines in every fourth configuration, once a mode, the ratios 1 and 2, and
    in another a narrow window."""
    found: dict[str, object] = {}
    if OF_OTHERS not in fixed and (i + i // 4) % 4 == 2 and geometry.page_size % max(LOW_RATIOS) == 0:
        found["low_ratios"] = True
    if OF_OTHERS not in fixed and (i + i // 4) % 4 == 1:
        found["window"] = _narrow(geometry.window)
    if "replay_floor" not in fixed:
        found["request_floors"] = True
    return found


def _shapes(
    geometry: Geometry, batches: Sequence[int] | None, drafts: Sequence[int] | None, fixed: frozenset[str]
) -> Shapes:
    """Modes x draft lengths, with all batches captured."""
    modes = (geometry.padded_mode,) if "padded_mode" in fixed else PADDED_MODES
    buckets = tuple(dict.fromkeys(batches or BUCKETS))
    return [(buckets, {"padded_mode": mode, "draft_tokens": draft}) for mode in modes for draft in drafts or DRAFTS]


def _script(buckets: tuple[int, ...]) -> list[tuple[int, int]]:
    """Every raw batch, from both ends in turn, so that each tail was live rows a moment ago."""
    walks = [[(bucket, raw) for raw in both_ends(bucket)] for bucket in dict.fromkeys(buckets)]
    return swing(buckets[0]) + [shape for walk in walks for shape in walk]


def _units(geometry: Geometry) -> tuple[int, ...]:
    return geometry.window, geometry.sparse_ratio, geometry.dense_ratio


def _deal(dealer: Dealer, geometry: Geometry) -> Fields:
    # A draft block of one token holds none of them.
    modes = [mode for mode in PADDED_MODES if mode != "draft_block" or max(dealer.drafts) > 1]
    found: dict[str, object] = {"padded_mode": dealer.deal("padded_mode", modes)}
    if dealer.engine:
        return found
    if dealer.ours:
        found["topk"] = dealer.deal("topk", (geometry.topk, TOPK))
        found["window"] = dealer.deal("window", (geometry.window, _narrow(geometry.window)))
    ratios = geometry.page_size % max(LOW_RATIOS) == 0
    found["low_ratios"] = ratios and dealer.deal("low_ratios", (False, True))
    floors = (0, 1, geometry.page_size - 1, geometry.context // 2)
    found["replay_floor"] = dealer.deal("replay_floor", floors)
    found["request_floors"] = dealer.deal("request_floors", (True, False))
    return found


SYSTEM: Final = System(
    name="padded",
    summary="DSV4-style metadata, full width, at every raw batch (contract 7)",
    layout=padded,
    oracle="oracles.padded:PaddedOracle",
    subjects={
        "triton": "dsa_verify.subjects.pipelines.padded:Padded",
        "glue": "dsa_verify.subjects.pipelines.padded_glue:Glued",
    },
    drafts=True,
    presets=("deepseek_v4", "tiny_v4"),
    sizes=SIZES,
    token_rows=token_rows,
    written_back=written_back,
    refusals={"replay_floors": "needs geometry.request_floors; set it"},
    own_inputs=_inputs,
    constants={"full_to_swa": _full_to_swa},
    derive=_derive,
    turn=_turn,
    shapes=_shapes,
    script=_script,
    units=_units,
    deal=_deal,
    edges=TABLES - {EdgeKind.GAP, EdgeKind.EMPTY},
    # The widest table has a column for each 128 tokens: the longest context, and as many rows as that leaves.
    widest={"padded_mode": "verify", "draft_tokens": 16, "context": MAX_CONTEXT_TOKENS},
    all_fields={"low_ratios": True},
)
