"""Observation: what a replayer has seen, read from the device at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dsa_verify.judge.judge import Tally
from dsa_verify.replay.bucket import AddressChange, WrongRoute
from dsa_verify.replay.compilations import Compilation
from dsa_verify.waivers.mask import Seen, WaiverMask


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketSeen:
    """The judge has seen this in one bucket: `rounds` were replayed, in each of which `fields` fields were judged.
    `waived`: the words that each waiver covers. `occurred`: whether what must occur has. `eager_oracle`: what kept the
    oracle from being captured; empty if nothing did."""

    rounds: int
    fields: int
    tally: Tally
    waived: tuple[tuple[WaiverMask, Seen], ...]
    occurred: Mapping[str, bool]
    eager_oracle: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The judges have seen this since the replayer was opened or reset. `buckets`: by bucket, the widest first.
    `compilations`: of kernels while rounds ran."""

    buckets: Mapping[int, BucketSeen]
    address_changes: tuple[AddressChange, ...]
    wrong_routes: tuple[WrongRoute, ...]
    compilations: tuple[Compilation, ...]

    @property
    def tallies(self) -> dict[int, Tally]:
        """Return what the judges have seen, by bucket."""
        return {bucket: seen.tally for bucket, seen in self.buckets.items()}

    @property
    def first_wrong_round(self) -> int | None:
        """Return the number of the first round in which anything was seen to be wrong; None if nothing was."""
        rounds = [difference.round for seen in self.buckets.values() for difference in seen.tally.first]
        rounds += [change.round for change in self.address_changes]
        rounds += [wrong.round for wrong in self.wrong_routes]
        return min(rounds, default=None)

    @property
    def to_explain(self) -> list[tuple[int, int, WaiverMask]]:
        """Return (first round, bucket, words) where a waiver has covered words of which it is not known yet whether
        they are what it is for, earliest first."""
        found = [
            (seen.first_round, bucket, words)
            for bucket, each in self.buckets.items()
            for words, seen in each.waived
            if words.waiver.sampled and not words.explained and seen.first_round >= 0
        ]
        return sorted(found, key=lambda each: each[0])
