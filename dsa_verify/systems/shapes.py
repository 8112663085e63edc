"""Shapes: the batches and draft lengths that the diagnostic matrix captures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dsa_verify.contract.system import Shapes

# Of the published 272-replay diagnostic: what a run has that says only one of them.
BATCHES: Final = (1, 4, 16, 48)
DRAFTS: Final = (2, 4, 6, 8)
# Otherwise so that batches lie across the groups of 64 and blocks of 128 requests that kernels take at once, and rows,
# with those of the second bucket, on the multiples of 32 up to 128 and beside them. 1,032 rows are more than the 1,024
# that a schedule is counted in, and have the indexer (indexer_turns.py).
DECODE_BATCHES: Final = (1, 2, 4, 16, 33, 48, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160)
DRAFT_SHAPES: Final = (
    *((1, 2), (11, 3), (1, 6), (13, 5)),
    *((21, 3), (19, 5), (43, 3), (129, 8)),
    *((65, 2), (16, 4), (16, 6), (4, 8)),
    *((48, 2), (48, 4), (48, 6), (16, 8)),
)


def companion(batch: int) -> int:
    """The second bucket of a configuration: the one it is interleaved with."""
    return 2 if batch == 1 else max(1, batch // 3)


def draft_pairs(batches: Sequence[int] | None, drafts: Sequence[int] | None) -> Sequence[tuple[int, int]]:
    """Return (batch, draft length) of each configuration."""
    if batches or drafts:
        return [(b, n) for b in batches or BATCHES for n in drafts or DRAFTS]
    return DRAFT_SHAPES


def without_drafts(batches: Sequence[int] | None) -> Shapes:
    return [((batch, companion(batch)), {"draft_tokens": 1}) for batch in batches or DECODE_BATCHES]


def with_drafts(batches: Sequence[int] | None, drafts: Sequence[int] | None) -> Shapes:
    return [((batch, companion(batch)), {"draft_tokens": n}) for batch, n in draft_pairs(batches, drafts)]


def both_ends(most: int) -> list[int]:
    """Return `most`, 0, `most` - 1, 1, ... until each of 0 to `most` was there."""
    order: list[int] = []
    for low in range(most // 2 + 1):
        order += [most - low, low]
    return list(dict.fromkeys(order))


def swing(main: int) -> list[tuple[int, int]]:
    """Return (bucket, raw batch): large, small, idle, large over the same buffers."""
    return [(main, main), (main, min(3, main)), (main, 0), (main, main)]
