"""One wrong version of `PagedDecode` for each common mistake; what the verifier calls it is in the docstring."""

import torch
from paged_decode import PagedDecode


class FrozenBatch(PagedDecode):
    """frozen at capture: the lengths are read on the host once, and never again."""

    def allocate(self, geometry, inputs, buffers):
        super().allocate(geometry, inputs, buffers)
        self.frozen = inputs.seq_lens.clone()

    def in_graph(self):
        super().in_graph()
        self.lens.copy_(self.frozen)


class NewTensor(PagedDecode):
    """allocates in replay: the prefix sum is a new tensor each time, so the graph's consumers read an old one."""

    def before_replay(self):
        self.cu = torch.cat([self.cu[:1], self.inputs.seq_lens.cumsum(0).int()])


class ReadsOnTheHost(PagedDecode):
    """synchronises in capture: the longest length decides how much is copied."""

    def in_graph(self):
        super().in_graph()
        longest = int(self.inputs.seq_lens.max())
        self.table[:, :longest].copy_(self.table[:, :longest])


class PageOffByOne(PagedDecode):
    """boundary: pages are counted from one."""

    def in_graph(self):
        super().in_graph()
        self.pages.add_(1)


class LiveRowsOnly(PagedDecode):
    """never written: rows of pad requests keep what was there."""

    def in_graph(self):
        kept = self.lens.clone()
        super().in_graph()
        self.lens.copy_(torch.where(self.inputs.req_pool_indices == 0, kept, self.lens))


class AdvancesItsInput(PagedDecode):
    """input overwritten: the engine's own lengths are advanced in place."""

    def in_graph(self):
        super().in_graph()
        self.inputs.seq_lens.add_(1)
