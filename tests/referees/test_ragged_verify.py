"""Ragged verify: the oracle and the host rules against the referee, the pipeline against the oracle, keys of graphs
(contract 9)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from ragged_bench import RAGGED, Bench
from referees.graph_keys import accepts, key_of, next_graph_tokens
from referees.ragged import captured, graph_of, padded
from support import backend, small

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.ragged import capture_lens, graph_tokens, padded_to_bucket
from dsa_verify.contract.round import Round
from dsa_verify.contract.subject import Buffers, Inputs, Subject
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.pipelines.ragged_verify import RaggedVerify
from dsa_verify.systems.ragged_verify import ragged_verify
from oracles.ragged_verify import RaggedVerifyOracle

K02_GRID, K02_WIDTH = (1, 32, 192), 6


def round_of(geometry: Geometry, bucket: int, rng: np.random.Generator, lens: Sequence[int], **rest: object) -> Round:
    """Random lengths, the longest one among them, and requests, duplicates included."""
    lengths = rng.integers(0, geometry.context + 1, len(lens))
    lengths[-1:] = geometry.context
    requests = rng.integers(1, geometry.request_rows, len(lens))
    listed = {"seq_lens": tuple(lengths.tolist()), "requests": tuple(requests.tolist())}
    return Round(bucket=bucket, **listed, lens={"verify_lens": tuple(lens)}, **rest)  # type: ignore[arg-type]


def rounds_of(geometry: Geometry, bucket: int, *, random: int = 0) -> list[Round]:
    """Each raw batch with one token a request and with as many as fit; then `random` others."""
    rng, tokens, n = np.random.default_rng(bucket), graph_tokens(geometry, bucket), geometry.draft_tokens
    several = [[1] * raw for raw in range(bucket + 1)] + [[n] * raw for raw in range(1, tokens // n + 1)]
    while len(several) < 2 * bucket + random:
        lens = rng.integers(1, n + 1, rng.integers(0, bucket + 1)).tolist()
        several += [lens] if sum(lens) <= tokens else []
    poisons = itertools.cycle(("loud", "plausible", "stale"))
    return [round_of(geometry, bucket, rng, lens, poison=next(poisons)) for lens in several]


def setup_of(
    geometry: Geometry, buckets: tuple[int, ...], subject: object = None, fault: str | None = None
) -> ReplaySetup:
    return ReplaySetup.make(RAGGED, geometry, buckets, 0, subject, fault, backend())  # type: ignore[arg-type]


# The oracle against the referee --------------------------------------------------------------------------------------


def assert_as_the_referee(bench: Bench, round_: Round) -> None:
    got = bench.replay(round_)
    want = bench.expected()
    assert set(got) == set(want)
    for name, (values, live) in want.items():
        field = ragged_verify(bench.geometry, bench.bucket)[name]
        here = got[name]
        if field.one_row_per_request:
            here = here.repeat(got["padded_verify_lens"], axis=0)
        wrong = (here != values) & live
        assert not wrong.any(), f"{name}{np.argwhere(wrong)[0].tolist()}: {here[wrong][0]}, not {values[wrong][0]}"
        assert ((field.low <= here) & (here < field.high))[live].all(), f"{name} leaves the range of its layout"


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"graph_tokens": 8, "input_view": "strided", "index_dtype": "int32"},
        {"graph_tokens": 7, "page_size": 1, "pool_size": 4},
        {"draft_tokens": 1, "wide_table": False},
        {"table_width": 9, "architecture": 100},
    ],
    ids=str,
)
def test_oracle_agrees_with_the_referee(overrides: dict[str, object]) -> None:
    geometry = small("ragged_verify", **{"draft_tokens": 4, **overrides})
    bench = Bench(RaggedVerifyOracle(), geometry, 5)
    for round_ in rounds_of(geometry, 5, random=20):
        assert_as_the_referee(bench, round_)


@pytest.mark.parametrize("bucket", [32, 192])
def test_oracle_in_both_graphs_of_192_tokens(bucket: int) -> None:
    geometry = small("ragged_verify", draft_tokens=K02_WIDTH, graph_tokens=192, context=20)
    rng, bench = np.random.default_rng(0), Bench(RaggedVerifyOracle(), geometry, bucket)
    for lens in ([6] * 32, [1] * 32, [6, 1, 3] * 10, []):
        assert_as_the_referee(bench, round_of(geometry, bucket, rng, lens))


# The pipeline against the oracle -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {"draft_tokens": 3, "graph_tokens": 8, "input_view": "strided", "index_dtype": "int32", "pool_size": 4},
        {"draft_tokens": 4, "page_size": 1, "input_view": "offset", "architecture": 100},
        {"draft_tokens": 2, "table_width": 9, "indexer": True, "multiprocessors": 5, "schedule": "tiny"},
    ],
    ids=str,
)
def test_pipeline_agrees_with_the_oracle(overrides: dict[str, object]) -> None:
    geometry = small("ragged_verify", **overrides)
    setup, counts, rounds = setup_of(geometry, (4,)), Counts(), rounds_of(geometry, 4, random=2)
    assert verify_rounds(setup, [setup.table(rounds)], counts, folder=None) == []
    assert counts.rounds_checked == len(rounds)


def test_pipeline_walks_a_batch_of_several_blocks() -> None:
    """Live requests and pads on both sides of each block's end; then a last request that owns the most rows."""
    geometry, rng = small("ragged_verify", draft_tokens=2, graph_tokens=160, context=20), np.random.default_rng(0)
    rounds = [round_of(geometry, 150, rng, lens) for lens in ([1, 2] * 35, [1] * 140, [1] * 149)]
    setup = setup_of(geometry, (150,))
    assert verify_rounds(setup, [setup.table(rounds)], Counts(), folder=None) == []


@pytest.mark.parametrize("subject", [RaggedVerify, RaggedVerifyOracle])
def test_lengths_that_do_not_fit_write_nothing_wild(subject: Callable[[], Subject]) -> None:
    """Nobody checks them on the device, and a tail that was not reset brings them: the guards must still stand."""
    geometry, rng = small("ragged_verify", draft_tokens=3, graph_tokens=6), np.random.default_rng(0)
    bench = Bench(subject(), geometry, 5)
    for lens in ([3] * 5, [1, 3, 3, 3], [700, 1]):
        bench.replay(round_of(geometry, 5, rng, lens))


# What must be caught -------------------------------------------------------------------------------------------------


class KeyedByTokens(RaggedVerify):
    """The graph is chosen by its token rows alone, so every replay sees the lengths of the capture."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        captured = capture_lens(buffers.layout.tokens, buffers.layout.bucket, geometry.draft_tokens)
        self._verify_lens = torch.tensor(captured, dtype=torch.int32, device=inputs.seq_lens.device)


def test_a_graph_keyed_by_tokens_only_is_caught() -> None:
    """K02 scaled down: 8 tokens as 8 slots of 1 and as 4 slots of 2. Right only where a round is as the capture."""
    geometry, rng = small("ragged_verify", draft_tokens=2, graph_tokens=8), np.random.default_rng(0)
    as_captured = [round_of(geometry, 4, rng, [2] * 4), round_of(geometry, 8, rng, [1] * 8)]
    setup = setup_of(geometry, (8, 4), KeyedByTokens)
    assert confirm(setup, as_captured) == []
    for replayed in (round_of(geometry, 8, rng, [2] * 4), round_of(geometry, 4, rng, [1, 2, 1])):
        fields = {finding.field for finding in confirm(setup, [replayed])}
        assert {"padded_verify_lens", "extend_start_loc", "dsa_seqlens_expanded", "cache_seqlens_int32"} <= fields


def test_stale_start_locations_are_caught() -> None:
    geometry, rng = small("ragged_verify", draft_tokens=3), np.random.default_rng(0)
    rounds = [round_of(geometry, 3, rng, lens, poison="stale") for lens in ([1, 2, 3], [3, 1, 1])]
    (finding,) = confirm(setup_of(geometry, (3,), fault="not_refreshed:extend_start_loc"), rounds)
    assert (finding.field, finding.diagnosis) == ("extend_start_loc", Diagnosis.STALE)


def test_a_tail_of_verify_lens_that_is_not_reset_is_caught() -> None:
    geometry, rng = small("ragged_verify", draft_tokens=3), np.random.default_rng(0)
    rounds = [round_of(geometry, 3, rng, lens) for lens in ([1, 2, 3], [3])]
    finding = confirm(setup_of(geometry, (3,), fault="tail_not_reset:verify_lens"), rounds)[0]
    assert (finding.field, finding.diagnosis) == ("verify_lens", Diagnosis.TAIL_NOT_RESET)


# Host rules ----------------------------------------------------------------------------------------------------------


def assert_same_or_both_refuse(rule: Callable[[], object], referee: Callable[[], object]) -> bool:
    """Whether there was a result."""
    try:
        want = referee()
    except ValueError:
        with pytest.raises(UsageError, match=r"^\w+: .*; [a-z]+ "):
            rule()
        return False
    got = rule()
    assert got == want
    return True


def test_padding_agrees_with_the_referee_capped_and_not() -> None:
    several = [lens for raw in range(4) for lens in itertools.product(range(4), repeat=raw)]
    accepted = 0
    for lens, slots, tokens, cap in itertools.product(several, (1, 2, 3, 5), (1, 4, 7, 9), (None, 1, 3)):

        def referee(given: tuple[object, ...] = (lens, slots, tokens, cap)) -> object:
            owned, total = padded(*given)  # type: ignore[arg-type]
            return tuple(owned), total

        accepted += assert_same_or_both_refuse(
            lambda given=(lens, slots, tokens, cap): padded_to_bucket(*given), referee
        )
    assert accepted > 500


def test_a_cap_may_leave_tokens_to_nobody() -> None:
    assert padded_to_bucket((2, 1), 4, 20) == ((2, 1, 9, 8), 20)
    assert padded_to_bucket((2, 1), 4, 20, cap=6) == ((2, 1, 6, 6), None)
    assert padded_to_bucket((2, 1), 2, 12, cap=6) == ((2, 6), None)
    assert padded_to_bucket((5, 1), 4, 7) == ((5, 1, 1, 0), 7)


def test_capture_lengths_and_graphs_agree_with_the_referee() -> None:
    accepted = 0
    for tokens, slots, n in itertools.product(range(14), range(6), (1, 3)):
        shape = (tokens, slots, n)
        accepted += assert_same_or_both_refuse(
            lambda shape=shape: capture_lens(*shape), lambda shape=shape: tuple(captured(*shape))
        )
    assert (
        accepted == sum(slots * 2 + 1 for slots in range(1, 5)) + 9 + 5
    )  # all tokens from slots to 3 slots, or 1 each
    for total in (0, 1, 2, 31, 32, 33, 192, 193):
        for grid in (K02_GRID, K02_GRID[::-1], ()):
            assert_same_or_both_refuse(
                lambda grid=grid, total=total: next_graph_tokens(grid, total),
                lambda grid=grid, total=total: graph_of(grid, total),
            )


# Keys of graphs ------------------------------------------------------------------------------------------------------


def test_a_key_tells_graphs_of_as_many_tokens_apart() -> None:
    """The figures of the published bug: 192 tokens as 192 slots of 1 and as 32 slots of 6."""
    live = [K02_WIDTH] * 32
    tokens = next_graph_tokens(K02_GRID, sum(live))
    narrow, wide = key_of(tokens, 192, K02_WIDTH), key_of(tokens, 32, K02_WIDTH)
    assert (tokens, narrow.tokens, wide.tokens) == (192, 192, 192)
    assert narrow != wide
    assert accepts(narrow, live) == "request 0 verifies 6 tokens, its slot was captured with 1"
    assert accepts(wide, live) is None
    assert accepts(narrow, [1] * 192) is None
    assert accepts(wide, [1] * 33) == "33 requests exceed the 32 request slots captured"


def test_the_capacity_of_each_slot_counts() -> None:
    key = key_of(42, 8, 6)
    assert key.capture_lens == (6, 6, 5, 5, 5, 5, 5, 5)
    assert accepts(key, [6, 6, 5]) is None
    assert accepts(key, []) is None
    assert accepts(key, [5, 5, 6]) == "request 2 verifies 6 tokens, its slot was captured with 5"


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"graph_tokens": 3}, "graph_tokens: 3 token rows for 4 request slots are outside 4..8"),
        ({"pool_size": 4, "indexer": True}, "indexer: ragged_verify has no write plan for pools of 4"),
    ],
)
def test_a_geometry_without_meaning_is_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ragged_verify(small("ragged_verify", draft_tokens=2, **overrides), 4)
