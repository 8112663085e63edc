"""The fused copy: decode lengths, prefix sums and tables of one source into one or three destinations (contract 2.2).

Program 0 copies the lengths. Every other program takes a group of rows (one, on a GPU) and a share of their columns,
reads each live block of the source once and stores it to all destinations. Columns beyond the live length are neither
read nor written, and row offsets are 64-bit because rows * width passes 2**31 (contract 2.2).
"""

from __future__ import annotations

import triton
import triton.language as tl

_UNSPECIALIZED = ["batch", "columns", "pages", "source_wide", "source_real", "target_wide", "target_real"]


@triton.jit
def _put(first, second, third, at, values, mask, THREE: tl.constexpr):
    tl.store(first + at, values, mask=mask)
    if THREE:
        tl.store(second + at, values, mask=mask)
        tl.store(third + at, values, mask=mask)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def copy_kernel(
    cache,
    cu,
    dsa_cache,
    dsa_cu,
    wide,
    real,
    cache_0,
    cu_0,
    dsa_cache_0,
    dsa_cu_0,
    wide_0,
    real_0,
    cache_1,
    cu_1,
    dsa_cache_1,
    dsa_cu_1,
    wide_1,
    real_1,
    cache_2,
    cu_2,
    dsa_cache_2,
    dsa_cu_2,
    wide_2,
    real_2,
    batch,
    columns,
    pages,
    source_wide,
    source_real,
    target_wide,
    target_real,
    THREE: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: 1 + workers. Without THREE only destination 0 is written. Row strides are those of source and targets."""
    program = tl.program_id(0)
    if program == 0:
        lane = tl.arange(0, LANES)
        for start in range(0, batch, LANES):
            row = start + lane
            here = row < batch
            _put(cache_0, cache_1, cache_2, row, tl.load(cache + row, mask=here), here, THREE)
            _put(dsa_cache_0, dsa_cache_1, dsa_cache_2, row, tl.load(dsa_cache + row, mask=here), here, THREE)
            # Element 0 of a sum is the 0 of the capture and never copied.
            after = row + 1
            _put(cu_0, cu_1, cu_2, after, tl.load(cu + after, mask=here), here, THREE)
            _put(dsa_cu_0, dsa_cu_1, dsa_cu_2, after, tl.load(dsa_cu + after, mask=here), here, THREE)
    else:
        workers = tl.num_programs(0) - 1
        for task in range(program - 1, tl.cdiv(batch, GROUP) * SHARES, workers):
            row = task // SHARES * GROUP + tl.arange(0, GROUP)
            here = row < batch
            live = tl.minimum(tl.load(cache + row, mask=here, other=0), columns)
            longest = tl.max(live, axis=0)
            bound = live[:, None]
            row_64 = row.to(tl.int64)[:, None]
            for start in range((task % SHARES) * BLOCK, longest, SHARES * BLOCK):
                if WIDE:
                    column = start + tl.arange(0, BLOCK)[None, :]
                    known = column < bound
                    slots = tl.load(wide + row_64 * source_wide + column, mask=known)
                    _put(wide_0, wide_1, wide_2, row_64 * target_wide + column, slots, known, THREE)
                if PAGE > 1:
                    page = start // PAGE + tl.arange(0, BLOCK // PAGE)[None, :]
                    known = (page * PAGE < bound) & (page < pages)
                    ids = tl.load(real + row_64 * source_real + page, mask=known)
                    _put(real_0, real_1, real_2, row_64 * target_real + page, ids, known, THREE)
