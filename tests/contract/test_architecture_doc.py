"""docs/architecture.md, docs/glossary.md and the index say what is there: files, rooms, stops and words."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

import pytest

import dsa_verify
from dsa_verify.cli.main import main

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
PATH = re.compile(r"(?:dsa_verify|oracles|fuzz|docs|tests)/[\w./-]*\w")
STOP = re.compile(r"^\| (\d) (\w+) \|(.*)\|$", re.MULTILINE)
WORD = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*)\|$", re.MULTILINE)
# Pages whose words are those of other projects, or of the machines that ran something; and the list itself.
FOREIGN = ("public-bugs.md", "gpu-runs.md", "engines-vllm.md", "glossary.md")
OURS = [
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in FOREIGN),
    *sorted((ROOT / "tests/goldens").glob("*.txt")),
]


def words() -> dict[str, list[str]]:
    """The words of the glossary, each with those that are not used for it."""
    rows = [(word.strip(), other.strip()) for word, _, other in WORD.findall(GLOSSARY)]
    return {word: other.split(", ") if other else [] for word, other in rows if word not in ("word", "---")}


def test_every_file_that_the_architecture_names_exists() -> None:
    named = PATH.findall(ARCHITECTURE)
    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_picture_is_the_tower_that_is_checked() -> None:
    """Room by room, from the top: as in the import contract."""
    (picture,) = re.findall(r"```\n(.*?)```", ARCHITECTURE, re.DOTALL)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (tower,) = [each for each in project["tool"]["importlinter"]["contracts"] if each["name"] == "The tower"]
    rooms = [room.strip().replace(".", "/") for layer in tower["layers"] for room in layer.split("|")]
    drawn = re.findall(r"dsa_verify/\w+|\boracles\b|\bfuzz\b", picture)
    assert drawn == rooms
    told = re.findall(r"^\| `([\w/]+)` \|", ARCHITECTURE, re.MULTILINE)
    assert told == rooms


def test_the_command_line_tells_the_same_seven_stops() -> None:
    stops = STOP.findall(ARCHITECTURE)
    assert [number for number, _, _ in stops] == list("1234567")
    text = inspect.getdoc(main) or ""
    told = re.findall(r"^(\d)\. (\w+):(.*?)(?=^\d\. |\Z)", text, re.MULTILINE | re.DOTALL)
    assert [(number, name, PATH.findall(rest)) for number, name, rest in told] == [
        (number, name, PATH.findall(rest)) for number, name, rest in stops
    ]


def test_the_index_has_every_page_once() -> None:
    index = (ROOT / "docs/README.md").read_text()
    linked = re.findall(r"^\| \[[^]]+\]\(([\w/.-]+)\) \|", index, re.MULTILINE)
    pages = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]
    assert sorted(linked) == sorted([*pages, "contract/README.md", "findings/README.md"])


def test_names_in_the_glossary_are_public() -> None:
    named = re.findall(r"\(`(\w+)`\)|a `(\w+)`", GLOSSARY)
    names = [first or second for first, second in named]
    assert len(names) > 8
    assert [name for name in names if name not in dsa_verify.__all__] == []


def test_the_glossary_has_about_thirty_words_and_none_is_shunned() -> None:
    known = words()
    assert 25 <= len(known) <= 40
    shunned = [other for others in known.values() for other in others]
    assert len(shunned) == len(set(shunned)) > 15
    assert set(known).isdisjoint(shunned)


def shunned_in(text: str) -> list[str]:
    flat = " ".join(text.split())
    others = [other for others in words().values() for other in others]
    return [other for other in others if re.search(rf"\b{re.escape(other)}(es|s)?\b", flat, re.IGNORECASE)]


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_or_help_text_keeps_to_the_words_of_the_glossary(path: Path) -> None:
    assert shunned_in(path.read_text()) == []


def test_another_word_is_seen() -> None:
    assert shunned_in("in the first\nIterations, a captured\n  batch") == ["captured batch", "iteration"]
