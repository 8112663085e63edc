"""Totals that boundaries and coverage count are those that the oracle has, whichever rows a request owns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ragged_bench import Bench

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.schedule_variants import VARIANTS
from dsa_verify.contract.topk_plan import PLAN_RULES
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.systems.catalogue import SYSTEMS
from fuzz.engine.boundaries import Kind, boundaries, has_plan, marks
from fuzz.engine.coverage import Coverage
from fuzz.engine.simulator import EngineSimulator
from oracles.ragged_verify import RaggedVerifyOracle

RULES = {"context": 203, "indexer": True, "multiprocessors": 5, "schedule": "tiny", "plan_rules": "tiny"}
TOTALS = (Kind.TILES, Kind.LONG_ROWS)


def oracle_totals(bench: Bench, round_: Round) -> dict[tuple[Kind, int], int]:
    """By kind and threshold."""
    fields = bench.replay(round_)
    split = VARIANTS[bench.geometry.schedule].split
    found = {(Kind.TILES, 0): int((-(-fields["paged_mqa_ctx_lens_2d"] // split)).sum())}
    if "topk_v2_plan" in fields:
        for threshold, _ in PLAN_RULES[bench.geometry.plan_rules].thresholds:
            found[Kind.LONG_ROWS, threshold] = int((fields["dsa_seqlens_expanded"] > threshold).sum())
    return found


def ragged_rounds(architecture: int) -> Iterator[tuple[Geometry, tuple[int, ...], list[Round]]]:
    geometry = SYSTEMS["ragged_verify"].geometry("tiny", {**RULES, "architecture": architecture})
    for config in diagnostic_matrix(SYSTEMS["ragged_verify"], geometry, batches=[1, 4], drafts=[2, 6]):
        yield config.geometry, config.buckets, [r for table in config.chunks() for r in table.rounds()]
    few = geometry.replace(draft_tokens=3, graph_tokens=7)
    yield few, (6, 3), EngineSimulator(SYSTEMS["ragged_verify"], few, (6, 3), 1).rounds(60)


@pytest.mark.parametrize("architecture", [90, 100])
def test_totals_of_ragged_rounds_are_those_of_the_oracle(architecture: int) -> None:
    for geometry, buckets, rounds in ragged_rounds(architecture):
        benches = {bucket: Bench(RaggedVerifyOracle(), geometry, bucket) for bucket in buckets}
        for round_ in rounds:
            told = {
                (kind, extra): value
                for kind, value, extra, _, _ in marks(round_, SYSTEMS["ragged_verify"], geometry)
                if kind in TOTALS
            }
            assert told == oracle_totals(benches[round_.bucket], round_)


def test_a_ragged_round_made_for_a_total_has_it_and_coverage_counts_it() -> None:
    geometry = SYSTEMS["ragged_verify"].geometry("tiny", {**RULES, "draft_tokens": 3, "graph_tokens": 8})
    buckets = (6, 3)
    simulator, coverage = (
        EngineSimulator(SYSTEMS["ragged_verify"], geometry, buckets, 3),
        Coverage(SYSTEMS["ragged_verify"], geometry, buckets),
    )
    benches = {bucket: Bench(RaggedVerifyOracle(), geometry, bucket) for bucket in buckets}
    wanted = [
        boundary for boundary in boundaries(SYSTEMS["ragged_verify"], geometry, buckets) if boundary.kind in TOTALS
    ]
    assert {boundary.kind for boundary in wanted} == set(TOTALS)
    (tiles,) = (quantity for quantity in coverage.quantities if quantity.name == "tiles")
    for boundary in wanted:
        round_ = simulator.at(boundary)
        total = oracle_totals(benches[round_.bucket], round_)[boundary.kind, boundary.extra]
        assert total == boundary.value, boundary.name
        coverage.observe(round_)
        assert coverage.boundaries[boundary]
        if boundary.kind is Kind.TILES:
            band = tiles.bands[int(tiles.band(total)) - 1]  # type: ignore[arg-type]
            visited = {key[3] for key, count in coverage.visits().items() if key[:2] == ("pair", "tiles") and count}
            assert band in visited


@pytest.mark.parametrize("system", ["decode", "target_verify", "draft_extend", "mtp", "ragged_verify"])
def test_a_plan_is_where_the_layout_has_one(system: str) -> None:
    geometry = SYSTEMS[system].geometry("tiny", {"indexer": True, "request_rows": 600})
    for config in diagnostic_matrix(SYSTEMS[system], geometry):
        for bucket in config.buckets:
            layout = SYSTEMS[system].layout(config.geometry, bucket)
            planned = any(field.name.endswith("topk_v2_plan") for field in layout)
            assert has_plan(SYSTEMS[system], config.geometry, bucket) == planned, bucket
