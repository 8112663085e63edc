"""No code outside `systems/` and the adapters of engines asks for a system by its name: it asks the System."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsa_verify.systems.catalogue import SYSTEMS

ROOT = Path(__file__).parents[2]
ALLOWED = ("dsa_verify/systems/", "dsa_verify/subjects/adapters/")


def comparisons(source: str) -> Iterator[int]:
    """The lines on which something is compared with a system's name, alone or in a list of names, or matched."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        else:
            continue
        members = [each for side in sides for each in getattr(side, "elts", [side])]
        if any(isinstance(each, ast.Constant) and each.value in SYSTEMS for each in members):
            yield node.lineno


@pytest.mark.parametrize(
    "line",
    [
        'if system == "decode": pass',
        'if "mtp" != system: pass',
        'if system in ("x", "dcp"): pass',
        'if system not in {"padded"}: pass',
        'match system:\n    case "decode": pass',
    ],
)
def test_a_comparison_is_counted(line: str) -> None:
    assert len(list(comparisons(line))) == 1


def test_nothing_compares_with_a_systems_name() -> None:
    files = [path for room in ("dsa_verify", "fuzz") for path in sorted((ROOT / room).rglob("*.py"))]
    named = [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in files]
    assert len(named) > 150
    found = [f"{name}:{line}" for name, text in named if not name.startswith(ALLOWED) for line in comparisons(text)]
    assert found == []
