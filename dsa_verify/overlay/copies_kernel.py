"""CopyTable: the pieces of a grouped copy as a table on the device, and the Triton kernel that walks it.

A tile is TILE_WORDS consecutive words of one destination in row-major order; one program copies one tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

from dsa_verify.buffers.region_kernels import TILE_WORDS, tile_start, tiles_of
from dsa_verify.overlay.piece import Piece

_COLUMNS: Final = 10


class CopyTable:
    """The table holds `pieces` and their tiles, uploaded once. `when`: int32 [1], 0: copy nothing (None: always)."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device, when: torch.Tensor | None):
        self._kept = list(pieces)  # the table holds bare addresses: keep what they point to
        self._when = torch.ones(1, dtype=torch.int32, device=device) if when is None else when
        rows = [_describe(piece) for piece in pieces]
        self._table = torch.tensor(rows, dtype=torch.int64).view(-1, _COLUMNS).to(device)
        self._tiles = tiles_of([piece.to.numel() for piece in pieces], device)

    def launch(self) -> None:
        """Copy all pieces in one launch."""
        if len(self._tiles):
            _copy_kernel[(len(self._tiles),)](self._table, self._tiles, self._when, COLUMNS=_COLUMNS, TILE=TILE_WORDS)


def _describe(piece: Piece) -> list[int]:
    index = piece.index
    return [
        piece.to.data_ptr(),
        piece.to.shape[0],
        piece.to.shape[1],
        piece.to.stride(0),
        piece.source.data_ptr(),
        piece.source.stride(0),
        0 if index is None else index.data_ptr(),
        0 if index is None else index.stride(0),
        0 if index is None else index.element_size(),
        piece.source.shape[0],
    ]


@triton.jit
def _copy_kernel(table, tiles, when, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    if tl.load(when) != 0:
        _number, entry, row, word = tile_start(table, tiles, COLUMNS, TILE)
        inside = row < tl.load(entry + 1)

        source_row = row
        index_address = tl.load(entry + 6)
        index_stride = tl.load(entry + 7)
        index_bytes = tl.load(entry + 8)
        if index_bytes == 4:
            narrow = index_address.to(tl.pointer_type(tl.int32))
            source_row = tl.load(narrow + row * index_stride, mask=inside, other=0).to(tl.int64)
        if index_bytes == 8:
            wide = index_address.to(tl.pointer_type(tl.int64))
            source_row = tl.load(wide + row * index_stride, mask=inside, other=0)
        limit = tl.load(entry + 9)
        source_row = tl.where((source_row >= 0) & (source_row < limit), source_row, 0)

        source = tl.load(entry + 4).to(tl.pointer_type(tl.int32))
        to = tl.load(entry).to(tl.pointer_type(tl.int32))
        value = tl.load(source + source_row * tl.load(entry + 5) + word, mask=inside, other=0)
        tl.store(to + row * tl.load(entry + 3) + word, value, mask=inside)


KERNELS: tuple[Any, ...] = (_copy_kernel,)
