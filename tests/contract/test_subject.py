"""Subjects by reference: what a module that cannot be imported is told."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.subject import load_attribute
from dsa_verify.systems import trust
from dsa_verify.systems.catalogue import get_system, subject_factory

AWAY = "run from the folder that holds it, or install it"


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("exits_0", "import sys\nsys.exit(0)", r"raised SystemExit: 0 at .*exits_0\.py:2; .* must not exit$"),
        ("parses", "import argparse\nargparse.ArgumentParser().parse_args(['--x'])", "raised SystemExit: 2 at "),
        ("lacks", "\nimport no_such_thing", r"ModuleNotFoundError: No module named 'no_such_thing' at .*lacks\.py:2; "),
        ("unlike", "x = (", r"raised SyntaxError: '\(' was never closed \(unlike\.py, line 1\); mend the module$"),
        ("divides", "def f(): 1 / 0\nf()", r"raised ZeroDivisionError: division by zero at .*divides\.py:1; mend"),
    ],
)
def test_a_module_that_fails_is_said_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str
) -> None:
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=said) as caught:
        load_attribute(f"{name}:Mine")
    assert AWAY not in str(caught.value)


@pytest.mark.parametrize("name", ["no_such_module", "no_such_package.module", "json.no_such"])
def test_a_missing_module_is_said_to_be_elsewhere(name: str) -> None:
    with pytest.raises(UsageError, match=f"raised ModuleNotFoundError: .*; {AWAY}$"):
        load_attribute(f"{name}:Mine")


def test_an_installed_subject_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", "no_such_module:Theirs", trust.ENTRY_POINT_GROUP)
    monkeypatch.setattr(trust, "entry_points", lambda group: [point])
    with pytest.raises(UsageError, match="importing 'no_such_module' raised ModuleNotFoundError"):
        subject_factory(get_system("decode"), "theirs")


def test_a_subject_that_exits_is_no_pass(
    dsa_verify: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits_early.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "exits_late.py").write_text(
        "import sys\nfrom dsa_verify.subjects.pipelines.basic import Decode\n"
        "class Mine(Decode):\n    @staticmethod\n    def provenance(): sys.exit(0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ("replay", "--system", "decode", "--preset", "tiny", "--batch", "1", "--rounds", "1", "--subject")
    status, text = dsa_verify(*options, "exits_early:Mine")
    assert (status, "raised SystemExit: 0" in text) == (2, True), text
    assert dsa_verify(*options, "exits_late:Mine")[0] == 3
