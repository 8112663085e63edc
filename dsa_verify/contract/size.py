"""Size: one value of a geometry that a single system has, declared by that system; and the limits of any value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from dsa_verify.base.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a value of a geometry may be: an integer from `low` to `high`, a power of two if `power_of_two`; or one of
    `choices`. A truth value has no limits."""

    low: int = 0
    high: int = 0
    power_of_two: bool = False
    choices: tuple[str, ...] = ()

    def check(self, name: str, value: object, *, where: str = "") -> None:
        """Raise UsageError if `value`, which has the right type, is outside."""
        if isinstance(value, str) and value not in self.choices:
            raise UsageError(f"{where}{name}: {value!r} is not one of {', '.join(self.choices)}")
        if type(value) is not int:
            return
        if not self.low <= value <= self.high:
            raise UsageError(f"{where}{name}: {value} is outside {self.low}..{self.high}; choose a value inside")
        if self.power_of_two and value & (value - 1):
            raise UsageError(f"{where}{name}: {value} is not a power of two; use 1, 2, 4, ...")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size(Limits):
    """A size of one system (`System.sizes`): `geometry.NAME` in its geometries, and `--set NAME=VALUE`.

    `default`: an integer, a truth value or a text; values must have its type. `presets`: what it is in the presets in
    which it is another. `shrinks`: whether a case is tried with less of it. `ranks`: whether so many ranks share an
    allocator page, which is as many times as large (contract 0.1). `note`: words that set a configuration apart in
    which it is not as the run has it. `before`: the field that it stands before in a case, else behind all.
    """

    name: str
    default: int | str
    presets: Mapping[str, int | str] = dataclasses.field(default_factory=dict, hash=False)
    shrinks: bool = False
    ranks: bool = False
    note: str = ""
    before: str = ""

    def of_preset(self, preset: str) -> int | str:
        return self.presets.get(preset, self.default)


# By name of a size, the systems that have declared it: messages say who has what.
_OWNERS: Final[dict[str, dict[str, None]]] = {}


def declare(system: str, size: Size) -> None:
    """Take note of a size of `system`. UsageError if its own values are outside its limits."""
    for value in (size.default, *size.presets.values()):
        size.check(size.name, value, where=f"system {system!r}: ")
    _OWNERS.setdefault(size.name, {})[system] = None


def owners(name: str) -> tuple[str, ...]:
    """Return the systems that have declared a size `name`."""
    return tuple(_OWNERS.get(name, ()))


def values_of(sizes: tuple[Size, ...], preset: str) -> dict[str, Any]:
    """Return the values of `sizes` in `preset`, by name."""
    return {size.name: size.of_preset(preset) for size in sizes}
