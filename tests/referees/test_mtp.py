"""Draft steps: one record, fused copies, sibling copies, and the published gap (contract 2)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from referees.basic import expected
from referees.kpool import expected_views, expected_write_plan
from support import DEVICE, backend, slow_on_cpu

from dsa_verify.base.errors import UsageError
from dsa_verify.buffers.arena import Arena
from dsa_verify.buffers.region import LOUD_WORD
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.round import Round
from dsa_verify.contract.subject import Buffers
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.pipelines.mtp import Destination, Mtp, Sibling, fused_copy, sibling_refusal
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.systems.indexer import SCHEDULED_LENGTHS, WRITE_PLAN, scheduled_lengths
from dsa_verify.systems.mtp import destination_buffers

MTP = SYSTEMS["mtp"]
FIRST, SECOND = "paged_mqa_schedule_metadata", "topk_v2_plan"
ROUNDS = [
    Round(bucket=4, seq_lens=(9, 600, 17, 33), requests=(3, 4, 5, 6)),
    Round(bucket=4, seq_lens=(500, 1, 64), requests=(7, 8, 9), poison="plausible"),
    Round(bucket=4, seq_lens=(2, 3, 250, 4), requests=(4, 3, 6, 5), poison="stale", twice=True),
]


def setup_of(subject: object, **overrides: object) -> ReplaySetup:
    geometry = SYSTEMS["mtp"].geometry("tiny_pool", overrides)
    return ReplaySetup.make(MTP, geometry, (4,), 0, subject, None, backend())  # type: ignore[arg-type]


def targets_of(count: int, preset: str = "tiny_pool", **overrides: object) -> tuple[Arena, list[Buffers]]:
    geometry = SYSTEMS["mtp"].geometry(preset, {"draft_steps": count + 1, **overrides})
    arena = Arena([MTP.layout(geometry, 4)], DEVICE, LOUD_WORD)
    return arena, [destination_buffers(arena.at(4), step) for step in range(count)]


@pytest.mark.parametrize("preset", ["tiny", "tiny_pool"])
@pytest.mark.parametrize(
    "subject, draft_steps, form",
    [
        pytest.param("triton", 2, "plain", marks=slow_on_cpu),
        ("triton", 3, "offset"),
        pytest.param("triton", 4, "strided", marks=slow_on_cpu),
        pytest.param("triton", 5, "plain", marks=slow_on_cpu),
        ("sibling", 3, "strided"),
        pytest.param("sibling", 5, "plain", marks=slow_on_cpu),
    ],
)
def test_every_destination_is_right(subject: str, preset: str, draft_steps: int, form: str) -> None:
    """Two buckets, 4 and 1. The interpreter is slow, so here the form of the inputs turns with the steps."""
    geometry = SYSTEMS["mtp"].geometry(preset, {"draft_steps": draft_steps, "input_view": form})
    (config,) = diagnostic_matrix(MTP, geometry, batches=[4], rounds=3, fixed=frozenset({"input_view"}))
    setup, counts = ReplaySetup.make(MTP, config.geometry, config.buckets, 0, subject, None, backend()), Counts()
    assert verify_rounds(setup, config.chunks(), counts, folder=None) == []
    assert counts.rounds_checked == 3


@pytest.mark.parametrize(
    "subject, overrides",
    [
        (Mtp, {"page_size": 1, "pool_size": 1}),
        (Mtp, {"pool_size": 1, "wide_table": False}),
        (Sibling, {"pool_size": 1}),
        (Sibling, {"table_width": 17}),
    ],
    ids=str,
)
def test_odd_geometries(subject: type, overrides: dict[str, object]) -> None:
    setup, counts = setup_of(subject, draft_steps=3, **overrides), Counts()
    assert verify_rounds(setup, [setup.table(ROUNDS)], counts, folder=None) == []
    assert counts.rounds_checked == len(ROUNDS)


@pytest.mark.parametrize("subject", ["triton", "sibling"])
def test_the_referee_of_decode_agrees_with_each_destination(subject: str) -> None:
    setup = setup_of(subject, draft_steps=5)
    replayer, table, round_ = setup.open(1), setup.table(ROUNDS[:1]), ROUNDS[0]
    replayer.run(table)
    captured, geometry = replayer.buckets[4], setup.geometry
    slots = captured.inputs.req_to_token.cpu().numpy()
    want = expected("decode", geometry, round_.seq_lens, round_.requests, None, slots, 4)
    want |= expected_views("decode", geometry, round_.seq_lens, round_.requests, slots)
    plan = expected_write_plan("decode", geometry, round_.seq_lens, round_.requests, slots)
    want |= {WRITE_PLAN + name: value for name, value in plan.items()}
    for side in (captured.buffers, captured.oracle_buffers):
        for step in range(4):
            got = destination_buffers(side, step)
            for name, (values, live) in want.items():
                wrong = (got[name].cpu().numpy() != values) & live
                assert not wrong.any(), f"step {step}: {name}{np.argwhere(wrong)[0].tolist()}"


# The copy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_copy_writes_what_it_must_and_nothing_else(count: int, page_size: int) -> None:
    """Element 0 of the sums, dead columns, unpaged fields and the source stay as they are (contract 2.2)."""
    _, (source, *targets) = targets_of(count + 1, "tiny", page_size=page_size)
    lengths = torch.tensor([5, 203, 0, 8], dtype=torch.int32)
    for at, tensor in enumerate(source.values()):
        tensor.copy_((torch.arange(tensor.numel(), device=DEVICE) + 1000 * at).view(tensor.shape))
    source["cache_seqlens_int32"].copy_(lengths)
    before = {name: tensor.clone() for name, tensor in source.items()}
    fused_copy(source, targets)
    assert all(torch.equal(source[name], before[name]) for name in source)
    bound = lengths.to(DEVICE)[:, None]
    for target in targets:
        for name in ("cache_seqlens_int32", "dsa_cache_seqlens_int32", "dsa_seqlens_expanded"):
            assert torch.equal(target[name], source[name])
        for name in ("cu_seqlens_k", "dsa_cu_seqlens_k"):
            assert torch.equal(target[name][1:], source[name][1:])
            assert int(target[name][0]) == LOUD_WORD
        for name, step in (("page_table_1", 1), ("real_page_table", page_size)):
            live = torch.arange(source[name].shape[1], device=DEVICE)[None, :] * step < bound
            assert torch.equal(target[name], torch.where(live, source[name], LOUD_WORD))
        assert (target["cu_seqlens_q"] == LOUD_WORD).all()


def test_a_copy_follows_the_strides_of_its_source() -> None:
    """Published kernels read a table cut from a wider one at the wrong places (contract 2.2)."""
    _, (whole, target) = targets_of(2, "tiny")
    whole["cache_seqlens_int32"].fill_(203)
    tables = {}
    for name in ("page_table_1", "real_page_table"):
        rows, width = whole[name].shape
        wider = torch.arange(rows * (width + 5), dtype=torch.int32, device=DEVICE).view(rows, width + 5)
        tables[name] = wider[:, :width]
    fused_copy({**whole, **tables}, [target])
    assert all(torch.equal(target[name], table) for name, table in tables.items())


def test_a_copy_refuses_what_it_cannot_do() -> None:
    _, targets = targets_of(3, "tiny")
    with pytest.raises(UsageError, match="2 destinations in one copy; give 1 or 3"):
        fused_copy(targets[0], targets[1:])
    table = torch.empty((4, 999), dtype=torch.int32, device=DEVICE)
    targets[1]["page_table_1"] = table[:, : targets[1]["page_table_1"].shape[1]]
    with pytest.raises(UsageError, match=r"row strides .* differ"):
        fused_copy(targets[0], targets)


# The published gap ---------------------------------------------------------------------------------------------------


def test_the_published_gap_is_caught_as_a_fault() -> None:
    """Schedules and plans of the first three of four destinations; the fourth is refreshed (contract 2.3)."""
    geometry = SYSTEMS["mtp"].geometry("tiny_pool", {"draft_steps": 5})
    setup = ReplaySetup.make(MTP, geometry, (4,), 0, None, "stale_draft_steps", backend())
    rounds = [dataclasses.replace(round_, poison="stale") for round_ in ROUNDS]
    findings = verify_rounds(setup, [setup.table(rounds)], Counts(), folder=None)
    names = [name for name in (FIRST, SECOND) if f"step0_{name}" in MTP.layout(geometry, 4)]
    assert FIRST in names
    assert {finding.field for finding in findings} == {f"step{step}_{name}" for step in range(3) for name in names}
    assert {finding.diagnosis for finding in findings} <= {Diagnosis.STALE, Diagnosis.NEVER_WRITTEN}


def test_the_published_gap_needs_three_destinations() -> None:
    geometry = SYSTEMS["mtp"].geometry("tiny_pool", {"draft_steps": 3})
    with pytest.raises(UsageError, match="and draft_steps of 4 or more"):
        ReplaySetup.make(MTP, geometry, (4,), 0, None, "stale_draft_steps", backend())


class RewritesHeads(Mtp):
    """What the contract forbids: element 0 of a sum is written by the replay, and wrongly."""

    def in_graph(self) -> None:
        super().in_graph()
        self._targets[1]["cu_seqlens_k"][:1].fill_(1)


def test_element_0_of_a_sum_is_what_capture_wrote() -> None:
    setup = setup_of(Mtp)
    assert verify_rounds(setup, [setup.table(ROUNDS)], Counts(), folder=None) == []
    setup = setup_of(RewritesHeads)
    (finding, *_) = verify_rounds(setup, [setup.table(ROUNDS)], Counts(), folder=None)
    assert (finding.field, finding.got, finding.want) == ("step1_cu_seqlens_k", 1, 0)


def test_a_schedule_of_a_step_is_judged_by_the_lengths_of_that_step() -> None:
    assert scheduled_lengths(f"step2_{FIRST}") == ("step2_paged_mqa_ctx_lens_2d", False)
    assert scheduled_lengths("step0_real_page_table") is None
    for name, facts in SCHEDULED_LENGTHS.items():
        assert scheduled_lengths(name) == facts


# Sibling copies ------------------------------------------------------------------------------------------------------


def siblings(**overrides: object) -> tuple[Destination, Destination]:
    source, destination = (Destination.of(buffers) for buffers in targets_of(2, **overrides)[1])  # type: ignore[arg-type]
    source.fresh = True
    return source, destination


def test_an_eligible_sibling_is_not_refused() -> None:
    assert sibling_refusal(*siblings()) is None
    assert sibling_refusal(*siblings(preset="tiny")) is None


def test_a_stale_source_or_another_mode_is_refused() -> None:
    source, destination = siblings()
    source.fresh = False
    assert "not been refreshed" in str(sibling_refusal(source, destination))
    source.fresh = True
    assert "same backend" in str(sibling_refusal(source, source))
    assert "mode target_verify" in str(sibling_refusal(source, dataclasses.replace(destination, mode="target_verify")))


@pytest.mark.parametrize("name", [FIRST, "pooled_real_page_table", WRITE_PLAN + "write_loc"])
@pytest.mark.parametrize("without", [0, 1])
def test_a_different_pattern_of_optional_fields_is_refused(name: str, without: int) -> None:
    pair = siblings()
    del pair[without].buffers[name]
    assert sibling_refusal(*pair) == f"only the {('destination', 'source')[without]} has {name}"


def test_a_write_plan_held_by_both_is_refused() -> None:
    source, destination = siblings()
    same = dataclasses.replace(destination, write_plan=source.write_plan)
    assert sibling_refusal(source, same) == "both hold the same write plan object"
    copied = dataclasses.replace(destination, write_plan=dict(source.write_plan))
    assert "both write plans hold the same write_plan_" in str(sibling_refusal(source, copied))


def test_a_missing_context_length_buffer_is_no_reason() -> None:
    source, destination = siblings()
    del destination.buffers["paged_mqa_ctx_lens_2d"]
    assert sibling_refusal(source, destination) is None


class SharedPlan(Sibling):
    """Refused for every destination, which must then be right all the same."""

    def allocate(self, *arguments: object) -> None:
        super().allocate(*arguments)  # type: ignore[arg-type]
        for destination in self._destinations[1:]:
            destination.write_plan = self._destinations[0].write_plan


def test_a_refused_sibling_is_recomputed() -> None:
    setup = setup_of(SharedPlan, draft_steps=3)
    assert verify_rounds(setup, [setup.table(ROUNDS)], Counts(), folder=None) == []
