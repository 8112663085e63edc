"""Layout of one decode step under decode context parallelism: for each of D ranks its KV pool, its share of the
selections, lengths and page table, and then what is the same on all of them: the slots that were selected, and the
merge of what all ranks computed (contract 8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from dsa_verify.contract.dcp import LOG_BASES, MERGE_BOUND, check_dcp_geometry, local_rows, shard_pages
from dsa_verify.contract.edge_kind import EdgeKind
from dsa_verify.contract.geometry import SCALED_DOWN_PRESETS, Geometry
from dsa_verify.contract.layout import Compare, Field, Layout, Lifetime, Row
from dsa_verify.contract.size import Size
from dsa_verify.contract.static_inputs import KV_WORDS, StaticInput
from dsa_verify.contract.system import OF_OTHERS, Dealer, Fields, System
from dsa_verify.systems.padded import out_cache_loc

if TYPE_CHECKING:
    import torch

INT32_LIMIT: Final = 1 << 31
RANKS: Final = (1, 2, 3, 4, 8)
_TINY: Final = ("tiny", "tiny_indexer")
# D; I, the consecutive slots of one rank; what the partial results of attention are made of; and the base of their
# log-sum-exps (contract 8).
SIZES: Final = (
    Size(name="dcp_size", default=1, low=1, high=8, ranks=True),
    Size(name="dcp_block", default=1, low=1, high=1024),
    Size(name="heads", default=16, low=1, high=128, presets=dict.fromkeys(_TINY, 2)),
    Size(name="head_dim", default=64, low=1, high=1024, power_of_two=True, presets=dict.fromkeys(_TINY, 8)),
    Size(name="log_base", default="2", choices=LOG_BASES),
)


def dcp(geometry: Geometry, bucket: int) -> Layout:
    """Raise UsageError if pages, blocks and ranks of `geometry` do not fit together."""
    check_dcp_geometry(geometry)
    ranks = range(geometry.dcp_size)
    fields = [field for rank in ranks for field in _share(geometry, bucket, rank)]
    fields += [_selected(geometry, bucket), *_merged(geometry, bucket)]
    return Layout(system="dcp", geometry=geometry, bucket=bucket, tokens=bucket, fields=tuple(fields), ranks=True)


def _share(geometry: Geometry, bucket: int, rank: int) -> list[Field]:
    rows = local_rows(geometry.slots, geometry.dcp_size, geometry.dcp_block)

    def field(name: str, shape: tuple[int, ...], section: str, low: int, high: int, **rest: object) -> Field:
        named = f"rank{rank}_{name}"
        return Field(name=named, shape=shape, row=Row.REQUEST, section=section, low=low, high=high, **rest)  # type: ignore[arg-type]

    selected = (bucket, geometry.topk)
    return [
        # What earlier rounds stored stays: both sides start from zeros and nothing is poisoned in between. No guard
        # can be missed by a rank that writes at virtual slots, which go D times as far as its rows do.
        Field(
            name=f"rank{rank}_kv_pool",
            shape=(rows, KV_WORDS),
            row=Row.SLOT,
            section="8.2",
            low=-INT32_LIMIT,
            high=INT32_LIMIT,
            lifetime=Lifetime.CAPTURE,
        ),
        field("localized", selected, "8.3", -1, rows),
        field("packed", selected, "8.3", -1, rows),
        field("packed_counts", (bucket,), "8.3", 0, geometry.topk + 1),
        field("local_lengths", (bucket,), "8.1", 0, geometry.context + 1),
        # A page is live iff it holds a token, and its first one is at this position of the request.
        field(
            "page_table",
            (bucket, shard_pages(geometry)),
            "8.4",
            0,
            -(-rows // geometry.page_size),
            column_step=geometry.page_size * geometry.dcp_size,
            column_start=rank * geometry.dcp_block,
        ),
    ]


def _selected(geometry: Geometry, bucket: int) -> Field:
    """Before it is localised: the columns of each request's row of the table that were selected."""
    return Field(
        name="selected_slots",
        shape=(bucket, geometry.topk),
        row=Row.REQUEST,
        section="8.3",
        low=-1,
        high=geometry.slots,
    )


def _merged(geometry: Geometry, bucket: int) -> list[Field]:
    """Partial results are below 1 in size, hence the floor (see MERGE_BOUND)."""
    shapes = {"merged_out": (bucket, geometry.heads * geometry.head_dim), "merged_lse": (bucket, geometry.heads)}
    return [
        Field(
            name=name,
            shape=shape,
            row=Row.REQUEST,
            section="8.7",
            low=-INT32_LIMIT,
            high=INT32_LIMIT,
            dtype="float32",
            compare=Compare.CLOSE,
            bound=MERGE_BOUND,
            floor=1.0,
        )
        for name, shape in shapes.items()
    ]


def _inputs(geometry: Geometry) -> tuple[StaticInput, ...]:
    size, heads, dim = geometry.dcp_size, geometry.heads, geometry.head_dim
    return (
        out_cache_loc(geometry, geometry.draft_tokens),
        StaticInput(name="kv_rows", dtype="int32", high=1 << 30, item=(KV_WORDS,), drawn=False),
        StaticInput(
            name="selected_positions",
            dtype="int32",
            pad=-1,
            high=geometry.context,
            item=(geometry.topk,),
            drawn=False,
            columns_apart=True,
        ),
        # No count comes with it: what is not -1 is selected, wherever in its row it stands (contract 8.3).
        StaticInput(
            name="selection",
            dtype="int32",
            pad=-1,
            low=1,
            high=geometry.slots,
            item=(geometry.topk,),
            drawn=False,
            columns_apart=True,
        ),
        StaticInput(
            name="partial_out",
            dtype="float32",
            low=1,
            high=1 << 20,
            leading=(size,),
            item=(heads, dim),
            drawn=False,
        ),
        StaticInput(
            name="partial_lse",
            dtype="float32",
            low=1,
            high=1 << 20,
            leading=(size,),
            item=(heads,),
            drawn=False,
            columns_apart=True,
        ),
    )


def _derive(
    geometry: Geometry, drawn: Mapping[str, torch.Tensor], req_to_token: torch.Tensor, seed: torch.Tensor
) -> Mapping[str, torch.Tensor]:
    from dsa_verify.systems.dcp_inputs import dcp_inputs  # imports torch

    return dcp_inputs(geometry, drawn, req_to_token, seed)


def _turn(geometry: Geometry, i: int, fixed: frozenset[str]) -> Fields:
    """Ranks and the base of logarithms; of our own pipelines in half of the configurations blocks of a page, and in a
    quarter a top-k that fills no block of columns."""
    found: dict[str, object] = {"dcp_size": RANKS[i % len(RANKS)], "log_base": LOG_BASES[i % 2]}
    if OF_OTHERS not in fixed:
        found["dcp_block"] = (1, geometry.page_size)[i // 2 % 2]
        if i % 4 == 3:
            found["topk"] = _ragged_topk(geometry)
    return found


def _ragged_topk(geometry: Geometry) -> int:
    """Return a top-k that is no power of two, and that a geometry of this size may have."""
    return min(192 * geometry.pool_size, geometry.topk * 3 // 4)


def _units(geometry: Geometry) -> tuple[int, ...]:
    return (geometry.dcp_size * geometry.dcp_block,)


def _deal(dealer: Dealer, geometry: Geometry) -> Fields:
    # Pools are refused with several ranks (contract 8.8).
    sizes = [size for size in RANKS if geometry.pool_size == 1 and dealer.is_legal(geometry, {"dcp_size": size})]
    found = {"dcp_size": dealer.deal("dcp_size", sizes or [1]), "log_base": dealer.deal("log_base", LOG_BASES)}
    if not dealer.engine:
        found["dcp_block"] = dealer.deal("dcp_block", (1, geometry.page_size))
    if dealer.ours and geometry.preset not in SCALED_DOWN_PRESETS:  # those have another top-k in their turn anyway
        found["topk"] = dealer.deal("topk", (geometry.topk, _ragged_topk(geometry)))
    return found


SYSTEM: Final = System(
    name="dcp",
    summary="decode context parallelism, all ranks on one device (contract 8)",
    layout=dcp,
    oracle="oracles.dcp:DcpOracle",
    subjects={"triton": "dsa_verify.subjects.pipelines.dcp:Dcp"},
    sizes=SIZES,
    seeded=True,
    own_inputs=_inputs,
    derive=_derive,
    told=("out_cache_loc", "kv_rows", "selection", "partial_lse"),
    unknowable="its outputs hold what earlier replays wrote into the pools, which a check cannot know",
    turn=_turn,
    units=_units,
    deal=_deal,
    edges=frozenset({EdgeKind.BATCH, EdgeKind.LONG, EdgeKind.FAR, EdgeKind.POOLS}),
    edge_fields={
        EdgeKind.BATCH: ({"dcp_size": 4},),
        EdgeKind.LONG: ({"dcp_size": 8},),
        EdgeKind.FAR: ({"dcp_size": 2},),
    },
    all_fields={"dcp_size": 8},
)
