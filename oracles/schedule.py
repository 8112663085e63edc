"""The rows of a paged-MQA schedule in eager PyTorch, for every variant (contract 3.2).

The rows come forward from the cuts: place S + 1 cuts in the total work, find the request that holds each, and name
the tile inside it.
"""

from __future__ import annotations

import dataclasses

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.schedule_variants import (
    Placement,
    ScheduleVariant,
    Unit,
    shape,
    sms_per_slot,
    units_per_request,
)

UINT32_MAX = (1 << 32) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """The work of each request, or of each token where indices are given (0 where it starts no unit): int64 [rows].

    `segments`: kv splits of a unit. `cost`: of one tile. `units`: units that a request takes up in order, one after
    the other; `step`: how far the first column advances by a request.
    """

    segments: torch.Tensor
    cost: torch.Tensor
    units: int
    step: int


def schedule(
    variant: ScheduleVariant,
    context_lens: torch.Tensor,
    multiprocessors: int,
    out: torch.Tensor,
    *,
    indices: torch.Tensor | None = None,
) -> None:
    """Writes the schedule for int32 `context_lens` [rows] or [rows, next_n] into int32 `out` [S + 1, 2], in place; for
    the S // 2 pairs of SMs, where the variant takes them in pairs.

    Of a row's columns the last one counts. `indices`: int32 [rows], equal and adjacent for tokens of one request; then
    a row is a token. May be captured in a CUDA graph. UsageError if the variant takes no such call. The shipped
    kernels compute in uint32, so the total must stay below 2**32; here only V6's fallback on overflow is imitated.

    Without any tile all rows are the sentinel. TAIL on architecture 90 without indices has no defined result then: the
    shipped kernel reads past its memory, and faults if rows are a multiple of 32 (contract 3.6).
    """
    variant.validate(context_lens.shape, multiprocessors, indexed=indices is not None)
    next_n = context_lens.shape[1] if context_lens.dim() == 2 else 1
    slots = multiprocessors // sms_per_slot(variant, next_n)
    if out.dtype != torch.int32 or tuple(out.shape) != shape(slots):
        raise UsageError(f"out: {out.dtype} {tuple(out.shape)} is not torch.int32 {shape(slots)}; allocate it so")
    lens = context_lens.reshape(-1, next_n)[:, -1].to(torch.int64)
    rows = lens.shape[0]
    work = _regular(variant, lens, next_n) if indices is None else _indexed(variant, lens, indices)

    weight = work.segments * work.units * work.cost
    prefix = torch.cumsum(weight, 0)
    cut = _cuts(variant.placement, prefix[-1:], slots)
    request = torch.searchsorted(prefix, cut, right=True)  # the first whose inclusive prefix is beyond the cut
    past = request >= rows
    request = request.clamp(max=rows - 1)
    offset = cut - (prefix - weight)[request]
    if variant.unit is Unit.TOKEN_RUN:
        unit = request * work.step
        split = offset // work.cost[request]
    else:
        segments = work.segments[request].clamp(min=1)
        unit = request * work.step + offset // segments
        split = offset % segments
    out[:, 0].copy_(unit.masked_fill(past, rows * work.step))
    out[:, 1].copy_(split.masked_fill(past, 0))


def _cuts(placement: Placement, total: torch.Tensor, slots: int) -> torch.Tensor:
    """Return where each of `slots` starts in `total`, and where the last one ends: int64 [slots + 1]."""
    slot = torch.arange(slots + 1, dtype=torch.int64, device=total.device)
    each, left_over = total // slots, total % slots
    if placement is Placement.LEAD:
        return slot * each + torch.minimum(slot, left_over)
    return slot * each + torch.clamp(slot - (slots - left_over), min=0)


def _segments(lens: torch.Tensor, split: int) -> torch.Tensor:
    return (lens + (split - 1)) // split


def _regular(variant: ScheduleVariant, lens: torch.Tensor, next_n: int) -> _Work:
    step = units_per_request(variant, next_n)
    is_run = variant.unit is Unit.TOKEN_RUN
    segments = _segments(lens, variant.split)
    cost = torch.full_like(segments, next_n if is_run else 1)
    return _Work(segments, cost, units=1 if is_run else step, step=step)


def _indexed(variant: ScheduleVariant, lens: torch.Tensor, indices: torch.Tensor) -> _Work:
    """A row is a token; a unit begins where a run of equal indices does, atoms at every second token of it too."""
    rows = lens.shape[0]
    token = torch.arange(rows, dtype=torch.int64, device=lens.device)
    first = torch.ones(rows, dtype=torch.bool, device=lens.device)
    torch.ne(indices[1:], indices[:-1], out=first[1:])
    run_start = torch.cummax(token * first, 0).values
    if variant.unit is Unit.ATOM:
        first = (token - run_start) % 2 == 0
    # The start of the next unit, seen from the end: the smallest start beyond this token.
    start_or_end = torch.full((rows + 1,), rows, dtype=torch.int64, device=lens.device)
    start_or_end[:-1].copy_(token.masked_fill(~first, rows))
    unit_end = torch.cummin(start_or_end.flip(0), 0).values.flip(0)[1:]
    segments = _segments(lens[unit_end - 1], variant.split) * first
    if variant.unit is Unit.ATOM:
        return _Work(segments, torch.ones_like(segments), units=1, step=1)
    tokens = unit_end - token
    return _Work(segments, _run_cost(variant, segments, tokens), units=1, step=1)


def _run_cost(variant: ScheduleVariant, segments: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    block = variant.cost_block
    if not block:
        return tokens
    cost = 2 * block * ((tokens + block - 1) // block) + tokens
    return torch.where((segments * cost).sum() > UINT32_MAX, tokens, cost)
