"""TargetVerifyOracle: the metadata of verifying N draft tokens, N token rows per request (contract 1.2)."""

from __future__ import annotations

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from oracles.common import write_constants, write_dsa_lengths, write_prefix_sum, write_tables
from oracles.indexer import IndexerOracle


class TargetVerifyOracle:
    """Contract 1.2, all of it in the graph. `seq_lens` is the length before the N draft tokens."""

    name = "oracle"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        """Keeps the buffers of `Layout.for_oracle()`; writes the constants and i + 1 for each draft position i."""
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        write_constants(buffers)
        self._indexer = IndexerOracle(geometry, inputs, buffers) if geometry.indexer else None
        self._steps = torch.arange(1, geometry.draft_tokens + 1, dtype=torch.int32, device=inputs.seq_lens.device)

    def before_replay(self) -> None:
        """Do nothing: everything is in the graph."""

    def in_graph(self) -> None:
        """Row b * N + i sees seq[b] + i + 1 tokens, while the request as a whole counts seq[b] + N (contract 1.2)."""
        buffers, seq_lens, n = self._buffers, self._inputs.seq_lens, self._geometry.draft_tokens
        cache, expanded = buffers["cache_seqlens_int32"], buffers["dsa_seqlens_expanded"]
        torch.add(seq_lens, n, out=cache)
        write_prefix_sum(cache, buffers["cu_seqlens_k"])
        torch.add(seq_lens.unsqueeze(1), self._steps, out=expanded.view(-1, n))
        write_dsa_lengths(expanded, self._geometry, buffers["dsa_cache_seqlens_int32"])
        write_prefix_sum(buffers["dsa_cache_seqlens_int32"], buffers["dsa_cu_seqlens_k"])
        write_tables(self._geometry, self._inputs, buffers)
        if buffers.layout["paged_mqa_ctx_lens_2d"].alias is None:
            buffers["paged_mqa_ctx_lens_2d"].copy_(cache.unsqueeze(1))
        if self._indexer is not None:
            self._indexer.in_graph()
