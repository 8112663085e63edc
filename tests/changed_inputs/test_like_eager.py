"""replays_like_eager: what it changes, what it looks at beside the outputs, and what it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_verify import LikeEager, NothingVerified, UsageError, replays_like_eager
from dsa_verify.changed_inputs.compare import History
from dsa_verify.changed_inputs.drawing import Rule
from dsa_verify.changed_inputs.result import VERDICTS
from dsa_verify.nested.bits import checksum
from dsa_verify.nested.copies import Copies, copy_nested

Tensor = torch.Tensor
CAPTURE = 5  # the number of the call that is captured, where no batch is declared


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def judged(fn: Any, inputs: Any, **options: Any) -> LikeEager:
    return replays_like_eager(fn, inputs, raises=False, **options)


# What is seen beside wrong elements


def test_an_input_that_is_written() -> None:
    def writes(x: Tensor) -> Tensor:
        x[2:3].fill_(9)
        return x + 1

    result = judged(writes, (ints(3, 5, 4),))
    assert result.verdict == "input written"
    assert result.sentence == ("round 0: the replay wrote the input x: x[2] was 4 and is 9; 1 of 3 elements differ")


def test_memory_beside_an_input_that_only_the_warm_up_writes_is_not_told_of_the_replay() -> None:
    calls: list[int] = []

    def oversteps(x: Tensor, room: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == CAPTURE - 1:  # on the static inputs
            room.as_strided((1,), (1,), room.storage_offset() + 2).fill_(7)
        return x + 1

    assert judged(oversteps, (ints(3, 5), ints(0, 0)), scratch=("room",)).equal


def test_an_input_that_only_eager_work_writes() -> None:
    calls = []

    def writes(x: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) > CAPTURE:
            x[:1].fill_(9)
        return x + 1

    assert judged(writes, (ints(3, 5, 4),)).sentence.startswith("round 0: eager work wrote the input x: x[0] was 3 and")


def test_an_input_that_is_bound_anew_after_the_capture() -> None:
    kept: list[Rows] = []

    def rebinds(rows: Rows) -> None:
        kept.append(rows)
        rows.cu.copy_(rows.tokens)
        if len(kept) > CAPTURE:
            kept[CAPTURE - 1].cu = rows.cu.clone()

    result = judged(rebinds, (Rows(ints(3, 5), ints(0, 0)),), writes=("rows.cu",))
    assert (result.verdict, result.path) == ("moved", "rows.cu")
    assert result.sentence.startswith("round 1: the input rows.cu is another tensor (int32 [2]) than the captured one")


def test_a_constant_that_is_returned_is_not_overwritten() -> None:
    table = ints(7, 8)
    result = judged(lambda x: (x + table, table), (ints(3, 5),))
    assert (result.verdict, table.tolist()) == ("equal", [7, 8])


@pytest.mark.gpu
def test_memory_that_was_freed_is_overwritten() -> None:
    """Nobody else would, in a process that does nothing but this."""
    kept: list[Tensor] = []

    def reads(x: Tensor) -> Tensor:
        made = torch.full_like(x, 3)
        kept.append(made)
        if len(kept) == CAPTURE:
            return x + kept[CAPTURE - 2]
        if len(kept) > CAPTURE:
            kept[CAPTURE - 2] = made
        return x + made

    result = judged(reads, (ints(3, 5).cuda(),), change={"x": (3, 5)}, rounds=3)
    assert result.verdict == "differs"
    assert result.rounds == 2


def test_an_output_that_nobody_writes() -> None:
    """Rebinding the name of a parameter writes nothing."""

    def rebinds(x: Tensor, out: Tensor) -> None:
        out = x + 1  # noqa: F841  the mistake

    result = judged(rebinds, (ints(3, 5), ints(0, 0)), writes=("out",))
    assert (result.verdict, result.path) == ("differs", "out")
    assert result.sentence == (
        "round 0: out[0] is -1633771874, eagerly it is 1532713819; 2 of 2 elements differ; "
        "2 of these hold the poison that lay there before the replay"
    )
    assert (result.index, result.got, result.want) == ((0,), "-1633771874", "1532713819")
    assert (result.differing, result.compared) == (2, 2)


def test_a_result_of_memory_that_was_only_allocated() -> None:
    def sums(x: Tensor) -> Tensor:
        room = torch.empty(4, dtype=x.dtype, device=x.device)
        room[:3].copy_(x)
        return torch.where(room[:3] > 10, room[3:], x)  # reads it now and then

    result = judged(sums, (ints(3, 50, 40),), change={"x": "keep"}, batch=("x",), rounds=3)
    assert result.verdict in ("differs", "unwritten memory")

    def two_ways(x: Tensor) -> Tensor:
        return torch.empty(2, dtype=x.dtype, device=x.device).clamp_(max=0) + x[:2] * 0

    calls: list[int] = []

    def only_eagerly(x: Tensor) -> Tensor:
        """The poison of the first eager result of a round is positive, that of the graph is of no consequence."""
        calls.append(1)
        return two_ways(x) if len(calls) == CAPTURE + 2 else x[:2] * 0

    assert judged(only_eagerly, (ints(3, 50, 40),)).verdict == "unwritten memory"


def test_eager_work_that_is_not_deterministic() -> None:
    calls: list[int] = []

    def drifts(x: Tensor) -> Tensor:
        calls.append(1)
        return x + max(0, len(calls) - 6)

    result = judged(drifts, (ints(3, 5),))
    assert result.verdict == "not deterministic"
    assert result.sentence == (
        "round 0: eager work has two results for the same inputs: output[0] is 4, in the run before it is 3; "
        "2 of 2 elements differ"
    )


def test_other_outputs_and_other_forms() -> None:
    def less(x: Tensor) -> list[Tensor]:
        return [x + 0] * x.shape[0]

    result = judged(less, (ints(3, 5),), batch=("x",))
    assert result.sentence == (
        "round 2 (batch 1 of 2): the replay has the outputs output[0], output[1], eagerly they are output[0]"
    )

    calls: list[int] = []

    def transposed(x: Tensor) -> Tensor:
        calls.append(1)
        return x + 0 if len(calls) == CAPTURE else (x + 0).t().contiguous().t()

    result = judged(transposed, (torch.rand(2, 3),))
    assert result.sentence == "round 0: output has strides [3, 1], eagerly it has [1, 2]"


def test_facts_are_counted_and_a_minority_is_not_told() -> None:
    seen: list[Tensor] = []

    def freezes(x: Tensor) -> Tensor:
        """Captures what it saw before."""
        seen.append(x.clone())
        return seen[0] + 0 if len(seen) == CAPTURE else x + 0

    result = judged(freezes, (torch.rand(64),))
    facts = "64 of 64 elements differ; 64 of these hold what eager work computed in round 1"
    assert (result.verdict, result.rounds) == ("differs", 3)
    assert result.sentence.endswith(facts)
    history = History()
    history.add(7, {"output": ints(1, 2, 9, 9)})
    half, less = ints(1, 2, 3, 3), ints(1, 3, 3, 3)
    assert history.facts("output", half, ints(0, 0, 0, 0)) == ["2 of these hold what eager work computed in round 7"]
    assert history.facts("output", less, ints(0, 0, 0, 0)) == []
    assert history.facts("other", half, ints(0, 0, 0, 0)) == []


# What changes


def test_what_is_inferred() -> None:
    generator = torch.Generator().manual_seed(3)
    permuted = Rule.inferred(ints(4, 2, 9))
    assert permuted.kind == "permute"
    assert sorted(permuted.redraw(ints(4, 2, 9), generator).tolist()) == [2, 4, 9]
    ranged = Rule.inferred(ints(4, 2, 2))
    assert (ranged.kind, ranged.low, ranged.high) == ("range", 2, 4)
    drawn = ranged.redraw(torch.zeros(1000, dtype=torch.int32), generator)
    assert set(drawn.tolist()) == {2, 3, 4}
    assert drawn.dtype == torch.int32
    assert Rule.inferred(ints(0, 3, 3, 9)).kind == "keep"  # a prefix sum
    assert Rule.inferred(ints(7, 7)).kind == "keep"
    assert (
        Rule.inferred(torch.tensor([True, True])).redraw(torch.zeros(99, dtype=torch.bool), generator).unique().numel()
        == 2
    )
    floats = Rule.inferred(torch.tensor([0.5, float("inf"), 2.0]))
    assert (floats.low, floats.high) == (0.5, 2.0)
    assert (Rule.inferred(torch.zeros(2)).low, Rule.inferred(torch.zeros(2)).high) == (-1, 1)


def test_what_is_kept_is_said() -> None:
    result = judged(lambda x, cu: x + cu[1:], (ints(3, 5), ints(0, 3, 8)))
    assert (result.changed, result.kept) == (("x",), ("cu",))
    assert result.sentence.endswith("different results; kept as given: cu")


def test_the_caller_may_draw() -> None:
    seen: list[int] = []

    def legal(values: dict[str, Any], generator: torch.Generator) -> None:
        values["lens"].random_(1, 5, generator=generator)
        values["cu"][1:].copy_(values["lens"].cumsum(0))

    def checks(lens: Tensor, cu: Tensor) -> Tensor:
        seen.append(1)
        return cu[1:] - lens

    result = judged(checks, (ints(3, 5), ints(0, 3, 8)), change=legal)
    assert (result.verdict, result.changed) == ("equal", ("all, by change=",))
    assert judged(lambda x: x + 1, (ints(3, 5),), change={"x": lambda t, g: t.random_(0, 50, generator=g)}).equal
    assert judged(lambda x: x + 1, (ints(3, 5),), change={"x": (0, 500)}).distinct > 10


def test_a_number_that_is_the_batch() -> None:
    def counts(x: Tensor, live: int) -> Tensor:
        return x * live

    result = judged(counts, (ints(3, 5, 6), 3), batch=("x",), change={"live": "batch"})
    assert result.sentence.startswith("round 2 (batch 1 of 3): output[0] is ")


@dataclasses.dataclass
class Rows:
    tokens: Tensor
    cu: Tensor


def test_batches_of_several_rows_and_prefix_sums() -> None:
    shapes: list[tuple[int, ...]] = []
    sums: set[tuple[int, ...]] = set()

    def fn(lens: Tensor, rows: Rows) -> Tensor:
        shapes.append((len(lens), rows.tokens.shape[1], len(rows.cu)))
        if len(shapes) != CAPTURE:
            sums.add(tuple(rows.cu.tolist()))
        return rows.tokens.sum(0) + rows.cu[-1] * 0

    inputs = (ints(2, 2, 3), Rows(torch.rand(2, 6), ints(0, 2, 4, 7)))
    result = judged(fn, inputs, batch={"lens": 0, "rows.tokens": 1, "rows.cu": 0}, pads={"rows.cu": "last", "lens": 0})
    assert result.equal, result.sentence
    assert set(shapes) == {(n, 2 * n, n + 1) for n in (1, 2, 3)}
    assert sums == {(0, 2), (0, 2, 4), (0, 2, 4, 7)}  # pads are not left in what is kept as given


def test_a_result_that_never_changes_is_said() -> None:
    assert (
        judged(lambda x: x * 0, (ints(3, 5),)).sentence == "24 replays were like eager work, with 1 different results"
    )


def test_nothing_that_was_given_is_written() -> None:
    x, out = ints(3, 5), ints(0, 0)
    state = ints(1, 1)
    judged(lambda x, out, state: out.copy_(state.add_(x)), (x, out, state), writes=("out",), updates=("state",))
    assert [t.tolist() for t in (x, out, state)] == [[3, 5], [0, 0], [1, 1]]


# What is refused


def returns_nothing(x: Tensor) -> None:
    x.sum()


def fails(x: Tensor) -> Tensor:
    return x[[99]]


WRONG: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "inputs: they hold no tensor": (abs, (3,), {}),
    "rounds: 2 must be an integer of 3 or more": (abs, ints(1, 2), {"rounds": 2}),
    "writes: 'y' is no tensor of the inputs; they are x": (fails, ints(1, 2), {"writes": ("y",)}),
    r"updates: 'x' is a text; give a sequence of paths, such as \('x',\)": (fails, ints(1, 2), {"updates": "x"}),
    "change: 'y' names no tensor and no number": (fails, ints(1, 2), {"change": {"y": "keep"}}),
    r"change: x: \(2, 1\) is no rule": (fails, ints(1, 2), {"change": {"x": (2, 1)}}),
    "change: 'x' has no effect, because the callable writes it": (
        fails,
        ints(1, 2),
        {"change": {"x": (0, 1)}, "writes": ("x",)},
    ),
    "change: 3 is neither a mapping": (fails, ints(1, 2), {"change": 3}),
    "batch: x has 1 dimensions, so 1 is none of them": (fails, ints(1, 2), {"batch": {"x": 1}}),
    "pads: 'x' has no effect; name its batch dimension": (fails, ints(1, 2), {"pads": {"x": 0}}),
    "pads: x: 'first' is no pad": (fails, ints(1, 2), {"batch": ("x",), "pads": {"x": "first"}}),
    r"batch: y has 5 rows, which is no multiple of the batch \(3": (
        lambda x, y: x,
        (ints(1, 2, 3), ints(1, 2, 3, 4, 5)),
        {"batch": ("x", "y")},
    ),
    "returns_nothing returns no tensor and no input is declared with writes=": (returns_nothing, ints(1, 2), {}),
    r"fails failed when it was run eagerly, without a graph \(on the inputs as given\): IndexError": (
        fails,
        ints(1, 2),
        {},
    ),
}


@pytest.mark.parametrize("says", WRONG)
def test_an_argument_that_is_wrong_or_has_no_effect_is_refused(says: str) -> None:
    fn, inputs, options = WRONG[says]
    with pytest.raises(UsageError, match=says):
        replays_like_eager(fn, inputs, **options)


def test_drawn_inputs_that_the_callable_refuses_name_the_round() -> None:
    calls: list[int] = []

    def refuses(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 10:
            raise ValueError("not legal")
        return x + 1

    says = r"refuses failed when it was run eagerly, without a graph \(round \d\): ValueError: not legal"
    with pytest.raises(UsageError, match=says):
        replays_like_eager(refuses, ints(3, 5))


def test_inputs_of_which_none_can_change_verify_nothing() -> None:
    with pytest.raises(NothingVerified, match=r"no input of .*abs would change \(\w+ kept as given\)"):
        replays_like_eager(torch.abs, ints(7, 7))


def test_a_function_that_draws_another_shape_is_refused() -> None:
    with pytest.raises(UsageError, match="change: the function bound x to something of another shape; write it in"):
        replays_like_eager(lambda x: x + 1, ints(3, 5), change=lambda values, _: values.update(x=ints(1)))


# Copies


def test_copies_keep_overlaps_and_their_guards_see_writes_beside_them() -> None:
    whole = torch.arange(64).view(8, 8)
    views = {"rows": whole[2:4], "column": whole[:, 3], "odd": whole.flatten()[20:40:3], "empty": whole[:0]}
    copied = copy_nested(views)
    for name, view in views.items():
        assert copied[name].stride() == view.stride()
        assert torch.equal(copied[name], view)
    copied["rows"].fill_(-1)
    assert copied["column"].tolist() == [3, 11, -1, -1, 35, 43, 51, 59]
    assert whole.flatten().tolist() == list(range(64))
    memory = Copies(list(views.values()), guarded=True)
    row = memory.of(views["rows"])
    assert {int(guard.min()) for guard in memory.guards()} == {0xC7}
    row.as_strided((1,), (1,), row.storage_offset() + 64).fill_(0)
    assert sum(int((guard != 0xC7).sum()) for guard in memory.guards()) == 8


def test_copies_are_aligned_as_their_originals() -> None:
    whole = torch.zeros(64, dtype=torch.int16)
    views = [whole[i : i + 2] for i in (1, 4, 9, 33)]
    memory = Copies(views, guarded=True)
    assert [memory.of(view).data_ptr() % 64 for view in views] == [(2 * i) % 64 for i in (1, 4, 9, 33)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.float64, torch.complex128])
def test_a_checksum_sees_each_element(dtype: torch.dtype) -> None:
    zeros = torch.zeros(5, dtype=dtype)
    sums = {int(checksum(zeros))}
    for i in range(5):
        changed = zeros.clone()
        changed[i] = 1
        sums.add(int(checksum(changed)))
    assert len(sums) == 6


def test_every_verdict_but_equal_is_reached_in_tests() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [verdict for verdict in VERDICTS if f'"{verdict}"' not in text] == []
