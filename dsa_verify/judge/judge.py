"""Judge: compares every region of one bucket in one launch and keeps the first differences on the device.

Why not assert tensor by tensor: that costs a launch and a synchronisation a field, a thousand times what a round
costs. Instead one launch walks a table of regions, adds what it compared and what differed to device counters, and
stores the first RING_ENTRIES differences of *each* region, so that a noisy field cannot push out the evidence of
another. The host reads nothing until it polls.

Lifetimes: the counters and rings belong to the judge, are written by its launches only and read by `poll` only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final

import torch

from dsa_verify.buffers.region import Kind, Region
from dsa_verify.buffers.region_kernels import RegionTable
from dsa_verify.contract.layout import Dead

RING_ENTRIES: Final = 32
RING_COLUMNS: Final = 6  # round, phase, row, word, got, want


class Phase(IntEnum):
    """The judge looks at these points of a round."""

    BEFORE = 0  # before this bucket's inputs change: what other buckets' replays did to it
    FILLED = 1  # the inputs have been filled, nobody has read them: what the engine's preparation left
    BEFORE_GRAPH = 2  # after the eager work, before the graph: what a consumer may already read then
    REPLAY = 3
    SECOND_REPLAY = 4  # the same inputs again: nothing may change


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One word that is not what it must be, and what it and the right one hold."""

    region: Region
    round: int
    phase: Phase
    row: int
    word: int
    got: int
    want: int

    @property
    def column(self) -> int:
        """Return the element that the word belongs to."""
        return self.word // self.region.words_per_element


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """A tally holds what a judge has seen since it was reset: words that differed, by region, and elements compared.

    `first` is ordered by round, phase, region, row and column; `differing` holds only regions with a difference.
    """

    compared: int
    differing: Mapping[Region, int]
    first: tuple[Difference, ...]

    def count(self, *kinds: Kind) -> int:
        """Words that differed in regions of `kinds` (all, if none is named)."""
        return sum(count for region, count in self.differing.items() if not kinds or region.kind in kinds)


class Judge:
    """Judges `regions` on `device`. `round_index`: int64 [1] on the device, the number of the current round."""

    def __init__(self, regions: Sequence[Region], device: torch.device, round_index: torch.Tensor):
        self.regions = list(regions)
        self._round_index = round_index
        count = len(self.regions)
        self._differing = torch.zeros(count, dtype=torch.int64, device=device)
        self._compared = torch.zeros(count, dtype=torch.int64, device=device)
        self._ring = torch.zeros((count, RING_ENTRIES, RING_COLUMNS), dtype=torch.int32, device=device)
        # The kernels on a GPU; on a CPU plain torch, against which tests hold the (interpreted) kernels.
        self.table = RegionTable(self.regions, device) if device.type == "cuda" else None

    def launch(self, phase: Phase) -> None:
        """Compare everything; asynchronous and capturable on a CUDA device."""
        if self.table is not None:
            self.table.judge(self._round_index, self._differing, self._compared, self._ring, int(phase))
            return
        for index, region in enumerate(self.regions):
            self._judge_region(index, region, phase)

    def reset(self) -> None:
        """Forget everything seen so far."""
        for counter in (self._differing, self._compared, self._ring):
            counter.zero_()

    @property
    def counters(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return int64 [regions] words that differed, int64 [regions] elements compared, int32 [regions, RING_ENTRIES,
        RING_COLUMNS] first differences: all that was seen, on the device."""
        return self._differing, self._compared, self._ring

    def poll(self) -> Tally:
        """Read the counters; synchronises. Differences come ordered by round, phase, region, row, column."""
        return self.read(self.counters)

    def read(self, counters: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Tally:
        """Read `counters`, the judge's own or a copy of them on the host."""
        differing_by_region, compared, ring = counters
        differing = differing_by_region.tolist()
        found = []
        for index, count in enumerate(differing):
            if count:
                entries = ring[index, : min(count, RING_ENTRIES)].tolist()
                found += [(entry, index) for entry in entries]
        found.sort(key=lambda pair: (pair[0][0], pair[0][1], pair[1], pair[0][2], pair[0][3]))
        return Tally(
            compared=int(compared.sum()),
            differing={region: count for region, count in zip(self.regions, differing, strict=True) if count},
            first=tuple(self._difference(entry, index) for entry, index in found),
        )

    def _difference(self, entry: Sequence[int], index: int) -> Difference:
        region = self.regions[index]
        round_, phase, row, word, got, want = entry
        return Difference(region=region, round=round_, phase=Phase(phase), row=row, word=word, got=got, want=want)

    def _judge_region(self, index: int, region: Region, phase: Phase) -> None:
        checked, wrong = _compare(region)
        if region.kind is Kind.FIELD:
            words = region.got.numel() if checked is None else checked.count_nonzero()
            self._compared[index] += words // region.words_per_element
        count = int(wrong.count_nonzero()) if wrong is not None and wrong.any() else 0
        if not count:
            return
        assert wrong is not None
        want, _ = expected_words(region, live_words(region))
        start = int(self._differing[index])
        self._differing[index] += count
        places = wrong.nonzero()[: max(0, RING_ENTRIES - start)]
        for slot, (row, word) in enumerate(places.tolist(), start):
            entry = (int(self._round_index), int(phase), row, word, int(region.got[row, word]), int(want[row, word]))
            self._ring[index, slot] = torch.tensor(entry, dtype=torch.int32)


def differences_at(
    region: Region, want: torch.Tensor, places: Sequence[tuple[int, int]], round_: int, phase: Phase
) -> list[Difference]:
    """Return what `region` holds now at `places` (row, word), and what `want` [rows, words] says must be there."""
    return [
        Difference(
            region=region,
            round=round_,
            phase=phase,
            row=row,
            word=word,
            got=int(region.got[row, word]),
            want=int(want[row, word]),
        )
        for row, word in places
    ]


def wrong_words(region: Region) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (which words are wrong now, what each must be), both [rows, words]."""
    want, checked = expected_words(region, live_words(region))
    return (region.got != want) & checked, want


def _compare(region: Region) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (which words were compared, None for all; which of them are wrong, None for none), both [rows, words].

    What `expected_words` says, without the tensors that most regions do not need: guards and inputs are compared as a
    whole, and far more often than fields.
    """
    if region.want is None:
        return None, region.got != region.constant
    if region.live_rows is None and region.live_bound is None and not region.want_per_request:
        return None, None if torch.equal(region.got, region.want) else region.got != region.want
    live = live_words(region)
    want, checked = expected_words(region, live)
    return checked, (region.got != want) & checked


def live_words(region: Region) -> torch.Tensor:
    """Return bool [rows, words]: which words of `region` a consumer may read after the round just replayed."""
    rows, words = region.got.shape
    device = region.got.device
    if region.want is None:
        return torch.zeros((rows, words), dtype=torch.bool, device=device)
    row = torch.arange(rows, device=device)
    live = torch.ones((rows, words), dtype=torch.bool, device=device)
    if region.live_rows is not None:
        live &= (row < region.live_rows + region.live_rows_extra)[:, None]
    if region.live_bound is not None:
        column = torch.arange(words, device=device) // region.words_per_element
        bound = region.live_bound[_request(region, row)]
        live &= region.column_start + column[None, :] * region.column_step < bound[:, None]
    return live


def expected_words(region: Region, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (what each word must be, which words must be that), both [rows, words]."""
    constant = torch.full_like(region.got, region.constant)
    if region.want is None:
        return constant, torch.ones_like(live)
    row = torch.arange(region.got.shape[0], device=region.got.device)
    want = region.want[_request(region, row)] if region.want_per_request else region.want
    checked = torch.ones_like(live) if region.dead is Dead.PAD else live
    return torch.where(live, want, constant), checked


def _request(region: Region, row: torch.Tensor) -> torch.Tensor:
    return row if region.row_request is None else region.row_request[row].long()
