"""Account: all that is known of one thing that is wrong, until it becomes a finding with its sentence, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dsa_verify.contract.explanation import Explanation
from dsa_verify.contract.finding import LAW_RULE, Finding
from dsa_verify.diagnosis.sentences import sentence
from dsa_verify.judge.judge import Difference
from dsa_verify.judge.schedule_laws import LawBreak
from dsa_verify.waivers.waivers import Waiver


@dataclasses.dataclass(slots=True, kw_only=True)
class Account:
    """An account holds a finding without its sentence, and what the sentence is made of.

    `place`, `got`, `want`: the element and its values, for people; `place` is None where the explanation names it.
    `before_graph`: the element was wrong before the graph replayed. `said`: what the subject itself says of it.
    `law_break`: what a schedule does to its tiles. `waiver`: one that covers other differences of the field, not this.
    `after_another_replay`: what to say instead, by what the element of `difference` holds after one more replay.
    """

    base: Finding
    explanation: Explanation
    place: str | None = None
    got: str = ""
    want: str = ""
    before_graph: bool = False
    said: str = ""
    law_break: LawBreak | None = None
    waiver: Waiver | None = None
    difference: Difference | None = None
    after_another_replay: Mapping[int, Explanation] = dataclasses.field(default_factory=dict)

    @property
    def field(self) -> str | None:
        """The field, guard or input that it is about."""
        return self.base.field

    def look_again(self) -> None:
        """Take the explanation that one more replay has shown; its difference is looked at where it lies now."""
        if self.difference is not None:
            seen = self.difference
            word = int(seen.region.got[seen.row, seen.word])
            self.explanation = self.after_another_replay.get(word, self.explanation)

    def finding(self) -> Finding:
        """Put it into words."""
        parts = [sentence(self.explanation, place=self.place, got=self.got, want=self.want)]
        if self.before_graph:
            parts = [f"before the graph replays: {parts[0]}"]
        parts += [self.said] if self.said else []
        law, section = self.base.law, self.base.section
        if self.law_break is not None:
            law, section = self.law_break.law.value, LAW_RULE
            parts.append(self.law_break.sentence)
        if self.waiver is not None:
            parts.append(f"waiver {self.waiver.id} covers only what is {self.waiver.covered}")
        return dataclasses.replace(
            self.base,
            diagnosis=self.explanation.kind,
            cause=self.explanation.cause.value,
            facts=dict(self.explanation.facts),
            sentence="; ".join(parts),
            place=self.place,
            law=law,
            section=section,
        )
