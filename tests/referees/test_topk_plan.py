"""The top-k v2 plan: the oracle against the referee, and the shipped builder against the oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from referees.kpool import B200_THRESHOLDS, H200_THRESHOLDS, expected_topk_plan
from support import DEVICE, backend

from dsa_verify.contract.topk_plan import B200, H200, TINY, TINY_LOW, PlanRules
from dsa_verify.replay.compilations import count_compilations
from dsa_verify.subjects.pipelines import topk_plan
from dsa_verify.subjects.pipelines.topk_plan import TopkPlanBuilder
from oracles.topk_plan import UNUSED, PlanTable, is_written, plan

POISON = -0x61616162
TABLES = {"H200": H200_THRESHOLDS, "B200": B200_THRESHOLDS}
ALL_RULES = (H200, B200, TINY, TINY_LOW)
GUARD = 16


def test_the_threshold_tables_are_those_of_the_contract():
    assert dict(H200.thresholds) == H200_THRESHOLDS
    assert dict(B200.thresholds) == B200_THRESHOLDS
    assert (H200.max_clusters, B200.max_clusters, H200.floor, B200.floor) == (30, 33, 32768, 32768)


class Bench:
    """Oracle and builder over one number of rows, with lengths and plans at addresses that stay."""

    def __init__(self, rules: PlanRules, rows: int):
        self.rules, self.rows = rules, rows
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.table = PlanTable.make(rules, rows, DEVICE)
        self.builder = TopkPlanBuilder(rules, DEVICE)
        self.memory = [torch.empty(2 * rows + 2 + 2 * GUARD, dtype=torch.int32, device=DEVICE) for _ in range(2)]
        self.of_oracle, self.of_builder = (m[GUARD:-GUARD].view(rows + 1, 2) for m in self.memory)

    def feed(self, lengths: list[int]) -> None:
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        for memory in self.memory:
            memory.fill_(POISON)

    def run_oracle(self) -> None:
        plan(self.lengths, self.table, self.of_oracle)

    def run_builder(self) -> None:
        self.builder.update(self.lengths, self.of_builder)

    def want(self, lengths: list[int]) -> list[tuple[int, int]] | None:
        rules = self.rules
        return expected_topk_plan(
            lengths,
            TABLES.get(rules.name, dict(rules.thresholds)),
            rules.max_clusters,
            floor=rules.floor,
            static_threshold=rules.static_threshold,
        )

    def check_oracle(self, lengths: list[int]) -> None:
        want = self.want(lengths)
        assert (want is not None) == is_written(self.rows, self.rules.max_clusters)
        got = [tuple(pair) for pair in self.of_oracle.tolist()]
        if want is None:
            assert got == [(POISON, POISON)] * (self.rows + 1)
        else:
            assert got == want + [(UNUSED, UNUSED)] * (self.rows + 1 - len(want)), (self.rules, lengths)

    def check_builder(self, lengths: list[int]) -> None:
        """Row 0 exactly, the listed rows as a set, and nothing else written (contract 5)."""
        want = self.want(lengths)
        got = [tuple(pair) for pair in self.of_builder.tolist()]
        if want is None:
            assert got == [(POISON, POISON)] * (self.rows + 1)
            return
        assert got[0] == want[0], (self.rules, lengths)
        assert sorted(got[1 : len(want)]) == want[1:], (self.rules, lengths)
        assert got[len(want) :] == [(POISON, POISON)] * (self.rows + 1 - len(want))
        for memory in self.memory:
            assert bool((memory[:GUARD] == POISON).all() & (memory[-GUARD:] == POISON).all()), "a guard was written"

    def run(self, lengths: list[int], *, builder: bool = True) -> None:
        self.feed(lengths)
        self.run_oracle()
        self.check_oracle(lengths)
        if builder:
            self.run_builder()
            self.check_builder(lengths)


@pytest.mark.parametrize("rules", ALL_RULES, ids=lambda rules: rules.name)
def test_every_threshold_at_its_cap_and_one_off(rules: PlanRules):
    """As many rows just above T as its cap says, and one more or fewer; the rest have length T, which is not above."""
    for threshold, cap in rules.thresholds:
        for longer in (cap - 1, cap, cap + 1):
            for rest in (0, rules.max_clusters + 1):
                lengths = [threshold + 1] * longer + [threshold] * rest
                lengths = [0, *lengths[::-1]]
                Bench(rules, len(lengths)).run(lengths)


@pytest.mark.parametrize("filler, length", [((0, 0), 0), ((0, 512), 5), ((1 << 20, 512), 1 << 19)], ids=str)
def test_what_fills_the_table_up_is_passed_by_the_walk(
    monkeypatch: pytest.MonkeyPatch, filler: tuple[int, int], length: int
):
    """No table is a power of two long, so each is filled up; with anything else there are lengths of a wrong plan."""
    assert all(len(rules.thresholds) & (len(rules.thresholds) - 1) for rules in ALL_RULES)
    for rules in (H200, TINY_LOW):
        Bench(rules, 200).run([length] * 200)
        with monkeypatch.context() as patch:
            patch.setattr(topk_plan, "UNUSED", filler)
            with pytest.raises(AssertionError):
                Bench(rules, 200).run([length] * 200)


def test_the_walk_stops_at_the_first_threshold_that_is_over_its_cap():
    """Even if a smaller one is within its own cap; the real tables, whose caps ascend, cannot show it."""
    rules = PlanRules(name="odd", thresholds=((8, 9), (24, 1), (48, 1)), max_clusters=2, floor=4)
    bench = Bench(rules, 5)
    bench.run([50, 30, 9, 0, 0])
    assert bench.of_oracle[:2].tolist() == [[48, 1], [0, 50]]


def random_lengths(random: np.random.Generator, rules: PlanRules, rows: int) -> list[int]:
    """Anything up to beyond the largest T, near some T, or mostly short."""
    thresholds = np.array([threshold for threshold, _ in rules.thresholds] + [rules.floor])
    near = random.choice(thresholds, rows) + random.integers(-1, 2, rows)
    anywhere = random.integers(0, int(thresholds.max() * 1.2), rows)
    short = random.integers(0, int(thresholds.min()) + 2, rows)
    shares = random.dirichlet([0.5, 0.5, 0.5])
    return np.choose(random.choice(3, rows, p=shares), [near, anywhere, short]).tolist()


@pytest.mark.parametrize("static", [-1, 0, 20, 40_000, 1 << 21])
@pytest.mark.parametrize("rules", ALL_RULES, ids=lambda rules: rules.name)
def test_random_lengths(rules: PlanRules, static: int):
    random = np.random.default_rng([static + 1, rules.max_clusters])
    rules = dataclasses.replace(rules, static_threshold=static)
    for i in range(120):
        rows = int(random.integers(1, 513) if i % 4 == 0 else random.integers(1, 3 * rules.max_clusters))
        Bench(rules, rows).run(random_lengths(random, rules, rows), builder=i % 6 == 0)


@pytest.mark.parametrize("rules", ALL_RULES, ids=lambda rules: rules.name)
def test_all_rows_alike(rules: PlanRules):
    """Short: the threshold is the smallest T or the floor, with no items. Long: the largest T, and all are listed."""
    bench = Bench(rules, 100)
    smallest, largest = rules.thresholds[0][0], rules.thresholds[-1][0]
    bench.run([0] * 100)
    assert bench.of_oracle[0].tolist() == [max(smallest, rules.floor), 0]
    bench = Bench(rules, 300)
    bench.run([largest + 5] * 300)
    assert bench.of_oracle[0].tolist() == [largest, 300]


@pytest.mark.parametrize(
    "clusters, rows, written",
    [
        (30, 30, False),
        (30, 31, True),
        (33, 33, False),
        (33, 34, True),
        (30, 512, True),
        (30, 513, False),
        (0, 64, False),
    ],
)
def test_where_no_plan_is_written_nothing_is_touched(clusters: int, rows: int, written: bool):
    rules = dataclasses.replace(H200, max_clusters=clusters)
    bench = Bench(rules, rows)
    bench.run([70_000] * rows)
    assert is_written(rows, clusters) is written
    assert (bench.of_builder[0, 0].item() == POISON) is not written


def test_captured_oracle_and_builder_are_right_on_every_replay():
    """Captured once, replayed over lengths that change in place, without a compilation after the first run."""
    random = np.random.default_rng(5)
    compiled = count_compilations()
    for rules in ALL_RULES:
        bench = Bench(rules, 200)
        bench.run(random_lengths(random, rules, 200))
        before = compiled()
        graphs = [backend().capture(bench.run_oracle), backend().capture(bench.run_builder)]
        for _ in range(10):
            lengths = random_lengths(random, rules, 200)
            bench.feed(lengths)
            for graph in graphs:
                graph.replay()
            bench.check_oracle(lengths)
            bench.check_builder(lengths)
        assert compiled() == before


def test_the_builder_reads_strided_lengths():
    memory = torch.tensor([50, 7777, 30, 7777, 20, 7777, 10, 7777], dtype=torch.int32, device=DEVICE)
    out = torch.full((5, 2), POISON, dtype=torch.int32, device=DEVICE)
    TopkPlanBuilder(TINY, DEVICE).update(memory[::2], out)
    # One row is above 48 and two above 24, each within its cap, but three are above 8, whose cap is 1.
    assert out.tolist() == [[24, 2], [0, 50], [1, 30], [POISON, POISON], [POISON, POISON]]
