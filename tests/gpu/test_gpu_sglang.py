"""On a GPU: the diagnostic matrix over SGLang's own kernels, and the places where contract 2 says that they are wrong.

Needs SGLang beside the GPU, and for schedules sgl-deep-gemm; each test is skipped by name without what it needs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_verify.base.errors import STATUS_DEVICE_LOST, UsageError
from dsa_verify.graphs import open_backend
from dsa_verify.rounds.case_file import read_case
from dsa_verify.rounds.edge_configs import Edge, EdgeKind, edges, why_not_here
from dsa_verify.rounds.matrix import Config, diagnostic_matrix
from dsa_verify.run.runner import Runner, RunResult, new_result
from dsa_verify.subjects.adapters.sglang import SUBJECTS, basic, indexer, kpool, mtp, wheel
from dsa_verify.systems.catalogue import SYSTEMS, resolve_geometry

BASIC = ("decode", "target_verify", "draft_extend")
GAP = ("paged_mqa_schedule_metadata", "topk_v2_plan")


def why_not() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    try:
        for module in (basic.KERNELS, kpool.MODULE, mtp.MANAGER, mtp.PRECOMPUTE, indexer.PLANNER):
            wheel.require(module)
    except UsageError as error:
        return f"needs sglang: {error}"
    return None


REASON = why_not()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=REASON or "")]


@pytest.fixture
def schedules() -> None:
    why = indexer.why_no_schedule(torch.device("cuda", torch.cuda.current_device()))
    if why is not None:
        pytest.skip(f"needs sgl-deep-gemm: {why}")


def run_of(name: str, configs: Sequence[Config]) -> RunResult:
    backend = open_backend(torch.device("cuda", torch.cuda.current_device()), "cuda")
    subject = SUBJECTS[name]
    run = new_result(subject.system, subject.name, backend)
    Runner(backend=backend, folder=None, keep_going=True).matrix(configs, subject.name, run)
    return run


def matrix(name: str, preset: str | None = None, **settings: Any) -> list[Config]:
    system = SYSTEMS[SUBJECTS[name].system]
    geometry, fixed = resolve_geometry(system, SUBJECTS[name].name, "cuda", preset, settings)
    return diagnostic_matrix(system, geometry, fixed=fixed)


def expect_equal(run: RunResult, rounds: int = 272) -> None:
    assert [finding.sentence for finding in run.findings] == []
    assert (run.counts.rounds_checked, run.counts.mismatches, run.counts.guard_hits) == (rounds, 0, 0)
    assert run.provenance["capability"].startswith("sm")


@pytest.mark.parametrize("name", BASIC)
def test_the_fused_kernels_pass_the_matrix(name: str, schedules: None) -> None:
    """Schedules and plans included, at the size of DeepSeek V3.2."""
    run = run_of(name, matrix(name))
    expect_equal(run)
    assert run.not_covered == {}


@pytest.mark.parametrize("name", BASIC)
def test_the_fused_kernels_pass_without_an_indexer(name: str) -> None:
    expect_equal(run_of(name, matrix(name, indexer=False)))


@pytest.mark.parametrize("name", BASIC)
def test_the_pooled_kernels_pass_the_matrix(name: str, schedules: None) -> None:
    """At the size of GLM-5.3-Flash; inputs lie as engines have them."""
    run = run_of(name, matrix(name, "glm53_flash", input_view="plain"))
    expect_equal(run)
    assert run.not_covered == {}


def test_the_write_plan_takes_strided_inputs_for_adjacent() -> None:
    run = run_of("target_verify", matrix("target_verify", "glm53_flash", input_view="strided")[5:6])
    assert {"write_plan_req", "write_plan_write_start"} <= {finding.field for finding in run.findings}


@pytest.fixture
def copies() -> None:
    try:
        mtp.compile_copies(matrix("mtp_copy")[0].geometry)
    except UsageError as error:
        pytest.skip(f"needs the copy kernels: {error}")


def test_three_draft_steps_keep_their_schedules_and_plans(copies: None, schedules: None) -> None:
    """Contract 2.3, from the subject's name alone."""
    run = run_of("mtp", matrix("mtp"))
    assert run.counts.rounds_checked > 0
    assert {finding.field for finding in run.findings} == {f"step{step}_{name}" for step in range(3) for name in GAP}


@pytest.mark.parametrize("steps", [2, 3])
def test_up_to_two_draft_steps_pass_the_matrix(copies: None, steps: int) -> None:
    expect_equal(run_of("mtp", matrix("mtp", draft_steps=steps)))


def test_with_fusion_off_three_pooled_draft_steps_have_the_same_gap(copies: None, schedules: None) -> None:
    run = run_of("mtp", matrix("mtp", "glm53_flash", input_view="plain"))
    assert {finding.field for finding in run.findings} == {f"step{step}_{name}" for step in range(3) for name in GAP}


@pytest.mark.parametrize("preset", ["deepseek_v32", "glm53_flash"])
def test_siblings_pass_the_matrix(copies: None, preset: str) -> None:
    expect_equal(run_of("mtp_sibling", matrix("mtp_sibling", preset, input_view="plain")))


@pytest.mark.parametrize("steps", [2, 4, 5])
def test_the_copies_alone_pass_the_matrix(copies: None, steps: int) -> None:
    expect_equal(run_of("mtp_copy", matrix("mtp_copy", draft_steps=steps)))


# Edges ----------------------------------------------------------------------------------------------------------------


def edges_of(name: str, kind: EdgeKind) -> list[Edge]:
    system = SYSTEMS[SUBJECTS[name].system]
    geometry, fixed = resolve_geometry(system, SUBJECTS[name].name, "cuda")
    return [edge for edge in edges(system, geometry, seed=0, fixed=fixed) if edge.kind is kind]


@pytest.mark.parametrize("kind", [EdgeKind.BATCH, EdgeKind.LONG])
@pytest.mark.parametrize("name", BASIC)
def test_the_fused_kernels_at_the_largest_batch_and_the_longest_requests(
    name: str, kind: EdgeKind, schedules: None, request: pytest.FixtureRequest
) -> None:
    if kind is EdgeKind.BATCH:
        request.getfixturevalue("much_memory")
    (edge,) = edges_of(name, kind)
    _skip_without_memory(edge)
    expect_equal(run_of(name, [edge.config]), edge.config.rounds)


@pytest.mark.parametrize("name", BASIC)
def test_the_fused_kernels_keep_to_the_rows_of_a_strided_table(name: str) -> None:
    (edge,) = edges_of(name, EdgeKind.GAP)
    expect_equal(run_of(name, [edge.config]), edge.config.rounds)


@pytest.mark.parametrize("name", ["mtp", "mtp_sibling"])
def test_draft_steps_need_adjacent_rows(name: str, copies: None) -> None:
    """Contract 2.2: the destination of the wide table; the record's own rows are adjacent."""
    (edge,) = edges_of(name, EdgeKind.GAP)
    fields = {finding.field for finding in run_of(name, [edge.config]).findings}
    assert {"step0_page_table_1", "step1_page_table_1"} <= fields
    assert "step0_real_page_table" not in fields


def test_the_copies_take_rows_for_adjacent(copies: None) -> None:
    """Contract 2.2: the source of the real table, and the destination of the wide one."""
    (edge,) = edges_of("mtp_copy", EdgeKind.GAP)
    run = run_of("mtp_copy", [edge.config])
    assert {"step0_real_page_table", "step0_page_table_1"} <= {finding.field for finding in run.findings}
    assert run.counts.guard_hits > 0


@pytest.mark.parametrize("name", ["decode", "draft_extend"])
def test_a_batch_that_is_empty_throughout_ends_the_process(name: str, schedules: None, tmp_path: Path) -> None:
    """Contract 3.6: from the subject's name alone, and again from the case that is left."""

    command = [sys.executable, "-m", "dsa_verify.cli.main", "replay", "--device", "cuda", "--findings", str(tmp_path)]
    options = [f"--subject=sglang:{name}", "--edges", "--batch", "1", "--rounds", "1", "--set", "context=8192"]
    options += ["--set", "input_view=plain"]  # of the edges only this is left, and the gap
    case: list[str] = []
    for arguments in (options, case):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == STATUS_DEVICE_LOST, done.stdout + done.stderr
        assert "32 requests of length 0" in " ".join((done.stdout + done.stderr).split())
        case += sorted(map(str, tmp_path.glob("device-lost-*.json")))[:1]
    assert len(read_case(Path(case[0])).rounds) == 1


@pytest.mark.parametrize("name", BASIC)
def test_int32_request_indices_are_multiplied_in_32_bits(name: str, much_memory: None) -> None:
    """Contract 1.7."""
    (edge,) = edges_of(name, EdgeKind.FAR)
    _skip_without_memory(edge)
    run = run_of(name, [edge.config])
    assert {finding.field for finding in run.findings} == {"page_table_1", "real_page_table"}
    assert all("which 32 bits do not hold (contract 1.7)" in finding.sentence for finding in run.findings)


@pytest.mark.parametrize("name", BASIC)
def test_the_fused_kernels_fill_tables_of_2_31_elements(name: str, much_memory: None) -> None:
    (edge,) = edges_of(name, EdgeKind.WIDE)
    _skip_without_memory(edge)
    expect_equal(run_of(name, [edge.config]), edge.config.rounds)


def test_the_copy_leaves_a_table_of_2_31_elements_uncopied(copies: None, much_memory: None) -> None:
    """Contract 2.2: the lengths are copied, the tables are not, and nothing is raised."""
    edge = edges_of("mtp", EdgeKind.WIDE)[0]
    _skip_without_memory(edge)
    run = run_of("mtp", [edge.config])
    fields = {finding.field for finding in run.findings}
    assert "step0_page_table_1" in fields
    assert not {"step0_cache_seqlens_int32", "step0_cu_seqlens_k"} & fields


def _skip_without_memory(edge: Edge) -> None:
    why = why_not_here(edge, torch.device("cuda", torch.cuda.current_device()))
    if why is not None:
        pytest.skip(f"needs memory: {why}")
