"""DecodeOracle: the metadata of a decode step, one token row per request (contract 1.1)."""

from __future__ import annotations

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from oracles.common import write_constants, write_dsa_lengths, write_prefix_sum, write_tables
from oracles.indexer import IndexerOracle


class DecodeOracle:
    """Contract 1.1, all of it in the graph. `seq_lens` counts the token that is being decoded."""

    name = "oracle"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        """Keeps the buffers of `Layout.for_oracle()` and writes the constants."""
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        write_constants(buffers)
        self._indexer = IndexerOracle(geometry, inputs, buffers) if geometry.indexer else None

    def before_replay(self) -> None:
        """Do nothing: everything is in the graph."""

    def in_graph(self) -> None:
        """`dsa_seqlens_expanded` and `paged_mqa_ctx_lens_2d` are views of the cache lengths (contract 1.1)."""
        buffers = self._buffers
        cache = buffers["cache_seqlens_int32"]
        cache.copy_(self._inputs.seq_lens)
        write_prefix_sum(cache, buffers["cu_seqlens_k"])
        write_dsa_lengths(cache, self._geometry, buffers["dsa_cache_seqlens_int32"])
        write_prefix_sum(buffers["dsa_cache_seqlens_int32"], buffers["dsa_cu_seqlens_k"])
        write_tables(self._geometry, self._inputs, buffers)
        if self._indexer is not None:
            self._indexer.in_graph()
