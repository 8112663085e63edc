"""Arena: the output buffers of all buckets of one side, guarded, poisonable and at addresses that never change.

All buffers lie in one slab with a guard between each two, so that a write past a buffer lands in bytes the judge
looks at, whatever allocator the device has. Buffers of shared fields exist once, for the widest bucket, and every
bucket sees their first rows, as engines do; the rows beyond a bucket's own are as forbidden to it as a guard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from dsa_verify.contract.layout import DTYPE_BYTES, Field, Layout
from dsa_verify.contract.subject import Buffers

GUARD_BYTES: Final = 4096
ALIGNMENT_BYTES: Final = 512
GUARD_WORD: Final = -0x38383839  # int32 of 0xC7C7C7C7: no legal value, and not a poison
TORCH_DTYPES: Final = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A guard is int32 words between two buffers, or [rows, words] behind the rows of one; `after` and `before` name
    the fields on its sides (None at the ends). `want`: int32 [rows, words], what they hold if it is not GUARD_WORD.
    `gaps_per_row`: how many of these rows lie in each row of the buffer, one behind each of its elements; 1 behind the
    whole."""

    words: torch.Tensor
    after: str | None
    before: str | None
    want: torch.Tensor | None = None
    gaps_per_row: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """An identity says where a tensor lies, which must not change once a graph has captured it."""

    pointer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Identity:
        return cls(
            pointer=tensor.data_ptr(),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=tensor.dtype,
            storage=tensor.untyped_storage().data_ptr(),
        )

    def change_to(self, other: Identity) -> str:
        """Return the first thing that differs, in words; empty if nothing does."""
        for name in ("dtype", "shape", "stride", "pointer", "storage"):
            old, new = getattr(self, name), getattr(other, name)
            if old != new:
                shown = (f"{old:#x}", f"{new:#x}") if name in ("pointer", "storage") else (old, new)
                return f"{name} {shown[0]} became {shown[1]}"
        return ""


class Arena:
    """Memory for `layouts` (one a bucket) on `device`, every byte of it set to `fill` (an int32 word)."""

    def __init__(self, layouts: Sequence[Layout], device: torch.device, fill: int):
        self.layouts = {layout.bucket: layout for layout in layouts}
        places, size = _place(layouts)
        self._slab = torch.empty(size, dtype=torch.uint8, device=device)
        self.words = self._slab.view(torch.int32)
        self.words.fill_(fill)
        self.guards = self._guards(places, size)
        self._owned = {place.key: self._tensor(place) for place in places}

    def at(self, bucket: int) -> Buffers:
        """Return the buffers of `bucket`, aliases being views (or the very object) of what they alias."""
        layout = self.layouts[bucket]
        tensors: dict[str, torch.Tensor] = {}
        for field in sorted(layout, key=lambda field: field.alias is not None):
            if field.alias is None:
                whole = self._owned[_key(field, bucket)]
                tensors[field.name] = whole[: field.rows] if field.shared else whole
            else:
                source = tensors[field.alias]
                same = tuple(source.shape) == field.shape
                tensors[field.name] = source if same else source.view(field.shape)
        return Buffers(layout, {field.name: tensors[field.name] for field in layout})

    def wider_bucket_rows(self, bucket: int) -> Mapping[str, torch.Tensor]:
        """Return the rows of each shared field that belong to wider buckets only; `bucket` must leave them alone."""
        layout = self.layouts[bucket]
        shared = {field.name: self._owned[_key(field, bucket)][field.rows :] for field in layout if field.shared}
        return {name: rows for name, rows in shared.items() if rows.numel()}

    def _tensor(self, place: _Place) -> torch.Tensor:
        field = place.field
        return self._whole(place)[:, : field.shape[-1]] if field.row_gap else self._whole(place).view(field.shape)

    def _whole(self, place: _Place) -> torch.Tensor:
        """Return all memory of a buffer, as its rows with the gaps behind them."""
        window = self._slab[place.offset : place.offset + place.bytes].view(TORCH_DTYPES[place.field.dtype])
        return window.view(place.field.rows, -1)

    def _guards(self, places: Sequence[_Place], size: int) -> tuple[Guard, ...]:
        guards = []
        start, after = 0, None
        for place in places:
            guards.append(Guard(words=self._window(start, place.offset), after=after, before=place.field.name))
            start, after = place.offset + place.bytes, place.field.name
        guards.append(Guard(words=self._window(start, size), after=after, before=None))
        gaps = [(place.field.name, self._whole(place)[:, place.field.columns :]) for place in places]
        guards += [Guard(words=gap.view(torch.int32), after=name, before=name) for name, gap in gaps if gap.numel()]
        for guard in guards:
            guard.words.fill_(GUARD_WORD)
        return tuple(guards)

    def _window(self, start: int, stop: int) -> torch.Tensor:
        return self.words[start // 4 : stop // 4]


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    key: tuple[str, int]
    field: Field
    offset: int

    @property
    def bytes(self) -> int:
        return (self.field.elements + self.field.rows * self.field.row_gap) * DTYPE_BYTES[self.field.dtype]


def _key(field: Field, bucket: int) -> tuple[str, int]:
    return (field.name, 0 if field.shared else bucket)


def _place(layouts: Sequence[Layout]) -> tuple[list[_Place], int]:
    """Return every buffer once, a shared one at its widest, with a guard before, between and after them."""
    widest: dict[tuple[str, int], Field] = {}
    for layout in layouts:
        for field in layout:
            if field.alias is None:
                key = _key(field, layout.bucket)
                if key not in widest or field.elements > widest[key].elements:
                    widest[key] = field
    places, offset = [], 0
    for key, field in widest.items():
        offset = math.ceil((offset + GUARD_BYTES) / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        place = _Place(key, field, offset)
        places.append(place)
        offset += place.bytes
    return places, offset + GUARD_BYTES
