"""An overlay says a line for each field that differs in a check, in words where there is evidence, and a summary.

Everything here happens on the host, away from the server's hot path, over copies of what the device kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from dsa_verify.buffers.region import Kind
from dsa_verify.contract.explanation import Cause, Explanation
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.layout import Field, Layout, Live
from dsa_verify.contract.links import contract_links
from dsa_verify.contract.owners import Owner, OwnerOf
from dsa_verify.diagnosis.diagnose import Diagnosed, diagnose_field
from dsa_verify.diagnosis.evidence import Evidence, Moment
from dsa_verify.judge.judge import Difference, Phase, Tally, differences_at, wrong_words
from dsa_verify.overlay.bucket_check import BucketCheck
from dsa_verify.overlay.inputs import SLOTS_REGION
from dsa_verify.overlay.launch import Facts

LINE_SCHEMA: Final = 1
MAX_ELEMENTS: Final = 8  # of one line
_OLD: Final = "before."
Host = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One field that differed in one check. `replay`: the number of the replay since the overlay was attached.
    `differing`: words that differ, of this check if the line has a `diagnosis`, else those that were kept. `elements`:
    the first of them as [row, column, got, want]. `section`: where the contract states the rule of the field. `case`: a
    case file that holds the rounds up to this one."""

    kind: str
    replay: int
    bucket: int
    raw_batch: int | None
    field: str
    sentence: str
    diagnosis: str | None = None
    place: str | None = None
    differing: int = 0
    elements: tuple[tuple[int, int, int, int], ...] = ()
    section: str | None = None
    case: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the line for JSON; `contract` has the links to `section` and to what the sentence cites."""
        links = contract_links(self.section, self.sentence)
        return {"schema": LINE_SCHEMA, **dataclasses.asdict(self), "contract": list(links)}


def explained(check: BucketCheck, evidence: Host) -> list[Line]:
    """The lines of the check that `evidence` is of: inputs first, since what follows from them is wrong, too."""
    now = _moment(check, evidence, "")
    before = _moment(check, evidence, _OLD)
    earlier = [before] if before.round >= 0 else []
    idle = dataclasses.replace(now, round=-1, raw=0, want=check.idle, live_tokens=(_idle_tokens(check),) * check.bucket)
    owners = _owners(check, evidence, now)
    layout = _with_open_ranges(check.judged)
    known = Evidence(layout=layout, now=now, earlier=earlier, capture=idle, owner_of=owners)
    lines = _input_lines(check, evidence, now)
    for region in check.host_regions(evidence):
        wrong, want = wrong_words(region)
        differing = int(wrong.sum())
        if not differing:
            continue
        places = wrong.nonzero()[:MAX_ELEMENTS].tolist()
        found = differences_at(region, want, places, now.round, Phase.REPLAY)
        said = _by_page(known, found[0], diagnose_field(known, found))
        lines.append(
            Line(
                kind="difference",
                replay=now.round,
                bucket=check.bucket,
                raw_batch=now.raw,
                field=region.name,
                sentence=said.sentence,
                diagnosis=said.explanation.kind.value,
                place=said.place,
                differing=differing,
                elements=tuple((d.row, d.column, d.got, d.want) for d in found),
                section=layout[region.name].section,
            )
        )
    return lines


def unexplained(
    check: BucketCheck, tally: Tally, told: Callable[[int, str], bool], raw_of: Mapping[int, int]
) -> list[Line]:
    """Lines for what the judge kept of checks that left no evidence, unless they were `told` (replay, field) of."""
    groups: dict[tuple[int, str], list[Difference]] = {}
    for difference in tally.first:
        groups.setdefault((difference.round, difference.region.name), []).append(difference)
    return [
        Line(
            kind="input" if found[0].region.kind is not Kind.FIELD else "difference",
            replay=replay,
            bucket=check.bucket,
            raw_batch=raw_of.get(replay),
            field=name,
            sentence=_plain_sentence(found[0]),
            differing=len(found),
            elements=tuple((d.row, d.column, d.got, d.want) for d in found[:MAX_ELEMENTS]),
            section=check.layout[name].section if name in check.layout else None,
        )
        for (replay, name), found in groups.items()
        if not told(replay, name)
    ]


def _plain_sentence(first: Difference) -> str:
    region = first.region
    if region.kind is Kind.LAW:
        return f"{first.got} live slot(s) of the request map are outside the pool"
    element = f"[{first.row}]" if region.got.shape[1] == region.words_per_element else f"[{first.row}, {first.column}]"
    return f"{region.name}{element} is {first.got}, must be {first.want}"


# Inputs --------------------------------------------------------------------------------------------------------------


def _input_lines(check: BucketCheck, evidence: Host, now: Moment) -> list[Line]:
    lines = []

    def line(name: str, diagnosis: Diagnosis, sentence: str, elements: list[tuple[int, int, int, int]]) -> None:
        lines.append(
            Line(
                kind="input",
                replay=now.round,
                bucket=check.bucket,
                raw_batch=now.raw,
                field=name,
                sentence=f"{diagnosis.value}: {sentence}",
                diagnosis=diagnosis.value,
                differing=len(elements),
                elements=tuple(elements[:MAX_ELEMENTS]),
            )
        )

    for name in check.taken.values:
        values, spec = evidence[f"taken.{name}"].tolist(), check.legal.specs[name]
        low, high = check.legal.limits[name]
        first_pad = now.raw * spec.rows if check.setup.check_pad_rows else len(values)
        pads = [(row, 0, got, spec.pad) for row, got in enumerate(values) if row >= first_pad and got != spec.pad]
        wild = [
            (row, 0, got, min(max(got, low), high))
            for row, got in enumerate(values[:first_pad])
            if not low <= got <= high
        ]
        if wild:
            row, _, got, _ = wild[0]
            line(name, Diagnosis.OUT_OF_RANGE, f"input {name}[{row}] is {got}, legal values are {low} to {high}", wild)
        if pads:
            row, _, got, want = pads[0]
            sentence = (
                f"input {name}[{row}] is {got}, it must be {want}: with raw batch {now.raw}, batch rows {now.raw} to "
                f"{check.bucket - 1} are pad rows, which the engine resets (contract 0.2, 7.5)"
            )
            line(name, Diagnosis.TAIL_NOT_RESET, sentence, pads)
    beyond = int(evidence["beyond_pool"])
    if beyond:
        sentence = f"{beyond} live slot(s) of the request map are outside the pool of {check.legal.pool_slots} slots"
        line(SLOTS_REGION, Diagnosis.OUT_OF_RANGE, sentence, [(0, 0, beyond, 0)])
    return lines


# What the diagnosis looks at -----------------------------------------------------------------------------------------


def _moment(check: BucketCheck, evidence: Host, prefix: str) -> Moment:
    facts = evidence[prefix + "facts"].tolist()
    rows = int(evidence[prefix + "token_rows"])
    owners = evidence[prefix + "row_request"].tolist()[:rows]
    return Moment(
        round=facts[Facts.NUMBER],
        bucket=check.bucket,
        raw=facts[Facts.RAW],
        seq_lens=tuple(evidence[prefix + "taken.seq_lens"].tolist()),
        requests=tuple(evidence[prefix + "taken.req_pool_indices"].tolist()),
        row_request=tuple(owners),
        live_tokens=tuple(evidence[prefix + "live_tokens"].tolist()),
        live_candidates=tuple(evidence[prefix + "live_candidates"].tolist()),
        token_rows=rows,
        poison="stale",  # a server poisons nothing
        want={
            field.name: _one_row_each(check, field, evidence[f"{prefix}want.{field.name}"], owners)
            for field in check.judged
        },
    )


def _one_row_each(check: BucketCheck, field: Field, want: torch.Tensor, owners: list[int]) -> torch.Tensor:
    """Return one row for each request: the one that a table keeps (an oracle's), or the first of each request."""
    if not field.one_row_per_request or check.setup.reference is None:
        return want
    firsts = [owners.index(b) if b in owners else 0 for b in range(check.bucket)]
    return want[firsts]


def _idle_tokens(check: BucketCheck) -> int:
    pad = check.legal.specs["seq_lens"].pad
    return pad + (check.setup.geometry.draft_tokens if check.setup.system.adds_draft else 0)


def _owners(check: BucketCheck, evidence: Host, now: Moment) -> OwnerOf:
    """Whose token a slot is, by the request map of this check; only of tokens that are live in it."""
    page = check.setup.geometry.allocator_page
    pages = evidence["pages"]
    found: dict[int, Owner] = {}
    for b in range(now.raw):
        live = -(-now.seq_lens[b] // page)
        for at, page_id in enumerate(pages[b, : max(live, 0)].tolist()):
            sharing = found.get(page_id, Owner((), at * page))
            if sharing.token == at * page:  # as a cached prefix has it, which several share
                rows = tuple(dict.fromkeys((*sharing.rows, now.requests[b])))
                found[page_id] = dataclasses.replace(sharing, rows=rows)

    def owner_of(slot: int) -> Owner | None:
        owner = found.get(slot // page)
        return None if owner is None else dataclasses.replace(owner, token=owner.token + slot % page)

    return owner_of


def _by_page(known: Evidence, first: Difference, found: Diagnosed) -> Diagnosed:
    """Name the request whose page or slot the wrong value is, where that says more than what was found."""
    field = known.layout[first.region.name]
    slots = field.column_step or (known.layout.geometry.page_size if field.name == "page_table" else 0)
    owner_of = known.owner_of
    if found.explanation.kind is not Diagnosis.WRONG_VALUE:
        return found
    if not slots or field.column_start or field.live is not Live.TOKENS or owner_of is None:
        return found
    owner, batch_row = owner_of(first.got * slots), known.now.batch_row(field, first.row)
    if owner is None or batch_row is None or known.now.requests[batch_row] in owner.rows:
        return found
    facts = {"what": f"token {owner.token}", "owner": str(owner), "aside": ""}
    explanation = Explanation(Diagnosis.REQUEST_MAP, Cause.OTHER_REQUEST, facts)
    return dataclasses.replace(found, explanation=explanation)


def _with_open_ranges(layout: Layout) -> Layout:
    """Return the layout without upper bounds that follow from the number of slots: a server's pool has another size."""
    longest = layout.geometry.context + layout.geometry.draft_tokens + 1
    fields = tuple(
        dataclasses.replace(field, high=max(field.high, 1 << 31)) if field.high > longest else field for field in layout
    )
    return dataclasses.replace(layout, fields=fields)
