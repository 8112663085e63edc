"""Keeps `torch._dynamo` out of a process that compiles nothing with it: its import takes longer than most captures.

Torch marks what dynamo must not trace, and imports all of dynamo at the first call of what it has marked. Two kinds of
these are called during an emulated capture: `__torch_dispatch__` of a mode, and torch's own Python references, which
give the shapes of results on the meta device. Until somebody else imports dynamo there is nothing to keep it from.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeVar

from torch import _compile, _decomp

DYNAMO = "torch._dynamo"
KEPT_AS = "__dynamo_disable"  # where torch keeps, at what it has marked, how to call that without dynamo
WRAPPED = "fn"  # what the function that stands for a marked one calls that

Mode = TypeVar("Mode", bound=type)


def import_no_dynamo(mode: Mode) -> Mode:
    """Decorate a TorchDispatchMode, so that its `__torch_dispatch__` imports no dynamo. A release of torch that marks
    in another way is left as it is."""
    _mend([vars(mode)["__torch_dispatch__"]])
    return mode


@functools.cache
def mend_references() -> None:
    """Let torch's references import no dynamo in this process. A release of torch that marks in another way is left as
    it is."""
    tables = getattr(_decomp, "global_decomposition_table", {}).values()
    _mend([function for table in tables for function in table.values()])


def _mend(functions: Iterable[Any]) -> None:
    """Mend those of `functions`, and of all that they are wrapped around, that are marked."""
    left, seen = list(functions), set()
    while left:
        function = left.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        inside = {name: cell.cell_contents for name, cell in held.items() if _is_full(cell)}
        left += inside.values()
        marked = function.__code__.co_filename == _compile.__file__ and KEPT_AS in function.__code__.co_consts
        if marked and WRAPPED in inside and not hasattr(inside[WRAPPED], KEPT_AS):
            setattr(inside[WRAPPED], KEPT_AS, _until_dynamo_is_there(function, inside[WRAPPED]))


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises)
    except ValueError:
        return False
    return True


def _until_dynamo_is_there(marked: Callable[..., Any], wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls `wrapped`, until there is a dynamo; then `marked` replaces it by what keeps dynamo out."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if DYNAMO not in sys.modules:
            return wrapped(*args, **kwargs)
        if getattr(wrapped, KEPT_AS, None) is call:
            delattr(wrapped, KEPT_AS)
        return marked(*args, **kwargs)

    return call
