"""Allocations: notes what eager work allocates, and tells what of it is still held when the work is over."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsa_verify.graphs.without_dynamo import import_no_dynamo


@import_no_dynamo
class Allocations(TorchDispatchMode):
    """Notes every new storage while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_storage_key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.set_:
            return result  # takes on a storage that there was already
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _storage_key(tensor) not in known:
                storage = tensor.untyped_storage()
                self._made[_storage_key(tensor)] = (StorageWeakRef(storage), str(func), storage.nbytes())
        return result

    def kept(self) -> list[tuple[str, int]]:
        """Return (operation, bytes) of each noted storage that somebody still holds."""
        if self._alive():
            gc.collect()  # what only a cycle still holds is not kept by anybody
        return self._alive()

    def _alive(self) -> list[tuple[str, int]]:
        return [(name, size) for reference, name, size in self._made.values() if not reference.expired()]


def _storage_key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
