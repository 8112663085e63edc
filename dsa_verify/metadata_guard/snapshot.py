"""Snapshot: what a nested object looked like when a graph captured it, and how another one differs from it.

It is a tree of nodes in which a container that is held twice, or by itself, is one node. Objects are compared by path,
so metadata that is built anew for each step around the same tensors is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.metadata_guard.paths import Patterns
from dsa_verify.metadata_guard.place import Place, describe
from dsa_verify.nested.parts import PLAIN, Part, is_tensor, parts_of, tensors_in

MAX_NODES: Final = 100_000


@dataclasses.dataclass(slots=True, eq=False)
class Holder:
    """A container, with the nodes of all its parts. `holds_tensors`: whether a tensor below it is compared."""

    kind: type
    parts: dict[Part, Node] = dataclasses.field(default_factory=dict)
    holds_tensors: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A tensor."""

    path: str
    place: Place


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """None, a number or a text. `baked`: whether it must stay what it is; None must in any case become no tensor."""

    value: Any
    baked: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Skipped:
    """What is not compared."""


Node = Holder | Leaf | Plain | Skipped
SKIPPED: Final = Skipped()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which parts are compared. `numbers`: the baked ones. `host`: whether tensors in pageable host memory are; None:
    they are if no tensor is elsewhere, since a graph on a device reads none of them."""

    ignore: Patterns
    numbers: Patterns
    host: bool | None

    def skips(self, tensor: torch.Tensor, host: bool) -> bool:
        """Return whether `tensor` is not compared; `host`: what `self.host` came to."""
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return True
        return not host and tensor.device.type == "cpu" and not tensor.is_pinned()


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs: its path below the metadata, what kind of change it is, and what is said of it."""

    path: str
    kind: str
    says: str


class Snapshot:
    """The snapshot of `root`. Raises UsageError if it has more than MAX_NODES parts."""

    def __init__(self, root: Any, scope: Scope) -> None:
        self.scope = scope
        self.host = scope.host if scope.host is not None else not _has_device_tensor(root, scope)
        self.leaves: list[Leaf] = []
        self.plain_paths: list[str] = []
        self._nodes = 0
        self._seen: dict[int, tuple[Any, Holder]] = {}
        self.root = self._node(root, "")
        self._seen.clear()

    def _node(self, value: Any, path: str) -> Node:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise UsageError(
                f"guard: the metadata has more than {MAX_NODES} parts, the next one being metadata{path}; "
                "name with ignore= what no graph reads"
            )
        if self.scope.ignore.match(path):
            return SKIPPED
        if isinstance(value, PLAIN):
            self.plain_paths.append(path)
            return Plain(value, self.scope.numbers.match(path) is not None)
        if is_tensor(value):
            if self.scope.skips(value, self.host):
                return SKIPPED
            self.leaves.append(Leaf(path, Place.of(value)))
            return self.leaves[-1]
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        parts = parts_of(value)
        return SKIPPED if parts is None else self._holder(value, parts, path)

    def _holder(self, value: Any, parts: dict[Part, Any], path: str) -> Holder:
        holder = Holder(type(value))
        self._seen[id(value)] = (value, holder)
        before = len(self.leaves)
        for part, item in parts.items():
            node = holder.parts[part] = self._node(item, f"{path}{part}")
            holder.holds_tensors |= isinstance(node, Holder) and node.holds_tensors
        holder.holds_tensors |= len(self.leaves) > before
        return holder

    def changes(self, root: Any, storages: bool = True) -> list[Change]:
        """Return how `root` differs from what was captured. `storages`: see Place.change_to."""
        return list(_Comparison(self, storages).of(self.root, root, ""))


def _has_device_tensor(root: Any, scope: Scope) -> bool:
    found = tensors_in(root).items()
    return any(t.device.type not in ("cpu", "meta") and not scope.ignore.match(path) for path, t in found)


class _Comparison:
    def __init__(self, snapshot: Snapshot, storages: bool) -> None:
        self._scope, self._host, self._storages = snapshot.scope, snapshot.host, storages
        self._seen: set[tuple[int, int]] = set()

    def of(self, node: Node, value: Any, path: str) -> Iterator[Change]:
        if isinstance(node, Leaf):
            yield from self._leaf(node, value, path)
        elif isinstance(node, Plain):
            yield from self._plain(node, value, path)
        elif isinstance(node, Holder) and (id(node), id(value)) not in self._seen:
            self._seen.add((id(node), id(value)))
            yield from self._holder(node, value, path)

    def _leaf(self, leaf: Leaf, value: Any, path: str) -> Iterator[Change]:
        was = describe(leaf.place)
        if not is_tensor(value):
            says = f"is {_kind_of(value)} now, and was a tensor ({was}) when it was captured"
            yield Change(path, "rebound", f"{says}{_if_freed(leaf.place)}")
        elif change := leaf.place.change_to(value, self._storages):
            yield Change(path, *change)

    def _plain(self, plain: Plain, value: Any, path: str) -> Iterator[Change]:
        if not plain.baked:
            if plain.value is None and self._is_compared(value, path):
                says = f"is {_kind_of(value)} now, and was None when it was captured, so the graph does not read it"
                yield Change(path, "rebound", says)
        elif type(value) is not type(plain.value) or value != plain.value:
            now = repr(value) if isinstance(value, PLAIN) else _kind_of(value)
            says = f"is {now} now, and was {plain.value!r} when it was captured, which the graph has as a constant"
            yield Change(path, "number", says)

    def _holder(self, holder: Holder, value: Any, path: str) -> Iterator[Change]:
        parts = parts_of(value)
        if parts is None or type(value) is not holder.kind:
            if holder.holds_tensors:
                says = f"is {_kind_of(value)} now, and was {_article(holder.kind.__name__)} when it was captured"
                yield Change(path, "rebound", says)
            return
        for part, node in holder.parts.items():
            if part in parts:
                yield from self.of(node, parts[part], f"{path}{part}")
            elif gone := _gone(node):
                yield Change(f"{path}{part}", "removed", gone)
        for part in parts.keys() - holder.parts.keys():
            if self._is_compared(parts[part], f"{path}{part}"):
                says = f"was added after the capture ({_kind_of(parts[part])}), so the graph does not read it"
                yield Change(f"{path}{part}", "added", says)

    def _is_compared(self, value: Any, path: str) -> bool:
        """Return whether `value` holds a tensor that would have been compared."""
        if self._scope.ignore.match(path):
            return False
        return any(
            not self._scope.ignore.match(f"{path}{below}") and not self._scope.skips(tensor, self._host)
            for below, tensor in tensors_in(value).items()
        )


def _gone(node: Node) -> str | None:
    """Say that the part with this node was removed; None if nothing that is compared went with it."""
    if isinstance(node, Leaf):
        was = f"was removed after the capture, where it was a tensor ({describe(node.place)})"
        return f"{was}{_if_freed(node.place)}"
    if isinstance(node, Holder) and node.holds_tensors:
        return f"was removed after the capture, where it was {_article(node.kind.__name__)}"
    if isinstance(node, Plain) and node.baked:
        return f"was removed after the capture, where it was {node.value!r}, which the graph has as a constant"
    return None


def _if_freed(place: Place) -> str:
    return ", whose memory was freed and is still used by the graph" if place.freed else ""


def _kind_of(value: Any) -> str:
    if value is None:
        return "None"
    if is_tensor(value):
        return f"a tensor ({describe(value)})"
    return _article(type(value).__name__)


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
