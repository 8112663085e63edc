"""One Triton program that builds a top-k v2 plan (contract 5): at most 512 rows fit in one block, so counting,
choosing the threshold and placing the listed rows need neither a second launch nor atomics. Rows come out ascending.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "length_stride", "floor", "static_threshold"])
def topk_plan_kernel(
    lengths,
    table,
    plan,
    rows,
    length_stride,
    floor,
    static_threshold,
    ROW_LANES: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Grid: 1. `table`: int32 [CANDIDATES, 2] of (T, cap), a power of two of them, the unused ones such that the walk
    passes them. `plan`: int32 [rows + 1, 2], contiguous."""
    row = tl.arange(0, ROW_LANES)
    length = tl.load(lengths + row * length_stride, mask=row < rows, other=0)
    candidate = tl.arange(0, CANDIDATES)
    threshold = tl.load(table + 2 * candidate)
    cap = tl.load(table + 2 * candidate + 1)
    longer = tl.sum((length[None, :] > threshold[:, None]).to(tl.int32), axis=1)
    # Walking down stops at the first T that is over its cap; the last one passed before it is the smallest above it.
    largest = tl.max(threshold, axis=0)
    stop = tl.max(tl.where(longer > cap, threshold, -1), axis=0)
    chosen = tl.min(tl.where(threshold > stop, threshold, largest), axis=0)
    chosen = tl.maximum(tl.where(static_threshold >= 0, static_threshold, chosen), floor)

    listed = length > chosen
    place = tl.cumsum(listed.to(tl.int32), axis=0)
    tl.store(plan, chosen)
    tl.store(plan + 1, tl.sum(listed.to(tl.int32), axis=0))
    tl.store(plan + 2 * place, row, mask=listed)
    tl.store(plan + 2 * place + 1, length, mask=listed)
