"""K-pool metadata: the oracle, the planners and the rules against the referee, the pipeline against the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from engine_inputs import input_of, slots_of
from referees.extend_plan import DevicePlanner, HostPlanner
from referees.kpool import (
    Expected,
    expected_extend_gather,
    expected_extend_writes,
    expected_views,
    expected_write_plan,
)
from support import DEVICE, backend

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import INDEX_DTYPES, INPUT_VIEWS, Geometry, check_pool_geometry
from dsa_verify.contract.kpool import (
    Mode,
    candidates,
    pooled_pages,
)
from dsa_verify.contract.live import closed_pools
from dsa_verify.contract.round_table import token_slots
from dsa_verify.contract.subject import Inputs
from dsa_verify.replay.compilations import count_compilations
from dsa_verify.subjects.pipelines.kpool import update_pooled_views, update_write_plan
from dsa_verify.systems.catalogue import SYSTEMS
from oracles.kpool import WritePlan, write_pooled_lengths, write_pooled_table

MODES: tuple[Mode, ...] = ("decode", "target_verify", "draft_extend")
DTYPES = {"int64": torch.int64, "int32": torch.int32}
POISON = -0x61616162
GUARD = 32


@dataclasses.dataclass(frozen=True)
class Batch:
    seq_lens: list[int]
    requests: list[int]
    accept_lens: list[int]


class Outputs:
    """The fields of one mode, each between two guards of poison."""

    def __init__(self, mode: Mode, geometry: Geometry, batch: int, *, rows_of_table: int):
        n, int64 = SYSTEMS[mode].token_rows(geometry), torch.int64
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "pooled_real_page_table": ((rows_of_table, pooled_pages(geometry)), torch.int32),
            "req": ((batch,), int64),
            "write_start": ((batch,), torch.int32),
            "tail_logical_start": ((batch,), torch.int32),
            "write_loc": ((batch, candidates(n, geometry)), int64),
        }
        if mode == "decode":
            shapes["pooled_cache_seqlens_int32"] = ((batch,), torch.int32)
        else:
            shapes["seqlens_per_q"] = shapes["pool_seqlens_per_q"] = ((batch * n,), torch.int32)
        if mode == "draft_extend":
            shapes["effective_n_per_batch"] = ((batch,), torch.int32)
        self.memory = {}
        self.fields = {}
        for name, (shape, dtype) in shapes.items():
            size = int(np.prod(shape))
            self.memory[name] = torch.full((size + 2 * GUARD,), POISON, dtype=dtype, device=DEVICE)
            self.fields[name] = self.memory[name][GUARD : GUARD + size].view(shape)

    def poison(self) -> None:
        for memory in self.memory.values():
            memory.fill_(POISON)

    def check(self, want: Expected, context: object, *, dead_is_untouched: Sequence[str] = ()) -> None:
        """Live elements as wanted, guards intact; the dead elements of some fields not written."""
        assert set(want) == set(self.fields)
        for name, (values, live) in want.items():
            got = self.fields[name].cpu().numpy()
            assert got.shape == values.shape, name
            wrong = (got != values) & live
            if name in dead_is_untouched:
                wrong |= (got != POISON) & ~live
            assert not wrong.any(), (
                f"{name}{np.argwhere(wrong)[0].tolist()}: {got[wrong][0]} instead of {values[wrong][0]}; {context}"
            )
            memory = self.memory[name]
            assert bool((memory[:GUARD] == POISON).all() & (memory[-GUARD:] == POISON).all()), f"guard of {name}"


class Bench:
    """Oracle and pipeline of one mode over one batch size, with inputs at addresses that stay."""

    def __init__(self, mode: Mode, geometry: Geometry, batch: int):
        check_pool_geometry(geometry)
        self.mode, self.geometry, self.batch = mode, geometry, batch
        self.n = SYSTEMS[mode].token_rows(geometry)
        self.slots = slots_of(geometry)
        dtype = DTYPES[geometry.index_dtype]
        self.inputs = Inputs(
            seq_lens=input_of(geometry, (batch,), dtype)[0],
            req_pool_indices=input_of(geometry, (batch,), dtype)[0],
            req_to_token=input_of(geometry, self.slots.shape, torch.int32)[0],
        )
        self.inputs.req_to_token.copy_(torch.from_numpy(self.slots))
        self.accept_lens = torch.ones(batch, dtype=torch.int32, device=DEVICE) if mode == "draft_extend" else None
        self.real_page_table = torch.empty((batch * self.n, geometry.pages), dtype=torch.int32, device=DEVICE)
        self.oracle = WritePlan(mode, geometry, self.inputs, self.accept_lens)
        self.oracle_out = Outputs(mode, geometry, batch, rows_of_table=batch)
        self.subject_out = Outputs(mode, geometry, batch, rows_of_table=batch * self.n)

    def feed(self, batch: Batch) -> None:
        self.inputs.seq_lens.copy_(torch.tensor(batch.seq_lens))
        self.inputs.req_pool_indices.copy_(torch.tensor(batch.requests))
        if self.accept_lens is not None:
            self.accept_lens.copy_(torch.tensor(batch.accept_lens))
        for outputs in (self.oracle_out, self.subject_out):
            outputs.poison()

    def feed_table(self, batch: Batch) -> None:
        """The physical table as refreshed, with poison where nothing may be read: dead columns, rows but b * n."""
        page = self.geometry.page_size
        table = np.full((self.batch, self.n, self.geometry.pages), POISON, np.int64)
        pages = self.slots[:, : self.geometry.columns : page] // page
        for b, (length, request) in enumerate(zip(batch.seq_lens, batch.requests, strict=True)):
            live = -(-self.cached(length) // page)
            table[b, 0, :live] = pages[request, :live]
        self.real_page_table.copy_(torch.from_numpy(table.reshape(-1, self.geometry.pages)))

    def cached(self, length: int) -> int:
        return length + self.n if self.mode == "target_verify" else length

    def run_oracle(self) -> None:
        fields = self.oracle_out.fields
        self.oracle.write(fields)
        write_pooled_table(self.geometry, self.inputs, fields["pooled_real_page_table"])
        if self.mode == "decode":
            write_pooled_lengths(self.geometry, self.inputs, fields["pooled_cache_seqlens_int32"])

    def run_subject(self) -> None:
        arguments = (self.mode, self.geometry, self.inputs, self.real_page_table, self.subject_out.fields)
        update_write_plan(*arguments, self.accept_lens)
        update_pooled_views(*arguments)

    def expected(self, batch: Batch, live_requests: list[bool] | None = None) -> Expected:
        lists = (self.mode, self.geometry, batch.seq_lens, batch.requests, self.slots)
        return expected_write_plan(*lists, batch.accept_lens, live_requests) | expected_views(*lists)

    def check_oracle(self, batch: Batch, want: Expected) -> None:
        table, live = want["pooled_real_page_table"]
        one_row_each = want | {"pooled_real_page_table": (table[:: self.n], live[:: self.n])}
        self.oracle_out.check(one_row_each, (self.mode, self.geometry, batch))

    def check_subject(self, batch: Batch, want: Expected) -> None:
        context = (self.mode, self.geometry, batch)
        self.subject_out.check(want, context, dead_is_untouched=("pooled_real_page_table",))

    def check_rules(self, batch: Batch, want: Expected) -> None:
        """The counts that a harness derives are the referee's live masks."""
        lens, accepted = np.array(batch.seq_lens), np.array(batch.accept_lens)
        count = closed_pools(SYSTEMS[self.mode], self.geometry, lens, accepted)
        live = np.arange(candidates(self.n, self.geometry)) < count[:, None]
        assert np.array_equal(live, want["write_loc"][1]), batch


def geometry_of(pool: int, n: int, **rest: object) -> Geometry:
    base = {
        "pool_size": pool,
        "page_size": max(4, pool),
        "topk": 32,
        "draft_tokens": n,
        "request_rows": 7,
        "indexer": True,
        "multiprocessors": 5,
        "schedule": "tiny",
    }
    return Geometry.resolve("tiny", {**base, **rest})


def random_geometry(random: np.random.Generator, mode: Mode) -> Geometry:
    pool = int(random.choice([2, 4, 16]))
    n = 1 if mode == "decode" else int(random.integers(1, 9))
    context = int(random.integers(n + pool, 200))
    return geometry_of(
        pool,
        n,
        page_size=int(random.choice([pool, 2 * pool, 4 * pool])),
        context=context,
        # Beyond the table, the page of a candidate is clamped into it (contract 4.2).
        table_width=int(random.choice([0, 0, random.integers(1, context + 30)])),
        request_rows=int(random.integers(2, 7)),
        index_dtype=str(random.choice(INDEX_DTYPES)),
        input_view=str(random.choice(INPUT_VIEWS)),
    )


def random_batch(random: np.random.Generator, mode: Mode, geometry: Geometry, count: int) -> Batch:
    """Lengths anywhere or around a pool, a page, a pooled page or the table's width; any requests."""
    pool, span = geometry.pool_size, geometry.allocator_page
    steps = np.array([0, pool, geometry.page_size, span, geometry.columns])
    near = random.choice(steps, count) * random.integers(1, 3, count) + random.integers(-pool, pool + 1, count)
    anywhere = random.integers(0, geometry.context + 1, count)
    lengths = np.where(random.integers(2, size=count) == 0, near, anywhere)
    return Batch(
        seq_lens=np.clip(lengths, SYSTEMS[mode].plan_start(geometry), geometry.context).tolist(),
        requests=random.integers(0, geometry.request_rows, count).tolist(),
        accept_lens=random.integers(1, SYSTEMS[mode].token_rows(geometry) + 1, count).tolist(),
    )


@pytest.mark.parametrize("pool", [2, 4, 16])
@pytest.mark.parametrize("mode", MODES)
def test_oracle_agrees_with_the_referee_at_every_write_start(mode: Mode, pool: int):
    """Each start over more than two pooled pages, for each N: every ws mod kp, and each crossing of a pooled page."""
    for n in range(1, 2 if mode == "decode" else 9):
        geometry = geometry_of(pool, n, page_size=max(8, pool), context=2 * max(8, pool) * pool + 2 * pool)
        lengths = list(range(SYSTEMS[mode].plan_start(geometry), geometry.context + 1))
        count = len(lengths)
        bench = Bench(mode, geometry, count)
        for accept in {1, (n + 1) // 2, n} if mode == "draft_extend" else {n}:
            batch = Batch(lengths, [1 + b % 6 for b in range(count)], [accept] * count)
            bench.feed(batch)
            bench.run_oracle()
            want = bench.expected(batch)
            bench.check_oracle(batch, want)
            bench.check_rules(batch, want)


@pytest.mark.parametrize("mode", MODES)
def test_oracle_agrees_with_the_referee_on_random_batches(mode: Mode):
    random = np.random.default_rng(len(mode))
    for _ in range(200):
        geometry, count = random_geometry(random, mode), int(random.integers(1, 13))
        bench = Bench(mode, geometry, count)
        for _ in range(4):
            batch = random_batch(random, mode, geometry, count)
            bench.feed(batch)
            bench.run_oracle()
            want = bench.expected(batch)
            bench.check_oracle(batch, want)
            bench.check_rules(batch, want)


@pytest.mark.parametrize("mode", MODES)
def test_a_live_candidate_is_where_the_first_token_of_its_pool_says(mode: Mode):
    """A law without a formula: pooled slots are token slots divided by the pool size (contract 0.1)."""
    geometry = geometry_of(4, 1 if mode == "decode" else 6, context=190)
    lengths = list(range(SYSTEMS[mode].plan_start(geometry), 191 - geometry.draft_tokens))
    bench = Bench(mode, geometry, len(lengths))
    batch = Batch(lengths, [1 + b % 6 for b in range(len(lengths))], [geometry.draft_tokens] * len(lengths))
    bench.feed(batch)
    bench.run_oracle()
    locations, checked = bench.oracle_out.fields["write_loc"].cpu().numpy(), 0
    for b, p in np.argwhere(bench.expected(batch)["write_loc"][1]):
        pool = lengths[b] - SYSTEMS[mode].plan_start(geometry)
        first_token = (pool // 4 + p) * 4
        assert locations[b, p] == bench.slots[batch.requests[b], first_token] // 4
        checked += 1
    assert checked > 40


@pytest.mark.parametrize("mode", MODES)
def test_pipeline_agrees_with_the_referee(mode: Mode):
    random = np.random.default_rng(len(mode) + 100)
    for _ in range(30):
        geometry, count = random_geometry(random, mode), int(random.integers(1, 40))
        bench = Bench(mode, geometry, count)
        batch = random_batch(random, mode, geometry, count)
        # A candidate beyond the table reads its last column, live or not; only live ones are wanted.
        live_requests = [bool(flag) for flag in random.integers(0, 2, count)]
        bench.feed(batch)
        bench.feed_table(batch)
        bench.run_subject()
        bench.check_subject(batch, bench.expected(batch, live_requests))


@pytest.mark.parametrize("pool", [2, 4, 16])
@pytest.mark.parametrize("mode", MODES)
def test_pipeline_agrees_with_the_referee_at_every_write_start(mode: Mode, pool: int):
    """Far more requests than one program takes."""
    for n in (1,) if mode == "decode" else (1, 2, 5, 8):
        geometry = geometry_of(pool, n, page_size=max(8, pool), context=max(8, pool) * pool + 2 * pool + 8)
        lengths = list(range(SYSTEMS[mode].plan_start(geometry), geometry.context + 1))
        bench = Bench(mode, geometry, len(lengths))
        accept = [1 + b % n for b in range(len(lengths))]
        batch = Batch(lengths, [1 + b % 6 for b in range(len(lengths))], accept)
        bench.feed(batch)
        bench.feed_table(batch)
        bench.run_subject()
        bench.check_subject(batch, bench.expected(batch))


def boundary_lengths(geometry: Geometry) -> list[int]:
    """Contract section 10: lengths generally, dsa_len with a pool, the live region of the pooled table."""
    pool, span, topk = geometry.pool_size, geometry.allocator_page, geometry.topk
    lengths = {1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 385, 511, 512, 513}
    for middle in (topk, topk + pool, span, 2 * span, 3 * span, 64 * span, geometry.columns):
        lengths |= {middle - 1, middle, middle + 1, middle + pool - 1, middle + pool}
    return sorted(length for length in lengths if geometry.draft_tokens <= length <= geometry.context)


@pytest.mark.parametrize("pool", [4, 16])
@pytest.mark.parametrize("mode", MODES)
def test_real_sizes_and_the_boundaries_of_section_10(mode: Mode, pool: int):
    n = 1 if mode == "decode" else 7
    overrides = {"pool_size": pool, "draft_tokens": n, "context": 17_000, "table_width": 16_900, "request_rows": 5}
    geometry = Geometry.resolve("glm53_flash", overrides)
    lengths = boundary_lengths(geometry)
    bench = Bench(mode, geometry, len(lengths))
    batch = Batch(lengths, [1 + b % 4 for b in range(len(lengths))], [1 + b % n for b in range(len(lengths))])
    bench.feed(batch)
    bench.feed_table(batch)
    bench.run_oracle()
    bench.run_subject()
    want = bench.expected(batch)
    bench.check_oracle(batch, want)
    bench.check_subject(batch, want)


@pytest.mark.parametrize("mode", MODES)
def test_a_pad_row_is_planned_like_any_other(mode: Mode):
    """Fill value and request 0 (contract 0.2) give defined lengths; no candidate of it is live."""
    geometry = geometry_of(4, 1 if mode == "decode" else 3)
    bench = Bench(mode, geometry, 3)
    fill = geometry.draft_tokens + 4 if mode == "draft_extend" else 1
    batch = Batch([fill] * 3, [0] * 3, [1] * 3)
    bench.feed(batch)
    bench.feed_table(batch)
    bench.run_oracle()
    bench.run_subject()
    want = bench.expected(batch, [False] * 3)
    assert not want["write_loc"][1].any()
    bench.check_oracle(batch, want)
    bench.check_subject(batch, want)


@pytest.mark.parametrize("mode", MODES)
def test_captured_oracle_and_pipeline_agree_with_the_referee_on_every_replay(mode: Mode):
    """Captured once, replayed over inputs that change in place, without a compilation after the first run."""
    random = np.random.default_rng(7)
    compiled = count_compilations()
    for _ in range(4):
        geometry, count = random_geometry(random, mode), int(random.integers(1, 9))
        bench = Bench(mode, geometry, count)
        batch = random_batch(random, mode, geometry, count)
        bench.feed(batch)
        bench.feed_table(batch)
        bench.run_oracle()
        bench.run_subject()
        before = compiled()
        graphs = [backend().capture(bench.run_oracle), backend().capture(bench.run_subject)]
        for _ in range(6):
            batch = random_batch(random, mode, geometry, count)
            bench.feed(batch)
            bench.feed_table(batch)
            for graph in graphs:
                graph.replay()
            want = bench.expected(batch)
            bench.check_oracle(batch, want)
            bench.check_subject(batch, want)
        assert compiled() == before


def test_the_worked_example():
    """By hand: kp 2, P 2, so pages of 4 slots; request 1 lies at slots 8-11, 20-23, 4-7."""
    geometry = Geometry.resolve(
        "tiny", {"context": 12, "page_size": 2, "pool_size": 2, "topk": 4, "draft_tokens": 3, "request_rows": 2}
    )
    slots = np.array([[0] * 15, [8, 9, 10, 11, 20, 21, 22, 23, 4, 5, 6, 7, 0, 0, 0]])
    plan = expected_write_plan("target_verify", geometry, [3, 6], [1, 1], slots)
    assert {name: values.tolist() for name, (values, _) in plan.items()} == {
        "req": [1, 1],
        "write_start": [3, 6],
        "tail_logical_start": [2, 6],
        # Tokens 3, 4, 5 close pools 1 and 2; tokens 6, 7, 8 close pool 3 and begin pool 4.
        "write_loc": [[5, 10], [11, 2]],
        "seqlens_per_q": [4, 5, 6, 7, 8, 9],
        "pool_seqlens_per_q": [2, 2, 3, 3, 4, 4],
    }
    assert plan["write_loc"][1].tolist() == [[True, True], [True, False]]
    extend = expected_write_plan("draft_extend", geometry, [6], [1], slots, [1])
    assert extend["write_loc"][0].tolist() == [[5, 10]]
    assert extend["write_loc"][1].tolist() == [[True, False]], "one accepted token closes pool 1 only"
    views = expected_views("decode", geometry.replace(draft_tokens=1), [4, 5], [1, 1], slots)
    table, live = views["pooled_real_page_table"]
    # A pooled page is live with its first token, though no pool of it is closed.
    assert np.where(live, table, -1).tolist() == [[2, -1, -1], [2, 5, -1]]
    assert views["pooled_cache_seqlens_int32"][0].tolist() == [2, 2]


@pytest.mark.parametrize("mode", MODES)
def test_a_write_start_below_zero_is_refused(mode: Mode):
    geometry = geometry_of(4, 1 if mode == "decode" else 3)
    low = SYSTEMS[mode].plan_start(geometry)
    SYSTEMS[mode].check_lengths(geometry, [low, low + 1])
    if low:
        with pytest.raises(UsageError, match=rf"round 4: seq_lens\[1\]: {low - 1} is below {low}.*use {low} or more"):
            SYSTEMS[mode].check_lengths(geometry, [low, low - 1], where="round 4: ")
    with pytest.raises(ValueError, match="starts its"):
        expected_write_plan(mode, geometry, [low - 1], [1], np.zeros((2, 300), np.int64), [1])


@pytest.mark.parametrize(
    "preset, changes, message",
    [
        ("tiny", {"pool_size": 8}, "pool_size: 8 does not divide page_size 4"),
        ("tiny", {"pool_size": 4, "topk": 30}, "pool_size: 4 does not divide topk 30"),
        ("glm53_flash", {"page_size": 128}, "page_size: 128 with pool_size 4.*only, use it, or pool_size 1"),
        ("glm53_flash", {"page_size": 1}, "page_size: 1 with pool_size 4"),
        ("deepseek_v32", {"page_size": 4, "pool_size": 4}, "page_size: 4 with pool_size 4"),
        ("glm53_flash", {"pool_size": 2}, "topk: 2048 is 1024 pools of 2.*use a topk of 256, 320, .*1024$"),
        ("glm53_flash", {"topk": 1022}, "pool_size: 4 does not divide topk 1022"),
        ("glm53_flash", {"draft_tokens": 0}, "draft_tokens: 0 is outside 1..16"),
        ("glm53_flash", {"topk": 0}, "topk: 0 is outside 1..2048"),
        ("glm53_flash", {"topk": 2052}, "topk: 2052 is outside 1..2048"),
    ],
)
def test_unsupported_pool_geometries_are_refused(preset: str, changes: dict[str, int], message: str):
    # Not through `resolve`, which refuses some of them first.
    geometry = dataclasses.replace(Geometry.resolve(preset), **changes)
    with pytest.raises(UsageError, match=message):
        check_pool_geometry(geometry)


@pytest.mark.parametrize(
    "preset, changes",
    [
        ("tiny", {"pool_size": 4}),
        ("tiny", {"pool_size": 1, "topk": 30}),
        ("deepseek_v32", {"page_size": 1}),
        *[("glm53_flash", {"pool_size": 4, "topk": 4 * groups}) for groups in (128, 160, 192, 224, 256, 512)],
        ("glm53_flash", {"pool_size": 16}),
    ],
)
def test_supported_pool_geometries_pass(preset: str, changes: dict[str, int]):
    check_pool_geometry(Geometry.resolve(preset, changes))


DTYPE_OF = {"n_from_tail": "int32", "tail_logical_base": "int32", "dst_logical_start": "int32", "n_write": "int32"}


def check_planners(geometry: Geometry, seq: list[int], extend: list[int], requests: list[int], ranks: int) -> None:
    rows = np.arange(geometry.request_rows)
    page = geometry.page_size
    pages = (token_slots(geometry, rows, rows % 2)[:, : geometry.columns : page] // page)[requests].astype(np.int32)
    device_table = torch.from_numpy(pages).to(DEVICE)
    tensors = [torch.tensor(values, device=DEVICE) for values in (seq, extend, requests)]
    host, device = HostPlanner(geometry), DevicePlanner(geometry)
    # A rank gathers for its own share of each chunk, which may be none of it.
    local_seq = [s - q // 2 for s, q in zip(seq, extend, strict=True)]
    local_extend = [q - q // 2 - q % 2 for q in extend]
    local = [torch.tensor(values, device=DEVICE) for values in (local_seq, local_extend, requests)]
    cases = [
        (
            expected_extend_writes(geometry, seq, extend, requests, pages, ranks),
            host.writes(seq, extend, requests, pages, ranks),
            device.writes(*tensors, device_table, ranks),
        ),
        (
            expected_extend_gather(geometry, seq, extend, requests, pages),
            host.gather(seq, extend, requests, pages),
            device.gather(*tensors, device_table),
        ),
        (
            expected_extend_gather(geometry, local_seq, local_extend, requests, pages),
            host.gather(local_seq, local_extend, requests, pages),
            device.gather(*local, device_table),
        ),
    ]
    for want, by_host, by_device in cases:
        assert set(want) == set(by_host) == set(by_device)
        for name, values in want.items():
            context = (name, geometry, seq, extend, requests)
            is_write = name.startswith(("pool_", "tail_"))
            dtype = DTYPE_OF.get(name.split("_", 1)[1], "int64") if is_write else "int32"
            assert by_host[name].tolist() == values, context
            assert by_device[name].tolist() == values, context
            assert (str(by_host[name].dtype), str(by_device[name].dtype)) == (dtype, f"torch.{dtype}"), context


def test_planners_agree_with_the_referee_on_random_chunks():
    random = np.random.default_rng(3)
    for _ in range(400):
        pool = int(random.choice([2, 4, 16]))
        geometry = geometry_of(pool, 1, page_size=int(random.choice([pool, 2 * pool])), context=150)
        count = int(random.integers(1, 7))
        # Mostly short chunks: most close no pool, or one.
        extend = np.minimum(random.choice([1, pool - 1, pool, pool + 1, random.integers(1, 100)], count), 100)
        start = random.integers(0, 51, count)
        requests = random.integers(0, geometry.request_rows, count).tolist()
        ranks = int(random.integers(1, 5))
        check_planners(geometry, (start + extend).tolist(), extend.tolist(), requests, ranks)


@pytest.mark.parametrize("pool", [2, 4, 16])
def test_planners_agree_with_the_referee_at_every_start_and_length(pool: int):
    """Each start modulo a pool with each chunk up to two pools, as one batch and at the edge of a pooled page."""
    geometry = geometry_of(pool, 1, context=3 * max(4, pool) * pool)
    for edge in (0, geometry.allocator_page - pool):
        pairs = [(edge + start, q) for start in range(pool) for q in range(1, 2 * pool + 2)]
        seq, extend = [start + q for start, q in pairs], [q for _, q in pairs]
        check_planners(geometry, seq, extend, [1 + i % 6 for i in range(len(pairs))], ranks=2)


def test_a_chunk_that_closes_nothing_is_all_tail():
    geometry = geometry_of(4, 1)
    table = np.arange(60, dtype=np.int32).reshape(1, 60)
    plan = HostPlanner(geometry).writes([3], [2], [5], table)
    assert len(plan["pool_id"]) == 0
    tails = ("tail_req", "tail_dst_logical_start", "tail_chunk_src", "tail_n_write")
    assert [plan[name].tolist() for name in tails] == [[5], [1], [0], [2]]


@pytest.mark.parametrize(
    "seq, extend, message",
    [
        ([], [], "0 requests"),
        ([5, 5], [1, 0], r"extend_lens\[1\]: 0 is outside 1..5"),
        ([5], [6], r"extend_lens\[0\]: 6 is outside 1..5"),
        ([41], [1], r"seq_lens\[0\]: 41 is beyond the 10 pages of 4 tokens"),
    ],
)
def test_planners_refuse_what_the_contract_asserts(seq: list[int], extend: list[int], message: str):
    geometry, table = geometry_of(4, 1), np.zeros((len(seq), 10), np.int32)
    requests = [1] * len(seq)
    with pytest.raises(UsageError, match=message):
        HostPlanner(geometry).writes(seq, extend, requests, table)
    tensors = [torch.tensor(values, dtype=torch.int64, device=DEVICE) for values in (seq, extend, requests)]
    with pytest.raises(UsageError, match=message):
        DevicePlanner(geometry).writes(*tensors, torch.from_numpy(table).to(DEVICE))
