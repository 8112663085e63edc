"""Layout of one decode step under decode context parallelism: for each of D ranks its KV pool, its share of the
selections, lengths and page table, and then what is the same on all of them: the slots that were selected, and the
merge of what all ranks computed (contract 8)."""

from __future__ import annotations

from typing import Final

from dsa_verify.contract.dcp import MERGE_BOUND, check_dcp_geometry, local_rows, shard_pages
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Compare, Field, Layout, Lifetime, Row
from dsa_verify.contract.static_inputs import KV_WORDS

INT32_LIMIT: Final = 1 << 31


def dcp(geometry: Geometry, bucket: int) -> Layout:
    """UsageError if pages, blocks and ranks of `geometry` do not fit together."""
    check_dcp_geometry(geometry)
    ranks = range(geometry.dcp_size)
    fields = [field for rank in ranks for field in _share(geometry, bucket, rank)]
    fields += [_selected(geometry, bucket), *_merged(geometry, bucket)]
    return Layout(system="dcp", geometry=geometry, bucket=bucket, tokens=bucket, fields=tuple(fields))


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
