"""FirstReplay: what the first replay of a round left, which a second replay on the same inputs must leave again.

The oracle cannot say whether a replay repeats itself: a field that is wrong in both replays in the same way is wrong,
and idempotent. Only the slow run keeps these copies (confirm.py); the fast one holds both replays against the oracle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch

from dsa_verify.buffers.region import Kind, Region
from dsa_verify.contract.layout import Dead
from dsa_verify.judge.judge import Judge, Phase
from dsa_verify.waivers.mask import WaiverMask


class FirstReplay:
    """Copies of `regions`, which the judge looks at in every replay; `waived`: words of them that are shown righted.

    `judge` holds the memory of `regions` against the copies; it is the caller's to poll and to reset.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        waived: Collection[WaiverMask],
        device: torch.device,
        round_index: torch.Tensor,
    ):
        self._copies = [(each.got, _copy_of(each.got)) for each in regions if each.kind is not Kind.ORACLE_GUARD]
        copies = iter(self._copies)
        self.judge = Judge(
            [each if each.kind is Kind.ORACLE_GUARD else _against(each, next(copies)[1]) for each in regions],
            device,
            round_index,
        )
        by_memory = {got.data_ptr(): (got, copy) for got, copy in self._copies}
        self._waived = [
            (words.region.got, _copy_of(words.region.got), *by_memory[words.copy.data_ptr()]) for words in waived
        ]

    def keep(self) -> None:
        """Copy what lies there now."""
        for got, copy in self._copies:
            copy.copy_(got)
        for memory, copy, _, _ in self._waived:
            copy.copy_(memory)

    def compare(self) -> None:
        """Judge what lies there now."""
        for _, was, shown, copy in self._waived:
            # What is no longer covered was shown as the right value, and held another.
            copy.copy_(torch.where(shown == copy, copy, was))
        self.judge.launch(Phase.SECOND_REPLAY)


def _copy_of(words: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(words, memory_format=torch.contiguous_format)


def _against(region: Region, copy: torch.Tensor) -> Region:
    """Return `region`, of which every word that was looked at must be what `copy` holds."""
    changes: dict[str, object] = {"want": copy, "want_per_request": False}
    if region.dead is Dead.PAD or region.want is None:
        changes |= {"live_bound": None, "live_rows": None}
    return dataclasses.replace(region, **changes)  # type: ignore[arg-type]
