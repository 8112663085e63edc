"""Inputs of decode context parallelism that follow from a round instead of being part of it, computed on the device:
write locations, selections and the partial attention results of other ranks (contract 8).

What is random here is a hash of the round's seed and the element, so that a case needs to store no more than the seed.
Everything may be captured in a graph. Rows of pad requests are made too; the filler overwrites them with their pad
values.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from dsa_verify.buffers.derived_inputs import Tensors, hashed, mixed, slots_at
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.static_inputs import KV_WORDS

# One in so many partial results of a rank is special: NaN, +inf, or owning nothing (contract 8.7).
_SPECIAL_ONE_IN: Final = 16
_EMPTY_ONE_IN: Final = 5


def dcp_inputs(geometry: Geometry, drawn: Tensors, req_to_token: torch.Tensor, seed: torch.Tensor) -> Tensors:
    lengths, requests = drawn["seq_lens"].long(), drawn["req_pool_indices"].long()
    batch, topk = lengths.shape[0], geometry.topk
    # Any position of the request, in any order; the second half of a row has holes.
    drawn_at = hashed((batch, topk), seed, 1)
    position = drawn_at % lengths.clamp(min=1)[:, None]
    chosen = req_to_token[requests[:, None], position]
    column = torch.arange(topk, device=lengths.device)
    empty = (lengths[:, None] == 0) | ((column >= topk // 2) & (drawn_at % 3 == 0))
    lse, special = _partial_lse(geometry, batch, seed)
    slots = slots_at(req_to_token, drawn, lengths - 1, 1)
    word = torch.arange(KV_WORDS, device=lengths.device)
    out = _unit_floats((geometry.dcp_size, batch, geometry.heads, geometry.head_dim), seed, 2)
    return {
        "out_cache_loc": slots,
        # Of the slot, not of the row: two batch rows may be one request, and what they write is then the same.
        "kv_rows": mixed(slots[:, None] * KV_WORDS + word, seed, 3).int(),
        "selected_positions": torch.where(empty, -1, position),
        "selection": torch.where(empty, -1, chosen),
        # A rank without weight must hand over finite values, by contract zeros (8.7).
        "partial_out": torch.where(special[..., None], 0.0, out),
        "partial_lse": lse,
    }


def _partial_lse(geometry: Geometry, batch: int, seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 [D, batch, heads], and where a rank's weight is zero."""
    shape = (geometry.dcp_size, batch, geometry.heads)
    values = _unit_floats(shape, seed, 4) * 20.0
    kind = hashed(shape, seed, 5)
    values = torch.where(kind % _EMPTY_ONE_IN == 0, -math.inf, values)
    values = torch.where(kind % _SPECIAL_ONE_IN == 1, math.nan, values)
    values = torch.where(kind % _SPECIAL_ONE_IN == 2, math.inf, values)
    # Some rows belong to no rank at all.
    nobody = hashed(shape[1:], seed, 6) % _SPECIAL_ONE_IN == 0
    values = torch.where(nobody, -math.inf, values)
    return values, ~torch.isfinite(values)


def _unit_floats(shape: tuple[int, ...], seed: torch.Tensor, captured: int) -> torch.Tensor:
    """Return float32 in [-1, 1), multiples of 2**-22, so that both sides and any device agree on the bits."""
    return ((hashed(shape, seed, captured) & 0x7FFFFF) - (1 << 22)).float() * 2.0**-22
