"""Place: where a tensor lay and how it was shaped when a graph captured it, and what has changed since.

The place keeps no tensor alive: it knows the memory by a weak reference, so that it can tell a tensor that was kept
from a new one that the allocator has put at the same address. No sentence prints an address.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

REMEDY: Final = "write into the captured tensor, or capture again"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """What a graph has of a tensor. `memory`: None if the tensor has no element."""

    pointer: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    memory: StorageWeakRef | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        return cls(
            pointer=tensor.data_ptr(),
            shape=tensor.size(),
            stride=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            memory=StorageWeakRef(tensor.untyped_storage()) if tensor.numel() else None,
        )

    @property
    def freed(self) -> bool:
        """Return whether the captured memory was given back, whatever lies there now."""
        return self.memory is not None and bool(self.memory.expired())

    def change_to(self, tensor: torch.Tensor, storages: bool = True) -> tuple[str, str] | None:
        """Return the kind of the first thing that differs and its sentence, whose subject is the tensor; None if it is
        what was captured. `storages`: whether a new allocation at the same address is a difference."""
        return self._other_form(tensor) or self._other_memory(tensor, storages)

    def _other_form(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        if tensor.dtype != self.dtype:
            return "dtype", f"is {_short(tensor.dtype)}, and was captured as {_short(self.dtype)}"
        if tensor.size() != self.shape:
            return "shape", f"has shape {list(tensor.size())}, and was captured with {list(self.shape)}"
        if tensor.stride() != self.stride:
            now, then = list(tensor.stride()), list(self.stride)
            return "stride", f"has stride {now}, and was captured with {then}, with which the graph still reads it"
        return None

    def _other_memory(self, tensor: torch.Tensor, storages: bool) -> tuple[str, str] | None:
        form = describe(tensor)
        if tensor.device != self.device:
            return "device", f"is on {tensor.device}, and was captured on {self.device}"
        if tensor.data_ptr() != self.pointer:
            return self._moved(tensor, form)
        if storages and self.freed:
            text = f"is a new tensor ({form}) that happens to lie where the captured one lay, which was freed"
            return "freed", f"{text}; {REMEDY}"
        return None

    def _moved(self, tensor: torch.Tensor, form: str) -> tuple[str, str]:
        if self.freed:
            return (
                "freed",
                f"is another tensor ({form}); the captured one was freed, and the graph still uses its memory",
            )
        if self.memory is not None and tensor.untyped_storage()._cdata == self.memory.cdata:
            by = tensor.data_ptr() - self.pointer
            text = f"begins {abs(by)} bytes {'behind' if by > 0 else 'before'} the place that was captured"
            return "address", f"{text}, in the same memory; {REMEDY}"
        return "address", f"is another tensor ({form}) than the captured one, which the graph still uses; {REMEDY}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(tensor: torch.Tensor | Place) -> str:
    """Return dtype and shape of a tensor for a sentence."""
    return f"{_short(tensor.dtype)} {list(tensor.shape)}"
