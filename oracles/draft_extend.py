"""DraftExtendOracle: the metadata of extending a draft, extend_lens[b] token rows for request b (contract 1.3)."""

from __future__ import annotations

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from oracles.common import row_owners, write_constants, write_dsa_lengths, write_prefix_sum, write_tables
from oracles.indexer import IndexerOracle


class DraftExtendOracle:
    """Contract 1.3, all of it in the graph; ragged, of which static is the case that all extend lengths are N.

    `seq_lens` includes the draft. What rows beyond the sum of `extend_lens` hold afterwards means nothing.
    """

    name = "oracle"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        """Keeps the buffers of `Layout.for_oracle()`; writes the constants and numbers the token rows from 1."""
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        self._extend_lens = inputs.extend_lens
        write_constants(buffers)
        self._indexer = IndexerOracle(geometry, inputs, buffers) if geometry.indexer else None
        count = buffers.layout.tokens
        self._row_ordinals = torch.arange(1, count + 1, dtype=torch.int64, device=inputs.seq_lens.device)

    def before_replay(self) -> None:
        """Do nothing: everything is in the graph."""

    def in_graph(self) -> None:
        """Row i of request b sees max(seq[b] - qo[b] + i + 1, 0) tokens (contract 1.3)."""
        buffers, seq_lens = self._buffers, self._inputs.seq_lens
        cache, expanded = buffers["cache_seqlens_int32"], buffers["dsa_seqlens_expanded"]
        cache.copy_(seq_lens)
        write_prefix_sum(cache, buffers["cu_seqlens_k"])

        row_ends = torch.cumsum(self._extend_lens, 0, dtype=torch.int64)
        owner = row_owners(row_ends, self._row_ordinals)
        # r = row_ends[b] - qo[b] + i + 1, which makes seq[b] - qo[b] + i + 1 the same as seq[b] - row_ends[b] + r.
        torch.add((seq_lens - row_ends).index_select(0, owner), self._row_ordinals, out=expanded)
        expanded.clamp_(min=0)

        write_dsa_lengths(expanded, self._geometry, buffers["dsa_cache_seqlens_int32"])
        write_prefix_sum(buffers["dsa_cache_seqlens_int32"], buffers["dsa_cu_seqlens_k"])
        write_tables(self._geometry, self._inputs, buffers)
        if self._indexer is not None:
            self._indexer.in_graph()
