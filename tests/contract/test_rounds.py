"""RoundTable pads and derives as the contract says, and the token slots say whose they are."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import DISJOINT_GENERATIONS, PRESETS, Geometry
from dsa_verify.contract.round import POISONS, SEED_LIMIT, Round
from dsa_verify.contract.round_table import owner_of_slot, tabulate, token_slots
from dsa_verify.systems.catalogue import SYSTEMS

WIDEST = 8


@st.composite
def small_geometries(draw: st.DrawFn, draft_tokens: int | None = None) -> Geometry:
    n = draw(st.integers(1, 5)) if draft_tokens is None else draft_tokens
    pool = draw(st.sampled_from([1, 2, 4]))
    # A pooled pad row is as long as the draft and a pool (contract 0.2).
    context = draw(st.integers(1 if pool == 1 else n + pool, 60))
    overrides = {
        "context": context,
        "page_size": draw(st.sampled_from([1, 2, 4, 8])),
        "pool_size": pool,
        "draft_tokens": n,
        "request_rows": draw(st.integers(2, 9)),
        "first_page": draw(st.sampled_from([1, 1, 5])),
        "token_table_width": draw(st.sampled_from([0, context + n, context + n + 3])),
    }
    return Geometry.resolve("tiny", overrides)


def every_slot(geometry: Geometry) -> np.ndarray:
    """[generation, row, position]."""
    rows = np.arange(geometry.request_rows)
    return np.stack([token_slots(geometry, rows, np.full_like(rows, g)) for g in range(DISJOINT_GENERATIONS)])


@given(small_geometries())
def test_slots_are_paged_disjoint_and_within_the_pool(geometry: Geometry):
    """Contract 0.1: consecutive and aligned within an allocator page; row 0 is all zero."""
    slots = every_slot(geometry)
    page, width = geometry.allocator_page, geometry.token_columns
    assert slots.shape == (DISJOINT_GENERATIONS, geometry.request_rows, width)
    assert (slots[:, 0] == 0).all()
    live = slots[:, 1:]
    assert (live % page == np.arange(width) % page).all()
    assert (live // page == live[..., np.arange(width) // page * page] // page).all()
    assert live.min() >= page, "page 0 is reserved for the pad request"
    assert live.min() >= geometry.first_page * page
    assert live.max() < geometry.slots
    assert np.unique(live).size == live.size


@given(small_geometries())
def test_owner_of_slot_inverts_token_slots(geometry: Geometry):
    slots = every_slot(geometry)
    owners = {}
    for generation, row, position in np.ndindex(*slots.shape):
        if row:
            owners[int(slots[generation, row, position])] = (row, position, generation)
    # Beyond both ends of the pool too, and in pages that nobody was given.
    for slot in range(-geometry.allocator_page, geometry.slots + geometry.allocator_page):
        owner = owner_of_slot(geometry, slot)
        if owner is not None and owner[1] >= geometry.token_columns:
            # The last page of a row may reach past the columns that `req_to_token` has.
            assert slot not in owners
        else:
            assert owner == owners.get(slot), slot


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("generation", [0, 3, 4, 1001])
def test_owner_of_slot_inverts_token_slots_of_the_presets(preset: str, generation: int):
    geometry = Geometry.resolve(preset)
    for row in (1, geometry.request_rows // 2, geometry.request_rows - 1):
        slots = token_slots(geometry, np.array([row]), np.array([generation]))[0]
        for position in range(0, geometry.token_columns, 1 + geometry.token_columns // 500):
            owner = owner_of_slot(geometry, int(slots[position]))
            assert owner == (row, position, generation % DISJOINT_GENERATIONS)


@st.composite
def tabulated(draw: st.DrawFn, systems: tuple[str, ...] = tuple(SYSTEMS)) -> tuple[str, Geometry, list[Round]]:
    system = draw(st.sampled_from(systems))
    shared = draw(small_geometries(draft_tokens=1 if system in ("decode", "dcp") else None))
    geometry = SYSTEMS[system].geometry(shared.preset, shared.overrides())

    def round_() -> Round:
        bucket = draw(st.integers(1, WIDEST))
        raw = draw(st.integers(0, bucket))

        def several(low: int, high: int) -> tuple[int, ...]:
            return tuple(draw(st.lists(st.integers(low, high), min_size=raw, max_size=raw)))

        def verified() -> dict[str, tuple[int, ...]]:
            return {"verify_lens": several(1, geometry.draft_tokens)} if system == "ragged_verify" else {}

        ragged = system == "draft_extend" and draw(st.booleans())
        rows = st.integers(1, geometry.request_rows - 1)
        remap = tuple(draw(st.lists(rows, max_size=3, unique=True)))
        return Round(
            bucket=bucket,
            seq_lens=several(0, geometry.context),
            requests=several(0, geometry.request_rows - 1),
            lens={"extend_lens": several(0, geometry.draft_tokens)} if ragged else verified(),
            remap=remap,
            prefixes=tuple(
                (row, draw(rows), draw(st.integers(1, geometry.pages_per_row)))
                for row in dict.fromkeys(remap)
                if row % 2
            ),
            poison=draw(st.sampled_from(POISONS)),
            twice=draw(st.booleans()),
            seed=draw(st.integers(0, SEED_LIMIT - 1)) if system == "dcp" else 0,
        )

    return system, geometry, [round_() for _ in range(draw(st.integers(0, 4)))]


@given(tabulated())
def test_a_table_gives_its_rounds_back(case: tuple[str, Geometry, list[Round]]):
    system, geometry, rounds = case
    table = tabulate(SYSTEMS[system], geometry, rounds, np.zeros(geometry.request_rows, np.int64), widest_bucket=WIDEST)
    assert len(table) == len(rounds)
    for i, round_ in enumerate(rounds):
        got, lens = table.round(i), dict(round_.lens)
        if system == "draft_extend":
            lens.setdefault("extend_lens", (geometry.draft_tokens,) * round_.raw_batch)
        assert (got.bucket, got.seq_lens, got.requests) == (round_.bucket, round_.seq_lens, round_.requests)
        assert (got.lens, got.remap, got.prefixes) == (lens, round_.remap, round_.prefixes)
        assert (got.poison, got.twice, got.seed) == (round_.poison, round_.twice, round_.seed)


@given(tabulated(("decode", "target_verify", "draft_extend", "mtp", "dcp")))
def test_live_bounds_and_token_rows_follow_the_contract(case: tuple[str, Geometry, list[Round]]):
    """Contract 1.1 to 1.3: every row of a request is live up to its whole length; pads own rows too."""
    system, geometry, rounds = case
    table = tabulate(SYSTEMS[system], geometry, rounds, np.zeros(geometry.request_rows, np.int64), widest_bucket=WIDEST)
    n = geometry.draft_tokens
    for i, round_ in enumerate(rounds):
        bucket, raw = round_.bucket, round_.raw_batch
        added = n if system == "target_verify" else 0
        assert table.live_tokens[i, :raw].tolist() == [length + added for length in round_.seq_lens]
        assert (table.live_tokens[i] == table.seq_lens[i] + added).all()
        counts = [*round_.lens.get("extend_lens", [n] * raw), *[n] * (bucket - raw)]
        assert table.token_rows[i] == sum(counts)
        owners = [request for request, count in enumerate(counts) for _ in range(count)]
        beyond = WIDEST * n - len(owners)
        assert table.row_request[i].tolist() == owners + [0] * beyond


@pytest.mark.parametrize(
    "system, pool_size, fill",
    [
        ("decode", 1, 1),
        ("decode", 4, 1),
        ("target_verify", 1, 1),
        ("target_verify", 4, 1),
        ("draft_extend", 1, 1),
        # max(1, N + kp), so that the write start of a pad row is at least kp.
        ("draft_extend", 4, 7),
    ],
)
def test_pads_hold_what_contract_0_2_says(system: str, pool_size: int, fill: int):
    n = 1 if system == "decode" else 3
    geometry = Geometry.resolve("tiny", {"draft_tokens": n, "pool_size": pool_size})
    round_ = Round(bucket=4, seq_lens=(9,), requests=(5,))
    generations = np.zeros(geometry.request_rows, np.int64)
    table = tabulate(SYSTEMS[system], geometry, [round_], generations, widest_bucket=6)
    assert table.seq_lens.tolist() == [[9] + [fill] * 5]
    assert table.requests.tolist() == [[5, 0, 0, 0, 0, 0]]
    assert {name: column.tolist() for name, column in table.lens.items()} == (
        {"extend_lens": [[n] * 6]} if system == "draft_extend" else {}
    )


def test_a_round_says_what_its_system_has_by_name():
    plain = Round(bucket=2, seq_lens=(5,), requests=(1,))
    round_ = plain.replace(extend_lens=(2,), twice=True)
    assert (round_.extend_lens, round_.lens, round_.twice) == ((2,), {"extend_lens": (2,)}, True)
    assert round_.replace(extend_lens=None, twice=False) == plain
    assert pickle.loads(pickle.dumps(round_)) == round_
    with pytest.raises(AttributeError, match="this round says no 'accept_lens'; it says extend_lens"):
        round_.accept_lens  # noqa: B018
    geometry = Geometry.resolve("tiny")
    generations = np.zeros(geometry.request_rows, np.int64)
    with pytest.raises(UsageError, match=r"rounds\[0\]\.extend_lens: has no effect in decode; remove it"):
        tabulate(SYSTEMS["decode"], geometry, [round_], generations, widest_bucket=2)


def test_remaps_advance_generations_and_leave_free_slots_at_minus_one():
    geometry = Geometry.resolve("tiny")
    generations = np.zeros(geometry.request_rows, np.int64)
    rounds = [Round(bucket=1, seq_lens=(1,), requests=(0,), remap=remap) for remap in ((5, 2), (), (2, 2))]
    table = tabulate(SYSTEMS["decode"], geometry, rounds, generations, widest_bucket=1, remap_slots=3)
    assert table.remap_rows.tolist() == [[5, 2, -1], [-1, -1, -1], [2, -1, -1]]
    assert table.remap_generations.tolist() == [[1, 1, 0], [0, 0, 0], [2, 0, 0]]
    assert (generations[5], generations[2], generations.sum()) == (1, 2, 3)


def test_a_prefix_goes_with_the_remap_of_its_row():
    geometry = Geometry.resolve("tiny")
    round_ = Round(bucket=1, seq_lens=(1,), requests=(0,), remap=(5, 2), prefixes=((2, 7, 3),))
    table = tabulate(SYSTEMS["decode"], geometry, [round_], np.zeros(geometry.request_rows, np.int64), widest_bucket=1)
    assert (table.remap_origins.tolist(), table.remap_pages.tolist()) == ([[0, 7]], [[0, 3]])
    assert round_.with_remap((2,)).prefixes == round_.prefixes
    assert round_.with_remap((5,)) == Round(bucket=1, seq_lens=(1,), requests=(0,), remap=(5,))


@pytest.mark.parametrize(
    "system, changes, shared",
    [
        # Of pages of 4 tokens, by length: 0, 4, 5, 8 and 9.
        ("decode", {}, [0, 0, 1, 1, 2]),
        ("dcp", {}, [0, 0, 1, 1, 2]),
        ("target_verify", {"draft_tokens": 3}, [0, 1, 1, 2, 2]),
        ("draft_extend", {"draft_tokens": 4}, [0, 0, 0, 1, 1]),
        ("padded", {"padded_mode": "decode"}, [0, 0, 1, 1, 2]),
        ("padded", {"padded_mode": "draft_block", "draft_tokens": 3}, [0, 1, 1, 2, 2]),
        ("padded", {"padded_mode": "draft_extend", "draft_tokens": 4}, [0, 0, 0, 1, 1]),
    ],
)
def test_pages_before_writes_are_whole_ones(system: str, changes: dict[str, object], shared: list[int]):
    geometry = SYSTEMS[system].geometry("tiny", changes)
    assert SYSTEMS[system].pages_before_writes(geometry, np.array([0, 4, 5, 8, 9])).tolist() == shared
