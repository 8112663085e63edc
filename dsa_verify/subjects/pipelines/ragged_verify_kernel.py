"""One Triton launch that prepares ragged-verify metadata (contract 9, with the row formulas of 1.2).

Program 0 does the lengths and prefix sums, every other one takes requests (one at a time, on a GPU) and a share of
their table columns, as in basic_kernel.py. Which token rows a request owns depends on all verify lengths, because the
pad requests share what the live ones leave; each program works that out for its own requests in one walk over the
batch, so that none waits for another. Nothing that varies between rounds is a compile-time constant, and no row or
length of the capture is reused.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsa_verify.subjects.pipelines.basic_kernel import _dsa_length

_UNSPECIALIZED = [
    "batch",
    "tokens",
    "seq_stride",
    "request_stride",
    "verify_stride",
    "token_stride",
    "columns",
    "pages",
    "wide_stride",
    "real_stride",
    "topk",
]


@triton.jit
def _owned_rows(verify_lens, verify_stride, batch, tokens, first_request, request, LANES: tl.constexpr):
    """First token row, and number of token rows, of each `request` from `first_request` on. Pads have length 0."""
    lane = tl.arange(0, LANES)
    covered = tl.zeros((), tl.int32)
    live = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    for start in range(0, batch, LANES):
        each = start + lane
        lens = tl.load(verify_lens + each.to(tl.int64) * verify_stride, mask=each < batch, other=0)
        covered += tl.sum(lens, axis=0)
        live += tl.sum((lens > 0).to(tl.int32), axis=0)
        before += tl.sum(tl.where(each < first_request, lens, 0), axis=0)
    leftover = tokens - covered
    pads = batch - live
    base = leftover // tl.maximum(pads, 1)
    more = leftover - base * tl.maximum(pads, 1)
    here = request < batch
    own = tl.load(verify_lens + request.to(tl.int64) * verify_stride, mask=here, other=0)
    pads_before = tl.maximum(request - live, 0)
    first = before + tl.cumsum(own, axis=0) - own + pads_before * base + tl.minimum(pads_before, more)
    owned = tl.where(request < live, own, base + (pads_before < more).to(tl.int32))
    owned += tl.where(request == batch - 1, tl.where(pads == 0, leftover, 0), 0)
    # Changes nothing while the lengths fit the graph. If they do not, wrong rows are a finding, wild ones a fault.
    first = tl.minimum(tl.maximum(first, 0), tokens)
    return first, tl.where(here, tl.minimum(tl.maximum(owned, 0), tokens - first), 0)


@triton.jit
def _lengths(
    seq_lens,
    verify_lens,
    padded_verify_lens,
    extend_start_loc,
    qo_indptr,
    cache_seqlens,
    cu_seqlens_k,
    expanded,
    dsa_cache_seqlens,
    dsa_cu_seqlens_k,
    batch,
    tokens,
    seq_stride,
    verify_stride,
    topk,
    POOL: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    lane = tl.arange(0, LANES)
    tokens_before = tl.zeros((), tl.int32)
    dsa_before = tl.zeros((), tl.int32)
    tl.store(qo_indptr, 0)
    tl.store(cu_seqlens_k, 0)
    tl.store(dsa_cu_seqlens_k, 0)
    for start in range(0, batch, LANES):
        request = start + lane
        here = request < batch
        first, owned = _owned_rows(verify_lens, verify_stride, batch, tokens, start, request, LANES)
        tl.store(padded_verify_lens + request, owned, mask=here)
        tl.store(extend_start_loc + request, first, mask=here)
        tl.store(qo_indptr + 1 + request, first + owned, mask=here)
        seq = tl.load(seq_lens + request.to(tl.int64) * seq_stride, mask=here, other=0).to(tl.int32)
        cached = tl.where(here, seq + owned, 0)
        tl.store(cache_seqlens + request, cached, mask=here)
        tl.store(cu_seqlens_k + 1 + request, tokens_before + tl.cumsum(cached, axis=0), mask=here)
        tokens_before += tl.sum(cached, axis=0)
        # The token rows of these requests, ROWS of each at a time: a pad request may own any number.
        most = tl.max(owned, axis=0)
        of_request = tl.zeros((LANES,), tl.int32)
        for at in range(0, most, ROWS):
            i = at + tl.arange(0, ROWS)[None, :]
            dsa = _dsa_length(seq[:, None] + i + 1, topk, POOL)
            of_request += tl.sum(tl.where(i < owned[:, None], dsa, 0), axis=1)
        base = dsa_before + tl.cumsum(of_request, axis=0) - of_request
        dsa_before += tl.sum(of_request, axis=0)
        for at in range(0, most, ROWS):
            i = at + tl.arange(0, ROWS)[None, :]
            live = i < owned[:, None]
            length = seq[:, None] + i + 1
            dsa = tl.where(live, _dsa_length(length, topk, POOL), 0)
            row = first[:, None] + i
            tl.store(expanded + row, length, mask=live)
            tl.store(dsa_cache_seqlens + row, dsa, mask=live)
            tl.store(dsa_cu_seqlens_k + 1 + row, base[:, None] + tl.cumsum(dsa, axis=1), mask=live)
            base += tl.sum(dsa, axis=1)


@triton.jit
def _tables(
    worker,
    workers,
    seq_lens,
    requests,
    req_to_token,
    verify_lens,
    page_table_1,
    real_page_table,
    batch,
    tokens,
    seq_stride,
    request_stride,
    verify_stride,
    token_stride,
    columns,
    pages,
    wide_stride,
    real_stride,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    for task in range(worker, tl.cdiv(batch, GROUP) * SHARES, workers):
        first_request = task // SHARES * GROUP
        request = first_request + tl.arange(0, GROUP)
        here = request < batch
        first, owned = _owned_rows(verify_lens, verify_stride, batch, tokens, first_request, request, LANES)
        seq = tl.load(seq_lens + request.to(tl.int64) * seq_stride, mask=here, other=0).to(tl.int32)
        live = tl.minimum(tl.where(owned > 0, seq + owned, 0), columns)
        slot = tl.load(requests + request.to(tl.int64) * request_stride, mask=here, other=0).to(tl.int64)
        source = (req_to_token + slot * token_stride)[:, None]
        first = first.to(tl.int64)[:, None]
        most = tl.max(owned, axis=0)
        owned = owned[:, None]
        bound = live[:, None]
        longest = tl.max(live, axis=0)
        for start in range((task % SHARES) * BLOCK, longest, SHARES * BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            if WIDE:
                known = column < bound
                slots = tl.load(source + column, mask=known, other=0)
                for i in range(most):
                    tl.store(page_table_1 + (first + i) * wide_stride + column, slots, mask=known & (i < owned))
            if PAGE > 1:
                page = start // PAGE + tl.arange(0, BLOCK // PAGE)[None, :]
                known = (page * PAGE < bound) & (page < pages)
                ids = tl.load(source + page * PAGE, mask=known, other=0) // PAGE
                for i in range(most):
                    tl.store(real_page_table + (first + i) * real_stride + page, ids, mask=known & (i < owned))


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def ragged_verify_kernel(
    seq_lens,
    requests,
    req_to_token,
    verify_lens,
    padded_verify_lens,
    extend_start_loc,
    qo_indptr,
    cache_seqlens,
    cu_seqlens_k,
    expanded,
    dsa_cache_seqlens,
    dsa_cu_seqlens_k,
    page_table_1,
    real_page_table,
    batch,
    tokens,
    seq_stride,
    request_stride,
    verify_stride,
    token_stride,
    columns,
    pages,
    wide_stride,
    real_stride,
    topk,
    POOL: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: 1 + workers, each taking GROUP requests at a time. Pointers: the Inputs, and the outputs by name."""
    program = tl.program_id(0)
    if program == 0:
        _lengths(
            seq_lens,
            verify_lens,
            padded_verify_lens,
            extend_start_loc,
            qo_indptr,
            cache_seqlens,
            cu_seqlens_k,
            expanded,
            dsa_cache_seqlens,
            dsa_cu_seqlens_k,
            batch,
            tokens,
            seq_stride,
            verify_stride,
            topk,
            POOL,
            LANES,
            ROWS,
        )
    else:
        _tables(
            program - 1,
            tl.num_programs(0) - 1,
            seq_lens,
            requests,
            req_to_token,
            verify_lens,
            page_table_1,
            real_page_table,
            batch,
            tokens,
            seq_stride,
            request_stride,
            verify_stride,
            token_stride,
            columns,
            pages,
            wide_stride,
            real_stride,
            PAGE,
            WIDE,
            SHARES,
            BLOCK,
            LANES,
            GROUP,
        )
