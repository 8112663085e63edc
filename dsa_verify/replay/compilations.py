"""Compilations: which kernels Triton compiles, and which argument made it compile them again.

After the warm-up there must be none, whatever the lengths do: a server would stall there for a second. Triton makes a
form of a kernel for each dtype, for each constexpr, and for integers that are 1 or divisible by 16; an argument that
follows the batch turns into another class late in a run. Each form is kept here by argument, as words, and compared
with the forms that the same kernel had before.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

_OPTIONS: Final = ("num_warps", "num_ctas", "num_stages")
_HARNESS: Final = ("dsa_verify.buffers.region_kernels", "dsa_verify.overlay.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One form of `kernel` (module and name). `arguments`: by name, the class of values it was made for. `before`:
    those of the most similar form there was; None if it is the first. `round`, `bucket`: what was replayed then, if
    anything."""

    kernel: str
    arguments: Mapping[str, str]
    before: Mapping[str, str] | None
    round: int | None
    bucket: int | None

    @property
    def sentence(self) -> str:
        """Return which kernel was compiled, and what for."""
        if self.before is None:
            return f"{self.kernel} was compiled for the first time, which the warm-up had not done"
        changed = [name for name, text in self.arguments.items() if self.before.get(name) != text]
        if not changed:
            return f"{self.kernel} was compiled again for arguments of the same classes"
        each = [f"{name} is {self.arguments[name]} and was {self.before.get(name, 'not given')}" for name in changed]
        return f"{self.kernel} was compiled again, as its argument {', '.join(each)}"


_seen: list[Compilation] = []
_installed = False
_now: Callable[[], tuple[int, int]] | None = None


def count_compilations() -> Callable[[], int]:
    """Return a function that returns how many kernels this process has compiled since the first call of this one, but
    for the harness's own.

    Under the interpreter, or without Triton, nothing is ever compiled and the count stays 0.
    """
    global _installed
    if not _installed:
        _installed = True
        with contextlib.suppress(ImportError):
            _install()
    return lambda: len(_seen)


def since(count: int) -> list[Compilation]:
    """Return what was compiled after there were `count`."""
    return _seen[count:]


@contextlib.contextmanager
def in_rounds(now: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Note (round, bucket), which `now` says, with what is compiled inside."""
    global _now
    outer, _now = _now, now
    try:
        yield
    finally:
        _now = outer


def _install() -> None:
    from triton import knobs

    previous = knobs.runtime.jit_post_compile_hook

    def hook(*args: Any, **kwargs: Any) -> Any:
        _note(kwargs.get("fn"), kwargs.get("compile") or {})
        return previous(*args, **kwargs) if previous is not None else None

    knobs.runtime.jit_post_compile_hook = hook


def _note(function: Any, compiled: Mapping[str, Any]) -> None:
    kernel = f"{getattr(function, 'module', '?')}.{getattr(function, 'name', '?')}"
    if kernel.startswith(_HARNESS):
        return
    arguments = _arguments(getattr(function, "jit_function", None), compiled)
    known = [each.arguments for each in _seen if each.kernel == kernel]
    # The latest of those that are as similar.
    before = min(reversed(known), key=lambda each: _distance(each, arguments), default=None)
    round_, bucket = _now() if _now is not None else (None, None)
    _seen.append(Compilation(kernel=kernel, arguments=arguments, before=before, round=round_, bucket=bucket))


def _distance(one: Mapping[str, str], other: Mapping[str, str]) -> int:
    return sum(one.get(name) != text for name, text in other.items())


def _arguments(function: Any, compiled: Mapping[str, Any]) -> dict[str, str]:
    """Return by argument, then by option, the class of values that a form is made for, as far as this Triton tells."""
    signature, constants = compiled.get("signature") or {}, compiled.get("constants") or {}
    attributes = (compiled.get("configs") or [{}])[0] or {}
    declared = {param.name: bool(param.is_constexpr) for param in getattr(function, "params", None) or ()}
    found = {
        name: _class_of(kind, constants.get((place,)), attributes.get((place,)), declared.get(name, False))
        for place, (name, kind) in enumerate(signature.items())
    }
    return found | {name: str(compiled[name]) for name in _OPTIONS if name in compiled}


def _class_of(kind: str, constant: object, attributes: Sequence[Any] | None, is_constexpr: bool) -> str:
    if kind == "constexpr":
        # An integer 1 is compiled in, without having been declared so.
        return f"the constexpr {constant!r}" if is_constexpr else f"equal to {constant!r}"
    if attributes is None:  # nothing but its dtype counts
        return str(kind)
    divisible = ["tt.divisibility", 16] in [list(each) for each in attributes]
    if kind.startswith("*"):
        return f"a pointer to {kind[1:]}{'' if divisible else ' that is not'} aligned to 16 bytes"
    return f"{kind}, {'divisible by 16' if divisible else 'neither 1 nor divisible by 16'}"
