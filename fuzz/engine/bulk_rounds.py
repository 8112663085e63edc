"""Resident rounds: whole chunks drawn from a counter on the setup's own device, with no work for a single round.

A steered simulator (simulator.py) costs about a millisecond a round, ten times what a small round costs a GPU. These
rounds are not steered: each is a hash of (seed, number), so that any of them can be rebuilt without having been stored,
and coverage is taken of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from dsa_verify.contract.round_table import Array, RoundTable, complete_table
from dsa_verify.contract.static_inputs import PAD_REQUEST
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import REMAPS_PER_ROUND
from fuzz.engine.coverage import Coverage
from fuzz.engine.expansion import RoundSpec, expand_columns, moves_of, regimes
from fuzz.engine.strategies import specs_at

OBSERVED_OF_A_CHUNK: Final = 16  # successive rounds, so that pairs are seen


def resident_chunks(
    setup: ReplaySetup, seed: int, first: int, count: int, chunk_rounds: int, coverage: Coverage
) -> Iterator[RoundTable]:
    """Rounds `first` to `first + count` of `seed`, on pages that no round has moved yet."""
    generations = np.zeros(setup.geometry.request_rows, np.int64)
    coverage.expect(regimes(setup.system, setup.geometry))
    for start in range(first, first + count, chunk_rounds):
        numbers = range(start, min(start + chunk_rounds, first + count))
        specs = specs_at(seed, numbers, setup.system, setup.geometry, setup.buckets)
        table = _table(setup, specs, generations)
        coverage.recaptured()  # what came before the sample is not in the map
        for i, spec in enumerate(specs[:OBSERVED_OF_A_CHUNK]):
            coverage.observe(table.round(i), spec.regime)
        yield table


def _table(setup: ReplaySetup, specs: list[RoundSpec], generations: Array) -> RoundTable:
    device = setup.backend.device if setup.backend.device.type == "cuda" else None
    drawn = expand_columns(specs, setup.system, setup.geometry, device)
    columns = {name: _host(values) for name, values in drawn.items()}
    count, widest = len(specs), max(setup.buckets)
    live = np.arange(widest)[None, :] < columns["raw"][:, None]

    def padded(name: str, pad: int) -> Array:
        wide = np.full((count, widest), pad, np.int64)
        values = columns[name]
        wide[:, : values.shape[1]] = values
        return np.where(live, wide, pad)

    moves = _moves(columns, generations)
    system, geometry = setup.system, setup.geometry
    return complete_table(
        system,
        geometry,
        bucket=columns["bucket"],
        raw=columns["raw"],
        poison=columns["poison"],
        twice=columns["twice"],
        seed=columns["seed"] if system.seeded else np.zeros(count, np.int64),
        seq_lens=padded("seq_lens", system.pad_length(geometry)),
        requests=padded("requests", PAD_REQUEST),
        lens={spec.name: padded(spec.name, spec.pad) for spec in system.drawn(geometry)},
        **moves,
    )


def _moves(columns: dict[str, Array], generations: Array) -> dict[str, Array]:
    """The remaps with each row once a round, and the generation it moves to; `generations` is advanced."""
    count = len(columns["remap"])
    rows = np.full((count, REMAPS_PER_ROUND), -1, np.int64)
    moved, origins, pages = (np.zeros_like(rows) for _ in range(3))
    for i in np.flatnonzero((columns["remap"] >= 0).any(1)):
        for slot, (row, origin, taken) in enumerate(moves_of(columns, int(i))):
            generations[row] += 1
            rows[i, slot], moved[i, slot] = row, generations[row]
            origins[i, slot], pages[i, slot] = origin, taken
    return {"remap_rows": rows, "remap_generations": moved, "remap_origins": origins, "remap_pages": pages}


def _host(values: Any) -> Array:
    host: Array = values if isinstance(values, np.ndarray) else values.cpu().numpy()
    return host
