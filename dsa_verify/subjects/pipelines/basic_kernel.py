"""One Triton launch that prepares decode, target-verify or draft-extend metadata (contract 1.1 to 1.3).

Program 0 does the lengths and prefix sums, walking the batch in blocks with a running carry. Every other program
takes a group of requests (one, on a GPU) and a share of their table columns at a time, reads that part of each
request's `req_to_token` row once, and stores it to all of the request's token rows. Work is bounded by the live
length, not by the captured width: a short request in a graph captured at 131072 columns costs one block. Nothing
that varies between rounds is a compile-time constant, and row offsets are 64-bit because rows * width passes 2**31
(contract 1.7).
"""

from __future__ import annotations

import triton
import triton.language as tl

DECODE, VERIFY, EXTEND = (tl.constexpr(mode) for mode in (0, 1, 2))

_UNSPECIALIZED = [
    "batch",
    "seq_stride",
    "request_stride",
    "extend_stride",
    "token_stride",
    "draft_tokens",
    "columns",
    "pages",
    "wide_stride",
    "real_stride",
    "topk",
]


@triton.jit
def _dsa_length(length, topk, POOL: tl.constexpr):
    """Contract 0.4: only whole pools count towards the top-k; the tail of an unfinished pool is always attended."""
    pooled = length // POOL * POOL
    return tl.minimum(pooled, topk) + (length - pooled)


@triton.jit
def _lengths(
    seq_lens,
    extend_lens,
    cache_seqlens,
    cu_seqlens_k,
    expanded,
    dsa_cache_seqlens,
    dsa_cu_seqlens_k,
    context_lens,
    batch,
    seq_stride,
    extend_stride,
    draft_tokens,
    topk,
    MODE: tl.constexpr,
    POOL: tl.constexpr,
    CONTEXT_PER_REQUEST: tl.constexpr,
    LANES: tl.constexpr,
    DRAFT_LANES: tl.constexpr,
):
    lane = tl.arange(0, LANES)
    draft = tl.arange(0, DRAFT_LANES)
    tokens_before = tl.zeros((), tl.int32)
    dsa_before = tl.zeros((), tl.int32)
    rows_before = tl.zeros((), tl.int32)
    tl.store(cu_seqlens_k, 0)
    tl.store(dsa_cu_seqlens_k, 0)
    for start in range(0, batch, LANES):
        request = start + lane
        here = request < batch
        seq = tl.load(seq_lens + request.to(tl.int64) * seq_stride, mask=here, other=0).to(tl.int32)
        cached = seq
        if MODE == VERIFY:
            cached = seq + draft_tokens
        cached = tl.where(here, cached, 0)
        tl.store(cache_seqlens + request, cached, mask=here)
        tl.store(cu_seqlens_k + 1 + request, tokens_before + tl.cumsum(cached, axis=0), mask=here)
        tokens_before += tl.sum(cached, axis=0)
        if CONTEXT_PER_REQUEST:
            at = context_lens + request[:, None].to(tl.int64) * draft_tokens + draft[None, :]
            tl.store(at, cached[:, None] + draft[None, :] * 0, mask=here[:, None] & (draft[None, :] < draft_tokens))
        # The token rows of these requests: [lanes, draft], row-major, which is the order of the rows.
        owned = tl.zeros((LANES,), tl.int32) + 1
        if MODE == VERIFY:
            owned = owned * draft_tokens
        if MODE == EXTEND:
            owned = tl.load(extend_lens + request.to(tl.int64) * extend_stride, mask=here, other=0).to(tl.int32)
        owned = tl.where(here, owned, 0)
        first = rows_before + tl.cumsum(owned, axis=0) - owned
        rows_before += tl.sum(owned, axis=0)
        length = seq[:, None] + draft[None, :] * 0
        if MODE == VERIFY:
            length = seq[:, None] + draft[None, :] + 1
        if MODE == EXTEND:
            # Clamped: a pad row is shorter than the draft, and consumers read lengths as unsigned.
            length = tl.maximum(seq[:, None] - owned[:, None] + draft[None, :] + 1, 0)
        live = draft[None, :] < owned[:, None]
        dsa = tl.where(live, _dsa_length(length, topk, POOL), 0)
        row = first[:, None] + draft[None, :]
        if MODE != DECODE:
            tl.store(expanded + row, length, mask=live)
        tl.store(dsa_cache_seqlens + row, dsa, mask=live)
        of_request = tl.sum(dsa, axis=1)
        base = dsa_before + tl.cumsum(of_request, axis=0) - of_request
        tl.store(dsa_cu_seqlens_k + 1 + row, base[:, None] + tl.cumsum(dsa, axis=1), mask=live)
        dsa_before += tl.sum(of_request, axis=0)


@triton.jit
def _tables(
    worker,
    workers,
    seq_lens,
    requests,
    req_to_token,
    extend_lens,
    page_table_1,
    real_page_table,
    batch,
    seq_stride,
    request_stride,
    extend_stride,
    token_stride,
    draft_tokens,
    columns,
    pages,
    wide_stride,
    real_stride,
    MODE: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    lane = tl.arange(0, LANES)
    member = tl.arange(0, GROUP)
    groups = tl.cdiv(batch, GROUP)
    for task in range(worker, groups * SHARES, workers):
        first_request = task // SHARES * GROUP
        request = first_request + member
        here = request < batch
        live = tl.load(seq_lens + request.to(tl.int64) * seq_stride, mask=here, other=0).to(tl.int32)
        first = request
        owned = here.to(tl.int32)
        if MODE == VERIFY:
            live = tl.where(here, live + draft_tokens, 0)
            first = request * draft_tokens
            owned = owned * draft_tokens
        if MODE == EXTEND:
            owned = tl.load(extend_lens + request.to(tl.int64) * extend_stride, mask=here, other=0).to(tl.int32)
            first = tl.cumsum(owned, axis=0) - owned
            for start in range(0, first_request, LANES):
                before = start + lane
                lens = tl.load(extend_lens + before.to(tl.int64) * extend_stride, mask=before < first_request, other=0)
                first += tl.sum(lens.to(tl.int32), axis=0)
        live = tl.minimum(live, columns)
        row = tl.load(requests + request.to(tl.int64) * request_stride, mask=here, other=0).to(tl.int64)
        source = (req_to_token + row * token_stride)[:, None]
        first = first.to(tl.int64)[:, None]
        owned = owned[:, None]
        longest = tl.max(live, axis=0)
        bound = live[:, None]
        for start in range((task % SHARES) * BLOCK, longest, SHARES * BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            if WIDE:
                slots = tl.load(source + column, mask=column < bound, other=0)
                for i in range(draft_tokens):
                    there = (column < bound) & (i < owned)
                    tl.store(page_table_1 + (first + i) * wide_stride + column, slots, mask=there)
            if PAGE > 1:
                page = start // PAGE + tl.arange(0, BLOCK // PAGE)[None, :]
                known = (page * PAGE < bound) & (page < pages)
                ids = tl.load(source + page * PAGE, mask=known, other=0) // PAGE
                for i in range(draft_tokens):
                    tl.store(real_page_table + (first + i) * real_stride + page, ids, mask=known & (i < owned))


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def metadata_kernel(
    seq_lens,
    requests,
    req_to_token,
    extend_lens,
    cache_seqlens,
    cu_seqlens_k,
    expanded,
    dsa_cache_seqlens,
    dsa_cu_seqlens_k,
    context_lens,
    page_table_1,
    real_page_table,
    batch,
    seq_stride,
    request_stride,
    extend_stride,
    token_stride,
    draft_tokens,
    columns,
    pages,
    wide_stride,
    real_stride,
    topk,
    MODE: tl.constexpr,
    POOL: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    CONTEXT_PER_REQUEST: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    DRAFT_LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: 1 + workers, each taking GROUP requests at a time. Pointers: the Inputs, and the outputs by name."""
    program = tl.program_id(0)
    if program == 0:
        _lengths(
            seq_lens,
            extend_lens,
            cache_seqlens,
            cu_seqlens_k,
            expanded,
            dsa_cache_seqlens,
            dsa_cu_seqlens_k,
            context_lens,
            batch,
            seq_stride,
            extend_stride,
            draft_tokens,
            topk,
            MODE,
            POOL,
            CONTEXT_PER_REQUEST,
            LANES,
            DRAFT_LANES,
        )
    else:
        _tables(
            program - 1,
            tl.num_programs(0) - 1,
            seq_lens,
            requests,
            req_to_token,
            extend_lens,
            page_table_1,
            real_page_table,
            batch,
            seq_stride,
            request_stride,
            extend_stride,
            token_stride,
            draft_tokens,
            columns,
            pages,
            wide_stride,
            real_stride,
            MODE,
            PAGE,
            WIDE,
            SHARES,
            BLOCK,
            LANES,
            GROUP,
        )
