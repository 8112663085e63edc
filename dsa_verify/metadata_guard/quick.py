"""Quick: whether metadata is what was captured, in flat lists and without a walk, some 10 us for 32 tensors.

Each container is read by one getter written in C, each property of all tensors by one `map`. What is not certainly the
same is compared in full by the snapshot, which also finds the words for it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from operator import attrgetter, itemgetter
from typing import Any, Final

import torch

from dsa_verify.metadata_guard.snapshot import Holder, Leaf, Node, Plain, Snapshot
from dsa_verify.nested.parts import flattened, names_of, slots_of

TENSOR: Final = torch.Tensor
DTYPE: Final = attrgetter("dtype")
FREED: Final = torch.UntypedStorage._expired
Getter = Callable[[Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Read:
    """Reads one container. What `get` returns are `tensors` tensors, then `holders` containers not met before, then
    values that must be equal (`plain`), then containers that were met (`again`: their number). `size`: how many parts
    it has, by `count`. `by_dict`: whether they are read from its `__dict__`."""

    kind: type
    by_dict: bool
    size: int
    count: Callable[[Any], int]
    get: Getter
    tensors: int
    holders: int
    plain: tuple[Any, ...]
    again: tuple[int, ...]


class QuickCheck:
    """Compares with `snapshot`, the root of which is a container."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._numbers: dict[int, int] = {}  # of a holder, by its id
        self._reads: list[_Read] = []
        self.leaves: list[Leaf] = []
        assert isinstance(snapshot.root, Holder)
        holders = [snapshot.root]
        self._numbers[id(snapshot.root)] = 0
        while len(self._reads) < len(holders):
            holders += self._read(holders[len(self._reads)])
        places = [leaf.place for leaf in self.leaves]
        self._pointers = [place.pointer for place in places]
        self._shapes = [place.shape for place in places]
        self._strides = [place.stride for place in places]
        self._dtypes = [place.dtype for place in places]
        # The weak references are those of the places, which the snapshot keeps.
        self._memories = list({place.memory.cdata for place in places if place.memory is not None})
        self._snapshot = snapshot

    def _read(self, holder: Holder) -> list[Holder]:
        """Note how to read `holder`; return the containers that it leads to first."""
        tensors: list[Any] = []
        new: list[tuple[Any, Holder]] = []
        plain: list[tuple[Any, Any]] = []
        again: list[tuple[Any, int]] = []
        for part, node in holder.parts.items():
            if isinstance(node, Leaf):
                tensors.append(part.key)
                self.leaves.append(node)
            elif isinstance(node, Plain) and (node.baked or node.value is None):
                plain.append((part.key, node.value))
            elif isinstance(node, Holder) and id(node) in self._numbers:
                again.append((part.key, self._numbers[id(node)]))
            elif isinstance(node, Holder) and _matters(node):
                self._numbers[id(node)] = len(self._numbers)
                new.append((part.key, node))
        keys = [*tensors, *(k for k, _ in new), *(k for k, _ in plain), *(k for k, _ in again)]
        by_dict, count = _access(holder.kind)
        is_attribute = not by_dict and any(part.is_attribute for part in holder.parts)
        read = _Read(
            kind=holder.kind,
            by_dict=by_dict,
            size=len(holder.parts),
            count=count,
            get=_getter(keys, attrgetter if is_attribute else itemgetter),
            tensors=len(tensors),
            holders=len(tensors) + len(new),
            plain=tuple(value for _, value in plain),
            again=tuple(number for _, number in again),
        )
        self._reads.append(read)
        return [node for _, node in new]

    def tensors(self, root: Any) -> list[torch.Tensor] | None:
        """Return the tensors of `root` in the order of `leaves`; None if its form is not certainly that of capture."""
        containers: list[Any] = [root]
        found: list[Any] = []
        try:
            for read, container in zip(self._reads, containers, strict=False):  # which grows meanwhile
                if type(container) is not read.kind:
                    return None
                source = container.__dict__ if read.by_dict else container
                if read.count(source) != read.size:
                    return None
                values = read.get(source)
                found += values[: read.tensors]
                if len(values) > read.tensors:
                    containers += values[read.tensors : read.holders]
                    if not _rest_is_same(read, values, containers):
                        return None
        except (AttributeError, KeyError, IndexError):
            return None
        return found

    def is_same(self, tensors: list[torch.Tensor], storages: bool = True) -> bool:
        """Return whether `tensors` lie where they were captured, with shape, stride and dtype; False if not certain."""
        try:
            return (
                list(map(TENSOR.data_ptr, tensors)) == self._pointers
                and list(map(TENSOR.size, tensors)) == self._shapes
                and list(map(TENSOR.stride, tensors)) == self._strides
                and list(map(DTYPE, tensors)) == self._dtypes
                and not (storages and any(map(FREED, self._memories)))
            )
        except (TypeError, AttributeError):  # one of them is no tensor any more
            return False


def _rest_is_same(read: _Read, values: tuple[Any, ...], containers: list[Any]) -> bool:
    at = read.holders
    for want in read.plain:
        got = values[at]
        if got is not want and (type(got) is not type(want) or got != want):
            return False
        at += 1
    return all(value is containers[number] for value, number in zip(values[at:], read.again, strict=True))


def _matters(holder: Holder) -> bool:
    """Return whether anything in `holder` is compared: tensors, baked numbers, or a None that may become a tensor."""
    seen: set[int] = set()

    def visit(node: Node) -> bool:
        if isinstance(node, Holder):
            if id(node) in seen:
                return False
            seen.add(id(node))
            return any(visit(each) for each in node.parts.values())
        return isinstance(node, Leaf) or (isinstance(node, Plain) and (node.baked or node.value is None))

    return visit(holder)


def _access(kind: type[Any]) -> tuple[bool, Callable[[Any], int]]:
    """Return whether the parts of a `kind` are read from its `__dict__`, and what counts them."""
    if issubclass(kind, Mapping | list | tuple | deque):
        return False, len
    if issubclass(kind, torch.Tensor):
        return False, lambda tensor: len(flattened(tensor))
    return (False, lambda value: len(names_of(value))) if slots_of(kind) else (True, len)


def _getter(keys: list[Any], make: Any) -> Getter:
    if not keys:
        return lambda source: ()
    if len(keys) == 1:
        only = make(keys[0])
        return lambda source: (only(source),)
    getter: Getter = make(*keys)
    return getter
