"""Sentences: every explanation put into words. Nothing here looks at a value again; all that a sentence says is a fact.

A template is filled with the facts of its cause; where the words themselves depend on the facts, it is a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from dsa_verify.contract.explanation import Cause, Explanation

Facts = Mapping[str, Any]
_AGAIN: Final = {
    "later": ", so something was frozen at capture",
    "first": ": frozen at capture, or one replay late (this is the first replay of this batch)",
    "again": ", also when the same inputs are replayed again: it is frozen at capture",
}


def sentence(explanation: Explanation, *, place: str | None, got: str, want: str) -> str:
    """Return the sentence of a finding, which begins with its kind. `place`: the element that holds `got` instead of
    `want`, both as people read them; None where the facts name the place."""
    kind, why = explanation.kind.value, reason(explanation)
    if place is None:
        return f"{kind}: {why}"
    if explanation.cause is Cause.SECOND_REPLAY:
        return f"{kind}: {place} was {want} after the first replay and {got} after a second one on the same inputs"
    return f"{kind}: {place} is {got}, must be {want}: {why}"


def reason(explanation: Explanation) -> str:
    """Return what was recognised, in words."""
    template, facts = TEMPLATES[explanation.cause], explanation.facts
    text = template.format(**facts) if isinstance(template, str) else template(facts)
    if (elements := facts.get("elements")) is not None:
        text += f"; {facts['rows']} rows of {facts['columns']} are {elements} elements, which 32 bits do not hold"
        text += " (contract 2.2)"
    return text


def _poison_left(facts: Facts) -> str:
    if facts["poison"] == "plausible":
        return "it still holds the plausible poison, so it was never written in this replay"
    return f"it still holds the poison, so it was never written {facts['since']}"


def _rows_adjacent(facts: Facts) -> str:
    row, column = facts["row"], facts["column"]
    place = f"what lies in the gap behind row {row}" if facts["in_gap"] else f"[{row}, {column}]"
    return (
        f"that is {place}: rows that begin {facts['stride']} elements behind one another were {facts['done']} as if "
        f"they lay {facts['width']} apart (contract 2.2)"
    )


def _earlier_request(facts: Facts) -> str:
    shared = f" and shares this page with {facts['others']}" if facts["others"] else ""
    sat = f"which sat in this batch row in round {facts['round']}"
    return f"that is request {facts['request']}, {sat}{shared}: a stale map"


def _value_of_a_round(facts: Facts) -> str:
    if facts["poisoned_by_it"]:
        return f"stale since round {facts['round']}, whose value it still holds"
    return f"it was written, but with the value of round {facts['round']}: computed from inputs not refreshed"


def _batch_row(facts: Facts) -> str:
    whose = "a pad row" if facts["request"] is None else f"request {facts['request']}"
    return f"that is the value of batch row {facts['batch_row']}, {whose}"


def _out_of_range(facts: Facts) -> str:
    text = f"legal values are {facts['low']} to {facts['high']}"
    if facts["unsigned"] is not None:
        text += f"; a consumer that reads it as unsigned sees {facts['unsigned']}"
    return text


def _too_far(facts: Facts) -> str:
    relative = f", {facts['relative']:.2g} of the right value" if facts["relative"] is not None else ""
    return f"it is off by {facts['off']:.2g} where {facts['allowed']:.2g} is allowed{relative}"


def _missing_zero(facts: Facts) -> str:
    return "; the 0 that a sum begins with is missing" if facts["first"] else ""


def _sum_off(facts: Facts) -> str:
    if facts["first"]:
        return f"the sum is off by {facts['off']:+d}{_missing_zero(facts)}"
    off = f"the sum is off by {facts['off']:+d}"
    return f"{off}; it is the first wrong element, so its step from the one before is off by as much"


def _as_at_capture(facts: Facts) -> str:
    why = "which a mask or a memset leaves, too" if facts["zero"] else "where every row is a pad row"
    return f"no pattern recognised; it is the value at capture, {why}"


def _takes_the_merge(facts: Facts) -> str:
    text = (
        f"the ranks' log-sum-exps are {facts['all']}: rank {facts['rank']}'s {facts['lse']} counts as a rank that has "
    )
    text += "nothing"
    if facts["others_count"]:
        text += ", and must not take the others' part of the merge with it"
    return f"{text} (contract 8.7)"


TEMPLATES: Final[Mapping[Cause, str | Callable[[Facts], str]]] = {
    Cause.POISON_LEFT: _poison_left,
    Cause.ROWS_TAKEN_FOR_ADJACENT: _rows_adjacent,
    Cause.BEFORE_THE_REQUEST_TABLE: (
        "that lies before the request table: row {request} times a stride of {stride} is {offset}, which 32 bits do "
        "not hold (contract 1.7)"
    ),
    Cause.SAME_FIRST_PAGE: "that is the same place of {owner}, with the same first page as this request",
    Cause.EARLIER_REQUEST: _earlier_request,
    Cause.OTHER_REQUEST: "that is {what} of {owner}{aside}",
    Cause.VALUE_OF_A_ROUND: _value_of_a_round,
    Cause.VALUE_AT_CAPTURE: lambda facts: f"it is the value for the inputs at capture{_AGAIN[facts['replay']]}",
    Cause.LAST_PAGE_MISSING: (
        "0 in place of the last page, which tokens {start} to {last} fill in part: as floor for ceiling leaves it"
    ),
    Cause.OTHER_DRAFT_POSITION: "that is the value of draft position {position}",
    Cause.ONE_TOKEN_OFF: "it is {off:+d} token: the draft position counts from elsewhere",
    Cause.OTHER_BATCH_ROW: _batch_row,
    Cause.OUT_OF_RANGE: _out_of_range,
    Cause.SPECIAL_VALUE: "special values must be exactly what the rule gives (contract 8.7)",
    Cause.OTHER_LOGARITHM: "it is the right value times {factor}: natural and base-2 logarithm mixed up",
    Cause.TOO_FAR_OFF: _too_far,
    Cause.OTHER_TOKEN: "that is token {token} of the same request{aside}, expected token {expected}",
    Cause.ONE_ID_OFF: "it is the right value {off:+d} {unit}",
    Cause.ONE_UNIT_OFF: "it is the right value {sign} one {unit} ({size})",
    Cause.SUMS_SHIFTED: (
        lambda facts: f"each element is the one that belongs {facts['which']} it: shifted by one{_missing_zero(facts)}"
    ),
    Cause.SUM_OFF: _sum_off,
    Cause.AS_AT_CAPTURE: _as_at_capture,
    Cause.NOT_RECOGNISED: "no pattern recognised",
    Cause.RESERVED_SLOT_STORED: (
        "that is what the rows of slot 0 hold, which is reserved for padding: nothing may be stored there "
        "(contract 8.2; {ranks} ranks)"
    ),
    Cause.AT_THE_VIRTUAL_SLOT: (
        "that is the token of virtual slot {slot}, which rank {owner} alone stores, at its row {row}: it was stored at "
        "the virtual slot itself (contract 8.2; {ranks} ranks)"
    ),
    Cause.TOKEN_OF_ANOTHER_RANK: (
        "that is the token of virtual slot {slot}, which rank {owner} alone stores (contract 8.2; {ranks} ranks)"
    ),
    Cause.NOT_STORED: (
        "virtual slot {slot}, which rank {owner} alone stores, has not been stored at its row (contract 8.2; {ranks} "
        "ranks)"
    ),
    Cause.RESERVED_SLOT: "that is slot 0, the reserved one, which nothing may write (contract 8.2)",
    Cause.IDS_IN_FLOAT32: (
        lambda facts: (
            f"that is right for the ids in float32, which holds {facts['slot']} as {facts['kept']}, which "
            f"{'makes another rank its owner' if facts['other_rank'] else 'is another row'} (contract 8.3)"
        )
    ),
    Cause.RANK_TAKES_THE_MERGE: _takes_the_merge,
    Cause.SLOT_ZERO_SELECTED: "that is slot 0, which is no request's",
    Cause.OTHER_POSITION_SELECTED: "that is position {position} of {owner}{aside}, expected position {expected}",
    Cause.ONE_REPLAY_LATE: (
        "it is the value at capture, and right when the same inputs are replayed again: one replay late"
    ),
    Cause.NO_REPLAY_WRITES: (
        "it is the value at capture, and the next replay leaves the poison there: no replay writes it"
    ),
    Cause.SECOND_REPLAY: "a second replay on the same inputs changed it",
    Cause.BETWEEN_COLUMNS: (
        "wrote {bytes} bytes between the columns of {field}, the first of them behind column {column} of row {row}"
    ),
    Cause.BEHIND_ROWS: (
        "wrote {bytes} bytes into the gap behind the rows of {field}, the first {away} bytes beyond the end of row "
        "{row}"
    ),
    Cause.PAST_A_FIELD: "wrote {bytes} bytes past field {field}, the first {away} bytes beyond its end",
    Cause.BEFORE_A_FIELD: "wrote {bytes} bytes before field {field}, the first {away} bytes ahead of its start",
    Cause.WIDER_BUCKET: "bucket {bucket} wrote {field} row {row}, which belongs to wider buckets only ({words} words)",
    Cause.OTHER_BUCKETS_REPLAYED: (
        "{field}[{row}, {column}] of bucket {bucket} was right when that bucket was replayed and is {got} (was {want}) "
        "after other buckets were"
    ),
    Cause.DECLARED_LAW: "{law} does not hold{says}",
    Cause.LAW: "{field} is what the oracle has, and yet {broken} (contract 3.5)",
    Cause.PAD_ROW_NOT_RESET: (
        "input {input}[{element}] is {got} before anything has read it, it must be {want}: with raw batch {raw}, batch "
        "rows {raw} to {last} are pad rows, which the engine resets (contract 0.2, 7.5)"
    ),
    Cause.INPUT_CHANGED: "{input}[{element}] is {got} after the replay, it was {want}",
    Cause.BUFFER_REPLACED: ("{field} of bucket {bucket}: {change} after capture; the graph still writes the old one"),
    Cause.WRONG_ROUTE: (
        "raw batch {raw} of bucket {bucket} was prepared by {taken}, it must be by {expected} (contract 7.4)"
    ),
}
