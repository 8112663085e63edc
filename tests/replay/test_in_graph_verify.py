"""In-graph verify: eligibility, the published state, and the identity of the static inputs (contract 6)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from support import DEVICE, backend

from dsa_verify.base.errors import CaptureError, UsageError
from dsa_verify.buffers.region import LOUD_WORD
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.subject import Buffers
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.graphs import Graph
from dsa_verify.judge.judge import Phase
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.pipelines.in_graph_verify import (
    AttentionFlags,
    Engine,
    Facts,
    InGraphResidualSubject,
    InGraphSubject,
    InGraphVerify,
    StaticBufferError,
    ineligibility,
)
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.systems.indexer import WRITE_PLAN

VERIFY = SYSTEMS["target_verify"]
FULL, POOLED = "paged_mqa_schedule_metadata", WRITE_PLAN + "pool_schedule_metadata"
INPUTS = ("seq_lens", "req_pool_indices")
# Long after short and short after long, in two batch sizes by turns; every schedule and table changes in every round.
ROUNDS = [
    Round(bucket=4, seq_lens=(9, 600, 17, 33), requests=(3, 4, 5, 6)),
    Round(bucket=2, seq_lens=(500, 64), requests=(7, 8), poison="plausible"),
    Round(bucket=4, seq_lens=(500, 1, 64), requests=(7, 8, 9), poison="stale"),
    Round(bucket=2, seq_lens=(3, 250), requests=(8, 3)),
]
WIDE = [round_ for round_ in ROUNDS if round_.bucket == 4]


def nothing() -> None:
    pass


class Idle:
    """Holds the place of a subject while a test plays the engine."""

    name = "idle"

    def allocate(self, *_: object) -> None:
        pass

    before_replay = in_graph = staticmethod(nothing)


class Bench:
    """An engine in miniature: static inputs and buffers of two batch sizes, beside the oracle and the judge."""

    def __init__(self, *, residual: bool = False, engine: Engine | None = None, **overrides: object):
        self.geometry = Geometry.resolve("tiny_pool", {"draft_tokens": 3, **overrides})
        self._setup = ReplaySetup.make(VERIFY, self.geometry, (4, 2), 0, Idle, None, backend())  # type: ignore[arg-type]
        self._replayer = self._setup.open(len(ROUNDS))
        self.buckets, self.backend = self._replayer.buckets, self._setup.backend
        wide = self.buckets[4]
        self.inputs = {name: getattr(wide.inputs, name) for name in INPUTS}
        self.verify = InGraphVerify(wide.inputs.req_to_token, engine=engine, residual=residual)
        for captured in self.buckets.values():
            self.verify.register(captured.buffers)
        self.graphs: dict[int, Graph] = {}

    def capture(self, bs: int, model: Callable[[], None] = nothing, **inputs: torch.Tensor) -> None:
        self.graphs[bs] = self.verify.capture(bs, **{**self.inputs, **inputs}, model=model, backend=self.backend)

    def play(
        self,
        rounds: Sequence[Round],
        *,
        before_graph: Callable[[int], None] | None = None,
        **inputs: torch.Tensor,
    ) -> int:
        """How many words are wrong after `rounds`, replayed with `inputs` instead of the static ones where given."""
        self._replayer.input_buffers.upload(self._setup.table(rounds))
        before = self._wrong()
        for round_ in rounds:
            captured = self.buckets[round_.bucket]
            captured.prepare()
            for name, tensor in inputs.items():
                tensor.copy_(self.inputs[name])
            captured.oracle_graph.replay()
            self.verify.before_replay(round_.bucket, **{**self.inputs, **inputs})
            if before_graph is not None:
                before_graph(round_.bucket)
            self.graphs[round_.bucket].replay()
            captured.judge_replay(Phase.REPLAY)
        return self._wrong() - before

    def _wrong(self) -> int:
        return sum(tally.count() for tally in self._replayer.poll().values())

    def published(self, bs: int = 4) -> bool:
        return self.verify.metadata[bs].state is not None


# Eligibility ---------------------------------------------------------------------------------------------------------

ELIGIBLE = Facts(
    engine=Engine(),
    mode="target_verify",
    bs=4,
    captured=True,
    pool_size=4,
    draft_tokens=3,
    architecture=90,
    schedule=True,
    context_lens=True,
    context_lens_per_request=False,
    expanded_contiguous=True,
)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"engine": Engine(enabled=False)}, "switched off"),
        ({"engine": Engine(platform="hip")}, "platform is hip"),
        ({"engine": Engine(dcp_size=2)}, "parallelism over 2 ranks"),
        ({"engine": Engine(pooled_fusion=False)}, "pool_size is 4 and its fusion is off"),
        ({"engine": Engine(decode_implementation="flashmla_kv")}, "implementation is flashmla_kv"),
        ({"mode": "draft_extend"}, "mode is draft_extend"),
        ({"captured": False}, "no metadata is captured for bs 4"),
        ({"schedule": False}, f"bs 4 has no {FULL}"),
        ({"draft_tokens": 0}, "draft_tokens is 0"),
        ({"architecture": 100}, r"of its own of shape \[4, 3\]"),
        ({"architecture": 100, "draft_tokens": 2}, r"of its own of shape \[4, 2\]"),
        ({"expanded_contiguous": False}, "dsa_seqlens_expanded of bs 4 is not contiguous"),
        ({"context_lens": False}, "bs 4 has no paged_mqa_ctx_lens_2d"),
        # Not conditions: none of these keeps a batch size out.
        ({}, None),
        ({"engine": Engine(pooled_fusion=False), "pool_size": 1}, None),
        ({"architecture": 100, "draft_tokens": 1}, None),
        ({"architecture": 100, "context_lens_per_request": True}, None),
    ],
    ids=str,
)
def test_each_condition_alone(changes: dict[str, object], reason: str | None) -> None:
    got = ineligibility(dataclasses.replace(ELIGIBLE, **changes))  # type: ignore[arg-type]
    assert got is None if reason is None else re.search(reason, str(got)), got


def buffers_of(**overrides: object) -> Buffers:
    geometry = Geometry.resolve("tiny_pool", {"draft_tokens": 3, **overrides})
    layout = VERIFY.layout(geometry, 4)
    dtypes = {"int32": torch.int32, "int64": torch.int64}
    tensors = {f.name: torch.zeros(f.shape, dtype=dtypes[f.dtype]) for f in layout if f.alias is None}
    tensors |= {f.name: tensors[f.alias].view(f.shape) for f in layout if f.alias is not None}
    return Buffers(layout, tensors)


@pytest.mark.parametrize(
    "overrides, name, tensor, reason",
    [
        ({}, FULL, None, f"no {FULL}"),
        ({}, "paged_mqa_ctx_lens_2d", None, "no paged_mqa_ctx_lens_2d"),
        ({}, "dsa_seqlens_expanded", torch.zeros(24, dtype=torch.int32)[::2], "not contiguous"),
        ({"architecture": 100}, "paged_mqa_ctx_lens_2d", torch.zeros(12, 1, dtype=torch.int32), "architecture 100"),
        ({"architecture": 100}, "dsa_seqlens_expanded", "paged_mqa_ctx_lens_2d", "architecture 100"),
        ({"architecture": 100}, "", None, None),
        ({"pool_size": 1}, "", None, None),
    ],
    ids=str,
)
def test_facts_are_read_from_the_captured_buffers(
    overrides: dict[str, object], name: str, tensor: torch.Tensor | str | None, reason: str | None
) -> None:
    buffers = buffers_of(**overrides)
    if isinstance(tensor, str):
        buffers[name] = buffers[tensor].view(buffers[name].shape)  # one buffer for both
    elif tensor is not None:
        buffers[name] = tensor
    elif name:
        del buffers[name]
    verify = InGraphVerify(torch.zeros(1, 1, dtype=torch.int32))
    assert "no metadata is captured" in str(verify.eligibility(4))
    verify.register(buffers)
    got = verify.eligibility(4)
    assert got is None if reason is None else reason in str(got), got
    assert "mode is decode" in str(verify.eligibility(4, "decode"))


def test_only_buffers_of_target_verify_are_registered() -> None:
    decode = SYSTEMS["decode"].layout(Geometry.resolve("tiny"), 4)
    with pytest.raises(UsageError, match="of decode, not target_verify"):
        InGraphVerify(torch.zeros(1, 1)).register(Buffers(decode, {}))


# Replays -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "residual, draft_tokens, form", [(False, 2, "offset"), (False, 3, "strided"), (True, 2, "strided")]
)
def test_live_graphs_of_two_batch_sizes_are_right(residual: bool, draft_tokens: int, form: str) -> None:
    bench = Bench(residual=residual, draft_tokens=draft_tokens, input_view=form)
    for bs in (4, 2):
        bench.capture(bs)
    addresses = {(bs, n): t.data_ptr() for bs, captured in bench.buckets.items() for n, t in captured.buffers.items()}
    assert bench.play(ROUNDS) == 0
    assert bench.published(4)
    assert bench.published(2)
    assert addresses == {
        (bs, n): t.data_ptr() for bs, captured in bench.buckets.items() for n, t in captured.buffers.items()
    }


@pytest.mark.parametrize("residual", [False, True])
def test_before_the_graph_nothing_is_refreshed_but_the_residual(residual: bool) -> None:
    """Captured tensors legitimately hold what they held; here a poison that no valid value equals."""
    bench = Bench(residual=residual)
    bench.capture(4)

    def look(bs: int) -> None:
        captured = bench.buckets[bs]
        for name in (FULL, POOLED):
            right = torch.equal(captured.buffers[name], captured.oracle_buffers[name])
            assert right if residual else (captured.buffers[name] == LOUD_WORD).all(), name
        for name in ("cache_seqlens_int32", "dsa_seqlens_expanded", WRITE_PLAN + "pool_seqlens_per_q"):
            assert (captured.buffers[name] == LOUD_WORD).all(), name

    rounds = [dataclasses.replace(round_, poison="loud") for round_ in WIDE]
    assert bench.play(rounds, before_graph=look) == 0


def test_views_of_the_static_inputs_are_the_static_inputs() -> None:
    """With which the graph refreshes everything, and nothing is refreshed before it."""
    bench = Bench(pool_size=1)
    bench.capture(4)
    lens, requests = (bench.inputs[name] for name in INPUTS)
    buffers = bench.buckets[4].buffers
    for pair in ((lens[:], requests.view(-1)), (lens[:2], requests[:2]), (lens.detach(), requests[:4])):
        for tensor in buffers.values():
            tensor.fill_(LOUD_WORD)
        bench.verify.before_replay(4, *pair)
        assert bench.verify.forward_metadata is buffers
        assert [name for name, tensor in buffers.items() if not (tensor == LOUD_WORD).all()] == []


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(
    "other, differs",
    [
        (torch.clone, r"address 0x[0-9a-f]+ became 0x[0-9a-f]+;"),
        (lambda tensor: tensor[1:], r"address 0x[0-9a-f]+ became 0x[0-9a-f]+;"),
        (lambda tensor: tensor[::2], r"stride 1 became 2;"),
        (lambda tensor: tensor[1::2], r"address 0x[0-9a-f]+ became 0x[0-9a-f]+ and stride 1 became 2;"),
    ],
    ids=["clone", "other base", "other stride", "both"],
)
def test_other_inputs_are_refused_by_name(
    captured: Bench, name: str, other: Callable[[torch.Tensor], torch.Tensor], differs: str
) -> None:
    handed = {**captured.inputs, name: other(captured.inputs[name])}
    before = {key: tensor.clone() for key, tensor in captured.buckets[4].buffers.items()}
    captured.verify.forward_metadata = None
    with pytest.raises(StaticBufferError, match=f"static buffers it captured: {name}: {differs}") as refused:
        captured.verify.before_replay(4, **handed)
    assert isinstance(refused.value, RuntimeError)
    assert "copy the values into the static buffers, or capture bs 4 again" in str(refused.value)
    (unchanged,) = set(INPUTS) - {name}
    assert unchanged not in str(refused.value)
    # No fallback: nothing was refreshed and nothing is handed on.
    assert all(torch.equal(tensor, before[key]) for key, tensor in captured.buckets[4].buffers.items())
    assert captured.verify.forward_metadata is None
    assert captured.published()


@pytest.fixture(scope="module")
def captured() -> Bench:
    bench = Bench(pool_size=1)
    bench.capture(4)
    return bench


def test_both_inputs_are_named_where_both_differ(captured: Bench) -> None:
    clones = {name: tensor.clone() for name, tensor in captured.inputs.items()}
    with pytest.raises(StaticBufferError, match=r"seq_lens: address .*; req_pool_indices: address "):
        captured.verify.before_replay(4, **clones)


def test_a_replay_restores_the_flags_of_its_capture(captured: Bench) -> None:
    flags, other = captured.verify.attention, AttentionFlags(use_mha=True, prefill_implementation="other")
    captured.verify.attention = other
    captured.verify.before_replay(4, **captured.inputs)
    assert captured.verify.attention == flags != other
    assert captured.verify.forward_metadata is captured.buckets[4].buffers


# Without a state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [Engine(enabled=False), Engine(pooled_fusion=False)], ids=["off", "unfused"])
def test_an_ineligible_batch_size_takes_the_generic_path(engine: Engine) -> None:
    """With any inputs, the static ones or others, and everything in place before the graph."""
    bench = Bench(engine=engine)
    bench.capture(4)
    assert not bench.published()
    others = {name: tensor.repeat_interleave(2)[::2] for name, tensor in bench.inputs.items()}

    def spoil(bs: int) -> None:
        for tensor in others.values():
            tensor.zero_()  # too late: the graph holds no metadata work that could read it

    assert bench.play(WIDE[:1]) == 0
    assert bench.play(WIDE, before_graph=spoil, **others) == 0
    assert bench.verify.forward_metadata is bench.buckets[4].buffers


def test_a_geometry_without_the_indexer_takes_the_generic_path() -> None:
    bench = Bench(pool_size=1, indexer=False)
    bench.capture(4)
    assert not bench.published()
    assert bench.play(WIDE) == 0


def test_a_replaced_record_takes_the_generic_path() -> None:
    bench = Bench(pool_size=1)
    bench.capture(4)
    clones = {name: tensor.clone() for name, tensor in bench.inputs.items()}
    records = bench.verify.metadata
    records[4] = dataclasses.replace(records[4])
    assert not bench.published()
    bench.graphs[4] = bench.backend.capture(nothing)
    assert bench.play(WIDE, **clones) == 0
    bench.capture(4)
    assert bench.published()
    bench.verify.register(bench.buckets[4].buffers)
    assert not bench.published()


def test_the_old_graph_of_a_replaced_record_can_still_be_replayed() -> None:
    """What it recorded lives as long as it does, although its state is gone."""
    bench = Bench(pool_size=1)
    bench.capture(4)
    bench.verify.register(bench.buckets[4].buffers)
    assert bench.play(WIDE) == 0


def test_a_batch_size_without_a_record_is_refused() -> None:
    verify = InGraphVerify(torch.zeros(1, 1, dtype=torch.int32))
    lengths = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(UsageError, match="bs: 4 has no metadata record; known batch sizes: none"):
        verify.before_replay(4, lengths, lengths)


def test_fewer_rows_than_the_batch_are_refused_where_they_would_be_read() -> None:
    bench = Bench(pool_size=1)
    lens, requests = (bench.inputs[name] for name in INPUTS)
    with pytest.raises(UsageError, match="req_pool_indices: 3 rows are fewer than bs 4"):
        bench.verify.before_replay(4, lens, requests[:3])


# Recapture -----------------------------------------------------------------------------------------------------------


def test_after_a_recapture_only_the_new_buffers_are_static() -> None:
    bench = Bench(residual=True)
    bench.capture(4)
    new = {name: tensor.clone() for name, tensor in bench.inputs.items()}
    bench.capture(4, **new)
    assert bench.play(WIDE, **new) == 0
    for name, tensor in bench.inputs.items():
        with pytest.raises(StaticBufferError, match=f"captured: {name}: address"):
            bench.verify.before_replay(4, **{**new, name: tensor})
    bench.capture(4)
    assert bench.play(WIDE[:1]) == 0


def test_a_recapture_that_fails_leaves_no_state() -> None:
    """The failure comes after the metadata was recorded; both old and new inputs are generic then."""
    bench = Bench(pool_size=1)
    bench.capture(4)
    new = {name: tensor.clone() for name, tensor in bench.inputs.items()}

    def fail() -> None:
        raise ValueError("out of workspace")

    with pytest.raises(CaptureError, match="out of workspace"):
        bench.capture(4, fail, **new)
    assert not bench.published()
    bench.graphs[4] = bench.backend.capture(nothing)
    assert bench.play(WIDE[:1], **new) == 0
    assert bench.play(WIDE[:1]) == 0


def test_the_state_is_gone_before_anything_of_a_recapture_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(pool_size=1)
    bench.capture(4)
    seen = []

    def fail(*_: object) -> str:
        seen.append(bench.published())
        raise ValueError("no facts today")

    monkeypatch.setattr(bench.verify, "eligibility", fail)
    with pytest.raises(ValueError, match="no facts today"):
        bench.capture(4)
    assert seen == [False]
    assert not bench.published()


@pytest.mark.parametrize("why", ["mode", "buffers"])
def test_an_ineligible_recapture_leaves_no_state(why: str) -> None:
    bench = Bench(pool_size=1)
    bench.capture(4)
    if why == "mode":
        bench.verify.capture(4, **bench.inputs, model=nothing, backend=bench.backend, mode="decode")
    else:
        del bench.verify.metadata[4].buffers["paged_mqa_ctx_lens_2d"]
        bench.capture(4)
    assert not bench.published()


# The graph -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(DEVICE.type == "cuda", reason="only an emulated graph can be read")
@pytest.mark.parametrize("residual", [False, True])
def test_the_metadata_is_recorded_at_the_head_and_in_order(residual: bool) -> None:
    bench = Bench(residual=residual)
    copied = torch.zeros(4, dtype=torch.int32)
    bench.capture(4, lambda: copied.copy_(bench.buckets[4].buffers["cache_seqlens_int32"]))
    labels = [node.label for node in bench.graphs[4]._nodes]  # type: ignore[attr-defined]
    assert labels.pop() == "aten.copy_.default"
    schedule = [] if residual else ["schedule_kernel"]
    expected = ["metadata_kernel", *schedule, "topk_plan_kernel"]
    expected += ["pooled_views_kernel", "write_plan_kernel", *schedule, "topk_plan_kernel"]
    assert [label.split()[-1] for label in labels if label.startswith("Triton")] == expected
    assert bench.play(WIDE) == 0
    assert copied.tolist() == bench.buckets[4].oracle_buffers["cache_seqlens_int32"].tolist()


# The subjects --------------------------------------------------------------------------------------------------------


def setup_of(subject: type, **overrides: object) -> ReplaySetup:
    geometry = Geometry.resolve("tiny_pool", {"draft_tokens": 3, **overrides})
    return ReplaySetup.make(VERIFY, geometry, (4, 2), 0, subject, None, backend())


@pytest.mark.parametrize(
    "subject, overrides",
    [
        (InGraphSubject, {"draft_tokens": 2, "input_view": "strided"}),
        (InGraphSubject, {"architecture": 100, "pool_size": 1}),
        (InGraphResidualSubject, {"architecture": 100}),
        (InGraphResidualSubject, {"pool_size": 1, "input_view": "offset"}),
    ],
    ids=str,
)
def test_each_subject_is_right(subject: type, overrides: dict[str, object]) -> None:
    setup, counts = setup_of(subject, **overrides), Counts()
    rounds = [*ROUNDS[:3], dataclasses.replace(ROUNDS[3], twice=True)]
    assert verify_rounds(setup, [setup.table(rounds)], counts, folder=None) == []
    assert counts.rounds_checked == len(rounds)


@pytest.mark.parametrize("subject", [InGraphSubject, InGraphResidualSubject])
def test_a_subject_says_why_it_is_not_eligible(subject: type) -> None:
    with pytest.raises(UsageError, match=f"subject '{subject.name}': bs 4 has no {FULL}; set indexer=true"):
        setup_of(subject, indexer=False, pool_size=1).open(1)


class HandsOnClones(InGraphSubject):
    """The regression: an engine that builds its lengths anew, here after two warm-ups and one round."""

    calls = 0

    def before_replay(self) -> None:
        self.calls += 1
        lens = self._inputs.seq_lens
        lens = lens.clone() if self.calls > 3 else lens
        self.verify.before_replay(self._bs, lens, self._inputs.req_pool_indices)


def test_an_engine_that_hands_on_clones_is_found() -> None:
    (finding,) = confirm(setup_of(HandsOnClones, pool_size=1), ROUNDS)
    assert (finding.diagnosis, finding.bucket, finding.round) == (Diagnosis.RAISES, 4, 2)
    assert "static buffers it captured: seq_lens: address" in finding.sentence


class ForgetsResidual(InGraphResidualSubject):
    """The regression: the graph builds no schedule, and nobody else does."""

    def in_graph(self) -> None:
        self._state = dataclasses.replace(self._state, residual=None)
        super().in_graph()


def test_a_residual_that_is_not_run_is_found_before_the_graph() -> None:
    findings = confirm(setup_of(ForgetsResidual), ROUNDS[:1])
    assert {finding.field for finding in findings} == {FULL, POOLED}
    assert all(finding.sentence.startswith("before the graph replays: ") for finding in findings)
