"""Fuzzer: runs a setup through the rounds of a simulator, captured anew from time to time, and says what was seen.

The simulator's rounds go the way of all rounds (verify.py): in chunks, polled once a chunk, a difference confirmed and
explained from nothing. A stretch between two captures is one run of it, in which request pages start where captures
find them. The first finding ends the fuzzing. The same setup, rounds and seed give the same rounds and the same digest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Finding
from dsa_verify.contract.round_table import RoundTable
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import CHUNK_ROUNDS
from dsa_verify.run.verify import FINDINGS_FOLDER, Counts, verify_rounds
from fuzz.engine.bulk_rounds import resident_chunks
from fuzz.engine.coverage import Coverage
from fuzz.engine.simulator import EngineSimulator

ROUNDS_PER_CAPTURE: Final = 8 * CHUNK_ROUNDS
SLOW_CHUNK_ROUNDS: Final = 64  # on a CPU, where a round costs more than a poll


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FuzzResult:
    """A fuzz run ended with this. `requested`: rounds that were asked for; `executed`: that were replayed. They differ
    only after a finding, when `coverage` has seen its whole chunk. `captures`: how often all buckets were captured."""

    seed: int
    requested: int
    executed: int
    captures: int
    findings: tuple[Finding, ...]
    counts: Counts
    coverage: Coverage

    @property
    def digest(self) -> str:
        """Return the digest of the coverage map."""
        return self.coverage.digest()

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON, without the findings and counts, which a run reports in its own way."""
        return {
            "seed": self.seed,
            "rounds_requested": self.requested,
            "rounds_executed": self.executed,
            "captures": self.captures,
            "coverage_digest": self.digest,
            "visited": sum(map(bool, self.coverage.visits().values())),
            "never_visited": [list(key) for key in self.coverage.never_visited()],
        }


def fuzz(
    setup: ReplaySetup,
    rounds: int,
    seed: int = 0,
    coverage: Coverage | None = None,
    *,
    folder: Path | None = FINDINGS_FOLDER,
    outside: bool = True,
    resident: bool = False,
    rounds_per_capture: int = ROUNDS_PER_CAPTURE,
    chunk_rounds: int | None = None,
    on_rounds: Callable[[int], None] = lambda count: None,
) -> FuzzResult:
    """Replay up to `rounds` rounds of a simulator seeded with `seed`, steered by `coverage` (None: one of its own).

    `outside`: also rounds that no engine would produce. `resident`: those only, drawn in chunks and not steered, for
    speed (resident.py). `folder`, `on_rounds`: as in verify_rounds, which also says
    what is raised. UsageError for a count below 1: a run that checks nothing must not look like one that did.
    """
    if chunk_rounds is None:
        chunk_rounds = CHUNK_ROUNDS if setup.backend.device.type == "cuda" else SLOW_CHUNK_ROUNDS
    for name, value in (("rounds", rounds), ("rounds_per_capture", rounds_per_capture), ("chunk_rounds", chunk_rounds)):
        if value < 1:
            raise UsageError(f"{name}: {value} is below 1; use 1 or more")
    coverage = coverage or Coverage(setup.system, setup.geometry, setup.buckets)
    simulator = EngineSimulator(setup.system, setup.geometry, setup.buckets, seed, coverage=coverage, outside=outside)
    counts, captures, left, findings = Counts(), 0, rounds, list[Finding]()
    while left and not findings:
        count = min(left, rounds_per_capture)
        coverage.recaptured()
        chunks = (
            resident_chunks(setup, seed, rounds - left, count, chunk_rounds, coverage)
            if resident
            else _chunks(setup, simulator, count, chunk_rounds)
        )
        chunks = setup.with_foreign_work(chunks, captures)
        found = verify_rounds(setup, chunks, counts, folder=folder, on_rounds=on_rounds)
        findings = [_after(rounds - left, finding) for finding in found]
        captures, left = captures + 1, left - count
    counts.configs = 1
    return FuzzResult(
        seed=seed,
        requested=rounds,
        executed=counts.replays,
        captures=captures,
        findings=tuple(findings),
        counts=counts,
        coverage=coverage,
    )


def _after(first: int, finding: Finding) -> Finding:
    """Return `finding` of a stretch that began with round `first` of the run."""
    seen = finding.seen_in_round
    return finding if seen is None else dataclasses.replace(finding, seen_in_round=first + seen)


def _chunks(setup: ReplaySetup, simulator: EngineSimulator, count: int, chunk_rounds: int) -> Iterator[RoundTable]:
    """The next `count` rounds of `simulator`, on pages that no round has moved yet."""
    generations = setup.generations()
    for start in range(0, count, chunk_rounds):
        yield setup.table(simulator.rounds(min(chunk_rounds, count - start)), generations=generations)
