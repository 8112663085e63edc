"""RegionTable: the regions as a table on the device, and the two Triton kernels that walk it, judge and poison.

A tile is TILE_WORDS consecutive words of one region in row-major order; one program sees to one tile. The table
holds addresses, so a launch (and a graph that captured it) stays valid as long as the buffers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl

from dsa_verify.buffers.region import LOUD_WORD, Kind, Region
from dsa_verify.contract.layout import Dead

TILE_WORDS: Final = 2048
_COLUMNS: Final = 21


class RegionTable:
    """The table holds `regions` and their tiles, uploaded once."""

    def __init__(self, regions: Sequence[Region], device: torch.device):
        rows = [_describe(region) for region in regions]
        self._kept = list(regions)  # the table holds bare addresses: keep what they point to
        self._regions = torch.tensor(rows, dtype=torch.int64).view(-1, _COLUMNS).to(device)
        self._tiles = tiles_of([region.got.numel() for region in regions], device)
        self._device = device

    def judge(
        self,
        round_index: torch.Tensor,
        differing: torch.Tensor,
        compared: torch.Tensor,
        ring: torch.Tensor,
        phase: int,
    ) -> None:
        """Compare all regions, adding to `differing`, `compared` (int64 [regions]) and `ring` (see judge.py)."""
        if len(self._tiles):
            _judge_kernel[(len(self._tiles),)](
                self._regions,
                self._tiles,
                round_index,
                differing,
                compared,
                ring,
                phase,
                COLUMNS=_COLUMNS,
                RING=ring.shape[1],
                RING_COLUMNS=ring.shape[2],
                TILE=TILE_WORDS,
            )

    def poison(self, round_index: torch.Tensor, kind: torch.Tensor) -> None:
        """Overwrite all regions with this round's poison `kind` (index into POISONS)."""
        if len(self._tiles):
            _poison_kernel[(len(self._tiles),)](
                self._regions, self._tiles, round_index, kind, COLUMNS=_COLUMNS, LOUD=LOUD_WORD, TILE=TILE_WORDS
            )


def tiles_of(words: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return int32 [tiles, 2]: which entry of a table each tile is of, and which of its tiles; `words`: by entry."""
    counts = [-(-count // TILE_WORDS) for count in words]
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    ordinal = np.concatenate([np.arange(count, dtype=np.int32) for count in counts] or [np.zeros(0, np.int32)])
    return torch.from_numpy(np.stack([owner, ordinal], 1).copy()).to(device)


def _describe(region: Region) -> list[int]:
    def address(tensor: torch.Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    row = [
        address(region.got),
        region.got.shape[0],
        region.got.shape[1],
        region.got.stride(0),
        address(region.want),
        0 if region.want is None else region.want.stride(0),
        int(region.want_per_request),
        address(region.row_request),
        address(region.live_bound),
        region.column_step,
        address(region.live_rows),
        region.live_rows_extra,
        region.words_per_element,
        int(region.dead is Dead.PAD or region.want is None),
        region.constant,
        int(region.kind is Kind.FIELD),
        region.low,
        min(max(region.high - region.low, 1), 0x7FFFFFFF),
        region.column_start,
        region.kept_rows,
        region.got.stride(1),
    ]
    return row + [0] * (_COLUMNS - len(row))


@triton.jit
def tile_start(regions, tiles, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Of this program's tile: the entry's number and address, whose third value is the words of a row, and places."""
    program = tl.program_id(0).to(tl.int64)
    region = tl.load(tiles + program * 2).to(tl.int64)
    ordinal = tl.load(tiles + program * 2 + 1).to(tl.int64)
    entry = regions + region * COLUMNS
    words = tl.load(entry + 2)
    first = ordinal * TILE
    # 64-bit once a tile, 32-bit a word: a region may have more than 2**31 words, a row may not.
    row0 = first // words
    offset = (first - row0 * words).to(tl.int32) + tl.arange(0, TILE)
    row = row0 + (offset // words.to(tl.int32)).to(tl.int64)
    word = offset % words.to(tl.int32)
    return region, entry, row, word


@triton.jit
def _judge_kernel(
    regions,
    tiles,
    round_index,
    differing,
    compared,
    ring,
    phase,
    COLUMNS: tl.constexpr,
    RING: tl.constexpr,
    RING_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    region, entry, row, word = tile_start(regions, tiles, COLUMNS, TILE)
    got_base = tl.load(entry).to(tl.pointer_type(tl.int32))
    rows = tl.load(entry + 1)
    got_stride, got_step = tl.load(entry + 3), tl.load(entry + 20).to(tl.int32)
    want_address = tl.load(entry + 4)
    want_stride = tl.load(entry + 5)
    want_per_request = tl.load(entry + 6)
    row_request_address = tl.load(entry + 7)
    live_tokens_address = tl.load(entry + 8)
    column_step = tl.load(entry + 9)
    live_rows_address = tl.load(entry + 10)
    words_per_element = tl.load(entry + 12)
    check_dead = tl.load(entry + 13)
    constant = tl.load(entry + 14).to(tl.int32)

    inside = row < rows
    # "+ row * 0": the interpreter mistypes a mask made of a block and a scalar.
    live = inside & (want_address + row * 0 != 0)
    if live_rows_address != 0:
        live_rows = tl.load(live_rows_address.to(tl.pointer_type(tl.int32))) + tl.load(entry + 11)
        live = live & (row < live_rows)
    request = row
    if row_request_address != 0:
        request = tl.load(row_request_address.to(tl.pointer_type(tl.int32)) + row, mask=live, other=0).to(tl.int64)
    if live_tokens_address != 0:
        bound = tl.load(live_tokens_address.to(tl.pointer_type(tl.int32)) + request, mask=live, other=0)
        column = word // words_per_element.to(tl.int32)
        live = live & (tl.load(entry + 18) + column.to(tl.int64) * column_step < bound)
    checked = live
    if check_dead != 0:
        checked = inside
    # Most tiles of a wide table lie beyond the live columns: leave before touching the table itself.
    if tl.max(checked.to(tl.int32), axis=0) > 0:
        want_row = tl.where(want_per_request != 0, request, row)
        want_base = want_address.to(tl.pointer_type(tl.int32))
        want = tl.load(want_base + want_row * want_stride + word, mask=live, other=0)
        want = tl.where(live, want, constant)
        got = tl.load(got_base + row * got_stride + word * got_step, mask=checked, other=0)
        wrong = checked & (got != want)
        if tl.load(entry + 15) != 0:
            tl.atomic_add(compared + region, tl.sum(checked.to(tl.int64), axis=0) // words_per_element)
        count = tl.sum(wrong.to(tl.int32), axis=0)
        if count > 0:
            start = tl.atomic_add(differing + region, count.to(tl.int64))
            slot = start + tl.cumsum(wrong.to(tl.int32), axis=0) - 1
            keep = wrong & (slot < RING)
            place = ring + (region * RING + slot) * RING_COLUMNS
            now = tl.load(round_index).to(tl.int32)
            tl.store(place, now, mask=keep)
            tl.store(place + 1, phase, mask=keep)
            tl.store(place + 2, row.to(tl.int32), mask=keep)
            tl.store(place + 3, word, mask=keep)
            tl.store(place + 4, got, mask=keep)
            tl.store(place + 5, want, mask=keep)


@triton.jit
def _poison_kernel(
    regions,
    tiles,
    round_index,
    kind,
    COLUMNS: tl.constexpr,
    LOUD: tl.constexpr,
    TILE: tl.constexpr,
):
    _region, entry, row, word = tile_start(regions, tiles, COLUMNS, TILE)
    base = tl.load(entry).to(tl.pointer_type(tl.int32))
    rows = tl.load(entry + 1)
    stride, step = tl.load(entry + 3), tl.load(entry + 20).to(tl.int32)
    words_per_element = tl.load(entry + 12).to(tl.int32)
    constant = tl.load(entry + 14).to(tl.int32)
    is_field = tl.load(entry + 15)
    now = tl.load(round_index)
    poison = tl.load(kind)

    # The numbers are those of poison.py: LOUD 0, PLAUSIBLE 1, STALE 2, and its hash.
    mixed = (row * 0x2C1B3C6D + word.to(tl.int64) * 0x297A2D39 + now * 0x1B56C4E9) & 0x7FFFFFFF
    plausible = tl.load(entry + 16) + (mixed ^ (mixed >> 15)) % tl.load(entry + 17)
    # The high word of a small non-negative 64-bit value is zero.
    plausible = tl.where(word % words_per_element == 1, 0, plausible)
    loud = tl.full((TILE,), LOUD, tl.int32)
    value = tl.where(poison == 0, loud, plausible.to(tl.int32))
    value = tl.where(is_field != 0, value, constant)
    if (is_field == 0) | (poison != 2):
        tl.store(base + row * stride + word * step, value, mask=(row < rows) & (row >= tl.load(entry + 19)))


KERNELS: tuple[Any, ...] = (_judge_kernel, _poison_kernel)
