"""K-pool metadata as SGLang refreshes it after the fused kernel: pooled views, then the write plan (contract 4.1, 4.2).

The write plan is SGLang's Triton kernel; the views are the few torch operations that its backend has in place of one.
"""

from __future__ import annotations

from typing import Final

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.adapters.sglang import wheel
from dsa_verify.subjects.adapters.sglang.indexer import Indexer
from dsa_verify.systems.indexer import WRITE_PLAN

MODULE: Final = "sglang.srt.layers.attention.dsa.kpool_fp8_index"


class KPool:
    """The pooled fields of one captured record."""

    def __init__(self, geometry: Geometry, inputs: Inputs, buffers: Buffers, indexer: Indexer):
        self._geometry, self._inputs, self._buffers, self._indexer = geometry, inputs, buffers, indexer
        self._mode = buffers.layout.system
        device = inputs.seq_lens.device
        self._pool_table = wheel.attribute(MODULE, "build_pooled_page_table_64", device)
        self._update_write_plan = wheel.attribute(MODULE, "update_kpool_write_plan_cuda_graph", device)

    def refresh(self, lengths: torch.Tensor | None = None) -> None:
        """Everything, from this round's page table, and the raw lengths or those of a record (contract 2.4)."""
        self.refresh_views()
        self.refresh_write_plan(self._inputs.seq_lens if lengths is None else lengths)

    def refresh_views(self) -> None:
        """Contract 4.1. Draft-extend has none: the consumer derives them inside the graph."""
        pool, out = self._geometry.pool_size, self._buffers
        if self._mode == "target_verify":
            torch.floor_divide(out["real_page_table"][:, ::pool], pool, out=out["pooled_real_page_table"])
        elif self._mode == "decode":
            lengths = out["pooled_cache_seqlens_int32"]
            lengths.copy_(torch.div(out["cache_seqlens_int32"], pool, rounding_mode="floor").to(torch.int32))
            out["pooled_real_page_table"].copy_(self._pool_table(out["real_page_table"], pool).contiguous())
            self._indexer.schedule("pooled_paged_mqa_schedule_metadata", lengths.clamp(min=1))
            self._indexer.plan("pooled_topk_v2_plan", lengths, in_place=True)

    def refresh_write_plan(self, lengths: torch.Tensor) -> None:
        """Contract 4.2."""
        geometry, inputs, out = self._geometry, self._inputs, self._buffers
        per_query = {name: out.get(WRITE_PLAN + name) for name in ("pool_seqlens_per_q", "seqlens_per_q")}
        self._update_write_plan(
            write_start=self._write_start(lengths),
            req_pool_indices=inputs.req_pool_indices,
            real_page_table=out["real_page_table"],
            req_out=out[WRITE_PLAN + "req"],
            write_start_out=out[WRITE_PLAN + "write_start"],
            tail_logical_start_out=out[WRITE_PLAN + "tail_logical_start"],
            write_loc_out=out[WRITE_PLAN + "write_loc"],
            pool_seqlens_per_q_out=per_query["pool_seqlens_per_q"],
            seqlens_per_q_out=per_query["seqlens_per_q"],
            kpool=geometry.pool_size,
            num_draft_tokens=1 if self._mode == "decode" else geometry.draft_tokens,
            index_page_size=geometry.page_size,
        )
        if "accept_lens" in inputs.own:
            out[WRITE_PLAN + "effective_n_per_batch"].copy_(inputs.accept_lens.to(torch.int32))
        pooled = per_query["pool_seqlens_per_q"]
        if pooled is not None:
            self._indexer.schedule(WRITE_PLAN + "pool_schedule_metadata", pooled.clamp(min=1))
            self._indexer.plan(WRITE_PLAN + "pool_topk_v2_plan", pooled, in_place=True)

    def _write_start(self, lengths: torch.Tensor) -> torch.Tensor:
        """Decode and draft-extend compute it; verify hands the lengths on as they are."""
        if self._mode == "target_verify":
            return lengths
        return lengths.to(torch.int32) - (1 if self._mode == "decode" else self._geometry.draft_tokens)
