"""EngineSimulator: a serving engine in miniature, which yields the rounds that an engine could produce.

It admits requests, lets them accept drafts, finishes, preempts and brings them back, shares prefixes, moves requests
between request rows and pages, idles and pads the batch for the sake of another rank. Told to, it also steps outside of
that: rounds that no engine would produce but that the contract allows (expansion.py, boundaries.py).

Pages are not stored: those of a request row are a function of the row and its generation (`rounds.token_slots`), but
for a prefix that it took from another when it moved (`Round.prefixes`), so that a round needs to say no more than which
rows move on, and what they take along. The orders in which an allocator reuses freed pages are expressed with that. A
new request on a row that keeps its generation gets exactly the pages that were freed there last (LIFO); one on a row
that moves on gets those that were free the longest (FIFO: generations come round after DISJOINT_GENERATIONS); or it is
left to chance. Two batch rows that name one request row share a prefix, as far as the shorter of the two goes; the one
that came later gets a row of its own before it grows, with a part of that prefix. Other requests come with the first
pages of one that is running, or return to those that they had before they were preempted, and have new pages behind
them. What is shared, nobody writes: it lies in whole pages before the first token that either of the two writes.

What a true allocator would add: the pages that one request freed, behind its prefix, in the hands of *another* row; a
row that holds no pages yet beyond its length. Neither changes what a table must hold for a given row.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import DISJOINT_GENERATIONS, Geometry
from dsa_verify.contract.round import POISONS, Round, one_each
from dsa_verify.contract.system import System
from dsa_verify.rounds.matrix import REMAPS_PER_ROUND
from fuzz.engine.boundaries import Boundary, Kind, boundaries
from fuzz.engine.boundary_rounds import defined, fewest_requests, force_boundary
from fuzz.engine.coverage import ON_OTHER_PAGES, SAME_PAGES, TENANTS, Array, Coverage
from fuzz.engine.expansion import RoundSpec, Stream, below, expand, word
from fuzz.engine.limits import most_requests
from fuzz.engine.steps import AIMED, ENGINE, ON_DEMAND, WITHOUT_GROWTH, names_of
from fuzz.engine.strategies import spec_at

REUSES: Final = ("lifo", "fifo", "random")
MOST_WAITING: Final = 64
_TWICE_ONE_IN: Final = 32
_CROWDED: Final = 2  # the pool holds a full batch of requests of one `_CROWDED`th of the context


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request that the engine knows. `length`: what `seq_lens` says of it; `accepted`: tokens it grows by next.
    `shares`: it reads a row that it does not own. `generation`: of its row, when it was preempted."""

    row: int
    length: int
    accepted: int = 1
    shares: bool = False
    generation: int = 0


class EngineSimulator:
    """Deterministic in `seed`. `live`: the batch in order. `waiting`: what was preempted. `free`: free request rows.

    `coverage` chooses what comes next where it can, and sees every round; without one the choice is left to chance.
    `outside`: whether rounds that no engine would produce are among them. `reuse`: one of REUSES (None: by the seed).
    """

    def __init__(
        self,
        system: System,
        geometry: Geometry,
        buckets: Sequence[int],
        seed: int = 0,
        *,
        coverage: Coverage | None = None,
        outside: bool = True,
        reuse: str | None = None,
    ) -> None:
        self.system, self.geometry, self.seed, self.coverage = system, geometry, seed, coverage
        self.buckets = tuple(sorted(buckets))
        self.most = max(most_requests(system, geometry, bucket) for bucket in self.buckets)
        self.shortest = max(1, system.shortest_length(geometry))
        # An engine ends a request before its next draft would pass the context.
        self.longest = geometry.context - (geometry.draft_tokens if system.adds_draft else 0)
        if self.longest < self.shortest:
            raise UsageError(
                f"context: {geometry.context} leaves no room for a request of {system.name} with draft_tokens "
                f"{geometry.draft_tokens}; raise it"
            )
        self.live: list[Request] = []
        self.waiting: list[Request] = []
        self._readers: Counter[int] = Counter()  # live requests by the row that they read
        self.free = list(range(geometry.request_rows - 1, 0, -1))
        self.generations: Counter[int] = Counter()
        self.index = 0  # of the next round
        self._page = geometry.allocator_page
        self.reuse = reuse or REUSES[self._below(Stream.REUSE, len(REUSES))]
        self._draws: Counter[int] = Counter()
        self._moved: list[int] = []
        self._taken: dict[int, tuple[int, int]] = {}  # by row that moves in the next round: (origin, pages)
        self._borrowed: dict[int, tuple[int, int, int]] = {}  # by row: (origin, its generation then, pages)
        self._lent: dict[tuple[int, int], dict[int, int]] = {}  # the same by (origin, generation), pages by row
        self.steps = names_of(system, geometry, self.buckets, outside=outside, steered=coverage is not None)
        if coverage is not None:
            coverage.expect(self.steps)

    # Rounds ----------------------------------------------------------------------------------------------------------

    def rounds(self, count: int) -> list[Round]:
        """Return the next `count` rounds."""
        return [self.step() for _ in range(count)]

    def step(self) -> Round:
        """Return the next round: with a coverage, half of the time what no pair or boundary has shown yet, and in the
        other half the step that has followed the last one least often; without one, any step."""
        names = self.steps
        if self.coverage is not None:
            aims = [name for name in (AIMED, ON_DEMAND) if name in names]
            if aims and self.draw(Stream.STEER, 2):
                return self.play(aims[self.draw(Stream.REGIME, len(aims))])
            names = tuple(self.coverage.least_visited_regimes(names))
        return self.play(names[self.draw(Stream.REGIME, len(names))])

    def play(self, step: str) -> Round:
        """Return the next round, which `step`, one of `self.steps`, makes."""
        if step in ENGINE:
            if not self.live:
                self.resume()
            if step not in WITHOUT_GROWTH:
                self.accept()
            round_ = ENGINE[step](self) or self.emit()
        elif step == AIMED:
            round_ = self._aimed()
        elif step == ON_DEMAND:
            round_ = self.at(self._least_visited_boundary())
        else:
            spec = spec_at(self.seed, self.index, self.system, self.geometry, self.buckets)
            round_ = self.outside(dataclasses.replace(spec, regime=step))
        if self.coverage is not None:
            self.coverage.observe(round_, step)
        return round_

    def emit(self, bucket: int | None = None) -> Round:
        """Return a round of the batch as it is, in the smallest bucket that holds it unless another is named."""
        requests = self.live
        bucket = bucket or self.smallest_bucket(len(requests))
        round_ = Round(
            bucket=bucket,
            seq_lens=tuple(request.length for request in requests),
            requests=tuple(request.row for request in requests),
            remap=tuple(self._moved),
            prefixes=self._prefixes(self._moved),
            poison=POISONS[self.draw(Stream.OUTPUT_POISON, len(POISONS))],
            twice=not self.draw(Stream.REPEAT, _TWICE_ONE_IN),
            lens=self._lens(bucket),
            seed=self.draw(Stream.ROUND_SEED, (1 << 31) - 1) if self.system.seeded else 0,
        )
        self._moved = []
        return self._passed(round_)

    def outside(self, spec: RoundSpec) -> Round:
        """Return the round of `spec`; the batch stays as it is, but for the pages that `spec` moves."""
        return self._with_moves(expand(spec, self.system, self.geometry))

    def at(self, boundary: Boundary) -> Round:
        """Return a round that holds `boundary`; what it leaves open is drawn."""
        return self._with_moves(force_boundary(boundary, self._base(boundary), self.system, self.geometry))

    # What happens to requests ----------------------------------------------------------------------------------------

    def admit(self, length: int | None = None) -> None:
        """A new request at the end of the batch, the last one finishing where there is no room."""
        if len(self.live) >= self.most or not self.free:
            self.finish(len(self.live) - 1)
        self._append(length or self._prompt_length())
        self._preempt_until_pages_suffice()

    def fill(self) -> None:
        """Admit new requests until the batch, the rows or the pages are full."""
        while len(self.live) < self.most and self.free:
            self._append(self._prompt_length())
        self._preempt_until_pages_suffice()

    def _append(self, length: int) -> Request:
        row = self._take_row()
        # Where it cannot leave pages that others share, it is one more that has them in its prefix.
        self._join(Request(row, max(length, self._least_length(row)), self._accept_count()))
        return self.live[-1]

    def _join(self, request: Request, at: int | None = None) -> None:
        """`request` is live from now on, as batch row `at` or the last."""
        self.live.insert(len(self.live) if at is None else at, request)
        self._readers[request.row] += 1

    def accept(self) -> None:
        """Let every live request grow by the tokens that were accepted; finish those at the end of the context."""
        for at, request in enumerate(self.live):
            if request.shares and self.free:
                shared = request.row
                self.move_row(at)
                if self.live[at].row != shared:
                    self._take_prefix(self.live[at], shared, self._spare_pages(shared))
        for request in self.live:
            request.length += request.accepted
            request.accepted = self._accept_count()
        for at in reversed([i for i, request in enumerate(self.live) if request.length > self.longest]):
            self.finish(at)
        self._preempt_until_pages_suffice()

    def finish(self, at: int, *, swap: bool = False) -> None:
        """Batch row `at` ends; those behind it move up, or (`swap`) the last takes its place."""
        ended = self.live.pop(at)
        if swap and at < len(self.live):
            self.live.insert(at, self.live.pop())
        self._release(ended)

    def preempt(self) -> None:
        """The request admitted last gives up its row and waits."""
        request = self.live.pop()
        request.generation = self.generations[request.row]
        self._release(request)
        self.waiting.append(request)
        del self.waiting[:-MOST_WAITING]  # an engine gives up on a request at some time

    def resume(self) -> None:
        """Bring back the one that has waited longest (else the one admitted last, after its preemption) on other pages;
        admit a new one where there is none at all."""
        if not self.waiting and not self.live:
            return self.admit()
        if not self.waiting or len(self.live) >= self.most:
            self.preempt()
        self._resume()

    def move_row(self, at: int) -> None:
        """Batch row `at` moves to another request row, and so to other pages; others that share its row stay."""
        fitting = self._rows_for(self.live[at].length)
        if not fitting:
            return self.move_pages(at)
        row, request = self._take_row(fitting), self.live.pop(at)
        self._release(request)
        self._join(dataclasses.replace(request, row=row, shares=False), at)

    def move_pages(self, at: int) -> None:
        """The row of batch row `at` moves to other pages."""
        self._move(self.live[at].row)

    def share(self, at: int) -> None:
        """A new request has a prefix of batch row `at`: whole pages, on a row of its own, or it reads the other's."""
        if len(self.live) >= self.most:
            last = len(self.live) - 1
            self.finish(last if at != last else 0)
            at = min(at, len(self.live) - 1)
        owner = self.live[at]
        most = self._spare_pages(owner.row)
        if self.free and most and self.draw(Stream.SHARING, 2):
            pages = 1 + self.draw(Stream.SHARED_PAGES, most)
            request = self._append(max(self._prompt_length(), self._length_behind(pages)))
            self._take_prefix(request, owner.row, pages)
            return self._preempt_until_pages_suffice()
        shortest = max(self.shortest, self._least_length(owner.row))
        length = shortest + self.draw(Stream.LENGTH, owner.length - shortest + 1)
        self._join(Request(owner.row, length, self._accept_count(), shares=True))
        self._preempt_until_pages_suffice()

    def shuffle(self) -> None:
        """Put the batch into another order."""
        for last in range(len(self.live) - 1, 0, -1):
            other = self.draw(Stream.ORDER, last + 1)
            self.live[last], self.live[other] = self.live[other], self.live[last]

    def shrink(self, count: int) -> None:
        """All but the first `count` requests finish."""
        while len(self.live) > count:
            self.finish(len(self.live) - 1)

    # Rows and pages --------------------------------------------------------------------------------------------------

    def _rows_for(self, length: int) -> list[int]:
        """Free rows on which a request of `length` writes nothing that others share."""
        return [row for row in self.free if self._least_length(row) <= length or self._may_move(row)]

    def _take_row(self, fitting: Sequence[int] | None = None) -> int:
        rows = list(fitting or self.free)
        at = {"lifo": -1, "fifo": 0}.get(self.reuse)
        row = rows[self.draw(Stream.ROW, len(rows)) if at is None else at]
        self.free.remove(row)
        fresh = self.reuse == "fifo" or (self.reuse == "random" and bool(self.draw(Stream.FRESH, 2)))
        if fresh or self._shared_pages(row):
            self._move(row)
        return row

    def _release(self, request: Request) -> None:
        """The row is free once nobody reads it; if its owner goes first, another reader owns it."""
        self._readers[request.row] -= 1
        if not self._readers[request.row]:
            self.free.append(request.row)
        elif not request.shares:
            next(other for other in self.live if other.row == request.row).shares = False

    def _move(self, row: int) -> bool:
        """Return whether `row` moves to pages of its own in this round; only so many can."""
        if not self._may_move(row):
            return False
        if row not in self._moved:
            self._moved.append(row)
            self.generations[row] += 1
        self._taken.pop(row, None)
        self._give_back(row)
        return True

    def _may_move(self, row: int) -> bool:
        """Return whether there is room for it, and others do not have the pages that it would get."""
        if row in self._moved:
            return True
        return len(self._moved) < REMAPS_PER_ROUND and not self._lent_pages(row, self.generations[row] + 1)

    def _resume(self) -> None:
        fitting = self._rows_for(self.waiting[0].length)
        if not fitting:
            return
        request = self.waiting.pop(0)
        cached = request.row in self.free and request.row not in (*self._moved, *self._borrowed)
        cached = cached and self.generations[request.row] == request.generation
        row = self._take_row(fitting)
        passed = self.generations[row] - request.generation
        if row == request.row and passed % DISJOINT_GENERATIONS == 0 and not self._move(row):
            self.free.append(row)
            others = [other for other in self._rows_for(request.length) if other != row]
            row = self._take_row(others or [row])
        resumed = dataclasses.replace(request, row=row, shares=False)
        self._join(resumed)
        if cached and self.draw(Stream.SHARING, 2):
            self._take_prefix(resumed, request.row, self._whole_pages(request.length))

    # Shared pages ----------------------------------------------------------------------------------------------------

    def _take_prefix(self, request: Request, origin: int, pages: int) -> None:
        """Make the first `pages` of `request`, or as many as it does not write, those that `origin` had in the round
        before; those behind are new. Nothing, where they are not `origin`'s own, or `request` cannot move."""
        row, pages = request.row, min(pages, self._whole_pages(request.length))
        moved = origin in self._moved and origin != row
        if not pages or moved or origin in self._borrowed:
            return
        before = self.generations[origin] - (origin in self._moved)
        if self._move(row):
            self._taken[row] = (origin, pages)
            self._borrowed[row] = (origin, before % DISJOINT_GENERATIONS, pages)
            if origin != row:
                self._lent.setdefault((origin, before % DISJOINT_GENERATIONS), {})[row] = pages

    def _prefixes(self, rows: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
        """Return those of `rows`, which move in this round; what has to wait takes none."""
        found = tuple((row, *self._taken[row]) for row in rows if row in self._taken)
        for row in self._taken.keys() - set(rows):
            self._give_back(row)
        self._taken.clear()
        return found

    def _whole_pages(self, length: int) -> int:
        pages: int = self.system.pages_before_writes(self.geometry, length)
        return pages

    def _length_behind(self, pages: int) -> int:
        """Return the shortest request that does not write the first `pages`."""
        return pages * self.geometry.allocator_page + self.system.written_back(self.geometry) if pages else 0

    def _spare_pages(self, row: int) -> int:
        """Return what nobody writes of `row`."""
        return min(self._whole_pages(request.length) for request in self.live if request.row == row)

    def _least_length(self, row: int) -> int:
        return self._length_behind(self._shared_pages(row))

    def _shared_pages(self, row: int) -> int:
        """Return how many of the first pages of `row` another row has, too, or had when it was given them."""
        taken = self._borrowed.get(row, (0, 0, 0))[2]
        return max(taken, self._lent_pages(row, self.generations[row]))

    def _lent_pages(self, row: int, generation: int) -> int:
        """Return how many of the first pages of `row` in `generation` other rows have."""
        return max(self._lent.get((row, generation % DISJOINT_GENERATIONS), {}).values(), default=0)

    def _give_back(self, row: int) -> None:
        """`row` has pages of its own again."""
        origin, generation, _ = self._borrowed.pop(row, (0, 0, 0))
        self._lent.get((origin, generation), {}).pop(row, None)

    def _preempt_until_pages_suffice(self) -> None:
        used, pages = self._pages_used(), self._pages()
        while used > pages and len(self.live) > 1:
            last = self.live[-1]
            alone = self._readers[last.row] == 1
            self.preempt()
            used = used - self._pages_of(last.length) if alone else self._pages_used()

    def _pages(self) -> int:
        """Return allocator pages of the pool."""
        whole = -(-self.geometry.context // self.geometry.allocator_page)
        return max(whole, self.most * whole // _CROWDED)

    def _pages_used(self) -> int:
        """Return how many pages are used. A row that several read counts once, by the longest."""
        longest: dict[int, int] = {}
        for request in self.live:
            longest[request.row] = max(longest.get(request.row, 0), request.length)
        return sum(map(self._pages_of, longest.values()))

    def _pages_of(self, length: int) -> int:
        return -(-length // self._page)

    # Drawing ---------------------------------------------------------------------------------------------------------

    def _below(self, stream: int, span: int, element: int = 0) -> int:
        return below(word(self.seed, self.index, stream, element), span)

    def draw(self, stream: int, span: int) -> int:
        """Return the next value of `stream` in this round."""
        self._draws[stream] += 1
        return self._below(stream, span, self._draws[stream])

    def _passed(self, round_: Round) -> Round:
        self.index += 1
        self._draws.clear()
        return round_

    def _with_moves(self, round_: Round) -> Round:
        """`round_` from outside, with its own moves as far as they fit, and then those that the batch has still to
        make. What of the batch's does not fit is made in the next round; it is never more than one round holds."""
        own = tuple(dict.fromkeys(round_.remap))[:REMAPS_PER_ROUND]
        outside = [row for row in own if row not in self._moved]
        self.generations.update(outside)
        for row in outside:
            self._give_back(row)
        for name, spec in self.system.lens(self.geometry).items():
            if spec.of_row:
                round_ = round_.replace(**{name: one_each(round_.requests, round_.lens[name])})
        owed = tuple(row for row in self._moved if row not in own)
        room = REMAPS_PER_ROUND - len(own)
        remap, self._moved = own + owed[:room], list(owed[room:])
        prefixes = self._prefixes(remap)
        # A row that comes round to pages that others have is not written there.
        for at in reversed(range(len(self.live))):
            if self._least_length(self.live[at].row) > self.live[at].length:
                self.finish(at)
        return self._passed(dataclasses.replace(round_, remap=remap, prefixes=prefixes))

    def _prompt_length(self) -> int:
        power = self.draw(Stream.LENGTH_POWER, self.longest.bit_length())
        return min(max(self.shortest, (1 << power) + self.draw(Stream.LENGTH, 1 << power)), self.longest)

    def _accept_count(self) -> int:
        return 1 + self.draw(Stream.ACCEPTED, self.geometry.draft_tokens)

    def _lens(self, bucket: int) -> dict[str, tuple[int, ...]]:
        """Return what the round of the batch as it is says of each request; of extend lengths nothing, so all are N."""
        found = {}
        for name, spec in self.system.lens(self.geometry).items():
            match name:
                case "extend_lens":
                    continue
                case "accept_lens":
                    values = tuple(request.accepted for request in self.live)
                case "verify_lens":
                    values = self._verify_lens(bucket, len(self.live))
                case "replay_floors":
                    values = tuple(self._floor(request.length) for request in self.live)
                case _:
                    values = tuple(spec.low + self.draw(Stream.OWN, spec.high - spec.low) for _ in self.live)
            found[name] = one_each([request.row for request in self.live], values) if spec.of_row else values
        return found

    def _floor(self, length: int) -> int:
        """Return 0 of half of the requests, else around the window that ends with `length` (contract 7.1)."""
        steps = self.geometry.window + 5
        drawn = self.draw(Stream.REPLAY_FLOOR, 2 * steps)
        return 0 if drawn >= steps else min(max(length - drawn + 2, 0), self.geometry.context)

    def _verify_lens(self, bucket: int, count: int) -> tuple[int, ...]:
        """Return 1 to N each, as long as the token rows of the graph last (contract 9)."""
        spare, lens = self.system.capacity(self.geometry, bucket) - count, []
        for _ in range(count):
            extra = min(self.draw(Stream.VERIFIED, self.geometry.draft_tokens), spare)
            spare -= extra
            lens.append(1 + extra)
        return tuple(lens)

    def smallest_bucket(self, count: int) -> int:
        """Return the smallest that holds `count` requests."""
        return next(b for b in self.buckets if most_requests(self.system, self.geometry, b) >= count)

    def _least_visited_boundary(self) -> Boundary:
        known: Sequence[Boundary] = boundaries(self.system, self.geometry, self.buckets)
        if self.coverage is not None:
            known = self.coverage.least_visited_boundaries()
        return known[self.draw(Stream.WHICH, len(known))]

    def _base(self, boundary: Boundary) -> Round:
        """Return a round with enough live requests for `boundary`, everything drawn."""
        spec = spec_at(self.seed, self.index, self.system, self.geometry, self.buckets)
        fitting = [b for b in self.buckets if most_requests(self.system, self.geometry, b) >= fewest_requests(boundary)]
        bucket = boundary.bucket or fitting[self.draw(Stream.BUCKET, len(fitting))]
        most, fewest = most_requests(self.system, self.geometry, bucket), fewest_requests(boundary)
        raw = fewest + self.draw(Stream.COUNT, most - fewest + 1)
        if boundary.kind is Kind.BATCH:
            raw = boundary.value
        elif boundary.bucket:
            raw = bucket
        spec = dataclasses.replace(spec, regime="boundary", bucket=bucket, raw=raw, hot=0)
        return expand(spec, self.system, self.geometry)

    def _aimed(self) -> Round:
        """Lengths that lead every batch row where it has never been, on rows of the same requests or of others."""
        assert self.coverage is not None
        spec = spec_at(self.seed, self.index, self.system, self.geometry, self.buckets)
        spec = dataclasses.replace(spec, regime="boundary", raw=max(spec.raw, 1))
        round_ = expand(spec, self.system, self.geometry)
        count = round_.raw_batch
        tenants = np.array([self.draw(Stream.TENANT, len(TENANTS)) for _ in range(count)], np.int64)
        before = self.coverage.requests_before(round_.bucket)[:count]
        tenants = self._as_many_as_move(tenants, before)
        tie = np.array([self.draw(Stream.TIE, 1 << 16) for _ in range(count)], np.int64)
        same = (before > 0) & (tenants < TENANTS.index("another request"))
        requests = np.where(same, before, np.array(round_.requests, np.int64))
        moved = requests[same & (tenants == ON_OTHER_PAGES)]
        lengths = self.coverage.aim(round_.bucket, tenants, tie).tolist()
        return self._with_moves(
            dataclasses.replace(
                round_,
                seq_lens=defined(self.system, self.geometry, round_.bucket, tuple(lengths)),
                requests=tuple(requests.tolist()),
                remap=tuple(dict.fromkeys(moved.tolist())),
            )
        )

    def _as_many_as_move(self, tenants: Array, before: Array) -> Array:
        """Return `tenants` of the batch rows that `before` (-1: nobody) held, where only so many of those rows move to
        other pages in one round. Who comes later stays on the pages that they have."""
        wanting = (tenants == ON_OTHER_PAGES) & (before > 0)
        _, first = np.unique(before[wanting], return_index=True)
        moving = before[wanting][np.sort(first)][:REMAPS_PER_ROUND]
        return np.where(wanting & ~np.isin(before, moving), SAME_PAGES, tenants)
