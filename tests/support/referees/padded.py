"""The referee for padded replay: contract 7.1 and 7.2 in plain integers and loops, to check the oracle with.

Where the contract gives a formula, this walks: groups are counted token by token, windows are collected one position
after the other. It shares no helper with the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dsa_verify.contract.geometry import Geometry

Table = npt.NDArray[np.integer]


def expected_padded(
    geometry: Geometry,
    seq_lens: Sequence[int],
    requests: Sequence[int],
    out_cache_loc: Sequence[int],
    req_to_token: Table,
    full_to_swa: Sequence[int],
    replay_floors: Sequence[int] | None = None,
) -> dict[str, npt.NDArray[np.int64]]:
    """Every field by name, int64, all elements live. `seq_lens` and `requests` hold one entry a batch row and
    `out_cache_loc` one a token row, pad rows included; so does `replay_floors`, or there is one floor for all.
    ValueError for an unknown mode."""
    rows = []
    for b, length in enumerate(seq_lens):
        floor = geometry.replay_floor if replay_floors is None else replay_floors[b]
        for casual in _casual_lengths(geometry, length):
            rows.append(_row(geometry, b, casual, seq_lens, requests, out_cache_loc, req_to_token, full_to_swa, floor))
    for row, location in zip(rows, out_cache_loc, strict=True):
        row["raw_out_loc"] = location
        _add_write_locations(geometry, row, location)
    return {name: np.array([row[name] for row in rows], np.int64) for name in rows[0]}


def _casual_lengths(geometry: Geometry, length: int) -> list[int]:
    n = geometry.draft_tokens
    if geometry.padded_mode == "decode":
        return [length]
    if geometry.padded_mode == "verify":
        return list(range(length + 1, length + n + 1))
    if geometry.padded_mode == "draft_block":
        return list(range(length + 1, length + n))
    if geometry.padded_mode == "draft_extend":
        return list(range(length - n + 1, length + 1))
    raise ValueError(f"padded_mode {geometry.padded_mode!r} is unknown")


def _row(
    geometry: Geometry,
    b: int,
    casual: int,
    seq_lens: Sequence[int],
    requests: Sequence[int],
    out_cache_loc: Sequence[int],
    req_to_token: Table,
    full_to_swa: Sequence[int],
    floor: int,
) -> dict[str, object]:
    slots = req_to_token[requests[b]]
    placeholder = geometry.padded_mode.startswith("draft")
    covered = geometry.page_size if placeholder else geometry.columns
    pages = [int(slots[start]) // geometry.page_size for start in range(0, covered, geometry.page_size)]
    if geometry.padded_mode == "draft_block":
        gamma = geometry.draft_tokens - 1
        drafted = out_cache_loc[b * gamma : (b + 1) * gamma]
        swa, length, width = _block(geometry, seq_lens[b], slots, drafted, full_to_swa, floor)
    else:
        swa, length, width = _window(geometry, casual - 1, slots, full_to_swa, floor)
    row: dict[str, object] = {
        "page_table": pages,
        "seq_lens_casual": casual,
        "positions_casual": casual - 1,
        "swa_page_indices": _fill(geometry, swa, width),
        "swa_topk_lengths": length,
    }
    _add_compressed(geometry, row, casual, pages)
    return row


def _window(
    geometry: Geometry, position: int, slots: npt.NDArray[np.integer], full_to_swa: Sequence[int], floor: int
) -> tuple[list[int], int, int]:
    """(indices newest first, length, width before alignment)."""
    found: list[int] = []
    while position >= floor and len(found) < geometry.window:
        found.append(int(full_to_swa[int(slots[position])]))
        position -= 1
    # One entry a position, so the length that a consumer reads is their number; it cannot be negative.
    return found, len(found), geometry.window


def _block(
    geometry: Geometry,
    prefix: int,
    slots: npt.NDArray[np.integer],
    drafted: Sequence[int],
    full_to_swa: Sequence[int],
    floor: int,
) -> tuple[list[int], int, int]:
    """(indices oldest first, length, width before alignment)."""
    before: list[int] = []
    position = prefix - 1
    while position >= floor and len(before) < geometry.window:
        before.insert(0, int(full_to_swa[int(slots[position])]))
        position -= 1
    found = before + [int(full_to_swa[slot]) for slot in drafted]
    return found, len(found), geometry.window + len(drafted)


def _add_compressed(geometry: Geometry, row: dict[str, object], casual: int, pages: Sequence[int]) -> None:
    sparse, dense = _finished_groups(casual, geometry.sparse_ratio), _finished_groups(casual, geometry.dense_ratio)
    row["c4_len_raw"], row["c4_len_clamped"] = sparse, sparse or 1
    row["c4_sparse_lengths"] = min(sparse or 1, geometry.topk)
    row["c4_sparse_indices"] = _fill(geometry, [], geometry.topk)
    row["c128_len_raw"], row["c128_len_clamped"] = dense, dense or 1
    entries = _entries(geometry, pages, geometry.dense_ratio)
    row["c128_page_indices"] = _fill(geometry, entries[:dense], len(entries))
    for ratio in (1, 2) if geometry.low_ratios else ():
        length = _finished_groups(casual, ratio) or 1
        row[f"c{ratio}_len_clamped"] = length
        chosen = min(length, geometry.topk)
        row[f"c{ratio}_sparse_lengths"] = chosen
        row[f"c{ratio}_sparse_indices"] = _fill(geometry, [], geometry.topk)
        entries = _entries(geometry, pages, ratio)[:chosen]
        row[f"c{ratio}_full_indices"] = _fill(geometry, entries, geometry.topk)
        row[f"c{ratio}_full_raw_indices"] = _fill(geometry, list(range(len(entries))), geometry.topk)


def _add_write_locations(geometry: Geometry, row: dict[str, object], location: int) -> None:
    casual = row["seq_lens_casual"]
    assert isinstance(casual, int)
    ratios = [("c4", geometry.sparse_ratio, 0), ("c128", geometry.dense_ratio, 0)]
    if geometry.low_ratios:
        ratios += [("c1", 1, -1), ("c2", 2, -1)]
    for name, ratio, unfinished in ratios:
        row[f"{name}_out_loc"] = location // ratio if casual % ratio == 0 else unfinished


def _finished_groups(tokens: int, ratio: int) -> int:
    """How many groups the last tokens of which are among the first `tokens`; none of a length that is not positive."""
    count = 0
    for token in range(tokens):
        if token % ratio == ratio - 1:
            count += 1
    return count


def _entries(geometry: Geometry, pages: Sequence[int], ratio: int) -> list[int]:
    """The compressed entries of `pages`, in the order of their positions."""
    per_page = geometry.page_size // ratio
    return [page * per_page + at for page in pages for at in range(per_page)]


def _fill(geometry: Geometry, values: Sequence[int], width: int) -> list[int]:
    """`values`, then -1 up to `width` and on to the next multiple of the alignment."""
    filled = list(values)
    while len(filled) < width or len(filled) % geometry.index_align:
        filled.append(-1)
    return filled
