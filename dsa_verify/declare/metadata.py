"""Metadata: the class that a user derives a declaration from, and the System that it becomes.

One declaration serves the judge, the generator, the shrinker, the diagnosis and the documentation. Torch is imported
when a run first makes a side of it (sides.py), not when the class is written.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.system import System
from dsa_verify.declare.compiled import system_of
from dsa_verify.declare.declared import Declared
from dsa_verify.declare.ports import In, Out

if TYPE_CHECKING:
    from dsa_verify.contract.subject import Subject

_SUBJECT: Final = "subject"
_Method = TypeVar("_Method", bound=Callable[..., Any])


def law(method: _Method) -> _Method:
    """Mark `method(inputs, outputs)` of a declaration as a law: it returns bool tensors that must be all true of a
    subject's outputs after each replay. The first line of its docstring says what it demands."""
    method.dsa_law = True  # type: ignore[attr-defined]
    return method


class Metadata:
    """A system of your own: what a step reads, what it makes, what is right, and what is judged.

    Derive from it, at the top level of a module: class attributes `In` and `Out` are the inputs and outputs, in the
    order in which they are drawn and reported. `sizes` are named sizes beside B, N, T, R, C, W, P, A, K and L. `name`:
    what the system is called (otherwise the class, in small letters). `presets`: the geometry on a GPU and on a CPU.

    `reference(inputs, outputs)`: what is right, in eager PyTorch: it writes all outputs, or returns them by name. It
    and `subject(inputs, outputs)`, the code that is judged, belong to different instances with outputs of their own;
    the subject is captured in a graph. Further subjects are methods `subject_NAME`, for `--subject NAME`. Optional:
    `setup(inputs, outputs)`, once before the capture; `prepare(inputs, outputs)`, a subject's eager work before each
    replay; methods marked with `@dsa_verify.law`. `sometimes`: by what must occur for a run to count, a function
    (sizes, inputs) that gives bool tensors, any of which is true where it does. `self.sizes` has the sizes of the
    captured batch.

    A class that says something wrong raises UsageError where it is written. `system` is the value that commands and
    fixtures take (`dsa_verify.System`).
    """

    name: ClassVar[str] = ""
    sizes: Any = MappingProxyType({})
    sometimes: ClassVar[Mapping[str, Callable[[Any, Any], Any]]] = MappingProxyType({})
    presets: ClassVar[tuple[str, str]] = ("deepseek_v32", "tiny")
    system: ClassVar[System]
    dsa_declared: ClassVar[Declared]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        outs = _ports(cls, Out)
        if not outs:
            return  # a base of declarations
        where = cls.__qualname__
        if "<locals>" in where:
            raise UsageError(f"{where}: a declaration stands at the top level of a module, where its cases find it")
        methods = {_subject_name(name): name for name, value in _members(cls).items() if _is_subject(name, value)}
        if not callable(getattr(cls, "reference", None)):
            raise UsageError(f"{where}: there is no reference(self, inputs, outputs); write what is right")
        if not methods:
            raise UsageError(f"{where}: there is no subject(self, inputs, outputs); write what is judged")
        name = cls.__dict__.get("name") or _snake(cls.__name__)
        laws = {each: _first_line(value) for each, value in _members(cls).items() if hasattr(value, "dsa_law")}
        cls.dsa_declared = Declared.of(where, name, _ports(cls, In), outs, dict(cls.sizes), laws, dict(cls.sometimes))
        cls.dsa_reference = staticmethod(functools.partial(_make_reference, cls))  # type: ignore[attr-defined]
        module = cls.__module__
        subjects: dict[str, str] = {}
        for each, method in methods.items():
            maker = f"dsa_{method}"
            setattr(cls, maker, _maker(cls, method))
            subjects[each] = f"{module}:{where}.{maker}"
        cls.system = system_of(
            cls.dsa_declared,
            summary=_first_line(cls) or "a declared system",
            oracle=f"{module}:{where}.dsa_reference",
            subjects=subjects,
            presets=cls.presets,
        )

    def setup(self, inputs: Any, outputs: Any) -> None:
        """Make what lasts as long as the captured graph; once, before it is captured."""

    def prepare(self, inputs: Any, outputs: Any) -> None:
        """Do a subject's eager work before each replay."""


def _maker(cls: type[Metadata], name: str) -> staticmethod[[], Subject]:
    def make() -> Subject:
        from dsa_verify.declare.sides import Judged  # imports torch

        return Judged(cls, cls.dsa_declared, name)

    return staticmethod(make)


def _make_reference(cls: type[Metadata]) -> Subject:
    from dsa_verify.declare.sides import Reference  # imports torch

    return Reference(cls, cls.dsa_declared)


def _members(cls: type) -> dict[str, Any]:
    """Return the class attributes of `cls` and its bases, in the order in which they are written, bases first."""
    found: dict[str, Any] = {}
    for each in reversed(cls.__mro__):
        found |= vars(each)
    return found


def _ports(cls: type, kind: type) -> Mapping[str, Any]:
    return {name: value for name, value in _members(cls).items() if isinstance(value, kind)}


def _first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").split("\n", 1)[0].rstrip(".")


def _is_subject(name: str, value: object) -> bool:
    return inspect.isfunction(value) and (name == _SUBJECT or name.startswith(f"{_SUBJECT}_"))


def _subject_name(method: str) -> str:
    return method.removeprefix(f"{_SUBJECT}_")


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
