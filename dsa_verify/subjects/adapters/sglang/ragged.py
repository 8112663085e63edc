"""SGLang's own metadata of ragged verify: the padding of verify lengths to a captured graph and its sums before the
graph, lengths and page table of the token rows inside (contract 9; rows as in 7.1).

The functions are SGLang's, imported from its published package. How many requests are live is known to an engine's
host; here it is read from the verify lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.adapters.sglang import wheel
from dsa_verify.subjects.adapters.sglang.padded import CORE, token_rows_of

KERNELS: Final = "sglang.kernels.ops.speculative.ragged_verify_kernels"
LAYOUT: Final = "sglang.srt.speculative.ragged_verify"

COVERED: Final = (
    "padded_verify_lens",
    "extend_start_loc",
    "qo_indptr",
    "cache_seqlens_int32",
    "cu_seqlens_k",
    "dsa_seqlens_expanded",
    "real_page_table",
)
WINDOW: Final = 128  # of the tensors that it makes beside those that are covered
_OTHERS: Final = "SGLang's ragged verify of DSV4 has no such tensor"


class RaggedVerify:
    """`PaddedToBucket`, `BuildQoIndptr` and `build_ragged_target_verify_geometry` before the graph,
    `ExpandPrefillCausally` and `BuildPageTablePositions` in it."""

    name = "sglang:ragged_verify"

    @staticmethod
    def provenance() -> Mapping[str, str]:
        return wheel.provenance(KERNELS, LAYOUT, CORE)

    @staticmethod
    def not_covered(layout: Layout, device: torch.device) -> Mapping[str, str]:
        return {field.name: _OTHERS for field in layout if field.name not in COVERED}

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        """UsageError as `wheel.require` has it, and for pages of one token, whose table is another function's."""
        if geometry.page_size == 1:
            raise UsageError(f"subject {self.name!r}: page_size: 1 has no page table of its own; use 2 or more")
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        self._verify_lens = inputs.verify_lens
        self._pad = wheel.attribute(KERNELS, "PaddedToBucket")
        self._sums = wheel.attribute(KERNELS, "BuildQoIndptr")
        self._build_geometry = wheel.attribute(LAYOUT, "build_ragged_target_verify_geometry")
        self._expand = wheel.attribute(CORE, "ExpandPrefillCausally")
        self._build_lengths = wheel.attribute(CORE, "BuildPageTablePositions")
        self.ready_before_graph = COVERED[:5]

    def before_replay(self) -> None:
        out, batch, tokens = self._buffers, self._buffers.layout.bucket, self._buffers.layout.tokens
        live = int((self._verify_lens > 0).sum())
        padded = self._as_kernel(self._pad)(
            verify_lens=self._verify_lens[:live].contiguous(), graph_num_tokens=tokens, bs=live, padded_bs=batch
        )
        sums = self._as_kernel(self._sums)(verify_lens=padded)
        layout = SimpleNamespace(verify_lens=padded, qo_indptr_device=sums.qo_indptr, verify_lens_cpu=None)
        geometry = self._build_geometry(seq_lens=self._inputs.seq_lens, layout=layout)
        out["padded_verify_lens"].copy_(padded)
        out["extend_start_loc"].copy_(sums.extend_start_loc)
        out["qo_indptr"].copy_(geometry.cu_seqlens_q)
        out["cache_seqlens_int32"].copy_(geometry.cache_seqlens_int32)
        out["cu_seqlens_k"].copy_(geometry.cu_seqlens_k)

    def in_graph(self) -> None:
        out, inputs, tokens = self._buffers, self._inputs, self._buffers.layout.tokens
        lens = out["padded_verify_lens"]
        requests, expand = inputs.req_pool_indices.contiguous(), self._as_kernel(self._expand)
        rows = token_rows_of(expand, requests, inputs.seq_lens + lens, lens, out["extend_start_loc"], tokens)
        geometry = self._geometry
        prepared = self._as_kernel(self._build_lengths)(
            req_to_token=inputs.req_to_token,
            req_pool_indices_repeated=rows.req_pool_indices_repeated,
            seq_lens_casual=rows.seq_lens_casual,
            max_seq_len=geometry.columns,
            page_size=geometry.page_size,
            swa_window=WINDOW,
        )
        out["dsa_seqlens_expanded"].copy_(prepared.seq_lens_casual)
        out["real_page_table"].copy_(prepared.page_table)

    @staticmethod
    def _as_kernel(function: Any) -> Any:
        """Its kernel, also where SGLang would turn to torch."""
        return function.triton
