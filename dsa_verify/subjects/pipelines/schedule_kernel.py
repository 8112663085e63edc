"""One Triton launch that builds a paged-MQA schedule in place (contract 3.2, 3.3).

Each program sees to a few rows of the schedule and walks the whole batch twice in blocks, once for the total and once
to find, for each of its cuts, the request whose work holds it. It keeps no prefix sum: of a request it needs only the
sum before it and the sum with it, which are the largest sum up to the cut and the smallest sum beyond. Nothing that
varies between rounds is a compile-time constant.
"""

from __future__ import annotations

import triton
import triton.language as tl

_UNSPECIALIZED = ["rows", "row_stride", "last", "copies", "multiprocessors"]


@triton.jit
def _segments(context_lens, row, rows, row_stride, last, SPLIT: tl.constexpr, POOL: tl.constexpr):
    """kv splits of the requests in `row`, 0 beyond the batch; a length is pooled first, and is then at least 1."""
    here = row < rows
    length = tl.load(context_lens + row.to(tl.int64) * row_stride + last, mask=here, other=0).to(tl.int64)
    if POOL > 1:
        length = tl.where(here, tl.maximum(length // POOL, 1), 0)
    return (length + (SPLIT - 1)) // SPLIT


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def schedule_kernel(
    context_lens,
    out,
    rows,
    row_stride,
    last,
    copies,
    multiprocessors,
    SPLIT: tl.constexpr,
    TAIL: tl.constexpr,
    RUNS: tl.constexpr,
    POOL: tl.constexpr,
    LANES: tl.constexpr,
    CUTS: tl.constexpr,
):
    """Grid: ceil((multiprocessors + 1) / CUTS). `last`: offset of the column that counts in a row of `context_lens`.

    `copies`: how often the work of a request repeats, as atoms laid one after the other (row.x is then the atom), or
    as the tokens of a run (RUNS; row.x is then its first token).
    """
    lane = tl.arange(0, LANES)
    lane_sum = tl.zeros((LANES,), tl.int64)
    for start in range(0, rows, LANES):
        lane_sum += _segments(context_lens, start + lane, rows, row_stride, last, SPLIT, POOL)
    total = tl.sum(lane_sum, axis=0) * copies

    sm = tl.program_id(0) * CUTS + tl.arange(0, CUTS)
    each = total // multiprocessors
    left_over = total % multiprocessors
    if TAIL:
        extra = tl.maximum(sm - (multiprocessors - left_over), 0)
    else:
        extra = tl.minimum(sm, left_over)
    cut = sm * each + extra
    first_cut = tl.min(cut, axis=0)
    last_cut = tl.max(cut, axis=0)

    # Of each cut: its request (`rows` if it lies past the end), and the segments before that request and with it.
    request = tl.zeros((CUTS,), tl.int32)
    before = tl.zeros((CUTS,), tl.int64)
    until = tl.zeros((CUTS,), tl.int64)
    base = tl.zeros((), tl.int64)
    for start in range(0, rows, LANES):
        segments = _segments(context_lens, start + lane, rows, row_stride, last, SPLIT, POOL)
        top = base + tl.sum(segments, axis=0)
        passed = top * copies <= cut
        request = tl.where(passed, tl.minimum(start + LANES, rows), request)
        before = tl.where(passed, top, before)
        if (top * copies > first_cut) & (base * copies <= last_cut):
            upto = base + tl.cumsum(segments, axis=0)
            behind = upto[None, :] * copies <= cut[:, None]
            inside = (cut >= base * copies) & (cut < top * copies)
            request = tl.where(inside, start + tl.sum(behind.to(tl.int32), axis=1), request)
            before = tl.where(inside, tl.max(tl.where(behind, upto[None, :], base), axis=1), before)
            until = tl.where(inside, tl.min(tl.where(behind, top, upto[None, :]), axis=1), until)
        base = top

    offset = cut - before * copies
    if RUNS:
        unit = request * copies
        split = offset // copies
    else:
        # Past the end there is no request: any divisor will do.
        segments_here = tl.maximum(until - before, 1)
        unit = request * copies + offset // segments_here
        split = offset % segments_here
    past = request >= rows
    unit = tl.where(past, rows * copies, unit)
    split = tl.where(past, 0, split)
    wanted = sm <= multiprocessors
    tl.store(out + sm * 2, unit.to(tl.int32), mask=wanted)
    tl.store(out + sm * 2 + 1, split.to(tl.int32), mask=wanted)
