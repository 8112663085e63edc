"""The schedule referee: every tile laid out and dealt to the SMs one by one, to check the schedule oracle with.

Plain Python integers and loops, written from contract 3.1 to 3.3, sharing no formula with the oracle; slow, and meant
to be read beside the page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dsa_verify.contract.schedule_variants import Placement, ScheduleVariant, Unit

Tile = tuple[int, int]


def expected(
    variant: ScheduleVariant,
    context_lens: Sequence[int] | Sequence[Sequence[int]],
    multiprocessors: int,
    indices: Sequence[int] | None = None,
) -> npt.NDArray[np.int32]:
    """The rows, int32 [multiprocessors + 1, 2], for lengths [rows] or [rows][next_n]; V4c has as many rows for four
    tokens a request as for half the multiprocessors."""
    lens = [length[-1] if isinstance(length, Sequence) else length for length in context_lens]
    next_n = len(context_lens[0]) if isinstance(context_lens[0], Sequence) else 1
    work, end = lay_out(variant, lens, next_n, indices)
    rows, done = [], 0
    slots = multiprocessors // 2 if variant.name == "V4c" and next_n == 4 else multiprocessors
    for share in _deal(variant.placement, len(work), slots):
        rows.append(work[done] if done < len(work) else (end, 0))
        done += share
    return np.array([*rows, (end, 0)], np.int32)


def _deal(placement: Placement, total: int, multiprocessors: int) -> list[int]:
    """How many pieces of work each SM gets: one to each in turn, the last and incomplete turn from one end."""
    shares = [0] * multiprocessors
    while total >= multiprocessors:
        shares = [share + 1 for share in shares]
        total -= multiprocessors
    for i in range(total):
        shares[i if placement is Placement.LEAD else multiprocessors - 1 - i] += 1
    return shares


def lay_out(
    variant: ScheduleVariant, lens: Sequence[int], next_n: int, indices: Sequence[int] | None
) -> tuple[list[Tile], int]:
    """All work in consumer order, named by its tile, and the unit one past the end.

    A tile of a token run is as many pieces of work as it costs, so that a cut inside it falls on its beginning.
    """
    if variant.unit is Unit.TOKEN_RUN:
        runs = [(j * next_n, next_n, length) for j, length in enumerate(lens)]
        if indices is not None:
            runs = [(start, tokens, lens[start + tokens - 1]) for start, tokens in _groups(indices, len(indices))]
        return _lay_out_runs(variant, runs), len(lens) * next_n
    if indices is not None:
        pairs = [(start, lens[start + tokens - 1]) for start, tokens in _groups(indices, 2)]
        return [tile for start, length in pairs for tile in _splits(variant, start, length)], len(lens)
    work, unit = [], 0
    for length in lens:
        for _ in range(_atoms(variant, next_n)):
            work += _splits(variant, unit, length)
            unit += 1
    return work, unit


def _lay_out_runs(variant: ScheduleVariant, runs: Sequence[tuple[int, int, int]]) -> list[Tile]:
    work = []
    for start, tokens, length in runs:
        # V6 falls back to the plain cost when a sum passes 2**32, far beyond what can be laid out here.
        cost = 2 * 4 * -(-tokens // 4) + tokens if variant.name == "V6" else tokens
        for tile in _splits(variant, start, length):
            work += [tile] * cost
    return work


def _splits(variant: ScheduleVariant, unit: int, length: int) -> list[Tile]:
    size = {"V6": 384, "V120": 128, "tiny": 16, "tiny_runs": 16}.get(variant.name, 256)
    tiles: list[Tile] = []
    while len(tiles) * size < length:
        tiles.append((unit, len(tiles)))
    return tiles


def _groups(indices: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """(first token, tokens) of each stretch of equal neighbours, none longer than `limit`."""
    groups: list[tuple[int, int]] = []
    for token, index in enumerate(indices):
        if groups and indices[groups[-1][0]] == index and groups[-1][1] < limit:
            groups[-1] = (groups[-1][0], groups[-1][1] + 1)
        else:
            groups.append((token, 1))
    return groups


def _atoms(variant: ScheduleVariant, next_n: int) -> int:
    if variant.unit is Unit.REQUEST or next_n == 1:
        return 1
    if variant.name == "V3":
        return next_n // 2 if next_n % 2 == 0 else next_n
    return (next_n + 1) // 2
