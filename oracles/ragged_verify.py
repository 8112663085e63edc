"""RaggedVerifyOracle: the metadata of verifying 1 to N tokens of each request, padded to G token rows (contract 9)."""

from __future__ import annotations

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from oracles.common import row_owners, write_constants, write_dsa_lengths, write_prefix_sum, write_tables
from oracles.indexer import IndexerOracle


class RaggedVerifyOracle:
    """Contract 9 with the row formulas of 1.2, all of it in the graph. `seq_lens` is the length before the draft.

    A live request verifies a token at least, so the pad requests are those whose verify length is 0. That the lengths
    fit into the graph is a precondition, not checked here.
    """

    name = "oracle"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        """Keeps the buffers of `Layout.for_oracle()`; writes the constants and numbers the token rows from 1."""
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        self._verify_lens = inputs.verify_lens
        write_constants(buffers)
        self._indexer = IndexerOracle(geometry, inputs, buffers) if geometry.indexer else None
        count = buffers.layout.tokens
        self._row_ordinals = torch.arange(1, count + 1, dtype=torch.int64, device=inputs.seq_lens.device)

    def before_replay(self) -> None:
        """Do nothing: everything is in the graph."""

    def in_graph(self) -> None:
        """Row i of request b sees seq[b] + i + 1 tokens; the request counts seq[b] + its padded length (contract 9)."""
        buffers, seq_lens = self._buffers, self._inputs.seq_lens
        cache, expanded = buffers["cache_seqlens_int32"], buffers["dsa_seqlens_expanded"]
        padded, starts = buffers["padded_verify_lens"], buffers["qo_indptr"][:-1]
        self._pad(padded)
        write_prefix_sum(padded, buffers["qo_indptr"])
        buffers["extend_start_loc"].copy_(starts)
        torch.add(seq_lens, padded, out=cache)
        write_prefix_sum(cache, buffers["cu_seqlens_k"])

        owner = row_owners(torch.cumsum(padded, 0, dtype=torch.int64), self._row_ordinals)
        # r = start[b] + i + 1, which makes seq[b] + i + 1 the same as seq[b] - start[b] + r.
        torch.add((seq_lens - starts).index_select(0, owner), self._row_ordinals, out=expanded)

        write_dsa_lengths(expanded, self._geometry, buffers["dsa_cache_seqlens_int32"])
        write_prefix_sum(buffers["dsa_cache_seqlens_int32"], buffers["dsa_cu_seqlens_k"])
        write_tables(self._geometry, self._inputs, buffers)
        if self._indexer is not None:
            self._indexer.in_graph()

    def _pad(self, out: torch.Tensor) -> None:
        """int32 [bucket] `out` = verify lengths with the leftover of the graph shared out (contract 9)."""
        is_pad = self._verify_lens == 0
        count, leftover = is_pad.sum(), self._buffers.layout.tokens - self._verify_lens.sum()
        divisor = count.clamp(min=1)
        share = torch.div(leftover, divisor, rounding_mode="floor") + (is_pad.cumsum(0) <= leftover % divisor)
        out.copy_(torch.where(is_pad, share, self._verify_lens))
        out[-1:] += (leftover * (count == 0)).to(torch.int32)
