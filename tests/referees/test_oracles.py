"""The oracles against the referee, and the referee against cases worked out by hand from the contract."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import referees
import torch
from engine_inputs import input_of, slots_of
from referees.basic import expected

from dsa_verify.buffers.arena import GUARD_WORD, Arena
from dsa_verify.buffers.region import LOUD_WORD
from dsa_verify.contract.geometry import INDEX_DTYPES, INPUT_VIEWS, Geometry
from dsa_verify.contract.layout import Layout, Lifetime
from dsa_verify.contract.subject import Buffers, Inputs, Subject
from dsa_verify.graphs import open_backend
from dsa_verify.systems import basic
from oracles.decode import DecodeOracle
from oracles.draft_extend import DraftExtendOracle
from oracles.target_verify import TargetVerifyOracle

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ORACLES = {
    "decode": (basic.decode, DecodeOracle),
    "target_verify": (basic.target_verify, TargetVerifyOracle),
    "draft_extend": (basic.draft_extend, DraftExtendOracle),
}
DTYPES = {"int64": torch.int64, "int32": torch.int32}


@dataclasses.dataclass(frozen=True)
class Batch:
    """One round, padded to its bucket."""

    seq_lens: list[int]
    requests: list[int]
    extend_lens: list[int]


class Bench:
    """One oracle over one bucket: its inputs, with the memory around them, and its guarded outputs."""

    def __init__(self, system: str, geometry: Geometry, bucket: int):
        layout_of, oracle = ORACLES[system]
        self.system, self.geometry, self.bucket = system, geometry, bucket
        self.subject_layout: Layout = layout_of(geometry, bucket)
        self.layout = self.subject_layout.for_oracle()
        self.arena = Arena([self.layout], DEVICE, LOUD_WORD)
        self.buffers: Buffers = self.arena.at(bucket)
        self.slots = slots_of(geometry)
        self.memory: list[torch.Tensor] = []
        dtype = DTYPES[geometry.index_dtype]
        self.inputs = Inputs.of(
            {
                "seq_lens": self._input((bucket,), dtype),
                "req_pool_indices": self._input((bucket,), dtype),
                "req_to_token": self._input(self.slots.shape, torch.int32),
                **({"extend_lens": self._input((bucket,), torch.int32)} if system == "draft_extend" else {}),
            }
        )
        self.inputs.req_to_token.copy_(torch.from_numpy(self.slots))
        self.oracle: Subject = oracle()
        self.oracle.allocate(geometry, self.inputs, self.buffers)

    def _input(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor, memory = input_of(self.geometry, shape, dtype)
        self.memory.append(memory)
        return tensor

    def feed(self, batch: Batch) -> None:
        """Writes the inputs in place and poisons the outputs, as before a replay."""
        self.inputs.seq_lens.copy_(torch.tensor(batch.seq_lens))
        self.inputs.req_pool_indices.copy_(torch.tensor(batch.requests))
        if "extend_lens" in self.inputs.own:
            self.inputs.extend_lens.copy_(torch.tensor(batch.extend_lens))
        for field in self.layout:
            if field.lifetime is Lifetime.REPLAY:
                self.buffers[field.name].fill_(LOUD_WORD)

    def run(self, batch: Batch) -> None:
        self.feed(batch)
        before = [memory.clone() for memory in self.memory]
        self.oracle.before_replay()
        self.oracle.in_graph()
        assert all(torch.equal(a, b) for a, b in zip(self.memory, before, strict=True)), "an input was written"
        self.check(batch)

    def check(self, batch: Batch) -> None:
        for guard in self.arena.guards:
            assert bool((guard.words == GUARD_WORD).all()), f"wrote past {guard.after} or before {guard.before}"
        want = expected(
            self.system,
            self.geometry,
            batch.seq_lens,
            batch.requests,
            batch.extend_lens,
            self.slots,
            self.bucket,
        )
        assert list(want) == [field.name for field in self.layout]
        counts = batch.extend_lens if self.system == "draft_extend" else [self.geometry.draft_tokens] * self.bucket
        owners = np.repeat(np.arange(self.bucket), counts)
        for field in self.layout:
            values, live = want[field.name]
            got = self.buffers[field.name].cpu().numpy()
            assert values.shape == self.subject_layout[field.name].shape, field.name
            if field.one_row_per_request:
                got, values, live = got[owners], values[: len(owners)], live[: len(owners)]
            wrong = (got != values) & live
            assert not wrong.any(), (
                f"{field.name}{np.argwhere(wrong)[0].tolist()}: {got[wrong][0]} instead of {values[wrong][0]}; "
                f"{self.system}, {self.geometry}, {batch}"
            )


def random_geometry(random: np.random.Generator, system: str) -> Geometry:
    draft_tokens = 1 if system == "decode" else int(random.integers(1, 9))
    pool_size = int(random.choice([1, 2, 4]))
    # A pooled pad row is as long as the draft and a pool (contract 0.2).
    context = int(random.integers(1 if pool_size == 1 else draft_tokens + pool_size, 49))
    overrides = {
        "context": context,
        "page_size": int(random.choice([1, 2, 4, 8])),
        "topk": int(random.integers(1, 13)),
        "pool_size": pool_size,
        "draft_tokens": draft_tokens,
        "request_rows": int(random.integers(2, 7)),
        "table_width": int(random.choice([0, 0, 1, random.integers(1, context + 1)])),
        "token_table_width": int(random.choice([0, context + draft_tokens, context + draft_tokens + 5])),
        "architecture": int(random.choice([90, 100])),
        "index_dtype": str(random.choice(INDEX_DTYPES)),
        "input_view": str(random.choice(INPUT_VIEWS)),
    }
    if overrides["page_size"] > 1 and overrides["pool_size"] == 1 and draft_tokens == 1:
        overrides["wide_table"] = bool(random.integers(2))
    return Geometry.resolve("tiny", overrides)


def random_batch(random: np.random.Generator, geometry: Geometry, bucket: int) -> Batch:
    """Lengths from the whole range or near a boundary, requests with duplicates, and a pad tail (contract 0.2)."""
    raw = int(random.integers(0, bucket + 1))
    pads, n = bucket - raw, geometry.draft_tokens
    steps = np.array([0, geometry.topk, geometry.page_size, geometry.pool_size, geometry.columns, n])
    near = random.choice(steps, raw) * random.integers(1, 3, raw) + random.integers(-1, 2, raw)
    anywhere = random.integers(0, geometry.context + 1, raw)
    lengths = np.clip(np.where(random.integers(2, size=raw) == 0, near, anywhere), 0, geometry.context)
    static = bool(random.integers(2))
    extend = np.full(raw, n) if static else random.choice([0, 1, n, random.integers(0, n + 1)], raw)
    return Batch(
        seq_lens=[*lengths.tolist(), *[1] * pads],
        requests=[*random.integers(0, geometry.request_rows, raw).tolist(), *[0] * pads],
        extend_lens=[*extend.tolist(), *[n] * pads],
    )


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("system", ORACLES)
def test_oracle_agrees_with_the_referee_on_random_rounds(system: str, block: int):
    random = np.random.default_rng([block, len(system)])
    for _ in range(60):
        geometry, bucket = random_geometry(random, system), int(random.integers(1, 10))
        bench = Bench(system, geometry, bucket)
        for _ in range(6):
            bench.run(random_batch(random, geometry, bucket))


def boundary_lengths(geometry: Geometry) -> list[int]:
    """Contract section 10: around K, page, pool, table blocks and table width."""
    topk, pool, width = geometry.topk, geometry.pool_size, geometry.columns
    blocks = [64, 128, 256, 384, 512, geometry.allocator_page, 2 * geometry.allocator_page]
    lengths = {0, 1, 2, 3, topk + pool, topk + 2 * pool, geometry.context}
    for middle in (*blocks, topk, topk + pool - 1, width):
        lengths |= {middle - 1, middle, middle + 1}
    lengths |= set(range(topk - 1, topk + 5)) | {topk // 2 * 2 + pool + i for i in range(pool + 1)}
    return sorted(length for length in lengths if 0 <= length <= geometry.context)


@pytest.mark.parametrize("table_width", [0, 1, 4159, 4161])
@pytest.mark.parametrize("pool_size", [1, 4, 16])
@pytest.mark.parametrize("system", ORACLES)
def test_oracle_agrees_with_the_referee_on_the_boundaries(system: str, pool_size: int, table_width: int):
    n = 1 if system == "decode" else 3
    geometry = Geometry.resolve(
        "deepseek_v32",
        {
            "context": 4200,
            "pool_size": pool_size,
            "draft_tokens": n,
            "table_width": table_width,
            "request_rows": 5,
            "architecture": 100,
            "indexer": False,  # test_indexer_oracle.py has its fields
        },
    )
    lengths = boundary_lengths(geometry)
    bench = Bench(system, geometry, bucket=len(lengths))
    extend_lens = [i % (n + 1) for i in range(len(lengths))]
    bench.run(Batch(lengths, [i % 5 for i in range(len(lengths))], extend_lens))


@pytest.mark.parametrize("bucket", [1, 2, 31, 33, 127, 129])
@pytest.mark.parametrize("system", ORACLES)
def test_oracle_agrees_with_the_referee_on_every_extreme_batch(system: str, bucket: int):
    """All empty, all full, all pads, one request only, and rows for none, the first or the last request."""
    n = 1 if system == "decode" else 2
    geometry = Geometry.resolve("tiny", {"context": 40, "topk": 7, "draft_tokens": n, "request_rows": 3})
    bench = Bench(system, geometry, bucket)
    for length in (0, 1, n, geometry.context):
        for extend in ([0] * bucket, [n] * bucket, [n, *[0] * (bucket - 1)], [*[0] * (bucket - 1), n]):
            bench.run(Batch([length] * bucket, [2] * bucket, extend))


@pytest.mark.parametrize("system", ORACLES)
def test_prefix_sums_wrap_at_int32(system: str):
    """Contract 1.7: 2,100 requests of a million tokens pass 2**31."""
    n = 1 if system == "decode" else 2
    overrides = {"context": 1 << 20, "table_width": 1, "draft_tokens": n, "request_rows": 2, "indexer": False}
    bench = Bench(system, Geometry.resolve("deepseek_v32", overrides), bucket=2100)
    lengths = [(1 << 20) - i % 7 for i in range(2100)]
    bench.run(Batch(lengths, [i % 2 for i in range(2100)], [n] * 2100))
    assert int(bench.buffers["cu_seqlens_k"].min()) < 0, "the case is too small to wrap"


@pytest.mark.parametrize("system", ORACLES)
def test_captured_oracle_agrees_with_the_referee_on_every_replay(system: str):
    """Captured once, replayed over inputs that change in place; the backend refuses what cannot be captured."""
    random = np.random.default_rng(len(system))
    backend = open_backend(DEVICE)
    for _ in range(12):
        geometry, bucket = random_geometry(random, system), int(random.integers(1, 10))
        bench = Bench(system, geometry, bucket)
        bench.run(random_batch(random, geometry, bucket))  # a warm-up, as before any capture
        graph = backend.capture(bench.oracle.in_graph)
        for _ in range(10):
            batch = random_batch(random, geometry, bucket)
            bench.feed(batch)
            bench.oracle.before_replay()
            graph.replay()
            bench.check(batch)


# R[q, p] of the worked examples: pages of 2 tokens; row 0 is the pad request.
WORKED_SLOTS = np.array([[0] * 8, [4, 5, 10, 11, 2, 3, 6, 7], [20, 21, 8, 9, 14, 15, 30, 31]])
WORKED = {
    "decode": {
        "cache_seqlens_int32": [5, 1],
        "cu_seqlens_q": [0, 1, 2],
        "cu_seqlens_k": [0, 5, 6],
        "dsa_seqlens_expanded": [5, 1],
        "dsa_cache_seqlens_int32": [3, 1],
        "dsa_cu_seqlens_q": [0, 1, 2],
        "dsa_cu_seqlens_k": [0, 3, 4],
        "page_table_1": [[20, 21, 8, 9, 14, None], [0, None, None, None, None, None]],
        "real_page_table": [[10, 4, 7], [0, None, None]],
        "paged_mqa_ctx_lens_2d": [[5], [1]],
    },
    "target_verify": {
        "cache_seqlens_int32": [7, 3],
        "cu_seqlens_q": [0, 1, 2, 3, 4],
        "cu_seqlens_k": [0, 7, 10],
        "dsa_seqlens_expanded": [6, 7, 2, 3],
        "dsa_cache_seqlens_int32": [3, 3, 2, 3],
        "dsa_cu_seqlens_q": [0, 1, 2, 3, 4],
        "dsa_cu_seqlens_k": [0, 3, 6, 8, 11],
        # Seven tokens are live, six columns exist.
        "page_table_1": [[20, 21, 8, 9, 14, 15]] * 2 + [[0, 0, 0, None, None, None]] * 2,
        "real_page_table": [[10, 4, 7]] * 2 + [[0, 0, None]] * 2,
        "paged_mqa_ctx_lens_2d": [[7, 7], [3, 3]],
    },
    "draft_extend": {
        "cache_seqlens_int32": [5, 1],
        "cu_seqlens_q": [0, 1, 2, 3, 4],
        "cu_seqlens_k": [0, 5, 6],
        # Request 0 extends by one token; the pad row is shorter than its two rows, hence the clamp.
        "dsa_seqlens_expanded": [5, 0, 1, None],
        "dsa_cache_seqlens_int32": [3, 0, 1, None],
        "dsa_cu_seqlens_q": [0, 1, 2, 3, 4],
        "dsa_cu_seqlens_k": [0, 3, 3, 4, None],
        "page_table_1": [[20, 21, 8, 9, 14, None], *[[0, *[None] * 5]] * 2, [None] * 6],
        "real_page_table": [[10, 4, 7], *[[0, None, None]] * 2, [None] * 3],
        "paged_mqa_ctx_lens_2d": [[5], [0], [1], [None]],
    },
}


@pytest.mark.parametrize("system", WORKED)
def test_referee_gives_the_worked_examples(system: str):
    overrides = {"context": 6, "page_size": 2, "topk": 3, "request_rows": 3, "architecture": 100}
    geometry = Geometry.resolve("tiny", {**overrides, "draft_tokens": 1 if system == "decode" else 2})
    got = expected(system, geometry, [5, 1], [2, 0], [1, 2], WORKED_SLOTS, 2)
    shown = {name: np.where(live, values, None).tolist() for name, (values, live) in got.items()}
    assert shown == WORKED[system]


@pytest.mark.parametrize(
    "pool_size, lengths, selected",
    [
        (1, [0, 7, 8, 9, 1000], [0, 7, 8, 8, 8]),
        # Whole pools up to K, then what is left of the last pool: never more than K + kp - 1.
        (4, [0, 3, 4, 7, 8, 9, 11, 12, 1003], [0, 3, 4, 7, 8, 9, 11, 8, 11]),
    ],
)
def test_referee_selects_as_contract_0_4_says(pool_size: int, lengths: list[int], selected: list[int]):
    geometry = Geometry.resolve("tiny", {"context": 1003, "topk": 8, "pool_size": pool_size, "table_width": 1})
    count = len(lengths)
    got = expected("decode", geometry, lengths, [1] * count, None, np.ones((2, 1), np.int64), count)
    assert got["dsa_cache_seqlens_int32"][0].tolist() == selected


def test_referee_wraps_sums_into_int32():
    geometry = Geometry.resolve("tiny", {"table_width": 1})
    got = expected("decode", geometry, [2**30] * 5, [1] * 5, None, np.ones((2, 1), np.int64), 5)
    assert got["cu_seqlens_k"][0].tolist() == [0, 2**30, -(2**31), -(2**30), 0, 2**30]


def test_no_referee_imports_an_oracle() -> None:
    files = sorted(Path(referees.__file__).parent.glob("*.py"))
    assert len(files) > 6
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(module.partition(".")[0] == "oracles" for module in modules), path.name
