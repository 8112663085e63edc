"""The optimised schedule builder: any variant without indices, in one launch, in place (contract 3)."""

from __future__ import annotations

from typing import Final

import torch
import triton

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.schedule_variants import (
    Indices,
    Placement,
    Unit,
    shape,
    sms_per_slot,
    units_per_request,
    variant_named,
)
from dsa_verify.subjects.pipelines.schedule_kernel import schedule_kernel

MAX_ROWS: Final = 131_072
_LANES: Final = 1024
_INTERPRETED_CUTS: Final = 256


def build_schedule(
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    variant: str = "V4b",
    next_n: int | None = None,
    pool: int = 1,
) -> None:
    """Writes the schedule of `context_lens` into `out`: int32 [S + 1, 2], contiguous, which says S too. Where the
    variant takes SMs in pairs, S is the number of pairs.

    `context_lens`: int32 or int64 [rows] or [rows, next_n], of any strides; the last column counts. `next_n` need only
    be given for [rows] of more than one token each. `pool` > 1 schedules max(length // pool, 1) instead. Allocates
    nothing, may be captured, and never recompiles because lengths change. UsageError if the variant takes no such
    call or needs indices, which are not supported.
    """
    facts = variant_named(variant)
    rows = context_lens.shape[0]
    columns = context_lens.shape[1] if context_lens.dim() == 2 else next_n or 1
    if facts.indices is Indices.MANDATORY:
        raise UsageError(f"variant: {variant} needs indices, which build_schedule does not take; use another variant")
    if next_n not in (None, columns):
        raise UsageError(f"next_n: {next_n} is not the {columns} columns of context_lens; leave it out")
    if out.dim() != 2 or tuple(out.shape) != shape(out.shape[0] - 1) or not out.is_contiguous():
        raise UsageError(f"out: shape {tuple(out.shape)} is not a contiguous [S + 1, 2]; allocate it so")
    if out.dtype != torch.int32 or context_lens.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"out {out.dtype}, context_lens {context_lens.dtype}: int32, and int32 or int64 are needed")
    if rows > MAX_ROWS:
        raise UsageError(f"context_lens: {rows} rows are more than {MAX_ROWS}; build in parts")
    if pool < 1:
        raise UsageError(f"pool: {pool} is below 1; 1 means that lengths are not pooled")
    slots = out.shape[0] - 1
    dims_shape = (rows, columns) if 2 in facts.context_dims and columns > 1 else tuple(context_lens.shape)
    facts.validate(dims_shape, slots * sms_per_slot(facts, columns), indexed=False)

    # The interpreter pays by the operation, not by the element: there few programs do all rows.
    cuts = 1 if out.is_cuda else min(_INTERPRETED_CUTS, triton.next_power_of_2(slots + 1))
    schedule_kernel[(triton.cdiv(slots + 1, cuts),)](
        context_lens,
        out,
        rows,
        context_lens.stride(0),
        context_lens.stride(1) * (columns - 1) if context_lens.dim() == 2 else 0,
        units_per_request(facts, columns),
        slots,
        SPLIT=facts.split,
        TAIL=facts.placement is Placement.TAIL,
        RUNS=facts.unit is Unit.TOKEN_RUN,
        POOL=pool,
        LANES=min(_LANES, max(32, triton.next_power_of_2(rows))),
        CUTS=cuts,
    )
