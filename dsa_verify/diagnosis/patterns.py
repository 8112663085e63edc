"""Patterns: what a wrong value of a field is, and so what most likely went wrong.

Each pattern looks at one differing element and either gives an explanation, with the facts that a reader can check by
hand (a round, a request, a draft position, a distance), or None. diagnose.py tries PATTERNS, those of decode context
parallelism among them, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from dsa_verify.buffers.arena import GUARD_WORD
from dsa_verify.buffers.input_memory import far_stride
from dsa_verify.buffers.poison import plausible_word
from dsa_verify.buffers.region import LOUD_WORD
from dsa_verify.contract.explanation import Cause, Explanation
from dsa_verify.contract.finding import Diagnosis, Facts
from dsa_verify.contract.geometry import FAR
from dsa_verify.contract.layout import Compare, Field, Live, Row
from dsa_verify.contract.owners import Owner
from dsa_verify.diagnosis import dcp_patterns
from dsa_verify.diagnosis.evidence import Element, Evidence, Moment
from dsa_verify.diagnosis.places import as_float

INT32_END: Final = 1 << 31
_LOOKED_AT: Final = 256  # words of a row and of a column that are held against another round's
_LN_2: Final = math.log(2.0)


def _never_written(evidence: Evidence, e: Element) -> Explanation | None:
    now = evidence.now
    if e.got == LOUD_WORD:
        since = "at all" if now.poison == "stale" else "in this replay"
        return Explanation(Diagnosis.NEVER_WRITTEN, Cause.POISON_LEFT, {"poison": "loud", "since": since})
    if now.poison == "plausible" and e.got == plausible_word(e.region, now.round, e.row, e.word):
        return Explanation(Diagnosis.NEVER_WRITTEN, Cause.POISON_LEFT, {"poison": "plausible"})
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
            facts: Facts = {
                "row": row,
                "column": column,
                "in_gap": in_gap,
                "stride": stride,
                "done": what,
                "width": columns,
            }
            return Explanation(Diagnosis.WRONG_VALUE, Cause.ROWS_TAKEN_FOR_ADJACENT, facts)
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
    if request * stride < INT32_END or e.got not in (lead, lead // e.field.column_step):
        return None
    facts: Facts = {"request": request, "stride": stride, "offset": request * stride}
    return Explanation(Diagnosis.WRONG_VALUE, Cause.BEFORE_THE_REQUEST_TABLE, facts)


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
        return Explanation(Diagnosis.REQUEST_MAP, Cause.SAME_FIRST_PAGE, {"owner": str(owner)})
    for moment in reversed(evidence.earlier):
        sat = moment.requests[batch_row] if batch_row < moment.bucket else None
        if sat in owner.rows:
            others = " and ".join(str(row) for row in owner.rows if row != sat)
            facts: Facts = {"request": sat, "round": moment.round, "others": others}
            return Explanation(Diagnosis.REQUEST_MAP, Cause.EARLIER_REQUEST, facts)
    facts = {"what": "the same place", "owner": str(owner), "aside": owner.aside}
    return Explanation(Diagnosis.REQUEST_MAP, Cause.OTHER_REQUEST, facts)


def _earlier_round(evidence: Evidence, e: Element) -> Explanation | None:
    by_accident = e.got in (0, evidence.capture.value(e.field, e.row, e.column))
    for moment in reversed(evidence.earlier):
        if moment.value(e.field, e.row, e.column) == e.got and (not by_accident or _is_as_in(evidence, e, moment)):
            facts: Facts = {"round": moment.round, "poisoned_by_it": evidence.now.poison == "stale"}
            return Explanation(Diagnosis.STALE, Cause.VALUE_OF_A_ROUND, facts)
    return None


def _capture(evidence: Evidence, e: Element) -> Explanation | None:
    if not _is_as_in(evidence, e, evidence.capture):
        return None
    facts: Facts = {"replay": "later" if replayed_before(evidence) else "first"}
    return Explanation(Diagnosis.FROZEN, Cause.VALUE_AT_CAPTURE, facts)


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
    same: list[bool] = []
    for (row, column), got in words.items():
        then, now = (each.value(e.field, row, column) for each in (moment, evidence.now))
        if then and now is not None and then != now:
            same.append(got == then)
    return 2 * sum(same) > len(same)


def replayed_before(evidence: Evidence) -> bool:
    """Return whether this bucket's replay before is known, so that it is not the capture that came before this one."""
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
    return Explanation(Diagnosis.BOUNDARY, Cause.LAST_PAGE_MISSING, {"start": start, "last": end - 1})


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
                return Explanation(Diagnosis.DRAFT_OFFSET, Cause.OTHER_DRAFT_POSITION, {"position": neighbour - first})
        if abs(e.got - e.want) == 1 and e.field.dtype != "float32" and e.field.columns == 1:
            return Explanation(Diagnosis.DRAFT_OFFSET, Cause.ONE_TOKEN_OFF, {"off": e.got - e.want})
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
            facts: Facts = {"batch_row": other, "request": None if is_pad else now.requests[other]}
            return Explanation(Diagnosis.REQUEST_MAP, Cause.OTHER_BATCH_ROW, facts)
    return None


def _out_of_range(evidence: Evidence, e: Element) -> Explanation | None:
    if e.field.low <= e.got < e.field.high or e.field.dtype == "float32":
        return None
    unsigned = e.got & 0xFFFFFFFF if e.got < 0 else None
    facts: Facts = {"low": e.field.low, "high": e.field.high - 1, "unsigned": unsigned}
    return Explanation(Diagnosis.OUT_OF_RANGE, Cause.OUT_OF_RANGE, facts)


def _inexact(evidence: Evidence, e: Element) -> Explanation | None:
    if e.field.compare is not Compare.CLOSE:
        return None
    got, want = as_float(e.got), as_float(e.want)
    if not (math.isfinite(got) and math.isfinite(want)):
        return Explanation(Diagnosis.WRONG_VALUE, Cause.SPECIAL_VALUE)
    scale, bound = max(abs(want), e.field.floor), e.field.bound
    for factor, name in ((_LN_2, "ln 2"), (1 / _LN_2, "1 / ln 2")):
        if abs(want) > 100 * bound * scale and abs(got - want * factor) <= bound * scale:
            return Explanation(Diagnosis.WRONG_VALUE, Cause.OTHER_LOGARITHM, {"factor": name})
    relative = bound if scale > e.field.floor else None
    facts: Facts = {"off": abs(got - want), "allowed": bound * scale, "relative": relative}
    return Explanation(Diagnosis.WRONG_VALUE, Cause.TOO_FAR_OFF, facts)


def _boundary(evidence: Evidence, e: Element) -> Explanation | None:
    geometry = evidence.layout.geometry
    if e.field.row not in (Row.REQUEST, Row.TOKEN) or e.field.dtype == "float32":
        return None
    if _is_table(e.field):
        owner, mine = _owner(evidence, e, e.got), _owner(evidence, e, e.want)
        batch_row = evidence.now.batch_row(e.field, e.row)
        own = owner and batch_row is not None and evidence.now.requests[batch_row] in owner.rows
        if own and owner and mine and owner.token != mine.token:
            facts: Facts = {"token": owner.token, "aside": owner.aside, "expected": mine.token}
            return Explanation(Diagnosis.BOUNDARY, Cause.OTHER_TOKEN, facts)
    if (_is_table(e.field) or e.field.name == "page_table") and abs(e.got - e.want) == 1:
        unit = "slot" if e.field.column_step == 1 else "page"
        return Explanation(Diagnosis.BOUNDARY, Cause.ONE_ID_OFF, {"off": e.got - e.want, "unit": unit})
    if _is_table(e.field):
        return None
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
            facts = {"sign": "+" if e.got > e.want else "-", "unit": name, "size": size}
            return Explanation(Diagnosis.BOUNDARY, Cause.ONE_UNIT_OFF, facts)
    return None


def _prefix_step(evidence: Evidence, e: Element) -> Explanation | None:
    if e.field.row not in (Row.REQUEST_PREFIX, Row.TOKEN_PREFIX):
        return None
    for step, which in ((1, "after"), (-1, "before")):
        if _sums_are_shifted(evidence, e, step):
            facts: Facts = {"which": which, "first": e.row == 0}
            return Explanation(Diagnosis.WRONG_VALUE, Cause.SUMS_SHIFTED, facts)
    return Explanation(Diagnosis.WRONG_VALUE, Cause.SUM_OFF, {"off": e.got - e.want, "first": e.row == 0})


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
    return Explanation(Diagnosis.WRONG_VALUE, Cause.AS_AT_CAPTURE, {"zero": e.got == 0})


def _is_table(field: Field) -> bool:
    """Whether the elements are slots or pages, which say whose they are."""
    return field.column_step > 0 and field.column_start == 0 and field.live is Live.TOKENS


def _owner(evidence: Evidence, e: Element, value: int) -> Owner | None:
    """Whose a table value is; a page number stands for its first token."""
    return evidence.owner(value * e.field.column_step)


PATTERNS: Final[tuple[Callable[[Evidence, Element], Explanation | None], ...]] = (
    _never_written,
    *dcp_patterns.PATTERNS,
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
