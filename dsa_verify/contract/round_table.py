"""RoundTable: many rounds as columns, padded the way an engine pads them, ready to be uploaded in one go.

The replayer never looks at a `Round` while it replays; it uploads a table and lets the device pick row after row.
Everything the judge needs to know about liveness is derived here, on the host, from the contract's rules: the live
token bound of each request, the token rows of this round and the request each of them belongs to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.batch import Batch
from dsa_verify.contract.geometry import DISJOINT_GENERATIONS, Geometry
from dsa_verify.contract.live import live_candidates, live_tokens, owned_rows, owners
from dsa_verify.contract.round import POISONS, Round
from dsa_verify.contract.static_inputs import PAD_REQUEST
from dsa_verify.contract.system import System

PAGE_ID_MULTIPLIER: Final = 0x9E3779B1  # odd, so multiplying permutes the ids modulo a power of two

Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundTable:
    """M rounds, padded to the widest bucket B and the most token rows T. All arrays are int64.

    `bucket`, `raw`, `poison` (index into POISONS), `twice`, `foreign`, `seed`, `token_rows`: [M]. `seq_lens`,
    `requests`, `live_tokens`, `live_candidates`: [M, B]. `lens`: by name, [M, B] of each drawn input of the system's
    own, of which rounds say those in `said`. `row_request`: [M, T], the batch row that owns each token row (0 beyond
    `token_rows`). `remap_rows`, `remap_generations`: [M, R], row -1 where there is none; the first `remap_pages` pages
    of such a row are those that `remap_origins` had (0 of row 0: none).
    """

    bucket: Array
    raw: Array
    poison: Array
    twice: Array
    foreign: Array
    seed: Array
    token_rows: Array
    seq_lens: Array
    requests: Array
    lens: Mapping[str, Array]
    said: tuple[str, ...]
    live_tokens: Array
    live_candidates: Array
    row_request: Array
    remap_rows: Array
    remap_generations: Array
    remap_origins: Array
    remap_pages: Array

    def __len__(self) -> int:
        return len(self.bucket)

    def drawn(self, name: str) -> Array:
        """Return the column that the static input `name` is filled from: [M, B]."""
        return {"seq_lens": self.seq_lens, "req_pool_indices": self.requests, **self.lens}[name]

    def rounds(self) -> list[Round]:
        """Return all rows as `Round`s."""
        return [self.round(i) for i in range(len(self))]

    def round(self, i: int) -> Round:
        """Return row `i` as a `Round`."""
        raw = int(self.raw[i])
        return Round(
            bucket=int(self.bucket[i]),
            seq_lens=tuple(self.seq_lens[i, :raw].tolist()),
            requests=tuple(self.requests[i, :raw].tolist()),
            lens={name: tuple(self.lens[name][i, :raw].tolist()) for name in self.said},
            remap=tuple(int(row) for row in self.remap_rows[i] if row >= 0),
            prefixes=tuple(
                (int(self.remap_rows[i, slot]), int(self.remap_origins[i, slot]), int(self.remap_pages[i, slot]))
                for slot in np.flatnonzero(self.remap_pages[i])
            ),
            poison=POISONS[int(self.poison[i])],
            twice=bool(self.twice[i]),
            foreign=bool(self.foreign[i]),
            seed=int(self.seed[i]),
        )


def tabulate(
    system: System,
    geometry: Geometry,
    rounds: Sequence[Round],
    generations: Array,
    *,
    widest_bucket: int,
    remap_slots: int | None = None,
) -> RoundTable:
    """Return the table of `rounds`; `generations` [request_rows] is advanced in place by their remaps.

    `remap_slots`: request rows that may move in one round; None: as many as do in the round that moves most. UsageError
    for a round that does not fit: more rows that move, more requests than its bucket or a bucket above
    `widest_bucket`, counts that the system has not, and lengths that a write plan leaves undefined (contract 4.2).
    """
    count, said = len(rounds), system.lens(geometry)
    slots = remap_slots if remap_slots is not None else max((len(r.remap) for r in rounds), default=0)
    seq_lens = np.full((count, widest_bucket), system.pad_length(geometry), np.int64)
    requests = np.full((count, widest_bucket), PAD_REQUEST, np.int64)
    lens = {spec.name: np.full((count, widest_bucket), spec.pad, np.int64) for spec in system.drawn(geometry)}
    remap_rows = np.full((count, slots), -1, np.int64)
    remap_generations, remap_origins, remap_pages = (np.zeros((count, slots), np.int64) for _ in range(3))
    for i, round_ in enumerate(rounds):
        raw = round_.raw_batch
        _check_fits(round_, widest_bucket, slots, where=f"rounds[{i}].")
        system.check_lengths(geometry, round_.seq_lens, where=f"rounds[{i}].")
        if system.check_round is not None:
            has = {name: round_.lens.get(name, ()) for name in said}
            system.check_round(geometry, round_.bucket, has, f"rounds[{i}].")
        seq_lens[i, :raw] = round_.seq_lens
        requests[i, :raw] = round_.requests
        for name, values in round_.lens.items():
            if name not in said:
                raise UsageError(f"rounds[{i}].{name}: {system.why_not(name)}")
            lens[name][i, :raw] = values
        taken = {row: (origin, pages) for row, origin, pages in round_.prefixes}
        for slot, row in enumerate(dict.fromkeys(round_.remap)):
            generations[row] += 1
            remap_rows[i, slot] = row
            remap_generations[i, slot] = generations[row]
            remap_origins[i, slot], remap_pages[i, slot] = taken.get(row, (PAD_REQUEST, 0))
    return complete_table(
        system,
        geometry,
        bucket=np.array([r.bucket for r in rounds], np.int64),
        raw=np.array([r.raw_batch for r in rounds], np.int64),
        poison=np.array([POISONS.index(r.poison) for r in rounds], np.int64),
        twice=np.array([r.twice for r in rounds], np.int64),
        foreign=np.array([r.foreign for r in rounds], np.int64),
        seed=np.array([r.seed for r in rounds], np.int64),
        seq_lens=seq_lens,
        requests=requests,
        lens=lens,
        remap_rows=remap_rows,
        remap_generations=remap_generations,
        remap_origins=remap_origins,
        remap_pages=remap_pages,
    )


def _check_fits(round_: Round, widest_bucket: int, remap_slots: int, *, where: str) -> None:
    """Raise UsageError for a round that the columns of a table do not hold."""
    raw, moves = round_.raw_batch, len(set(round_.remap))
    if round_.bucket > widest_bucket:
        raise UsageError(f"{where}bucket: {round_.bucket} exceeds {widest_bucket}, the widest of this run; capture it")
    if raw > round_.bucket:
        raise UsageError(f"{where}seq_lens: {raw} requests exceed the bucket of {round_.bucket}; use a wider bucket")
    for name, values in {"requests": round_.requests, **round_.lens}.items():
        if len(values) != raw:
            raise UsageError(f"{where}{name}: {len(values)} entries for {raw} seq_lens; give one a request")
    if moves > remap_slots:
        raise UsageError(
            f"{where}remap: {moves} request rows move, more than the {remap_slots} that a round of this run has room "
            "for; move the others in another round"
        )


def complete_table(
    system: System,
    geometry: Geometry,
    *,
    bucket: Array,
    raw: Array,
    poison: Array,
    twice: Array,
    seed: Array,
    seq_lens: Array,
    requests: Array,
    lens: Mapping[str, Array],
    remap_rows: Array,
    remap_generations: Array,
    remap_origins: Array,
    remap_pages: Array,
    foreign: Array | None = None,
) -> RoundTable:
    """Return a table from its drawn columns; adds what the contract derives from them (live bounds, token rows)."""
    widest = seq_lens.shape[1]
    batch = Batch(
        row=np.arange(widest),
        bucket=bucket[:, None],
        raw=raw[:, None],
        tokens=np.array([system.capacity(geometry, int(each)) for each in bucket], np.int64)[:, None],
        seq_lens=seq_lens,
        lens=lens,
    )
    owned = owned_rows(np, system, geometry, batch)
    row_request, token_rows = owners(np, batch, owned, np.arange(system.capacity(geometry, widest)))
    return RoundTable(
        bucket=bucket,
        raw=raw,
        poison=poison,
        twice=twice,
        foreign=np.zeros_like(twice) if foreign is None else foreign,
        seed=seed,
        token_rows=token_rows[:, 0],
        seq_lens=seq_lens,
        requests=requests,
        lens=lens,
        said=tuple(system.lens(geometry)),
        live_tokens=live_tokens(system, batch, owned),
        live_candidates=live_candidates(np, system, geometry, batch),
        row_request=row_request,
        remap_rows=remap_rows,
        remap_generations=remap_generations,
        remap_origins=remap_origins,
        remap_pages=remap_pages,
    )


def page_ordinals(geometry: Geometry, rows: Array, generations: Array) -> Array:
    """Return the number of the first page of each row, by which its page ids are told from all others; below 2**31."""
    return ((generations % DISJOINT_GENERATIONS) * geometry.request_rows + rows) * geometry.pages_per_row


def token_slots(geometry: Geometry, rows: Array, generations: Array) -> Array:
    """Slots of whole rows of `req_to_token` that share nothing: int64 [len(rows), token_columns] (contract 0.1).

    Pages are consecutive and aligned; page ids differ between rows, pages and DISJOINT_GENERATIONS generations, so
    a slot says which request and position it belongs to. Row 0, the pad request, is all zero.
    """
    pages = np.arange(geometry.pages_per_row, dtype=np.int64)
    ordinal = page_ordinals(geometry, rows, generations)[:, None] + pages[None, :]
    page_id = geometry.first_page + (ordinal * PAGE_ID_MULTIPLIER) % geometry.page_id_space
    width = geometry.allocator_page
    slots = (page_id[:, :, None] * width + np.arange(width)).reshape(len(rows), -1)[:, : geometry.token_columns]
    return np.where(rows[:, None] == PAD_REQUEST, 0, slots)


def owner_of_slot(geometry: Geometry, slot: int) -> tuple[int, int, int] | None:
    """Return (request row, position, generation modulo DISJOINT_GENERATIONS) for which `slot` was drawn; None if for
    nobody. The row need not have it now, and others may have taken it in a prefix."""
    page_id, offset = divmod(slot, geometry.allocator_page)
    inverse = pow(PAGE_ID_MULTIPLIER, -1, geometry.page_id_space)
    ordinal = (page_id - geometry.first_page) * inverse % geometry.page_id_space
    base, page = divmod(ordinal, geometry.pages_per_row)
    generation, row = divmod(base, geometry.request_rows)
    position = page * geometry.allocator_page + offset
    drawn = 0 <= page_id - geometry.first_page < geometry.page_id_space
    known = drawn and generation < DISJOINT_GENERATIONS
    if not known or row == PAD_REQUEST or position >= geometry.token_columns:
        return None
    return row, position, generation
