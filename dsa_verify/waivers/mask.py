"""WaiverMask: which words of a field a waiver covers, found on the device in every round; all others are judged.

The judge is shown a copy of the field in which the covered words have become what they must be. A word that was never
written is exactly what it was before the replay, and one that is frozen is what was right for the inputs at capture:
both are seen to be so in every round. What another waiver covers is any wrong word of the field, so that rounds of it
are explained (confirm.py).

Lifetimes: all buffers belong to this object. `remember` writes one after the poison, `update` the others before the
judge looks, both inside the harness's graphs; the host reads the counters when it polls.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from dsa_verify.buffers.region import Region, as_words
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.judge.judge import Difference, Phase, differences_at, expected_words, live_words, wrong_words
from dsa_verify.waivers.waivers import Waiver

MOST_EXPLAINED: Final = 1024  # words of a field in one round, each by itself


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """`rounds` with a covered word, the number of the first of them (-1: none), and `words` in all."""

    rounds: int
    words: int
    first_round: int


class WaiverMask:
    """The words of one field of one bucket.

    `region`: the field as it lies in `source`, the subject's output. `shown`: what the judge would be shown instead,
    where that is a copy in canonical form. `at_capture`: the oracle's words for the inputs at capture, int32 like
    `region.want`. `whole`: written as a whole or not at all, as a list is (contract 5). `copy`: what the judge is shown
    now.
    """

    def __init__(
        self,
        waiver: Waiver,
        region: Region,
        source: torch.Tensor,
        shown: torch.Tensor | None,
        *,
        at_capture: torch.Tensor,
        whole: bool,
        round_index: torch.Tensor,
    ):
        self.waiver = waiver
        self.region = region if shown is None else dataclasses.replace(region, got=as_words(shown))
        self.copy = torch.empty_like(source if shown is None else shown, memory_format=torch.contiguous_format)
        self.explained = False
        self._words, self._memory, self._whole = as_words(self.copy), region.got, whole
        self._before = torch.zeros_like(region.got, memory_format=torch.contiguous_format)
        self._accepted = torch.zeros_like(self._words)
        self._covered = torch.zeros_like(self._words, dtype=torch.bool)
        self._known = torch.zeros_like(self._covered)
        self._frozen = dataclasses.replace(region, want=at_capture)
        self._round_index = round_index
        self._seen = torch.zeros(3, dtype=torch.int64, device=region.got.device)  # rounds, words, first round + 1

    def remember(self) -> None:
        """What lies there before the replay; asynchronous and capturable."""
        self._before.copy_(self._memory)

    def update(self, phase: Phase) -> None:
        """Make `copy` anew; asynchronous and capturable. Only `Phase.REPLAY` counts.

        What a later look finds must be what was covered then: another replay, or another bucket's, changes nothing.
        """
        got = self.region.got
        want, checked = expected_words(self.region, live_words(self.region))
        wrong = (got != want) & checked
        first_look = phase in (Phase.BEFORE_GRAPH, Phase.REPLAY)
        covered = wrong & (self._is_waived() if first_look else got == self._accepted)
        self._words.copy_(torch.where(covered, want, got))
        if phase is Phase.REPLAY:
            if not self.region.poisonable:  # what was wrong in an earlier round stays so, with nothing new to explain
                self._known.copy_(self._covered & (self._memory == self._before))
            self._covered.copy_(covered)
            self._accepted.copy_(torch.where(covered, got, want))
            self._count(covered)

    def unwritten(self) -> torch.Tensor:
        """bool [rows, words]: what the last replay left as it was."""
        same = self._memory == self._before
        return same.all().expand_as(same) if self._whole else same

    def differences(self, round_: int) -> list[Difference]:
        """The words that this round has covered anew, the first MOST_EXPLAINED in row-major order."""
        _, want = wrong_words(self.region)
        places = (self._covered & ~self._known).nonzero()[:MOST_EXPLAINED]
        return differences_at(self.region, want, places.tolist(), round_, Phase.REPLAY)

    def seen(self) -> Seen:
        """Since the last `reset`; synchronises."""
        rounds, words, first = self._seen.tolist()
        return Seen(rounds=rounds, words=words, first_round=first - 1)

    def reset(self) -> None:
        """Forget everything seen so far."""
        self._seen.zero_()

    def _is_waived(self) -> torch.Tensor:
        """Of a wrong word, bool [rows, words]."""
        if self.waiver.sampled:
            return torch.ones_like(self._words, dtype=torch.bool)
        found = torch.zeros_like(self._words, dtype=torch.bool)
        if Diagnosis.NEVER_WRITTEN in self.waiver.diagnoses:
            found = found | self.unwritten()
        if Diagnosis.FROZEN in self.waiver.diagnoses:
            every = torch.ones_like(found)
            found = found | (self.region.got == expected_words(self._frozen, every)[0])
        return found

    def _count(self, covered: torch.Tensor) -> None:
        rounds, words, first = self._seen.unbind()
        any_ = covered.any()
        rounds.add_(any_)
        words.add_(covered.sum())
        first.copy_(torch.where((first == 0) & any_, self._round_index[0] + 1, first))
