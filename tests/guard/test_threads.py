"""Eleven public reports of 2026 in which a graph read other memory, or other values, than it should have: each is
planted in a runner in miniature, and the guard must see it and say what it is."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from engine import BUCKET, COLUMNS, Layer, Metadata, Runner

import dsa_verify
from dsa_verify import GuardError
from dsa_verify.graphs import Backend


def runner_of(graphs: Backend, **options: Any) -> Runner:
    """One that has captured and replayed once."""
    runner = Runner(graphs)
    runner.guard = dsa_verify.guard(eager=runner.eager, **options)
    runner.capture(5, 7, 9)
    runner.step(5, 7, 9)
    assert runner.guard.verdict() == []
    return runner


def the_finding(runner: Runner, *lens: int, **given: Any) -> tuple[str, str, str]:
    """Step once more; (kind, path, sentence) of the only finding."""
    assert runner.guard is not None
    with pytest.raises(GuardError) as caught:
        runner.step_and_wait(*lens, **given)
    (finding,) = caught.value.findings
    assert str(caught.value) == finding.sentence
    pointers = [tensor.data_ptr() for tensor in runner.memory.values()]
    assert not re.search("0x[0-9a-f]{5,}", finding.sentence)
    assert not any(str(pointer) in finding.sentence for pointer in pointers)
    return finding.kind, finding.path, finding.sentence


def test_1_a_row_stride_follows_the_batch(graphs: Backend) -> None:
    """vllm 51318: the address is right, and rows are read with the stride of capture."""
    runner = runner_of(graphs)
    layer = runner.metadata.layers["layer.0"]
    layer.page_table = layer.page_table.flatten().as_strided((BUCKET, COLUMNS), (COLUMNS - 2, 1))
    kind, path, sentence = the_finding(runner, 5, 7, 9)
    assert (kind, path) == ("stride", "metadata.layers['layer.0'].page_table")
    assert sentence == (
        "metadata.layers['layer.0'].page_table has stride [6, 1], and was captured with [8, 1], "
        "with which the graph still reads it (replay 1)"
    )


def test_2_an_identical_replay_is_clean_and_a_changed_batch_is_not(graphs: Backend) -> None:
    """DeepGEMM 444: what the host read at capture is a constant of the graph."""

    class Baked(Runner):
        def capture(self, *lens: int) -> None:
            self.total = sum(lens) + 2 * BUCKET + 1
            super().capture(*lens)

        def body(self, metadata: Metadata | None = None) -> None:
            super().body(metadata)
            layer = (metadata or self.metadata).layers["layer.0"]
            if metadata is None:
                layer.cu_lens[-1:].fill_(self.total)

    runner = Baked(graphs)
    runner.guard = dsa_verify.guard(eager=runner.eager, values_every=1)
    runner.capture(5, 7, 9)
    runner.step(5, 7, 9)
    assert runner.guard.verdict() == []
    kind, path, sentence = the_finding(runner, 5, 7, 8)
    assert (kind, path) == ("value", "metadata.layers['layer.0'].cu_lens")
    assert sentence == (
        "metadata.layers['layer.0'].cu_lens is not what eager work computes: at [4] it holds 30, eagerly it is 29; "
        "1 of 5 elements differ (replay 1, batch 3)"
    )


def test_3_readiness_tags_are_stale(graphs: Backend) -> None:
    """DeepGEMM 451: the first replay finds tags that are 0, later ones those of the replay before."""
    runner = runner_of(graphs, values_every=1)
    runner.reset_tags = False
    assert runner.guard is not None
    with pytest.raises(GuardError) as caught:
        runner.step_and_wait(6, 7, 9)
    assert {finding.kind for finding in caught.value.findings} == {"value"}
    paths = [finding.path for finding in caught.value.findings]
    assert paths == ["metadata.layers['layer.0'].expanded", "metadata.layers['layer.0'].cu_lens"]
    assert caught.value.findings[0].sentence == (
        "metadata.layers['layer.0'].expanded is not what eager work computes: at [0] it holds -1, eagerly it is 8; "
        "4 of 4 elements differ (replay 1, batch 3)"
    )


def test_3_tags_that_were_not_reset_are_seen_before_the_replay(graphs: Backend) -> None:
    """The same, where somebody says that tags are constant before each replay."""
    runner = Runner(graphs)
    runner.guard = dsa_verify.guard(constants=("tags",), values_every=1)
    runner.capture(5, 7, 9)
    runner.step(5, 7, 9)
    assert runner.guard.verdict() == []
    runner.reset_tags = False
    assert the_finding(runner, 6, 7, 9) == (
        "constant",
        "metadata.tags",
        "metadata.tags has other content than when it was captured, and was declared constant (replay 1, batch 3)",
    )


def test_4_an_attribute_is_bound_to_another_tensor(graphs: Backend) -> None:
    """TensorRT-LLM 19306."""
    runner = runner_of(graphs)
    runner.metadata.lens = runner.metadata.lens.clone()
    assert the_finding(runner, 5, 7, 9) == (
        "address",
        "metadata.lens",
        "metadata.lens is another tensor (int32 [4]) than the captured one, which the graph still uses; "
        "write into the captured tensor, or capture again (replay 1)",
    )


def test_5_an_output_is_allocated_in_each_forward(graphs: Backend) -> None:
    """TensorRT-LLM 16290: the allocator may or may not return the memory that was just freed."""
    runner = runner_of(graphs)
    runner.memory["workspace"] = torch.zeros(0)
    runner.metadata.workspace = None
    runner.metadata.workspace = runner.new(16)
    kind, path, sentence = the_finding(runner, 5, 7, 9)
    assert (kind, path) == ("freed", "metadata.workspace")
    assert sentence in (
        "metadata.workspace is a new tensor (int32 [16]) that happens to lie where the captured one lay, which was "
        "freed; write into the captured tensor, or capture again (replay 1)",
        "metadata.workspace is another tensor (int32 [16]); the captured one was freed, and the graph still uses its "
        "memory (replay 1)",
    )


def test_6_the_first_replay_is_compared_whatever_was_asked_for(graphs: Backend) -> None:
    """vLLM 52440 and 53915: nested, for each descriptor, fail closed, no pointer in the message."""
    runner = Runner(graphs, key=("decode", BUCKET))
    runner.guard = dsa_verify.guard(every=1000)
    runner.capture(5, 7, 9)
    layer = runner.metadata.layers["layer.0"]
    runner.metadata.layers["layer.1"] = Layer(layer.page_table, layer.expanded.clone(), layer.cu_lens)
    assert the_finding(runner, 5, 7, 9) == (
        "address",
        "metadata.layers['layer.1'].expanded",
        "metadata.layers['layer.1'].expanded is another tensor (int32 [4]) than the captured one, which the graph "
        "still uses; write into the captured tensor, or capture again (graph ('decode', 4), replay 0)",
    )


def test_6_a_graph_for_which_nothing_was_recorded_is_refused(graphs: Backend) -> None:
    runner = runner_of(graphs)
    runner.key = "another"
    assert the_finding(runner, 5, 7, 9) == (
        "unknown",
        "metadata",
        "graph 'another' is replayed, and no metadata was recorded for it; call captured() where it is captured",
    )


def test_7_the_forward_context_has_other_tensors(graphs: Backend) -> None:
    """vLLM 44868: the object is built anew for each step, this time around tensors that no graph has seen."""
    runner = runner_of(graphs)
    runner.step(6, 7, metadata=runner.build())
    stale = runner.build()
    stale.layers["layer.0"].cu_lens = runner.new(BUCKET + 1)
    assert the_finding(runner, 5, 7, 9, metadata=stale)[:2] == ("address", "metadata.layers['layer.0'].cu_lens")


def test_9_a_view_is_wider_than_the_bucket(graphs: Backend) -> None:
    """sglang 36913."""
    runner = Runner(graphs)
    runner.memory["lens"] = runner.new(2 * BUCKET)
    runner.metadata.lens = runner.memory["lens"][:BUCKET]
    runner.guard = dsa_verify.guard()
    runner.capture(5, 7, 9)
    runner.step(5, 7, 9)
    runner.metadata.lens = runner.memory["lens"]
    assert the_finding(runner, 5, 7, 9) == (
        "shape",
        "metadata.lens",
        "metadata.lens has shape [8], and was captured with [4] (replay 1)",
    )


@pytest.mark.parametrize("change", ["removed", "number"])
def test_9_the_count_of_padding_is_missing_or_another(graphs: Backend, change: str) -> None:
    runner = runner_of(graphs, numbers=("num_padding",))
    runner.metadata.scale = 2.0  # nobody said that it is baked
    if change == "removed":
        del runner.metadata.num_padding
        says = "was removed after the capture, where it was 0, which the graph has as a constant"
    else:
        runner.metadata.num_padding = 1
        says = "is 1 now, and was 0 when it was captured, which the graph has as a constant"
    assert the_finding(runner, 5, 7, 9) == (
        change,
        "metadata.num_padding",
        f"metadata.num_padding {says} (replay 1)",
    )


def test_10_a_pad_slot_is_not_reset(graphs: Backend) -> None:
    """rtp-llm 1254: the rows behind the batch hold the lengths of a batch before."""
    runner = runner_of(graphs, pads={"lens": 1}, values_every=1)
    runner.step(5, 7, 9, 3)
    runner.reset_pads = False
    assert the_finding(runner, 5, 7) == (
        "pad",
        "metadata.lens",
        "metadata.lens was not reset beyond the batch: at [2] it holds 9, pad rows must hold 1; "
        "2 of 2 pad elements differ (replay 2, batch 2)",
    )


def test_10_prefix_sums_are_allocated_again(graphs: Backend) -> None:
    """rtp-llm 1259."""
    runner = runner_of(graphs)
    layer = runner.metadata.layers["layer.0"]
    layer.cu_lens = torch.nn.functional.pad(torch.cumsum(layer.expanded, 0, dtype=torch.int32), (1, 0))
    assert the_finding(runner, 5, 7, 9)[:2] == ("address", "metadata.layers['layer.0'].cu_lens")


def test_11_padded_rows_meet_unpadded_metadata(graphs: Backend) -> None:
    """ATOM 1595: the graph has a row for each slot of the bucket, the metadata one for each request."""
    runner = runner_of(graphs)
    runner.metadata.lens = runner.memory["lens"][:3]
    assert the_finding(runner, 5, 7, 9) == (
        "shape",
        "metadata.lens",
        "metadata.lens has shape [3], and was captured with [4] (replay 1)",
    )


def test_11_lengths_drift_from_what_was_accepted(graphs: Backend) -> None:
    """tokenspeed 509: the pipeline adds to what it wrote last, where eager work starts from the lengths."""

    class Drifting(Runner):
        def body(self, metadata: Metadata | None = None) -> None:
            super().body(metadata)
            if metadata is None:
                workspace = self.metadata.workspace
                assert workspace is not None
                self.metadata.layers["layer.0"].expanded.add_(workspace[:BUCKET])
                workspace[:BUCKET].add_(1)

    runner = Drifting(graphs)
    runner.guard = dsa_verify.guard(eager=lambda copied: {"layers['layer.0'].expanded": copied.lens + 2})
    runner.capture(5, 7, 9)
    runner.step(5, 7, 9)
    runner.guard.check()
    assert runner.guard.verdict() == []
    runner.step(5, 7, 9)
    with pytest.raises(GuardError) as caught:
        runner.check_and_wait(batch=3)
    assert str(caught.value) == (
        "metadata.layers['layer.0'].expanded is not what eager work computes: at [0] it holds 8, eagerly it is 7; "
        "4 of 4 elements differ (replay 1, batch 3)"
    )


def test_12_a_handle_is_freed_after_the_capture(graphs: Backend) -> None:
    """flashinfer 5287: nothing is bound to another tensor, and yet the graph uses memory that is somebody else's."""
    runner = runner_of(graphs)
    del runner.memory["workspace"]
    runner.metadata.workspace = None
    assert the_finding(runner, 5, 7, 9) == (
        "rebound",
        "metadata.workspace",
        "metadata.workspace is None now, and was a tensor (int32 [16]) when it was captured, "
        "whose memory was freed and is still used by the graph (replay 1)",
    )


def test_healthy_replays_raise_no_alarm(graphs: Backend) -> None:
    """Metadata is rebuilt or kept, batches come and go, contents are compared now and then."""
    runner = Runner(graphs)
    runner.guard = dsa_verify.guard(
        eager=runner.eager, constants=("tags",), pads={"lens": 1}, numbers=("num_padding",), values_every=10
    )
    runner.capture(5, 7, 9)
    for i in range(300):
        lens = tuple(1 + (i * 7 + b) % 30 for b in range(1 + i % BUCKET))
        kept = copy.copy(runner.metadata) if i % 3 else runner.build()
        runner.step(*lens, metadata=kept)
    assert runner.guard.verdict() == []
    assert (runner.guard.replays, runner.guard.compared, runner.guard.value_checks) == (300, 300, 60)


def test_a_hundred_thousand_comparisons_raise_no_alarm(graphs: Backend) -> None:
    runner = runner_of(graphs)
    assert runner.guard is not None
    for i in range(100_000):
        runner.guard.before_replay(runner.metadata if i % 2 else runner.build() if not i % 1000 else None)
    assert runner.guard.compared == 100_001
    assert runner.guard.found == 0
