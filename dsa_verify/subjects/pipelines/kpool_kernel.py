"""Triton launches for K-pool metadata: the write plan, and the pooled views (contract 4.1, 4.2).

Both read the physical page table that the same refresh has just written, at row b * n, as engines do. Nothing that
varies between rounds is a compile-time constant, and row offsets are 64-bit because rows * width passes 2**31
(contract 1.7).
"""

from __future__ import annotations

import triton
import triton.language as tl

DECODE, VERIFY, EXTEND = (tl.constexpr(mode) for mode in (0, 1, 2))


@triton.jit(
    do_not_specialize=[
        "batch",
        "seq_stride",
        "request_stride",
        "accept_stride",
        "real_stride",
        "tokens",
        "candidates",
        "pages",
    ]
)
def write_plan_kernel(
    seq_lens,
    requests,
    accept_lens,
    real_page_table,
    req,
    write_start,
    tail_logical_start,
    write_loc,
    seqlens_per_q,
    pool_seqlens_per_q,
    effective_n,
    batch,
    seq_stride,
    request_stride,
    accept_stride,
    real_stride,
    tokens,
    candidates,
    pages,
    MODE: tl.constexpr,
    POOL: tl.constexpr,
    PAGE: tl.constexpr,
    LANES: tl.constexpr,
    TOKEN_LANES: tl.constexpr,
    CANDIDATE_LANES: tl.constexpr,
):
    """Grid: the batch in blocks of LANES requests."""
    request = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here = request < batch
    wide = request.to(tl.int64)
    start = tl.load(seq_lens + wide * seq_stride, mask=here, other=0).to(tl.int32)
    if MODE == DECODE:
        start = start - 1
    if MODE == EXTEND:
        start = start - tokens
    pool = start // POOL
    tl.store(req + request, tl.load(requests + wide * request_stride, mask=here, other=0).to(tl.int64), mask=here)
    tl.store(write_start + request, start, mask=here)
    tl.store(tail_logical_start + request, pool * POOL, mask=here)

    candidate = tl.arange(0, CANDIDATE_LANES)[None, :]
    candidate_pool = pool[:, None] + candidate
    column = tl.minimum(tl.maximum(candidate_pool // PAGE * POOL, 0), pages - 1)
    wanted = here[:, None] & (candidate < candidates)
    source = real_page_table + (wide * tokens * real_stride)[:, None]
    page = tl.load(source + column, mask=wanted, other=0).to(tl.int64) // POOL
    at = write_loc + (wide * candidates)[:, None] + candidate
    tl.store(at, page * PAGE + candidate_pool % PAGE, mask=wanted)

    if MODE != DECODE:
        token = tl.arange(0, TOKEN_LANES)[None, :]
        length = start[:, None] + token + 1
        row = (wide * tokens)[:, None] + token
        owned = here[:, None] & (token < tokens)
        tl.store(seqlens_per_q + row, length, mask=owned)
        tl.store(pool_seqlens_per_q + row, length // POOL, mask=owned)
    if MODE == EXTEND:
        accepted = tl.load(accept_lens + wide * accept_stride, mask=here, other=0).to(tl.int32)
        tl.store(effective_n + request, accepted, mask=here)


@triton.jit(do_not_specialize=["batch", "seq_stride", "real_stride", "pooled_stride", "tokens", "pooled_pages"])
def pooled_views_kernel(
    seq_lens,
    real_page_table,
    pooled_cache_seqlens,
    pooled_real_page_table,
    batch,
    seq_stride,
    real_stride,
    pooled_stride,
    tokens,
    pooled_pages,
    MODE: tl.constexpr,
    POOL: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: the batch in groups of GROUP requests, each bounded by the longest of its live lengths."""
    request = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    here = request < batch
    wide = request.to(tl.int64)
    cached = tl.load(seq_lens + wide * seq_stride, mask=here, other=0).to(tl.int32)
    if MODE == DECODE:
        tl.store(pooled_cache_seqlens + request, cached // POOL, mask=here)
    if MODE == VERIFY:
        cached = tl.where(here, cached + tokens, 0)
    # A pooled page is live with its first token, before any of its pools is closed.
    live = tl.minimum((cached + (PAGE * POOL - 1)) // (PAGE * POOL), pooled_pages)
    longest = tl.max(live, axis=0)
    first = (wide * tokens)[:, None]
    for begin in range(0, longest, BLOCK):
        page = begin + tl.arange(0, BLOCK)[None, :]
        known = page < live[:, None]
        ids = tl.load(real_page_table + first * real_stride + page * POOL, mask=known, other=0) // POOL
        for i in range(tokens):
            tl.store(pooled_real_page_table + (first + i) * pooled_stride + page, ids, mask=known)
