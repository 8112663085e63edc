"""Triton's interpreter, mended where it refuses what compiles, and spared work whose result nobody reads.

`prepare_interpreter` changes the installed module `triton.runtime.interpreter` in this process, once. Every emulated
backend calls it. Releases of Triton whose interpreter is built otherwise are left as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np


@functools.cache
def prepare_interpreter() -> None:
    """Keep conditions boolean, compute no overflow check, and patch `triton.language` once for each launch."""
    import triton.runtime.interpreter as interpreter

    _keep_conditions_boolean(interpreter)
    _leave_out_overflow_checks(interpreter)
    if list(inspect.signature(getattr(interpreter, "_patch_lang", print)).parameters) == ["fn"]:
        _patch_once_for_each_launch(interpreter)


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
    """Triton's debug mode asserts that no sum or product overflows. Outside of it the interpreter computes the same
    checks and drops them."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


class _NothingToRestore:
    def restore(self) -> None:
        """Leave `triton.language` to the launch that patched it."""


def _patch_once_for_each_launch(interpreter: ModuleType) -> None:
    """A launch replaces the functions of `triton.language` by interpreted ones and puts them back at its end. Each
    call of a device function inside it went through the whole namespace again, which took a third of the time."""
    language = interpreter.tl
    original: Callable[[Any], Any] = interpreter._patch_lang
    patched: set[int] = set()

    def patch_lang(fn: Any) -> Any:
        seen = {id(value) for value in fn.__globals__.values() if value is language or value is language.core}
        if seen and seen <= patched:
            return _NothingToRestore()
        outermost, scope = not patched, original(fn)
        patched.update(seen)
        if outermost:
            restore = scope.restore

            def restore_all() -> None:
                patched.clear()
                restore()

            scope.restore = restore_all
        return scope

    vars(interpreter)["_patch_lang"] = patch_lang
