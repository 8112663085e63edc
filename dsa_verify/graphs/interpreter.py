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
from typing import Any, NamedTuple

import numpy as np

from dsa_verify.graphs.interpreter_operands import Operands, remember_operands
from dsa_verify.graphs.interpreter_types import remember_types

CORE = "triton.language.core"  # where the operators of a tensor are, unless somebody has replaced one


@functools.cache
def prepare_interpreter() -> None:
    """Keep conditions boolean, compute no overflow check, look up nothing twice."""
    import triton.runtime.interpreter as interpreter

    _keep_conditions_boolean(interpreter)
    _leave_out_overflow_checks(interpreter)
    known = remember_types(interpreter)
    operands = None if known is None else remember_operands(interpreter, known)
    if list(inspect.signature(getattr(interpreter, "_patch_lang", print)).parameters) == ["fn"]:
        _patch_once_for_each_launch(interpreter, operands)


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


class _Change(NamedTuple):
    """One attribute that a launch replaces, for as long as it runs."""

    owner: Any
    name: str
    before: Any
    after: Any


class _Language:
    """The interpreted functions of `triton.language`, looked up once and set for each launch."""

    def __init__(self, interpreter: ModuleType, operands: Operands | None) -> None:
        language = interpreter.tl
        self._operands = operands
        self._patch_lang: Callable[[Any], Any] = interpreter._patch_lang
        self._semantic = interpreter.interpreter_semantic
        self._marked_builtin = language.core.builtin(lambda: None).__code__
        self._all_names = SimpleNamespace(__globals__={"language": language, "core": language.core})
        self._changes: list[_Change] = []
        self._patched = False

    def patch(self, fn: Any) -> Any:
        """Stands in for `_patch_lang`: only the kernel changes anything, not the device functions that it calls."""
        if self._patched:
            return _NothingToRestore()
        self._patched = True
        if self._changes and all(getattr(owner, name, None) is before for owner, name, before, _ in self._changes):
            for owner, name, _, after in self._changes:
                setattr(owner, name, after)
        else:
            self._changes = self._look_up()
        return self

    def restore(self) -> None:
        self._patched = False
        for owner, name, before, _ in self._changes:
            setattr(owner, name, before)

    def _look_up(self) -> list[_Change]:
        before: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, value in self._patch_lang(self._all_names)._changes:
            before.setdefault((id(owner), name), (owner, name, value))
        changes = [
            _Change(owner, name, value, self._direct(name, vars(owner)[name])) for owner, name, value in before.values()
        ]
        for owner, name, _, after in changes:
            setattr(owner, name, after)
        return changes

    def _direct(self, name: str, interpreted: Any) -> Any:
        """Return the function in `interpreted` without two more around it: one that gives it the interpreter, and one
        that sees whether it was given. Of another release of Triton, or of what is no builtin, `interpreted` itself."""
        builtin: Any = (getattr(interpreted, "__kwdefaults__", None) or {}).get("member")
        if getattr(builtin, "__code__", None) is not self._marked_builtin:
            return interpreted
        function, semantic = builtin.__wrapped__, self._semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        is_an_operator = (function.__module__, function.__qualname__) == (CORE, f"tensor.{name}")
        return call if self._operands is None or not is_an_operator else self._operands.shorten(name, call)


class _NothingToRestore:
    def restore(self) -> None:
        """Leave `triton.language` to the launch that patched it."""


def _patch_once_for_each_launch(interpreter: ModuleType, operands: Operands | None) -> None:
    """A launch replaces the functions of `triton.language` by interpreted ones and puts them back at its end. It
    searched the whole namespace for them each time, and so did each call of a device function inside it."""
    vars(interpreter)["_patch_lang"] = _Language(interpreter, operands).patch
