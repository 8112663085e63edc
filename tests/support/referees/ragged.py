"""The referee of ragged verify: contract 9 in plain integers and loops, to check the oracle and the host rules with.

Where the contract divides, this deals: leftover tokens are handed out one after the other. It shares no helper and no
formula with an oracle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dsa_verify.contract.geometry import Geometry

Expected = dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]


def expected_ragged(
    geometry: Geometry,
    seq_lens: Sequence[int],
    requests: Sequence[int],
    verify_lens: Sequence[int],
    req_to_token: npt.NDArray[np.integer],
    slots: int,
    tokens: int,
) -> Expected:
    """By field name the values, int64 in the subject's shape (0 where dead), and which elements are live.

    `seq_lens`, `requests` hold `slots` entries, pad rows included; `verify_lens` the live ones only. `req_to_token`:
    [request rows, token columns]. `tokens` is G. ValueError as of `padded`.
    """
    owned, total = padded(verify_lens, slots, tokens)
    assert total == tokens, "without a cap every token row is owned"
    cache = [length + rows for length, rows in zip(seq_lens, owned, strict=True)]
    owners, visible = [], []
    for slot, rows in enumerate(owned):
        for i in range(rows):
            owners.append(slot)
            visible.append(seq_lens[slot] + i + 1)
    selected = [_dsa_length(length, geometry) for length in visible]
    starts = _running_sum(owned)
    vectors = {
        "padded_verify_lens": owned,
        "extend_start_loc": starts[:-1],
        "qo_indptr": starts,
        "cache_seqlens_int32": cache,
        "cu_seqlens_q": range(tokens + 1),
        "cu_seqlens_k": _running_sum(cache),
        "dsa_seqlens_expanded": visible,
        "dsa_cache_seqlens_int32": selected,
        "dsa_cu_seqlens_q": range(tokens + 1),
        "dsa_cu_seqlens_k": _running_sum(selected),
    }
    fields = {name: _all_live(np.array(values, np.int64)) for name, values in vectors.items()}
    fields["paged_mqa_ctx_lens_2d"] = _all_live(np.array(visible, np.int64).reshape(-1, 1))
    table_rows = [(requests[slot], cache[slot]) for slot in owners]
    if geometry.wide_table:
        fields["page_table_1"] = _table(1, geometry.columns, table_rows, req_to_token)
    fields["real_page_table"] = _table(geometry.page_size, geometry.columns, table_rows, req_to_token)
    return fields


def padded(verify_lens: Sequence[int], slots: int, tokens: int, cap: int | None = None) -> tuple[list[int], int | None]:
    """Token rows of each slot, and their total; None where a cap leaves tokens to nobody.

    ValueError for what a host constructor refuses: a length below 1, too many requests, too many tokens.
    """
    if min(verify_lens, default=1) < 1 or len(verify_lens) > slots or sum(verify_lens) > tokens:
        raise ValueError(f"{list(verify_lens)} in {slots} slots and {tokens} tokens")
    owned = [0] * slots
    for slot, length in enumerate(verify_lens):
        owned[slot] = length
    takers = list(range(len(verify_lens), slots)) or [slots - 1]
    for token in range(tokens - sum(verify_lens)):
        owned[takers[token % len(takers)]] += 1
    for slot in range(slots):
        if cap is not None and owned[slot] > cap:
            owned[slot] = cap
    return owned, tokens if sum(owned) == tokens else None


def captured(tokens: int, slots: int, draft_tokens: int) -> list[int]:
    """Verify lengths at capture: the tokens dealt to the slots. ValueError for too few or too many of them."""
    lens = [0] * slots
    for token in range(tokens if slots else 0):
        lens[token % slots] += 1
    if not lens or min(lens) < 1 or max(lens) > draft_tokens:
        raise ValueError(f"{tokens} tokens in {slots} slots of {draft_tokens}")
    return lens


def graph_of(grid: Sequence[int], total: int) -> int:
    """The next captured token count. ValueError when `total` is above the largest."""
    for tokens in sorted(grid):
        if tokens >= total:
            return tokens
    raise ValueError(f"{total} tokens in a grid up to {max(grid, default=0)}")


def _dsa_length(length: int, geometry: Geometry) -> int:
    """Contract 0.4."""
    if geometry.pool_size <= 1:
        return min(length, geometry.topk)
    pooled = length // geometry.pool_size * geometry.pool_size
    return min(pooled, geometry.topk) + (length - pooled)


def _running_sum(lengths: Sequence[int]) -> list[int]:
    """[0, cumsum], each sum wrapped into int32 (contract 1.7)."""
    total, sums = 0, [0]
    for length in lengths:
        total += length
        sums.append((total + 2**31) % 2**32 - 2**31)
    return sums


def _all_live(values: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    return values, np.ones(values.shape, np.bool_)


def _table(
    step: int, width: int, rows: Sequence[tuple[int, int]], req_to_token: npt.NDArray[np.integer]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """R[req, step * j] // step of each (request, live tokens) in `rows`, live where step * j is below the latter."""
    columns = (width + step - 1) // step
    array, live = np.zeros((len(rows), columns), np.int64), np.zeros((len(rows), columns), np.bool_)
    for row, (request, tokens) in enumerate(rows):
        for j in range(columns):
            if step * j < tokens:
                array[row, j], live[row, j] = req_to_token[request, step * j] // step, True
    return array, live
