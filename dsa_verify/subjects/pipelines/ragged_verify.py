"""The optimised ragged-verify subject: one launch for lengths and tables, then the indexer's metadata, all in the graph
and all of it from this round's verify lengths (contract 9)."""

from __future__ import annotations

import triton

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.pipelines.basic import INTERPRETED_GROUP, REQUEST_LANES, InGraph, divide_tables
from dsa_verify.subjects.pipelines.ragged_verify_kernel import ragged_verify_kernel


class RaggedVerify(InGraph):
    """Contract 9, with the row formulas of 1.2.

    A live request verifies a token at least, so the pad requests are those whose verify length is 0, and they are the
    last ones. That the lengths fit the graph is a precondition: if they do not, the results mean nothing, but nothing
    is written past the buffers.
    """

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self._verify_lens = inputs.verify_lens

    def _launch(self) -> None:
        """Lengths and tables."""
        geometry, inputs, out = self._geometry, self._inputs, self._buffers
        batch, lens = inputs.seq_lens.shape[0], self._verify_lens
        real = out["real_page_table"]
        wide = out.get("page_table_1", real)
        division = divide_tables(geometry, batch, interpreted=not real.is_cuda)
        # Rows of one request that are taken at once, which the interpreter is better off with many of.
        rows = triton.next_power_of_2(geometry.draft_tokens) if real.is_cuda else INTERPRETED_GROUP
        ragged_verify_kernel[(1 + division.workers,)](
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
            SHARES=division.shares,
            BLOCK=division.block,
            LANES=min(REQUEST_LANES, triton.next_power_of_2(batch)),
            ROWS=rows,
            GROUP=division.group,
        )
