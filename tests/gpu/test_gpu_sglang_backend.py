"""On a GPU: SGLang's whole attention backends at the size of real models, with DeepGEMM's schedules and SGLang's own
CUDA kernels for plans and copies, which are compiled at first use (half a minute each)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest
import torch

from dsa_verify.contract.finding import Finding
from dsa_verify.contract.subject import load_attribute
from dsa_verify.contract.system import OWN_TABLES
from dsa_verify.graphs import open_backend
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.systems.catalogue import OF_OTHERS, OF_THE_SUBJECT, SYSTEMS

PACKAGE = "dsa_verify.subjects.adapters.sglang"
SUBJECTS = {
    "decode": f"{PACKAGE}.backend:DecodeBackend",
    "target_verify": f"{PACKAGE}.backend:TargetVerifyBackend",
    "draft_extend": f"{PACKAGE}.backend:DraftExtendBackend",
    "mtp": f"{PACKAGE}.backend_mtp:MtpBackend",
    "padded": f"{PACKAGE}.backend_padded:PaddedBackend",
}
missing = [
    name for name in ("sglang", "msgspec", "transformers", "tvm_ffi", "deep_gemm") if not importlib.util.find_spec(name)
]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}"),
]
# With 32 requests all of which may be empty, which DeepGEMM must not be given (contract 3.6).
DECODE_BATCHES = (1, 4, 32, 48)
BATCHES, DRAFTS = (1, 16, 48), (2, 6)


def found_by_matrix(
    system: str,
    preset: str,
    batches: Sequence[int],
    drafts: Sequence[int] = (1,),
    rounds: int | None = None,
    fixed: frozenset[str] = frozenset(),
    **overrides: object,
) -> list[Finding]:
    """All findings of the configurations, every round of which was checked without compiling after the warm-up."""
    geometry = SYSTEMS[system].geometry(preset, overrides)
    device = open_backend(torch.device("cuda", torch.cuda.current_device()), "cuda")
    findings = []
    fixed = fixed | OF_THE_SUBJECT | {OWN_TABLES, OF_OTHERS}
    for config in diagnostic_matrix(
        SYSTEMS[system], geometry, batches=batches, drafts=drafts, rounds=rounds, fixed=fixed
    ):
        subject, counts = load_attribute(SUBJECTS[system]), Counts()
        setup = ReplaySetup.make(SYSTEMS[system], config.geometry, config.buckets, 0, subject, None, device)
        found = verify_rounds(setup, config.chunks(), counts, folder=None)
        assert found or counts.rounds_checked == config.rounds
        assert counts.compilations_after_warmup == 0
        findings += found
    return findings


def sentences(findings: Sequence[Finding]) -> list[str]:
    return [finding.sentence for finding in findings]


@pytest.mark.parametrize("preset", ["deepseek_v32", "glm53_flash"])
class TestTheDsaBackend:
    def test_decode(self, preset: str) -> None:
        assert sentences(found_by_matrix("decode", preset, DECODE_BATCHES, indexer=True)) == []

    @pytest.mark.parametrize("system", ["target_verify", "draft_extend"])
    def test_drafts(self, system: str, preset: str) -> None:
        assert sentences(found_by_matrix(system, preset, BATCHES, DRAFTS, indexer=True)) == []

    def test_random_rounds_of_two_batch_sizes_by_turns(self, preset: str) -> None:
        sizes = {"indexer": True, "context": 8192}
        assert sentences(found_by_matrix("target_verify", preset, (16,), (4,), 600, **sizes)) == []


def test_decode_without_the_wide_table() -> None:
    assert sentences(found_by_matrix("decode", "deepseek_v32", (4, 48), indexer=True, wide_table=False)) == []


class TestTheDraftSteps:
    def test_pooled_ones_are_all_fresh(self) -> None:
        assert sentences(found_by_matrix("mtp", "glm53_flash", (4, 48), draft_steps=5)) == []

    def test_the_published_gap_and_no_other(self) -> None:
        """Contract 2.3: the schedule, and where one is written the plan, of the first three steps."""
        sizes = {"indexer": True, "draft_steps": 5}
        findings = found_by_matrix("mtp", "deepseek_v32", (48,), **sizes)
        names = ("paged_mqa_schedule_metadata", "topk_v2_plan")
        assert {finding.field for finding in findings} == {f"step{i}_{name}" for i in range(3) for name in names}

    def test_two_steps_have_no_gap(self) -> None:
        sizes = {"indexer": True, "draft_steps": 3}
        assert sentences(found_by_matrix("mtp", "deepseek_v32", (48,), **sizes)) == []


# The published backend has one floor for all requests.
MODE = frozenset({"padded_mode", "request_floors"})


class TestTheV4Backend:
    @pytest.mark.parametrize("low_ratios", [False, True], ids=["", "low"])
    @pytest.mark.parametrize("mode", ["decode", "verify", "draft_block"])
    def test_agrees(self, mode: str, low_ratios: bool) -> None:
        sizes = {"padded_mode": mode, "low_ratios": low_ratios}
        assert sentences(found_by_matrix("padded", "deepseek_v4", (48, 14), DRAFTS, fixed=MODE, **sizes)) == []

    def test_pad_rows_of_draft_extend_have_lengths_below_zero(self) -> None:
        findings = found_by_matrix("padded", "deepseek_v4", (48, 14), (4,), fixed=MODE, padded_mode="draft_extend")
        assert {finding.field for finding in findings} == {"swa_topk_lengths"}


def test_on_a_device_no_kernel_is_stood_in_for() -> None:
    stubs = load_attribute(f"{PACKAGE}.backend_stubs:CPU_ANSWERS")
    for reference in SUBJECTS.values():
        found = load_attribute(reference).provenance()
        assert found["capability"].startswith("sm")
        assert not set(stubs.split(", ")) & set(found["stand-ins"].split(", "))
