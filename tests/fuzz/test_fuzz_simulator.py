"""EngineSimulator: only states that an engine can be in, only rounds within the contract, every boundary on demand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from simulated import check
from test_fuzz_expansion import configurations

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round, Scenario
from dsa_verify.contract.round_table import token_slots
from dsa_verify.rounds.case_file import parse_case
from dsa_verify.systems.catalogue import SYSTEMS
from fuzz.engine.boundaries import OTHER_PAGES, Boundary, Kind, boundaries, boundary_lengths, marks
from fuzz.engine.coverage import Coverage
from fuzz.engine.simulator import MOST_WAITING, REUSES, EngineSimulator
from fuzz.engine.steps import ENGINE

TINY = Geometry.resolve("tiny", {"request_rows": 9})
POOLED = Geometry.resolve("tiny_pool", {"draft_tokens": 3})


def checked(simulator: EngineSimulator, count: int) -> list[Round]:
    rounds = []
    for _ in range(count):
        rounds.append(simulator.step())
        check(simulator)
    return rounds


@configurations
@pytest.mark.parametrize("outside", [False, True])
def test_rounds_are_within_the_contract_and_requests_stay_whole(
    system: str, preset: str, overrides: dict[str, object], buckets: tuple[int, ...], outside: bool
) -> None:
    geometry = SYSTEMS[system].geometry(preset, overrides)
    rounds = checked(EngineSimulator(SYSTEMS[system], geometry, buckets, 1, outside=outside), 150)
    scenario = Scenario(system=system, geometry=geometry, buckets=buckets, rounds=tuple(rounds))
    assert parse_case(scenario.to_json()).rounds == scenario.rounds
    assert {round_.bucket for round_ in rounds} == set(buckets)
    if not outside:
        drafts = geometry.draft_tokens if system in ("target_verify", "ragged_verify") else 0
        for round_ in rounds:
            assert all(1 <= length <= geometry.context - drafts for length in round_.seq_lens)


@pytest.mark.parametrize("steered", [False, True])
def test_the_same_seed_gives_the_same_rounds(steered: bool) -> None:
    def rounds(seed: int) -> list[Round]:
        coverage = Coverage(SYSTEMS["draft_extend"], POOLED, (4, 2)) if steered else None
        return EngineSimulator(SYSTEMS["draft_extend"], POOLED, (4, 2), seed, coverage=coverage).rounds(120)

    assert rounds(3) == rounds(3)
    assert rounds(3) != rounds(4)


def test_every_step_can_follow_every_other() -> None:
    coverage = Coverage(SYSTEMS["decode"], TINY, (4, 2))
    simulator = EngineSimulator(SYSTEMS["decode"], TINY, (4, 2), 1, coverage=coverage)
    for first in simulator.steps:
        for second in simulator.steps:
            for step in (first, second):
                simulator.play(step)
                check(simulator)
    pairs = {key[1:]: count for key, count in coverage.visits().items() if key[0] == "regime"}
    assert len(pairs) == len(simulator.steps) ** 2
    assert [pair for pair, count in pairs.items() if not count] == []


def test_only_a_shared_row_is_named_twice_and_only_for_one_round() -> None:
    simulator, seen = EngineSimulator(SYSTEMS["decode"], TINY, (4, 2), 2, outside=False), 0
    for _ in range(100):
        round_ = simulator.play("shared prefix")
        check(simulator)
        if len(set(round_.requests)) == round_.raw_batch:
            continue  # the other kind of sharing, which the tests below are about
        assert len(set(round_.requests)) == round_.raw_batch - 1
        seen += 1
        owner, sharer = (i for i, row in enumerate(round_.requests) if row == simulator.live[-1].row)
        assert round_.seq_lens[sharer] <= round_.seq_lens[owner]
        assert len(set(simulator.play("steady").requests)) == len(simulator.live)
    assert seen > 20


def test_a_shared_row_lives_as_long_as_its_last_reader() -> None:
    simulator = EngineSimulator(SYSTEMS["decode"], TINY, (4,), 0, outside=False, reuse="lifo")
    simulator.admit(9)
    row = simulator.live[0].row
    simulator.share(0)
    simulator.finish(0)
    check(simulator)
    assert [request.row for request in simulator.live] == [row]
    assert row not in simulator.free
    simulator.finish(0)
    assert row in simulator.free


def test_accepted_tokens_are_1_to_n_and_lengths_grow_by_them() -> None:
    simulator = EngineSimulator(SYSTEMS["draft_extend"], POOLED, (4,), 5, outside=False)
    simulator.play("fill")
    seen = set[int]()
    for _ in range(100):
        before = {id(request): (request.length, request.accepted) for request in simulator.live}
        simulator.play("steady")
        for request in simulator.live:
            length, accepted = before[id(request)]
            assert request.length == length + accepted
            seen.add(accepted)
        if not simulator.live:
            simulator.play("fill")
    assert seen == {1, 2, 3}


def pages(simulator: EngineSimulator, row: int) -> list[int]:
    slots = token_slots(simulator.geometry, np.array([row]), np.array([simulator.generations[row]]))
    return slots[0].tolist()


@pytest.mark.parametrize("reuse", REUSES)
def test_a_preempted_request_returns_on_other_pages(reuse: str) -> None:
    simulator = EngineSimulator(SYSTEMS["decode"], TINY, (4, 2), 7, outside=False, reuse=reuse)
    for _ in range(60):
        simulator.play("steady")
        if not simulator.live:
            simulator.admit()
        request = simulator.live[-1]
        before, length = pages(simulator, request.row), request.length
        simulator.preempt()
        assert request in simulator.waiting
        simulator.waiting = [request]  # or another would return first
        simulator.resume()
        assert simulator.live[-1].length == length
        assert pages(simulator, simulator.live[-1].row) != before
        simulator.emit()
        check(simulator)


class Tables:
    """The first slot of each page of each request row, as rounds say it."""

    def __init__(self, geometry: Geometry):
        self.geometry = geometry
        rows = np.arange(geometry.request_rows)
        self.generations = np.zeros_like(rows)
        self.pages = token_slots(geometry, rows, self.generations)[:, :: geometry.allocator_page]

    def play(self, round_: Round) -> None:
        before, taken = self.pages.copy(), {row: rest for row, *rest in round_.prefixes}
        for row in round_.remap:
            self.generations[row] += 1
            slots = token_slots(self.geometry, np.array([row]), self.generations[[row]])
            self.pages[row] = slots[0, :: self.geometry.allocator_page]
            origin, pages = taken.get(row, (row, 0))
            self.pages[row, :pages] = before[origin, :pages]


@configurations
@pytest.mark.parametrize("reuse", REUSES)
def test_requests_share_first_pages_and_nobody_writes_them(
    system: str, preset: str, overrides: dict[str, object], buckets: tuple[int, ...], reuse: str
) -> None:
    """Contract 0.1, 4.2, 8.2: of the tables themselves, whatever the simulator believes."""
    geometry = SYSTEMS[system].geometry(preset, overrides)
    simulator, tables, shared = (
        EngineSimulator(SYSTEMS[system], geometry, buckets, 4, outside=False, reuse=reuse),
        Tables(geometry),
        0,
    )
    for round_ in checked(simulator, 250):
        tables.play(round_)
        lengths = dict(zip(round_.requests, round_.seq_lens, strict=True))
        held = {row: set(tables.pages[row, : -(-length // geometry.allocator_page)]) for row, length in lengths.items()}
        for row, length in lengths.items():
            own = set(tables.pages[row, SYSTEMS[system].pages_before_writes(geometry, length) :])
            others = set().union(*(pages for other, pages in held.items() if other != row))
            assert not own & others, f"row {row} writes a page that another has"
            shared += bool(held[row] & others)
    assert shared or max(buckets) == 1


def test_a_new_request_can_have_the_first_pages_of_another() -> None:
    simulator = EngineSimulator(SYSTEMS["decode"], TINY, (4,), 0, outside=False, reuse="lifo")
    kinds = set[bool]()
    for _ in range(30):
        simulator.shrink(0)
        simulator.admit(30)
        simulator.emit()
        (owner,) = simulator.live
        simulator.share(0)
        new, round_ = simulator.live[-1], simulator.emit()
        kinds.add(new.shares)
        if not new.shares:
            ((row, origin, pages),) = round_.prefixes
            assert (row, origin) == (new.row, owner.row) != (owner.row, owner.row)
            assert 1 <= pages <= 7
            assert pages * TINY.allocator_page < new.length
    assert kinds == {True, False}


def test_a_preempted_request_can_return_to_its_first_pages() -> None:
    simulator = EngineSimulator(SYSTEMS["decode"], TINY, (4,), 0, outside=False, reuse="lifo")
    kept = 0
    for _ in range(30):
        simulator.shrink(0)
        simulator.admit(30)
        simulator.emit()
        row = simulator.live[0].row
        simulator.preempt()
        simulator.resume()
        round_ = simulator.emit()
        assert round_.remap == (row,)
        assert set(round_.prefixes) <= {(row, row, 7)}
        kept += len(round_.prefixes)
    assert 5 < kept < 25


def test_a_row_that_shares_is_not_given_to_a_shorter_request() -> None:
    simulator = EngineSimulator(SYSTEMS["decode"], TINY, (4,), 0, outside=False, reuse="lifo")
    while not simulator._borrowed:
        simulator.shrink(0)
        simulator.admit(30)
        simulator.emit()
        simulator.share(0)
        simulator.emit()
    (row,) = simulator._borrowed
    for at in (1, 0):
        simulator.finish(at)
    simulator.free.sort(key=row.__eq__)  # LIFO: the last one is next
    simulator.admit(2)
    assert simulator.live[0].row == row
    assert row in simulator.emit().remap, "it moves to pages of its own"
    assert simulator.live[0].length == 2


def test_freed_pages_are_reused_in_the_order_that_was_asked_for() -> None:
    def pages_after_reuse(reuse: str) -> tuple[int, bool]:
        simulator = EngineSimulator(SYSTEMS["decode"], TINY, (4,), 0, outside=False, reuse=reuse)
        simulator.admit(5)
        simulator.emit()
        row = simulator.live[0].row
        before = pages(simulator, row)
        simulator.finish(0)
        simulator.admit(5)
        simulator.emit()
        return simulator.live[0].row - row, pages(simulator, simulator.live[0].row) == before

    assert pages_after_reuse("lifo") == (0, True)
    assert pages_after_reuse("fifo") == (-1, False)


def test_a_moved_request_gets_another_row() -> None:
    simulator = EngineSimulator(SYSTEMS["decode"], TINY, (4,), 0, outside=False, reuse="lifo")
    for _ in range(3):
        simulator.admit(9)
    rows = [request.row for request in simulator.live]
    simulator.move_row(1)
    assert [request.row == row for request, row in zip(simulator.live, rows, strict=True)] == [True, False, True]
    simulator.move_pages(2)
    assert simulator.emit().remap == (rows[2],)
    assert simulator.emit().remap == ()


def test_a_round_from_outside_does_not_lose_the_moves_of_the_batch() -> None:
    simulator = EngineSimulator(SYSTEMS["decode"], TINY, (8,), 0, reuse="lifo")
    for _ in range(4):
        simulator.admit(9)
    for place in range(4):
        simulator.move_pages(place)
    moved = {request.row for request in simulator.live}
    (pages,) = (b for b in boundaries(SYSTEMS["decode"], TINY, (8,)) if b.which == OTHER_PAGES)
    first, second = simulator.at(pages), simulator.emit()
    assert set(first.remap) & set(first.requests)
    assert moved <= {*first.remap, *second.remap}
    assert max(len(first.remap), len(second.remap)) <= 4


def test_a_full_pool_preempts_the_last_request() -> None:
    simulator = EngineSimulator(SYSTEMS["decode"], TINY, (4,), 0, outside=False)
    for _ in range(4):
        simulator.admit(TINY.context)
    assert len(simulator.live) < 4
    assert [request.length for request in simulator.waiting] == [TINY.context] * (4 - len(simulator.live))


def test_a_long_run_keeps_a_bounded_number_of_requests() -> None:
    simulator = EngineSimulator(SYSTEMS["decode"], TINY, (4,), 0, outside=False)
    for _ in range(2 * MOST_WAITING):
        simulator.admit(TINY.context)
        simulator.preempt()
    assert len(simulator.waiting) == MOST_WAITING


def test_idle_and_wider_buckets() -> None:
    simulator = EngineSimulator(SYSTEMS["decode"], TINY, (4, 2), 0, outside=False)
    simulator.admit(9)
    idle = simulator.play("idle")
    assert idle.seq_lens == ()
    assert [request.length for request in simulator.live] == [9]
    wider = simulator.play("wider bucket")
    assert (wider.bucket, wider.seq_lens) == (4, (10,))
    assert simulator.play("steady").bucket == 2


@pytest.mark.parametrize(
    "system, preset, overrides, buckets",
    [
        ("decode", "deepseek_v32", {"indexer": True}, (48, 16, 1)),
        ("decode", "tiny", {"context": 203, "table_width": 130}, (4, 1)),
        ("decode", "tiny", {"request_rows": 4}, (1,)),
        ("decode", "tiny", {"indexer": True, "request_rows": 40, "multiprocessors": 7}, (32, 4)),
        ("target_verify", "glm53_flash", {"draft_tokens": 6, "architecture": 100, "request_rows": 20}, (12, 4)),
        ("target_verify", "tiny_pool", {"draft_tokens": 3}, (4, 1)),
        ("draft_extend", "tiny", {"draft_tokens": 3}, (4, 2)),
        ("draft_extend", "tiny", {"draft_tokens": 3}, (1,)),
        ("draft_extend", "tiny_pool", {"draft_tokens": 3}, (4, 1)),
        ("mtp", "tiny_pool", {}, (4, 2)),
        ("ragged_verify", "tiny", {"draft_tokens": 3, "graph_tokens": 6}, (6, 2)),
    ],
)
def test_every_boundary_is_reached_on_demand(
    system: str, preset: str, overrides: dict[str, object], buckets: tuple[int, ...]
) -> None:
    geometry = SYSTEMS[system].geometry(preset, overrides)
    simulator = EngineSimulator(SYSTEMS[system], geometry, buckets, 3)
    known = boundaries(SYSTEMS[system], geometry, buckets)
    assert len({boundary.name for boundary in known}) == len({boundary.mark for boundary in known}) == len(known)
    rounds = []
    for boundary in known:
        rounds.append(simulator.at(boundary))
        assert boundary.mark in marks(rounds[-1], SYSTEMS[system], geometry), boundary.name
    scenario = Scenario(system=system, geometry=geometry, buckets=buckets, rounds=tuple(rounds))
    assert parse_case(scenario.to_json()).rounds == scenario.rounds


def test_the_lengths_of_contract_10_are_all_there() -> None:
    real = Geometry.resolve("glm53_flash", {"draft_tokens": 4})
    wanted = {0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 385, 511, 512, 513}
    wanted |= set(range(2047, 2053))
    wanted |= {real.context - 1, real.context, real.context - 4}  # the last: its draft ends with the context
    wanted |= {256 * k + step for k in (1, 2) for step in (-1, 0, 1)}
    assert wanted <= set(boundary_lengths(SYSTEMS["target_verify"], real))
    assert min(boundary_lengths(SYSTEMS["draft_extend"], real)) == 4


def test_a_boundary_that_cannot_be_reached_is_not_promised() -> None:
    def reached(kind: Kind, system: str, geometry: Geometry, buckets: tuple[int, ...]) -> list[Boundary]:
        return [boundary for boundary in boundaries(SYSTEMS[system], geometry, buckets) if boundary.kind is kind]

    assert not reached(Kind.EMPTY, "draft_extend", POOLED, (4,)), "a write plan needs N tokens"
    assert not reached(Kind.LONG_ROWS, "decode", Geometry.resolve("tiny_pool", {}), (2,)), "no plan for two rows"
    assert not reached(Kind.SUM, "decode", TINY, (4,))
    totals = {b.value for b in reached(Kind.TILES, "target_verify", POOLED, (4,))}
    assert 1 not in totals, "12 rows have 12 tiles at least"
    undefined = Geometry.resolve("tiny", {"indexer": True, "request_rows": 40})
    assert "all" not in {b.which for b in reached(Kind.EMPTY, "decode", undefined, (32,))}


def test_a_context_without_room_is_refused() -> None:
    short = Geometry.resolve("tiny", {"context": 4, "draft_tokens": 4, "topk": 2})
    with pytest.raises(UsageError, match=r"context: 4 leaves no room .* draft_tokens 4; raise it"):
        EngineSimulator(SYSTEMS["target_verify"], short, (2,))


def test_the_check_sees_what_no_engine_can_be_in() -> None:
    def broken(**changes: object) -> EngineSimulator:
        simulator = EngineSimulator(SYSTEMS["decode"], TINY, (4,), 0, outside=False, reuse="lifo")
        simulator.admit(9)
        simulator.admit(9)
        simulator.live[1] = dataclasses.replace(simulator.live[1], **changes)  # type: ignore[arg-type]
        return simulator

    for changes, message in (
        ({"row": 1}, "two requests own one row"),
        ({"row": 8}, "on a free row"),
        ({"length": 0}, "length 0"),
        ({"accepted": 2}, "2 accepted"),
    ):
        with pytest.raises(AssertionError, match=message):
            check(broken(**changes))


def test_engine_steps_come_first_and_rounds_from_outside_only_when_asked_for() -> None:
    assert set(EngineSimulator(SYSTEMS["decode"], TINY, (4, 2), outside=False).steps) == set(ENGINE)
    assert "shared prefix" not in EngineSimulator(SYSTEMS["decode"], TINY, (1,)).steps
    assert "wider bucket" not in EngineSimulator(SYSTEMS["decode"], TINY, (1,)).steps
