"""Coverage: pairs are counted where they happen, what never was is listed, and steering visits more of it."""

from __future__ import annotations

import pytest
from support import EagerDecode, decode_round, setup_of, small
from test_fuzz_expansion import configurations

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Lifetime
from dsa_verify.contract.round import Round
from dsa_verify.systems.catalogue import SYSTEMS
from fuzz.engine.coverage import Coverage, say
from fuzz.engine.simulator import EngineSimulator
from fuzz.fuzzer import fuzz

PAGE = 4
TABLE = f"columns of {PAGE}"


def coverage_of(*rounds: Round, buckets: tuple[int, ...] = (4, 2)) -> Coverage:
    coverage = Coverage(SYSTEMS["decode"], small(), buckets)
    for round_ in rounds:
        coverage.observe(round_)
    return coverage


def visited(coverage: Coverage, kind: str, quantity: str) -> dict[tuple[str, ...], int]:
    return {key[2:]: count for key, count in coverage.visits().items() if key[:2] == (kind, quantity) and count}


def test_pairs_of_bands_are_those_of_one_batch_row_of_one_bucket() -> None:
    coverage = coverage_of(
        decode_round(2, 37, 3),  # after capture: pad rows
        decode_round(4, 1),  # another bucket, which leaves this one's rows alone
        decode_round(2, 2),
    )
    assert visited(coverage, "pair", TABLE) == {
        ("pad row", "all"): 1,
        ("pad row", "one"): 2,
        ("all", "one"): 1,
        ("one", "pad row"): 1,
        ("pad row", "pad row"): 3,
    }


@pytest.mark.parametrize(
    "second, tenant, move",
    [
        (decode_round(2, 9), "same request", "level"),
        (decode_round(2, 8), "same request", "one step down"),
        (decode_round(2, 4), "same request", "far down"),
        (decode_round(2, 13), "same request", "one step up"),
        (decode_round(2, 37, remap=(1,)), "same request on other pages", "far up"),
        (Round(bucket=2, seq_lens=(8,), requests=(2,), remap=(1,)), "another request", "one step down"),
    ],
)
def test_moves_say_whose_row_it_is_and_how_far_its_length_moved(second: Round, tenant: str, move: str) -> None:
    coverage = coverage_of(decode_round(2, 9), second)
    assert visited(coverage, "move", TABLE) == {(tenant, move): 1}


def test_pages_that_moved_while_another_bucket_ran_are_other_pages() -> None:
    coverage = coverage_of(decode_round(2, 9), decode_round(4, 5, remap=(1,)), decode_round(2, 9))
    assert visited(coverage, "move", TABLE) == {("same request on other pages", "level"): 1}


def test_a_capture_forgets_what_the_buffers_held() -> None:
    coverage = coverage_of(decode_round(2, 9))
    coverage.recaptured()
    coverage.observe(decode_round(2, 9))
    assert not visited(coverage, "move", TABLE)
    assert visited(coverage, "pair", TABLE)["pad row", "some"] == 2


def test_edges_are_places_within_a_step() -> None:
    coverage = coverage_of(decode_round(4, 8, 9, 11, 10))
    assert visited(coverage, "edge", TABLE) == {
        ("on a step",): 1,
        ("one beyond",): 1,
        ("one short",): 1,
        ("inside",): 1,
    }


def test_sums_and_boundaries() -> None:
    coverage = coverage_of(decode_round(2, 1), decode_round(2, 37, 37), decode_round(2))
    assert visited(coverage, "pair", "sum") == {
        ("up to a page", "up to a page"): 1,
        ("up to a page", "more"): 1,
        ("more", "up to a page"): 1,
    }
    counts = {boundary.name: count for boundary, count in coverage.boundaries.items()}
    assert counts["length 37"] == counts["batch 2 of bucket 2"] == counts["batch 0 of bucket 2"] == 1
    assert counts["length 8"] == counts["batch 4 of bucket 4"] == 0


def test_what_was_never_visited_is_said_in_words_and_nothing_else() -> None:
    coverage = coverage_of(decode_round(2, 9), decode_round(2, 8))
    visits = coverage.visits()
    never = coverage.never_visited()
    assert set(never) == {key for key, count in visits.items() if not count}
    said = [say(key) for key in never]
    assert len(set(said)) == len(never)
    assert f"{TABLE}: same request, one step up" in said
    assert f"{TABLE}: same request, one step down" not in said
    assert f"{TABLE}: all, then none" in said
    assert "boundary length 37" in said


@configurations
def test_every_field_that_replays_write_is_followed_and_nothing_impossible_is_asked_for(
    system: str, preset: str, overrides: dict[str, object], buckets: tuple[int, ...]
) -> None:
    geometry = SYSTEMS[system].geometry(preset, overrides)
    coverage = Coverage(SYSTEMS[system], geometry, buckets)
    fields = {name for quantity in coverage.quantities for name in quantity.fields}
    layouts = [SYSTEMS[system].layout(geometry, bucket) for bucket in buckets]
    assert fields == {f.name for layout in layouts for f in layout if f.lifetime is Lifetime.REPLAY and not f.alias}
    assert len({quantity.name for quantity in coverage.quantities}) == len(coverage.quantities)
    EngineSimulator(SYSTEMS[system], geometry, buckets, 3, coverage=coverage).rounds(400)
    never = [key for key in coverage.never_visited() if key[0] != "regime"]
    assert len(never) < 0.05 * len(coverage.visits())
    # Two hundred draws of one among some hundreds are expected to miss a few, but never a whole kind.
    assert not [key for key in never if key[0] == "edge"]


def test_steering_visits_more() -> None:
    geometry = Geometry.resolve("tiny", {"request_rows": 9})
    left = []
    for steered in (True, False):
        coverage = Coverage(SYSTEMS["decode"], geometry, (4, 2))
        simulator = EngineSimulator(SYSTEMS["decode"], geometry, (4, 2), 1, coverage=coverage if steered else None)
        coverage.expect(simulator.steps)
        for _ in range(150):
            round_ = simulator.step()
            if not steered:
                coverage.observe(round_)
        left.append(len([key for key in coverage.never_visited() if key[0] != "regime"]))
    assert left[0] < left[1] / 2


# The fuzzer ----------------------------------------------------------------------------------------------------------


def test_the_same_run_twice_has_the_same_digest_and_counts() -> None:
    first, second = (
        fuzz(setup_of(EagerDecode), 30, 4, folder=None, rounds_per_capture=12, chunk_rounds=5) for _ in range(2)
    )
    assert first.findings == ()
    assert (first.requested, first.executed, first.captures) == (30, 30, 3)
    assert first.counts.configs == 1
    assert first.counts.rounds_checked == first.coverage.rounds == 30
    assert first.digest == second.digest
    assert first.coverage.visits() == second.coverage.visits()
    assert first.to_dict() == second.to_dict()
    assert fuzz(setup_of(EagerDecode), 30, 5, folder=None).digest != first.digest


def test_nothing_comes_before_the_first_round_of_a_capture() -> None:
    result = fuzz(setup_of(EagerDecode), 8, 4, folder=None, rounds_per_capture=1)
    assert result.captures == 8
    assert not [key for key, count in result.coverage.visits().items() if key[0] == "move" and count]


@pytest.mark.parametrize("fault", ["not_refreshed", "off_by_one_page", "stale_request_map", "wider_bucket_rows"])
def test_a_planted_fault_ends_the_run(fault: str) -> None:
    ticks: list[int] = []
    result = fuzz(setup_of(EagerDecode, fault=fault), 200, 1, folder=None, on_rounds=ticks.append, chunk_rounds=16)
    assert result.findings
    assert result.findings[0].diagnosis is not Diagnosis.FLAKY
    assert result.executed == sum(ticks) < result.requested == 200
    assert result.to_dict()["rounds_executed"] == result.executed


def test_a_run_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="rounds: 0 is below 1"):
        fuzz(setup_of(EagerDecode), 0)
    with pytest.raises(UsageError, match="chunk_rounds: 0 is below 1"):
        fuzz(setup_of(EagerDecode), 5, chunk_rounds=0)
