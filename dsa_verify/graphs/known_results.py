"""Results of operations on the meta device, remembered.

They depend on the metadata of the arguments alone, and most captures record the same operations with the same
metadata as the one before: the meta device took longer than the operations themselves.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

ROOM = 8192  # results; a run over drawn geometries has ever new ones
PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

Results = tuple[Any, ...]
known_results: dict[Hashable, Results] = {}


def remember(key: Hashable | None, results: Results) -> None:
    if key is not None:
        if len(known_results) >= ROOM:
            known_results.clear()
        known_results[key] = results


def key_of(func: Any, args: Any, kwargs: Any, device_type: str) -> Hashable | None:
    """Return what the results of `func` depend on; None: unknown, or more than metadata of tensors on `device_type`."""
    tensors: dict[int, int] = {}
    try:
        given = _metadata((args, kwargs), tensors, device_type)
        return func, device_type, torch.get_default_dtype(), given
    except TypeError:
        return None


def _metadata(value: Any, tensors: dict[int, int], device_type: str) -> Hashable:
    """Return `tensors`: the place of each tensor seen so far, as one given twice is not two with equal metadata."""
    kind = type(value)
    if kind is torch.Tensor and value.layout is torch.strided and value.device.type == device_type:
        place = tensors.setdefault(id(value), len(tensors))
        return place, value.dtype, tuple(value.shape), value.stride()
    if kind is tuple or kind is list:
        return kind, *[_metadata(item, tensors, device_type) for item in value]
    if kind is dict:
        return kind, *[(name, _metadata(item, tensors, device_type)) for name, item in value.items()]
    if kind in PLAIN:  # 1, 1.0 and True are equal, but not the same argument
        return kind, value
    raise TypeError(kind)
