"""Expansion: the same bits in Python, NumPy and torch, rounds within the contract, and sizes drawn evenly."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from types import FrameType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import specs
from support import DEVICE

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Scenario
from dsa_verify.rounds.case_file import parse_case
from dsa_verify.rounds.matrix import REMAPS_PER_ROUND, undefined_when_empty
from dsa_verify.systems.catalogue import SYSTEMS
from fuzz.engine.expansion import REGIMES, RoundSpec, Stream, below, bits, expand, expand_columns, regimes, word
from fuzz.engine.strategies import spec_at

# (system, preset, geometry, buckets): each regime, count and refusal that a system of today has.
CONFIGURATIONS = [
    ("decode", "tiny", {"request_rows": 9}, (4, 2)),
    ("decode", "tiny", {"indexer": True, "request_rows": 40}, (32, 1)),
    ("target_verify", "tiny_pool", {"draft_tokens": 3}, (4, 1)),
    ("draft_extend", "tiny", {"draft_tokens": 3, "request_rows": 5}, (4, 2)),
    ("draft_extend", "tiny_pool", {"draft_tokens": 5}, (3, 1)),
    ("mtp", "tiny_pool", {}, (4, 2)),
    ("ragged_verify", "tiny", {"draft_tokens": 3, "graph_tokens": 6}, (6, 2)),
    ("padded", "tiny_v4", {"padded_mode": "draft_block", "draft_tokens": 3, "request_floors": True}, (4, 2)),
]
configurations = pytest.mark.parametrize("system, preset, overrides, buckets", CONFIGURATIONS)
WORDS = st.integers(0, (1 << 63) - 1)


@given(WORDS, WORDS, st.integers(0, 64), WORDS)
def test_a_word_is_the_same_in_python_numpy_and_torch(seed: int, round_: int, stream: int, element: int) -> None:
    arrays = [np.array([value], np.int64) for value in (seed, round_, stream, element)]
    want = word(seed, round_, stream, element)
    assert 0 <= want < 1 << 63
    assert int(bits(*arrays)[0]) == want
    assert int(bits(*(torch.from_numpy(array).to(DEVICE) for array in arrays))[0]) == want


@given(WORDS, st.integers(1, (1 << 31) - 1))
def test_a_value_is_below_its_span_and_the_same_everywhere(drawn: int, span: int) -> None:
    value = below(drawn, span)
    assert 0 <= value < span
    assert int(below(np.array([drawn]), span)[0]) == int(below(torch.tensor([drawn]), span)[0]) == value


def test_values_of_neighbouring_counters_are_spread_evenly() -> None:
    """Chi-squared of 16 bins, by each counter in turn; 99.99% of random words stay below 45."""
    for axis in range(4):
        arguments = [np.full(4096, 3, np.int64) for _ in range(4)]
        arguments[axis] = np.arange(4096)
        counts = np.bincount(below(bits(*arguments), 16), minlength=16)
        assert ((counts - 256) ** 2 / 256).sum() < 45, axis


@configurations
def test_the_columns_are_equal_bit_for_bit(
    system: str, preset: str, overrides: dict[str, object], buckets: tuple[int, ...]
) -> None:
    geometry = SYSTEMS[system].geometry(preset, overrides)
    drawn = [spec_at(11, i, SYSTEMS[system], geometry, buckets) for i in range(200)]
    drawn.append(dataclasses.replace(drawn[0], seed=(1 << 63) + 5))  # a seed that int64 does not hold
    host, device = (expand_columns(drawn, SYSTEMS[system], geometry, where) for where in (None, DEVICE))
    assert host.keys() == device.keys()
    for name, column in host.items():
        assert np.array_equal(column, device[name].cpu().numpy()), name


@configurations
def test_every_spec_is_within_the_contract(
    system: str, preset: str, overrides: dict[str, object], buckets: tuple[int, ...]
) -> None:
    """The strict reader of cases refuses what is not; an expanded round alone equals it among others."""
    geometry = SYSTEMS[system].geometry(preset, overrides)
    drawn = [spec_at(5, i, SYSTEMS[system], geometry, buckets) for i in range(150)]
    rounds = [expand(spec, SYSTEMS[system], geometry) for spec in drawn]
    scenario = Scenario(system=system, geometry=geometry, buckets=buckets, rounds=tuple(rounds))
    assert parse_case(scenario.to_json()).rounds == scenario.rounds
    for spec, round_ in zip(drawn, rounds, strict=True):
        assert (round_.bucket, round_.raw_batch) == (spec.bucket, spec.raw)
        assert len(round_.remap) <= REMAPS_PER_ROUND
        lengths = dict(zip(round_.requests, round_.seq_lens, strict=True))
        for row, origin, pages in round_.prefixes:
            assert spec.regime != "one_request"
            assert row in round_.remap
            for each in (row, origin):
                assert pages <= SYSTEMS[system].pages_before_writes(geometry, lengths[each]), (
                    "what is shared is written"
                )
        distinct = len(set(round_.requests))
        assert distinct == (spec.raw if spec.regime != "one_request" else spec.raw - max(spec.hot - 1, 0))
        undefined = spec.raw == spec.bucket and undefined_when_empty(SYSTEMS[system], geometry, spec.bucket)
        assert not undefined or any(round_.seq_lens)
    if max(buckets) > 1:
        assert any(row != origin for round_ in rounds for row, origin, _ in round_.prefixes)
    columns = expand_columns(drawn, SYSTEMS[system], geometry)
    assert columns["seq_lens"].shape == (len(drawn), max(spec.bucket for spec in drawn))


def test_numpy_is_given_no_enumeration() -> None:
    """It would ask one for attributes that it does not have, in Python, and lose an interrupt that arrives then."""
    asked: list[str] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "__getattr__" and "name" in frame.f_locals:
            name = frame.f_locals["name"]
            asked.extend([name] if name.startswith("__array") else [])

    system, geometry = SYSTEMS["draft_extend"], Geometry.resolve("tiny", {"draft_tokens": 3})
    drawn = [spec_at(11, i, system, geometry, (4, 2)) for i in range(20)]
    sys.setprofile(look)
    try:
        expand_columns(drawn, system, geometry)
    finally:
        sys.setprofile(None)
    assert asked == []


def test_hot_entries_are_as_many_as_the_spec_says_and_anywhere() -> None:
    geometry = Geometry.resolve("tiny", {"request_rows": 9})
    places = Counter[int]()
    for seed in range(64):
        spec = RoundSpec(regime="skewed", bucket=8, raw=6, hot=2, seed=seed)
        lengths = expand(spec, SYSTEMS["decode"], geometry).seq_lens
        long = [place for place, length in enumerate(lengths) if length > 100]
        assert len(long) == 2
        assert all(length <= 1 for place, length in enumerate(lengths) if place not in long)
        places.update(long)
    assert set(places) == set(range(6))


def test_the_empty_batch_that_has_no_schedule_is_never_drawn() -> None:
    geometry = Geometry.resolve("tiny", {"indexer": True, "request_rows": 40})
    assert undefined_when_empty(SYSTEMS["decode"], geometry, 32)
    spec = RoundSpec(regime="empty", bucket=32, raw=32, hot=32, seed=0)
    assert expand(spec, SYSTEMS["decode"], geometry).seq_lens == (1, *(0,) * 31)


def test_ragged_rounds_only_where_they_differ() -> None:
    tiny = Geometry.resolve("tiny", {"draft_tokens": 3})
    assert set(REGIMES) - set(regimes(SYSTEMS["decode"], tiny)) == {"ragged"}
    assert set(REGIMES) == set(regimes(SYSTEMS["draft_extend"], tiny))
    spec = RoundSpec(regime="ragged", bucket=4, raw=4, hot=1, seed=3)
    extend_lens = expand(spec, SYSTEMS["draft_extend"], tiny).extend_lens
    assert 0 in extend_lens


def test_a_counter_draws_sizes_evenly() -> None:
    geometry = Geometry.resolve("tiny", {})
    raw = Counter(spec_at(0, i, SYSTEMS["decode"], geometry, (15,)).raw for i in range(1600))
    assert set(raw) == set(range(16))
    assert max(raw.values()) < 2 * min(raw.values())


@settings(max_examples=50, database=None, deadline=None)
@given(st.data())
def test_hypothesis_draws_specs_of_scalars(data: st.DataObject) -> None:
    geometry = Geometry.resolve("tiny", {"draft_tokens": 3})
    spec = data.draw(specs(SYSTEMS["draft_extend"], geometry, (4, 2)))
    assert spec.hot <= spec.raw <= spec.bucket
    assert all(isinstance(getattr(spec, field.name), int | str) for field in dataclasses.fields(spec))
    assert expand(spec, SYSTEMS["draft_extend"], geometry).bucket in (4, 2)


def test_no_two_streams_are_one() -> None:
    words = {word(0, 0, stream, 0) for stream in Stream}
    assert len(words) == len(Stream)
