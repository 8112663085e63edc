"""Counts Triton compilations: after warm-up there must be none, whatever the lengths do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

_seen = 0
_installed = False


def count_compilations() -> Callable[[], int]:
    """A function that returns how many kernels this process has compiled since the first call of this one.

    Under the interpreter, or without Triton, nothing is ever compiled and the count stays 0.
    """
    global _installed
    if not _installed:
        _installed = True
        with contextlib.suppress(ImportError):
            _install()
    return lambda: _seen


def _install() -> None:
    from triton import knobs

    previous = knobs.runtime.jit_post_compile_hook

    def hook(*args: Any, **kwargs: Any) -> Any:
        global _seen
        _seen += 1
        return previous(*args, **kwargs) if previous is not None else None

    knobs.runtime.jit_post_compile_hook = hook
