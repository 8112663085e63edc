"""Emission: whatever the simulated engine emits fits the tables of a run. Nothing is replayed, and nothing refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from simulated import check

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.round_table import tabulate
from dsa_verify.rounds.matrix import CHUNK_ROUNDS, REMAPS_PER_ROUND, Config, diagnostic_matrix
from dsa_verify.systems.catalogue import SYSTEMS, resolve_geometry
from fuzz.engine.coverage import SAME_PAGES, TENANTS, Coverage
from fuzz.engine.simulator import EngineSimulator
from fuzz.engine.steps import AIMED, ENGINE

# (device, batch): small ones, and as wide as is fuzzed for long on either.
BATCHES = [("cuda", 4), ("cuda", 16), ("cuda", 48), ("cpu", 6)]
SLOW_ROUNDS, ROUNDS = 20_000, 300


def configuration(system: str, device: str, batch: int) -> Config:
    known = SYSTEMS[system]
    geometry, fixed = resolve_geometry(known, None, device)
    return diagnostic_matrix(known, geometry, batches=(batch,), drafts=(3,) if known.drafts else None, fixed=fixed)[0]


def simulators(system: str, device: str, batch: int, seed: int) -> tuple[Config, EngineSimulator]:
    config = configuration(system, device, batch)
    coverage = Coverage(SYSTEMS[system], config.geometry, config.buckets)
    return config, EngineSimulator(SYSTEMS[system], config.geometry, config.buckets, seed, coverage=coverage)


def emitted(system: str, device: str, batch: int, seed: int, count: int) -> Iterator[Round]:
    """`count` rounds, each of which went into a table as in a run."""
    config, simulator = simulators(system, device, batch, seed)
    generations = np.zeros(config.geometry.request_rows, np.int64)
    for start in range(0, count, CHUNK_ROUNDS):
        rounds = simulator.rounds(min(CHUNK_ROUNDS, count - start))
        widest = max(config.buckets)
        tabulate(
            SYSTEMS[system], config.geometry, rounds, generations, widest_bucket=widest, remap_slots=REMAPS_PER_ROUND
        )
        yield from rounds
        # What the simulator says of its pages is what the tables hold, but for moves that the next round makes.
        owed = [row in simulator._moved for row in range(config.geometry.request_rows)]
        claimed = [simulator.generations[row] for row in range(config.geometry.request_rows)]
        assert claimed == (generations + owed).tolist()


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_no_round_is_refused(system: str) -> None:
    moves = [len(round_.remap) for round_ in emitted(system, "cuda", 48, 0, ROUNDS)]
    assert len(moves) == ROUNDS
    assert max(moves) == REMAPS_PER_ROUND


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("device, batch", BATCHES)
@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_no_round_of_a_long_run_is_refused(system: str, device: str, batch: int, seed: int) -> None:
    assert sum(1 for _ in emitted(system, device, batch, seed, SLOW_ROUNDS)) == SLOW_ROUNDS


def test_rounds_that_are_aimed_move_no_more_requests_than_a_round_can() -> None:
    """And those that an engine's rounds owe are made, however many rounds from outside come before."""
    _, simulator = simulators("decode", "cpu", 48, 5)
    for regime in itertools.islice(itertools.cycle(("fill", AIMED, "other pages", AIMED, "shuffle")), 100):
        round_ = simulator.play(regime)
        check(simulator)
        assert len(round_.remap) <= REMAPS_PER_ROUND
        if regime in ENGINE:
            assert not simulator._moved


def test_a_request_that_is_to_be_on_other_pages_is_on_them() -> None:
    _, simulator = simulators("decode", "cpu", 48, 0)
    before = np.array([3, 5, -1, 3, 7, 8, 9, 10])
    tenants = np.full(8, TENANTS.index("same request on other pages"))
    allowed = simulator._as_many_as_move(tenants, before)
    assert [before[i] for i, tenant in enumerate(allowed) if tenant != SAME_PAGES] == [3, 5, -1, 3, 7, 8]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"remap": (1, 2, 3, 1, 4, 5)}, r"rounds\[1\].remap: 5 request rows move, more than the 4 .* another round"),
        ({"bucket": 8}, r"rounds\[1\].bucket: 8 exceeds 4"),
        ({"bucket": 1}, r"rounds\[1\].seq_lens: 2 requests exceed the bucket of 1"),
        ({"requests": (1,)}, r"rounds\[1\].requests: 1 entries for 2 seq_lens"),
    ],
)
def test_what_does_not_fit_a_table_is_refused_in_words(changes: dict[str, object], message: str) -> None:
    geometry = Geometry.resolve("tiny", {"request_rows": 9})
    fits = Round(bucket=4, seq_lens=(5, 6), requests=(1, 2), remap=(1, 2, 3, 1, 4))
    rounds = [fits, dataclasses.replace(fits, **changes)]  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        tabulate(SYSTEMS["decode"], geometry, rounds, np.zeros(9, np.int64), widest_bucket=4, remap_slots=4)
