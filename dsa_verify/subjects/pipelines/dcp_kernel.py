"""Triton launches for decode context parallelism: what one rank does of a step, the ragged prefix and the merge
(contract 8.1 to 8.4, 8.7).

The number of ranks and the interleave block are fixed for a server and compiled in; the rank, the batch, lengths and
strides of rows are not, so that one compilation serves every simulated rank and round. A stride of columns is compiled
in where it is 1, as it mostly is, so that a dense row is read in wide words. Offsets of rows are 64-bit: a row times a
row's width passes 2**31.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _owner(slot, SIZE: tl.constexpr, INTERLEAVE: tl.constexpr):
    return slot // INTERLEAVE % SIZE


@triton.jit
def _local(slot, SIZE: tl.constexpr, INTERLEAVE: tl.constexpr):
    return slot // (SIZE * INTERLEAVE) * INTERLEAVE + slot % INTERLEAVE


@triton.jit(do_not_specialize=["batch", "location_stride", "row_stride", "pool_stride", "words", "rank"])
def write_kernel(
    locations,
    rows,
    pool,
    batch,
    location_stride,
    row_stride,
    word_stride,
    pool_stride,
    words,
    rank,
    SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    LANES: tl.constexpr,
    WORD_LANES: tl.constexpr,
):
    """Grid: the batch in blocks of LANES rows."""
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here = row < batch
    wide = row.to(tl.int64)
    slot = tl.load(locations + wide * location_stride, mask=here, other=0).to(tl.int64)
    # Slot 0 is where pad rows point; it is nobody's.
    mine = here & (slot > 0) & (_owner(slot, SIZE, INTERLEAVE) == rank)
    word = tl.arange(0, WORD_LANES)[None, :]
    stored = mine[:, None] & (word < words)
    values = tl.load(rows + (wide * row_stride)[:, None] + word * word_stride, mask=stored, other=0)
    target = _local(slot, SIZE, INTERLEAVE) * pool_stride
    tl.store(pool + target[:, None] + word, values, mask=stored)


@triton.jit(do_not_specialize=["rows", "columns", "request_stride", "token_stride", "position_stride"])
def select_kernel(
    requests,
    req_to_token,
    positions,
    selected,
    rows,
    columns,
    request_stride,
    token_stride,
    position_stride,
    column_stride,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: the rows in groups of GROUP. The output is dense."""
    row = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    here = row < rows
    column = tl.arange(0, COLUMNS)[None, :]
    inside = here[:, None] & (column < columns)
    wide = row.to(tl.int64)
    request = tl.load(requests + wide * request_stride, mask=here, other=0).to(tl.int64)
    source = positions + (wide * position_stride)[:, None] + column * column_stride
    position = tl.load(source, mask=inside, other=-1)
    chosen = inside & (position >= 0)
    slot = tl.load(req_to_token + (request * token_stride)[:, None] + position, mask=chosen, other=-1)
    tl.store(selected + (wide * columns)[:, None] + column, slot, mask=inside)


@triton.jit(do_not_specialize=["rows", "columns", "selection_stride", "rank"])
def localize_kernel(
    selection,
    positional,
    packed,
    counts,
    rows,
    columns,
    selection_stride,
    column_stride,
    rank,
    SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: the rows in groups of GROUP. Both forms from one read; the outputs are dense."""
    row = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    here = row < rows
    column = tl.arange(0, COLUMNS)[None, :]
    inside = here[:, None] & (column < columns)
    wide = row.to(tl.int64)[:, None]
    slot = tl.load(selection + wide * selection_stride + column * column_stride, mask=inside, other=-1)
    owned = (slot >= 0) & (_owner(slot, SIZE, INTERLEAVE) == rank)
    row_of = tl.where(owned, _local(slot, SIZE, INTERLEAVE), -1)
    tl.store(positional + wide * columns + column, row_of, mask=inside)
    one = owned.to(tl.int32)
    count = tl.sum(one, axis=1)
    tl.store(packed + wide * columns + tl.cumsum(one, axis=1) - 1, row_of, mask=owned)
    tl.store(packed + wide * columns + column, -1, mask=inside & (column >= count[:, None]))
    tl.store(counts + row, count, mask=here)


@triton.jit(
    do_not_specialize=["batch", "pages", "seq_stride", "request_stride", "token_stride", "table_stride", "rank"]
)
def shard_kernel(
    seq_lens,
    requests,
    req_to_token,
    local_lengths,
    page_table,
    batch,
    pages,
    seq_stride,
    request_stride,
    token_stride,
    table_stride,
    rank,
    SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: the batch in groups of GROUP requests. Columns beyond the live ones are left alone."""
    row = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    here = row < batch
    wide = row.to(tl.int64)
    length = tl.load(seq_lens + wide * seq_stride, mask=here, other=0).to(tl.int32)
    in_cycle = length % (SIZE * INTERLEAVE) - rank * INTERLEAVE
    owned = length // (SIZE * INTERLEAVE) * INTERLEAVE + tl.minimum(tl.maximum(in_cycle, 0), INTERLEAVE)
    tl.store(local_lengths + row, owned, mask=here)
    live = tl.minimum((owned + PAGE - 1) // PAGE, pages)
    request = tl.load(requests + wide * request_stride, mask=here, other=0).to(tl.int64)
    source = req_to_token + (request * token_stride)[:, None]
    for begin in range(0, tl.max(live, axis=0), COLUMNS):
        page = begin + tl.arange(0, COLUMNS)[None, :]
        known = page < live[:, None]
        # PAGE is a multiple of the interleave block, so a page begins with a block of this rank's.
        slot = tl.load(source + page * (PAGE * SIZE) + rank * INTERLEAVE, mask=known, other=0)
        tl.store(page_table + (wide * table_stride)[:, None] + page, _local(slot, SIZE, INTERLEAVE) // PAGE, mask=known)


@triton.jit
def _known_lse(partial_lse, at, here):
    """A log-sum-exp of which NaN and +inf mean that there is nothing."""
    nothing = float("-inf")
    value = tl.load(partial_lse + at, mask=here, other=nothing)
    return tl.where((value == value) & (value < float("inf")), value, nothing)


@triton.jit(
    do_not_specialize=[
        "rows",
        "heads",
        "out_rank_stride",
        "out_row_stride",
        "out_head_stride",
        "lse_rank_stride",
        "lse_row_stride",
    ]
)
def merge_kernel(
    partial_out,
    partial_lse,
    merged_out,
    merged_lse,
    rows,
    heads,
    out_rank_stride,
    out_row_stride,
    out_head_stride,
    out_dim_stride,
    lse_rank_stride,
    lse_row_stride,
    lse_head_stride,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BASE_2: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: the rows times heads in groups of GROUP. Ranks are added in their order, so the result is reproducible."""
    item = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    here = item < rows * heads
    row, head = (item // heads).to(tl.int64), item % heads
    lse_at = row * lse_row_stride + head * lse_head_stride
    element = tl.arange(0, DIM)[None, :]
    out_at = (row * out_row_stride + head * out_head_stride)[:, None] + element * out_dim_stride
    known = here[:, None] & (element < DIM)
    top = tl.full((GROUP,), float("-inf"), tl.float32)
    out_step, lse_step = out_rank_stride.to(tl.int64), lse_rank_stride.to(tl.int64)
    for rank in range(SIZE):
        top = tl.maximum(top, _known_lse(partial_lse + rank * lse_step, lse_at, here))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((GROUP,), tl.float32)
    out = tl.zeros((GROUP, DIM), tl.float32)
    for rank in range(SIZE):
        distance = _known_lse(partial_lse + rank * lse_step, lse_at, here) - top
        weight = tl.exp2(distance) if BASE_2 else tl.exp(distance)
        total += weight
        out += weight[:, None] * tl.load(partial_out + rank * out_step + out_at, mask=known, other=0.0)
    # The largest weight is 1, so a total below 1 is 0: no rank has anything.
    divisor = tl.maximum(total, 1.0)
    lse = (tl.log2(divisor) if BASE_2 else tl.log(divisor)) + top
    target = (item.to(tl.int64) * DIM)[:, None] + element
    tl.store(merged_out + target, tl.div_rn(out, tl.broadcast_to(divisor[:, None], (GROUP, DIM))), mask=known)
    tl.store(merged_lse + item, tl.where(total > 0.0, lse, float("-inf")), mask=here)


@triton.jit(do_not_specialize=["request_stride", "token_stride", "words", "rank"])
def pack_prefix_kernel(
    starts,
    lengths,
    offsets,
    requests,
    req_to_token,
    pool,
    send,
    request_stride,
    token_stride,
    words,
    rank,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WORD_LANES: tl.constexpr,
):
    """Grid: the requests. What `rank` owns of each range into its rows of `send`, pad rows as zeros."""
    program = tl.program_id(0).to(tl.int64)
    start, length = tl.load(starts + program), tl.load(lengths + program)
    offset, request = tl.load(offsets + program), tl.load(requests + program * request_stride).to(tl.int64)
    padded = (length + start % SIZE + SIZE - 1) // SIZE
    word = tl.arange(0, WORD_LANES)[None, :]
    for begin in range(0, padded, ROWS):
        i = begin + tl.arange(0, ROWS)
        position = (start // SIZE + i) * SIZE + rank
        mine = (i < padded) & (position >= start) & (position < start + length)
        slot = tl.load(req_to_token + request * token_stride + position, mask=mine, other=0).to(tl.int64)
        source = pool + (slot // SIZE * words)[:, None] + word
        values = tl.load(source, mask=mine[:, None] & (word < words), other=0)
        stored = (i < padded)[:, None] & (word < words)
        tl.store(send + ((offset + i) * words)[:, None] + word, values, mask=stored)


@triton.jit(do_not_specialize=["rank_rows", "words"])
def reorder_kernel(
    starts,
    lengths,
    offsets,
    targets,
    gathered,
    ordered,
    rank_rows,
    words,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WORD_LANES: tl.constexpr,
):
    """Grid: the requests. Rank-major rows to token order, pads left out."""
    program = tl.program_id(0).to(tl.int64)
    start, length = tl.load(starts + program), tl.load(lengths + program)
    offset, target = tl.load(offsets + program), tl.load(targets + program)
    word = tl.arange(0, WORD_LANES)[None, :]
    for begin in range(0, length, ROWS):
        i = begin + tl.arange(0, ROWS)
        position = start + i
        row = position % SIZE * rank_rows.to(tl.int64) + offset + position // SIZE - start // SIZE
        known = (i < length)[:, None] & (word < words)
        values = tl.load(gathered + (row * words)[:, None] + word, mask=known, other=0)
        tl.store(ordered + ((target + i) * words)[:, None] + word, values, mask=known)


@triton.jit(do_not_specialize=["batch"])
def kv_indices_kernel(prefix_ends, extend_ends, indices, batch, COLUMNS: tl.constexpr):
    """Grid: the requests. `prefix_ends`, `extend_ends`: inclusive sums."""
    program = tl.program_id(0).to(tl.int64)
    earlier = program > 0
    prefix_start = tl.load(prefix_ends + program - 1, mask=earlier, other=0)
    extend_start = tl.load(extend_ends + program - 1, mask=earlier, other=0)
    prefix = tl.load(prefix_ends + program) - prefix_start
    count = prefix + tl.load(extend_ends + program) - extend_start
    prefixes = tl.load(prefix_ends + batch - 1)
    for begin in range(0, count, COLUMNS):
        i = begin + tl.arange(0, COLUMNS)
        row = tl.where(i < prefix, prefix_start + i, prefixes + extend_start + i - prefix)
        tl.store(indices + prefix_start + extend_start + i, row, mask=i < count)
