"""The top-k v2 plan in eager PyTorch, in one canonical form (contract 5).

A device lists its rows in any order and leaves the rest of the buffer alone; the canonical form lists them ascending
and fills the rest with `UNUSED`. `is_written` says whether there is a plan to compare at all.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from dsa_verify.contract.topk_plan import PlanRules, is_written

__all__ = ["UNUSED", "PlanTable", "is_written", "plan"]

UNUSED: Final = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanTable:
    """The constants of plans over a fixed number of rows, made outside capture.

    `thresholds`: int32 [T], descending. `caps`: int64 [T]. `row_ids`: int32 [rows].
    """

    rules: PlanRules
    thresholds: torch.Tensor
    caps: torch.Tensor
    row_ids: torch.Tensor

    @classmethod
    def make(cls, rules: PlanRules, rows: int, device: torch.device) -> PlanTable:
        pairs = sorted(rules.thresholds, reverse=True)
        return cls(
            rules=rules,
            thresholds=torch.tensor([threshold for threshold, _ in pairs], dtype=torch.int32, device=device),
            caps=torch.tensor([cap for _, cap in pairs], dtype=torch.int64, device=device),
            row_ids=torch.arange(rows, dtype=torch.int32, device=device),
        )


def plan(lengths: torch.Tensor, table: PlanTable, out: torch.Tensor) -> None:
    """int32 [rows + 1, 2] `out` = (threshold, items), then (row, length) of each row above the threshold.

    `lengths`: int32 [rows], none negative. May be captured. Where no plan is written `out` is left as it is.
    """
    if not is_written(lengths.numel(), table.rules.max_clusters):
        return
    threshold = _threshold(lengths, table)
    listed = lengths > threshold
    ordinals = torch.cumsum(listed, 0)
    out.fill_(UNUSED)
    # Rows that are not listed all land in row 0, where the header then replaces them.
    places = (ordinals * listed).unsqueeze(1).expand(-1, 2)
    out.scatter_(0, places, torch.stack((table.row_ids, lengths), 1))
    out[0, :1].copy_(threshold)
    out[0, 1:].copy_(ordinals[-1:])


def _threshold(lengths: torch.Tensor, table: PlanTable) -> torch.Tensor:
    """int32 [1]: the last T accepted from the largest downwards, or the largest if none is; never below the floor."""
    rules = table.rules
    if rules.static_threshold >= 0:
        return torch.full_like(table.thresholds[:1], max(rules.static_threshold, rules.floor))
    longer = (lengths > table.thresholds.unsqueeze(1)).sum(1)
    accepted = torch.cumprod(longer <= table.caps, 0).sum(0, keepdim=True)
    return table.thresholds.index_select(0, (accepted - 1).clamp_(min=0)).clamp_(min=rules.floor)
