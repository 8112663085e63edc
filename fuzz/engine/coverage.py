"""Coverage: which boundaries a history has shown, and which pairs of successive states each field has been through.

Metadata goes wrong between rounds: a buffer keeps what the last replay of its bucket left. So what counts is not that a
length was seen but what was there before it: large then small, one page down, the same batch row with another request.
Fields that turn at the same places are one `Quantity`. For each there is a map of bands (before, now), of moves (whose
row it is, how far its length moved) and of edges (where in a step it lies); beside them the boundaries of contract 10
and the pairs of the simulator's steps. What can be visited at all is enumerated, so that a report can end with what
never was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Compare, Field, Lifetime, Live, Row
from dsa_verify.contract.live import closed_pools
from dsa_verify.contract.round import Round
from dsa_verify.contract.system import System
from fuzz.engine.boundaries import Boundary, boundaries, boundary_lengths, full_rows, marks, totals

Array = npt.NDArray[np.int64]
Key = tuple[str, ...]

TENANTS: Final = ("same request", "same request on other pages", "another request")
SAME_PAGES, ON_OTHER_PAGES = TENANTS.index("same request"), TENANTS.index("same request on other pages")
MOVES: Final = ("far down", "one step down", "level", "one step up", "far up")
EDGES: Final = ("on a step", "one beyond", "one short", "inside")
PAD: Final = "pad row"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantity:
    """A quantity that `fields` follow.

    `amounts` int64 [context + 1]: tokens (or whatever is counted) of a request of each length. `step`: of these, after
    which the fields gain an element. `limits`: ascending; an amount up to limits[i] is in bands[i], more in the last
    one. `whole`: looked at as the total of the batch, pad rows included, instead of row by row; without amounts.
    """

    name: str
    fields: tuple[str, ...]
    amounts: Array
    step: int
    limits: Array
    bands: tuple[str, ...]
    whole: bool = False

    def band(self, amounts: Array) -> Array:
        """Return 1 to len(bands); 0 is that of a pad row."""
        return 1 + np.searchsorted(self.limits, amounts).astype(np.int64)

    def steps(self) -> Array:
        return -(-self.amounts // self.step)

    def edges(self) -> Array:
        """Return an index into EDGES, by length."""
        rest = self.amounts % self.step
        return np.select([rest == 0, rest == 1, rest == self.step - 1], [0, 1, 2], 3).astype(np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """The last replay of a bucket left this. [bucket]: `requests`, `generations` (-1 of a pad row), `lengths`. `bands`:
    [rows' quantities, bucket]. `totals`: the band of each whole quantity."""

    requests: Array
    generations: Array
    lengths: Array
    bands: Array
    totals: tuple[int, ...]


class Coverage:
    """The coverage of one configuration. `observe` every round in order; the same rounds give the same `digest`."""

    def __init__(self, system: System, geometry: Geometry, buckets: tuple[int, ...]) -> None:
        self.system, self.geometry, self.buckets = system, geometry, buckets
        self.rounds = 0
        self.quantities = quantities(system, geometry, buckets)
        self._rows = [quantity for quantity in self.quantities if not quantity.whole]
        self._wholes = [quantity for quantity in self.quantities if quantity.whole]
        by_length = len(self._rows), geometry.context + 1  # a system of sums has no quantity of a row
        self._band = np.array([quantity.band(quantity.amounts) for quantity in self._rows], np.int64).reshape(by_length)
        self._steps = np.array([quantity.steps() for quantity in self._rows], np.int64).reshape(by_length)
        self._edge = np.array([quantity.edges() for quantity in self._rows], np.int64).reshape(by_length)
        self._which = np.arange(len(self._rows))[:, None]
        states = 1 + max(len(quantity.bands) for quantity in self.quantities)
        self._pairs = np.zeros((len(self._rows), states, states), np.int64)
        self._moves = np.zeros((len(self._rows), len(TENANTS), len(MOVES)), np.int64)
        self._edges = np.zeros((len(self._rows), len(EDGES)), np.int64)
        self._whole_pairs = np.zeros((len(self._wholes), states, states), np.int64)
        self.boundaries: dict[Boundary, int] = dict.fromkeys(boundaries(system, geometry, buckets), 0)
        self._by_mark = {boundary.mark: boundary for boundary in self.boundaries}
        self.candidates = np.array(boundary_lengths(system, geometry), np.int64)
        self._regimes: dict[tuple[str, str], int] = {}
        self._regime: str | None = None
        self._generations = np.zeros(geometry.request_rows, np.int64)
        self._before: dict[int, _Before] = {}
        self.recaptured()

    def expect(self, regimes: Sequence[str]) -> None:
        """Each of `regimes` can follow each."""
        for pair in itertools.product(regimes, regimes):
            self._regimes.setdefault(pair, 0)

    def recaptured(self) -> None:
        """All buckets were captured anew: their buffers hold what pad rows give (contract 0.2)."""
        for bucket in self.buckets:
            self._before[bucket] = self._after(Round(bucket=bucket, seq_lens=(), requests=()))

    def observe(self, round_: Round, regime: str | None = None) -> None:
        """Count what `round_` shows, after what the rounds before it left. `regime`: the step that made it."""
        self.rounds += 1
        self._generations[list(dict.fromkeys(round_.remap))] += 1
        before, now = self._before[round_.bucket], self._after(round_)
        self._before[round_.bucket] = now
        self._observe_rows(before, now)
        for i, (was, band) in enumerate(zip(before.totals, now.totals, strict=True)):
            self._whole_pairs[i, was, band] += 1
        for mark in marks(round_, self.system, self.geometry) & self._by_mark.keys():
            self.boundaries[self._by_mark[mark]] += 1
        if self._regime is not None and regime is not None:
            self._regimes[self._regime, regime] += 1
        self._regime = regime

    def _after(self, round_: Round) -> _Before:
        raw, bucket = round_.raw_batch, round_.bucket
        requests = np.full(bucket, -1, np.int64)
        requests[:raw] = round_.requests
        lengths = np.full(bucket, self.system.pad_length(self.geometry), np.int64)
        lengths[:raw] = round_.seq_lens
        lives = requests >= 0
        return _Before(
            requests=requests,
            generations=np.where(lives, self._generations[requests], -1),
            lengths=lengths,
            bands=np.where(lives, self._band[:, lengths], 0),
            totals=tuple(self._total_band(quantity, round_) for quantity in self._wholes),
        )

    def _total_band(self, quantity: Quantity, round_: Round) -> int:
        """Return the band of a whole quantity, pad rows included."""
        if quantity.name == "sum":
            pads = round_.bucket - round_.raw_batch
            total = sum(round_.seq_lens) + pads * self.system.pad_length(self.geometry)
        else:
            tiles, long_rows = totals(round_, self.system, self.geometry)
            total = tiles if quantity.name == "tiles" else next(iter(long_rows.values()))
        return int(quantity.band(np.array(total)))

    def _observe_rows(self, before: _Before, now: _Before) -> None:
        np.add.at(self._pairs, (self._which, before.bands, now.bands), 1)
        lives = now.requests >= 0
        np.add.at(self._edges, (self._which, self._edge[:, now.lengths[lives]]), 1)
        both = lives & (before.requests >= 0)
        moved = now.generations != before.generations
        tenants = np.where(now.requests == before.requests, moved, 2)[both]
        moves = _move(self._steps[:, now.lengths[both]] - self._steps[:, before.lengths[both]])
        np.add.at(self._moves, (self._which, tenants, moves), 1)

    # Steering --------------------------------------------------------------------------------------------------------

    def least_visited_regimes(self, regimes: Sequence[str]) -> list[str]:
        """Return those of `regimes` that have followed the current one least often."""
        if self._regime is None:
            return list(regimes)
        counts = {regime: self._regimes[self._regime, regime] for regime in regimes}
        return [regime for regime, count in counts.items() if count == min(counts.values())]

    def least_visited_boundaries(self) -> list[Boundary]:
        """Return the boundaries shown least often."""
        least = min(self.boundaries.values())
        return [boundary for boundary, count in self.boundaries.items() if count == least]

    def aim(self, bucket: int, tenants: Array, tie: Array) -> Array:
        """Return for each batch row, the length whose next round would visit most that was never visited:
        [len(tenants)].

        `tenants`: index into TENANTS of whose rows they will be. `tie` [len(tenants)]: non-negative words that decide
        between equals.
        """
        before, count = self._before[bucket], len(tenants)
        lived = before.requests[:count] >= 0
        which = self._which[:, :, None]
        bands, now = before.bands[:, :count, None], self._band[:, None, self.candidates]
        steps = self._steps[:, None, self.candidates] - self._steps[:, before.lengths[:count], None]
        # [rows' quantities, batch rows, candidates]
        new = (self._pairs[which, bands, now] == 0).astype(np.int64)
        new += (self._moves[which, tenants[None, :, None], _move(steps)] == 0) & lived[None, :, None]
        new += self._edges[which, self._edge[:, None, self.candidates]] == 0
        size = len(self.candidates)
        turned = (np.arange(size)[None, :] + tie[:, None]) % size
        best: Array = self.candidates[np.argmax(new.sum(0) * size + turned, axis=1)]
        return best

    def requests_before(self, bucket: int) -> Array:
        """Who held the batch rows of `bucket` at its last replay: [bucket], -1 for nobody."""
        return self._before[bucket].requests

    # Reporting -------------------------------------------------------------------------------------------------------

    def visits(self) -> dict[Key, int]:
        """Return how often each thing that can be visited was, in a fixed order."""
        found: dict[Key, int] = {}
        for i, q in enumerate(self._rows):
            reached = {0, *self._band[i, self.candidates].tolist()}
            found |= _pair_visits(q, self._pairs[i], [reached])
            edges = np.unique(self._edge[i, self.candidates]).tolist()
            found |= {("edge", q.name, EDGES[edge]): int(self._edges[i, edge]) for edge in edges}
            steps = self._steps[i, self.candidates]
            for move in np.unique(_move(steps[:, None] - steps[None, :])).tolist():
                for tenant, name in enumerate(TENANTS):
                    found["move", q.name, name, MOVES[move]] = int(self._moves[i, tenant, move])
        for i, q in enumerate(self._wholes):
            found |= _pair_visits(q, self._whole_pairs[i], [self._total_bands(q, bucket) for bucket in self.buckets])
        found |= {("regime", before, now): count for (before, now), count in self._regimes.items()}
        return found | {("boundary", boundary.name): count for boundary, count in self.boundaries.items()}

    def _total_bands(self, quantity: Quantity, bucket: int) -> set[int]:
        """Return the bands that a round of `bucket` can reach, if every total between least and most can be."""
        rows = full_rows(self.system, self.geometry, bucket)
        full = Round(bucket=bucket, seq_lens=(), requests=(1,) * bucket, lens={"verify_lens": rows})
        ends = [(int(self.candidates[end]),) * bucket for end in (0, -1)]
        least, most = (self._total_band(quantity, dataclasses.replace(full, seq_lens=lens)) for lens in ends)
        return set(range(least, most + 1))

    def never_visited(self) -> list[Key]:
        """Return what can be visited and never was."""
        return [key for key, count in self.visits().items() if not count]

    def digest(self) -> str:
        """Return 16 hexadecimal digits of all visits."""
        text = json.dumps([[*key, count] for key, count in self.visits().items()])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def say(key: Key) -> str:
    """Say a key of `visits` in words."""
    kind, *rest = key
    if kind == "pair":
        return f"{rest[0]}: {rest[1]}, then {rest[2]}"
    if kind == "regime":
        return f"regime {rest[0]}, then {rest[1]}"
    return f"{kind} {rest[0]}" if kind == "boundary" else f"{rest[0]}: {', '.join(rest[1:])}"


def _move(difference: Array) -> Array:
    return np.clip(difference, -2, 2) + 2


def _pair_visits(quantity: Quantity, counts: Array, reached: Sequence[set[int]]) -> dict[Key, int]:
    """Return the visits of each pair of bands that are in one of the sets `reached`."""
    names = (PAD, *quantity.bands)
    pairs = {pair for states in reached for pair in itertools.product(states, states)}
    return {("pair", quantity.name, names[a], names[b]): int(counts[a, b]) for a, b in sorted(pairs)}


# What the fields follow ----------------------------------------------------------------------------------------------


def quantities(system: System, geometry: Geometry, buckets: Sequence[int]) -> list[Quantity]:
    """Return one for each way in which fields of the layout turn; a field that is written at capture only has none."""
    groups: dict[tuple[object, ...], list[Field]] = {}
    for bucket in sorted(buckets, reverse=True):  # a plan exists at wide buckets only
        for field in system.layout(geometry, bucket):
            if field.lifetime is Lifetime.REPLAY and field.alias is None:
                group = groups.setdefault(_way(field, geometry), [])
                if all(field.name != other.name for other in group):
                    group.append(field)
    return [_quantity(way, group, system, geometry) for way, group in groups.items()]


def _way(field: Field, geometry: Geometry) -> tuple[object, ...]:
    """Return (what the field follows, step): fields with the same way are one quantity."""
    if field.row is Row.MULTIPROCESSOR:
        return "tiles", 1
    if field.compare is Compare.ITEMS:
        return "long rows", 1
    if field.row in (Row.REQUEST_PREFIX, Row.TOKEN_PREFIX):
        return "sum", 1
    if field.live is Live.CANDIDATES:
        return "candidates", 1
    if field.column_step and field.live is not Live.ROWS:
        return "columns", field.column_step, field.columns
    return "length", _length_step(field, geometry)


def _length_step(field: Field, geometry: Geometry) -> int:
    """Return by how many tokens a length grows until the field turns: contract 4 counts in pools, and some of
    contract 7 in compressed entries."""
    if field.section.startswith("4"):
        return geometry.pool_size
    if field.section.startswith("7"):
        steps: dict[str, int]
        steps = {"swa": geometry.window, "c4": geometry.sparse_ratio, "c128": geometry.dense_ratio}
        return steps.get(field.name.partition("_")[0], 1)
    return 1


def _quantity(way: tuple[object, ...], group: Sequence[Field], system: System, geometry: Geometry) -> Quantity:
    what, step, *rest = way
    assert isinstance(step, int)
    lengths = np.arange(geometry.context + 1)
    name, whole, amounts = str(what), what in ("tiles", "long rows", "sum"), lengths
    if what == "columns":
        (columns,) = rest
        assert isinstance(columns, int)
        name, amounts = f"columns of {step}", lengths + (geometry.draft_tokens if system.adds_draft else 0)
        ends = [(0, "none"), (step, "one"), (step * (columns - 1), "some")]
        last = "all"
    elif what == "candidates":
        name, amounts = "pools closed", closed_pools(system, geometry, lengths)
        ends, last = [(0, "none"), (1, "one")], "several"
    elif what == "tiles":
        count = group[0].rows - 1
        ends, last = [(count - 1, "fewer than SMs"), (count, "as many as SMs"), (2 * count, "up to twice")], "more"
    elif what == "long rows":
        ends, last = [(0, "none"), (1, "one")], "several"
    elif what == "sum":
        ends = [(geometry.page_size, "up to a page"), (geometry.context, "up to a context")]
        last = "more"
    else:
        name = f"length in {step}s" if step > 1 else "length"
        ends = [(0, "none"), (geometry.page_size, "up to a page"), (geometry.topk, "up to top-k")]
        ends.append((geometry.context - 1, "above top-k"))
        last = "whole context"
    limits, bands = _ascending(ends)
    return Quantity(
        name=name,
        fields=tuple(field.name for field in group),
        amounts=lengths[:0] if whole else amounts,
        step=step,
        limits=limits,
        bands=(*bands, last),
        whole=whole,
    )


def _ascending(ends: Sequence[tuple[int, str]]) -> tuple[Array, tuple[str, ...]]:
    """Return the bands in ascending order, without the bands that another one covers."""
    kept: list[tuple[int, str]] = []
    for limit, band in ends:
        if not kept or limit > kept[-1][0]:
            kept.append((limit, band))
    return np.array([limit for limit, _ in kept], np.int64), tuple(band for _, band in kept)
