"""Users import from `dsa_verify` alone: every name there resolves, costs nothing until it is used, and is what docs,
examples and templates show."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dsa_verify

ROOT = Path(__file__).parents[2]
SHOWN = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted((ROOT / "dsa_verify/templates").glob("*.txt")),
]
INNER = re.compile(r"\b(?:from|import)\s+((?:dsa_verify\.|fuzz\b|oracles\b)[\w.]*)|`(dsa_verify\.[\w.]+)`")
# Dotted names that docs mention and nobody imports: a group of entry points, and what the installed command calls.
NAMED = {"dsa_verify.subjects", "dsa_verify.systems", "dsa_verify.cli.main.main"}


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = """
import sys, dsa_verify
dir(dsa_verify)
heavy = {"torch", "triton", "numpy", "click", "rich", "pytest", "fuzz", "oracles"}
loaded = [name for name in sys.modules if name.partition(".")[0] in heavy or name.startswith("dsa_verify.")]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", dsa_verify.__all__)
def test_a_public_name_resolves_and_is_no_room(name: str) -> None:
    value = getattr(dsa_verify, name)
    module, _, attribute = dsa_verify._HOME[name].partition(":")
    assert value is getattr(sys.modules[module], attribute or name)
    assert name in dir(dsa_verify)
    assert not (ROOT / "dsa_verify" / name).exists()
    assert not (ROOT / "dsa_verify" / f"{name}.py").exists()


def test_a_type_checker_sees_the_same_names_in_the_same_places() -> None:
    tree = ast.parse(Path(dsa_verify.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname or alias.name: f"{node.module}:{alias.name}" if alias.asname else node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == dsa_verify._HOME
    assert sorted(seen) == dsa_verify.__all__


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'dsa_verify' has no attribute 'nothing'"):
        _ = dsa_verify.nothing


@pytest.mark.parametrize("former", dsa_verify._FORMER)
def test_a_former_name_says_what_it_is_called_now(former: str) -> None:
    new = dsa_verify._FORMER[former]
    with pytest.warns(DeprecationWarning, match=f"dsa_verify.{former} is called {new} now; import that"):
        assert getattr(dsa_verify, former) is getattr(dsa_verify, new)


def inner_names(text: str) -> set[str]:
    """The inner modules that `text` imports or names; what is public is none."""
    found = {imported or named for imported, named in INNER.findall(text)}
    return {name for name in found - NAMED if name.removeprefix("dsa_verify.") not in dsa_verify.__all__}


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_users_are_shown_imports_no_inner_module(path: Path) -> None:
    assert inner_names(path.read_text()) == set()


def test_an_inner_module_is_seen() -> None:
    text = "from dsa_verify import Geometry\nfrom dsa_verify.base import errors\nimport fuzz.cases\n`dsa_verify.Inputs`"
    assert inner_names(text) == {"dsa_verify.base", "fuzz.cases"}
    assert inner_names("see `dsa_verify.contract.layout`") == {"dsa_verify.contract.layout"}
