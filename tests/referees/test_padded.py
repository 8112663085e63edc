"""Padded replay: the oracle against the referee, the pipeline against the oracle, over every row (contract 7)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from engine_inputs import input_of, slots_of
from referees.padded import expected_padded
from support import DEVICE

from dsa_verify.base.errors import UsageError
from dsa_verify.buffers.arena import GUARD_WORD, TORCH_DTYPES, Arena
from dsa_verify.buffers.region import LOUD_WORD
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.padded import PADDED_MODES
from dsa_verify.contract.round import one_each
from dsa_verify.contract.subject import Buffers, Inputs, Subject
from dsa_verify.graphs import open_backend
from dsa_verify.replay.compilations import count_compilations
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.pipelines.padded import Padded
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.systems.padded import padded
from fuzz.engine.expansion import expand
from fuzz.engine.simulator import EngineSimulator
from fuzz.engine.strategies import spec_at
from oracles.padded import PaddedOracle

MODES = [(mode, n) for mode in PADDED_MODES for n in ((1,) if mode == "decode" else (2, 4, 6))]
PAD_SLOT_IN_WINDOW = 5  # full_to_swa[0], distinguishable from slot 0 itself
REAL_BOUNDARIES = (0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 385, 511, 512, 513)


def tiny(mode: str, draft_tokens: int, **overrides: object) -> Geometry:
    base = {"padded_mode": mode, "draft_tokens": draft_tokens}
    return SYSTEMS["padded"].geometry("tiny_v4", {**base, **overrides})


@dataclasses.dataclass(frozen=True)
class Batch:
    """Live rows only: their number is the raw batch."""

    seq_lens: Sequence[int] = ()
    requests: Sequence[int] = ()


class Bench:
    """One subject over one bucket, with inputs and outputs at addresses that stay, filled as an engine fills them."""

    def __init__(self, subject: Subject, geometry: Geometry, bucket: int):
        self.subject, self.geometry, self.bucket = subject, geometry, bucket
        self.per_request = SYSTEMS["padded"].token_rows(geometry)
        self.slots = slots_of(geometry)
        rng = np.random.default_rng(7)
        self.full_to_swa = rng.integers(-1, geometry.slots // 2, geometry.slots + 1, dtype=np.int32)
        self.full_to_swa[0], self.full_to_swa[-1] = PAD_SLOT_IN_WINDOW, -1
        dtype = TORCH_DTYPES[geometry.index_dtype]
        self.inputs = Inputs.of(
            {
                "seq_lens": input_of(geometry, (bucket,), dtype)[0],
                "req_pool_indices": input_of(geometry, (bucket,), dtype)[0],
                "req_to_token": torch.from_numpy(self.slots.astype(np.int32)).to(DEVICE),
                "out_cache_loc": input_of(geometry, (bucket * self.per_request,), torch.int64)[0],
                "full_to_swa": torch.from_numpy(self.full_to_swa).to(DEVICE),
                **({"replay_floors": input_of(geometry, (bucket,), torch.int32)[0]} if geometry.request_floors else {}),
            }
        )
        self.arena = Arena([padded(geometry, bucket)], DEVICE, LOUD_WORD)
        self.buffers = self.arena.at(bucket)
        subject.allocate(geometry, self.inputs, self.buffers)

    def replay(self, batch: Batch, *, poison: bool = True) -> dict[str, np.ndarray]:
        """All fields, after padding the batch and, unless told otherwise, poisoning what was there before."""
        pad = self.bucket - len(batch.seq_lens)
        self.seq_lens = [*batch.seq_lens, *[1] * pad]
        self.requests = [*batch.requests, *[0] * pad]
        self.locations = [slot for row in batch.requests for slot in self._locations(row)]
        self.locations += [0] * (pad * self.per_request)
        for name, values in (
            ("seq_lens", self.seq_lens),
            ("req_pool_indices", self.requests),
            ("out_cache_loc", self.locations),
            ("replay_floors", self._floors()),
        ):
            tensor = self.inputs.tensors().get(name)
            if tensor is not None:
                tensor.copy_(torch.tensor(values, dtype=tensor.dtype))
        if poison:
            for tensor in self.buffers.values():
                tensor.fill_(LOUD_WORD)
        self.subject.before_replay()
        self.subject.in_graph()
        assert all(bool((guard.words == GUARD_WORD).all()) for guard in self.arena.guards)
        return {name: tensor.cpu().numpy().copy() for name, tensor in self.buffers.items()}

    def _floors(self) -> list[int]:
        """Around the window that ends with each length, and none of every third request."""
        window, pad = self.geometry.window, self.geometry.replay_floor
        rows = zip(self.seq_lens, self.requests, strict=True)
        floors = (max(length - request * 37 % (window + 5) + 2, 0) * (request % 3 > 0) for length, request in rows)
        return [floor if request else pad for floor, request in zip(floors, self.requests, strict=True)]

    def _locations(self, request: int) -> list[int]:
        """Any slots will do, all different: they need not be those that `req_to_token` names."""
        return [1 + (request * 977 + i * 131) % (self.geometry.slots - 1) for i in range(self.per_request)]

    def expected(self) -> dict[str, np.ndarray]:
        """The referee's word on the last replay."""
        lists = (self.seq_lens, self.requests, self.locations)
        floors = self._floors() if self.geometry.request_floors else None
        return expected_padded(self.geometry, *lists, self.slots, self.full_to_swa.tolist(), floors)


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert set(got) == set(want)
    for name, values in want.items():
        assert got[name].shape == values.shape, name
        wrong = got[name] != values
        assert not wrong.any(), f"{name}{np.argwhere(wrong)[0].tolist()}: {got[name][wrong][0]}, not {values[wrong][0]}"


def random_batch(rng: np.random.Generator, geometry: Geometry, raw: int) -> Batch:
    lengths = rng.integers(0, geometry.context + 1, raw)
    # Duplicates are legal, and row 0 is nobody's but a pad row's.
    return Batch(lengths.tolist(), rng.integers(1, geometry.request_rows, raw).tolist())


def boundary_batches(geometry: Geometry, bucket: int) -> list[Batch]:
    """Lengths at which some row is next to a boundary of the window, a page, a group, the floor or the table."""
    edges = {0, 1, geometry.context}
    for size in (geometry.window, geometry.page_size, geometry.sparse_ratio, geometry.dense_ratio, geometry.topk):
        edges |= {size, 2 * size}
    edges |= {geometry.sparse_ratio * geometry.topk, geometry.replay_floor, geometry.columns}
    near = sorted({edge + by for edge in edges for by in (-1, 0, 1)} & set(range(geometry.context + 1)))
    batches = [near[start : start + bucket] for start in range(0, len(near), bucket)]
    return [Batch(lengths, [1 + i for i in range(len(lengths))]) for lengths in batches]


# The oracle against the referee ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, n", MODES)
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"low_ratios": True, "replay_floor": 19, "input_view": "strided", "index_dtype": "int32"},
        {"low_ratios": True, "index_align": 64, "window": 21, "table_width": 50},
        {"request_floors": True, "replay_floor": 2, "input_view": "strided", "index_dtype": "int32"},
    ],
    ids=["plain", "floor and low ratios", "wide alignment, narrow table", "a floor of each request"],
)
def test_oracle_agrees_with_the_referee(mode: str, n: int, overrides: dict[str, object]) -> None:
    geometry, rng = tiny(mode, n, **overrides), np.random.default_rng(n)
    bench = Bench(PaddedOracle(), geometry, 9)
    batches = [random_batch(rng, geometry, raw) for raw in (0, 1, 5, 8, 9)]
    for batch in [*batches, *boundary_batches(geometry, 9)]:
        assert_same(bench.replay(batch), bench.expected())


@pytest.mark.parametrize("mode, n", MODES)
def test_oracle_agrees_at_the_real_sizes(mode: str, n: int) -> None:
    geometry = SYSTEMS["padded"].geometry(
        "deepseek_v4",
        {"padded_mode": mode, "draft_tokens": n, "context": 1024, "request_rows": 20, "low_ratios": n != 4},
    )
    bench = Bench(PaddedOracle(), geometry, 20)
    assert_same(bench.replay(Batch(REAL_BOUNDARIES, range(1, 19))), bench.expected())
    width = {"decode": 4, "verify": 4, "draft_block": 1, "draft_extend": 1}[mode]
    assert bench.buffers["page_table"].shape[1] == width
    assert bench.buffers["swa_page_indices"].shape[1] == (192 if mode == "draft_block" else 128)
    assert bench.buffers["c4_sparse_indices"].shape[1] == 512
    assert bench.buffers["c128_page_indices"].shape[1] == 64


# The pipeline against the oracle --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, n", MODES)
def test_pipeline_agrees_with_the_oracle(mode: str, n: int) -> None:
    # The interpreter is slow, so here the other things turn with N.
    low = {"low_ratios": True, "replay_floor": 3, "input_view": "strided", "index_dtype": "int32"}
    odd = {"window": 21, "table_width": 50, "index_align": 16, "request_floors": True}
    geometry = tiny(mode, n, **({1: low | odd, 4: odd}.get(n, low)))
    rng = np.random.default_rng(n)
    subject, oracle = Bench(Padded(), geometry, 40), Bench(PaddedOracle(), geometry, 40)
    batches = [random_batch(rng, geometry, raw) for raw in (0, 1, 39, 40)]
    for batch in [*batches, *boundary_batches(geometry, 40)]:
        assert_same(subject.replay(batch), oracle.replay(batch))


@pytest.mark.parametrize("mode, n", [("decode", 1), ("verify", 2), ("draft_block", 4), ("draft_extend", 6)])
def test_pipeline_at_the_real_sizes(mode: str, n: int) -> None:
    """Several blocks of columns, and more rows than one interpreted program takes."""
    overrides = {"padded_mode": mode, "draft_tokens": n, "context": 70_000, "request_rows": 4}
    geometry = SYSTEMS["padded"].geometry("deepseek_v4", overrides)
    subject, oracle = Bench(Padded(), geometry, 3), Bench(PaddedOracle(), geometry, 3)
    for batch in (Batch((70_000, 129), (3, 2)), Batch((256 * 64 - 1,), (1,))):
        assert_same(subject.replay(batch), oracle.replay(batch))
    many = tiny(mode, n, request_rows=9)
    subject, oracle = Bench(Padded(), many, 600), Bench(PaddedOracle(), many, 600)
    batch = random_batch(np.random.default_rng(0), many, 555)
    assert_same(subject.replay(batch), oracle.replay(batch))


@pytest.mark.parametrize("subject", [Padded, PaddedOracle])
@pytest.mark.parametrize("mode, n", [("decode", 1), ("verify", 4), ("draft_block", 4), ("draft_extend", 4)])
def test_a_batch_leaves_nothing_for_the_next(subject: type, mode: str, n: int) -> None:
    """Raw batches of 48, 3, 0, 48 over the same buffers, without poison in between: the order that shows what is
    left over, in pad rows and in tails."""
    geometry, rng = tiny(mode, n), np.random.default_rng(1)
    bench = Bench(subject(), geometry, 48)
    long = Batch([geometry.context] * 48, rng.integers(1, geometry.request_rows, 48).tolist())
    want: dict[int, dict[str, np.ndarray]] = {}
    for batch in (long, random_batch(rng, geometry, 3), Batch(), long):
        got = bench.replay(batch, poison=False)
        assert_same(got, want.setdefault(len(batch.seq_lens), bench.expected()))


# Pad rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", [Padded, PaddedOracle])
@pytest.mark.parametrize("raw", [0, 1, 5])
@pytest.mark.parametrize(
    "mode, casual, lengths",
    [
        ("decode", [1], [1]),
        ("verify", [2, 3, 4, 5], [2, 3, 4, 5]),
        ("draft_block", [2, 3, 4], [4, 4, 4]),
        ("draft_extend", [-2, -1, 0, 1], [0, 0, 0, 1]),
    ],
)
def test_pad_rows_hold_exactly_what_the_contract_says(
    subject: type, raw: int, mode: str, casual: list[int], lengths: list[int]
) -> None:
    """7.2, as numbers: nothing here is computed the way that the code does it."""
    geometry = tiny(mode, 1 if mode == "decode" else 4, window=16)
    got = Bench(subject(), geometry, 6).replay(random_batch(np.random.default_rng(0), geometry, raw))
    pads, first = 6 - raw, raw * len(casual)
    pad = {name: values[first:] for name, values in got.items()}
    assert pad["seq_lens_casual"].tolist() == casual * pads
    assert pad["positions_casual"].tolist() == [length - 1 for length in casual] * pads
    assert pad["swa_topk_lengths"].tolist() == lengths * pads
    for name in ("page_table", "raw_out_loc", "c4_out_loc", "c128_out_loc"):
        assert not pad[name].any(), name
    for row, length in zip(pad["swa_page_indices"], lengths * pads, strict=True):
        assert row.tolist() == [PAD_SLOT_IN_WINDOW] * length + [-1] * (len(row) - length)
    assert pad["c4_len_raw"].tolist() == [max(length, 0) // 4 for length in casual] * pads
    assert set(pad["c4_len_clamped"]) == {1} == set(pad["c128_len_clamped"])
    assert not pad["c128_len_raw"].any()
    assert (pad["c128_page_indices"] == -1).all()
    assert (pad["c4_sparse_indices"] == -1).all()


class PaddedUnclamped(Padded):
    """Lengths straight from the formula: a pad row shorter than the draft sees a negative one."""

    clamp = False


UNSIGNED = ("swa_topk_lengths", "c4_len_raw", "c4_len_clamped", "c4_sparse_lengths", "c128_len_raw")


@pytest.mark.parametrize("raw", [0, 2])
def test_lengths_of_rows_shorter_than_the_draft_are_never_negative(raw: int) -> None:
    """A consumer reads them as unsigned. The formula alone goes below 0, which the comparison with the oracle sees."""
    geometry = tiny("draft_extend", 6)
    batch = Batch([geometry.context] * raw, [1] * raw)
    got = Bench(Padded(), geometry, 4).replay(batch)
    assert got["seq_lens_casual"].min() == -4
    assert all(got[name].min() >= 0 for name in UNSIGNED)
    formula = Bench(PaddedUnclamped(), geometry, 4).replay(batch)
    assert formula["swa_topk_lengths"][raw * 6 :].min() == -4
    with pytest.raises(AssertionError, match="swa_topk_lengths"):
        assert_same(formula, Bench(PaddedOracle(), geometry, 4).replay(batch))


# Layout ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, n", MODES)
def test_values_lie_in_the_ranges_of_the_layout(mode: str, n: int) -> None:
    geometry = tiny(mode, n, low_ratios=True)
    bench = Bench(PaddedOracle(), geometry, 8)
    for batch in [*boundary_batches(geometry, 8), Batch()]:
        for name, values in bench.replay(batch).items():
            field = bench.buffers.layout[name]
            assert ((field.low <= values) & (values < field.high)).all(), name
            assert (field.column_step, field.live_token_rows) == (0, False), f"{name} has dead elements"


def test_write_locations_are_32_bits_wide_in_a_verify_graph_alone() -> None:
    dtypes = {mode: padded(tiny(mode, 2), 1)["raw_out_loc"].dtype for mode in PADDED_MODES}
    assert dtypes == {"decode": "int64", "verify": "int32", "draft_block": "int64", "draft_extend": "int64"}


@pytest.mark.parametrize(
    "mode, overrides, message",
    [
        ("draft_block", {"draft_tokens": 1}, "draft_tokens: 1 leaves a draft block without a token; use 2"),
        ("decode", {"dense_ratio": 32}, "dense_ratio: ratio 32 does not divide page_size 16"),
        ("decode", {"page_size": 1, "sparse_ratio": 1, "dense_ratio": 1, "low_ratios": True}, "low_ratios: ratio 2"),
    ],
)
def test_a_geometry_without_meaning_is_refused(mode: str, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        padded(tiny(mode, 2).replace(**overrides), 1)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter compiles nothing")
def test_the_kernels_are_compiled_once_whatever_the_batch() -> None:
    for mode, n in MODES:
        geometry = tiny(mode, n, low_ratios=True)
        bench = Bench(Padded(), geometry, 8)
        bench.replay(Batch())
        compiled = count_compilations()
        before = compiled()
        for batch in boundary_batches(geometry, 8):
            bench.replay(batch)
        assert compiled() == before


# Floors in rounds -----------------------------------------------------------------------------------------------------


class OneFloor(Padded):
    """The floors that requests had at capture, when all were pad requests."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs.replace(replay_floors=inputs.replay_floors.clone()), buffers)


class FloorOfTheFirst(Padded):
    """That of the first request for all."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        of_all = inputs.replay_floors[:1].expand(buffers.layout.bucket)
        super().allocate(geometry, inputs.replace(replay_floors=of_all), buffers)


@pytest.mark.parametrize("subject", [OneFloor, FloorOfTheFirst, Padded])
@pytest.mark.parametrize("mode, n", [("decode", 1), ("draft_block", 2)])
def test_the_matrix_turns_floors_over_request_by_request(subject: type[Padded], mode: str, n: int) -> None:
    config = diagnostic_matrix(
        SYSTEMS["padded"], tiny(mode, n), batches=[4], drafts=[n], rounds=5, fixed=frozenset({"padded_mode"})
    )[0]
    setup = ReplaySetup.make(SYSTEMS["padded"], config.geometry, config.buckets, 0, subject, None, open_backend(DEVICE))
    findings = verify_rounds(setup, config.chunks(), Counts(), folder=None)
    wrong = set() if subject is Padded else {"swa_page_indices", "swa_topk_lengths"}
    assert {finding.field for finding in findings} == wrong


def test_rounds_of_a_run_that_settles_the_floor_say_none() -> None:
    loaded = diagnostic_matrix(
        SYSTEMS["padded"], tiny("decode", 1, replay_floor=3), batches=[4], fixed=frozenset({"replay_floor"})
    )
    assert not any(config.geometry.request_floors for config in loaded)
    assert all("replay_floors" not in round_.lens for table in loaded[0].chunks() for round_ in table.rounds())


@pytest.mark.parametrize("source", ["matrix", "random", "simulator", "columns"])
def test_floors_lie_below_in_and_above_the_window(source: str) -> None:
    """In each source of rounds, and one a request row."""
    geometry = tiny("verify", 2, request_floors=True, request_rows=20)
    if source in ("matrix", "random"):
        first = diagnostic_matrix(SYSTEMS["padded"], geometry, batches=[6], drafts=[2], rounds=200)[0]
        rounds = [round_ for table in first.chunks() for round_ in table.rounds()]
        rounds = rounds[:30] if source == "matrix" else rounds[40:]
    elif source == "simulator":
        rounds = EngineSimulator(SYSTEMS["padded"], geometry, (6, 2), 1).rounds(150)
    else:
        rounds = [
            expand(spec_at(2, i, SYSTEMS["padded"], geometry, (6, 2)), SYSTEMS["padded"], geometry) for i in range(150)
        ]
    seen = set()
    for round_ in rounds:
        assert one_each(round_.requests, round_.replay_floors) == round_.replay_floors
        for length, floor in zip(round_.seq_lens, round_.replay_floors, strict=True):
            if length > geometry.window:
                seen.add("none" if floor == 0 else min(max(length - floor, -1), geometry.window + 1))
    assert {"none", -1, 0, 1, geometry.window - 1, geometry.window} <= seen
