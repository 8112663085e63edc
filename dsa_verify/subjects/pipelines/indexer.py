"""The indexer's own metadata as optimised (contract 3 to 5), in the pieces that subjects arrange in time.

Everything is written in place and may be captured or called before a replay. `refresh` needs the lengths and the
page table of the system to be this round's; `schedules_from_raw` needs nothing but the raw lengths.
"""

from __future__ import annotations

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.schedule_variants import VARIANTS
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.contract.topk_plan import PLAN_RULES
from dsa_verify.subjects.pipelines.kpool import update_pooled_views, update_write_plan
from dsa_verify.subjects.pipelines.schedule import build_schedule
from dsa_verify.subjects.pipelines.topk_plan import TopkPlanBuilder
from dsa_verify.systems.indexer import PLANNED_LENGTHS, SCHEDULED_LENGTHS, WRITE_PLAN


class IndexerMetadata:
    """The indexer's fields of `buffers`, as far as the layout has them."""

    def __init__(self, geometry: Geometry, inputs: Inputs, buffers: Buffers):
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        self._plan_builder = TopkPlanBuilder(PLAN_RULES[geometry.plan_rules], inputs.seq_lens.device)
        # Made at the first eager call and kept: nothing is copied from the host while a graph is captured.
        self._offsets: torch.Tensor | None = None

    @property
    def schedule_names(self) -> tuple[str, ...]:
        return tuple(name for name in SCHEDULED_LENGTHS if name in self._buffers)

    def refresh(self, *, schedules: bool = True) -> None:
        """Pools first, as schedules and plans are made over their lengths."""
        geometry, inputs, buffers = self._geometry, self._inputs, self._buffers
        mode, table = buffers.layout.system, buffers["real_page_table"]
        if "pooled_real_page_table" in buffers:
            update_pooled_views(mode, geometry, inputs, table, buffers)  # type: ignore[arg-type]
        if geometry.pool_size > 1:
            plan = {name.removeprefix(WRITE_PLAN): tensor for name, tensor in buffers.items()}
            update_write_plan(mode, geometry, inputs, table, plan, inputs.own.get("accept_lens"))  # type: ignore[arg-type]
        if schedules:
            for name in self.schedule_names:
                self.refresh_schedule(name, buffers[name])
        for name, lengths in PLANNED_LENGTHS.items():
            if name in buffers:
                self._plan_builder.update(buffers[lengths], buffers[name])

    def refresh_schedule(self, name: str, out: torch.Tensor) -> None:
        """The schedule that field `name` must hold, from the captured lengths, into `out`."""
        lengths, clamped = SCHEDULED_LENGTHS[name]
        self._build(self._buffers[lengths], out, clamped)

    def _build(self, lengths: torch.Tensor, out: torch.Tensor, clamped: bool) -> None:
        """The schedule over `lengths`, at least 1 each if `clamped`."""
        variant = VARIANTS[self._geometry.schedule]
        if clamped:
            lengths = lengths.clamp(min=1)
        if lengths.dim() not in variant.context_dims:
            lengths = lengths[:, -1] if lengths.dim() == 2 else lengths.unsqueeze(1)
        build_schedule(lengths, out, variant=variant.name)

    def schedules_from_raw(self) -> None:
        """The residual option of target-verify: eagerly, from the raw lengths, because the captured ones are still
        the previous replay's (contract 3.7)."""
        buffers, n = self._buffers, self._geometry.draft_tokens
        if self._offsets is None:
            self._offsets = torch.arange(1, n + 1, dtype=torch.int32, device=self._inputs.seq_lens.device)
        expanded = (self._inputs.seq_lens.to(torch.int32)[:, None] + self._offsets).reshape(-1, 1)
        full = expanded
        if buffers.layout["paged_mqa_ctx_lens_2d"].alias is None:
            full = (self._inputs.seq_lens.to(torch.int32) + n)[:, None].expand(-1, n).contiguous()
        self._build(full, buffers["paged_mqa_schedule_metadata"], clamped=False)
        pooled = WRITE_PLAN + "pool_schedule_metadata"
        if pooled in buffers:
            pools = torch.div(expanded, self._geometry.pool_size, rounding_mode="floor")
            self._build(pools, buffers[pooled], clamped=True)
