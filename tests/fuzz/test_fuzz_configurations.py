"""Configurations of the fuzzer: always legal, as the run fixed them, and over seeds everything that there is."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.dcp import LOG_BASES
from dsa_verify.contract.geometry import INDEX_DTYPES, INPUT_VIEWS, TABLE_VIEWS, parse_settings
from dsa_verify.contract.padded import PADDED_MODES
from dsa_verify.rounds.matrix import Config, diagnostic_matrix
from dsa_verify.systems.catalogue import SYSTEMS, resolve_geometry
from dsa_verify.systems.dcp import RANKS
from dsa_verify.systems.mtp import STEPS as DRAFT_STEPS
from fuzz.configurations import (
    ARCHITECTURES,
    DRAFTS,
    HUGE,
    SMALL,
    SMALL_CONFIGS,
    WIDE,
    configurations,
    deal,
    describe,
    visited,
)
from fuzz.engine.coverage import Coverage
from fuzz.engine.limits import most_requests
from fuzz.engine.simulator import EngineSimulator

DEVICES = ("cpu", "cuda")
everywhere = pytest.mark.parametrize("system, device", list(itertools.product(sorted(SYSTEMS), DEVICES)))


def drawn(
    system: str,
    seed: int,
    device: str = "cpu",
    *,
    subject: str | None = None,
    preset: str | None = None,
    settings: Sequence[str] = (),
    **rest: Any,
) -> list[Config]:
    known = SYSTEMS[system]
    geometry, fixed = resolve_geometry(known, subject, device, preset, parse_settings(settings))
    options = {"rounds": 1000, "subject": subject, "fixed": fixed, **rest}
    return configurations(known, geometry, seed=seed, device_type=device, **options)


def check_legal(config: Config) -> None:
    """The layouts of all buckets exist, and a simulator has room for a request."""
    geometry, system = config.geometry, config.system
    assert geometry.replace() == geometry, "a case could not say it"
    assert len(set(config.buckets)) == len(config.buckets)
    assert geometry.request_rows > max(config.buckets), "a full batch has no row for each request"
    for bucket in config.buckets:
        assert system.layout(geometry, bucket).fields
        assert most_requests(system, geometry, bucket) == bucket or system.name == "ragged_verify"
    EngineSimulator(system, geometry, config.buckets, config.seed, outside=False).step()


@everywhere
def test_every_draw_is_legal(system: str, device: str) -> None:
    for seed in (*range(6), 2**63 - 1):
        for config in drawn(system, seed, device):
            check_legal(config)


@pytest.mark.slow
@everywhere
def test_every_draw_of_many_seeds_is_legal(system: str, device: str) -> None:
    for seed in range(500):
        for config in drawn(system, seed, device):
            check_legal(config)


OF_ALL = {
    "index_dtype": set(INDEX_DTYPES),
    "input_view": set(INPUT_VIEWS),
}
INDEXED = {"indexer": {False, True}, "pool_size": {1, 4}, "table_view": set(TABLE_VIEWS)}
OF_DRAFTS = {"draft_tokens": set(DRAFTS)}
DIMENSIONS: dict[str, dict[str, set[Any]]] = {
    "decode": INDEXED,
    "target_verify": INDEXED | OF_DRAFTS | {"architecture": set(ARCHITECTURES)},
    "draft_extend": INDEXED | OF_DRAFTS,
    "mtp": INDEXED | {"draft_steps": set(DRAFT_STEPS)},
    "padded": OF_DRAFTS | {"padded_mode": set(PADDED_MODES), "low_ratios": {False, True}},
    "ragged_verify": OF_DRAFTS | {"indexer": {False, True}},
    "dcp": {"dcp_size": set(RANKS), "log_base": set(LOG_BASES)},
}


@everywhere
def test_over_seeds_every_value_is_met_and_every_pair(system: str, device: str) -> None:
    dimensions = OF_ALL | DIMENSIONS[system]
    met: dict[str, set[Any]] = defaultdict(set)
    pairs: dict[tuple[str, str], set[Any]] = defaultdict(set)
    narrow, tight = Counter[bool](), Counter[bool]()
    for seed in range(40):
        for config in drawn(system, seed, device):
            values = {name: getattr(config.geometry, name) for name in dimensions}
            for name, value in values.items():
                met[name].add(value)
            for one, other in itertools.combinations(values, 2):
                pairs[one, other].add((values[one], values[other]))
            narrow[bool(config.geometry.table_width)] += 1
            tight[config.geometry.request_rows == max(config.buckets) + 1] += 1
    assert dict(met) == dimensions
    for (one, other), seen in pairs.items():
        # Pools have an indexer; nothing else excludes another, though a pair of the largest decks may be outstanding.
        possible = len(dimensions[one]) * len(dimensions[other]) - ({one, other} == {"indexer", "pool_size"})
        assert len(seen) >= 0.8 * possible, (one, other, seen)
    assert min(narrow.values()) > 20
    assert min(tight.values()) > 20
    assert len(narrow) == len(tight) == 2


SCALES = {"page_size": {1, 2, 4}, "topk": {32, 33}}


@pytest.mark.parametrize(
    "system, scales",
    [
        ("decode", SCALES | {"wide_table": {False, True}, "plan_rules": {"tiny", "tiny_low", "H200"}}),
        ("target_verify", SCALES | {"wide_table": {True}}),
        ("ragged_verify", SCALES),
        ("mtp", SCALES | {"wide_table": {True}}),
        ("dcp", SCALES | {"dcp_block": {1, 2, 4}}),
    ],
)
def test_a_scaled_down_geometry_has_other_pages_and_topk_in_turn(system: str, scales: dict[str, set[Any]]) -> None:
    """Our own: those of others keep what the run says."""
    for subject, expected in ((None, scales), ("a:B", {"page_size": {4}, "topk": {32}, "wide_table": {True}})):
        configs = [config for seed in range(12) for config in drawn(system, seed, subject=subject)]
        assert {name: {getattr(config.geometry, name) for config in configs} for name in expected} == expected
    for config in drawn(system, 1, settings=("page_size=4", "topk=16")):
        assert (config.geometry.page_size, config.geometry.topk) == (4, 16)


@pytest.mark.parametrize("device", DEVICES)
def test_tables_of_padded_fill_no_block_of_lanes_in_turn(device: str) -> None:
    for subject, count in ((None, 2), ("a:B", 1)):
        configs = [config for seed in range(4) for config in drawn("padded", seed, device, subject=subject)]
        assert len({config.geometry.topk for config in configs}) == count
        widths = {config.system.layout(config.geometry, 1)["c4_sparse_indices"].columns for config in configs}
        assert any(width & (width - 1) for width in widths) is (subject is None)


@everywhere
def test_captured_rows_meet_every_multiple_of_32_and_its_neighbours(system: str, device: str) -> None:
    known, rows, batches = SYSTEMS[system], set[int](), set[int]()
    for seed in range(len(WIDE[device])):
        for config in drawn(system, seed, device):
            batches |= set(config.buckets)
            rows |= {known.layout(config.geometry, bucket).tokens for bucket in config.buckets}
    assert set(WIDE[device]) <= rows
    assert set(SMALL) <= batches
    if device == "cuda" and system not in ("padded", "dcp"):
        assert any(count > 4096 for count in rows), "a kernel that is compiled for no more was never run"


def test_more_than_4096_rows_come_with_an_indexer_and_few_of_the_rounds() -> None:
    for system in ("decode", "target_verify", "draft_extend", "mtp", "ragged_verify"):
        for seed in range(len(HUGE["cuda"])):
            *others, huge = drawn(system, seed, "cuda")
            assert huge.note == "huge"
            assert huge.geometry.indexer
            assert huge.rounds * 20 < min(config.rounds for config in others)


def test_no_run_of_dcp_is_of_one_rank_only_on_any_device() -> None:
    for seed in range(60):
        for device in DEVICES:
            assert {config.geometry.dcp_size for config in drawn("dcp", seed, device)} != {1}


def test_successive_runs_are_dealt_each_value_before_any_again() -> None:
    for size in range(1, 12):
        for start in range(0, 5 * size, size):
            assert sorted(deal(range(size), start + i, "x") for i in range(size)) == list(range(size))
    orders = {deck: [deal(range(9), i, deck) for i in range(45)] for deck in "ab"}
    assert orders["a"] != orders["b"]
    assert orders["a"][:9] != orders["a"][9:18]


@everywhere
def test_the_same_seed_draws_the_same_and_all_rounds_are_shared_out(system: str, device: str) -> None:
    assert drawn(system, 3, device) == drawn(system, 3, device) != drawn(system, 4, device)
    for rounds in (1, 2, 7, 1000, 20_000):
        shares = [config.rounds for config in drawn(system, 3, device, rounds=rounds)]
        assert sum(shares) == rounds
        assert min(shares) >= 0
        assert shares[0] > 0, "of few rounds the first has some, and not the one that is huge"


@everywhere
def test_what_the_run_fixes_is_kept(system: str, device: str) -> None:
    settings = ["request_rows=40", "index_dtype=int32", "input_view=offset", "table_width=50"]
    settings += ["dcp_size=2"] if system == "dcp" else []
    rest = {"drafts": (3, 2)} if SYSTEMS[system].drafts else {}
    preset = SYSTEMS[system].preset(device)
    for seed in range(20):
        configs = drawn(system, seed, device, preset=preset, settings=settings, batches=(5, 7), **rest)
        assert len(configs) == 1 + SMALL_CONFIGS
        for config in configs:
            check_legal(config)
            geometry = config.geometry
            assert config.buckets[0] in (5, 7)
            assert (geometry.request_rows, geometry.index_dtype, geometry.input_view) == (40, "int32", "offset")
            assert geometry.table_width == 50
            assert system != "dcp" or geometry.dcp_size == 2
            assert not rest or geometry.draft_tokens in (2, 3)


@pytest.mark.parametrize(
    "system, settings",
    [
        ("decode", ["request_rows=3"]),
        ("decode", ["context=5", "request_rows=200"]),
        ("decode", ["wide_table=false"]),
        ("decode", ["page_size=1"]),
        ("decode", ["page_size=8", "topk=12"]),
        ("target_verify", ["context=9", "topk=8"]),
        ("target_verify", ["wide_table=false"]),
        ("target_verify", ["indexer=true", "schedule=V5", "multiprocessors=3"]),
        ("target_verify", ["architecture=100"]),
        ("draft_extend", ["pool_size=4", "context=40"]),
        ("draft_extend", ["first_page=4000000"]),
        ("mtp", ["context=1048576", "request_rows=8"]),
        ("ragged_verify", ["graph_tokens=0"]),
        ("padded", ["page_size=8", "sparse_ratio=8"]),
        ("padded", ["padded_mode=verify", "replay_floor=3"]),
        ("dcp", ["pool_size=4"]),
        ("dcp", ["first_page=4000000", "page_size=64"]),
        ("dcp", ["dcp_block=2"]),
    ],
)
def test_what_is_drawn_fits_what_is_fixed(system: str, settings: list[str]) -> None:
    fixed = parse_settings(settings)
    for seed in range(20):
        for config in drawn(system, seed, settings=settings):
            check_legal(config)
            assert {name: getattr(config.geometry, name) for name in fixed} == fixed


def test_draft_lengths_that_leave_a_mode_without_tokens_leave_it_out() -> None:
    for seed in range(8):
        for config in drawn("padded", seed, drafts=(1,)):
            check_legal(config)
            assert config.geometry.padded_mode != "draft_block"


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(UsageError, match=r"draft_tokens: is chosen .* give the draft lengths with --draft-tokens"):
        drawn("target_verify", 0, settings=["draft_tokens=3"])
    with pytest.raises(UsageError, match=r"draft_tokens: is chosen .* dcp; it has no draft, so leave it out"):
        drawn("dcp", 0, settings=["draft_tokens=3"])
    with pytest.raises(UsageError, match="request_rows: 9 rows are too few for a batch of 48"):
        drawn("decode", 0, settings=["request_rows=9"], batches=(48,))


def test_an_engine_and_a_pipeline_of_somebody_else_are_asked_for_no_more_than_they_take() -> None:
    for seed in range(12):
        for config in drawn("target_verify", seed, subject="sglang:target_verify"):
            assert config.geometry.table_view == "plain"
            assert config.geometry.table_width == 0
            assert not config.geometry.indexer
            assert config.geometry.architecture == 90
        for config in drawn("decode", seed, subject="support:EagerDecode"):
            assert config.geometry.table_view == "plain"
            assert not config.geometry.indexer


def test_a_configuration_is_said_in_words_and_in_json() -> None:
    config = drawn("dcp", 0)[1]
    text = describe(config.geometry, config.buckets)
    assert text.startswith(f"tiny, buckets {list(config.buckets)}")
    assert f"dcp_size {config.geometry.dcp_size}" in text
    assert visited(config) == {
        "preset": "tiny",
        "buckets": list(config.buckets),
        "geometry": config.geometry.overrides(),
    }


def test_coverage_can_be_had_of_a_wide_batch() -> None:
    config = drawn("ragged_verify", 0)[0]
    coverage = Coverage(SYSTEMS["ragged_verify"], config.geometry, config.buckets)
    EngineSimulator(SYSTEMS["ragged_verify"], config.geometry, config.buckets, 0, coverage=coverage).rounds(5)
    assert coverage.rounds == 5


def test_dcp_of_the_size_of_a_model_has_a_topk_that_fills_no_block() -> None:
    """Of our own, in `fuzz` and in the matrix; those of others keep what the run says."""
    known = SYSTEMS["dcp"]
    for subject, expected in ((None, {192, 2048}), ("a:B", {2048})):
        configs = [config for seed in range(4) for config in drawn("dcp", seed, "cuda", subject=subject)]
        assert {config.geometry.topk for config in configs} == expected
        geometry, fixed = resolve_geometry(known, subject, "cuda", None, {})
        assert {config.geometry.topk for config in diagnostic_matrix(known, geometry, fixed=fixed)} == expected
