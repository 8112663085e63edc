"""What docs/own-system.md promises: it grows the example, the example is right, and common mistakes in it are named."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
from support import backend

from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.systems import catalogue

ROOT = Path(__file__).parents[2]
OWN = "own_system:PagedKV"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(catalogue, "SYSTEMS", dict(catalogue.SYSTEMS))
    monkeypatch.setattr(catalogue, "_REFERENCES", {})
    return importlib.import_module("own_system")


def rewritten(monkeypatch: pytest.MonkeyPatch, folder: Path, right: str, wrong: str) -> str:
    """Return the reference of the example with a mistake in it."""
    text = (ROOT / "examples/own_system.py").read_text()
    assert text.count(right) == 1
    name = f"own_{abs(hash((right, wrong)))}"
    (folder / f"{name}.py").write_text(text.replace(right, wrong))
    monkeypatch.syspath_prepend(str(folder))
    return f"{name}:PagedKV"


# What is written wrongly in kernel or subject, and what a run says of it: field, diagnosis, cause.
MISTAKES = {
    "the last page of a full one is empty": (
        "tl.where(length > 0, (length - 1) % P + 1, 0)",
        "length % P",
        ("last", "boundary", "one unit off"),
    ),
    "the stride of the lengths is taken for that of the requests": (
        "row * steps[1]",
        "row * steps[0]",
        ("pages", "request map", "another request"),
    ),
    "the last page of each table is left out": (
        "live = start + column < counts[:, None]",
        "live = start + column < counts[:, None] - 1",
        ("pages", "never written", "poison left"),
    ),
    "pages are counted by floor": ("(length + P - 1) // P", "length // P", ("indptr", "wrong value", "sum off")),
    "the fill of the last page is never stored": (
        "    tl.store(last + row, tl.where(length > 0, (length - 1) % P + 1, 0), mask=here)\n",
        "",
        ("last", "never written", "poison left"),
    ),
}


def found(reference: str) -> list[tuple[str | None, str, str | None]]:
    system = catalogue.get_system(reference)
    subject = next(iter(system.subjects))
    geometry, fixed = catalogue.resolve_geometry(system, subject, "cpu")
    for config in diagnostic_matrix(system, geometry, fixed=fixed):
        setup = ReplaySetup.make(system, config.geometry, config.buckets, 0, subject, None, backend())
        findings = verify_rounds(setup, config.chunks(), Counts(), folder=None)
        if findings:
            return [(each.field, each.diagnosis.value, each.cause) for each in findings]
    return []


def test_the_page_grows_the_example(example: ModuleType) -> None:
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own-system.md").read_text(), re.DOTALL)[:5]
    text = (ROOT / "examples/own_system.py").read_text()
    assert "".join(re.sub(r"\s+", " ", part).strip() for part in shown) == "".join(
        re.sub(r"\s+", " ", part).strip()
        for part in re.split("(?=^class PagedKV|^    indptr|^    def reference|^    def setup)", text, flags=re.M)
    )


def test_the_declaration_is_short_and_right(example: ModuleType) -> None:
    text = (ROOT / "examples/own_system.py").read_text()
    declared = text[text.index("class PagedKV") :]
    assert len([line for line in declared.splitlines() if line.strip()]) < 35
    assert found(OWN) == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str, example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right, wrong, said = MISTAKES[mistake]
    assert said in found(rewritten(monkeypatch, tmp_path, right, wrong))


def test_the_fixture_takes_the_class(example: ModuleType, dsa) -> None:
    dsa.verify(example.PagedKV, batches=[3], rounds=3)
    assert catalogue.reference_of(example.PagedKV.system) == OWN
