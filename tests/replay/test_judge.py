"""Judge: the torch judge and the Triton judge agree with a judge of plain loops, word by word."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import DEVICE

from dsa_verify.buffers.arena import GUARD_WORD
from dsa_verify.buffers.region import Kind, Region
from dsa_verify.buffers.region_kernels import RegionTable
from dsa_verify.contract.layout import Dead
from dsa_verify.judge import judge as judge_module
from dsa_verify.judge.judge import RING_ENTRIES, Judge, Phase, Tally

ROUND = 7


@dataclasses.dataclass(frozen=True)
class Shape:
    """What decides the form of a random region; its contents come from `seed`."""

    seed: int
    rows: int
    columns: int
    words_per_element: int
    slack: int  # words between two rows of `got`
    step: int  # words from one of its columns to the next
    requests: int
    mapped: bool
    per_request: bool
    one_want: bool  # all rows must be alike
    column_step: int
    column_start: int
    live_rows: bool
    extra: int
    dead: Dead
    constant_only: bool
    wrong_share: float


shapes = st.builds(
    Shape,
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 60),
    columns=st.integers(1, 90),
    words_per_element=st.sampled_from([1, 2]),
    slack=st.sampled_from([0, 0, 2, 6]),
    step=st.sampled_from([1, 1, 2, 5]),
    requests=st.integers(1, 9),
    mapped=st.booleans(),
    per_request=st.booleans(),
    one_want=st.booleans(),
    column_step=st.sampled_from([0, 1, 4]),
    column_start=st.sampled_from([0, 0, 3]),
    live_rows=st.booleans(),
    extra=st.sampled_from([0, 1]),
    dead=st.sampled_from([Dead.STALE, Dead.PAD]),
    constant_only=st.sampled_from([False, False, False, True]),
    wrong_share=st.sampled_from([0.0, 0.005, 0.3, 1.0]),
)


def on_device(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(DEVICE)


def make_region(shape: Shape) -> Region:
    """A region that is right but for a share of its words."""
    rng = np.random.default_rng(shape.seed)
    words = shape.columns * shape.words_per_element
    memory = on_device(rng.integers(-(2**31), 2**31, (shape.rows, words * shape.step + shape.slack)))
    got = memory[:, : words * shape.step : shape.step]
    if shape.constant_only:
        region = Region(kind=Kind.GUARD, name="guard", got=got, constant=GUARD_WORD)
    else:
        requests = shape.requests if shape.mapped else shape.rows
        per_request = shape.mapped and shape.per_request
        want_rows = requests if per_request else shape.rows
        want = on_device(rng.integers(-(2**31), 2**31, (1 if shape.one_want else want_rows, words)))
        region = Region(
            kind=Kind.FIELD,
            name="field",
            got=got,
            want=want.expand(want_rows, -1),
            row_request=on_device(rng.integers(0, requests, shape.rows)) if shape.mapped else None,
            want_per_request=per_request,
            live_bound=on_device(rng.integers(0, shape.columns * max(shape.column_step, 1) + 3, requests))
            if shape.column_step
            else None,
            column_step=shape.column_step,
            column_start=shape.column_start,
            live_rows=on_device(rng.integers(0, shape.rows + 1, 1)) if shape.live_rows else None,
            live_rows_extra=shape.extra,
            words_per_element=shape.words_per_element,
            dead=shape.dead,
            constant=-3,
        )
    expected, _ = reference_words(region)
    wrong = rng.random(expected.shape) < shape.wrong_share
    got.copy_(on_device(np.where(wrong, expected ^ 1, expected)))
    return region


def reference_words(region: Region) -> tuple[np.ndarray, np.ndarray]:
    """(what each word must be, whether it is judged), by the text of `Region`, in loops."""
    rows, words = region.got.shape
    expected = np.full((rows, words), region.constant, np.int64)
    checked = np.zeros((rows, words), bool)
    want = None if region.want is None else region.want.cpu().numpy()
    mapping = None if region.row_request is None else region.row_request.tolist()
    bounds = None if region.live_bound is None else region.live_bound.tolist()
    live_rows = None if region.live_rows is None else int(region.live_rows) + region.live_rows_extra
    for row in range(rows):
        request = row if mapping is None else mapping[row]
        for word in range(words):
            column = word // region.words_per_element
            live = want is not None
            live = live and (live_rows is None or row < live_rows)
            live = live and (bounds is None or region.column_start + column * region.column_step < bounds[request])
            if live:
                expected[row, word] = want[request if region.want_per_request else row, word]
            checked[row, word] = live or want is None or region.dead is Dead.PAD
    return expected, checked


def counter(value: int) -> torch.Tensor:
    return torch.full((1,), value, dtype=torch.int64, device=DEVICE)


def make_judge(regions: list[Region], side: str, round_index: torch.Tensor | None = None) -> Judge:
    """A judge that goes by torch or by Triton, whatever the device prefers."""
    judge = Judge(regions, DEVICE, counter(ROUND) if round_index is None else round_index)
    judge.table = RegionTable(regions, DEVICE) if side == "triton" else None
    return judge


def check(tally: Tally, regions: list[Region], times: int = 1) -> None:
    compared = 0
    for region in regions:
        expected, checked = reference_words(region)
        got = region.got.cpu().numpy()
        wrong = checked & (got != expected)
        if region.kind is Kind.FIELD:
            compared += int(checked.sum()) // region.words_per_element
        assert tally.differing.get(region, 0) == int(wrong.sum()) * times
        differences = {
            (r, w // region.words_per_element, int(got[r, w]), int(expected[r, w])) for r, w in np.argwhere(wrong)
        }
        ring = [d for d in tally.first if d.region is region]
        seen = [(d.row, d.column, d.got, d.want) for d in ring]
        assert len(seen) == min(RING_ENTRIES, int(wrong.sum()) * times)
        assert set(seen) <= differences
        assert {(d.round, d.phase) for d in ring} <= {(ROUND, Phase.REPLAY)}
        if times == 1 and wrong.sum() <= RING_ENTRIES:
            assert set(seen) == differences
    assert tally.compared == compared * times


@pytest.mark.parametrize("side", ["torch", "triton"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(shapes, min_size=1, max_size=4))
def test_a_judge_agrees_with_plain_loops(side: str, drawn: list[Shape]):
    regions = [make_region(shape) for shape in drawn]
    judge = make_judge(regions, side)
    judge.launch(Phase.REPLAY)
    check(judge.poll(), regions)
    judge.reset()
    assert judge.poll() == Tally(compared=0, differing={}, first=())


FIXED = Shape(
    seed=1,
    rows=33,
    columns=70,
    words_per_element=1,
    slack=2,
    step=1,
    requests=5,
    mapped=True,
    per_request=True,
    one_want=False,
    column_step=4,
    column_start=0,
    live_rows=True,
    extra=0,
    dead=Dead.STALE,
    constant_only=False,
    wrong_share=0.3,
)


def test_the_loops_see_a_judge_that_ignores_dead_rows(monkeypatch: pytest.MonkeyPatch):
    """The comparison above fails for a judge that is wrong about liveness."""
    regions = [make_region(FIXED)]
    judge = make_judge(regions, "torch")
    monkeypatch.setattr(judge_module, "live_words", lambda region: torch.ones_like(region.got, dtype=torch.bool))
    judge.launch(Phase.REPLAY)
    with pytest.raises(AssertionError):
        check(judge.poll(), regions)


@pytest.mark.parametrize("side", ["torch", "triton"])
def test_a_region_larger_than_a_tile_and_counting_beyond_the_ring(side: str):
    regions = [make_region(dataclasses.replace(FIXED, rows=200, columns=60, wrong_share=1.0, live_rows=False))]
    judge = make_judge(regions, side)
    judge.launch(Phase.REPLAY)
    judge.launch(Phase.REPLAY)
    tally = judge.poll()
    check(tally, regions, times=2)
    assert tally.count() > 2 * RING_ENTRIES


@pytest.mark.parametrize("side", ["torch", "triton"])
def test_a_noisy_region_does_not_push_out_the_evidence_of_a_quiet_one(side: str):
    noisy, quiet = (
        Region(
            kind=kind,
            name=name,
            got=torch.zeros((40, 3), dtype=torch.int32, device=DEVICE),
            want=torch.zeros((40, 3), dtype=torch.int32, device=DEVICE),
        )
        for name, kind in (("noisy", Kind.FIELD), ("quiet", Kind.INPUT))
    )
    noisy.got.fill_(1)
    now = counter(0)
    judge = make_judge([noisy, quiet], side, now)
    for round_ in range(4):
        now.fill_(round_)
        quiet.got[5, 1] = 9 if round_ == 2 else 0
        judge.launch(Phase.SECOND_REPLAY if round_ == 2 else Phase.REPLAY)
    tally = judge.poll()
    assert tally.differing == {noisy: 4 * 120, quiet: 1}
    assert tally.count(Kind.FIELD) == 480
    assert tally.count(Kind.INPUT) == 1
    assert tally.count(Kind.GUARD) == 0
    assert [d.round for d in tally.first if d.region is noisy] == [0] * RING_ENTRIES
    (found,) = [d for d in tally.first if d.region is quiet]
    assert (found.round, found.phase, found.row, found.column, found.got, found.want) == (
        2,
        Phase.SECOND_REPLAY,
        5,
        1,
        9,
        0,
    )
    assert tally.first[-1] is found, "differences come ordered by round"


@pytest.mark.parametrize("side", ["torch", "triton"])
def test_the_high_word_of_an_int64_counts(side: str):
    values = torch.zeros((3, 4), dtype=torch.int64, device=DEVICE)
    region = Region(
        kind=Kind.FIELD,
        name="wide",
        got=values.view(torch.int32),
        want=torch.zeros((3, 8), dtype=torch.int32, device=DEVICE),
        words_per_element=2,
    )
    values[1, 2] = 5 << 32
    judge = make_judge([region], side)
    judge.launch(Phase.REPLAY)
    tally = judge.poll()
    assert [(d.row, d.column, d.got, d.want) for d in tally.first] == [(1, 2, 5, 0)]
    assert tally.compared == 12


def test_a_judge_of_nothing_finds_nothing():
    judge = make_judge([], "triton")
    judge.launch(Phase.REPLAY)
    assert judge.poll() == Tally(compared=0, differing={}, first=())
