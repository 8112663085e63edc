"""When schedules are refreshed: in the graph, before it, or eagerly from the raw lengths (contract 3.4, 3.7)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import pytest
import torch
from support import slow_on_cpu

from dsa_verify.buffers.region import LOUD_WORD
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.schedule_variants import VARIANTS, Placement, ScheduleVariant
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.graphs import open_backend
from dsa_verify.judge.law_regions import scheduled
from dsa_verify.judge.schedule_laws import Law
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.pipelines.schedule_life import OutOfGraph, Residual
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.systems.indexer import SCHEDULED_LENGTHS, WRITE_PLAN
from oracles.schedule import schedule

DEVICE = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
LIVES = ("triton", "out_of_graph", "cached", "residual")
VERIFY = SYSTEMS["target_verify"]
FULL, POOLED = "paged_mqa_schedule_metadata", WRITE_PLAN + "pool_schedule_metadata"
# Long after short and short after long: a stale schedule is wrong in both.
ROUNDS = [
    Round(bucket=4, seq_lens=(9, 600, 17, 33), requests=(3, 4, 5, 6)),
    Round(bucket=4, seq_lens=(500, 1, 64), requests=(7, 8, 9)),
    Round(bucket=4, seq_lens=(2, 3, 250, 4), requests=(4, 3, 6, 5)),
]


def setup_of(subject: object, preset: str = "tiny_pool", **overrides: object) -> ReplaySetup:
    geometry = Geometry.resolve(preset, {"draft_tokens": 3, **overrides})
    return ReplaySetup.make(VERIFY, geometry, (4,), 0, subject, None, open_backend(DEVICE))  # type: ignore[arg-type]


@pytest.mark.parametrize("subject", LIVES)
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        pytest.param({"pool_size": 1}, marks=slow_on_cpu),
        {"architecture": 100},
        pytest.param({"pool_size": 2}, marks=slow_on_cpu),
    ],
    ids=str,
)
def test_each_life_is_right(subject: str, overrides: dict[str, object]) -> None:
    setup, counts = setup_of(subject, **overrides), Counts()
    assert verify_rounds(setup, [setup.table(ROUNDS)], counts, folder=None) == []
    assert counts.rounds_checked == len(ROUNDS)


class ResidualFromCaptured(Residual):
    """The regression: eagerly, but from the captured lengths, which are still those of the replay before."""

    def before_replay(self) -> None:
        for name in self._metadata.schedule_names:
            self._metadata.refresh_schedule(name, self._buffers[name])


def test_the_residual_is_right_before_the_graph_while_the_rest_is_poison() -> None:
    """Old metadata is poisoned; both schedules must be right already, everything else must not be."""
    setup = setup_of("residual")
    replayer = setup.open(len(ROUNDS))
    captured = replayer.buckets[4]
    replayer.input_buffers.upload(setup.table(ROUNDS))
    addresses = {name: tensor.data_ptr() for name, tensor in captured.buffers.items()}
    for _ in ROUNDS:
        captured.prepare()
        captured.oracle_graph.replay()
        captured.subject.before_replay()
        for name in (FULL, POOLED):
            assert torch.equal(captured.buffers[name], captured.oracle_buffers[name]), name
        for name in ("dsa_seqlens_expanded", "paged_mqa_ctx_lens_2d", WRITE_PLAN + "pool_seqlens_per_q"):
            assert (captured.buffers[name] == LOUD_WORD).all(), name
        captured.subject_graph.replay()
        for name in (
            FULL,
            POOLED,
            "dsa_seqlens_expanded",
            WRITE_PLAN + "pool_seqlens_per_q",
            WRITE_PLAN + "write_start",
        ):
            assert torch.equal(captured.buffers[name], captured.oracle_buffers[name]), name
    assert {name: tensor.data_ptr() for name, tensor in captured.buffers.items()} == addresses


def test_a_residual_from_captured_lengths_is_caught_before_the_graph() -> None:
    findings = confirm(setup_of(ResidualFromCaptured), ROUNDS)
    assert {finding.field for finding in findings} == {FULL, POOLED}
    assert all(finding.sentence.startswith("before the graph replays: ") for finding in findings)


def test_a_schedule_finding_says_what_becomes_of_the_tiles() -> None:
    setup = ReplaySetup.make(
        VERIFY, setup_of("triton").geometry, (4,), 0, "triton", f"not_refreshed:{FULL}", open_backend(DEVICE)
    )
    (finding,) = confirm(setup, [dataclasses.replace(round_, poison="stale") for round_ in ROUNDS])
    assert finding.diagnosis is Diagnosis.STALE
    law = finding.sentence.partition("still holds; ")[2]
    assert re.search(r"SM \d+|row \d+", law), finding.sentence


@pytest.mark.parametrize(
    "subject", [life if life == "cached" else pytest.param(life, marks=slow_on_cpu) for life in LIVES]
)
def test_the_matrix_has_every_life(subject: str) -> None:
    """One configuration here; all sixteen on a GPU."""
    for config in diagnostic_matrix(VERIFY, Geometry.resolve("tiny_pool"), batches=[4], drafts=[2], rounds=9):
        setup = ReplaySetup.make(VERIFY, config.geometry, config.buckets, 0, subject, None, open_backend(DEVICE))
        assert verify_rounds(setup, config.chunks(), Counts(), folder=None) == []


def test_the_lengths_of_every_schedule_are_fields() -> None:
    for system in (SYSTEMS[name] for name in ("decode", "target_verify", "draft_extend", "mtp")):
        layout = system.layout(system.geometry("tiny_pool", {"draft_tokens": 3 if system.drafts else 1}), 4)
        for name, (lengths, _) in SCHEDULED_LENGTHS.items():
            assert name not in layout or lengths in layout


# Laws while rounds run -----------------------------------------------------------------------------------------------


def leading(variant: ScheduleVariant, lengths: torch.Tensor, multiprocessors: int, out: torch.Tensor) -> None:
    """The schedule of another variant: its remainder goes to the first SMs instead of the last."""
    other = "V4" if variant.placement is Placement.TAIL else "V4b"
    schedule(dataclasses.replace(VARIANTS[other], split=variant.split), lengths, multiprocessors, out)


class Leading(OutOfGraph):
    def before_replay(self) -> None:
        super().before_replay()
        for name in self._metadata.schedule_names:
            lengths, clamped = SCHEDULED_LENGTHS[name]
            variant = VARIANTS[self._geometry.schedule]
            form = scheduled(variant, self._buffers[lengths], clamped)
            leading(variant, form, self._geometry.multiprocessors, self._buffers[name])


def test_a_law_sees_what_subject_and_oracle_agree_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both build the same wrong schedule: no comparison can tell, the law does, and names the SM."""
    monkeypatch.setattr("oracles.indexer.schedule", leading)
    setup = setup_of(Leading)
    findings = verify_rounds(setup, [setup.table(ROUNDS)], Counts(), folder=None)
    assert {finding.diagnosis for finding in findings} == {Diagnosis.LAW_BROKEN}
    assert {finding.contract for finding in findings} == {("docs/contract/3-schedule.md#3.5",)}
    assert {finding.field for finding in findings} <= {FULL, POOLED}
    assert {finding.law for finding in findings} <= {Law.PLACEMENT.value, Law.EMPTY.value}
    assert all(re.search(r"SM \d+|row \d+", finding.sentence) for finding in findings)


class Strided(OutOfGraph):
    """A right schedule, but in rows of four words."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.own = {**buffers, POOLED: torch.zeros_like(buffers[POOLED]).repeat(1, 2)[:, :2]}

    def before_replay(self) -> None:
        super().before_replay()
        self.own[POOLED].copy_(self._buffers[POOLED])

    def outputs(self) -> Mapping[str, torch.Tensor]:
        return self.own


def test_a_schedule_that_is_not_contiguous_is_refused() -> None:
    """Law 7 of contract 3.5; without it the other laws could not be looked at either."""
    setup = setup_of(Strided)
    (finding,) = verify_rounds(setup, [setup.table(ROUNDS)], Counts(), folder=None)
    assert finding.diagnosis is Diagnosis.WRONG_OUTPUTS
    assert finding.sentence == (
        f"wrong outputs: bucket 4: {POOLED} has strides [4, 1]; DeepGEMM needs it contiguous, with strides [2, 1] "
        "(contract 4.2; rows of 8 bytes, contiguous: contract 3.1 and 3.5)"
    )
