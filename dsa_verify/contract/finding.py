"""Finding: a difference, a broken rule or a failing subject, with its diagnosis in words and the case that shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from dsa_verify.contract.links import contract_links

# No field states these rules, which are about addresses and guards, inputs, and schedules.
MEMORY_RULE: Final = "11.3"
INPUT_RULE: Final = "0.1"
LAW_RULE: Final = "3.5"

Fact = int | float | str | bool | None
Facts = Mapping[str, Fact]


class Diagnosis(Enum):
    """A diagnosis is the kind of a finding; the sentence says the rest."""

    NEVER_WRITTEN = "never written"
    STALE = "stale"
    FROZEN = "frozen at capture"
    REQUEST_MAP = "request map"
    DRAFT_OFFSET = "draft offset"
    BOUNDARY = "boundary"
    OUT_OF_RANGE = "out of range"
    WRONG_OWNER = "wrong owner"
    WRONG_VALUE = "wrong value"
    PAST_THE_END = "past the end"
    BEFORE_THE_START = "before the start"
    OTHER_BUCKET = "another bucket's rows"
    INPUT_OVERWRITTEN = "input overwritten"
    TAIL_NOT_RESET = "pad tail not reset"
    WRONG_ROUTE = "wrong route"
    LAW_BROKEN = "law broken"
    BUFFER_REPLACED = "buffer replaced"
    NOT_IDEMPOTENT = "not idempotent"
    WRONG_OUTPUTS = "wrong outputs"
    RAISES = "raises"
    SYNCHRONISES = "synchronises in capture"
    ALLOCATES = "allocates in replay"
    CHANGES_TORCH = "changes torch's state"
    CRASHES = "crashes"
    HANGS = "hangs"
    DEVICE_LOST = "device lost"
    FORKS = "forks"
    RECOMPILES = "recompiles"
    FLAKY = "flaky"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing wrong with a subject.

    `cause` is what was recognised (contract/explanation.py), with the `facts` that show it; None where `diagnosis`
    alone says it. `place` names the element: field, request, draft position, page. `law`: the law of contract 3.5 that
    a schedule breaks first. `section`: where the contract states the rule that is broken; None if only the sentence
    says so, or nothing does. `round` counts the rounds of the case, `seen_in_round` those of the run that found it,
    both from 0. `case` is the path of the case file that shows the finding and `reproduce` the command that replays it;
    both are None until it was written, and where it could not be, `not_saved` is the reason.
    """

    system: str
    subject: str
    diagnosis: Diagnosis
    sentence: str
    cause: str | None = None
    facts: Facts = dataclasses.field(default_factory=dict, hash=False)
    field: str | None = None
    bucket: int | None = None
    round: int | None = None
    seen_in_round: int | None = None
    place: str | None = None
    got: int | None = None
    want: int | None = None
    differing: int = 0
    draft_tokens: int = 1
    law: str | None = None
    section: str | None = None
    case: str | None = None
    reproduce: str | None = None
    not_saved: str | None = None

    @property
    def loss(self) -> str | None:
        """Return a line that says why the case could not be written; None if it was."""
        return None if self.not_saved is None else f"the case could not be saved: {self.not_saved}"

    @property
    def contract(self) -> tuple[str, ...]:
        """Links into docs/contract/ to the rule that is broken: to `section` and to what the sentence cites."""
        return contract_links(self.section, self.sentence)

    @property
    def links(self) -> str | None:
        """Return the links of `contract` as one line for people; None if there are none."""
        return ", ".join(self.contract) or None

    def to_dict(self) -> dict[str, Any]:
        """Return the finding for JSON. The keys are the attribute names, and `contract` has the links."""
        return {**dataclasses.asdict(self), "diagnosis": self.diagnosis.value, "contract": list(self.contract)}
