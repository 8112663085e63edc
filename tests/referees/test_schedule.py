"""Schedules: every variant's oracle, referee, laws and builder against each other, and what the laws alone can see."""

from __future__ import annotations

import dataclasses
import random
import sys
import types
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from referees.schedule import expected, lay_out
from support import DEVICE, backend

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.schedule_variants import (
    VARIANTS,
    Indices,
    Placement,
    ScheduleVariant,
    Unit,
    shape,
    sms_per_slot,
    units_per_request,
    variant_named,
)
from dsa_verify.judge.schedule_laws import Fault, Law, LawBreak, ScheduleLaw
from dsa_verify.subjects.adapters import deep_gemm
from dsa_verify.subjects.pipelines.schedule import MAX_ROWS, build_schedule
from oracles.schedule import schedule

MANY = pytest.param(5000, marks=pytest.mark.slow)  # what the laws were accepted on
REFEREE_EVERY = 8
SHARES_ONLY = {Law.BALANCE, Law.PLACEMENT, Law.EMPTY}
every_variant = pytest.mark.parametrize("name", VARIANTS)
every_buildable = pytest.mark.parametrize("name", [name for name in VARIANTS if name != "V6"])


@pytest.fixture(autouse=True)
def _quick_small_operations() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Without the bookkeeping of autograd an operation on a few hundred elements takes half as long.
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@dataclasses.dataclass(frozen=True)
class Batch:
    """One call of a schedule builder."""

    variant: ScheduleVariant
    lens: torch.Tensor
    multiprocessors: int
    indices: torch.Tensor | None = None

    @property
    def law(self) -> ScheduleLaw:
        next_n = self.lens.shape[1] if self.lens.dim() == 2 else 1
        indexed = self.indices is not None
        return ScheduleLaw(self.variant, self.multiprocessors, rows=self.lens.shape[0], next_n=next_n, indexed=indexed)

    @property
    def slots(self) -> int:
        return self.multiprocessors // sms_per_slot(self.variant, self.law.next_n)

    def rows(self, **changes: object) -> torch.Tensor:
        """What the oracle makes of it, or of a variant with `changes`."""
        variant = dataclasses.replace(self.variant, **changes) if changes else self.variant
        out = torch.full(shape(self.slots), -7, dtype=torch.int32, device=DEVICE)
        schedule(variant, self.lens, self.multiprocessors, out, indices=self.indices)
        return out

    def with_lens(self, lens: torch.Tensor) -> Batch:
        return dataclasses.replace(self, lens=lens)

    def judge(self, rows: torch.Tensor) -> list[LawBreak]:
        return self.law.judge(rows, self.lens, self.indices)

    def referee(self) -> np.ndarray:
        indices = None if self.indices is None else self.indices.tolist()
        return expected(self.variant, self.lens.tolist(), self.multiprocessors, indices)

    def tiles(self) -> set[tuple[int, int]]:
        """What a row may name: every tile, and the sentinel."""
        next_n = self.lens.shape[1] if self.lens.dim() == 2 else 1
        lens = self.lens.reshape(-1, next_n)[:, -1].tolist()
        indices = None if self.indices is None else self.indices.tolist()
        work, end = lay_out(self.variant, lens, next_n, indices)
        return {*work, (end, 0)}


def tensor(values: object) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.int32)).to(DEVICE)


def lengths(rng: np.random.Generator, kind: int, rows: int, split: int) -> np.ndarray:
    """Lengths [rows] of one of several kinds; most have few splits, so that the referee can lay out all tiles."""
    if kind == 0:
        return rng.integers(0, 2 * split, rows)
    if kind == 1:
        return rng.choice([0, 1, split - 1, split, split + 1, 3 * split, 3 * split + 1], rows)
    if kind == 2:  # one huge among many tiny
        lens = rng.integers(0, 3, rows)
        lens[rng.integers(rows)] = rng.integers(100_000, 500_000)
        return lens
    if kind == 3:  # no tokens first, in the middle, last
        lens = rng.integers(1, 8 * split, rows)
        for start in (0, rows // 2, rows - 1):
            lens[start : start + rng.integers(1, 4)] = 0
        return lens
    return rng.integers(0, 2, rows)  # hardly any tiles, now and then none


def draw(variant: ScheduleVariant, rng: np.random.Generator, dice: random.Random) -> Batch:
    rows = dice.randint(1, dice.choice([2, 39, 199, 600]))
    indexed = variant.indices is Indices.MANDATORY or (variant.indices is Indices.OPTIONAL and dice.random() < 0.3)
    next_n = 1 if indexed or variant.max_next_n == 1 or 2 not in variant.context_dims else dice.randint(1, 8)
    lens = lengths(rng, dice.randrange(5), rows, variant.split)
    indices = None
    if indexed:  # runs of 1, 2, 3 and more tokens; another request may come again later
        indices = np.repeat(rng.permutation(rows) % 50, rng.choice([1, 1, 2, 3, 4, 9], rows))[:rows]
    multiprocessors = dice.choice([1, 2, 7, 132, 148, dice.randint(1, 199)])
    if dice.random() < 0.3:  # as many SMs as tiles, give or take one
        total = int((-(-lens // variant.split)).sum()) * units_per_request(variant, next_n)
        multiprocessors = max(1, min(total + dice.randint(-1, 1), 1024))
    if sms_per_slot(variant, next_n) == 2:  # so many pairs, and now and then an SM that is left over
        multiprocessors = 2 * multiprocessors + dice.randint(0, 1)
    if 1 not in variant.context_dims or (2 in variant.context_dims and (next_n > 1 or dice.random() < 0.5)):
        others = rng.integers(0, 1 << 20, (rows, next_n))  # columns that must not count
        others[:, -1] = lens
        lens = others
    return Batch(variant, tensor(lens), multiprocessors, None if indices is None else tensor(indices))


def batches(name: str, count: int, seed: int = 0) -> Iterator[Batch]:
    rng, dice = np.random.default_rng([seed, *name.encode()]), random.Random(f"{name} {seed}")
    for _ in range(count):
        yield draw(VARIANTS[name], rng, dice)


@every_variant
@pytest.mark.parametrize("count", [400, MANY])
def test_oracle_obeys_the_laws_and_agrees_with_the_referee(name: str, count: int) -> None:
    result = torch.empty(ScheduleLaw.result_shape, dtype=torch.int32, device=DEVICE)
    worst = torch.empty(count, dtype=torch.int32, device=DEVICE)
    for i, batch in enumerate(batches(name, count)):
        rows = batch.rows()
        batch.law.check(rows, batch.lens, result, batch.indices)
        torch.amax(result[1:, 0], out=worst[i])
        if i % REFEREE_EVERY == 0:
            assert np.array_equal(rows.cpu().numpy(), batch.referee()), batch
    assert (worst == -1).all(), f"batch {int((worst != -1).nonzero()[0])} breaks a law"


INDICES = [5, 5, 5, 7]
BY_HAND = {
    # 2, 0 and 3 splits; 2 atoms each: 10 tiles in shares of 2, 2, 3, 3 or 3, 3, 2, 2.
    "V4b": ([300, 0, 513], 3, None, 4, [(0, 0), (1, 0), (4, 0), (5, 0), (6, 0)]),
    "V4": ([300, 0, 513], 3, None, 4, [(0, 0), (1, 1), (4, 2), (5, 1), (6, 0)]),
    # An odd N makes N atoms: 15 tiles.
    "V3": ([300, 0, 513], 3, None, 4, [(0, 0), (2, 0), (6, 2), (8, 0), (9, 0)]),
    # 15 units of work; the cuts 4, 8 and 12 are inside splits that are 3 wide.
    "V5": ([300, 0, 513], 3, None, 4, [(0, 0), (0, 1), (6, 0), (6, 2), (9, 0)]),
    # One atom a request, and at N = 4 half as many rows, of which an SM without a partner has none.
    "V4c": ([300, 0, 513], 4, None, 9, [(0, 0), (0, 1), (2, 0), (2, 1), (3, 0)]),
    "V4c, 3": ([300, 0, 513], 3, None, 4, [(0, 0), (0, 1), (2, 0), (2, 1), (3, 0)]),
    "V2": ([300, 0, 513], 3, None, 3, [(0, 0), (2, 0), (2, 2), (3, 0)]),
    "V1": ([0, 300, 0, 513], 1, None, 3, [(1, 0), (3, 0), (3, 2), (4, 0)]),
    "V120": ([300, 0, 1], 2, None, 3, [(0, 0), (0, 1), (0, 2), (3, 0)]),
    # Fewer tiles than SMs: the empty ones are at the front.
    "JIT": ([0, 300], 1, None, 4, [(1, 0), (1, 0), (1, 0), (1, 1), (2, 0)]),
}
BY_HAND_INDEXED = {
    # Atoms of tokens 0-1, 2 and 3 with 2, 3 and 1 splits: 6 tiles in shares of 1, 1, 2, 2.
    "V4b": ([1, 300, 600, 256], 1, INDICES, 4, [(0, 0), (0, 1), (2, 0), (2, 2), (4, 0)]),
    # A run of three with 3 splits and one of one: 10 units of work.
    "V5p": ([1, 300, 600, 256], 1, INDICES, 4, [(0, 0), (0, 1), (0, 2), (0, 2), (4, 0)]),
    # 2 splits of 384 at 8 + 3 each, and one at 8 + 1: 31 units of work; the cut is at 16.
    "V6": ([1, 1, 400, 384], 1, INDICES, 2, [(0, 0), (0, 1), (4, 0)]),
}


@pytest.mark.parametrize(
    ("name", "case"), [*BY_HAND.items(), *BY_HAND_INDEXED.items()], ids=[*BY_HAND, *(f"{n}i" for n in BY_HAND_INDEXED)]
)
def test_worked_by_hand(name: str, case: tuple) -> None:
    lens, next_n, indices, multiprocessors, wanted = case
    name = name.partition(",")[0]
    dims = VARIANTS[name].context_dims
    context_lens = tensor([[9999] * (next_n - 1) + [length] for length in lens] if 2 in dims else lens)
    batch = Batch(VARIANTS[name], context_lens, multiprocessors, None if indices is None else tensor(indices))
    assert batch.referee().tolist() == [list(row) for row in wanted]
    assert batch.rows().tolist() == [list(row) for row in wanted]


@every_variant
def test_without_tiles_every_row_is_the_sentinel(name: str) -> None:
    variant = VARIANTS[name]
    indices = tensor([3] * 33) if variant.indices is Indices.MANDATORY else None
    batch = Batch(variant, tensor([0] * 33 if 1 in variant.context_dims else [[0]] * 33), 7, indices)
    assert batch.rows().tolist() == [[33, 0]] * 8
    assert batch.judge(batch.rows()) == []


def test_v6_counts_plainly_where_its_cost_overflows() -> None:
    longest = (1 << 31) - 1
    for rows, falls_back in ((80, False), (100, True)):
        batch = Batch(VARIANTS["V6"], tensor([longest] * rows), 13, tensor(range(rows)))
        splits = -(-longest // 384)
        assert (splits * 9 * rows >= 1 << 32) is falls_back
        assert torch.equal(batch.rows(), batch.rows(cost_block=0)) is falls_back
        assert batch.judge(batch.rows()) == []


# What the laws see without an oracle.


@every_variant
def test_laws_see_a_remainder_on_the_wrong_side(name: str) -> None:
    seen = 0
    for batch in batches(name, 100, seed=1):
        side = batch.variant.placement
        other = Placement.TAIL if side is Placement.LEAD else Placement.LEAD
        swapped = batch.rows(placement=other)
        breaks = batch.judge(swapped)
        assert bool(breaks) == (not torch.equal(swapped, batch.rows()))
        for found in breaks:
            seen += 1
            assert found.law in (Law.PLACEMENT, Law.EMPTY), found
            assert f"every row is right for a {other.value} remainder instead" in found.sentence
            assert found.sm is not None
            assert tuple(swapped[found.sm].tolist()) == found.tile
    assert seen > 20


@every_variant
def test_laws_see_dropped_splits(name: str) -> None:
    """A builder that rounds down: the last, unfinished split of each request is not counted."""
    seen = 0
    for batch in batches(name, 100, seed=2):
        dropped = batch.with_lens(batch.lens // batch.variant.split * batch.variant.split).rows()
        breaks = batch.judge(dropped)
        # Two splits too few may leave every cut where it was (with one SM always): nothing is wrong then.
        assert bool(breaks) == (not torch.equal(dropped, batch.rows()))
        seen += bool(breaks)
    assert seen > 20


@every_variant
def test_laws_see_any_wrong_row(name: str) -> None:
    rng = np.random.default_rng(7)
    for batch in batches(name, 150, seed=3):
        right = batch.rows()
        wrong = right.clone()
        row = int(rng.integers(batch.slots + 1))
        if rng.random() < 0.5:
            wrong[row, int(rng.integers(2))] += int(rng.choice([-2, -1, 1, 2]))
        else:
            wrong[row] = right[int(rng.integers(batch.slots + 1))]
        assert bool(batch.judge(wrong)) == (not torch.equal(wrong, right)), (batch, wrong)


def v4b(lens: Sequence[int], next_n: int, multiprocessors: int) -> Batch:
    return Batch(VARIANTS["V4b"], tensor([[length] * next_n for length in lens]), multiprocessors)


# V4b, 2, 0 and 3 splits in 2 atoms each, on 4 SMs; the right rows are (0, 0) (1, 0) (4, 0) (5, 0) (6, 0).
BROKEN = {
    "first split missing": (
        {0: (0, 1)},
        Law.COVER,
        (0, (0, 0), Fault.MISSING),
        "split 0 of atom 0 (atom 0 of request 0) is missing: it comes before the start of SM 0, "
        "split 1 of atom 0 (atom 0 of request 0)",
    ),
    "last split missing": (
        {4: (5, 2)},
        Law.COVER,
        (3, (5, 2), Fault.MISSING),
        "split 2 of atom 5 (atom 1 of request 2) is missing: SM 3, the last, ends before it",
    ),
    "split doubled": (
        {2: (0, 1)},
        Law.COVER,
        (2, (0, 1), Fault.DOUBLED),
        "split 1 of atom 0 (atom 0 of request 0) is doubled: SM 2 starts there, and an SM before it has done it "
        "already",
    ),
    "falling": (
        {2: (0, 1)},
        Law.ORDER,
        (1, (0, 1), None),
        "row 2 (0, 1) comes before row 1 (1, 0): SM 1 starts beyond its own end, never meets it and runs on",
    ),
    "sentinel": (
        {4: (6, 1)},
        Law.SENTINEL,
        (3, (6, 1), None),
        "the last row, 4, is (6, 1); the sentinel is (6, 0): SM 3 ends elsewhere",
    ),
    "no such split": (
        {3: (5, 3)},
        Law.TILE,
        (3, (5, 3), None),
        "row 3 names split 3 of atom 5 (atom 1 of request 2), which has 3 split(s): SM 2 steps over that end and "
        "runs on",
    ),
    "no tokens": (
        {2: (3, 0)},
        Law.TILE,
        (2, (3, 0), None),
        "row 2 names split 0 of atom 3 (atom 1 of request 1), which has 0 split(s): SM 1 steps over that end and "
        "runs on",
    ),
    "no such unit": (
        {0: (7, 0)},
        Law.TILE,
        (0, (7, 0), None),
        "row 0 is (7, 0), and no atom starts at unit 7: SM 0 reads out of range",
    ),
    "uneven": (
        {2: (4, 2)},
        Law.BALANCE,
        (1, (1, 0), None),
        "SM 1 gets 4 tiles from split 0 of atom 1 (atom 1 of request 0) on; 10 over 4 SMs make 2 or 3",
    ),
    "leading remainder": (
        {1: (1, 1), 2: (4, 2), 3: (5, 1)},
        Law.PLACEMENT,
        (1, (1, 1), None),
        "SM 1 starts at split 1 of atom 1 (atom 1 of request 0), after 3 tiles; it should start at split 0 of atom 1 "
        "(atom 1 of request 0), after 2: by V4b, 10 tiles leave a remainder of 2 for the trailing SMs, one each; "
        "every row is right for a leading remainder instead",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_break_says_which_sm_and_which_tile(case: str) -> None:
    changes, law, place, sentence = BROKEN[case]
    batch = v4b([300, 0, 513], 3, 4)
    rows = batch.rows()
    for row, value in changes.items():
        rows[row] = tensor(value)
    (found,) = (found for found in batch.judge(rows) if found.law is law)
    assert (found.sm, found.tile, found.fault) == place
    assert found.sentence == sentence


def test_fewer_tiles_than_sms_names_the_side_that_is_empty() -> None:
    batch = v4b([300], 1, 4)
    (found,) = batch.judge(batch.rows(placement=Placement.LEAD))
    assert found.law is Law.EMPTY
    assert "2 tile(s) for 4 SMs go one each to the last 2, and the others are empty" in found.sentence


def test_runs_are_named_by_token_and_measured_in_work() -> None:
    batch = Batch(VARIANTS["V5"], tensor([[0, 300], [0, 0], [0, 513]]), 2)
    rows = batch.rows()
    rows[1] = tensor((4, 2))
    balance, placement = batch.judge(rows)
    assert balance.sentence == (
        "SM 0 gets 8 units of work from split 0 of request 0 (token 0) on; 10 over 2 SMs make at most 6"
    )
    assert "SM 1 starts at split 2 of request 2 (token 4), after 8 units of work" in placement.sentence
    rows[1] = tensor((3, 0))
    (found,) = batch.judge(rows)
    assert found.sentence == "row 1 is (3, 0), and no token run starts at unit 3: SM 0 steps over that end and runs on"


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (torch.zeros(5, 2, dtype=torch.int64), "torch.int64 (5, 2), contiguous"),
        (torch.zeros(4, 2, dtype=torch.int32), "torch.int32 (4, 2), contiguous"),
        (torch.zeros(2, 5, dtype=torch.int32).t(), "torch.int32 (5, 2), strided"),
    ],
)
def test_form_is_a_law_too(rows: torch.Tensor, what: str) -> None:
    batch = v4b([300, 0, 513], 3, 4)
    (found,) = batch.judge(rows)
    assert found.law is Law.FORM
    assert found.sentence == f"the schedule is {what}; consumers read torch.int32 (5, 2), contiguous"
    with pytest.raises(UsageError, match="report `form` instead"):
        batch.law.check(rows, batch.lens, torch.zeros(ScheduleLaw.result_shape, dtype=torch.int32))


@every_variant
def test_a_stale_schedule_of_shorter_lengths_is_still_an_exact_cover(name: str) -> None:
    rng = np.random.default_rng(11)
    uneven = 0
    for batch in batches(name, 100, seed=4):
        # No request grows out of nothing: before the first row it would be missed.
        grown = batch.lens + tensor(rng.integers(0, 3000, batch.lens.shape)) * (batch.lens > 0)
        breaks = batch.with_lens(grown).judge(batch.rows())
        assert {found.law for found in breaks} <= SHARES_ONLY, breaks
        uneven += bool(breaks)
    assert uneven > 30


@every_variant
def test_a_stale_schedule_of_longer_lengths_is_seen_where_it_runs_away(name: str) -> None:
    """Wherever a row names a split that is gone, and there only, the law of existing tiles is broken."""
    rng = np.random.default_rng(12)
    runaways = 0
    for batch in batches(name, 100, seed=5):
        shrunk = batch.with_lens(batch.lens - tensor(rng.integers(0, 2000, batch.lens.shape)).clamp(max=batch.lens))
        stale = batch.rows()
        tiles = shrunk.tiles()
        gone = [tuple(row) not in tiles for row in stale[:-1].tolist()]
        broken = {found.law: found for found in shrunk.judge(stale)}
        assert (Law.TILE in broken) == any(gone)
        if any(gone):
            runaways += 1
            assert (broken[Law.TILE].sm, broken[Law.TILE].count) == (gone.index(True), sum(gone))
    assert runaways > 20


# The builder, captures, and wrong calls.


@every_buildable
def test_builder_agrees_with_the_oracle(name: str) -> None:
    for batch in batches(name, 12 if DEVICE.type == "cpu" else 300, seed=6):
        if batch.indices is None:
            out = torch.full(shape(batch.slots), -7, dtype=torch.int32, device=DEVICE)
            build_schedule(batch.lens, out, variant=name)
            assert torch.equal(out, batch.rows()), batch


@pytest.mark.parametrize("rows", [1, 1023, 1024, 1025, 4097])
def test_builder_over_several_blocks(rows: int) -> None:
    lens = tensor(np.random.default_rng(rows).choice([0, 0, 1, 256, 257, 9000], (rows, 3)))
    lens[0] = 200
    batch = Batch(VARIANTS["V4b"], lens, 13)
    out = torch.empty(shape(13), dtype=torch.int32, device=DEVICE)
    build_schedule(lens, out)
    assert torch.equal(out, batch.rows())


def test_builder_pools_and_takes_any_strides_and_a_draft_length() -> None:
    rng = np.random.default_rng(5)
    wide = torch.tensor(rng.integers(0, 5000, (40, 6)), device=DEVICE)  # int64
    lens = wide[::2, 1::2]
    out = torch.empty(shape(7), dtype=torch.int32, device=DEVICE)
    build_schedule(lens, out, pool=4)
    pooled = (lens // 4).clamp(min=1).to(torch.int32)
    assert torch.equal(out, Batch(VARIANTS["V4b"], pooled, 7).rows())
    build_schedule(lens[:, -1], out, pool=4, next_n=3)
    assert torch.equal(out, Batch(VARIANTS["V4b"], pooled, 7).rows())


@pytest.mark.parametrize("name", ["V4b", "V5", "V4b indexed", "V6 indexed"])
def test_oracle_builder_and_laws_can_be_captured(name: str) -> None:
    variant = VARIANTS[name.split()[0]]
    indexed = name.endswith("indexed")
    rng = np.random.default_rng(8)
    lens = torch.zeros(9 if indexed else (9, 3), dtype=torch.int32, device=DEVICE)
    indices = torch.zeros(9, dtype=torch.int32, device=DEVICE) if indexed else None
    batch = Batch(variant, lens, 5, indices)
    out, built = torch.empty((2, *shape(5)), dtype=torch.int32, device=DEVICE).unbind(0)
    result = torch.empty(ScheduleLaw.result_shape, dtype=torch.int32, device=DEVICE)

    def body() -> None:
        schedule(variant, lens, 5, out, indices=indices)
        if not indexed:
            build_schedule(lens, built, variant=variant.name)
        batch.law.check(out, lens, result, indices)

    body()
    graph = backend().capture(body)
    for _ in range(10):
        lens.copy_(tensor(rng.integers(0, 3000, lens.shape)))
        if indices is not None:
            indices.copy_(tensor(np.sort(rng.integers(0, 4, 9))))
        for stale in (out, built, result):
            stale.fill_(-9)
        graph.replay()
        assert np.array_equal(out.cpu().numpy(), batch.referee())
        assert batch.law.broken(result) == []
        if not indexed:
            assert torch.equal(out, built)


def test_pairs_of_sms_are_those_of_v4b_over_the_last_column_with_half_as_many() -> None:
    """As the nv_dev branch of DeepGEMM and the fork that vLLM pins have it (contract 3.2); at other N they differ."""
    lens = tensor(np.random.default_rng(9).integers(1, 4000, (12, 4)))
    batch = Batch(VARIANTS["V4c"], lens, 114)
    half = Batch(VARIANTS["V4b"], lens[:, -1:].contiguous(), 57)
    assert batch.rows().shape == (58, 2)
    assert torch.equal(batch.rows(), half.rows())
    assert np.array_equal(batch.referee(), half.referee())
    wrong = batch.rows()
    wrong[3] = wrong[2]
    assert any("SM pair 2" in found.sentence for found in batch.judge(wrong))
    (found,) = batch.judge(half.with_lens(lens[:, -1:]).rows()[:-1])
    assert found.law is Law.FORM


LENS = tensor([[1, 2], [3, 4]])
OUT = torch.empty(5, 2, dtype=torch.int32, device=DEVICE)
REFUSED = {
    "unknown": (lambda: variant_named("V9"), r"'V9' is unknown; known variants: V1, .*JIT"),
    "1-D": (lambda: schedule(VARIANTS["V3"], LENS[:, 0], 4, OUT), r"\(2,\) is 1-D; .* V3 takes 2-D; reshape"),
    "2-D": (lambda: schedule(VARIANTS["V1"], LENS, 4, OUT), r"\(2, 2\) is 2-D; .* V1 takes 1-D; reshape"),
    "empty": (lambda: schedule(VARIANTS["V2"], LENS[:0], 4, OUT), r"\(0, 2\) holds no request"),
    "one token": (lambda: schedule(VARIANTS["JIT"], LENS, 4, OUT), r"2 tokens a request; .* JIT takes at most 1"),
    "SMs": (lambda: schedule(VARIANTS["JIT"], LENS[:, 0], 1025, OUT), r"1025 is outside 1\.\.1024"),
    "no pair": (
        lambda: schedule(VARIANTS["V4c"], LENS.repeat(1, 2), 1, OUT),
        r"multiprocessors: 1 makes no pair, and .* V4c takes them in pairs at 4 tokens",
    ),
    "out of pairs": (lambda: schedule(VARIANTS["V4c"], LENS.repeat(1, 2), 4, OUT), r"is not torch.int32 \(3, 2\)"),
    "indices refused": (
        lambda: schedule(VARIANTS["V3"], LENS, 4, OUT, indices=LENS[0]),
        r"V3 refuses them; leave them out",
    ),
    "indices missing": (lambda: schedule(VARIANTS["V6"], LENS[:, 0], 4, OUT), r"missing; .* V6 needs int32 \[rows\]"),
    "indices and N": (
        lambda: schedule(VARIANTS["V4"], LENS, 4, OUT, indices=LENS[0]),
        r"2 tokens a request together with indices, which need 1",
    ),
    "out": (lambda: schedule(VARIANTS["V4"], LENS, 5, OUT), r"torch.int32 \(5, 2\) is not torch.int32 \(6, 2\)"),
    "law": (lambda: ScheduleLaw(VARIANTS["V1"], 4, rows=2, next_n=3), r"\(2, 3\) is 2-D; .* V1 takes 1-D"),
    "law, lengths": (
        lambda: v4b([1], 2, 4).law.judge(OUT, LENS),
        r"context_lens: \(2, 2\) is not \(1, 2\); make another ScheduleLaw",
    ),
    "builder, indices": (lambda: build_schedule(LENS, OUT, variant="V6"), r"V6 needs indices, .*; use another variant"),
    "builder, N": (lambda: build_schedule(LENS, OUT, next_n=3), r"next_n: 3 is not the 2 columns"),
    "builder, V1": (lambda: build_schedule(LENS, OUT, variant="V1"), r"\(2, 2\) is 2-D; .* V1 takes 1-D"),
    "builder, out": (lambda: build_schedule(LENS, OUT[:, :1]), r"\(5, 1\) is not a contiguous \[S \+ 1, 2\]"),
    "builder, dtype": (lambda: build_schedule(LENS.float(), OUT), r"context_lens torch.float32: .* int64 are needed"),
    "builder, rows": (
        lambda: build_schedule(LENS[:1, :1].expand(MAX_ROWS + 1, 1), OUT),
        r"131073 rows are more than 131072",
    ),
    "builder, pool": (lambda: build_schedule(LENS, OUT, pool=0), r"pool: 0 is below 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(UsageError, match=message):
        call()


def test_every_variant_says_where_it_comes_from() -> None:
    for variant in VARIANTS.values():
        assert variant.upstream or variant.wheels or variant.name.startswith("tiny")
        assert variant.sentinel
        assert variant.unit is not Unit.TOKEN_RUN or variant.placement is Placement.LEAD
    assert [units_per_request(VARIANTS["V3"], n) for n in range(1, 9)] == [1, 1, 3, 2, 5, 3, 7, 4]
    assert [units_per_request(VARIANTS["V4b"], n) for n in range(1, 9)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [units_per_request(VARIANTS["V4c"], n) for n in range(1, 9)] == [1] * 8
    assert [sms_per_slot(VARIANTS["V4c"], n) for n in range(1, 9)] == [1, 1, 1, 2, 1, 1, 1, 1]
    assert {sms_per_slot(v, n) for v in VARIANTS.values() if v.name != "V4c" for n in range(1, 17)} == {1}
    assert [units_per_request(VARIANTS["V5"], n) for n in range(1, 9)] == [1, 2, 3, 4, 5, 6, 7, 8]


# The adapter, with a stand-in for the package: the real one is for tests on a GPU.


@pytest.fixture
def no_cached_import() -> Iterator[None]:
    deep_gemm._builder.cache_clear()
    yield
    deep_gemm._builder.cache_clear()


@pytest.mark.usefixtures("no_cached_import")
def test_adapter_copies_into_the_schedule_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def builder(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
        calls.append((tuple(context_lens.shape), block_kv, num_sms))
        return Batch(VARIANTS["V4b"], context_lens, num_sms).rows()

    monkeypatch.setitem(sys.modules, "deep_gemm", types.SimpleNamespace(get_paged_mqa_logits_metadata=builder))
    out = torch.empty(shape(4), dtype=torch.int32, device=DEVICE)
    address = out.data_ptr()
    batch = v4b([300, 0, 513], 3, 4)
    deep_gemm.refresh(batch.lens, out)
    assert out.data_ptr() == address
    assert torch.equal(out, batch.rows())
    assert calls == [((3, 3), 64, 4)]
    with pytest.raises(UsageError, match=r"torch.int32 \(3,\) is not contiguous .*unsqueeze"):
        deep_gemm.refresh(batch.lens[:, 0], out)


@pytest.mark.usefixtures("no_cached_import")
def test_adapter_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    out = torch.empty(shape(4), dtype=torch.int32, device=DEVICE)
    with pytest.raises(UsageError, match=r"sgl-deep-gemm cannot be imported .*pip install dsa-verify\[deepgemm\]"):
        deep_gemm.refresh(LENS, out)
    monkeypatch.setattr(deep_gemm, "package_version", lambda name: None)
    with pytest.raises(UsageError, match=r"not installed; pip install dsa-verify\[deepgemm\]"):
        deep_gemm.installed_variant(90)


@pytest.mark.parametrize(
    ("version", "architecture", "name"),
    [
        ("0.1.0", 90, "V4"),
        ("0.1.3", 100, "V4"),
        ("0.1.5.post1", 90, "V4b"),
        ("0.1.5.post1", 100, "V5"),
        ("0.2.3.post2", 100, "V5p"),
        ("0.2.5", 100, "V6"),
        ("0.2.5", 90, "V4b"),
        ("0.2.5", 120, "V120"),
    ],
)
def test_adapter_knows_what_a_release_builds(
    version: str, architecture: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_gemm, "package_version", lambda distribution: version)
    assert deep_gemm.installed_variant(architecture).name == name


def test_adapter_does_not_guess() -> None:
    with pytest.raises(UsageError, match=r"9.9.9 on architecture 90: .* not known; known releases: 0\.1\.0, "):
        deep_gemm.variant_of("9.9.9", 90)
