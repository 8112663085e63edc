"""On a GPU: SGLang's own DSV4, ragged-verify and decode-context-parallel functions at the size of real models in live
CUDA graphs, and each published defect of theirs, found from the subject's name alone."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.round import Round
from dsa_verify.graphs import open_backend
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.adapters import sglang
from dsa_verify.systems.catalogue import OF_OTHERS, SYSTEMS, resolve_geometry

needed = ("sglang", "msgspec", "tvm_ffi")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}"),
]
ROUNDS = 17


def found_by(name: str, batches: list[int], drafts: list[int] | None = None, **settings: object) -> list[Finding]:
    """The findings of each configuration that a run of the subject has, all of its rounds checked if there are none."""
    subject = sglang.SUBJECTS[name]
    system = SYSTEMS[subject.system]
    geometry, fixed = resolve_geometry(system, subject.name, "cuda", settings=settings)
    device = open_backend(torch.device("cuda", torch.cuda.current_device()), "cuda")
    found = []
    for config in diagnostic_matrix(
        system, geometry, rounds=ROUNDS, batches=batches, drafts=drafts if system.drafts else None, fixed=fixed
    ):
        counts = Counts()
        setup = ReplaySetup.make(system, config.geometry, config.buckets, 0, subject.name, None, device)
        findings = verify_rounds(setup, config.chunks(), counts, folder=None)
        assert counts.elements_compared
        assert findings or counts.rounds_checked == ROUNDS
        found += findings
    return found


def sentences(findings: list[Finding]) -> list[str]:
    return [finding.sentence for finding in findings]


@pytest.mark.parametrize("mode", ["decode", "verify", "draft_block"])
@pytest.mark.parametrize("name", ["padded", "padded_torch", "padded_low_ratios"])
def test_dsv4_metadata(name: str, mode: str) -> None:
    assert sentences(found_by(name, [16, 5], [2, 6], padded_mode=mode)) == []


@pytest.mark.parametrize("name", ["padded", "padded_torch"])
def test_dsv4_metadata_with_a_floor(name: str) -> None:
    assert sentences(found_by(name, [5], [4], padded_mode="draft_block", replay_floor=300)) == []
    assert sentences(found_by(name, [5], [4], padded_mode="decode", replay_floor=300)) == []


@pytest.mark.parametrize("mode", ["decode", "verify", "draft_block"])
@pytest.mark.parametrize("name", ["padded", "padded_torch"])
def test_dsv4_metadata_with_a_floor_of_each_request(name: str, mode: str) -> None:
    """A default of these subjects is that there is none, as the release before this one has no floors."""
    assert sentences(found_by(name, [16, 5], [2, 6], padded_mode=mode, request_floors=True)) == []


def test_draft_extend_keeps_lengths_below_0() -> None:
    """Of rows before a request's first token, pad rows among them (contract 7.1); the oracle stops at 0."""
    found = found_by("padded", [5], [4], padded_mode="draft_extend")
    assert [(each.field, each.diagnosis) for each in found] == [("swa_topk_lengths", Diagnosis.OUT_OF_RANGE)]


def test_every_raw_batch_of_dsv4() -> None:
    """As many rounds as the matrix has by default."""
    system = SYSTEMS["padded"]
    device = open_backend(torch.device("cuda", torch.cuda.current_device()), "cuda")
    for mode in ("decode", "verify", "draft_block"):
        geometry, _ = resolve_geometry(system, "sglang:padded", "cuda", settings={"padded_mode": mode})
        for config in diagnostic_matrix(system, geometry, drafts=[6], fixed=frozenset({"padded_mode", OF_OTHERS})):
            setup, counts = (
                ReplaySetup.make(system, config.geometry, config.buckets, 0, "sglang:padded", None, device),
                Counts(),
            )
            assert sentences(verify_rounds(setup, config.chunks(), counts, folder=None)) == []
            assert counts.rounds_checked == config.rounds > 60


def test_ragged_verify() -> None:
    assert sentences(found_by("ragged_verify", [4, 16], [2, 6])) == []


@pytest.mark.parametrize("name", ["dcp", "dcp_rope", "dcp_combine", "dcp_gather"])
def test_decode_context_parallelism(name: str) -> None:
    """D 1, 2, 3, 4 and 8."""
    assert sentences(found_by(name, [1, 4, 16, 48, 7])) == []


@pytest.mark.parametrize(
    "name, fields, says",
    [
        ("dcp_nope", {"rank0_kv_pool", "rank1_kv_pool"}, "(contract 8.2; 2 ranks)"),
        ("dcp_npu", {"rank0_packed", "rank1_packed"}, "that is right for the ids in float32"),
        ("dcp_columns", {"selected_slots"}, "as if they lay densely"),
        ("dcp_columns_far", {"selected_slots"}, "which 32 bits do not hold"),
        ("dcp_columns_far_tiled", {"selected_slots"}, "which 32 bits do not hold"),
        ("dcp_columns_far_extend", {"selected_slots"}, "which 32 bits do not hold"),
        ("dcp_mha_merge", {"merged_out", "merged_lse"}, "must not take the others' part of the merge with it"),
    ],
)
def test_published_defects(name: str, fields: set[str], says: str, much_memory: None) -> None:
    found = found_by(name, [16])
    assert {finding.field for finding in found} == fields
    assert any(says in finding.sentence for finding in found), sentences(found)


def test_the_torch_write_stores_slot_0() -> None:
    """Of a request without a token, whose slot is 0."""
    system = SYSTEMS["dcp"]
    geometry, _ = resolve_geometry(system, "sglang:dcp_nope_torch", "cuda", settings={"context": 4096})
    device = open_backend(torch.device("cuda", torch.cuda.current_device()), "cuda")
    setup = ReplaySetup.make(system, geometry, (4,), 0, "sglang:dcp_nope_torch", None, device)
    rounds = [Round(bucket=4, seq_lens=(9, 0, 17, 4), requests=(3, 4, 5, 6), seed=8)]
    found = verify_rounds(setup, [setup.table(rounds)], Counts(), folder=None)
    assert {finding.field for finding in found} == {"rank0_kv_pool"}
    assert "reserved for padding" in found[0].sentence
