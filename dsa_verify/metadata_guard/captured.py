"""Captured: what a guard knows of one captured graph."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.metadata_guard.paths import Patterns
from dsa_verify.metadata_guard.quick import QuickCheck
from dsa_verify.metadata_guard.snapshot import Change, Holder, Scope, Snapshot
from dsa_verify.metadata_guard.values import (
    Comparison,
    PadRule,
    Pending,
    compare_constant,
    compare_eager,
    compare_pads,
    wanted_by_path,
)
from dsa_verify.nested.bits import checksum
from dsa_verify.nested.copies import copy_nested


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a guard was told, for all its graphs."""

    scope: Scope
    constants: Patterns
    pads: dict[str, PadRule]
    eager: Callable[[Any], Any] | None
    storages: bool


class Captured:
    """The metadata `root` of the graph `key`. It is kept alive if `keep`, or until `forget_root` if it cannot be known
    by a weak reference. Raises UsageError for metadata without a tensor, and for names that name nothing in it."""

    def __init__(self, root: Any, key: Hashable, settings: Settings, keep: bool) -> None:
        self.key, self.replays = key, 0
        self._settings = settings
        self._root: Callable[[], Any] = _reference(root, keep)
        self._kept = keep
        self.snapshot = Snapshot(root, settings.scope)
        if not isinstance(self.snapshot.root, Holder) or not self.snapshot.leaves:
            raise UsageError(
                f"guard: the metadata, a {type(root).__name__}, holds no tensor that a graph could read; "
                "give an object, mapping or sequence of tensors"
            )
        self.quick = QuickCheck(self.snapshot)
        self._paths = [leaf.path for leaf in self.quick.leaves]
        self._constants = _named(settings.constants, self._paths, "constants")
        _named(settings.scope.numbers, self.snapshot.plain_paths, "numbers")
        pads = Patterns(settings.pads)
        self._pads = {i: settings.pads[str(pads.match(self._paths[i]))] for i in _named(pads, self._paths, "pads")}
        self._sums: dict[int, torch.Tensor] | None = None
        self._copy: Any = None
        if not _is_capturing(root_tensors := self.quick.tensors(root)):
            self.take_checksums(root_tensors)

    def current(self) -> Any:
        """Return the metadata that was captured; None if it is gone."""
        return self._root()

    def forget_root(self) -> None:
        """Others are given from now on: let go of one that is kept alive for want of a weak reference."""
        if not self._kept and not isinstance(self._root, weakref.ref):
            self._root = _nothing

    def is_same(self, root: Any) -> bool:
        """Return whether `root` is certainly what was captured."""
        tensors = self.quick.tensors(root)
        return tensors is not None and self.quick.is_same(tensors, self._settings.storages)

    def changes(self, root: Any) -> list[Change]:
        """Compare in full."""
        return self.snapshot.changes(root, self._settings.storages)

    # On the device ----------------------------------------------------------------------------------------------------

    def take_checksums(self, tensors: list[torch.Tensor] | None) -> None:
        """Note what the fields that were declared constant hold now."""
        if self._sums is None and tensors is not None:
            self._sums = {i: checksum(tensors[i]) for i in self._constants}

    def compare_inputs(self, tensors: list[torch.Tensor], batch: int | None) -> list[Comparison]:
        """Compare the constants with their checksums, and what lies beyond the batch with what was declared."""
        self.take_checksums(tensors)
        found = [compare_constant(self._paths[i], tensors[i], before) for i, before in (self._sums or {}).items()]
        if self._pads and batch is None:
            raise UsageError("guard: pads= is judged against the batch; give before_replay or check batch=")
        for i, rule in self._pads.items():
            compared = compare_pads(self._paths[i], tensors[i], rule, batch or 0)
            found += [compared] if compared is not None else []
        return found

    def copy_inputs(self, root: Any) -> None:
        """Copy the metadata as it is before a replay, for eager work after it."""
        self._copy = copy_nested(root)

    def drop_copy(self) -> None:
        """The replay that it was taken for has failed."""
        self._copy = None

    @property
    def has_copy(self) -> bool:
        return self._copy is not None

    def compare_with_eager(self, root: Any) -> list[Comparison]:
        """Run eager work on the copy, or on a new one, and compare the fields of `root` with what it computed."""
        assert self._settings.eager is not None
        copy, self._copy = self._copy if self.has_copy else copy_nested(root), None
        tensors = self.quick.tensors(root)
        if tensors is None:
            return []  # not of the form of capture, which is a finding of its own
        with torch.no_grad():
            returned = self._settings.eager(copy)
        if returned is None:
            wanted = dict(zip(self._paths, self.quick.tensors(copy) or (), strict=True))
        else:
            wanted = wanted_by_path(returned, self._paths)
        now = dict(zip(self._paths, tensors, strict=True))
        return [compare_eager(now[path], want, path) for path, want in wanted.items()]

    def pend(self, found: list[Comparison], batch: int | None) -> Pending:
        """Send the results of comparisons on their way to the host."""
        about = f", batch {batch}" if batch is not None else ""
        return Pending([judged for judged, _ in found], [result for _, result in found], about, self.replays - 1)


def _reference(root: Any, keep: bool) -> Callable[[], Any]:
    if not keep:
        try:
            return weakref.ref(root)
        except TypeError:
            pass
    return lambda: root


def _nothing() -> None:
    return None


def _named(patterns: Patterns, paths: list[str], option: str) -> list[int]:
    """Return the numbers of the paths that `patterns` name. UsageError for one that names none."""
    found = {i: pattern for i, path in enumerate(paths) if (pattern := patterns.match(path)) is not None}
    idle = [pattern for pattern in patterns.patterns if not any(Patterns([pattern]).match(path) for path in paths)]
    if idle:
        has = ", ".join(path.removeprefix(".") for path in paths) or "none"
        raise UsageError(f"{option}: {idle[0]!r} names nothing in the metadata; what can be named: {has}")
    return list(found)


def _is_capturing(tensors: list[torch.Tensor] | None) -> bool:
    on_device = any(tensor.is_cuda for tensor in tensors or ())
    return on_device and torch.cuda.is_current_stream_capturing()
