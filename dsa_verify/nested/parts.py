"""Parts: what a nested object holds, and how each part is called in a path such as `metadata.page_table[3].lens`.

A container is a mapping, a list, a tuple, a deque, an object with `__dict__` or `__slots__` (a dataclass is one), or a
tensor that is made of other tensors. Properties are not read, since reading one may compute. Modules, functions,
classes and objects of torch itself are no containers: a walk into them would end in the whole process.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import torch

PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
OPAQUE: Final = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.nn.Module)


class Part(NamedTuple):
    """A part of a container is an attribute, or an item that has a key."""

    key: Hashable
    is_attribute: bool

    def __str__(self) -> str:
        return f".{self.key}" if self.is_attribute else f"[{self.key!r}]"


def is_tensor(value: object) -> bool:
    """Return whether `value` is a tensor with memory of its own kind, which is not taken apart any further."""
    return isinstance(value, torch.Tensor) and not hasattr(type(value), "__tensor_flatten__")


def parts_of(value: Any) -> dict[Part, Any] | None:
    """Return the parts of a container in their order; None if `value` is no container."""
    if is_tensor(value) or isinstance(value, (*PLAIN, *OPAQUE)):
        return None
    if isinstance(value, torch.Tensor):
        return _attributes(value, flattened(value))
    if isinstance(value, Mapping):
        return {Part(key, False): item for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _attributes(value, value._fields)
    if isinstance(value, list | tuple | deque):
        return {Part(index, False): item for index, item in enumerate(value)}
    return _attributes(value, names_of(value)) if _is_object(value) else None


def _is_object(value: object) -> bool:
    """Return whether `value` has attributes, and is nothing of torch's own such as a stream."""
    kind = type(value)
    return kind.__module__.partition(".")[0] != "torch" and (hasattr(value, "__dict__") or bool(slots_of(kind)))


def flattened(value: Any) -> list[str]:
    """Return the names of the tensors that a tensor is made of."""
    return list(value.__tensor_flatten__()[0])


def names_of(value: object) -> list[str]:
    """Return the names of the attributes that `value` itself has, in `__dict__` and in `__slots__`."""
    return [*getattr(value, "__dict__", ()), *(name for name in slots_of(type(value)) if hasattr(value, name))]


def slots_of(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of the slots of a class and its bases."""
    found = _SLOTS.get(kind)
    if found is None:
        found = _SLOTS[kind] = _find_slots(kind)
    return found


# Weak, so that classes made in a function can go.
_SLOTS: Final[weakref.WeakKeyDictionary[type[Any], tuple[str, ...]]] = weakref.WeakKeyDictionary()


def _find_slots(kind: type[Any]) -> tuple[str, ...]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            # A private name is stored under the name of its class.
            hidden = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if hidden else name)
    return tuple(name for name in dict.fromkeys(found) if name not in ("__dict__", "__weakref__"))


def _attributes(value: object, names: Any) -> dict[Part, Any]:
    return {Part(name, True): getattr(value, name) for name in names}


def tensors_in(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a nested object by path, in their order. A container that is met again is left out."""
    found: dict[str, torch.Tensor] = {}
    _collect(value, "", found, {})
    return found


def _collect(value: Any, path: str, found: dict[str, torch.Tensor], seen: dict[int, Any]) -> None:
    # No closure: one that calls itself is a cycle, which would keep the tensors alive until a collection.
    if is_tensor(value):
        found[path] = value
        return
    parts = parts_of(value)
    if parts is None or id(value) in seen:
        return
    seen[id(value)] = value  # kept, so that no other object gets its id meanwhile
    for part, item in parts.items():
        _collect(item, f"{path}{part}", found, seen)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of the containers of `value` in which each tensor is `change(tensor)`; all else is shared.

    A container or tensor that is met again is the same copy, so that cycles and sharing stay what they are. Raises
    TypeError for a container that cannot be copied.
    """
    return _Mapping(change).of(value)


class _Mapping:
    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._change = change
        self._done: dict[int, tuple[Any, Any]] = {}  # the original is kept, so that its id stays taken

    def of(self, value: Any) -> Any:
        if id(value) in self._done:
            return self._done[id(value)][1]
        if is_tensor(value):
            return self._note(value, self._change(value))
        parts = parts_of(value)
        if parts is None:
            return value
        if isinstance(value, torch.Tensor):
            return self._note(value, self._of_wrapper(value, parts))
        if isinstance(value, tuple):
            items = [self.of(item) for item in parts.values()]
            made = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
            return self._note(value, made)
        return self._fill(value, parts)

    def _note(self, value: Any, made: Any) -> Any:
        self._done[id(value)] = (value, made)
        return made

    def _of_wrapper(self, value: Any, parts: dict[Part, Any]) -> Any:
        inner = {str(part.key): self.of(item) for part, item in parts.items()}
        _, context = value.__tensor_flatten__()
        return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())

    def _fill(self, value: Any, parts: dict[Part, Any]) -> Any:
        if isinstance(value, list | deque | Mapping):
            made = self._note(value, self._empty_like(value))
            for part, item in parts.items():
                copied = self.of(item)
                made.append(copied) if isinstance(value, list | deque) else made.__setitem__(part.key, copied)
            return made
        made = self._note(value, _new(type(value)))
        for part, item in parts.items():
            object.__setattr__(made, str(part.key), self.of(item))  # a frozen dataclass has no other way
        return made

    @staticmethod
    def _empty_like(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {} if type(value).__init__ is not dict.__init__ else type(value)()
        return [] if isinstance(value, list) else deque(maxlen=value.maxlen)


def _new(kind: Any) -> Any:
    """Return a `kind` without attributes; its `__init__` would ask for arguments."""
    return kind.__new__(kind)
