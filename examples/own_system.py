"""A system of one's own: what a paged decode kernel reads, as one Triton launch makes it, declared and judged."""

import torch
import triton
import triton.language as tl

from dsa_verify import In, Length, Metadata, Out, PageTable, RequestRow


@triton.jit
def fused_kernel(lens, requests, slots, sums, last, table, steps, batch, P: tl.constexpr, LANES: tl.constexpr):
    """One program: lengths of all requests, then their tables, 64 columns at a time."""
    row, column = tl.arange(0, LANES), tl.arange(0, 64)[None, :]
    here = row < batch
    length = tl.load(lens + row * steps[0], mask=here, other=0)
    counts = (length + P - 1) // P
    tl.store(sums + row + 1, tl.cumsum(counts, 0), mask=here)
    tl.store(last + row, tl.where(length > 0, (length - 1) % P + 1, 0), mask=here)
    request = tl.load(requests + row * steps[1], mask=here, other=0).to(tl.int64)
    for start in range(0, tl.max(counts, 0), 64):
        live = start + column < counts[:, None]
        ids = tl.load(slots + (request * steps[2])[:, None] + (start + column) * P, mask=live, other=0) // P
        tl.store(table + (row * steps[3])[:, None] + start + column, ids, mask=live)


class PagedKV(Metadata):
    """Page sums, the fill of the last page and page ids of paged decode."""

    lens = In("int64[B]", Length(edges=("P",)))
    requests = In("int64[B]", RequestRow())
    slots = In("int32[R, C]", PageTable())

    indptr = Out("int32[B + 1]", low=0)
    last = Out("int32[B]", low=0, high="P + 1")
    pages = Out("int32[B, cdiv(L, P)]", low=0, step="P")

    def reference(self, i, o):
        P = self.sizes.P
        counts = (i.lens + P - 1) // P
        o.indptr.copy_(torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
        o.last.copy_(torch.where(i.lens > 0, (i.lens - 1) % P + 1, 0))
        o.pages.copy_(i.slots[i.requests, ::P][:, : o.pages.shape[1]] // P)

    def setup(self, i, o):
        o.indptr.zero_()

    def subject(self, i, o):
        steps = (i.lens.stride(0), i.requests.stride(0), i.slots.stride(0), o.pages.stride(0))
        batch, lanes = self.sizes.B, triton.next_power_of_2(self.sizes.B)
        fused_kernel[(1,)](i.lens, i.requests, i.slots, *o, steps, batch, self.sizes.P, lanes)
