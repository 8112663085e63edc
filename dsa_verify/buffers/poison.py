"""Poison: overwrites everything a subject is about to write, and everything it must not, before each replay.

Three poisons, one a round: loud (a word no valid value equals), plausible (in range but wrong: other lengths, other
pages) and stale (leave what the previous round left). Guards and rows of wider buckets are always reset, so that a
hit there belongs to this round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from dsa_verify.buffers.region import LOUD_WORD, Kind, Region
from dsa_verify.buffers.region_kernels import RegionTable
from dsa_verify.contract.round import POISONS

LOUD, PLAUSIBLE, STALE = (POISONS.index(name) for name in ("loud", "plausible", "stale"))
HASH_ROW: Final = 0x2C1B3C6D
HASH_COLUMN: Final = 0x297A2D39
HASH_ROUND: Final = 0x1B56C4E9


class Poison:
    """Poisons `regions`. `round_index` int64 [1], `kind` int32 [1]: this round's number and poison, on the device."""

    def __init__(self, regions: Sequence[Region], device: torch.device, round_index: torch.Tensor, kind: torch.Tensor):
        self._regions = [region for region in regions if region.poisonable]
        self._round_index, self._kind = round_index, kind
        self._table = RegionTable(self._regions, device) if device.type == "cuda" else None

    def launch(self) -> None:
        """Overwrite; asynchronous and capturable on a CUDA device."""
        if self._table is not None:
            self._table.poison(self._round_index, self._kind)
            return
        kind, round_ = int(self._kind), int(self._round_index)
        for region in self._regions:
            if region.kind is not Kind.FIELD:
                region.got.fill_(region.constant)
            elif kind == LOUD:
                region.got[region.kept_rows :].fill_(LOUD_WORD)
            elif kind == PLAUSIBLE:
                region.got[region.kept_rows :].copy_(plausible_words(region, round_)[region.kept_rows :])


def plausible_words(region: Region, round_: int) -> torch.Tensor:
    """Return int32 [rows, words] of in-range values that depend on round, row and column."""
    rows, words = region.got.shape
    row = torch.arange(rows, device=region.got.device, dtype=torch.int64)[:, None]
    column = torch.arange(words, device=region.got.device, dtype=torch.int64)[None, :]
    return _plausible(region, round_, row, column)


def plausible_word(region: Region, round_: int, row: int, column: int) -> int:
    """Return one of `plausible_words`, without making them all."""
    at = (torch.tensor(value, dtype=torch.int64) for value in (row, column))
    return int(_plausible(region, round_, *at))


def _plausible(region: Region, round_: int, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    mixed = (row * HASH_ROW + column * HASH_COLUMN + round_ * HASH_ROUND) & 0x7FFFFFFF
    span = min(max(region.high - region.low, 1), 0x7FFFFFFF)
    values = region.low + (mixed ^ (mixed >> 15)) % span
    if region.words_per_element == 2:
        # The high word of a small non-negative 64-bit value is zero.
        values = torch.where(column % 2 == 0, values, torch.zeros_like(values))
    return values.to(torch.int32)
