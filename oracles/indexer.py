"""IndexerOracle: the indexer's own metadata of any basic system, from the raw inputs (contract 3 to 5)."""

from __future__ import annotations

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.schedule_variants import VARIANTS
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.contract.topk_plan import PLAN_RULES
from dsa_verify.systems.indexer import PLANNED_LENGTHS, SCHEDULED_LENGTHS, WRITE_PLAN
from oracles.kpool import WritePlan, write_pooled_lengths, write_pooled_table
from oracles.schedule import schedule
from oracles.topk_plan import PlanTable, plan


class IndexerOracle:
    """Fills the indexer's fields of `buffers`, whose lengths the oracle of the system has written before."""

    def __init__(self, geometry: Geometry, inputs: Inputs, buffers: Buffers):
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        self._variant = VARIANTS[geometry.schedule]
        device = inputs.seq_lens.device
        self._tables = {
            name: PlanTable.make(PLAN_RULES[geometry.plan_rules], len(buffers[name]) - 1, device)
            for name in PLANNED_LENGTHS
            if name in buffers
        }
        self._write_plan: WritePlan | None = None
        if geometry.pool_size > 1:
            mode = buffers.layout.system
            self._write_plan = WritePlan(mode, geometry, inputs, inputs.own.get("accept_lens"))  # type: ignore[arg-type]

    def in_graph(self) -> None:
        """Pools first, as schedules and plans are made over their lengths."""
        buffers = self._buffers
        if "pooled_cache_seqlens_int32" in buffers:
            write_pooled_lengths(self._geometry, self._inputs, buffers["pooled_cache_seqlens_int32"])
        if "pooled_real_page_table" in buffers:
            write_pooled_table(self._geometry, self._inputs, buffers["pooled_real_page_table"])
        if self._write_plan is not None:
            self._write_plan.write({name.removeprefix(WRITE_PLAN): tensor for name, tensor in buffers.items()})
        for name, (lengths, clamped) in SCHEDULED_LENGTHS.items():
            if name in buffers:
                self._schedule(buffers[lengths], clamped, buffers[name])
        for name, lengths in PLANNED_LENGTHS.items():
            if name in buffers:
                plan(buffers[lengths], self._tables[name], buffers[name])

    def _schedule(self, lengths: torch.Tensor, clamped: bool, out: torch.Tensor) -> None:
        lengths = lengths.clamp(min=1) if clamped else lengths
        if lengths.dim() not in self._variant.context_dims:
            lengths = lengths[:, -1] if lengths.dim() == 2 else lengths.unsqueeze(1)
        schedule(self._variant, lengths, self._geometry.multiprocessors, out)
