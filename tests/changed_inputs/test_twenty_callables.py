"""Twenty callables, ten right and ten wrong in ten ways: each verdict must be right, and say what was seen.

On a CPU nineteen of them are judged in emulated graphs; the race needs a GPU.
"""

from __future__ import annotations

import re

import pytest
import support  # noqa: F401  chooses between compiling and interpreting before a kernel is imported
import torch
from callables import right, wrong

from dsa_verify import LikeEager, NotLikeEager, replays_like_eager
from dsa_verify.graphs import Backend

CPU = torch.device("cpu")
KERNELS = ("by kernel", "grid of the first batch")
MOVED = r"another tensor \(int32 \[4\]\) than the captured one, which the graph still uses"
# Verdict and sentence of each wrong callable, on a CPU; on a GPU memory that was freed is still there to be read.
EXPECTED = {
    "baked scalar": ("differs", r"round 2: output\[0\] is \d+, eagerly it is \d+; 4 of 4 elements differ"),
    "stale temporary": ("not replayed", r"round 1: a buffer \(shape \(4,\), .*\), .*, was freed since the capture"),
    "output rebound": ("moved", rf"^the input md\.out is {MOVED}"),
    "accumulation": ("differs", r"round 0: output\[0\] is 15, eagerly it is 18; 4 of 4 elements differ"),
    "pads": ("differs", r"round 2 \(batch 1 of 4\): output\[0\] is -1, eagerly it is 0; 1 of 4 elements differ"),
    "race": ("differs", r"round 2: output\[\d\] is .*; \d of these hold what eager work computed in round [01]"),
    "host read": ("not captured", "cannot be captured: it reads device memory on the host"),
    "grid of the first batch": (
        "differs",
        r"round 0 \(batch 4 of 4\): output\[1, 0\] is -1633771874, eagerly it is 1532713819; 24 of 32 elements differ; "
        "24 of these hold the poison that lay there before the replay",
    ),
    "workspace too small": ("wrote outside", "round 0: the replay wrote 4 bytes beside the inputs"),
    "other dtype": ("other form", r"round 2 \(batch 1 of 4\): output has dtype int32, eagerly it has float64"),
}
ON_A_GPU = {"stale temporary": ("differs", r"round \d+: output\[\d\] is .*, eagerly it is .* elements differ")}


def skip_kernels(name: str, graphs: Backend) -> None:
    if name in KERNELS and graphs.device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled in this process, and tensors on a CPU need the interpreter")


@pytest.mark.parametrize("name", right(CPU))
def test_a_right_callable_replays_like_eager_work(name: str, graphs: Backend) -> None:
    skip_kernels(name, graphs)
    fn, inputs, options = right(graphs.device)[name]
    result = replays_like_eager(fn, inputs, **options)
    assert (result.verdict, result.rounds, result.graph) == ("equal", 24, graphs.name)
    assert result.changed
    assert result.distinct > 10
    assert result.elements > 0
    assert re.fullmatch(r"24 replays were like eager work, with \d+ different results", result.sentence)
    assert len(result.batches) == (24 if "batch" in options else 0)
    assert len(set(result.batches)) == (4 if "batch" in options else 0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu) if name == "race" else name for name in EXPECTED]
)
def test_a_wrong_callable_does_not(name: str, graphs: Backend) -> None:
    skip_kernels(name, graphs)
    if name == "race" and graphs.device.type == "cpu":
        pytest.skip("no work overlaps in an emulated graph")
    fn, inputs, options = wrong(graphs.device)[name]
    with pytest.raises(NotLikeEager) as caught:
        replays_like_eager(fn, inputs, **options)
    result = caught.value.result
    assert isinstance(caught.value, AssertionError)
    verdict, sentence = (ON_A_GPU if graphs.device.type == "cuda" else {}).get(name, EXPECTED[name])
    assert result.verdict == verdict
    assert re.search(sentence, result.sentence), result.sentence
    assert str(caught.value) == f"{result.name} does not replay like eager work: {result.sentence}"


def test_the_same_seed_draws_the_same() -> None:
    def run(seed: int) -> LikeEager:
        fn, inputs, options = wrong(CPU)["baked scalar"]
        return replays_like_eager(fn, inputs, seed=seed, raises=False, **options)

    assert run(1) == run(1)
    assert run(1).sentence != run(2).sentence
