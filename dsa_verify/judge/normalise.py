"""This module brings an output that has more than one right form into one form, so that the judge can compare bits.

A top-k plan lists its rows in whatever order the device's atomics gave, and leaves the rest of its buffer as it was
(contract 5). The judge is shown a copy with the listed rows ascending and `UNUSED` behind them. Of a float result that
may differ in its last bits it is shown a copy in which what is close enough has become what it must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from dsa_verify.buffers.region import LOUD_WORD
from dsa_verify.contract.layout import Compare, Layout

UNUSED: Final = -1
_LAST: Final = (1 << 31) - 1


class SortedItems:
    """Holds in `copy`, int32 [rows + 1, 2], what `source` (of that shape) listed at the last `update`, by row."""

    def __init__(self, source: torch.Tensor):
        self._source = source
        self.copy = torch.full_like(source, UNUSED, memory_format=torch.contiguous_format)
        self._ordinals = torch.arange(len(source) - 1, device=source.device)

    def update(self) -> None:
        """Reads `source`, whatever it holds; asynchronous and capturable."""
        head, items = self._source[:1], self._source[1:]
        listed = self._ordinals < head[0, 1]
        order = torch.argsort(torch.where(listed, items[:, 0], _LAST), stable=True)
        self.copy[:1].copy_(head)
        self.copy[1:].copy_(torch.where(listed[order].unsqueeze(1), items[order], UNUSED))


class WithinTolerance:
    """Holds in `copy`, float32 like `got`, the bits of `want` wherever `got` is near enough, its own elsewhere.

    Near enough: |got - want| <= bound * max(|want|, floor). Zeros and infinities must be the same, NaN is never right,
    and neither is the loud poison, which as a float is next to nothing.
    """

    def __init__(self, got: torch.Tensor, want: torch.Tensor, bound: float, floor: float):
        self._got, self._want, self._bound, self._floor = got, want, bound, floor
        self.copy = torch.empty_like(got, memory_format=torch.contiguous_format)

    def update(self) -> None:
        """Reads `got` and `want`; asynchronous and capturable."""
        got, want = self._got.double(), self._want.double()
        near = (got - want).abs() <= self._bound * want.abs().clamp(min=self._floor)
        near &= torch.isfinite(want) & (want != 0) & (self._got.view(torch.int32) != LOUD_WORD)
        self.copy.copy_(torch.where(near | (got == want), self._want, self._got))


def normalisers(
    layout: Layout, got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]
) -> dict[str, SortedItems | WithinTolerance]:
    """Return by field what brings it into one form before it is compared."""
    found: dict[str, SortedItems | WithinTolerance] = {}
    for field in layout:
        if field.compare is Compare.ITEMS:
            found[field.name] = SortedItems(got[field.name])
        elif field.compare is Compare.CLOSE:
            found[field.name] = WithinTolerance(got[field.name], want[field.name], field.bound, field.floor)
    return found
