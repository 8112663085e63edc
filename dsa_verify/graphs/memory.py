"""The memory of an emulated graph: its own temporaries, and the buffers of others that it only points to.

A CUDA graph keeps its temporaries in a pool and knows every other buffer by address alone. Here a temporary
is a `Block` of a `Pool`; a foreign buffer is known by a weak reference, so that a graph does not keep it
alive and does not touch it once it is freed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import dlpack

from dsa_verify.base.errors import ReplayError

POISON_BYTE = 0xA5  # what a temporary reads as until the first replay writes it


class Geometry(NamedTuple):
    """A geometry says how a tensor lies in its storage; offset and strides are in elements."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        return cls(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.size()), tuple(tensor.stride()))

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    @property
    def nbytes(self) -> int:
        if 0 in self.size:
            return 0
        steps = zip(self.size, self.stride, strict=True)
        last = self.offset + sum((size - 1) * stride for size, stride in steps)
        return (last + 1) * self.dtype.itemsize


class Block:
    """Bytes of a pool.

    Each tensor made over them has a storage of its own, so that it can be told whether the caller still holds
    its tensor or any view of it, although the graph's alias of the same bytes lives on.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
        self.capture: object = None
        self.caller: StorageWeakRef | None = None

    def tensor(self, geometry: Geometry) -> torch.Tensor:
        alias = dlpack.from_dlpack(self.memory)
        return geometry.over(alias.untyped_storage())

    def lend(self, geometry: Geometry, capture: object) -> torch.Tensor:
        """Return the tensor that the caller of the operation gets; it and its views make the block busy."""
        self.memory.fill_(POISON_BYTE)
        tensor = self.tensor(geometry)
        self.capture = capture
        self.caller = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def is_free_for(self, capture: object) -> bool:
        if self.caller is None:
            return True
        return self.capture is not capture and self.caller.expired()


class Pool:
    """Blocks shared by the captures that are given this pool.

    As in CUDA's private pools, a later capture takes blocks that nobody holds, although an earlier graph
    still writes them. Within one capture no block is used twice.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: list[Block] = []

    def allocate(self, nbytes: int, capture: object) -> Block:
        free = [b for b in self._blocks if b.memory.numel() >= max(nbytes, 1) and b.is_free_for(capture)]
        if free:
            return min(free, key=lambda block: block.memory.numel())
        self._blocks.append(Block(nbytes, self.device))
        return self._blocks[-1]


@dataclass(frozen=True, slots=True)
class Foreign:
    """A storage that was not allocated in the capture; `described` and `user` are for the error message."""

    reference: StorageWeakRef
    address: int
    described: str
    user: str

    def open(self) -> torch.UntypedStorage:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        if storage is not None and storage.data_ptr() == self.address:
            return storage
        fate = "was freed" if storage is None else "was moved to another address"
        raise ReplayError(
            f"a buffer ({self.described}), first used by {self.user}, {fate} since the capture. "
            "Keep every captured buffer alive and in place, or capture again"
        )


class TensorTable:
    """The tensors that the nodes of one graph use, by slot; equal views of one storage share a slot."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._capture = object()  # tells this capture's blocks from those of others
        # Keyed by the address of the storage object, which the weak reference to it keeps from being reused.
        self._blocks: dict[int, Block] = {}
        self._constants: dict[int, torch.UntypedStorage] = {}
        self._foreign: dict[int, Foreign] = {}
        self._slots: dict[tuple[int, Geometry], int] = {}
        self._fixed: list[torch.Tensor | None] = []
        self._views: list[tuple[int, int, Geometry]] = []  # slot, storage, geometry of each foreign tensor

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return a poisoned temporary with the shape, strides and dtype of `like`."""
        geometry = Geometry.of(like)._replace(offset=0)
        block = self._pool.allocate(geometry.nbytes, self._capture)
        tensor = block.lend(geometry, self._capture)
        self._blocks[tensor.untyped_storage()._cdata] = block
        return tensor

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the graph's alias of a temporary of this capture."""
        return self._blocks[tensor.untyped_storage()._cdata].tensor(Geometry.of(tensor))

    def freeze(self, tensor: torch.Tensor) -> None:
        """Treat the storage of `tensor` as a constant: its value now is its value in every replay."""
        storage = tensor.untyped_storage()
        self._constants[storage._cdata] = storage

    def is_frozen(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._constants

    def slot(self, tensor: torch.Tensor, user: str) -> int:
        """Return the slot of `tensor`; `user` names the operation, for the message about a freed buffer."""
        storage, geometry = tensor.untyped_storage(), Geometry.of(tensor)
        key = storage._cdata
        slot = self._slots.setdefault((key, geometry), len(self._fixed))
        if slot < len(self._fixed):
            return slot
        if key in self._blocks:
            self._fixed.append(self.own(tensor))
        elif key in self._constants:
            self._fixed.append(tensor.clone())
        else:
            self._fixed.append(None)
            self._views.append((slot, key, geometry))
            if key not in self._foreign:
                described = f"shape {geometry.size}, {geometry.dtype}"
                reference = StorageWeakRef(storage)
                self._foreign[key] = Foreign(reference, storage.data_ptr(), described, user)
        return slot

    def open(self) -> list[torch.Tensor | None]:
        """Return the tensors of all slots for one replay. Raises `ReplayError` if a buffer is gone."""
        tensors = list(self._fixed)
        storages = {key: foreign.open() for key, foreign in self._foreign.items()}
        for slot, key, geometry in self._views:
            tensors[slot] = geometry.over(storages[key])
        return tensors
