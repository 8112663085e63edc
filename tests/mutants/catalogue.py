"""Catalogue: every mutant of our pipelines and oracles, by names that stay."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Final

from tests.mutants.operators import Edit, apply, edits
from tests.mutants.reach import ROOT, Door, doors

PARTS: Final = {"pipelines": "dsa_verify/subjects/pipelines", "oracles": "oracles"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`name`: FILE::DEFINITION::OPERATOR.ORDINAL, counted within the definition, so that it stays the same when other
    definitions of the file change."""

    name: str
    module: str
    edit: Edit

    @property
    def file(self) -> str:
        """Relative to the repository."""
        return self.name.partition("::")[0]

    @property
    def line(self) -> int:
        """The line on which the edit begins, from 1."""
        return (ROOT / self.file).read_bytes()[: self.edit.start].count(b"\n") + 1

    def doors(self, device: str) -> tuple[Door, ...]:
        """The runs that lead to it: to the innermost definition around it that is known, as functions within functions
        are not."""
        known, scope = doors(device), self.edit.scope
        while scope:
            if f"{self.module}:{scope}" in known:
                return tuple(known[f"{self.module}:{scope}"])
            scope = scope.rpartition(".")[0]
        return ()

    def source(self) -> str:
        """The text of the whole file with the defect."""
        return apply((ROOT / self.file).read_text(encoding="utf-8"), self.edit)


@functools.cache
def catalogue(part: str) -> tuple[Mutant, ...]:
    """Those of `part`, one of PARTS, that some door leads to, in the order of files and text."""
    files = sorted((ROOT / PARTS[part]).glob("*.py"))
    return tuple(
        mutant
        for path in files
        for mutant in mutants_of(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        if mutant.doors("cpu")
    )


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of one file."""
    module = file.removesuffix(".py").replace("/", ".")
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for edit in edits(source):
        place = (edit.scope, edit.operator)
        name = f"{file}::{edit.scope}::{edit.operator}.{counts[place]}"
        counts[place] += 1
        found.append(Mutant(name=name, module=module, edit=edit))
    return found


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of them, drawn by their names: a change of the code brings other mutants in only where it makes them."""

    def lot(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()

    return sorted(mutants, key=lot)[:count]
