"""Copies of a nested object: tensors with equal content, strides and overlaps, in memory of their own.

Such memory can have guards, bytes on both sides that nobody may write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from dsa_verify.nested.parts import map_tensors, tensors_in

ALIGNMENT_BYTES: Final = 512  # what an allocator of a device gives; copies lie as their originals do
GUARD_BYTES: Final = 4096
GUARD_BYTE: Final = 0xC7


def copy_nested(value: Any) -> Any:
    """Return a copy of `value` with copied tensors, made on the current stream; nothing waits for it.

    Tensors that overlap do so in the copy, too. Only the bytes that they reach are copied, not the whole memory that
    they are views of.
    """
    memory = Copies([each for each in tensors_in(value).values() if each.layout is torch.strided])
    return map_tensors(value, memory.of)


class Copies:
    """Copies of the memory of some tensors, taken when it is made. `guarded`: each stretch of it has guards. `device`:
    where they lie; None: where the tensors do."""

    @torch.no_grad()
    def __init__(
        self, tensors: Sequence[torch.Tensor], guarded: bool = False, device: torch.device | None = None
    ) -> None:
        self._device = device
        self._guard_bytes = GUARD_BYTES if guarded else 0
        self._spans: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
        stretches: dict[int, list[tuple[int, int]]] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
            stretches.setdefault(storage._cdata, []).append(span_of(tensor))
        for key, found in stretches.items():
            self._spans[key] = [
                (start, stop, self._clone(storages[key], start, stop)) for start, stop in _merged(found)
            ]

    @torch.no_grad()
    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of `tensor`, which must be one of those given."""
        if tensor.layout is not torch.strided:
            return tensor.detach().clone()
        begin, end = span_of(tensor)
        for start, stop, memory in self._spans[tensor.untyped_storage()._cdata]:
            if start <= begin and end <= stop:
                offset = (begin - start + self._guard_bytes) // tensor.element_size()
                return _over(memory.untyped_storage(), tensor, offset)
        raise KeyError("the tensor is none of those that were copied")

    def guards(self) -> list[torch.Tensor]:
        """Return the guards, uint8 [GUARD_BYTES], each of which is full of GUARD_BYTE as long as nobody writes it."""
        size = self._guard_bytes
        memories = [memory for spans in self._spans.values() for _, _, memory in spans]
        return [part for memory in memories for part in (memory[:size], memory[memory.numel() - size :]) if size]

    def _clone(self, storage: torch.UntypedStorage, start: int, stop: int) -> torch.Tensor:
        bytes_ = torch.empty(0, dtype=torch.uint8, device=storage.device)
        found = bytes_.set_(storage, start, (max(min(stop, storage.nbytes()) - start, 0),), (1,))
        device = self._device or storage.device
        if not self._guard_bytes:
            return found.to(device, copy=True)
        memory = torch.full((stop - start + 2 * self._guard_bytes,), GUARD_BYTE, dtype=torch.uint8, device=device)
        memory[self._guard_bytes : self._guard_bytes + found.numel()].copy_(found)
        return memory


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that `tensor` reaches: the first, and the one behind the last."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.numel():
        return begin, begin
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return begin, begin + elements * tensor.element_size()


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, stop in sorted(spans):
        start = begin - begin % ALIGNMENT_BYTES
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def _over(storage: torch.UntypedStorage, like: torch.Tensor, offset: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, offset, like.size(), like.stride())
