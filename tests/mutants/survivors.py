"""Survivors: the mutants that are known to be seen by nothing, with a reason each (survivors.toml)."""

from __future__ import annotations

import dataclasses
import fnmatch
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

TABLE: Final = Path(__file__).with_name("survivors.toml")
DEVICES: Final = ("cpu", "cuda")
# What an entry may claim. All but the last say that no input tells the mutant from the original.
KINDS: Final = {
    "same output": "other or more work, and every live element is the same",
    "dead": "only what no consumer reads, or no code uses, is different",
    "32 bits": "what is computed fits 32 bits within the limits of a geometry",
    "launch": "only how the work is divided among programs and lanes is different",
    "refusal": "only inputs that are refused, or that no door can give, are treated otherwise",
    "hole": "no equivalence is claimed: an input that would show it is not drawn",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """`change` as the mutant shows it, so that an ordinal that has moved to another mutant is seen. `on`: the devices
    it survives on."""

    name: str
    change: str = ""
    kind: str
    reason: str
    on: tuple[str, ...] = DEVICES


def read(changes: dict[str, str], path: Path = TABLE) -> dict[str, Survivor]:
    """By name, a hole of many mutants (`*`) as an entry of each. `changes`: by name of mutant. ValueError for an entry
    that is not one."""
    table: dict[str, Survivor] = {}
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("survivor", []):
        survivor = Survivor(**{**entry, "on": tuple(entry.get("on", DEVICES))})
        _check(survivor)
        for each in _each(survivor, changes):
            if each.name in table:
                raise ValueError(f"{each.name}: is in the table twice; leave one out")
            table[each.name] = each
    return table


def _check(survivor: Survivor) -> None:
    if survivor.kind not in KINDS:
        raise ValueError(f"{survivor.name}: kind {survivor.kind!r} is unknown; known: {', '.join(KINDS)}")
    if not survivor.reason or not survivor.on or not set(survivor.on) <= set(DEVICES):
        raise ValueError(f"{survivor.name}: needs a reason, and `on` from {', '.join(DEVICES)}")
    if ("*" in survivor.name) != (survivor.change == "") or ("*" in survivor.name and survivor.kind != "hole"):
        raise ValueError(f"{survivor.name}: needs its change; a hole of many mutants alone has * and no change")


def _each(survivor: Survivor, changes: dict[str, str]) -> list[Survivor]:
    """The entry of each mutant that is meant; of a * that means none, the entry itself."""
    if "*" not in survivor.name:
        return [survivor]
    meant = [name for name in changes if fnmatch.fnmatchcase(name, survivor.name)]
    return [dataclasses.replace(survivor, name=name, change=changes[name]) for name in meant] or [survivor]


def stale(table: dict[str, Survivor], changes: dict[str, str]) -> list[str]:
    """Of entries whose mutant does not exist, or is another one now, what is wrong. `changes`: by name of mutant."""
    wrong = []
    for survivor in table.values():
        change = changes.get(survivor.name)
        if change is None:
            wrong.append(f"{survivor.name}: there is no such mutant any more; take the entry out of {TABLE.name}")
        elif change != survivor.change:
            wrong.append(f"{survivor.name}: is now `{change}`, not `{survivor.change}`; look for it under another name")
    return wrong


def surprises(
    table: dict[str, Survivor], device: str, survived: Iterable[str], killed: Iterable[str], changes: dict[str, str]
) -> list[str]:
    """What a run on `device` saw that the table does not say, one sentence each; empty if nothing."""
    here = {name for name, survivor in table.items() if device in survivor.on}
    new = [f"{name}: survived, and is not in {TABLE.name}: {changes[name]}" for name in survived if name not in here]
    gone = [f"{name}: is killed now; take {device} out of its entry in {TABLE.name}" for name in killed if name in here]
    return new + gone
