"""Other memory: what was wrong outside the live elements of a field, as in a guard, an input or other buckets' rows."""

from __future__ import annotations

from dsa_verify.contract.explanation import Cause, Explanation
from dsa_verify.contract.finding import Diagnosis, Facts
from dsa_verify.judge.judge import Difference


def explain_guard(difference: Difference, count: int) -> Explanation:
    """Say which field was overrun, on which side and by how much. `count`: words of this guard that changed."""
    after, before = difference.region.neighbours
    rows, words = difference.region.got.shape
    written: Facts = {"bytes": count * 4}
    if difference.region.gaps_per_row > 1:
        row, column = divmod(difference.row, difference.region.gaps_per_row)
        facts: Facts = {**written, "field": after, "row": row, "column": column}
        return Explanation(Diagnosis.PAST_THE_END, Cause.BETWEEN_COLUMNS, facts)
    if after is not None and (rows > 1 or after == before):
        facts = {**written, "field": after, "row": difference.row, "away": difference.column * 4}
        return Explanation(Diagnosis.PAST_THE_END, Cause.BEHIND_ROWS, facts)
    from_start = (difference.row * words + difference.column) * 4
    to_end = rows * words * 4 - from_start
    if before is None or (after is not None and from_start < to_end):
        return Explanation(Diagnosis.PAST_THE_END, Cause.PAST_A_FIELD, {**written, "field": after, "away": from_start})
    return Explanation(Diagnosis.BEFORE_THE_START, Cause.BEFORE_A_FIELD, {**written, "field": before, "away": to_end})


def explain_wider_bucket(difference: Difference, bucket: int, rows: int, count: int) -> Explanation:
    """Say which row of wider buckets `bucket`, whose own field has so many `rows`, wrote; `count` words in all."""
    name = difference.region.name
    facts: Facts = {"bucket": bucket, "field": name, "row": rows + difference.row, "words": count}
    return Explanation(Diagnosis.OTHER_BUCKET, Cause.WIDER_BUCKET, facts)


def explain_other_replays(difference: Difference, bucket: int) -> Explanation:
    """Say what replays of other buckets changed in a field of `bucket`."""
    facts: Facts = {
        "field": difference.region.name,
        "row": difference.row,
        "column": difference.column,
        "bucket": bucket,
    }
    return Explanation(Diagnosis.OTHER_BUCKET, Cause.OTHER_BUCKETS_REPLAYED, {**facts, **_values(difference)})


def explain_input(difference: Difference) -> Explanation:
    """Say which element of an input the subject changed."""
    facts: Facts = {"input": difference.region.name, "element": _element(difference), **_values(difference)}
    return Explanation(Diagnosis.INPUT_OVERWRITTEN, Cause.INPUT_CHANGED, facts)


def explain_tail(difference: Difference, raw: int, bucket: int) -> Explanation:
    """Say which input of the pad rows behind `raw` requests was not reset."""
    facts: Facts = {"input": difference.region.name, "element": _element(difference), **_values(difference)}
    return Explanation(Diagnosis.TAIL_NOT_RESET, Cause.PAD_ROW_NOT_RESET, {**facts, "raw": raw, "last": bucket - 1})


def _values(difference: Difference) -> Facts:
    return {"got": difference.got, "want": difference.want}


def _element(difference: Difference) -> str:
    column = f", {difference.column}" if difference.region.got.shape[1] > 2 else ""
    return f"{difference.row}{column}"
