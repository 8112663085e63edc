"""Each section of the contract that anything cites is there to be read, once; and a finding leads to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsa_verify.contract.finding import INPUT_RULE, LAW_RULE, MEMORY_RULE, Diagnosis, Finding
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.links import FOLDER, PAGES, cited_sections, contract_link, contract_links
from dsa_verify.contract.padded import PADDED_MODES
from dsa_verify.systems.catalogue import SYSTEMS

ROOT = Path(__file__).parents[2]
CITING = ("dsa_verify", "oracles", "fuzz", "tests", "bench", "examples", "docs", "README.md", "CHANGELOG.md")
SUFFIXES = {".py", ".md", ".toml", ".json", ".txt"}
ANCHOR = re.compile(r'<a id="([^"]+)"></a>')
# Where a citation goes on in the next line: of a comment, of a string in pieces, of a docstring or page.
LINE_ENDS = re.compile(r"[\"']\s*\n\s*f?[\"']|\s*\n\s*#?\s*")
LINK = re.compile(r"\]\(([^)#]*contract/[^)#]*|[^)#/]*\.md|)(#[^)]+)?\)")


def files() -> Iterator[Path]:
    for name in CITING:
        path = ROOT / name
        yield from (path,) if path.is_file() else (f for f in sorted(path.rglob("*")) if f.suffix in SUFFIXES)


def citations(text: str) -> list[str]:
    """All sections that `text` cites, with those that are cited across lines."""
    return cited_sections(LINE_ENDS.sub(lambda end: "" if end[0][0] in "\"'" else " ", text))


def anchors(page: str) -> list[str]:
    return ANCHOR.findall((ROOT / FOLDER / page).read_text())


def missing(cited: list[str]) -> list[str]:
    """Those of `cited` that no page has where their link leads."""
    found = {section for chapter, page in PAGES.items() for section in anchors(page) if of_chapter(section, chapter)}
    return [section for section in cited if section not in found]


def of_chapter(section: str, chapter: str) -> bool:
    return section.partition(".")[0] == chapter


def layouts() -> Iterator[Layout]:
    """Of every system, with and without what a geometry may add."""
    for name, system in SYSTEMS.items():
        presets = ("tiny_v4",) if name == "padded" else ("tiny", "tiny_indexer", "tiny_pool")
        for preset in presets[:2] if name == "ragged_verify" else presets:  # it has no pools
            for mode in [{"padded_mode": mode} for mode in PADDED_MODES] if name == "padded" else [{}]:
                draft = {"draft_tokens": 2} if system.drafts else {}
                yield system.layout(system.geometry(preset, mode | draft), 4)


def test_every_cited_section_exists() -> None:
    wrong = {
        str(path.relative_to(ROOT)): nowhere for path in files() if (nowhere := missing(citations(path.read_text())))
    }
    assert wrong == {}


def test_the_citations_are_found() -> None:
    """Else the test above would pass on none."""
    found = [section for path in files() for section in citations(path.read_text())]
    assert len(found) > 300
    assert len(set(found)) > 40


def test_a_made_up_section_is_reported() -> None:
    for made_up in ("3.9", "12", "0.10"):
        assert missing(citations(f"as contract {made_up} says")) == [made_up]


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("(contract 8.2 and 8.3).", ["8.2", "8.3"]),
        ("Contract 1.1 to 1.4, 3.4, 4, 5)", ["1.1", "1.4", "3.4", "4", "5"]),
        ('"the engine resets (contract 0.2, "\n        "7.5)"', ["0.2", "7.5"]),
        ("one by one (contract\n    2.2)", ["2.2"]),
        ("# the contract\n# 3.6 has it; contract\n# 3.5 too", ["3.6", "3.5"]),
        ("contract 2.3's plan, contract 2.3 again; 1.1 alone; contracts 5", ["2.3"]),
    ],
)
def test_citations_are_read_as_they_are_written(text: str, sections: list[str]) -> None:
    assert citations(text) == sections


def test_each_anchor_is_there_once_and_on_the_page_of_its_chapter() -> None:
    everywhere = [anchor for page in PAGES.values() for anchor in anchors(page)]
    assert sorted(everywhere) == sorted(set(everywhere))
    for chapter, page in PAGES.items():
        numbered = [anchor for anchor in anchors(page) if anchor[0].isdigit()]
        assert numbered[0] == chapter
        assert all(of_chapter(section, chapter) for section in numbered), page


def test_every_field_says_where_its_rule_is() -> None:
    sections = {field.section for layout in layouts() for field in layout}
    assert {"1.1", "3", "4.2", "5", "7.1", "8.7", "9"} <= sections
    assert missing(sorted({*sections, INPUT_RULE, LAW_RULE, MEMORY_RULE})) == []


def test_the_pages_link_to_what_is_there() -> None:
    wrong = []
    for path in (file for file in files() if file.suffix == ".md"):
        for name, anchor in LINK.findall(path.read_text()):
            page = (path.parent / name).resolve() if name else path
            known = anchors(page.name) if page.parent == ROOT / FOLDER and page.is_file() else None
            if not page.is_file() or (known is not None and anchor and anchor[1:] not in known):
                wrong.append(f"{path.name}: {name}{anchor}")
    assert wrong == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / FOLDER / "README.md").read_text()
    assert [page for page in PAGES.values() if f"({page})" not in index] == []
    assert {path.name for path in (ROOT / FOLDER).glob("*.md")} == {*PAGES.values(), "README.md"}


def test_a_section_has_one_link() -> None:
    assert contract_link("3.5") == "docs/contract/3-schedule.md#3.5"
    assert contract_link("10") == "docs/contract/10-boundaries.md#10"
    assert contract_links("1.1", "off (contract 1.7), see contract 1.1") == (contract_link("1.1"), contract_link("1.7"))


def test_words_of_a_subject_break_no_report() -> None:
    assert contract_links(None, f"by contract {99}") == ()


def test_a_finding_has_its_links_in_json() -> None:
    finding = Finding(
        system="decode",
        subject="mine",
        diagnosis=Diagnosis.WRONG_VALUE,
        sentence="32 bits do not hold it (contract 1.7)",
        section="1.1",
    )
    assert finding.to_dict()["contract"] == ["docs/contract/1-basic.md#1.1", "docs/contract/1-basic.md#1.7"]
    assert finding.links == "docs/contract/1-basic.md#1.1, docs/contract/1-basic.md#1.7"
