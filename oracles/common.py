"""Decode, target-verify and draft-extend have this in common: the constants, the tables and two formulas.

Every function but `write_constants` may be captured in a CUDA graph: shapes are fixed, nothing synchronises, nothing
is copied from the host, and each writes into a tensor that exists. The buffers are those of `Layout.for_oracle()`:
tables hold one row per request.
"""

from __future__ import annotations

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs


def write_constants(buffers: Buffers) -> None:
    """`cu_seqlens_q` and `dsa_cu_seqlens_q`, the fields that are written at capture only (contract 1.1 to 1.3)."""
    for name in ("cu_seqlens_q", "dsa_cu_seqlens_q"):
        torch.arange(buffers[name].numel(), out=buffers[name])


def write_prefix_sum(lengths: torch.Tensor, out: torch.Tensor) -> None:
    """int32 [n + 1] `out` = [0, cumsum of int32 [n] `lengths`], wrapping at 2**31 (contract 1.1, 1.7)."""
    out[:1].zero_()
    # Summed wide and cut to int32: overflow of a signed sum is left to the compiler, the cut is not.
    out[1:].copy_(torch.cumsum(lengths, 0, dtype=torch.int64))


def row_owners(row_ends: torch.Tensor, ordinals: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: the request of each token row, from the ends of the requests' rows, int64 [requests], and the rows
    counted from 1, int64 [rows].

    Row r is owned by the first request whose rows end at or after it, so a request without rows owns none. Rows beyond
    all ends go to the last request.
    """
    return torch.searchsorted(row_ends, ordinals).clamp_(max=len(row_ends) - 1)


def write_dsa_lengths(lengths: torch.Tensor, geometry: Geometry, out: torch.Tensor) -> None:
    """int32 [n] `out` = dsa_len of int32 [n] `lengths`, none of them negative (contract 0.4)."""
    if geometry.pool_size == 1:
        torch.clamp(lengths, max=geometry.topk, out=out)
        return
    unpooled = torch.remainder(lengths, geometry.pool_size)
    torch.add(torch.clamp(lengths - unpooled, max=geometry.topk), unpooled, out=out)


def write_tables(geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
    """`page_table_1` and `real_page_table`, whichever own memory, over their full width (contract 1.1)."""
    slots = inputs.req_to_token[:, : geometry.columns]
    pages = buffers["real_page_table"]
    if geometry.wide_table:
        wide = buffers["page_table_1"]
        torch.index_select(slots, 0, inputs.req_pool_indices, out=wide)
        if buffers.layout["real_page_table"].alias is None:
            torch.floor_divide(wide[:, :: geometry.page_size], geometry.page_size, out=pages)
    else:
        torch.index_select(slots[:, :: geometry.page_size], 0, inputs.req_pool_indices, out=pages)
        pages.floor_divide_(geometry.page_size)
