"""Records in miniature: what decode needs, made by whoever `refresh` is."""

from types import SimpleNamespace


class DeepseekSparseAttnBackend:
    """`make(bucket, inputs)` gives (tensors of the record by name, what fills them)."""

    def __init__(self, geometry, req_to_token, make, max_bs):
        self.req_to_token, self._make = req_to_token, make
        self.physical_page_size, self.dsa_index_kpool = geometry.page_size, geometry.pool_size
        self.dsa_index_topk, self.max_context_len = geometry.topk, geometry.context
        self.speculative_num_draft_tokens, self.dsa_drop_wide_page_table = None, not geometry.wide_table
        self.decode_cuda_graph_metadata = {"cu_seqlens_q": req_to_token.new_zeros(max_bs + 1)}
        self._fill = {}
        self.forward_metadata = None

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        bucket = forward_batch.batch_size
        if in_capture:
            tensors, self._fill[bucket] = self._make(bucket, forward_batch)
            self.decode_cuda_graph_metadata[bucket] = SimpleNamespace(**tensors)
        self._fill[bucket]()
        self.forward_metadata = self.decode_cuda_graph_metadata[bucket]


class DeepseekSparseAttnMultiStepBackend:
    """Of draft steps."""

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(forward_batch, in_capture)
