"""SGLang's own decode, target-verify and draft-extend metadata, refreshed before each replay in the order that its
backend has: the fused kernel, the schedule, the top-k plan, the context lengths, the K-pool views and write plan
(contract 1.1 to 1.4, 3.4, 4, 5).

The kernels are SGLang's, imported from its published package. The few lines between them are restated here, so that the
kernels are judged by themselves, into guarded tensors and without a GPU too; `backend.py` has the backend as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.kpool import pooled_indexer
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.adapters.sglang import indexer, kpool, wheel
from dsa_verify.subjects.adapters.sglang.indexer import Indexer
from dsa_verify.subjects.adapters.sglang.kpool import KPool

KERNELS: Final = "sglang.kernels.ops.attention.dsa.metadata"
POOLED_KERNELS: Final = "sglang.kernels.ops.attention.dsa.kpool_metadata"


class _Fused:
    """The modes have this in common. `function`: of pool size 1; `pooled_module`, `function` + "_kpool": of others."""

    name = "sglang"
    function = ""
    pooled_module = ""

    @classmethod
    def provenance(cls) -> Mapping[str, str]:
        return wheel.provenance(KERNELS, f"{POOLED_KERNELS}.{cls.pooled_module}", kpool.MODULE)

    @staticmethod
    def not_covered(layout: Layout, device: torch.device) -> Mapping[str, str]:
        return indexer.not_covered(layout, device)

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        """UsageError as `wheel.require` and `Indexer` have it."""
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        device = inputs.seq_lens.device
        self._launch = self._kernel(geometry, device)
        for constant in ("cu_seqlens_q", "dsa_cu_seqlens_q"):
            buffers[constant].copy_(torch.arange(buffers[constant].numel(), dtype=torch.int32, device=device))
        self._indexer = Indexer(geometry, buffers, device)
        self._kpool = KPool(geometry, inputs, buffers, self._indexer) if pooled_indexer(geometry) else None
        self.ready_before_graph = tuple(buffers)

    def _kernel(self, geometry: Geometry, device: torch.device) -> Any:
        if geometry.pool_size == 1:
            return wheel.attribute(KERNELS, self.function, device)
        return wheel.attribute(f"{POOLED_KERNELS}.{self.pooled_module}", self.function + "_kpool", device)

    def before_replay(self) -> None:
        self._launch(**self._arguments())
        self._refresh_schedule()
        if self._kpool is not None:
            self._kpool.refresh()

    def in_graph(self) -> None:
        """Do nothing: this release refreshes all of its metadata before the graph replays (contract 1.4)."""

    def _arguments(self) -> dict[str, Any]:
        """The arguments that all three functions have. The tables are those of the layout, which an engine has wider
        by what it over-allocates; the width is theirs, as the backend takes it from them."""
        geometry, inputs, out = self._geometry, self._inputs, self._buffers
        arguments = {
            "seq_lens": inputs.seq_lens,
            "req_pool_indices": inputs.req_pool_indices,
            "req_to_token": inputs.req_to_token,
            "cache_seqlens": out["cache_seqlens_int32"],
            "cu_seqlens_k": out["cu_seqlens_k"],
            "page_table_1": out.get("page_table_1"),
            "dsa_cache_seqlens": out["dsa_cache_seqlens_int32"],
            "dsa_cu_seqlens_k": out["dsa_cu_seqlens_k"],
            "real_page_table": out["real_page_table"],
            "bs": inputs.seq_lens.shape[0],
            "dsa_index_topk": geometry.topk,
            "physical_page_size": geometry.page_size,
        }
        return arguments if geometry.pool_size == 1 else {**arguments, "index_kpool": geometry.pool_size}

    def _refresh_schedule(self) -> None:
        context_lens = self._context_lens()
        self._indexer.schedule("paged_mqa_schedule_metadata", context_lens)
        self._indexer.plan("topk_v2_plan", self._buffers["dsa_seqlens_expanded"], in_place=False)
        if context_lens is not self._buffers["paged_mqa_ctx_lens_2d"]:
            self._buffers["paged_mqa_ctx_lens_2d"].copy_(context_lens)

    def _context_lens(self) -> torch.Tensor:
        """int32 [rows, 1], what the schedule is built over (contract 3.3)."""
        return self._buffers["dsa_seqlens_expanded"].contiguous().view(-1, 1)


class Decode(_Fused):
    """Contract 1.1."""

    name = "sglang:decode"
    function = "fused_dsa_decode_metadata"
    pooled_module = "decode"

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "max_len": self._geometry.columns}


class TargetVerify(_Fused):
    """Contract 1.2."""

    name = "sglang:target_verify"
    function = "fused_dsa_target_verify_metadata"
    pooled_module = "verify"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        # On architecture 100 the kernel fills a buffer of [bs, N] itself (contract 1.2).
        self._own_context_lens = buffers.layout["paged_mqa_ctx_lens_2d"].alias is None

    def _arguments(self) -> dict[str, Any]:
        return {
            **super()._arguments(),
            "seqlens_expanded": self._buffers["dsa_seqlens_expanded"],
            "max_seqlen_k": self._geometry.columns,
            "next_n": self._geometry.draft_tokens,
            "paged_mqa_ctx_lens_2d": self._buffers["paged_mqa_ctx_lens_2d"] if self._own_context_lens else None,
        }

    def _context_lens(self) -> torch.Tensor:
        return self._buffers["paged_mqa_ctx_lens_2d"] if self._own_context_lens else super()._context_lens()


class DraftExtend(_Fused):
    """Contract 1.3. Where all requests extend by N, the static form with lengths made on the device, as the backend
    calls it; else the ragged form of the same function, which takes the token total from the host."""

    name = "sglang:draft_extend"
    function = "fused_dsa_draft_extend_metadata"
    pooled_module = "draft_extend"

    def _arguments(self) -> dict[str, Any]:
        n, batch = self._geometry.draft_tokens, self._inputs.seq_lens.shape[0]
        lengths, total = self._ragged()
        static = lengths is None
        return {
            **super()._arguments(),
            "extend_seq_lens": torch.full_like(self._buffers["cache_seqlens_int32"], n) if static else lengths,
            "seqlens_expanded": self._buffers["dsa_seqlens_expanded"],
            "total_len": batch * n if static else total,
            "max_seqlen_k": self._geometry.columns,
            "max_extend_len": n,
            "max_total_len": batch * n,
            "static_extend_len": static,
        }

    def _ragged(self) -> tuple[torch.Tensor | None, int]:
        """The extend lengths and their sum, or None if all are N. Rounds with an indexer never are ragged."""
        lengths = self._inputs.extend_lens
        assert lengths is not None, "draft_extend has extend_lens (contract 1.3)"
        if self._geometry.indexer:
            return None, 0
        values = lengths.tolist()
        return (None, 0) if set(values) == {self._geometry.draft_tokens} else (lengths, sum(values))
