"""SGLang's own kernels in the interpreter, and its draft steps with the CUDA copies restated: what runs without a GPU.

Each test needs SGLang; without it, it is skipped by name. The matrices in full are asked for with -m slow.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from support import DEVICE, backend

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.system import OWN_TABLES
from dsa_verify.contract.topk_plan import PLAN_RULES
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.runner import Runner, RunResult, new_result
from dsa_verify.subjects.adapters.sglang import SUBJECTS, basic, indexer, kpool, mtp, wheel
from dsa_verify.subjects.pipelines.schedule import build_schedule
from dsa_verify.subjects.pipelines.topk_plan import TopkPlanBuilder
from dsa_verify.systems.catalogue import OF_OTHERS, SYSTEMS

NAMES = ("decode", "target_verify", "draft_extend")


def why_not() -> str | None:
    if DEVICE.type == "cuda":
        return "is about the interpreter"
    try:
        for module in (basic.KERNELS, kpool.MODULE, mtp.MANAGER, mtp.PRECOMPUTE):
            wheel.require(module)
    except UsageError as error:
        return f"needs sglang: {error}"
    return None


REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


def replay(name: str, preset: str, *, rounds: int | None = None, batches: Any = (4,), **settings: Any) -> RunResult:
    system = SYSTEMS[SUBJECTS[name].system]
    configs = diagnostic_matrix(
        system,
        system.geometry(preset, settings),
        rounds=rounds,
        batches=batches,
        drafts=[3] if system.drafts and batches else None,
        fixed=frozenset({*settings, OWN_TABLES, OF_OTHERS}),
    )
    run = new_result(system.name, f"sglang:{name}", backend())
    Runner(backend=backend(), folder=None, keep_going=True).matrix(configs, f"sglang:{name}", run)
    return run


def expect_equal(run: RunResult, rounds: int) -> None:
    assert [finding.sentence for finding in run.findings] == []
    assert (run.counts.rounds_checked, run.counts.mismatches, run.counts.guard_hits) == (rounds, 0, 0)


@pytest.mark.parametrize("view", ["plain", "strided"])
@pytest.mark.parametrize("name", NAMES)
def test_the_fused_kernels_are_right(name: str, view: str) -> None:
    run = replay(name, "tiny", rounds=5, input_view=view, context=131, request_rows=9)
    expect_equal(run, 5)
    assert set(run.provenance) >= {"sglang", basic.KERNELS, kpool.MODULE, "torch", "triton"}


@pytest.mark.parametrize("name", NAMES)
def test_the_fused_kernels_keep_to_the_rows_of_a_strided_table(name: str) -> None:
    expect_equal(replay(name, "tiny", rounds=3, table_view="strided", context=131, request_rows=9), 3)


@pytest.mark.parametrize("name", NAMES)
def test_the_pooled_kernels_and_the_write_plan_are_right(name: str) -> None:
    expect_equal(replay(name, "tiny_pool", rounds=4, input_view="plain", context=131, request_rows=9), 4)


def test_the_write_plan_takes_strided_inputs_for_adjacent() -> None:
    """Seen in `update_kpool_write_plan_cuda_graph`, which is handed no strides; engines hand over slices."""
    run = replay("target_verify", "tiny_pool", rounds=4, input_view="strided", context=131, request_rows=9)
    assert {finding.field for finding in run.findings} >= {"write_plan_req", "write_plan_write_start"}
    assert all(finding.field and finding.field.startswith("write_plan_") for finding in run.findings)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny", "tiny_pool"])
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_matrix_is_right(name: str, preset: str) -> None:
    settings = {"input_view": "plain"} if preset == "tiny_pool" else {}
    expect_equal(replay(name, preset, batches=None, **settings), 272)


# Draft steps ----------------------------------------------------------------------------------------------------------


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All memory from where `tensor` begins: what a kernel that is handed a bare address sees."""
    left = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((left,), (1,), tensor.storage_offset())


def _copy_rows(source: torch.Tensor, target: torch.Tensor, stride: int, rows: int, columns: int) -> None:
    for row in range(rows):
        _flat(target)[row * stride : row * stride + columns].copy_(_flat(source)[row * columns : (row + 1) * columns])


def copy_to_one(*arguments: Any) -> None:
    """Contract 2.2, mode 0, addresses included."""
    cache, sums, wide, dsa, _, dsa_sums, real = arguments[:7]
    to_cache, to_sums, to_wide, to_dsa, _, to_dsa_sums, to_real = arguments[9:16]
    mode, batch, width = arguments[18:21]
    assert mode == mtp.DECODE_MODE
    to_cache[:batch].copy_(cache[:batch])
    to_sums[1 : batch + 1].copy_(sums[1 : batch + 1])
    to_dsa[:batch].copy_(dsa[:batch])
    to_dsa_sums[1 : batch + 1].copy_(dsa_sums[1 : batch + 1])
    _copy_rows(wide.contiguous(), to_wide, to_wide.shape[1], batch, width)
    if real is not None:
        _copy_rows(real, to_real, to_real.stride(0), batch, real.shape[1])


def copy_to_three(*arguments: Any) -> None:
    """Contract 2.3."""
    cache, sums, wide, dsa, dsa_sums, real, *flash = arguments[:8]
    batch, width, size = arguments[-3:]
    for step in range(mtp.FUSED):
        to_cache, to_sums, to_wide, to_dsa, to_dsa_sums, to_real, *to_flash = arguments[8 + 8 * step : 16 + 8 * step]
        copy_to_one(
            *(cache, sums, wide, dsa, None, dsa_sums, real, *flash),
            *(to_cache, to_sums, to_wide, to_dsa, None, to_dsa_sums, to_real, *to_flash),
            *(mtp.DECODE_MODE, batch, width, width, size),
        )


def plan_topk(lengths: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    found = torch.zeros((len(lengths) + 1, 2), dtype=torch.int32) if out is None else out
    TopkPlanBuilder(PLAN_RULES["tiny"], lengths.device).update(lengths.contiguous(), found)
    return found


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's draft steps on a CPU: its copies, planner and schedules are replaced by restatements."""
    cpu = torch.device("cpu")
    real_attribute = wheel.attribute
    copies = ModuleType(mtp.COPIES)
    copies.fused_metadata_copy_cuda = copy_to_one  # type: ignore[attr-defined]
    copies.fused_metadata_copy_multi_cuda = copy_to_three  # type: ignore[attr-defined]
    planner = ModuleType(indexer.PLANNER)
    planner.plan_topk_v2 = plan_topk  # type: ignore[attr-defined]
    for module in (copies, planner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    manager = wheel.require(mtp.MANAGER)
    monkeypatch.setattr(manager, "is_cuda", lambda: True)
    monkeypatch.setattr(manager, "kpool_metadata_fusion_supported", lambda pool, *_: pool > 1)
    monkeypatch.setattr(
        manager, "fused_dsa_decode_metadata", real_attribute(basic.KERNELS, "fused_dsa_decode_metadata", cpu)
    )
    name = "fused_dsa_decode_metadata_kpool"
    pooled = wheel.require(f"{basic.POOLED_KERNELS}.decode")
    monkeypatch.setattr(pooled, name, real_attribute(f"{basic.POOLED_KERNELS}.decode", name, cpu))
    monkeypatch.setattr(wheel.require(mtp.PRECOMPUTE), "_is_cuda", True)
    monkeypatch.setattr(wheel, "need_gpu", lambda *_: None)
    monkeypatch.setattr(mtp, "compile_copies", lambda geometry: None)
    monkeypatch.setattr(indexer, "why_no_schedule", lambda device: None)
    monkeypatch.setattr(indexer, "why_no_plan", lambda device: None)
    monkeypatch.setattr(indexer.deep_gemm, "check_variant", lambda geometry, device: None)
    monkeypatch.setattr(indexer.deep_gemm, "refresh", lambda lens, out: build_schedule(lens, out, variant="tiny"))
    for check in ("dsa_verify.replay.setup.check_device", "dsa_verify.run.runner.check_device"):
        monkeypatch.setattr(check, lambda *_: None)
    for factory in (mtp._Steps, mtp.Copy):
        monkeypatch.setattr(factory, "provenance", staticmethod(dict))


SMALL: dict[str, Any] = {"context": 131, "request_rows": 9}
INDEXED: dict[str, Any] = {**SMALL, "pool_size": 1}


@pytest.mark.parametrize("steps", [2, 3])
def test_up_to_two_draft_steps_are_refreshed_in_full(without_a_gpu: None, steps: int) -> None:
    expect_equal(replay("mtp", "tiny_pool", rounds=4, draft_steps=steps, **INDEXED), 4)


def test_three_draft_steps_keep_their_schedules_and_plans(without_a_gpu: None) -> None:
    """Contract 2.3; the fourth step is copied to alone and right."""
    run = replay("mtp", "tiny_pool", rounds=4, draft_steps=5, **INDEXED)
    names = ("paged_mqa_schedule_metadata", "topk_v2_plan")
    assert {finding.field for finding in run.findings} == {f"step{step}_{name}" for step in range(3) for name in names}


@pytest.mark.parametrize("settings", [INDEXED, SMALL], ids=["one pool", "pools"])
def test_siblings_are_refreshed_in_full(without_a_gpu: None, settings: dict[str, Any]) -> None:
    expect_equal(replay("mtp_sibling", "tiny_pool", rounds=4, draft_steps=4, **settings), 4)


def test_a_page_size_of_1_has_one_table(without_a_gpu: None) -> None:
    expect_equal(replay("mtp", "tiny", rounds=3, page_size=1, **SMALL), 3)
    expect_equal(replay("mtp_copy", "tiny", rounds=3, page_size=1, **SMALL), 3)


def test_the_copies_alone_are_right_and_carry_nothing_else(without_a_gpu: None) -> None:
    run = replay("mtp_copy", "tiny_pool", rounds=3, draft_steps=5, **SMALL)
    expect_equal(run, 3)
    assert {name.partition("_")[2] for name in run.not_covered} >= {"topk_v2_plan", "write_plan_req"}


def test_the_copies_take_rows_for_adjacent(without_a_gpu: None) -> None:
    """Contract 2.2: the source of the real table, and the destination of the wide one."""
    run = replay("mtp_copy", "tiny", rounds=3, draft_steps=2, table_view="strided", **SMALL)
    assert {"step0_real_page_table", "step0_page_table_1"} <= {finding.field for finding in run.findings}
    assert run.counts.guard_hits > 0
