"""This module turns recorded rounds into a case file: it renumbers pages and requests, keeps the latest rounds that
fit, and lists what a case cannot say.

A case names requests, and says of each whether it moved to other pages; the page ids themselves follow from that
(contract/round_table.py). So a request whose pages are not those it was last seen on is a remap, and everything about
page ids that is more than that is counted as not representable: pages that two requests share, slots that do not lie
as their page says. What is in the file names no page, slot or request row of the server.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round, Scenario, one_each
from dsa_verify.contract.static_inputs import PAD_REQUEST
from dsa_verify.contract.system import System
from dsa_verify.rounds.case_file import parse_case

MAX_CASE_BYTES: Final = 100_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One round as a ring holds it, live rows only. `number`: of the round since recording began. `lens`: counts of
    tokens, by input. `pages`: of each batch row, the ids of the pages of its live tokens. `broken`: live slots that are
    not where these pages have them. `misplaced`: tokens written elsewhere than where the request map has them."""

    number: int
    bucket: int
    seq_lens: tuple[int, ...]
    requests: tuple[int, ...]
    lens: Mapping[str, tuple[int, ...]]
    pages: tuple[tuple[int, ...], ...]
    broken: int = 0
    misplaced: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """A case made of recorded rounds. `numbers`: those of the rounds it holds. `left_out`: earlier rounds that did not
    fit. `not_representable`: what a case cannot say, in words; empty if the case says it all. `path`: where it is."""

    scenario: Scenario
    text: str
    numbers: tuple[int, ...]
    left_out: int
    not_representable: tuple[str, ...]
    path: Path | None = None

    def written_to(self, folder: Path) -> Dump:
        """Write the case to `folder` under a name that its text determines, and return the dump with its path."""
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:8]
        path = folder / f"captured-{self.scenario.system}-{digest}.json"
        path.write_text(self.text, encoding="utf-8")
        return dataclasses.replace(self, path=path)


def to_case(
    recorded: Sequence[Recorded],
    system: System,
    geometry: Geometry,
    *,
    subject: str | None = None,
    fault: str | None = None,
    found: str | None = None,
    limit_bytes: int = MAX_CASE_BYTES,
) -> Dump:
    """Return the latest of `recorded`, oldest first, of which the text of a case takes no more than `limit_bytes`.

    UsageError if there are none, or if the last one alone does not fit.
    """
    unusable: Counter[str] = Counter()
    usable = []
    for each in recorded:
        reason = _why_unusable(each, system, geometry)
        if reason is None:
            usable.append(each)
        else:
            unusable[reason] += 1
    if not usable:
        said = f": {'; '.join(unusable)}" if unusable else ""
        raise UsageError(f"the ring holds no round that a case can say{said}; record at least one")

    def written(count: int) -> tuple[Scenario, str, list[str]]:
        return _write(usable[len(usable) - count :], system, geometry, subject, fault, found)

    def fits(count: int) -> bool:
        try:
            return len(written(count)[1].encode()) <= limit_bytes
        except UsageError:  # more requests than one geometry has room for
            return False

    if not fits(1):
        raise UsageError(
            f"round {usable[-1].number}: {len(usable[-1].seq_lens)} requests take more than {limit_bytes} bytes as a "
            "case; raise limit_bytes"
        )
    count, too_many = 1, len(usable) + 1
    while too_many - count > 1:
        middle = (count + too_many) // 2
        if fits(middle):
            count = middle
        else:
            too_many = middle
    scenario, text, lost = written(count)
    parse_case(text)
    lost += [f"{many} round(s) left out: {reason}" for reason, many in unusable.items()]
    return Dump(
        scenario=scenario,
        text=text,
        numbers=tuple(each.number for each in usable[len(usable) - count :]),
        left_out=len(usable) - count,
        not_representable=tuple(f"not representable: {reason}" for reason in lost),
    )


def _why_unusable(each: Recorded, system: System, geometry: Geometry) -> str | None:
    """Why no case can hold this round; None if one can."""
    for length in each.seq_lens:
        if not 0 <= length <= geometry.context:
            return f"a length outside 0..context {geometry.context}"
    if any(request < 0 for request in each.requests):
        return "a request row below 0"
    for name, spec in system.lens(geometry).items():
        if any(not spec.low <= value < spec.high for value in each.lens.get(name, ())):
            return f"{name} outside {spec.low}..{spec.limit} {spec.high - 1}"
    return None


def _write(
    recorded: Sequence[Recorded],
    system: System,
    geometry: Geometry,
    subject: str | None,
    fault: str | None,
    found: str | None,
) -> tuple[Scenario, str, list[str]]:
    names = _Names()
    rounds = tuple(_round(each, system, geometry, names) for each in recorded)
    fewest = len(names) + 1
    if fewest > geometry.request_rows or "request_rows" in geometry.overrides():
        geometry = geometry.replace(request_rows=max(fewest, 2))
    scenario = Scenario(
        system=system.name,
        geometry=geometry,
        buckets=tuple(sorted({each.bucket for each in recorded}, reverse=True)),
        rounds=rounds,
        subject=subject,
        fault=fault,
        found=found,
    )
    return scenario, scenario.to_json(), _lost(recorded)


class _Names:
    """Request rows as 1, 2, 3, ... in the order in which they come, and the pages that each was last seen on."""

    def __init__(self) -> None:
        self._names: dict[int, int] = {}
        self._pages: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._names)

    def name(self, request: int) -> int:
        if request == PAD_REQUEST:
            return PAD_REQUEST
        return self._names.setdefault(request, len(self._names) + 1)

    def has_moved(self, request: int, pages: tuple[int, ...]) -> bool:
        """Return whether any of its first pages is another one than when it was seen before, and remember these."""
        before = self._pages.get(request, ())
        common = min(len(before), len(pages))
        moved = before[:common] != pages[:common]
        # Pages beyond a shorter list stay what they were, unless it is another one altogether.
        self._pages[request] = pages if moved or len(pages) > len(before) else before
        return moved


def _round(each: Recorded, system: System, geometry: Geometry, names: _Names) -> Round:
    remap = []
    for request, pages in zip(each.requests, each.pages, strict=True):
        if names.has_moved(request, pages) and request != PAD_REQUEST:
            remap.append(names.name(request))
    lens = {
        name: one_each(each.requests, each.lens[name]) if spec.of_row else each.lens[name]
        for name, spec in system.lens(geometry).items()
    }
    return Round(
        bucket=each.bucket,
        seq_lens=each.seq_lens,
        requests=tuple(names.name(request) for request in each.requests),
        remap=tuple(dict.fromkeys(remap)),
        poison="stale",  # a server poisons nothing: what a replay does not write is what the one before left
        lens=lens,
    )


def _lost(recorded: Sequence[Recorded]) -> list[str]:
    """Return what a case cannot say of these rounds, with counts."""
    broken, misplaced = sum(each.broken for each in recorded), sum(each.misplaced for each in recorded)
    shared = sum(_shared_pages(each) for each in recorded)
    live_pads = sum(1 for each in recorded for request in each.requests if request == PAD_REQUEST)
    found = []
    if broken:
        found.append(
            f"{broken} live slot(s) are not consecutive and aligned within their page; the case has them so "
            "(contract 0.1)"
        )
    if misplaced:
        found.append(
            f"{misplaced} token(s) are written elsewhere than where the request map has them; the case writes them "
            "there"
        )
    if shared:
        found.append(f"{shared} page(s) belong to several requests of one round; the case gives each its own")
    if live_pads:
        found.append(f"{live_pads} live batch row(s) name request 0, whose pages are all 0 in the case")
    return found


def _shared_pages(each: Recorded) -> int:
    lists = {request: set(pages) for request, pages in zip(each.requests, each.pages, strict=True)}
    seen = Counter(page for pages in lists.values() for page in pages)
    return sum(1 for many in seen.values() if many > 1)
