"""Inputs that follow from a round instead of being part of it, computed on the device: write locations, and the map
into the pool of the sliding window. Everything may be captured in a graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round_table import PAGE_ID_MULTIPLIER

Tensors = Mapping[str, torch.Tensor]

_MIX: Final = (0x9E3779B1, 0x85EBCA6B, 0x2C1B3C6D)
_MASK: Final = 0x7FFFFFFF


def slots_at(req_to_token: torch.Tensor, drawn: Tensors, first: torch.Tensor, count: int) -> torch.Tensor:
    """R[req, first + i] for i < count; 0 where that is before position 0."""
    position = first[:, None] + torch.arange(count, device=first.device)
    found = req_to_token[drawn["req_pool_indices"].long()[:, None], position.clamp(0, req_to_token.shape[1] - 1)]
    return torch.where(position >= 0, found, 0).reshape(-1).long()


def full_to_swa(geometry: Geometry, device: torch.device) -> torch.Tensor:
    """Return where each slot lies in the smaller pool of the sliding window; the last entry stands for none."""
    page = geometry.allocator_page
    pages = torch.arange(geometry.slots // page, device=device)
    # Any map of pages will do that keeps offsets; pages of different requests may share one. The pad slot's page is
    # not page 0, so that a slot which was not translated shows.
    swa = ((pages + 1) * PAGE_ID_MULTIPLIER >> 3) % max(len(pages) // 2, 1)
    slots = (swa[:, None] * page + torch.arange(page, device=device)).flatten()
    return torch.cat([slots, torch.full_like(slots[:1], -1)]).int()


def hashed(shape: tuple[int, ...], seed: torch.Tensor, stream: int) -> torch.Tensor:
    """Return int64 in [0, 2**31) of each element, by its place, `seed` (int64 [1]) and `stream`."""
    return mixed(torch.arange(math.prod(shape), device=seed.device), seed, stream).reshape(shape)


def mixed(element: torch.Tensor, seed: torch.Tensor, stream: int) -> torch.Tensor:
    """Return the hash of each `element`, int64, likewise."""
    found = (element * _MIX[0] + seed * _MIX[1] + stream * _MIX[2]) & _MASK
    found = ((found ^ (found >> 15)) * _MIX[2]) & _MASK
    found = ((found ^ (found >> 12)) * _MIX[1]) & _MASK
    return found ^ (found >> 16)
