"""Decode metadata written from scratch: lengths, sums and tables, all of it in the graph."""

import torch

from dsa_verify import map_outputs


class PagedDecode:
    name = "paged_decode"

    def allocate(self, geometry, inputs, buffers):
        self.inputs, self.topk, self.page = inputs, geometry.topk, geometry.page_size
        self.layout, batch, device = buffers.layout, inputs.seq_lens.shape[0], inputs.seq_lens.device

        def int32(*shape):
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.lens, self.dsa_lens = int32(batch), int32(batch)
        self.cu, self.dsa_cu = int32(batch + 1), int32(batch + 1)
        self.table, self.pages = int32(batch, geometry.columns), int32(batch, geometry.pages)
        self.arange = torch.arange(batch + 1, dtype=torch.int32, device=device)

    def before_replay(self):
        pass

    def in_graph(self):
        self.lens.copy_(self.inputs.seq_lens)
        self.dsa_lens.copy_(self.lens.clamp(max=self.topk))
        self.cu[1:].copy_(self.lens.cumsum(0))
        self.dsa_cu[1:].copy_(self.dsa_lens.cumsum(0))
        slots = self.inputs.req_to_token.index_select(0, self.inputs.req_pool_indices)
        self.table.copy_(slots[:, : self.table.shape[1]])
        self.pages.copy_(self.table[:, :: self.page] // self.page)

    def outputs(self):
        metadata = {
            "cache_seqlens_int32": self.lens,
            "dsa_seqlens_expanded": self.lens,
            "paged_mqa_ctx_lens_2d": self.lens[:, None],
            "dsa_cache_seqlens_int32": self.dsa_lens,
            "cu_seqlens_k": self.cu,
            "dsa_cu_seqlens_k": self.dsa_cu,
            "cu_seqlens_q": self.arange,
            "dsa_cu_seqlens_q": self.arange,
            "page_table_1": self.table,
            "real_page_table": self.pages,
        }
        return map_outputs(metadata, self.layout)
