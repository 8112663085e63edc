"""Bits: two tensors are compared bit by bit on their device, and nothing waits for the result.

NaN equals NaN if its bits are the same, and 0.0 is not -0.0: what a graph computes must be what eager work computes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK_ELEMENTS: Final = 1 << 24  # of a checksum, which needs two int64 for each
ODD: Final = 0x9E3779B97F4A7C15 - (1 << 64)


class Differing(NamedTuple):
    """How two tensors differ: how many elements, the flat index of the first one, and its bits in both."""

    differ: int
    first: int
    got: int
    want: int


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as integers of the size of its elements; a complex number of 16 bytes is two of them."""
    tensor = tensor.detach()
    if tensor.element_size() == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(WORDS[tensor.element_size()])


def differing(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return int64 [4] on the device, the numbers of a `Differing`, for two tensors of one shape, dtype and device."""
    mine, other = as_bits(got).reshape(-1), as_bits(want).reshape(-1)
    if not mine.numel():
        return torch.zeros(4, dtype=torch.int64, device=got.device)
    unequal = mine != other
    first = unequal.to(torch.uint8).argmax().reshape(1)
    # `x[first]` would read the index on the host.
    numbers = [unequal.sum().reshape(1), first, mine.index_select(0, first), other.index_select(0, first)]
    return torch.cat([each.to(torch.int64) for each in numbers])


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return int64 [1] on the device, which a change of any single element changes, and a change of several unless by
    chance (about 1 in 2**64)."""
    bits = as_bits(tensor).reshape(-1)
    total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK_ELEMENTS):
        chunk = bits[start : start + CHUNK_ELEMENTS].to(torch.int64)
        # An odd factor maps no difference to zero.
        factors = torch.arange(start, start + chunk.numel(), device=tensor.device).mul_(ODD).bitwise_or_(1)
        total += chunk.mul(factors).sum()
    return total


def value_of(bits: int, dtype: torch.dtype) -> bool | int | float | complex:
    """Return the value that an element of `dtype` with these `bits` (a sign-extended word) has."""
    if dtype == torch.complex128:
        return bits  # only half of it is known
    word = torch.tensor([bits], dtype=torch.int64)
    size = dtype.itemsize
    value: bool | int | float | complex = word.view(torch.uint8)[:size].view(dtype)[0].item()
    return value


def shown(found: Differing, dtype: torch.dtype) -> tuple[str, str]:
    """Return what the first differing element is in both, as values; as bits where those read the same."""
    got, want = repr(value_of(found.got, dtype)), repr(value_of(found.want, dtype))
    if got != want:
        return got, want
    mask = (1 << 8 * min(dtype.itemsize, 8)) - 1
    return f"{found.got & mask:#x}", f"{found.want & mask:#x}"


def unravel(index: int, shape: tuple[int, ...]) -> list[int]:
    """Return the indices, one a dimension, of the element with the flat `index`."""
    at: list[int] = []
    for size in reversed(shape):
        index, here = divmod(index, size)
        at.append(here)
    return at[::-1]
