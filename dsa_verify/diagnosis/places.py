"""Places: where an element is and what a word of it says, in the reader's terms."""

from __future__ import annotations

import struct
from typing import Final

from dsa_verify.contract.layout import Field, Live, Row
from dsa_verify.diagnosis.evidence import Evidence, Moment

_ITEM_COLUMNS: Final = (("threshold", "number of items"), ("row", "length"))


def shown(field: Field, word: int) -> str:
    """Return the value of a word of `field`, for people."""
    return f"{as_float(word):.9g}" if field.dtype == "float32" else str(word)


def as_float(word: int) -> float:
    """Return the float32 with the bits of an int32."""
    value: float = struct.unpack("<f", struct.pack("<i", word))[0]
    return value


def describe_place(evidence: Evidence, field: Field, row: int, column: int) -> str:
    """Name the element by its index, and by request, draft position and page."""
    index = f"[{row}, {column}]" if len(field.shape) > 1 else f"[{row}]"
    words = [*_row_words(evidence, field, row, column), *_column_words(evidence, field, column)]
    return f"{field.name}{index} ({', '.join(words)})"


def _row_words(evidence: Evidence, field: Field, row: int, column: int) -> list[str]:
    now, geometry = evidence.now, evidence.layout.geometry
    if field.row in (Row.REQUEST_PREFIX, Row.TOKEN_PREFIX):
        return [f"the sum over the first {row} {'batch' if field.row is Row.REQUEST_PREFIX else 'token'} rows"]
    batch_row = now.batch_row(field, row)
    if field.row is Row.MULTIPROCESSOR:
        slot = "SM" if field.rows > geometry.multiprocessors else "SM pair"
        return [f"where {slot} {row} starts: {('q unit', 'kv split')[column]}"]
    if field.row is Row.SLOT:
        return [f"row {row} of the pool"]
    if field.row is Row.ITEM:
        return [f"{'the head' if row == 0 else f'listed row {row}'}: {_ITEM_COLUMNS[row > 0][column]}"]
    if batch_row is None:
        return ["a row that no request owns in this round"]
    words = [f"batch row {batch_row}, {_whose(now, batch_row)}"]
    if field.row is Row.TOKEN:
        words.append(f"draft position {row - now.row_request.index(batch_row)}")
    elif field.columns == geometry.draft_tokens > 1 and not field.column_step:
        words.append(f"draft position {column}")
    if evidence.layout.ranks and field.columns > 1 and not field.column_step:
        words.append(_entry(evidence, field.name, column))
    if field.name == "page_table":  # of full width, so without a step (contract 7.1)
        words.append(f"page {column}")
    return words


def _column_words(evidence: Evidence, field: Field, column: int) -> list[str]:
    if field.live is Live.CANDIDATES:
        return [f"pool candidate {column}"]
    if not field.column_step or field.live is Live.ROWS:
        return []
    token = field.column_start + column * field.column_step
    return [f"page {token // evidence.layout.geometry.allocator_page}", f"token {token}"]


def _entry(evidence: Evidence, name: str, column: int) -> str:
    """What column `column` is of the field `name` of decode context parallelism."""
    if name == "merged_lse":
        return f"head {column}"
    if name == "merged_out":
        head, dimension = divmod(column, evidence.layout.geometry.head_dim)
        return f"head {head}, dimension {dimension}"
    return f"entry {column}"


def _whose(now: Moment, batch_row: int) -> str:
    if batch_row >= now.raw:
        return "pad row"
    return f"request {now.requests[batch_row]}, length {now.seq_lens[batch_row]}"
