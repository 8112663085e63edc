"""The referee: every field of contract 1.1 to 1.3 in plain Python integers and loops, to check the oracles with.

Written from the contract, sharing no helper and no formula with an oracle; slow, and meant to be read beside the
page. It says of each element both its value and whether a consumer may read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dsa_verify.contract.geometry import Geometry

Expected = dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]


def expected(
    system: str,
    geometry: Geometry,
    seq_lens: Sequence[int],
    requests: Sequence[int],
    extend_lens: Sequence[int] | None,
    req_to_token: npt.NDArray[np.integer],
    bucket: int,
) -> Expected:
    """By field name the values, int64 in the subject's shape (0 where dead), and which elements are live.

    `seq_lens`, `requests`, `extend_lens` hold `bucket` entries, pad rows included; `extend_lens` None means N for
    each request, and it counts in draft_extend only. `req_to_token`: [request rows, token columns]. Contract 1.1 to
    1.3. ValueError for another system.
    """
    rows = _token_rows(system, geometry, bucket, extend_lens)
    capacity = bucket if system == "decode" else bucket * geometry.draft_tokens

    cache, visible = [], []
    for length in seq_lens:
        cache.append(length + geometry.draft_tokens if system == "target_verify" else length)
    for request, i, owned in rows:
        length = seq_lens[request]
        if system == "decode":
            visible.append(length)
        elif system == "target_verify":
            visible.append(length + i + 1)
        else:
            visible.append(max(length - owned + i + 1, 0))
    selected = [_dsa_length(length, geometry) for length in visible]

    fields: Expected = {
        "cache_seqlens_int32": _vector(cache, bucket),
        "cu_seqlens_q": _vector(range(capacity + 1), capacity + 1),
        "cu_seqlens_k": _vector(_running_sum(cache), bucket + 1),
        "dsa_seqlens_expanded": _vector(visible, capacity),
        "dsa_cache_seqlens_int32": _vector(selected, capacity),
        "dsa_cu_seqlens_q": _vector(range(capacity + 1), capacity + 1),
        "dsa_cu_seqlens_k": _vector(_running_sum(selected), capacity + 1),
    }
    owners = [request for request, _, _ in rows]
    # A table row is live up to the whole length of its request, whatever the row itself may see (contract 1.2).
    arguments = (geometry.columns, owners, cache, requests, req_to_token, capacity)
    if geometry.wide_table:
        fields["page_table_1"] = _table(1, *arguments)
    fields["real_page_table"] = _table(geometry.page_size, *arguments)
    fields["paged_mqa_ctx_lens_2d"] = _context_lengths(system, geometry, cache, visible, capacity)
    return fields


def _token_rows(
    system: str, geometry: Geometry, bucket: int, extend_lens: Sequence[int] | None
) -> list[tuple[int, int, int]]:
    """(request, position in the request, rows of the request) of each token row, in order."""
    if system == "decode":
        counts: Sequence[int] = [1] * bucket
    elif system == "target_verify" or (system == "draft_extend" and extend_lens is None):
        counts = [geometry.draft_tokens] * bucket
    elif system == "draft_extend" and extend_lens is not None:
        counts = extend_lens
    else:
        raise ValueError(f"system {system!r} is not decode, target_verify or draft_extend")
    return [(request, i, counts[request]) for request in range(bucket) for i in range(counts[request])]


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


def _vector(values: Sequence[int], elements: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """`values` as the live head of an array of `elements`."""
    array, live = np.zeros(elements, np.int64), np.zeros(elements, np.bool_)
    for i, value in enumerate(values):
        array[i], live[i] = value, True
    return array, live


def _table(
    step: int,
    width: int,
    owners: Sequence[int],
    live_tokens: Sequence[int],
    requests: Sequence[int],
    req_to_token: npt.NDArray[np.integer],
    capacity: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """R[req, step * j] // step for each token row, live where step * j is below the request's live tokens."""
    columns = (width + step - 1) // step
    array, live = np.zeros((capacity, columns), np.int64), np.zeros((capacity, columns), np.bool_)
    for row, owner in enumerate(owners):
        slots = req_to_token[requests[owner], :width].tolist()
        for j in range(columns):
            if step * j < live_tokens[owner]:
                array[row, j], live[row, j] = slots[step * j] // step, True
    return array, live


def _context_lengths(
    system: str, geometry: Geometry, cache: Sequence[int], visible: Sequence[int], capacity: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """[bucket, N] of whole lengths in verify on architecture 100 with N >= 2, else the rows' own as a column."""
    n = geometry.draft_tokens
    if system == "target_verify" and geometry.architecture == 100 and n >= 2:
        return np.array([[length] * n for length in cache], np.int64), np.ones((len(cache), n), np.bool_)
    array, live = _vector(visible, capacity)
    return array.reshape(-1, 1), live.reshape(-1, 1)
