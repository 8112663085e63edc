"""While nothing is asked for, an engine's loader imports a module that imports `os`, and that is all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from servers import ROOT, entry_points, serve

from dsa_verify.attach import entry, settings

# What a loader does with an entry point, and which modules that leads to.
LOAD = """
import sys
from importlib.metadata import entry_points

found = {found.name: found for found in entry_points(group=sys.argv[1])}["dsa_verify"]
before = set(sys.modules)
found.load()()
print(sorted(set(sys.modules) - before))
"""
OURS = ["dsa_verify", "dsa_verify.attach", "dsa_verify.attach.entry"]


@pytest.mark.parametrize("group", entry_points())
@pytest.mark.parametrize("value", [None, "", "0", " off "])
def test_nothing_else_is_imported_while_it_is_off(tmp_path: Path, group: str, value: str | None) -> None:
    script = tmp_path / "load.py"
    script.write_text(LOAD)
    served = serve(script, [group], tmp_path, **({} if value is None else {"DSA_VERIFY": value}))
    assert (served.status, served.err, served.out.strip()) == (0, "", str(OURS))


def test_the_module_imports_nothing_but_os_at_its_head() -> None:
    tree = ast.parse((ROOT / "dsa_verify" / "attach" / "entry.py").read_text())
    heads = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [[alias.name for alias in node.names] for node in heads] == [["os"]]


def test_both_modules_call_the_settings_the_same() -> None:
    assert (entry.SWITCH, entry.STRICT) == (settings.SWITCH, settings.STRICT)


def test_each_engine_has_its_entry_point() -> None:
    assert entry_points() == {
        "sglang.srt.plugins": {"dsa_verify": "dsa_verify.attach.entry:sglang"},
        "vllm.general_plugins": {"dsa_verify": "dsa_verify.attach.entry:vllm"},
    }
