"""Builds metadata anew for each step, around buffers that stay."""

from types import SimpleNamespace

import torch


class DeepseekV32IndexerMetadataBuilder:
    def __init__(self, most, device):
        self.lens = torch.ones(most, dtype=torch.int32, device=device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        lens = common_attn_metadata
        self.lens[: len(lens)].copy_(torch.tensor(lens, dtype=torch.int32))
        return SimpleNamespace(decode=SimpleNamespace(seq_lens=self.lens[: len(lens)]), num_prefills=0)

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)
