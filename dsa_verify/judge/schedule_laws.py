"""Schedule laws: what any valid paged-MQA schedule obeys, checked on the device without an oracle (contract 3.5).

The oracle goes from lengths to rows; the laws go the other way. Each row names a tile, each tile has a position in
the consumer's order of work, and the positions tell whether every tile is covered once, how much work each SM gets,
and which SMs get more. As consecutive SMs share a row, positions that rise from the first tile to the total are an
exact cover. `ScheduleLaw.check` may be captured in a CUDA graph; `ScheduleLaw.broken` reads its result on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.schedule_variants import (
    Placement,
    ScheduleVariant,
    Unit,
    shape,
    sms_per_slot,
    units_per_request,
)

_INT32_MAX: Final = (1 << 31) - 1
_UINT32_MAX: Final = (1 << 32) - 1


class Law(Enum):
    """One law of contract 3.5. EMPTY is PLACEMENT where there are fewer tiles than SMs."""

    FORM = "form"
    ORDER = "order"
    TILE = "existing tile"
    SENTINEL = "sentinel"
    COVER = "exact cover"
    BALANCE = "balance"
    PLACEMENT = "placement"
    EMPTY = "empty SMs"


class Fault(Enum):
    """The tile that a break names is missing, or is executed twice."""

    MISSING = "missing"
    DOUBLED = "doubled"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LawBreak:
    """The first place where a schedule breaks one law.

    `sm`: the SM concerned (None: the whole tensor). `tile`: (q unit, split). `fault`: set where that tile is executed
    by no SM, or by two. `count`: in how many places the law is broken.
    """

    law: Law
    sentence: str
    sm: int | None = None
    tile: tuple[int, int] | None = None
    fault: Fault | None = None
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Tiles:
    """The work to do, per request (or per token with indices; nothing where no unit starts), is int64 [rows].

    `splits`: of a unit. `price`: work of one tile. `begin`, `end`: work before and after this request. `total`:
    int64 [1].
    """

    splits: torch.Tensor
    price: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    total: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """Each of the S + 1 rows of a schedule names these: int64 and bool [S + 1].

    `splits`: those of its unit, -1 where no unit starts there. `price`: work of its tile. `known`: it names an existing
    tile or is the sentinel, so that `position`, in the order of work, means something.
    """

    unit: torch.Tensor
    split: torch.Tensor
    splits: torch.Tensor
    price: torch.Tensor
    sentinel: torch.Tensor
    known: torch.Tensor
    position: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _Fact:
    """One line of the result: the first row, `where`, that breaks a law (-1: none does), and what that row is.

    `next_*`: the row after it. `cut`: the position where it belongs, `cut_*`: the tile there. The rest is as in
    `_Rows`.
    """

    where: int
    count: int
    unit: int
    split: int
    position: int
    splits: int
    next_unit: int
    next_split: int
    next_position: int
    cut: int
    cut_unit: int
    cut_split: int

    @property
    def tile(self) -> tuple[int, int]:
        return self.unit, self.split

    @property
    def next_tile(self) -> tuple[int, int]:
        return self.next_unit, self.next_split

    @property
    def cut_tile(self) -> tuple[int, int]:
        return self.cut_unit, self.cut_split


@dataclasses.dataclass(frozen=True, slots=True)
class _Head:
    """The first line of the result: the total, the limits of one SM, whether all rows fit the other placement."""

    total: int
    least: int
    most: int
    fits_other: int


_LINES: Final = (Law.ORDER, Law.TILE, Law.SENTINEL, Law.COVER, Law.BALANCE, Law.PLACEMENT)
_HEAD_WORDS: Final = len(dataclasses.fields(_Head))
_FACT_WORDS: Final = len(dataclasses.fields(_Fact))


class ScheduleLaw:
    """The laws for one variant at one bucket: `rows` of `next_n` tokens (1 with `indexed`) on S `multiprocessors`,
    which work in S // 2 pairs where the variant has them so.

    `result_shape` is that of the int32 tensor that `check` fills. UsageError if the variant has no such schedule.
    """

    result_shape: Final = (1 + len(_LINES), _FACT_WORDS)

    def __init__(
        self,
        variant: ScheduleVariant,
        multiprocessors: int,
        *,
        rows: int,
        next_n: int = 1,
        indexed: bool = False,
    ) -> None:
        context_shape = (rows,) if next_n == 1 and 2 not in variant.context_dims else (rows, next_n)
        variant.validate(context_shape, multiprocessors, indexed=indexed)
        self.variant, self.slots = variant, multiprocessors // sms_per_slot(variant, next_n)
        # What a row is for, in words.
        self.slot = "SM" if self.slots == multiprocessors else "SM pair"
        self.rows, self.next_n, self.indexed = rows, next_n, indexed
        # With indices a row is a token, and a unit of any kind is named by its first one.
        self.step = 1 if indexed else units_per_request(variant, next_n)
        self.is_run = variant.unit is Unit.TOKEN_RUN

    @property
    def end(self) -> int:
        """Return the first column of the sentinel."""
        return self.rows * self.step

    def form(self, schedule: torch.Tensor) -> list[LawBreak]:
        """Say what is wrong with the tensor itself, without reading an element."""
        wanted = shape(self.slots)
        if schedule.dtype == torch.int32 and tuple(schedule.shape) == wanted and schedule.is_contiguous():
            return []
        kind = "contiguous" if schedule.is_contiguous() else "strided"
        got = f"{schedule.dtype} {tuple(schedule.shape)}, {kind}"
        sentence = f"the schedule is {got}; consumers read torch.int32 {wanted}, contiguous"
        return [LawBreak(law=Law.FORM, sentence=sentence)]

    def check(
        self,
        schedule: torch.Tensor,
        context_lens: torch.Tensor,
        result: torch.Tensor,
        indices: torch.Tensor | None = None,
    ) -> None:
        """Checks int32 `schedule` [S + 1, 2] and writes what `broken` needs into int32 `result` [result_shape].

        `context_lens`: int32 [rows] or [rows, next_n], the last column counts. `indices`: int32 [rows]. Nothing
        synchronises. UsageError if a shape is not that of this law, or the schedule's `form` is wrong.
        """
        self._refuse_other_shapes(schedule, context_lens, result, indices)
        lens = context_lens.reshape(self.rows, -1)[:, -1].to(torch.int64)
        tiles = self._tiles(lens, indices)
        rows = self._read(schedule, tiles)
        cuts, other_cuts = self._cuts(tiles.total)
        least, most = self._quota(tiles, cuts)
        wrong = self._wrong(rows, cuts, least, most)
        fits_other = self._at(rows, other_cuts).all().reshape(1)
        head = torch.cat([tiles.total, least, most, fits_other])
        result[0, :_HEAD_WORDS].copy_(head.clamp(max=_INT32_MAX))
        result[1:].copy_(self._facts(wrong, rows, tiles, cuts).clamp(-_INT32_MAX, _INT32_MAX))

    def broken(self, result: torch.Tensor) -> list[LawBreak]:
        """Return the laws that `result` says are broken, each at its first place. Reads the device: no capture."""
        first, *lines = result.tolist()
        head, facts = _Head(*first[:_HEAD_WORDS]), [_Fact(*line) for line in lines]
        return [_SENTENCES[law](self, head, fact) for law, fact in zip(_LINES, facts, strict=True) if fact.where >= 0]

    def judge(
        self, schedule: torch.Tensor, context_lens: torch.Tensor, indices: torch.Tensor | None = None
    ) -> list[LawBreak]:
        """`form`, `check` and `broken` at once, for use outside a graph."""
        breaks = self.form(schedule)
        if breaks:
            return breaks
        result = torch.empty(self.result_shape, dtype=torch.int32, device=schedule.device)
        self.check(schedule, context_lens, result, indices)
        return self.broken(result)

    def _refuse_other_shapes(
        self,
        schedule: torch.Tensor,
        context_lens: torch.Tensor,
        result: torch.Tensor,
        indices: torch.Tensor | None,
    ) -> None:
        if broken := self.form(schedule):
            raise UsageError(f"schedule: {broken[0].sentence}; report `form` instead of checking it")
        lens_shape = tuple(context_lens.shape)
        if lens_shape != (self.rows, self.next_n) and (self.next_n > 1 or lens_shape != (self.rows,)):
            raise UsageError(f"context_lens: {lens_shape} is not {(self.rows, self.next_n)}; make another ScheduleLaw")
        if (indices is not None) != self.indexed or (indices is not None and tuple(indices.shape) != (self.rows,)):
            wanted = f"int32 {(self.rows,)}" if self.indexed else "None"
            got = None if indices is None else tuple(indices.shape)
            raise UsageError(f"indices: {got} is not {wanted}; make another ScheduleLaw")
        if result.dtype != torch.int32 or tuple(result.shape) != self.result_shape:
            raise UsageError(
                f"result: {result.dtype} {tuple(result.shape)} is not torch.int32 {self.result_shape}; allocate it so"
            )

    def _tiles(self, lens: torch.Tensor, indices: torch.Tensor | None) -> _Tiles:
        if indices is None:
            splits = self._splits(lens)
            price = torch.full_like(splits, self.next_n if self.is_run else 1)
        else:
            starts, last = self._units(indices)
            splits = self._splits(lens[last]).masked_fill(~starts, 0)
            tokens = last + 1 - torch.arange(self.rows, device=lens.device)
            price = self._price(tokens, splits) if self.is_run else torch.ones_like(splits)
        work = splits * price if self.is_run else splits * self.step
        end = torch.cumsum(work, 0)
        return _Tiles(splits, price, end - work, end, end[-1:])

    def _splits(self, lens: torch.Tensor) -> torch.Tensor:
        return torch.div(lens + (self.variant.split - 1), self.variant.split, rounding_mode="floor")

    def _units(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each token whether a unit starts at it, and if so the last token of that unit."""
        token = torch.arange(self.rows, device=indices.device)
        same = torch.cat([torch.zeros_like(indices[:1], dtype=torch.bool), indices[1:] == indices[:-1]])
        if self.is_run:
            run = torch.cumsum(~same, 0)
            return ~same, torch.searchsorted(run, run, right=True) - 1
        run_start = torch.cummax(token.masked_fill(same, 0), 0).values
        paired = torch.cat([same[1:], torch.zeros_like(same[:1])])
        return (token - run_start).remainder(2) == 0, token + paired

    def _price(self, tokens: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
        block = self.variant.cost_block
        if not block:
            return tokens
        price = torch.div(tokens + (block - 1), block, rounding_mode="floor") * (2 * block) + tokens
        overflows = (splits * price).sum() > _UINT32_MAX  # the plain cost is the fallback then
        return torch.where(overflows, tokens, price)

    def _read(self, schedule: torch.Tensor, tiles: _Tiles) -> _Rows:
        unit, split = schedule.to(torch.int64).unbind(1)
        named = torch.div(unit, self.step, rounding_mode="floor")
        request = named.clamp(0, self.rows - 1)
        inner = unit - request * self.step
        sentinel = (unit == self.end) & (split == 0)
        illegal = named != request
        if self.is_run:
            illegal |= inner != 0
        splits, price = tiles.splits[request], tiles.price[request]
        position = tiles.begin[request] + (inner * splits + split) * price
        splits = splits.masked_fill(illegal, -1)
        return _Rows(
            unit=unit,
            split=split,
            splits=splits,
            price=price.masked_fill(sentinel, 1),
            sentinel=sentinel,
            known=sentinel | ((split >= 0) & (split < splits)),
            position=torch.where(sentinel, tiles.total, position),
        )

    def _cuts(self, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where rows belong in the order of work, and where they would with the remainder on the other side."""
        count = self.slots
        slot = torch.arange(count + 1, device=total.device)
        each, left_over = torch.div(total, count, rounding_mode="floor"), total.remainder(count)
        leading = slot * each + torch.minimum(slot, left_over)
        trailing = total - leading.flip(0)
        return (leading, trailing) if self.variant.placement is Placement.LEAD else (trailing, leading)

    def _at(self, rows: _Rows, cuts: torch.Tensor) -> torch.Tensor:
        """Return whether each row starts at its cut: exactly, or with the tile of a token run that contains the cut."""
        if not self.is_run:
            return rows.known & (rows.position == cuts)
        return rows.known & (rows.position <= cuts) & (cuts < rows.position + rows.price)

    def _quota(self, tiles: _Tiles, cuts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the most work that an SM may get: int64 [1] each."""
        first, last = cuts[1:2], tiles.total - cuts[-2:-1]
        least, most = torch.minimum(first, last), torch.maximum(first, last)
        if not self.is_run:
            return least, most
        # A cut is moved back to the beginning of the tile that it is inside of.
        largest = tiles.price.masked_fill(tiles.splits <= 0, 0).amax()
        return torch.zeros_like(least), (most + largest - 1).clamp(min=0)

    def _wrong(self, rows: _Rows, cuts: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
        """Return which rows break which law: bool [laws, S + 1]. Row i stands for SM i, or for the edge before it."""
        row = torch.arange(self.slots + 1, device=cuts.device)
        last, edge = row == self.slots, row.remainder(self.slots) == 0
        no = torch.zeros_like(last[:1])
        key = rows.unit * (1 << 32) + rows.split  # ordered as the rows are
        given = rows.position[1:] - rows.position[:-1]
        judged = rows.known[1:] & rows.known[:-1]
        backwards = given < 0
        uneven = ((given < least) | (given > most)) & ~backwards
        astray = rows.known & ~self._at(rows, cuts)
        lines = {
            Law.ORDER: torch.cat([key[1:] < key[:-1], no]),
            Law.TILE: ~rows.known & ~last,
            Law.SENTINEL: ~rows.sentinel & last,
            # Tiles before the first row or after the last are missing; a row that falls back doubles one.
            Law.COVER: torch.cat([no, judged & backwards]) | (astray & edge),
            Law.BALANCE: torch.cat([judged & uneven, no]),
            Law.PLACEMENT: astray & ~edge,
        }
        return torch.stack([lines[law] for law in _LINES])

    def _facts(self, wrong: torch.Tensor, rows: _Rows, tiles: _Tiles, cuts: torch.Tensor) -> torch.Tensor:
        """Return the lines of the result: int64 [laws, words of _Fact]."""
        count = wrong.sum(1)
        row = wrong.to(torch.int32).argmax(1)  # the first, if any
        following = (row + 1).clamp(max=self.slots)
        cut = cuts[row]
        request = torch.searchsorted(tiles.end, cut, right=True)
        past = request >= self.rows
        request = request.clamp(max=self.rows - 1)
        offset = torch.div(cut - tiles.begin[request], tiles.price[request], rounding_mode="floor")
        splits = tiles.splits[request].clamp(min=1)
        inner = torch.div(offset, splits, rounding_mode="floor")
        facts = torch.stack([rows.unit, rows.split, rows.position, rows.splits])
        cut_unit = (request * self.step + inner).masked_fill(past, self.end)
        cut_split = (offset - inner * splits).masked_fill(past, 0)
        words = [
            torch.stack([row.masked_fill(count == 0, -1), count]),
            facts[:, row],
            facts[:3, following],
            torch.stack([cut, cut_unit, cut_split]),
        ]
        return torch.cat(words).t()

    @property
    def _work(self) -> str:
        return "units of work" if self.is_run else "tiles"

    def _name(self, unit: int, split: int) -> str:
        """Return a tile in words."""
        if (unit, split) == (self.end, 0):
            return "the sentinel"
        if self.indexed:
            kind = "run" if self.is_run else "atom"
            return f"split {split} of the {kind} at token {unit}"
        if self.is_run:
            return f"split {split} of request {unit // self.step} (token {unit})"
        if self.step > 1:
            return f"split {split} of atom {unit} (atom {unit % self.step} of request {unit // self.step})"
        return f"split {split} of request {unit}"


def _say_order(law: ScheduleLaw, head: _Head, fact: _Fact) -> LawBreak:
    sm = fact.where
    sentence = (
        f"row {sm + 1} {fact.next_tile} comes before row {sm} {fact.tile}: {law.slot} {sm} starts beyond its own end, "
        "never meets it and runs on"
    )
    return LawBreak(law=Law.ORDER, sentence=sentence, sm=sm, tile=fact.next_tile, count=fact.count)


def _say_existing(law: ScheduleLaw, head: _Head, fact: _Fact) -> LawBreak:
    row = fact.where
    if fact.splits < 0:
        what = f"row {row} is {fact.tile}, and no {law.variant.unit.value} starts at unit {fact.unit}"
    else:
        what = f"row {row} names {law._name(*fact.tile)}, which has {fact.splits} split(s)"
    effect = f"{law.slot} {row - 1} steps over that end and runs on" if row else f"{law.slot} 0 reads out of range"
    return LawBreak(law=Law.TILE, sentence=f"{what}: {effect}", sm=row, tile=fact.tile, count=fact.count)


def _say_sentinel(law: ScheduleLaw, head: _Head, fact: _Fact) -> LawBreak:
    last = law.slots
    sentence = (
        f"the last row, {last}, is {fact.tile}; the sentinel is {(law.end, 0)}: {law.slot} {last - 1} ends elsewhere"
    )
    return LawBreak(law=Law.SENTINEL, sentence=sentence, sm=last - 1, tile=fact.tile, count=fact.count)


def _say_cover(law: ScheduleLaw, head: _Head, fact: _Fact) -> LawBreak:
    tile, fault, sm = fact.tile, Fault.MISSING, fact.where
    if fact.where == 0:
        tile = fact.cut_tile
        sentence = f"{law._name(*tile)} is missing: it comes before the start of {law.slot} 0, {law._name(*fact.tile)}"
    elif fact.where == law.slots:
        sm -= 1
        sentence = f"{law._name(*tile)} is missing: {law.slot} {sm}, the last, ends before it"
    else:
        fault = Fault.DOUBLED
        sentence = (
            f"{law._name(*tile)} is doubled: {law.slot} {sm} starts there, and an {law.slot} before it has done it "
            "already"
        )
    return LawBreak(law=Law.COVER, sentence=sentence, sm=sm, tile=tile, fault=fault, count=fact.count)


def _say_balance(law: ScheduleLaw, head: _Head, fact: _Fact) -> LawBreak:
    limit = f"{head.least} or {head.most}" if 0 < head.least < head.most else f"at most {head.most}"
    if head.least == head.most:
        limit = f"exactly {head.most}"
    sentence = (
        f"{law.slot} {fact.where} gets {fact.next_position - fact.position} {law._work} from {law._name(*fact.tile)} "
        f"on; {head.total} over {law.slots} {law.slot}s make {limit}"
    )
    return LawBreak(law=Law.BALANCE, sentence=sentence, sm=fact.where, tile=fact.tile, count=fact.count)


def _say_placement(law: ScheduleLaw, head: _Head, fact: _Fact) -> LawBreak:
    total, count, placement = head.total, law.slots, law.variant.placement
    other = Placement.TAIL if placement is Placement.LEAD else Placement.LEAD
    if total < count and not law.is_run:
        which, end = Law.EMPTY, "first" if placement is Placement.LEAD else "last"
        rule = f"{total} tile(s) for {count} {law.slot}s go one each to the {end} {total}, and the others are empty"
    else:
        which = Law.PLACEMENT
        rule = (
            f"{total} {law._work} leave a remainder of {total % count} for the {placement.value} {law.slot}s, one each"
        )
    sentence = (
        f"{law.slot} {fact.where} starts at {law._name(*fact.tile)}, after {fact.position} {law._work}; it should "
        f"start at {law._name(*fact.cut_tile)}, after {fact.cut}: by {law.variant.name}, {rule}"
    )
    if head.fits_other:
        sentence += f"; every row is right for a {other.value} remainder instead"
    return LawBreak(law=which, sentence=sentence, sm=fact.where, tile=fact.tile, count=fact.count)


_SENTENCES: Final[dict[Law, Callable[[ScheduleLaw, _Head, _Fact], LawBreak]]] = {
    Law.ORDER: _say_order,
    Law.TILE: _say_existing,
    Law.SENTINEL: _say_sentinel,
    Law.COVER: _say_cover,
    Law.BALANCE: _say_balance,
    Law.PLACEMENT: _say_placement,
}
