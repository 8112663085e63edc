"""Arena: the output buffers of all buckets of one side, guarded, poisonable and at addresses that never change; and
InputMemory, which guards the inputs.

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

from dsa_verify.contract import DTYPE_BYTES, Field, Layout
from dsa_verify.geometry import FAR
from dsa_verify.subject import Buffers

GUARD_BYTES: Final = 4096
ALIGNMENT_BYTES: Final = 512
GUARD_WORD: Final = -0x38383839  # int32 of 0xC7C7C7C7: no legal value, and not a poison
_STRIDE: Final = 2  # of a strided input view
_OFFSET: Final = 1  # elements before an offset view: less than the 16 bytes that compilers hope for
_ROW_SLACK: Final = 64  # columns that a strided row has beyond its width
# Elements before a far table, which its reader finds there whose offset has wrapped; and where its last row begins.
FAR_ELEMENTS: Final = 1 << 31
_LEAD_COLUMNS: Final = 1 << 20
TORCH_DTYPES: Final = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """int32 words between two buffers, or [rows, words] behind the rows of one; `after` and `before` name the fields on
    its sides (None at the ends). `want`: int32 [rows, words], what they hold if it is not GUARD_WORD."""

    words: torch.Tensor
    after: str | None
    before: str | None
    want: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Where a tensor lies: what must not change once a graph has captured it."""

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
        """The first thing that differs, in words; empty if nothing does."""
        for name in ("dtype", "shape", "stride", "pointer", "storage"):
            old, new = getattr(self, name), getattr(other, name)
            if old != new:
                shown = (f"{old:#x}", f"{new:#x}") if name in ("pointer", "storage") else (old, new)
                return f"{name} {shown[0]} became {shown[1]}"
        return ""


def no_view(field: Field, tensor: torch.Tensor, owner: torch.Tensor | None) -> str:
    """What tells `tensor`, of the shape of `field`, from a view of `owner` in that shape; empty if nothing does, or if
    `owner` has other elements."""
    if owner is None or owner.numel() != tensor.numel():
        return ""
    if tensor.data_ptr() != owner.data_ptr():
        return f"must share its memory with {field.alias}"
    try:
        view = owner.view(field.shape)
    except RuntimeError:
        return f"must be a view of {field.alias}, whose strides {list(owner.stride())} allow none of this shape"
    # Nobody steps along a dimension of one element.
    steps = [i for i, size in enumerate(field.shape) if size > 1]
    if all(tensor.stride(i) == view.stride(i) for i in steps):
        return ""
    return f"has strides {list(tensor.stride())}, as a view of {field.alias} it must have {list(view.stride())}"


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
        """The buffers of `bucket`, aliases being views (or the very object) of what they alias."""
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

    def beyond(self, bucket: int) -> Mapping[str, torch.Tensor]:
        """By shared field, the rows that belong to wider buckets only; `bucket` must leave them alone."""
        layout = self.layouts[bucket]
        shared = {field.name: self._owned[_key(field, bucket)][field.rows :] for field in layout if field.shared}
        return {name: rows for name, rows in shared.items() if rows.numel()}

    def _tensor(self, place: _Place) -> torch.Tensor:
        field = place.field
        return self._whole(place)[:, : field.shape[-1]] if field.row_gap else self._whole(place).view(field.shape)

    def _whole(self, place: _Place) -> torch.Tensor:
        """All memory of a buffer, as its rows with the gaps behind them."""
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


def far_stride(rows: int) -> int:
    """Elements from one of `rows` rows of a far table to the next."""
    return -(-FAR_ELEMENTS // max(rows - 1, 1))


class InputMemory:
    """Zeroed tensors on `device`, each with guards around it, and in the gaps of a strided one.

    A gap holds a legal value: a subject that takes elements for adjacent reads it, and must be wrong rather than lost.
    What lies before a far table holds the one below it.
    """

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
    """Every buffer once, a shared one at its widest, with a guard before, between and after them."""
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
