"""Decode context parallelism as optimised: per rank one launch each for the KV write, both forms of the localised
selection, and lengths with the page table; one launch each for the selected slots and for the merge; the ragged prefix
gather (contract 8).

Everything writes in place and may be captured. What is read may have any strides; what is written is dense, and
UsageError says so of an output that is not. `rank` and `size` are r and D, `block` the interleave block I, which
divides the page. `Dcp` does the work of all ranks on one device.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
import triton

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.pipelines.dcp_kernel import (
    kv_indices_kernel,
    localize_kernel,
    merge_kernel,
    pack_prefix_kernel,
    reorder_kernel,
    select_kernel,
    shard_kernel,
    write_kernel,
)

WRITE_LANES: Final = 64
PAGE_BLOCK: Final = 256
MERGE_ELEMENTS: Final = 2048
PREFIX_ROWS: Final = 64
INDEX_BLOCK: Final = 1024
# The interpreter pays by the operation, not by the element: there one program takes as much as it can hold.
INTERPRETED_ELEMENTS: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Rank `rank` of `size`, with interleave block `block`."""

    rank: int
    size: int
    block: int = 1


def write_shard(pool: torch.Tensor, locations: torch.Tensor, rows: torch.Tensor, place: Place) -> None:
    """int32 [n, words] `rows` into `pool` int32 [local rows, words] at those of the integer [n] `locations`, virtual
    slots, that the rank owns and that are not 0 (contract 8.2). Of equal locations the rows must be equal."""
    batch, words = rows.shape
    lanes = WRITE_LANES if pool.is_cuda else triton.next_power_of_2(batch)
    write_kernel[(triton.cdiv(batch, lanes),)](
        locations,
        rows,
        pool,
        batch,
        locations.stride(0),
        rows.stride(0),
        rows.stride(1),
        pool.stride(0),
        words,
        place.rank,
        SIZE=place.size,
        INTERLEAVE=place.block,
        LANES=lanes,
        WORD_LANES=triton.next_power_of_2(words),
    )


def select_slots(inputs: Inputs, selected: torch.Tensor) -> None:
    """`selected` int32 [bs, columns], dense: the slots of `inputs.selected_positions`, -1 staying -1 (contract 8.3)."""
    _check_dense(selected=selected)
    positions = inputs.selected_positions
    assert positions is not None
    rows, columns = positions.shape
    lanes = triton.next_power_of_2(columns)
    group = _group(positions, rows, lanes)
    select_kernel[(triton.cdiv(rows, group),)](
        inputs.req_pool_indices,
        inputs.req_to_token,
        positions,
        selected,
        rows,
        columns,
        inputs.req_pool_indices.stride(0),
        inputs.req_to_token.stride(0),
        positions.stride(0),
        positions.stride(1),
        COLUMNS=lanes,
        GROUP=group,
    )


def localize(
    selection: torch.Tensor, positional: torch.Tensor, packed: torch.Tensor, counts: torch.Tensor, place: Place
) -> None:
    """Both forms of contract 8.3 of int32 [rows, columns] `selection`, virtual slots or -1, which stays as it is:
    `positional` and `packed` int32 of its shape, dense, and `counts` int32 [rows]."""
    _check_dense(positional=positional, packed=packed, counts=counts)
    rows, columns = selection.shape
    lanes = triton.next_power_of_2(columns)
    group = _group(selection, rows, lanes)
    localize_kernel[(triton.cdiv(rows, group),)](
        selection,
        positional,
        packed,
        counts,
        rows,
        columns,
        selection.stride(0),
        selection.stride(1),
        place.rank,
        SIZE=place.size,
        INTERLEAVE=place.block,
        COLUMNS=lanes,
        GROUP=group,
    )


def shard_lengths_and_pages(
    inputs: Inputs, page_size: int, local_lengths: torch.Tensor, page_table: torch.Tensor, place: Place
) -> None:
    """`local_lengths` int32 [bs] (contract 8.1), and of `page_table` int32 [bs, pages] what is live (contract 8.4)."""
    batch, pages = page_table.shape
    block = min(PAGE_BLOCK, triton.next_power_of_2(pages))
    group = _group(page_table, batch, block)
    shard_kernel[(triton.cdiv(batch, group),)](
        inputs.seq_lens,
        inputs.req_pool_indices,
        inputs.req_to_token,
        local_lengths,
        page_table,
        batch,
        pages,
        inputs.seq_lens.stride(0),
        inputs.req_pool_indices.stride(0),
        inputs.req_to_token.stride(0),
        page_table.stride(0),
        place.rank,
        SIZE=place.size,
        INTERLEAVE=place.block,
        PAGE=page_size,
        COLUMNS=block,
        GROUP=group,
    )


def merge(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, log_base: str, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """`out` float32 [rows, heads, dim] or [rows, heads * dim] and `lse` float32 [rows, heads], dense, from finite
    `partial_out` float32 [D, rows, heads, dim] and `partial_lse` float32 [D, rows, heads] (contract 8.7).

    `log_base`: "2" or "e", of both log-sum-exps. `dim` is a power of two. In float32; `dcp_rules.MERGE_BOUND` says how
    far off.
    """
    _check_dense(out=out, lse=lse)
    size, rows, heads, dim = partial_out.shape
    items = rows * heads
    if out.is_cuda:
        group = max(1, MERGE_ELEMENTS // dim)
    else:
        group = min(triton.next_power_of_2(items), INTERPRETED_ELEMENTS // dim)
    merge_kernel[(triton.cdiv(items, group),)](
        partial_out,
        partial_lse,
        out,
        lse,
        rows,
        heads,
        *partial_out.stride(),
        *partial_lse.stride(),
        SIZE=size,
        DIM=dim,
        BASE_2=log_base == "2",
        GROUP=group,
    )


def _check_dense(**outputs: torch.Tensor) -> None:
    for name, tensor in outputs.items():
        if not tensor.is_contiguous():
            raise UsageError(
                f"{name}: strides {tensor.stride()} of shape {tuple(tensor.shape)} are not dense, and the kernel "
                "writes rows one behind the other; hand over a contiguous tensor and copy it where it belongs"
            )


def _group(tensor: torch.Tensor, rows: int, columns: int) -> int:
    """Rows of one program: one on a GPU."""
    return 1 if tensor.is_cuda else max(1, min(triton.next_power_of_2(rows), INTERPRETED_ELEMENTS // columns))


# The ragged prefix gather of extend (contract 8.4), token interleave only --------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRanges:
    """Positions [start, start + length) of each request, int64 [requests] both, and what follows from them: `offsets`,
    where each request begins in a rank's padded rows, and `targets`, where in token order."""

    starts: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, starts: torch.Tensor, lengths: torch.Tensor, size: int) -> PrefixRanges:
        starts, lengths = (each.to(torch.int64).contiguous() for each in (starts, lengths))
        padded = (lengths + starts % size + (size - 1)) // size
        offsets, targets = padded.cumsum(0) - padded, lengths.cumsum(0) - lengths
        return cls(starts=starts, lengths=lengths, offsets=offsets, targets=targets)


def pack_prefix(
    ranges: PrefixRanges,
    requests: torch.Tensor,
    req_to_token: torch.Tensor,
    pool: torch.Tensor,
    send: torch.Tensor,
    place: Place,
) -> None:
    """Write into `send` int32 [capacity, words] what the rank has in its dense `pool` of each range, pad rows as zeros.

    Rows beyond are left.
    """
    _check_dense(pool=pool, send=send)
    words = pool.shape[1]
    pack_prefix_kernel[(len(requests),)](
        ranges.starts,
        ranges.lengths,
        ranges.offsets,
        requests,
        req_to_token,
        pool,
        send,
        requests.stride(0),
        req_to_token.stride(0),
        words,
        place.rank,
        SIZE=place.size,
        ROWS=PREFIX_ROWS,
        WORD_LANES=triton.next_power_of_2(words),
    )


def reorder(ranges: PrefixRanges, gathered: torch.Tensor, ordered: torch.Tensor) -> None:
    """Dense `gathered` int32 [D, rows of a rank, words] without its pads into `ordered` int32 [capacity, words], in
    token order; rows beyond are left."""
    _check_dense(gathered=gathered, ordered=ordered)
    size, rank_rows, words = gathered.shape
    reorder_kernel[(len(ranges.starts),)](
        ranges.starts,
        ranges.lengths,
        ranges.offsets,
        ranges.targets,
        gathered,
        ordered,
        rank_rows,
        words,
        SIZE=size,
        ROWS=PREFIX_ROWS,
        WORD_LANES=triton.next_power_of_2(words),
    )


def kv_indices(prefix_lens: torch.Tensor, extend_lens: torch.Tensor, out: torch.Tensor) -> None:
    """Write into integer [capacity] `out`, for [prefix; extend] of each request in turn, the row of a buffer.

    The buffer holds all prefixes first and all extends after them (`dcp_kv_indices`).
    """
    _check_dense(out=out)
    kv_indices_kernel[(len(prefix_lens),)](
        prefix_lens.cumsum(0), extend_lens.cumsum(0), out, len(prefix_lens), COLUMNS=INDEX_BLOCK
    )


class Dcp:
    """Contract 8 for one decode step, all ranks on one device and all of it in the graph."""

    name = "triton"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        size, block = geometry.dcp_size, geometry.dcp_block
        self._places = [Place(rank=rank, size=size, block=block) for rank in range(size)]
        for place in self._places:
            self._of(place, "kv_pool").zero_()

    def before_replay(self) -> None:
        pass

    def in_graph(self) -> None:
        for place in self._places:
            self._share(place)
        select_slots(self._inputs, self._buffers["selected_slots"])
        self._merge()

    def _share(self, place: Place) -> None:
        """Do what one rank does by itself."""
        self._write(place)
        self._localize(place)
        self._shard(place)

    def _of(self, place: Place, name: str) -> torch.Tensor:
        return self._buffers[f"rank{place.rank}_{name}"]

    def _write(self, place: Place) -> None:
        inputs = self._inputs
        write_shard(self._of(place, "kv_pool"), inputs.out_cache_loc, inputs.kv_rows, place)

    def _localize(self, place: Place) -> None:
        positional, packed = self._of(place, "localized"), self._of(place, "packed")
        localize(self._inputs.selection, positional, packed, self._of(place, "packed_counts"), place)

    def _shard(self, place: Place) -> None:
        lengths, table = self._of(place, "local_lengths"), self._of(place, "page_table")
        shard_lengths_and_pages(self._inputs, self._geometry.page_size, lengths, table, place)

    def _merge(self) -> None:
        inputs = self._inputs
        out, lse = self._buffers["merged_out"], self._buffers["merged_lse"]
        merge(inputs.partial_out, inputs.partial_lse, self._geometry.log_base, out, lse)
