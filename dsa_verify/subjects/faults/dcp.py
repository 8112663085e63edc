"""Faults of decode context parallelism: in the sharded write and in the merge (contract 8.2, 8.7)."""

from __future__ import annotations

import math

import torch

from dsa_verify.contract.finding import Diagnosis as D
from dsa_verify.subjects.faults.fault import DCP, fault
from dsa_verify.subjects.faults.outputs import SMUGGLED
from dsa_verify.subjects.faults.wrapper import Wrapper


@fault(
    "writes_slot_0",
    "pad rows are stored at the reserved slot",
    D.STALE,
    D.FROZEN,
    D.WRONG_VALUE,
    field="rank0_kv_pool",
    systems=DCP,
)
class WritesSlotZero(Wrapper):
    """Pad rows are stored like any other, at the reserved slot. What they hold is 0 in this harness, as that slot is,
    so something else stands for it."""

    def in_graph(self) -> None:
        self.inner.in_graph()
        self.target[:1].masked_fill_((self.inputs.out_cache_loc == 0).any(), SMUGGLED)


@fault(
    "wrong_owner",
    "a rank stores the rows of other ranks, too",
    D.WRONG_OWNER,
    D.STALE,
    D.FROZEN,
    D.WRONG_VALUE,
    field="rank0_kv_pool",
    systems=DCP,
)
class WrongOwner(Wrapper):
    """The rank stores every row at its local place, those of other ranks included."""

    def in_graph(self) -> None:
        self.inner.in_graph()
        inputs, size = self.inputs, self.geometry.dcp_size
        row = inputs.out_cache_loc // (size * self.geometry.dcp_block)
        self.target.index_copy_(0, row.clamp(max=len(self.target) - 1), inputs.kv_rows)


@fault("wrong_log_base", "the merged log-sum-exp is in the other base", D.WRONG_VALUE, field="merged_lse", systems=DCP)
class WrongLogBase(Wrapper):
    """The log-sum-exp is handed on in the other base."""

    def in_graph(self) -> None:
        self.inner.in_graph()
        self.target.mul_(math.log(2.0) if self.geometry.log_base == "2" else 1.0 / math.log(2.0))


@fault(
    "no_empty_rule", "a row that no rank owns anything of becomes NaN", D.WRONG_VALUE, field="merged_out", systems=DCP
)
class NoEmptyRule(Wrapper):
    """A row that no rank owns anything of becomes 0 / 0."""

    def in_graph(self) -> None:
        self.inner.in_graph()
        empty = torch.isneginf(self.outputs()["merged_lse"]).repeat_interleave(self.geometry.head_dim, dim=1)
        self.target.masked_fill_(empty, math.nan)
