"""From a difference to a sentence: what the wrong value is, and so what most likely went wrong.

Every explanation in EXPLANATIONS is tried on each of the first differing elements; the one that explains most of
them wins, the earlier one on a tie. An explanation has to name what it recognised (a round, a request, a draft
position, a distance), so that a reader can check it by hand.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Final

from dsa_verify.buffers.arena import GUARD_WORD
from dsa_verify.buffers.input_memory import far_stride
from dsa_verify.buffers.poison import plausible_word
from dsa_verify.buffers.region import LOUD_WORD, Region
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.geometry import FAR
from dsa_verify.contract.layout import Compare, Field, Live, Row
from dsa_verify.contract.owners import Owner
from dsa_verify.diagnosis import dcp_explanations as diagnose_dcp
from dsa_verify.diagnosis.evidence import Element, Evidence, Explanation, Moment
from dsa_verify.judge.judge import Difference, Phase
from dsa_verify.judge.law_regions import law_of, scheduled
from dsa_verify.judge.schedule_laws import LawBreak
from dsa_verify.systems.indexer import scheduled_lengths

_ITEM_COLUMNS: Final = (("threshold", "number of items"), ("row", "length"))
_INT32_END: Final = 1 << 31
_LOOKED_AT: Final = 256  # words of a row and of a column that are held against another round's
_FIRST_REPLAY: Final = ": frozen at capture, or one replay late (this is the first replay of this batch)"
_LN_2: Final = math.log(2.0)


def diagnose_field(evidence: Evidence, differences: Sequence[Difference]) -> tuple[Diagnosis, str, str]:
    """(diagnosis, sentence, place) for the first differing elements of one field in one round."""
    field = evidence.layout[differences[0].region.name]
    elements = [Element(field, d.region, d.row, d.column, d.word, d.got, d.want) for d in differences]
    first = elements[0]
    if field.compare is Compare.ITEMS and first.row == 0:
        elements = [e for e in elements if e.row == 0]  # with a wrong head the rows it counts mean nothing
    place = describe_place(evidence, field, first.row, first.column)
    if differences[0].phase is Phase.SECOND_REPLAY:
        want, got = shown(field, first.want), shown(field, first.got)
        text = f"{place} was {want} after the first replay and {got} after a second one on the same inputs"
        return Diagnosis.NOT_IDEMPOTENT, f"not idempotent: {text}", place
    best: tuple[int, Explanation] = (0, (Diagnosis.WRONG_VALUE, "no pattern recognised"))
    for explain in EXPLANATIONS:
        of_first = explain(evidence, first)
        if of_first is None:
            continue
        count = sum(1 for e in elements if (x := explain(evidence, e)) is not None and x[0] is of_first[0])
        if count > best[0]:
            best = (count, of_first)
    diagnosis, why = best[1]
    if field.elements >= _INT32_END and diagnosis in (Diagnosis.NEVER_WRITTEN, Diagnosis.STALE, Diagnosis.FROZEN):
        why += f"; {field.rows} rows of {field.columns} are {field.elements} elements, which 32 bits do not hold"
        why += " (contract 2.2)"
    got, want = shown(field, first.got), shown(field, first.want)
    return diagnosis, f"{diagnosis.value}: {place} is {got}, must be {want}: {why}", place


def if_replayed_again(evidence: Evidence, first: Difference, sentence: str) -> dict[int, tuple[Diagnosis, str]]:
    """What to say instead of `sentence`, by what the element holds once the same inputs, after a loud poison, have been
    replayed again; empty unless the element is as at capture in the first replay of its bucket."""
    field = evidence.layout[first.region.name]
    at_capture = evidence.capture.value(field, first.row, first.column) == first.got
    if first.phase is not Phase.REPLAY or not at_capture or _replayed_before(evidence):
        return {}
    place = describe_place(evidence, field, first.row, first.column)
    got, want = shown(field, first.got), shown(field, first.want)
    says = f": {place} is {got}, must be {want}: it is the value at capture, and"
    late, unwritten = Diagnosis.STALE, Diagnosis.NEVER_WRITTEN
    told = {
        first.want: (late, f"{late.value}{says} right when the same inputs are replayed again: one replay late"),
        LOUD_WORD: (unwritten, f"{unwritten.value}{says} the next replay leaves the poison there: no replay writes it"),
    }
    if _FIRST_REPLAY in sentence:
        still = ", also when the same inputs are replayed again: it is frozen at capture"
        told[first.got] = (Diagnosis.FROZEN, sentence.replace(_FIRST_REPLAY, still))
    return told


def shown(field: Field, word: int) -> str:
    """The value of a word of `field`, for people."""
    return f"{as_float(word):.9g}" if field.dtype == "float32" else str(word)


def as_float(word: int) -> float:
    """The float32 with the bits of an int32."""
    value: float = struct.unpack("<f", struct.pack("<i", word))[0]
    return value


def describe_place(evidence: Evidence, field: Field, row: int, column: int) -> str:
    """The element in the reader's terms: request, draft position, page."""
    now, geometry = evidence.now, evidence.layout.geometry
    index = f"[{row}, {column}]" if len(field.shape) > 1 else f"[{row}]"
    words = [f"{field.name}{index}"]
    if field.row in (Row.REQUEST_PREFIX, Row.TOKEN_PREFIX):
        words.append(f"the sum over the first {row} {'batch' if field.row is Row.REQUEST_PREFIX else 'token'} rows")
    else:
        batch_row = now.batch_row(field, row)
        if field.row is Row.MULTIPROCESSOR:
            slot = "SM" if field.rows > geometry.multiprocessors else "SM pair"
            words.append(f"where {slot} {row} starts: {('q unit', 'kv split')[column]}")
        elif field.row is Row.SLOT:
            words.append(f"row {row} of the pool")
        elif field.row is Row.ITEM:
            words.append(f"{'the head' if row == 0 else f'listed row {row}'}: {_ITEM_COLUMNS[row > 0][column]}")
        elif batch_row is None:
            words.append("a row that no request owns in this round")
        else:
            words.append(f"batch row {batch_row}, {_whose(now, batch_row)}")
            if field.row is Row.TOKEN:
                words.append(f"draft position {row - now.row_request.index(batch_row)}")
            elif field.columns == geometry.draft_tokens > 1 and not field.column_step:
                words.append(f"draft position {column}")
            if evidence.layout.ranks and field.columns > 1 and not field.column_step:
                words.append(diagnose_dcp.entry(evidence, field.name, column))
            if field.name == "page_table":  # of full width, so without a step (contract 7.1)
                words.append(f"page {column}")
    if field.live is Live.CANDIDATES:
        words.append(f"pool candidate {column}")
    elif field.column_step:
        token = field.column_start + column * field.column_step
        words.append(f"page {token // geometry.allocator_page}")
        words.append(f"token {token}")
    return f"{words[0]} ({', '.join(words[1:])})"


def _whose(now: Moment, batch_row: int) -> str:
    if batch_row >= now.raw:
        return "pad row"
    return f"request {now.requests[batch_row]}, length {now.seq_lens[batch_row]}"


def explain_guard(difference: Difference, count: int) -> tuple[Diagnosis, str]:
    """Which field was overrun, on which side and by how much; `count`: words of this guard that changed."""
    after, before = difference.region.neighbours
    rows, words = difference.region.got.shape
    if difference.region.gaps_per_row > 1:
        row, column = divmod(difference.row, difference.region.gaps_per_row)
        return (
            Diagnosis.PAST_THE_END,
            f"wrote {count * 4} bytes between the columns of {after}, the first of them behind column {column} of row "
            f"{row}",
        )
    if after is not None and (rows > 1 or after == before):
        return (
            Diagnosis.PAST_THE_END,
            f"wrote {count * 4} bytes into the gap behind the rows of {after}, the first {difference.column * 4} bytes "
            f"beyond the end of row {difference.row}",
        )
    from_start = (difference.row * words + difference.column) * 4
    to_end = rows * words * 4 - from_start
    if before is None or (after is not None and from_start < to_end):
        return (
            Diagnosis.PAST_THE_END,
            f"wrote {count * 4} bytes past field {after}, the first {from_start} bytes beyond its end",
        )
    return (
        Diagnosis.BEFORE_THE_START,
        f"wrote {count * 4} bytes before field {before}, the first {to_end} bytes ahead of its start",
    )


def broken_law(evidence: Evidence, region: Region) -> LawBreak | None:
    """What the schedule in `region` does to its tiles, by the laws alone; None if it breaks none (contract 3.5)."""
    found = scheduled_lengths(region.name)
    assert found is not None, f"{region.name} is no schedule"
    name, clamped = found
    law = law_of(evidence.layout, evidence.now.want[name])
    lengths = scheduled(law.variant, evidence.now.want[name].cpu(), clamped)
    breaks = law.judge(region.got.cpu().contiguous(), lengths.contiguous())
    return breaks[0] if breaks else None


# Explanations, in the order in which they are preferred -------------------------------------------------------------


def _never_written(evidence: Evidence, e: Element) -> Explanation | None:
    now = evidence.now
    if e.got == LOUD_WORD:
        since = "at all" if now.poison == "stale" else "in this replay"
        return Diagnosis.NEVER_WRITTEN, f"it still holds the poison, so it was never written {since}"
    if now.poison == "plausible" and e.got == plausible_word(e.region, now.round, e.row, e.word):
        return Diagnosis.NEVER_WRITTEN, "it still holds the plausible poison, so it was never written in this replay"
    return None


def _rows_taken_for_adjacent(evidence: Evidence, e: Element) -> Explanation | None:
    """Of a table with a gap behind each row: what would be there, or would have been read, if there were none."""
    columns, stride = e.field.columns, e.field.columns + e.field.row_gap
    if columns == stride or e.row == 0:
        return None
    written = divmod(e.row * stride + e.column, columns)
    read = divmod(e.row * columns + e.column, stride)
    for (row, column), what in ((written, "written"), (read, "read")):
        in_gap = what == "read" and column >= columns
        if e.got == GUARD_WORD if in_gap else _stands_for(evidence, e, row, column):
            place = f"what lies in the gap behind row {row}" if in_gap else f"[{row}, {column}]"
            text = f"that is {place}: rows that begin {stride} elements behind one another were {what} as if they lay "
            return Diagnosis.WRONG_VALUE, f"{text}{columns} apart (contract 2.2)"
    return None


def _stands_for(evidence: Evidence, e: Element, row: int, column: int) -> bool:
    """Whether what was got is what belongs to another place of the field, of a table also beyond the live length."""
    if evidence.now.value(e.field, row, column) == e.got:
        return True
    batch_row = evidence.now.batch_row(e.field, row)
    if not _is_table(e.field) or batch_row is None or column >= e.field.columns:
        return False
    owner = _owner(evidence, e, e.got)
    here = owner is not None and owner.token == column * e.field.column_step
    return owner is not None and here and evidence.now.requests[batch_row] in owner.rows


def _before_the_request_table(evidence: Evidence, e: Element) -> Explanation | None:
    """Where request rows lie far apart (input_memory.py), what an offset finds that has wrapped."""
    geometry, batch_row = evidence.layout.geometry, evidence.now.batch_row(e.field, e.row)
    if geometry.input_view != FAR or not _is_table(e.field) or batch_row is None:
        return None
    request, stride = evidence.now.requests[batch_row], far_stride(geometry.request_rows)
    lead = geometry.slots - 2
    if request * stride < _INT32_END or e.got not in (lead, lead // e.field.column_step):
        return None
    text = f"that lies before the request table: row {request} times a stride of {stride} is {request * stride}, which "
    return Diagnosis.WRONG_VALUE, f"{text}32 bits do not hold (contract 1.7)"


def _other_request_in_table(evidence: Evidence, e: Element) -> Explanation | None:
    """A slot says whose token it is; the right position of the wrong request is a wrong map, not a wrong page."""
    if not _is_table(e.field) or evidence.now.poison == "stale":
        return None
    owner = _owner(evidence, e, e.got)
    batch_row = evidence.now.batch_row(e.field, e.row)
    if owner is None or batch_row is None or owner.token != e.column * e.field.column_step:
        return None
    if evidence.now.requests[batch_row] in owner.rows:
        return None
    first = evidence.now.value(e.field, e.row, 0)
    alike = _owner(evidence, e, first) if first else None
    if alike is not None and set(alike.rows) & set(owner.rows):
        # So this says nothing of an earlier round, whoever sat here then.
        return Diagnosis.REQUEST_MAP, f"that is the same place of {owner}, with the same first page as this request"
    for moment in reversed(evidence.earlier):
        sat = moment.requests[batch_row] if batch_row < moment.bucket else None
        if sat in owner.rows:
            others = [str(row) for row in owner.rows if row != sat]
            shared = f" and shares this page with {' and '.join(others)}" if others else ""
            return (
                Diagnosis.REQUEST_MAP,
                f"that is request {sat}, which sat in this batch row in round {moment.round}{shared}: a stale map",
            )
    return Diagnosis.REQUEST_MAP, f"that is the same place of {owner}{owner.aside}"


def _earlier_round(evidence: Evidence, e: Element) -> Explanation | None:
    by_accident = e.got in (0, evidence.capture.value(e.field, e.row, e.column))
    for moment in reversed(evidence.earlier):
        if moment.value(e.field, e.row, e.column) == e.got and (not by_accident or _is_as_in(evidence, e, moment)):
            if evidence.now.poison == "stale":
                return Diagnosis.STALE, f"stale since round {moment.round}, whose value it still holds"
            return (
                Diagnosis.STALE,
                f"it was written, but with the value of round {moment.round}: computed from inputs not refreshed",
            )
    return None


def _capture(evidence: Evidence, e: Element) -> Explanation | None:
    if not _is_as_in(evidence, e, evidence.capture):
        return None
    why = ", so something was frozen at capture" if _replayed_before(evidence) else _FIRST_REPLAY
    return Diagnosis.FROZEN, f"it is the value for the inputs at capture{why}"


def _is_as_in(evidence: Evidence, e: Element, moment: Moment) -> bool:
    """Whether the element is what was right in `moment`, and so are most words of its row and column of which that is
    neither right now nor 0: a mask, a memset or a row taken for a pad row leaves the same in one word by accident."""
    if moment.value(e.field, e.row, e.column) != e.got:
        return False
    size = e.region.words_per_element
    rows = range(max(0, e.row - _LOOKED_AT // 2), min(e.field.rows, e.row + _LOOKED_AT // 2))
    columns = range(max(0, e.column - _LOOKED_AT // 2), min(e.field.columns, e.column + _LOOKED_AT // 2))
    of_column = e.region.got[rows.start : rows.stop, e.column * size].tolist()
    of_row = e.region.got[e.row, columns.start * size : columns.stop * size : size].tolist()
    words = {(row, e.column): got for row, got in zip(rows, of_column, strict=True)}
    words |= {(e.row, column): got for column, got in zip(columns, of_row, strict=True)}
    same = []
    for (row, column), got in words.items():
        then, now = (each.value(e.field, row, column) for each in (moment, evidence.now))
        if then and now is not None and then != now:
            same.append(got == then)
    return 2 * sum(same) > len(same)


def _replayed_before(evidence: Evidence) -> bool:
    """Whether this bucket's replay before is known, so that it is not the capture that came before this one."""
    return any(moment.bucket == evidence.now.bucket for moment in evidence.earlier)


def _last_page_empty(evidence: Evidence, e: Element) -> Explanation | None:
    """A row of a table that ends where its last full page does."""
    batch_row, page = evidence.now.batch_row(e.field, e.row), e.field.column_step
    if not _is_table(e.field) or batch_row is None or page == 1 or e.got != 0:
        return None
    start, end = e.column * page, evidence.now.live_tokens[batch_row]
    if not start < end < start + page:
        return None
    # Where full pages are 0, too, it is not the last one's being partly filled.
    rows = range(min(e.field.rows, _LOOKED_AT))
    full = [(row, b) for row in rows if (b := evidence.now.batch_row(e.field, row)) is not None]
    full = [(row, b) for row, b in full if evidence.now.live_tokens[b] >= page]
    first_pages = e.region.got[: len(rows), 0].tolist()
    right = [first_pages[row] == evidence.now.value(e.field, row, 0) for row, _ in full]
    if not all(right):
        return None
    why = f"0 in place of the last page, which tokens {start} to {end - 1} fill in part: as floor for ceiling leaves it"
    return Diagnosis.BOUNDARY, why


def _other_row(evidence: Evidence, e: Element) -> Explanation | None:
    now = evidence.now
    batch_row = now.batch_row(e.field, e.row)
    if e.field.row not in (Row.REQUEST, Row.TOKEN) or e.field.column_step or batch_row is None:
        return None
    if e.field.row is Row.TOKEN:
        first = now.row_request.index(batch_row)
        for step in (-1, 1):
            neighbour = e.row + step
            same = 0 <= neighbour < now.token_rows and now.row_request[neighbour] == batch_row
            if same and now.value(e.field, neighbour, e.column) == e.got:
                return Diagnosis.DRAFT_OFFSET, f"that is the value of draft position {neighbour - first}"
        if abs(e.got - e.want) == 1 and e.field.dtype != "float32" and e.field.columns == 1:
            return Diagnosis.DRAFT_OFFSET, f"it is {e.got - e.want:+d} token: the draft position counts from elsewhere"
    position = e.row - now.row_request.index(batch_row) if e.field.row is Row.TOKEN else 0
    for other in range(now.bucket):
        row = other
        if e.field.row is Row.TOKEN:
            if other not in now.row_request:
                continue
            row = now.row_request.index(other) + position
        is_pad = other >= now.raw
        # A mask or a memset leaves the 0 of a pad row, too.
        if other != batch_row and not (is_pad and e.got == 0) and now.value(e.field, row, e.column) == e.got:
            whose = "a pad row" if is_pad else f"request {now.requests[other]}"
            return Diagnosis.REQUEST_MAP, f"that is the value of batch row {other}, {whose}"
    return None


def _out_of_range(evidence: Evidence, e: Element) -> Explanation | None:
    if e.field.low <= e.got < e.field.high or e.field.dtype == "float32":
        return None
    why = f"legal values are {e.field.low} to {e.field.high - 1}"
    if e.got < 0:
        why += f"; a consumer that reads it as unsigned sees {e.got & 0xFFFFFFFF}"
    return Diagnosis.OUT_OF_RANGE, why


def _inexact(evidence: Evidence, e: Element) -> Explanation | None:
    if e.field.compare is not Compare.CLOSE:
        return None
    got, want = as_float(e.got), as_float(e.want)
    if not (math.isfinite(got) and math.isfinite(want)):
        return Diagnosis.WRONG_VALUE, "special values must be exactly what the rule gives (contract 8.7)"
    scale, bound = max(abs(want), e.field.floor), e.field.bound
    for factor, name in ((_LN_2, "ln 2"), (1 / _LN_2, "1 / ln 2")):
        if abs(want) > 100 * bound * scale and abs(got - want * factor) <= bound * scale:
            return Diagnosis.WRONG_VALUE, f"it is the right value times {name}: natural and base-2 logarithm mixed up"
    relative = f", {bound:.2g} of the right value" if scale > e.field.floor else ""
    return Diagnosis.WRONG_VALUE, f"it is off by {abs(got - want):.2g} where {bound * scale:.2g} is allowed{relative}"


def _boundary(evidence: Evidence, e: Element) -> Explanation | None:
    geometry = evidence.layout.geometry
    if e.field.row not in (Row.REQUEST, Row.TOKEN) or e.field.dtype == "float32":
        return None
    if _is_table(e.field):
        owner, mine = _owner(evidence, e, e.got), _owner(evidence, e, e.want)
        batch_row = evidence.now.batch_row(e.field, e.row)
        own = owner and batch_row is not None and evidence.now.requests[batch_row] in owner.rows
        if own and owner and mine and owner.token != mine.token:
            where = f"token {owner.token} of the same request{owner.aside}"
            return Diagnosis.BOUNDARY, f"that is {where}, expected token {mine.token}"
        if abs(e.got - e.want) == 1:
            what = "slot" if e.field.column_step == 1 else "page"
            return Diagnosis.BOUNDARY, f"it is the right value {e.got - e.want:+d} {what}"
        return None
    if e.field.name == "page_table" and abs(e.got - e.want) == 1:
        return Diagnosis.BOUNDARY, f"it is the right value {e.got - e.want:+d} page"
    steps = (
        (1, "token"),
        (geometry.draft_tokens, "draft length"),
        (geometry.page_size, "page"),
        (geometry.allocator_page, "allocator page"),
        (geometry.pool_size, "pool"),
        (geometry.topk, "top-k"),
    )
    for size, name in steps:
        if abs(e.got - e.want) == size:
            sign = "+" if e.got > e.want else "-"
            return Diagnosis.BOUNDARY, f"it is the right value {sign} one {name} ({size})"
    return None


def _prefix_step(evidence: Evidence, e: Element) -> Explanation | None:
    if e.field.row not in (Row.REQUEST_PREFIX, Row.TOKEN_PREFIX):
        return None
    first = "; the 0 that a sum begins with is missing" if e.row == 0 else ""
    for step, what in ((1, "after"), (-1, "before")):
        if _sums_are_shifted(evidence, e, step):
            return Diagnosis.WRONG_VALUE, f"each element is the one that belongs {what} it: shifted by one{first}"
    if first:
        return Diagnosis.WRONG_VALUE, f"the sum is off by {e.got - e.want:+d}{first}"
    return (
        Diagnosis.WRONG_VALUE,
        f"the sum is off by {e.got - e.want:+d}; it is the first wrong element, so the row before it is miscounted",
    )


def _sums_are_shifted(evidence: Evidence, e: Element, step: int) -> bool:
    """Whether `e` and most of the wrong elements after it are what belongs `step` elements on."""
    value, found = evidence.now.value, []
    for row, got in enumerate(e.region.got[e.row : e.row + _LOOKED_AT, 0].tolist(), e.row):
        other = value(e.field, row + step, 0) if row + step >= 0 else None
        if other is not None and got != value(e.field, row, 0):
            found.append(got == other)
    return len(found) > 1 and found[0] and 2 * sum(found) > len(found)


def _as_at_capture(evidence: Evidence, e: Element) -> Explanation | None:
    if evidence.capture.value(e.field, e.row, e.column) != e.got:
        return None
    why = "which a mask or a memset leaves, too" if e.got == 0 else "where every row is a pad row"
    return Diagnosis.WRONG_VALUE, f"no pattern recognised; it is the value at capture, {why}"


def _is_table(field: Field) -> bool:
    """Whether the elements are slots or pages, which say whose they are."""
    return field.column_step > 0 and field.column_start == 0 and field.live is Live.TOKENS


def _owner(evidence: Evidence, e: Element, value: int) -> Owner | None:
    """Whose a table value is; a page number stands for its first token."""
    return evidence.owner(value * e.field.column_step)


EXPLANATIONS: Final[tuple[Callable[[Evidence, Element], Explanation | None], ...]] = (
    _never_written,
    *diagnose_dcp.EXPLANATIONS,
    _before_the_request_table,
    _rows_taken_for_adjacent,
    _other_request_in_table,
    _earlier_round,
    _capture,
    _last_page_empty,
    _inexact,
    _out_of_range,
    _other_row,
    _boundary,
    _prefix_step,
    _as_at_capture,
)
