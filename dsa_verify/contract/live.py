"""What is live in a round: which elements of the outputs a consumer may read (contract 1, 4.2, 9).

Each rule is written once, over NumPy arrays and torch tensors alike: the replayer works it out on the host for many
rounds at once, an overlay on the device for the round that a server has just replayed. `xp` is `numpy` or `torch`. All
arrays are integers: one row a round, [M, B] or [M, 1] where it says so. Everything may be captured in a graph.

Both sides of every comparison depend on it, so tests/referees/test_live.py states it a second time.
"""

from __future__ import annotations

from typing import Any

from dsa_verify.contract.batch import Batch
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.kpool import pooled_indexer
from dsa_verify.contract.system import System


def owned_rows(xp: Any, system: System, geometry: Geometry, batch: Batch) -> Any:
    """Return [M, B]: token rows that each batch row of the bucket owns."""
    return batch.seq_lens * 0 + system.token_rows(geometry) if system.owns is None else system.owns(xp, batch)


def live_tokens(system: System, batch: Batch, owned: Any) -> Any:
    """Return [M, B]: positions below are read. Lengths before the draft leave out its tokens (contract 1.2, 9)."""
    return batch.seq_lens + owned if system.adds_draft else batch.seq_lens


def owners(xp: Any, batch: Batch, owned: Any, token: Any) -> tuple[Any, Any]:
    """Return ([M, T], [M, 1]): the batch row that owns each of the token rows `token` [T] = 0..T - 1, 0 of those that
    nobody owns, and how many are owned."""
    owned = xp.where(batch.row < batch.bucket, owned, owned * 0)
    rounds, rows = owned.shape
    ends = owned.cumsum(1)
    # One ascending list for all rounds: each begins where no end of the round before can lie.
    first = (ends[:, -1:] * 0 + 1).cumsum(0) - 1
    apart = first * (len(token) + 1)
    found = xp.searchsorted((ends + apart).reshape(-1), (token + apart).reshape(-1), side="right")
    owner = found.reshape(rounds, len(token)) - first * rows
    return xp.where(token < ends[:, -1:], owner, owner * 0), ends[:, -1:]


def live_candidates(xp: Any, system: System, geometry: Geometry, batch: Batch) -> Any:
    """Return [M, B]: how many of the first columns of `write_loc` a consumer reads: the pools that a request closes
    with the tokens that it accepts; none of a pad request, whose whole row is skipped (contract 4.2)."""
    if not pooled_indexer(geometry):
        return batch.seq_lens * 0
    closed = closed_pools(system, geometry, batch.seq_lens, batch.lens.get("accept_lens"))
    return xp.where(batch.row < batch.raw, closed, closed * 0)


def closed_pools(system: System, geometry: Geometry, seq_lens: Any, accept_lens: Any = None) -> Any:
    """Pools that requests close: with `accept_lens` tokens where rounds say them, else with all."""
    start = seq_lens - system.plan_start(geometry)
    said = "accept_lens" in system.lens(geometry)
    written = accept_lens if said and accept_lens is not None else system.token_rows(geometry)
    return (start + written) // geometry.pool_size - start // geometry.pool_size
