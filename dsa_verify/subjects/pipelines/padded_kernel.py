"""Triton launches for DSV4-style metadata (contract 7.1): one for the core, c4 and c128 tensors, and one for each low
ratio where the model has them.

A program takes a group of token rows (one, on a GPU) and a share of the columns of each table; share 0 also writes the
row's scalars. Every column of every row is written, so there is no bound by live lengths, and a pad row takes the same
way as a live one. Nothing that varies between rounds is a compile-time constant, and row offsets are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

DECODE, VERIFY, BLOCK, EXTEND = (tl.constexpr(mode) for mode in (0, 1, 2, 3))

_SHAPES = ["seq_stride", "request_stride", "token_stride", "location_stride", "rows", "per_request", "pages", "topk"]


@triton.jit
def _casual_lengths(seq, row, per_request, MODE: tl.constexpr):
    """Return what each token row sees of its request, itself included; not positive in rows before the first token."""
    casual = seq
    if MODE == VERIFY or MODE == BLOCK:
        casual = seq + row % per_request + 1
    if MODE == EXTEND:
        casual = seq - per_request + row % per_request + 1
    return casual


@triton.jit
def _store_groups(raw, clamped, write_to, groups, casual, location, row, here, RATIO: tl.constexpr, LOW: tl.constexpr):
    """Lengths in groups of RATIO tokens and where the row's group goes, if the row finishes one."""
    if not LOW:
        tl.store(raw + row, groups, mask=here)
    tl.store(clamped + row, tl.maximum(groups, 1), mask=here)
    unfinished = tl.zeros_like(location)
    if LOW:
        unfinished = unfinished - 1
    tl.store(write_to + row, tl.where(casual % RATIO == 0, location // RATIO, unfinished), mask=here)


@triton.jit
def _entries(source, index, known, PAGE: tl.constexpr, RATIO: tl.constexpr):
    """Entry `index` of the row's compressed tokens, of which a page holds PAGE // RATIO; -1 where not `known`."""
    per_page: tl.constexpr = PAGE // RATIO
    slot = tl.load(source + index // per_page * PAGE, mask=known, other=0)
    return tl.where(known, slot // PAGE * per_page + index % per_page, -1)


@triton.jit(do_not_specialize=[*_SHAPES, "window_width", "topk_width", "dense_width", "window", "floor_stride"])
def padded_kernel(
    seq_lens,
    requests,
    req_to_token,
    out_cache_loc,
    full_to_swa,
    floors,
    page_table,
    raw_out_loc,
    seq_lens_casual,
    positions_casual,
    swa_page_indices,
    swa_topk_lengths,
    c4_raw,
    c4_clamped,
    c4_out_loc,
    c4_sparse_lengths,
    c4_sparse_indices,
    c128_raw,
    c128_clamped,
    c128_out_loc,
    c128_page_indices,
    seq_stride,
    request_stride,
    token_stride,
    location_stride,
    rows,
    per_request,
    pages,
    topk,
    window_width,
    topk_width,
    dense_width,
    window,
    floor_stride,
    MODE: tl.constexpr,
    CLAMP: tl.constexpr,
    PAGE: tl.constexpr,
    SPARSE: tl.constexpr,
    DENSE: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: (groups of GROUP rows, shares of COLUMNS columns at a time). Widths are in elements, each table contiguous.
    CLAMP: whether lengths that a consumer reads as unsigned are kept from going below 0."""
    row = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    share = tl.program_id(1)
    here = row < rows
    request = row // per_request
    seq = tl.load(seq_lens + request.to(tl.int64) * seq_stride, mask=here, other=0).to(tl.int32)
    owner = tl.load(requests + request.to(tl.int64) * request_stride, mask=here, other=0).to(tl.int64)
    source = (req_to_token + owner * token_stride)[:, None]
    floor = tl.load(floors + request.to(tl.int64) * floor_stride, mask=here, other=0)
    casual = _casual_lengths(seq, row, per_request, MODE)
    counted = casual
    if CLAMP:
        counted = tl.maximum(casual, 0)
    if MODE == BLOCK:
        context = tl.maximum(tl.minimum(tl.minimum(seq, window), seq - floor), 0)
        visible = context + per_request
    else:
        visible = tl.minimum(tl.minimum(counted, window), tl.maximum(casual - floor, 0))
    sparse_groups = counted // SPARSE
    dense_groups = counted // DENSE

    if share == 0:
        location = tl.load(out_cache_loc + row.to(tl.int64) * location_stride, mask=here, other=0)
        tl.store(raw_out_loc + row, location, mask=here)
        tl.store(seq_lens_casual + row, casual, mask=here)
        tl.store(positions_casual + row, casual - 1, mask=here)
        tl.store(swa_topk_lengths + row, visible, mask=here)
        _store_groups(c4_raw, c4_clamped, c4_out_loc, sparse_groups, casual, location, row, here, SPARSE, False)
        tl.store(c4_sparse_lengths + row, tl.minimum(tl.maximum(sparse_groups, 1), topk), mask=here)
        _store_groups(c128_raw, c128_clamped, c128_out_loc, dense_groups, casual, location, row, here, DENSE, False)

    row64 = row.to(tl.int64)[:, None]
    there = here[:, None]
    first = share * COLUMNS
    step = tl.num_programs(1) * COLUMNS
    for start in range(first, pages, step):
        column = start + tl.arange(0, COLUMNS)[None, :]
        known = there & (column < pages)
        slot = tl.load(source + column * PAGE, mask=known, other=0)
        tl.store(page_table + row64 * pages + column, slot // PAGE, mask=known)
    for start in range(first, window_width, step):
        column = start + tl.arange(0, COLUMNS)[None, :]
        if MODE == BLOCK:
            drafted = column - context[:, None]
            before = there & (drafted < 0)
            in_block = there & (drafted >= 0) & (drafted < per_request)
            slot = tl.load(source + (seq[:, None] + drafted), mask=before, other=0).to(tl.int64)
            member = (request[:, None] * per_request + drafted).to(tl.int64) * location_stride
            slot += tl.load(out_cache_loc + member, mask=in_block, other=0)
            seen = before | in_block
        else:
            position = casual[:, None] - 1 - column
            seen = there & (position >= floor[:, None]) & (column < window)
            slot = tl.load(source + position, mask=seen, other=0)
        index = tl.load(full_to_swa + slot, mask=seen, other=-1)
        tl.store(swa_page_indices + row64 * window_width + column, index, mask=there & (column < window_width))
    for start in range(first, topk_width, step):
        column = start + tl.arange(0, COLUMNS)[None, :]
        nothing = tl.full((GROUP, COLUMNS), -1, tl.int32)
        tl.store(c4_sparse_indices + row64 * topk_width + column, nothing, mask=there & (column < topk_width))
    for start in range(first, dense_width, step):
        column = start + tl.arange(0, COLUMNS)[None, :]
        known = (column < dense_groups[:, None]) & (column < pages * (PAGE // DENSE))
        entry = _entries(source, column, there & known, PAGE, DENSE)
        tl.store(c128_page_indices + row64 * dense_width + column, entry, mask=there & (column < dense_width))


@triton.jit(do_not_specialize=[*_SHAPES, "topk_width"])
def low_ratio_kernel(
    seq_lens,
    requests,
    req_to_token,
    out_cache_loc,
    clamped,
    write_to,
    sparse_lengths,
    sparse_indices,
    full_indices,
    full_raw_indices,
    seq_stride,
    request_stride,
    token_stride,
    location_stride,
    rows,
    per_request,
    pages,
    topk,
    topk_width,
    MODE: tl.constexpr,
    CLAMP: tl.constexpr,
    PAGE: tl.constexpr,
    RATIO: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The tensors of one low ratio; grid and widths as in padded_kernel."""
    row = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    share = tl.program_id(1)
    here = row < rows
    request = (row // per_request).to(tl.int64)
    seq = tl.load(seq_lens + request * seq_stride, mask=here, other=0).to(tl.int32)
    owner = tl.load(requests + request * request_stride, mask=here, other=0).to(tl.int64)
    source = (req_to_token + owner * token_stride)[:, None]
    casual = _casual_lengths(seq, row, per_request, MODE)
    counted = casual
    if CLAMP:
        counted = tl.maximum(casual, 0)
    groups = counted // RATIO
    chosen = tl.minimum(tl.maximum(groups, 1), topk)
    if share == 0:
        location = tl.load(out_cache_loc + row.to(tl.int64) * location_stride, mask=here, other=0)
        _store_groups(clamped, clamped, write_to, groups, casual, location, row, here, RATIO, True)
        tl.store(sparse_lengths + row, chosen, mask=here)
    row64 = row.to(tl.int64)[:, None]
    for start in range(share * COLUMNS, topk_width, tl.num_programs(1) * COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        place = row64 * topk_width + column
        inside = here[:, None] & (column < topk_width)
        known = inside & (column < chosen[:, None]) & (column < pages * (PAGE // RATIO))
        nothing = tl.full((GROUP, COLUMNS), -1, tl.int32)
        tl.store(sparse_indices + place, nothing, mask=inside)
        tl.store(full_indices + place, _entries(source, column, known, PAGE, RATIO), mask=inside)
        tl.store(full_raw_indices + place, tl.where(known, column, -1), mask=inside)
