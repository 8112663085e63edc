"""Poison for any callable: of what it is to write, of what it allocates eagerly, and of memory that was freed.

There are two poisons. The graph's side has the first; eager work has the second, and now and then the first, so that
what nobody has written differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsa_verify.graphs.emulated import ALLOCATIONS
from dsa_verify.nested.bits import as_bits

POISON_BYTES: Final = (0x9E, 0x5B)  # as float32: -1.7e-20 and 6.2e16
# Bytes of a tensor, and how many of them. An allocator gives the smallest hole that fits, so small ones come first.
CHURN: Final = ((64, 32), (512, 32), (4096, 8), (1 << 16, 4), (1 << 20, 4))


@torch.no_grad()
def fill(tensor: torch.Tensor, poison: int) -> None:
    """Overwrite every element of `tensor` with poison number `poison`."""
    if tensor.dtype == torch.bool:
        tensor.fill_(bool(poison))  # no other byte is a legal bool
        return
    bits = as_bits(tensor)
    word = int.from_bytes(bytes([POISON_BYTES[poison]]) * bits.element_size(), "little")
    signed = bits.dtype != torch.uint8 and word >> (8 * bits.element_size() - 1)
    bits.fill_(word - (1 << 8 * bits.element_size()) if signed else word)


class PoisonedAllocations(TorchDispatchMode):
    """Fills what `torch.empty` and its like return. A kernel's own allocations are not seen."""

    def __init__(self, poison: int) -> None:
        super().__init__()
        self._poison = poison

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "overloadpacket", None) in ALLOCATIONS:
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel():
                    fill(tensor, self._poison)
        return result


@contextmanager
def churned(device: torch.device, poison: int) -> Iterator[None]:
    """Inside, memory that was freed has been handed out again and overwritten, as an engine's other work would do."""
    held = [
        torch.full((size,), POISON_BYTES[poison], dtype=torch.uint8, device=device)
        for size, count in CHURN
        for _ in range(count)
    ]
    yield
    del held
