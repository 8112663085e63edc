"""A system of one's own: what a paged decode kernel reads, a reference in eager PyTorch, a subject in Triton."""

import torch
import triton
import triton.language as tl

from dsa_verify import Field, Layout, Row, System


def layout(geometry, bucket):
    page, pages = geometry.page_size, geometry.pages
    sums = Field(name="kv_indptr", shape=(bucket + 1,), row=Row.REQUEST_PREFIX, low=0, high=bucket * pages + 1)
    last = Field(name="kv_last_page_len", shape=(bucket,), row=Row.REQUEST, low=0, high=page + 1)
    # A column stands for a page of tokens; those behind the length are never compared.
    table = Field(name="kv_pages", shape=(bucket, pages), row=Row.REQUEST, column_step=page, low=0, high=geometry.slots)
    return Layout(system="paged_kv", geometry=geometry, bucket=bucket, tokens=bucket, fields=(sums, last, table))


class Reference:
    name = "reference"

    def allocate(self, geometry, inputs, buffers):
        self.page, self.pages, self.inputs, self.out = geometry.page_size, geometry.pages, inputs, buffers

    def before_replay(self):
        pass

    def in_graph(self):
        lens = self.inputs.seq_lens.clamp(max=self.page * self.pages)
        counts = (lens + self.page - 1) // self.page
        self.out["kv_indptr"].copy_(torch.cat([counts[:1] * 0, counts.cumsum(0)]))
        self.out["kv_last_page_len"].copy_(torch.where(lens > 0, (lens - 1) % self.page + 1, 0))
        slots = self.inputs.req_to_token[self.inputs.req_pool_indices, :: self.page]
        self.out["kv_pages"].copy_(slots[:, : self.pages] // self.page)


@triton.jit
def fused_kernel(
    lens, requests, slots, sums, last, table, steps, batch, pages, PAGE: tl.constexpr, LANES: tl.constexpr
):
    """One program: lengths of all requests, then their tables, 64 columns at a time."""
    row, column = tl.arange(0, LANES), tl.arange(0, 64)[None, :]
    here = row < batch
    length = tl.minimum(tl.load(lens + row * steps[0], mask=here, other=0), PAGE * pages)
    counts = (length + PAGE - 1) // PAGE
    tl.store(sums + row + 1, tl.cumsum(counts, 0), mask=here)
    tl.store(last + row, tl.where(length > 0, (length - 1) % PAGE + 1, 0), mask=here)
    request = tl.load(requests + row * steps[1], mask=here, other=0).to(tl.int64)
    for start in range(0, tl.max(counts, 0), 64):
        live = start + column < counts[:, None]
        ids = tl.load(slots + (request * steps[2])[:, None] + (start + column) * PAGE, mask=live, other=0) // PAGE
        tl.store(table + (row * pages)[:, None] + start + column, ids, mask=live)


class Fused(Reference):
    name = "fused"

    def in_graph(self):
        lens, requests, slots = self.inputs.seq_lens, self.inputs.req_pool_indices, self.inputs.req_to_token
        sums, last, table = (self.out[name] for name in ("kv_indptr", "kv_last_page_len", "kv_pages"))
        sums[:1].zero_()
        steps = (lens.stride(0), requests.stride(0), slots.stride(0))
        batch, lanes = len(lens), triton.next_power_of_2(len(lens))
        fused_kernel[(1,)](lens, requests, slots, sums, last, table, steps, batch, self.pages, self.page, lanes)


SYSTEM = System(
    name="paged_kv",
    summary="page sums, the fill of the last page and page ids of paged decode",
    layout=layout,
    oracle="own_system:Reference",
    subjects={"fused": "own_system:Fused"},
)
