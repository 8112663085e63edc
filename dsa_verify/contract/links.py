"""Contract links: where in docs/contract/ a section is, and which sections a sentence cites.

Paths are relative to the repository's root, since the pages are not installed.
"""

from __future__ import annotations

import re
from typing import Final

FOLDER: Final = "docs/contract"
# By chapter. Each section of one is an anchor of its page.
PAGES: Final = {
    "0": "0-inputs.md",
    "1": "1-basic.md",
    "2": "2-draft-steps.md",
    "3": "3-schedule.md",
    "4": "4-pools.md",
    "5": "5-topk-plan.md",
    "6": "6-in-graph-verify.md",
    "7": "7-padded.md",
    "8": "8-context-parallel.md",
    "9": "9-ragged-verify.md",
    "10": "10-boundaries.md",
    "11": "11-comparison.md",
}
_SECTION: Final = r"\d+(?:\.\d+)?"
_CITATION: Final = re.compile(rf"\b[Cc]ontract ({_SECTION}(?:(?:, and|,| and| to| or) {_SECTION})*)")


def contract_link(section: str) -> str:
    """Return the page and anchor of `section`: docs/contract/3-schedule.md#3.5 for "3.5". KeyError for an unknown
    chapter."""
    return f"{FOLDER}/{PAGES[section.partition('.')[0]]}#{section}"


def cited_sections(text: str) -> list[str]:
    """Return the sections that `text` cites, once each: of "contract 8.2 and 8.3" both, of "contract 1.1 to 1.3" the
    ends."""
    found = [section for cited in _CITATION.findall(text) for section in re.findall(_SECTION, cited)]
    return list(dict.fromkeys(found))


def contract_links(section: str | None, text: str) -> tuple[str, ...]:
    """Links to `section`, if there is one, then to those that `text` cites; a chapter that there is not is left out, as
    the text may end in words of a subject."""
    sections = dict.fromkeys([*([section] if section else []), *cited_sections(text)])
    return tuple(contract_link(each) for each in sections if each.partition(".")[0] in PAGES)
