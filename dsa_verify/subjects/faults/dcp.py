"""Faults of decode context parallelism: in the sharded write and in the merge (contract 8.2, 8.7)."""

from __future__ import annotations

import math

import torch

from dsa_verify.contract.finding import Diagnosis as D
from dsa_verify.subjects.faults.fault import DCP, spoils
from dsa_verify.subjects.faults.outputs import SMUGGLED
from dsa_verify.subjects.faults.wrapper import Wrapper


@spoils(
    "writes_slot_0",
    "pad rows are stored at the reserved slot",
    D.STALE,
    D.FROZEN,
    D.WRONG_VALUE,
    field="rank0_kv_pool",
    systems=DCP,
)
def writes_slot_zero(wrapped: Wrapper) -> None:
    """Pad rows are stored like any other, at the reserved slot. What they hold is 0 in this harness, as that slot is,
    so something else stands for it."""
    wrapped.target[:1].masked_fill_((wrapped.inputs.out_cache_loc == 0).any(), SMUGGLED)


@spoils(
    "wrong_owner",
    "a rank stores the rows of other ranks, too",
    D.WRONG_OWNER,
    D.STALE,
    D.FROZEN,
    D.WRONG_VALUE,
    field="rank0_kv_pool",
    systems=DCP,
)
def wrong_owner(wrapped: Wrapper) -> None:
    """The rank stores every row at its local place, those of other ranks included."""
    inputs, size = wrapped.inputs, wrapped.geometry.dcp_size
    row = inputs.out_cache_loc // (size * wrapped.geometry.dcp_block)
    wrapped.target.index_copy_(0, row.clamp(max=len(wrapped.target) - 1), inputs.kv_rows)


@spoils("wrong_log_base", "the merged log-sum-exp is in the other base", D.WRONG_VALUE, field="merged_lse", systems=DCP)
def wrong_log_base(wrapped: Wrapper) -> None:
    """The log-sum-exp is handed on in the other base."""
    wrapped.target.mul_(math.log(2.0) if wrapped.geometry.log_base == "2" else 1.0 / math.log(2.0))


@spoils(
    "no_empty_rule", "a row that no rank owns anything of becomes NaN", D.WRONG_VALUE, field="merged_out", systems=DCP
)
def no_empty_rule(wrapped: Wrapper) -> None:
    """A row that no rank owns anything of becomes 0 / 0."""
    empty = torch.isneginf(wrapped.outputs()["merged_lse"]).repeat_interleave(wrapped.geometry.head_dim, dim=1)
    wrapped.target.masked_fill_(empty, math.nan)
