"""On a GPU: vLLM's own metadata code, compiled, in live CUDA graphs at the sizes of a real model; and the schedules
that its builder has DeepGEMM make.

Needs vLLM, or files of its wheel: PYTHONPATH=.vllm pytest tests/gpu/test_gpu_vllm.py (docs/engines-vllm.md).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.schedule_variants import ScheduleVariant
from dsa_verify.contract.system import OWN_TABLES
from dsa_verify.graphs import open_backend
from dsa_verify.judge.schedule_laws import ScheduleLaw
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.edge_configs import EdgeKind, edges
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.adapters import deep_gemm
from dsa_verify.subjects.adapters.vllm import SUBJECTS
from dsa_verify.subjects.adapters.vllm.runner import Request, Runner
from dsa_verify.systems.catalogue import OF_OTHERS, OF_THE_SUBJECT, SYSTEMS, resolve_geometry
from oracles.schedule import schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="needs vllm, installed or laid out (docs/engines-vllm.md)"
    ),
]
subjects = pytest.mark.parametrize("name", SUBJECTS)
BLOCK = 64  # tokens; the only page that the indexer's kernels take


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def run(name: str, *, batches: list[int], drafts: list[int], fault: str | None = None, **changes: object) -> list:
    """The findings of the matrix; without any, that all of its rounds were checked."""
    system, backend = SYSTEMS[SUBJECTS[name].system], open_backend(device(), "cuda")
    geometry = system.geometry("deepseek_v32", changes)
    found = []
    fixed = OF_THE_SUBJECT | {OWN_TABLES, OF_OTHERS}
    for config in diagnostic_matrix(
        system, geometry, batches=batches, drafts=drafts if system.drafts else None, fixed=fixed
    ):
        setup = ReplaySetup.make(system, config.geometry, config.buckets, config.seed, f"vllm:{name}", fault, backend)
        counts = Counts()
        found += verify_rounds(setup, config.chunks(), counts, folder=None)
        if found:
            return found
        assert counts.rounds_checked == config.rounds
        assert counts.elements_compared > 0
        assert (counts.address_changes, counts.guard_hits) == (0, 0)
    return found


@subjects
def test_vllm_agrees_with_the_oracles_in_live_graphs(name: str) -> None:
    found = run(name, batches=[1, 4, 16], drafts=[2, 4, 6], context=16_384)
    assert [each.sentence for each in found] == []


@subjects
def test_vllm_agrees_at_full_size(name: str) -> None:
    found = run(name, batches=[48], drafts=[6])
    assert [each.sentence for each in found] == []


@subjects
@pytest.mark.parametrize("kind", [EdgeKind.BATCH, EdgeKind.LONG])
def test_vllm_agrees_at_the_largest_batch_and_the_longest_requests(
    name: str, kind: EdgeKind, request: pytest.FixtureRequest
) -> None:
    if kind is EdgeKind.BATCH:
        request.getfixturevalue("much_memory")
    system = SYSTEMS[SUBJECTS[name].system]
    geometry, fixed = resolve_geometry(system, f"vllm:{name}", "cuda")
    (config,) = [edge.config for edge in edges(system, geometry, seed=0, fixed=fixed) if edge.kind is kind]
    setup = ReplaySetup.make(
        system, config.geometry, config.buckets, 0, f"vllm:{name}", None, open_backend(device(), "cuda")
    )
    counts = Counts()
    found = verify_rounds(setup, config.chunks(), counts, folder=None)
    assert ([each.sentence for each in found], counts.rounds_checked) == ([], config.rounds)


def test_a_page_that_is_one_too_far_is_seen() -> None:
    found = run("target_verify_flat", batches=[4], drafts=[6], fault="off_by_one_page:real_page_table", context=4096)
    assert {each.diagnosis for each in found} == {Diagnosis.BOUNDARY}


def test_the_files_on_the_path_are_those_that_were_judged() -> None:
    """The kernels that ran are compiled, from the files that a result names."""
    import vllm.v1.attention.ops.metadata as judged

    assert type(judged._indexer_decode_metadata_kernel).__name__ == "JITFunction"
    assert Path(judged.__file__).is_file()


# Schedules -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped() -> ScheduleVariant:
    """The variant that the installed sgl-deep-gemm builds on this GPU: vLLM prefers it to its own copy."""
    major, minor = torch.cuda.get_device_capability()
    try:
        variant = deep_gemm.installed_variant(major * 10 + minor)
        deep_gemm.check_importable()
    except UsageError as error:
        pytest.skip(f"needs sgl-deep-gemm: pip install dsa-verify[deepgemm] ({error})")
    if variant.architectures and major * 10 not in variant.architectures:
        pytest.skip(f"{variant.name} is not of this architecture")
    return variant


@pytest.mark.parametrize("query, flatten", [(1, None), (3, True)])
def test_the_builder_passes_deep_gemm_the_lengths_of_every_row(
    shipped: ScheduleVariant, query: int, flatten: bool | None
) -> None:
    """Full and padded batches whose lengths are not all 0; by the oracle, and by the laws alone."""
    geometry = Geometry.resolve("deepseek_v32", {"context": 32_768})
    batch, generator = 33, torch.Generator().manual_seed(0)
    runner = Runner(
        geometry,
        device(),
        most_requests=batch,
        query=query,
        drafts=query - 1,
        flatten=flatten,
        varlen=False,
        schedules=True,
    )
    multiprocessors = torch.cuda.get_device_properties(device()).multi_processor_count
    rows = batch * query
    law = ScheduleLaw(shipped, multiprocessors, rows=rows, next_n=1)
    result = torch.empty(law.result_shape, dtype=torch.int32, device=device())
    wanted = torch.empty((multiprocessors + 1, 2), dtype=torch.int32, device=device())
    for live in (batch, 5, 1, 32):
        computed = torch.randint(0, geometry.context - query, (live,), generator=generator).tolist()
        requests = [
            Request(row=row + 1, computed=many, query=query, blocks=range(1, (many + query) // BLOCK + 2))
            for row, many in enumerate(computed)
        ]
        decode = runner.step(requests, batch).decode
        lengths = decode.seq_lens.contiguous()
        assert lengths.shape == (rows, 1)
        assert lengths.view(batch, query)[:live, -1].tolist() == [many + query for many in computed]
        assert lengths.view(batch, query)[live:].eq(0).all()
        schedule(shipped, lengths, multiprocessors, wanted)
        assert torch.equal(decode.schedule_metadata, wanted)
        law.check(decode.schedule_metadata.contiguous(), lengths, result)
        assert result[1:, 0].eq(-1).all()
