"""InputMemory: the inputs that a subject is given, in the form asked for, with guards around each and in its gaps.

A gap holds a legal value: a subject that takes elements for adjacent reads it, and must be wrong rather than lost. What
lies before a far table holds the one below it. No stride of a strided input is a multiple of another input's, so that
whoever takes one for another is wrong, too.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

import torch

from dsa_verify.buffers.arena import GUARD_BYTES, GUARD_WORD, Guard
from dsa_verify.contract.geometry import FAR

_OFFSET: Final = 1  # elements before an offset view: less than the 16 bytes that compilers hope for
_ROW_SLACK: Final = 64  # columns that a strided row of a matrix has beyond its width
_ITEM_SLACK: Final = 1  # and each last row of what has more dimensions, of which there are many
# Elements before a far table, which its reader finds there whose offset has wrapped; and where its last row begins.
FAR_ELEMENTS: Final = 1 << 31
_LEAD_COLUMNS: Final = 1 << 20


def far_stride(rows: int) -> int:
    """Elements from one of `rows` rows of a far table to the next."""
    return -(-FAR_ELEMENTS // max(rows - 1, 1))


@dataclasses.dataclass(frozen=True, slots=True)
class _Lie:
    """Rows of `width` elements lie `step` elements from one to the next, with room for `slots` of them."""

    rows: int
    width: int
    step: int = 1
    slots: int = 0

    @property
    def row_stride(self) -> int:
        return max(self.slots, self.width) * self.step

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the strides of a tensor of `shape`, whose last dimension, or elements of a list, these rows are."""
        if len(shape) == 1:
            return (self.row_stride,)
        above = [self.row_stride * math.prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)]
        return (*above, self.step)


class InputMemory:
    """Zeroed tensors on `device`, guarded."""

    def __init__(self, device: torch.device):
        self._device = device
        self._gaps: list[tuple[torch.Tensor, int]] = []
        self._strides: list[int] = []
        self.guards: list[Guard] = []

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        form: str,
        legal: int,
        *,
        columns_apart: bool = False,
    ) -> torch.Tensor:
        """Return a tensor in the form of the input view `form`.

        A strided one has a gap of `legal` behind each element of a list and behind each last row of anything else; with
        `columns_apart` also between the elements of a row, as in `storage[::2, ::2]`.
        """
        lie, lead = self._lie(shape, form, columns_apart), 0
        edge = GUARD_BYTES // dtype.itemsize
        if form == FAR and len(shape) == 2:
            slots = max(far_stride(shape[0]), shape[1] + _ROW_SLACK)
            lie, lead = dataclasses.replace(lie, slots=slots), FAR_ELEMENTS
        edge_end = edge + (_OFFSET if form == "offset" else 0)
        start = edge_end + lead
        stop = start + lie.rows * lie.row_stride
        memory = torch.zeros(stop + edge, dtype=dtype, device=self._device)
        if lead:
            self._fill(Guard(words=memory[edge_end:start].view(-1, _LEAD_COLUMNS), after=None, before=name), legal - 1)
        for part, after, before in ((memory[:edge_end], None, name), (memory[stop:], name, None)):
            words = part.view(torch.int32)
            self.guards.append(Guard(words=words.fill_(GUARD_WORD), after=after, before=before))
        whole = memory[start:stop].view(lie.rows, -1, lie.step)
        if lie.step > 1:
            between = whole.view(-1, lie.step)[:, 1:]
            self._fill(Guard(words=between, after=name, before=name, gaps_per_row=whole.shape[1]), legal)
        if lie.slots > lie.width:
            self._fill(Guard(words=whole[:, lie.width :, 0], after=name, before=name), legal)
        return memory.as_strided(shape, lie.strides(shape), start)

    def _lie(self, shape: tuple[int, ...], form: str, columns_apart: bool) -> _Lie:
        """Return how the rows lie; those of a list are its elements."""
        width = 1 if len(shape) == 1 else shape[-1]
        lie = _Lie(math.prod(shape) // width, width)
        if form != "strided":
            return lie
        slack = (_ITEM_SLACK, _ROW_SLACK)[len(shape) == 2]
        lie = dataclasses.replace(lie, step=self._new_stride(2) if columns_apart else 1, slots=width + slack)
        others = [stride for stride in self._strides if stride != lie.step]
        while any(_are_multiples(lie.row_stride, stride) for stride in others):
            lie = dataclasses.replace(lie, slots=lie.slots + 1)
        self._strides.append(lie.row_stride)
        return lie

    def _new_stride(self, least: int) -> int:
        """Return the smallest from `least` on of which no stride so far is a multiple or a factor."""
        while any(_are_multiples(least, stride) for stride in self._strides):
            least += 1
        self._strides.append(least)
        return least

    def _fill(self, guard: Guard, legal: int) -> None:
        """Guard a gap, [rows, elements] given as its words, that holds `legal`."""
        part = guard.words
        self._gaps.append((part, legal))
        want = torch.full((part.shape[1],), legal, dtype=part.dtype, device=self._device).view(torch.int32)
        words = part.view(torch.int32)
        self.guards.append(dataclasses.replace(guard, words=words, want=want.expand(len(words), -1)))

    def reset_gaps(self) -> None:
        """Asynchronous and capturable."""
        for gap, legal in self._gaps:
            gap.fill_(legal)


def _are_multiples(one: int, other: int) -> bool:
    return one % other == 0 or other % one == 0
