"""The optimised ragged-verify subject: one launch for lengths and tables, then the indexer's metadata, all in the graph
and all of it from this round's verify lengths (contract 9)."""

from __future__ import annotations

from typing import Final

import torch
import triton

from dsa_verify.geometry import Geometry
from dsa_verify.pipelines.basic import COLUMN_BLOCK, INTERPRETED_GROUP, REQUEST_LANES, TABLE_PROGRAMS
from dsa_verify.pipelines.indexer import IndexerMetadata
from dsa_verify.pipelines.ragged_verify_kernel import ragged_verify_kernel
from dsa_verify.ragged_rules import capture_lens
from dsa_verify.subject import Buffers, Inputs

CONSTANTS: Final = ("cu_seqlens_q", "dsa_cu_seqlens_q")


class RaggedVerify:
    """Contract 9, with the row formulas of 1.2.

    A live request verifies a token at least, so the pad requests are those whose verify length is 0, and they are the
    last ones. That the lengths fit the graph is a precondition: if they do not, the results mean nothing, but nothing
    is written past the buffers.
    """

    name = "triton"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        assert inputs.verify_lens is not None, "ragged_verify has verify_lens among its inputs (contract 9)"
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        self._verify_lens = inputs.verify_lens
        for constant in CONSTANTS:
            tensor = buffers[constant]
            tensor.copy_(torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device))
        self._indexer = IndexerMetadata(geometry, inputs, buffers) if geometry.indexer else None

    def before_replay(self) -> None:
        pass

    def in_graph(self) -> None:
        self._launch()
        if self._indexer is not None:
            self._indexer.refresh()

    def _launch(self) -> None:
        """Lengths and tables."""
        geometry, inputs, out = self._geometry, self._inputs, self._buffers
        batch, lens = inputs.seq_lens.shape[0], self._verify_lens
        real = out["real_page_table"]
        wide = out.get("page_table_1", real)
        block = max(min(COLUMN_BLOCK, triton.next_power_of_2(geometry.columns)), geometry.page_size)
        shares = max(1, min(-(-geometry.columns // block), TABLE_PROGRAMS // batch))
        # The interpreter pays by the operation, not by the element: there one worker takes all requests at once.
        workers, group, rows = batch * shares, 1, triton.next_power_of_2(geometry.draft_tokens)
        if not real.is_cuda:
            workers, group, rows = 1, min(INTERPRETED_GROUP, triton.next_power_of_2(batch)), INTERPRETED_GROUP
        ragged_verify_kernel[(1 + workers,)](
            inputs.seq_lens,
            inputs.req_pool_indices,
            inputs.req_to_token,
            lens,
            out["padded_verify_lens"],
            out["extend_start_loc"],
            out["qo_indptr"],
            out["cache_seqlens_int32"],
            out["cu_seqlens_k"],
            out["dsa_seqlens_expanded"],
            out["dsa_cache_seqlens_int32"],
            out["dsa_cu_seqlens_k"],
            wide,
            real,
            batch,
            out.layout.tokens,
            inputs.seq_lens.stride(0),
            inputs.req_pool_indices.stride(0),
            lens.stride(0),
            inputs.req_to_token.stride(0),
            geometry.columns,
            geometry.pages,
            wide.stride(0),
            real.stride(0),
            geometry.topk,
            POOL=geometry.pool_size,
            PAGE=geometry.page_size,
            WIDE=geometry.wide_table,
            SHARES=shares,
            BLOCK=block,
            LANES=min(REQUEST_LANES, triton.next_power_of_2(batch)),
            ROWS=rows,
            GROUP=group,
        )


class KeyedByTokens(RaggedVerify):
    """To be caught: the graph is chosen by its token rows alone, so every replay sees the lengths of the capture."""

    name = "keyed_by_tokens"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        layout = buffers.layout
        captured = capture_lens(layout.tokens, layout.bucket, geometry.draft_tokens)
        self._verify_lens = torch.tensor(captured, dtype=torch.int32, device=inputs.seq_lens.device)
