"""Fault: what the catalogue says of a planted defect, which declares itself: a class with the decorator `fault`, or a
function with `spoils`, which is called after the graph's work of the wrapped subject."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, TypeVar

from dsa_verify.contract.finding import Diagnosis
from dsa_verify.subjects.faults.wrapper import Wrapper

BASIC: Final = ("decode", "target_verify", "draft_extend")
AND_RAGGED: Final = (*BASIC, "ragged_verify")
RAGGED_DRAFTS: Final = ("target_verify", "draft_extend", "ragged_verify")
DCP: Final = ("dcp",)
ALL: Final = (*AND_RAGGED, "mtp", "padded", "dcp")

W = TypeVar("W", bound=type[Wrapper])
Spoil = Callable[[Wrapper], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`wrap(inner, field)` spoils `inner`; `field` is its default target. `diagnoses`: what it may be called.
    `of_input`: the target is a static input, which the preparation (our filler) does not reset. `needs`: what a
    geometry must have for `field` to be there. `anywhere`: it shows in any system beside those of ALL, too, in which
    `field`, where there is none of that name, is the first that replays write."""

    name: str
    summary: str
    wrap: type[Wrapper]
    diagnoses: frozenset[Diagnosis]
    field: str = ""
    systems: tuple[str, ...] = BASIC
    of_input: bool = False
    needs: str = ""
    anywhere: bool = False

    def applies(self, system: str) -> bool:
        """Return whether the fault can be planted in `system`."""
        return system in self.systems or (self.anywhere and system not in ALL)


DECLARED: Final[dict[str, Fault]] = {}  # by name


def fault(name: str, summary: str, *diagnoses: Diagnosis, **rest: Any) -> Callable[[W], W]:
    """Declare the decorated class as the fault `name`; the arguments are the attributes of `Fault`."""

    def declare(wrap: W) -> W:
        DECLARED[name] = Fault(name=name, summary=summary, wrap=wrap, diagnoses=frozenset(diagnoses), **rest)
        return wrap

    return declare


def spoils(name: str, summary: str, *diagnoses: Diagnosis, **rest: Any) -> Callable[[Spoil], Spoil]:
    """Declare as the fault `name` that the decorated function spoils what the graph of the wrapped subject has done."""

    def declare(spoil: Spoil) -> Spoil:
        class AfterGraph(Wrapper):
            def in_graph(self) -> None:
                self.inner.in_graph()
                spoil(self)

        AfterGraph.__module__ = spoil.__module__
        fault(name, summary, *diagnoses, **rest)(AfterGraph)
        return spoil

    return declare
