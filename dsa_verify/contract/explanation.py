"""Explanation: what was recognised in a wrong value, as data. The sentence is made of it once, at the very end
(diagnosis/sentences.py); waivers, tests and results compare the data."""

from __future__ import annotations

import dataclasses
from enum import Enum

from dsa_verify.contract.finding import Diagnosis, Fact, Facts


class Cause(Enum):
    """A cause is the pattern that was recognised. The facts of each are named in diagnosis/sentences.py.

    The values are the words that ledgers and results use.
    """

    # Of an element of a field.
    POISON_LEFT = "poison left"
    ROWS_TAKEN_FOR_ADJACENT = "rows taken for adjacent"
    BEFORE_THE_REQUEST_TABLE = "before the request table"
    SAME_FIRST_PAGE = "another request with the same first page"
    EARLIER_REQUEST = "the request of an earlier round"
    OTHER_REQUEST = "another request"
    VALUE_OF_A_ROUND = "value of an earlier round"
    VALUE_AT_CAPTURE = "value at capture"
    LAST_PAGE_MISSING = "last page missing"
    OTHER_DRAFT_POSITION = "another draft position"
    ONE_TOKEN_OFF = "one token off"
    OTHER_BATCH_ROW = "another batch row"
    OUT_OF_RANGE = "out of range"
    SPECIAL_VALUE = "special value"
    OTHER_LOGARITHM = "another logarithm"
    TOO_FAR_OFF = "too far off"
    OTHER_TOKEN = "another token of the request"
    ONE_ID_OFF = "one id off"
    ONE_UNIT_OFF = "one unit off"
    SUMS_SHIFTED = "sums shifted"
    SUM_OFF = "sum off"
    AS_AT_CAPTURE = "as at capture"
    NOT_RECOGNISED = "not recognised"
    # Of an element of decode context parallelism.
    RESERVED_SLOT_STORED = "reserved slot stored"
    AT_THE_VIRTUAL_SLOT = "stored at the virtual slot"
    TOKEN_OF_ANOTHER_RANK = "token of another rank"
    NOT_STORED = "not stored"
    RESERVED_SLOT = "reserved slot written"
    IDS_IN_FLOAT32 = "ids in float32"
    RANK_TAKES_THE_MERGE = "one rank takes the merge"
    SLOT_ZERO_SELECTED = "slot 0 selected"
    OTHER_POSITION_SELECTED = "another position selected"
    # Shown by replaying the same inputs again.
    ONE_REPLAY_LATE = "one replay late"
    NO_REPLAY_WRITES = "no replay writes it"
    SECOND_REPLAY = "a second replay differs"
    # Of other memory than a field's.
    BETWEEN_COLUMNS = "between columns"
    BEHIND_ROWS = "behind rows"
    PAST_A_FIELD = "past a field"
    BEFORE_A_FIELD = "before a field"
    WIDER_BUCKET = "rows of a wider bucket"
    OTHER_BUCKETS_REPLAYED = "changed by other buckets"
    LAW = "a law of schedules"
    DECLARED_LAW = "a declared law"
    PAD_ROW_NOT_RESET = "pad row not reset"
    INPUT_CHANGED = "input changed"
    # Of how the replay was prepared.
    BUFFER_REPLACED = "buffer replaced"
    WRONG_ROUTE = "wrong route"


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """An explanation is the kind of what is wrong, the cause that was recognised, and the facts that show it."""

    kind: Diagnosis
    cause: Cause
    facts: Facts = dataclasses.field(default_factory=dict)

    def with_facts(self, **facts: Fact) -> Explanation:
        """Return the same with more facts."""
        return Explanation(self.kind, self.cause, {**self.facts, **facts})
