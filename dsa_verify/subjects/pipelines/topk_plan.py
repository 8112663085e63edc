"""The top-k v2 plan as optimised: one launch straight into the captured buffer (contract 5)."""

from __future__ import annotations

from typing import Final

import torch
import triton

from dsa_verify.contract.topk_plan import MAX_PLAN_ROWS, PlanRules
from dsa_verify.subjects.pipelines.topk_plan_kernel import topk_plan_kernel

# What fills the table up to a power of two: below every length and within its cap, so that the walk passes it.
UNUSED: Final = (-1, MAX_PLAN_ROWS)


class TopkPlanBuilder:
    """Builds plans by the rules of one device; made outside capture, because it uploads its threshold table."""

    def __init__(self, rules: PlanRules, device: torch.device):
        self._rules = rules
        unused = triton.next_power_of_2(len(rules.thresholds)) - len(rules.thresholds)
        self._table = torch.tensor([*rules.thresholds, *unused * [UNUSED]], dtype=torch.int32, device=device)

    def update(self, lengths: torch.Tensor, out: torch.Tensor) -> None:
        """int32 [rows + 1, 2] `out`: the plan over int32 [rows] `lengths`, none of them negative.

        Rows beyond the listed ones are left as they are, and so is everything where no plan is written.
        """
        rules, rows = self._rules, lengths.shape[0]
        # Decided by the captured shape alone, so a branch of the host is safe in a capture.
        if rules.max_clusters == 0 or rows <= rules.max_clusters or rows > MAX_PLAN_ROWS:
            return
        topk_plan_kernel[(1,)](
            lengths,
            self._table,
            out,
            rows,
            lengths.stride(0),
            rules.floor,
            rules.static_threshold,
            ROW_LANES=triton.next_power_of_2(rows),
            CANDIDATES=self._table.shape[0],
        )
