"""On a GPU: our schedule builder against the real DeepGEMM, bit for bit, both captured in live CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.schedule_variants import VARIANTS, ScheduleVariant, shape
from dsa_verify.graphs import open_backend
from dsa_verify.judge.schedule_laws import ScheduleLaw
from dsa_verify.replay.compilations import count_compilations
from dsa_verify.subjects.adapters import deep_gemm
from dsa_verify.subjects.pipelines.schedule import MAX_ROWS, build_schedule
from oracles.schedule import schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DRAFTS = range(1, 9)
# DeepGEMM compiles for each multiple of 32 rows, which takes seconds: 5 sizes, 4 of these.
BATCHES = (1, 31, 32, 33, 200)
ROUNDS = 500
assert len(DRAFTS) * len(BATCHES) * ROUNDS == 20_000


@pytest.fixture(scope="module")
def shipped() -> ScheduleVariant:
    """The variant that the installed sgl-deep-gemm builds on this GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    major, minor = torch.cuda.get_device_capability()
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        variant = deep_gemm.installed_variant(major * 10 + minor)
        deep_gemm.refresh(torch.ones(1, 1, dtype=torch.int32, device=device), empty_schedule(device))
    except UsageError as error:
        pytest.skip(f"needs sgl-deep-gemm: pip install dsa-verify[deepgemm] ({error})")
    return variant


@pytest.fixture(autouse=True)
def _memory_given_back() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def empty_schedule(device: torch.device) -> torch.Tensor:
    return torch.empty(shape(multiprocessors()), dtype=torch.int32, device=device)


def draw_lengths(rounds: int, rows: int, next_n: int, seed: int, device: torch.device) -> torch.Tensor:
    """int32 [rounds, rows, next_n], each round of one of five kinds; all columns are drawn, the last one counts.

    Never all zero: the shipped kernel faults on that where rows are a multiple of 32 (contract 3.6).
    """
    generator = torch.Generator(device).manual_seed(seed)

    def uniform(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (rounds, rows, next_n), generator=generator, device=device)

    edge = torch.tensor([0, 1, 255, 256, 257, 511, 512, 513], device=device)[uniform(0, 8)]
    row = torch.arange(rows, device=device).view(1, rows, 1)
    huge = torch.where(row == uniform(0, rows)[:, :1], uniform(1, 1 << 20), uniform(0, 3))
    holes = torch.where((row == 0) | (row == rows // 2) | (row == rows - 1), 0, uniform(1, 4000))
    kinds = torch.stack([uniform(0, 513), edge, huge, holes, uniform(0, 131_073)])
    lens = kinds.gather(0, uniform(0, 5)[None, :, :1, :1].expand(1, rounds, rows, next_n))[0]
    nothing = (lens[:, :, -1:] == 0).all(1, keepdim=True)
    return torch.where(nothing & (row == rows // 3), 1, lens).to(torch.int32)


@pytest.mark.parametrize("next_n", DRAFTS)
def test_builder_is_bit_equal_to_deep_gemm(shipped: ScheduleVariant, next_n: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    backend = open_backend(device)
    if shipped.name not in ("V4", "V4b", "V5", "V5p", "V120"):
        pytest.skip(f"needs a release whose schedule we build; this one builds {shipped.name}")
    for rows in BATCHES:
        lens = torch.ones(rows, next_n, dtype=torch.int32, device=device)
        ours, theirs, wanted = (empty_schedule(device) for _ in range(3))
        law = ScheduleLaw(shipped, multiprocessors(), rows=rows, next_n=next_n)
        result = torch.empty(law.result_shape, dtype=torch.int32, device=device)
        bodies = [
            lambda lens=lens, ours=ours: build_schedule(lens, ours, variant=shipped.name),
            lambda lens=lens, theirs=theirs: deep_gemm.refresh(lens, theirs),
            lambda lens=lens, wanted=wanted: schedule(shipped, lens, multiprocessors(), wanted),
            lambda lens=lens, theirs=theirs, law=law, result=result: law.check(theirs, lens, result),
        ]
        for body in bodies:
            body()
        graphs = [backend.capture(body) for body in bodies]
        compiled = count_compilations()
        before = compiled()
        rounds = draw_lengths(ROUNDS, rows, next_n, 100 * next_n + rows, device)
        differing = torch.zeros(ROUNDS, 3, dtype=torch.int64, device=device)
        for i in range(ROUNDS):
            lens.copy_(rounds[i])
            for stale in (ours, theirs, wanted, result):
                stale.fill_(-7)
            for graph in graphs:
                graph.replay()
            differing[i, 0] = (ours != theirs).sum()
            differing[i, 1] = (wanted != theirs).sum()
            differing[i, 2] = (result[1:, 0] != -1).sum()
        assert differing.sum(0).tolist() == [0, 0, 0], f"{rows} rows: {differing.nonzero()[:3].tolist()}"
        assert compiled() == before


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "V6"])
@pytest.mark.parametrize("rows", [1, 33, 1025, 10_000])
def test_builder_agrees_with_the_oracle(name: str, rows: int) -> None:
    variant = VARIANTS[name]
    device = torch.device("cuda", torch.cuda.current_device())
    next_n = 1 if variant.max_next_n == 1 or 2 not in variant.context_dims else 3
    lens = torch.zeros(rows, next_n, dtype=torch.int32, device=device)
    source = lens if 2 in variant.context_dims else lens[:, 0]
    ours, wanted = empty_schedule(device), empty_schedule(device)

    def body() -> None:
        build_schedule(source, ours, variant=name)
        schedule(variant, source, multiprocessors(), wanted)

    body()
    assert torch.equal(ours, wanted)  # without a tile, too
    graph = open_backend(device).capture(body)
    for round_lens in draw_lengths(20, rows, next_n, rows, device):
        lens.copy_(round_lens)
        graph.replay()
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("pool", [1, 4])
def test_builder_at_the_largest_batch(pool: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    lens = draw_lengths(1, MAX_ROWS, 4, pool, device)[0]
    lens[7] = 1 << 21
    ours, wanted = empty_schedule(device), empty_schedule(device)
    build_schedule(lens, ours, pool=pool)
    pooled = lens if pool == 1 else (lens // pool).clamp(min=1)
    schedule(VARIANTS["V4b"], pooled, multiprocessors(), wanted)
    assert torch.equal(ours, wanted)
    assert ScheduleLaw(VARIANTS["V4b"], multiprocessors(), rows=MAX_ROWS, next_n=4).judge(ours, pooled) == []
