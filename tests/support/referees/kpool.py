"""The referee for pools and plans: contract 4 and 5 in plain integers and loops, to check the oracles with.

Where the contract gives a formula, this walks: tokens are written one after the other, a pool closes when its last
token is written, a plan is drawn up by counting. It shares no helper and no table with an oracle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dsa_verify.contract.geometry import Geometry

Expected = dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]
Slots = npt.NDArray[np.integer]

H200_THRESHOLDS = {65536: 30, 98304: 45, 131072: 60, 196608: 80, 262144: 112, 393216: 128}
B200_THRESHOLDS = {32768: 48, 131072: 66, 163840: 99, 196608: 132, 262144: 198, 393216: 231, 524288: 264}


def expected_views(
    mode: str, geometry: Geometry, seq_lens: Sequence[int], requests: Sequence[int], req_to_token: Slots
) -> Expected:
    """`pooled_cache_seqlens_int32` (decode only) and `pooled_real_page_table`, one row per token row (contract 4.1).

    By field name the values, int64 (0 where dead), and which elements are live.
    """
    rows = 1 if mode == "decode" else geometry.draft_tokens
    span = geometry.page_size * geometry.pool_size
    columns = len(range(0, geometry.columns, span))
    table = np.zeros((len(seq_lens) * rows, columns), np.int64)
    live = np.zeros(table.shape, np.bool_)
    for b, length in enumerate(seq_lens):
        cached = length + geometry.draft_tokens if mode == "target_verify" else length
        for i in range(rows):
            for g in range(columns):
                if g * span < cached:
                    table[b * rows + i, g] = int(req_to_token[requests[b], g * span]) // span
                    live[b * rows + i, g] = True
    fields: Expected = {"pooled_real_page_table": (table, live)}
    if mode == "decode":
        fields["pooled_cache_seqlens_int32"] = _all_live([len(_closed(0, s, geometry.pool_size)) for s in seq_lens])
    return fields


def expected_write_plan(
    mode: str,
    geometry: Geometry,
    seq_lens: Sequence[int],
    requests: Sequence[int],
    req_to_token: Slots,
    accept_lens: Sequence[int] | None = None,
    live_requests: Sequence[bool] | None = None,
) -> Expected:
    """The write plan of contract 4.2, as `expected_views`. `live_requests` None: all are.

    ValueError for a length that would start its writes below position 0.
    """
    size, page, n = geometry.pool_size, geometry.page_size, 1 if mode == "decode" else geometry.draft_tokens
    starts = []
    for length in seq_lens:
        starts.append(length - 1 if mode == "decode" else length if mode == "target_verify" else length - n)
        if starts[-1] < 0:
            raise ValueError(f"length {length} starts its {mode} writes at {starts[-1]}")
    table_pages = len(range(0, geometry.columns, page))
    slots = len(range(0, n, size))
    locations, live = np.zeros((len(starts), slots), np.int64), np.zeros((len(starts), slots), np.bool_)
    for b, start in enumerate(starts):
        written = accept_lens[b] if accept_lens is not None and mode == "draft_extend" else n
        closed = _closed(start, start + written, size)
        for p in range(slots):
            pool = start // size + p
            column = min(pool // page * size, table_pages - 1)
            physical = int(req_to_token[requests[b], column * page]) // page
            locations[b, p] = physical // size * page + pool % page
            live[b, p] = pool in closed and (live_requests is None or live_requests[b])
    fields: Expected = {
        "req": _all_live(requests),
        "write_start": _all_live(starts),
        "tail_logical_start": _all_live([_pool_start(start, size) for start in starts]),
        "write_loc": (locations, live),
    }
    if mode != "decode":
        lengths = [start + i + 1 for start in starts for i in range(n)]
        fields["seqlens_per_q"] = _all_live(lengths)
        fields["pool_seqlens_per_q"] = _all_live([len(_closed(0, length, size)) for length in lengths])
    if mode == "draft_extend":
        assert accept_lens is not None
        fields["effective_n_per_batch"] = _all_live(accept_lens)
    return fields


def expected_extend_writes(
    geometry: Geometry,
    seq_lens: Sequence[int],
    extend_lens: Sequence[int],
    requests: Sequence[int],
    real_page_table: Slots,
    ranks: int = 1,
) -> dict[str, list[int]]:
    """Pools closed and tails left by an extend chunk, by writing its tokens one after the other (contract 4.3)."""
    size, page = geometry.pool_size, geometry.page_size
    names = ("req", "id", "chunk_src", "n_from_tail", "tail_logical_base", "write_loc", "owner_rank")
    pools: list[tuple[int, ...]] = []
    tails: list[tuple[int, ...]] = []
    token = 0
    for b, length in enumerate(seq_lens):
        start = length - extend_lens[b]
        open_pool: list[tuple[int, int]] = []  # (position, index in the chunk) of its tokens that came with the chunk
        for position in range(start, length):
            open_pool.append((position, token))
            token += 1
            if position % size == size - 1:
                pool = position // size
                location = int(real_page_table[b, pool // page * size]) // size * page + pool % page
                earlier = size - len(open_pool)
                pools.append((requests[b], pool, open_pool[0][1], earlier, pool * size, location, len(pools) % ranks))
                open_pool = []
        if open_pool:
            tails.append((requests[b], open_pool[0][0], open_pool[0][1], len(open_pool)))
    plan = {f"pool_{name}": [row[i] for row in pools] for i, name in enumerate(names)}
    for i, name in enumerate(("req", "dst_logical_start", "chunk_src", "n_write")):
        plan[f"tail_{name}"] = [row[i] for row in tails]
    return plan


def expected_extend_gather(
    geometry: Geometry,
    seq_lens: Sequence[int],
    extend_lens: Sequence[int],
    requests: Sequence[int],
    real_page_table: Slots,
) -> dict[str, list[int]]:
    """Where the pooled keys of each token row lie in the concatenation of all pages (contract 4.3)."""
    size, page = geometry.pool_size, geometry.page_size
    pages: list[int] = []
    plan: dict[str, list[int]] = {"ks": [], "ke": [], "pooled_seq_lens_expanded": []}
    rows: list[int] = []
    for b, length in enumerate(seq_lens):
        first_key = len(pages) * page
        p = 0
        while p * page < len(_closed(0, length, size)):  # a page is gathered if it holds a closed pool
            pages.append(int(real_page_table[b, p * size]) // size)
            p += 1
        for position in range(length - extend_lens[b], length):
            visible = len(_closed(0, position + 1, size))
            plan["ks"].append(first_key)
            plan["ke"].append(min(first_key + visible, len(pages) * page))
            plan["pooled_seq_lens_expanded"].append(visible)
            rows.append(requests[b])
    plan["ragged_concat_page_table"] = pages
    plan["ragged_paged_page_table_row_index"] = rows
    plan["gather_rows"] = [len(pages) * page]
    return plan


def expected_topk_plan(
    lengths: Sequence[int],
    thresholds: dict[int, int],
    max_clusters: int,
    *,
    floor: int = 32768,
    static_threshold: int = -1,
) -> list[tuple[int, int]] | None:
    """Header and listed rows, ascending, or None where no plan is written (contract 5). `thresholds`: T to cap."""
    if max_clusters == 0 or len(lengths) <= max_clusters or len(lengths) > 512:
        return None
    chosen = max(thresholds)
    for threshold in sorted(thresholds, reverse=True):
        if len([length for length in lengths if length > threshold]) > thresholds[threshold]:
            break
        chosen = threshold
    if static_threshold >= 0:
        chosen = static_threshold
    chosen = max(chosen, floor)
    listed = [(row, length) for row, length in enumerate(lengths) if length > chosen]
    return [(chosen, len(listed)), *listed]


def _closed(begin: int, end: int, size: int) -> range:
    """The pools whose last token is at a position in [begin, end): those that its tokens close."""
    first = begin
    while first < end and first % size != size - 1:
        first += 1
    last = end - 1
    while last >= first and last % size != size - 1:
        last -= 1
    return range(first // size, last // size + 1) if first <= last else range(0)


def _pool_start(position: int, size: int) -> int:
    while position % size:
        position -= 1
    return position


def _all_live(values: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    array = np.array(list(values), np.int64)
    return array, np.ones(array.shape, np.bool_)
