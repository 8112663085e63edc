"""Decode context parallelism in eager PyTorch: mapping, sharded writes, localised selections, page tables and the merge
(contract 8.1 to 8.4, 8.7), and DcpOracle, which does them for all ranks of a decode step.

Integers stay integers and the merge is done in float64. Every function with an `out` or a pool may be captured in a
CUDA graph. `size` is D, `rank` is r, `block` the interleave block I.
"""

from __future__ import annotations

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs

NONE = -1


def owner(slots: torch.Tensor, size: int, block: int = 1) -> torch.Tensor:
    """The rank that stores each virtual slot, none of them negative (contract 8.1)."""
    return slots.floor_divide(block).remainder(size)


def local(slots: torch.Tensor, size: int, block: int = 1) -> torch.Tensor:
    """The row of its owner's pool that each virtual slot, none of them negative, is stored in (contract 8.1)."""
    return slots.floor_divide(size * block) * block + slots.remainder(block)


def virtual(rows: torch.Tensor, rank: int, size: int, block: int = 1) -> torch.Tensor:
    """The virtual slot, or position, of each local row of `rank`: the inverse of `local` (contract 8.1)."""
    return rows.floor_divide(block) * (size * block) + rank * block + rows.remainder(block)


def local_lengths(lengths: torch.Tensor, rank: int, size: int, block: int = 1) -> torch.Tensor:
    """Return how many of the first `lengths` positions `rank` owns (contract 8.1)."""
    cycle = size * block
    return lengths.floor_divide(cycle) * block + (lengths.remainder(cycle) - rank * block).clamp(0, block)


def write_shard(
    pool: torch.Tensor, locations: torch.Tensor, rows: torch.Tensor, rank: int, size: int, block: int = 1
) -> None:
    """Store int32 [n, words] `rows` into `pool` int32 [local rows, words] where `rank` owns the location, which is not
    0 (contract 8.2). Of equal locations the rows must be equal."""
    locations = locations.to(torch.int64)
    mine = (locations > 0) & (owner(locations, size, block) == rank)
    target = torch.where(mine, local(locations, size, block), 0)
    # The others repeat a write that is done anyway: the first of the rank's, or, if it has none, row 0 onto itself.
    first = mine.to(torch.int32).argmax(0, keepdim=True)
    repeated = torch.where(mine[first, None], rows[first], pool[:1])
    values = torch.where(mine[:, None], rows, repeated)
    pool.index_copy_(0, torch.where(mine, target, target[first]), values)


def localize(selection: torch.Tensor, rank: int, size: int, block: int = 1) -> torch.Tensor:
    """Return where `rank` stores each selected virtual slot, -1 where it does not or none is selected.

    Positions are kept (contract 8.3, the form of the pull request).
    """
    owned = _owned(selection, rank, size, block)
    return torch.where(owned, local(selection, size, block), NONE)


def pack(selection: torch.Tensor, rank: int, size: int, block: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """([rows, columns] of `localize` without its holes, packed to the left in order, the tail -1; int32 [rows] of how
    many there are) (contract 8.3, the form of 0.5.23)."""
    owned = _owned(selection, rank, size, block)
    rows, columns = selection.shape
    # What is not owned goes to a column too many, which is cut off.
    target = torch.where(owned, owned.cumsum(1) - 1, columns)
    packed = torch.full((rows, columns + 1), NONE, dtype=selection.dtype, device=selection.device)
    packed.scatter_(1, target, local(selection, size, block))
    return packed[:, :columns], owned.sum(1, dtype=torch.int32)


def selected_slots(req_to_token: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[requests, columns]: the slot of each of the `positions` of each request, -1 where that is -1 (contract 8.3)."""
    rows = req_to_token.index_select(0, requests)
    return torch.where(positions < 0, NONE, rows.gather(1, positions.clamp(min=0).to(torch.int64)))


def shard_page_table(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    pages: int,
    page_size: int,
    rank: int,
    size: int,
    block: int = 1,
) -> torch.Tensor:
    """[requests, pages]: the physical page of each page of `rank`'s share of a request (contract 8.4). Columns from
    ceil(local length / page_size) on are arbitrary."""
    first = torch.arange(pages, device=requests.device) * page_size
    position = virtual(first, rank, size, block).clamp(max=req_to_token.shape[1] - 1)
    slots = req_to_token[requests.to(torch.int64)[:, None], position]
    return local(slots, size, block).floor_divide(page_size)


def merge(partial_out: torch.Tensor, partial_lse: torch.Tensor, log_base: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(float64 [rows, heads, dim], float64 [rows, heads]): the attention over all ranks, from what each rank has of it
    (contract 8.7).

    `partial_out` [D, rows, heads, dim] must be finite. `partial_lse` [D, rows, heads] is to base 2 or e as `log_base`
    says, and so is the result; NaN and +inf count as -inf.
    """
    lse = partial_lse.to(torch.float64)
    lse = torch.where(torch.isfinite(lse), lse, -torch.inf)
    top = lse.amax(0)
    top = torch.where(torch.isinf(top), 0, top)
    power, logarithm = (torch.exp2, torch.log2) if log_base == "2" else (torch.exp, torch.log)
    weight = power(lse - top)
    total = weight.sum(0)
    out = (weight[..., None] * partial_out.to(torch.float64)).sum(0) / total.clamp(min=1)[..., None]
    return out, logarithm(total) + top


def _owned(selection: torch.Tensor, rank: int, size: int, block: int) -> torch.Tensor:
    return (selection >= 0) & (owner(selection, size, block) == rank)


class DcpOracle:
    """Contract 8 for one decode step: every rank's share, and the merge of what they computed, all in the graph."""

    name = "oracle"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        """Keeps the buffers of `Layout.for_oracle()`; the pools start empty and are never cleared again."""
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        for rank in range(geometry.dcp_size):
            if f"rank{rank}_kv_pool" in buffers:  # a pool that is not compared does not exist
                buffers[f"rank{rank}_kv_pool"].zero_()

    def before_replay(self) -> None:
        """Do nothing: everything is in the graph."""

    def in_graph(self) -> None:
        for rank in range(self._geometry.dcp_size):
            self._share(rank)
        inputs, buffers = self._inputs, self._buffers
        slots = selected_slots(inputs.req_to_token, inputs.req_pool_indices, inputs.selected_positions)
        buffers["selected_slots"].copy_(slots)
        out, lse = merge(inputs.partial_out, inputs.partial_lse, self._geometry.log_base)
        buffers["merged_out"].copy_(out.flatten(1))
        buffers["merged_lse"].copy_(lse)

    def _share(self, rank: int) -> None:
        geometry, inputs = self._geometry, self._inputs
        place = (rank, geometry.dcp_size, geometry.dcp_block)
        out = {name: self._buffers[f"rank{rank}_{name}"] for name in SHARE if f"rank{rank}_{name}" in self._buffers}
        if "kv_pool" in out:
            write_shard(out["kv_pool"], inputs.out_cache_loc, inputs.kv_rows, *place)
        out["localized"].copy_(localize(inputs.selection, *place))
        packed, counts = pack(inputs.selection, *place)
        out["packed"].copy_(packed)
        out["packed_counts"].copy_(counts)
        out["local_lengths"].copy_(local_lengths(inputs.seq_lens, *place))
        table = out["page_table"]
        request = inputs.req_pool_indices
        table.copy_(shard_page_table(inputs.req_to_token, request, table.shape[1], geometry.page_size, *place))


# The fields of one rank, by the names that follow `rank{r}_`.
SHARE = ("kv_pool", "localized", "packed", "packed_counts", "local_lengths", "page_table")
