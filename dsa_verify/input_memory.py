"""InputMemory: the inputs that a subject is given, in the form asked for, with guards around each and in its gaps.

A gap holds a legal value: a subject that takes elements for adjacent reads it, and must be wrong rather than lost. What
lies before a far table holds the one below it.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from dsa_verify.arena import GUARD_BYTES, GUARD_WORD, Guard
from dsa_verify.geometry import FAR

_STRIDE: Final = 2  # of a strided input view
_OFFSET: Final = 1  # elements before an offset view: less than the 16 bytes that compilers hope for
_ROW_SLACK: Final = 64  # columns that a strided row has beyond its width
# Elements before a far table, which its reader finds there whose offset has wrapped; and where its last row begins.
FAR_ELEMENTS: Final = 1 << 31
_LEAD_COLUMNS: Final = 1 << 20


def far_stride(rows: int) -> int:
    """Elements from one of `rows` rows of a far table to the next."""
    return -(-FAR_ELEMENTS // max(rows - 1, 1))


class InputMemory:
    """Zeroed tensors on `device`, guarded."""

    def __init__(self, device: torch.device):
        self._device = device
        self._gaps: list[tuple[torch.Tensor, int]] = []
        self.guards: list[Guard] = []

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, form: str, legal: int) -> torch.Tensor:
        """In the form of the input view `form`. Of a matrix the rows are whole, with a gap of `legal` behind each where
        it is strided; what has more dimensions is always plain."""
        rows, width, gap, edge, lead = shape[0], math.prod(shape[1:]), 0, GUARD_BYTES // dtype.itemsize, 0
        if form == "strided" and len(shape) <= 2:
            gap = _STRIDE - 1 if len(shape) == 1 else _ROW_SLACK
        if form == FAR and len(shape) == 2:
            gap, lead = max(far_stride(rows) - width, _ROW_SLACK), FAR_ELEMENTS
        edge_end = edge + (_OFFSET if form == "offset" and len(shape) <= 2 else 0)
        start = edge_end + lead
        stop = start + rows * (width + gap)
        memory = torch.zeros(stop + edge, dtype=dtype, device=self._device)
        if lead:
            self._fill(name, memory[edge_end:start].view(-1, _LEAD_COLUMNS), legal - 1, after=None)
        for part, after, before in ((memory[:edge_end], None, name), (memory[stop:], name, None)):
            words = part.view(torch.int32)
            self.guards.append(Guard(words=words.fill_(GUARD_WORD), after=after, before=before))
        if not gap:
            return memory[start:stop].view(shape)
        whole = memory[start:stop].view(rows, width + gap)
        self._fill(name, whole[:, width:], legal, after=name)
        return whole[:, 0] if len(shape) == 1 else whole[:, :width]

    def _fill(self, name: str, part: torch.Tensor, legal: int, *, after: str | None) -> None:
        """Guard the rows of `part`, which hold `legal`."""
        self._gaps.append((part, legal))
        want = torch.full((part.shape[1],), legal, dtype=part.dtype, device=self._device).view(torch.int32)
        words = part.view(torch.int32)
        self.guards.append(Guard(words=words, after=after, before=name, want=want.expand(len(words), -1)))

    def reset_gaps(self) -> None:
        """Asynchronous and capturable."""
        for gap, legal in self._gaps:
            gap.fill_(legal)
