"""A function can be seen whole: at most 70 lines, kernels aside, whose parameter lists alone are long."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 70


def long_functions(name: str, text: str) -> list[str]:
    return [
        f"{name}: {node.name} has {lines} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_LINES
    ]


def test_no_function_is_longer_than_a_screen() -> None:
    files = [path for room in ("dsa_verify", "fuzz", "oracles") for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 200
    shown = [path for path in files if not path.stem.endswith("_kernel")]
    assert [line for path in shown for line in long_functions(path.name, path.read_text())] == []


def test_a_long_function_would_be_named() -> None:
    text = "def long():\n" + "    pass\n" * MOST_LINES
    assert long_functions("a.py", text) == ["a.py: long has 71 lines"]
