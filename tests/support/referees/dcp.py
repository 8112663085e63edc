"""The referee of decode context parallelism: contract 8 in plain Python integers, floats and loops.

It shares no helper and no formula with the oracle it checks: lengths are counted position by position, pages are those
of the rows that a rank holds, the prefix gather is acted out with lists, and `dealt` holds `place` itself to account.
Slow, and meant to be read beside the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PAD = None


def place(slot: int, size: int, block: int) -> tuple[int, int]:
    """(owner, local row) of a virtual slot: blocks of `block` slots are dealt to the ranks in turn."""
    turn, rank = divmod(slot // block, size)
    return rank, turn * block + slot % block


def dealt(slots: int, size: int, block: int) -> list[list[int]]:
    """For each rank the first `slots` virtual slots that it owns, in the order of its rows; no formula at all."""
    owned: list[list[int]] = [[] for _ in range(size)]
    rank, in_block = 0, 0
    for slot in range(slots):
        owned[rank].append(slot)
        in_block += 1
        if in_block == block:
            rank, in_block = (rank + 1) % size, 0
    return owned


def local_length(length: int, rank: int, size: int, block: int, start: int = 0) -> int:
    return sum(place(position, size, block)[0] == rank for position in range(start, start + length))


def write(
    pools: list[dict[int, list[int]]], locations: Sequence[int], rows: Sequence[Sequence[int]], block: int
) -> None:
    """`pools`: for each rank what its local rows hold."""
    for slot, row in zip(locations, rows, strict=True):
        if slot > 0:
            rank, local = place(slot, len(pools), block)
            pools[rank][local] = list(row)


def selected_slots(table_row: Sequence[int], positions: Sequence[int]) -> list[int]:
    return [table_row[position] if position >= 0 else -1 for position in positions]


def localized(selection: Sequence[int], rank: int, size: int, block: int) -> list[int]:
    result = []
    for slot in selection:
        owner, local = place(slot, size, block) if slot >= 0 else (None, -1)
        result.append(local if owner == rank else -1)
    return result


def packed(selection: Sequence[int], rank: int, size: int, block: int) -> tuple[list[int], int]:
    found = [local for local in localized(selection, rank, size, block) if local >= 0]
    return found + [-1] * (len(selection) - len(found)), len(found)


def page_table(slots: Sequence[int], length: int, pages: int, page: int, rank: int, size: int, block: int) -> list[int]:
    """The physical pages that hold the rank's tokens of a request, in order; `slots` by position. At most `pages`."""
    rows = [place(slots[p], size, block)[1] for p in range(length) if place(p, size, block)[0] == rank]
    return [row // page for row in rows[::page]][:pages]


def merge(outs: Sequence[Sequence[float]], lses: Sequence[float], log_base: str) -> tuple[list[float], float]:
    """One row of one head: `outs` [D][dim], `lses` [D]."""
    base = {"2": 2.0, "e": math.e}[log_base]
    there = [(out, lse) for out, lse in zip(outs, lses, strict=True) if math.isfinite(lse)]
    if not there:
        return [0.0] * len(outs[0]), -math.inf
    top = max(lse for _, lse in there)
    weights = [math.pow(base, lse - top) for _, lse in there]
    total = math.fsum(weights)
    out = [math.fsum(w * o[i] for w, (o, _) in zip(weights, there, strict=True)) / total for i in range(len(outs[0]))]
    return out, math.log(total) / math.log(base) + top


def gather(starts: Sequence[int], lengths: Sequence[int], size: int) -> list[list[tuple[int, int] | None]]:
    """What each rank sends: (request, position), or PAD where it has nothing at a turn in which another rank has."""
    sent: list[list[tuple[int, int] | None]] = []
    for rank in range(size):
        rows: list[tuple[int, int] | None] = []
        for request, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            position = start - start % size + rank
            while position - rank < start + length:
                rows.append((request, position) if start <= position < start + length else PAD)
                position += size
        sent.append(rows)
    return sent


def kv_indices(prefix_lens: Sequence[int], extend_lens: Sequence[int]) -> list[int]:
    """Where the buffer [all prefixes, all extends] holds each token of [prefix, extend] of each request."""
    requests = range(len(prefix_lens))
    buffer = [("prefix", b, i) for b in requests for i in range(prefix_lens[b])]
    buffer += [("extend", b, i) for b in requests for i in range(extend_lens[b])]
    row_of = {token: row for row, token in enumerate(buffer)}
    wanted = []
    for b in requests:
        wanted += [("prefix", b, i) for i in range(prefix_lens[b])] + [("extend", b, i) for i in range(extend_lens[b])]
    return [row_of[token] for token in wanted]
