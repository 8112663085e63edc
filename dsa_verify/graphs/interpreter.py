"""Triton's interpreter, mended where it refuses what compiles, and spared work whose result nobody reads.

`prepare_interpreter` changes the installed module `triton.runtime.interpreter` in this process, once. Every emulated
backend calls it. Releases of Triton whose interpreter is built otherwise are left as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from dsa_verify.graphs.interpreter_types import remember_types


@functools.cache
def prepare_interpreter() -> None:
    """Keep conditions boolean, compute no overflow check, look up nothing twice."""
    import triton.runtime.interpreter as interpreter

    _keep_conditions_boolean(interpreter)
    _leave_out_overflow_checks(interpreter)
    if list(inspect.signature(getattr(interpreter, "_patch_lang", print)).parameters) == ["fn"]:
        _patch_once_for_each_launch(interpreter)
    remember_types(interpreter)


def _keep_conditions_boolean(interpreter: ModuleType) -> None:
    """The interpreter keeps the type of what was compared as that of the result. A scalar condition that is spread
    over a mask then arrives at the load or store as integers and is refused ("mask has unsupported dtype")."""
    original = interpreter.InterpreterBuilder.create_splat

    def create_splat(self: Any, shape: Any, scalar: Any) -> Any:
        handle = original(self, shape, scalar)
        if scalar.data.dtype == np.bool_:
            handle.data = handle.data.astype(np.bool_)
        return handle

    interpreter.InterpreterBuilder.create_splat = create_splat


def _leave_out_overflow_checks(interpreter: ModuleType) -> None:
    """Triton's debug mode asserts that nothing overflows; outside of it the interpreter computes that and drops it."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@dataclasses.dataclass(frozen=True)
class _Change:
    """One attribute that a launch replaces, for as long as it runs."""

    owner: Any
    name: str
    before: Any
    after: Any

    def is_undone(self) -> bool:
        return getattr(self.owner, self.name, None) is self.before


class _Language:
    """The interpreted functions of `triton.language`, looked up once and set for each launch."""

    def __init__(self, interpreter: ModuleType) -> None:
        language = interpreter.tl
        self._patch_lang: Callable[[Any], Any] = interpreter._patch_lang
        self._all_names = SimpleNamespace(__globals__={"language": language, "core": language.core})
        self._changes: list[_Change] = []
        self._patched = False

    def patch(self, fn: Any) -> Any:
        """Stands in for `_patch_lang`: only the kernel changes anything, not the device functions that it calls."""
        if self._patched:
            return _NothingToRestore()
        self._patched = True
        if self._changes and all(change.is_undone() for change in self._changes):
            for change in self._changes:
                setattr(change.owner, change.name, change.after)
        else:
            self._changes = self._look_up()
        return self

    def restore(self) -> None:
        self._patched = False
        for change in self._changes:
            setattr(change.owner, change.name, change.before)

    def _look_up(self) -> list[_Change]:
        before: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, value in self._patch_lang(self._all_names)._changes:
            before.setdefault((id(owner), name), (owner, name, value))
        return [_Change(owner, name, value, vars(owner)[name]) for owner, name, value in before.values()]


class _NothingToRestore:
    def restore(self) -> None:
        """Leave `triton.language` to the launch that patched it."""


def _patch_once_for_each_launch(interpreter: ModuleType) -> None:
    """A launch replaces the functions of `triton.language` by interpreted ones and puts them back at its end. It
    searched the whole namespace for them each time, and so did each call of a device function inside it."""
    vars(interpreter)["_patch_lang"] = _Language(interpreter).patch
