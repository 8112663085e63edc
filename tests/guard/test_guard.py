"""The guard: what it walks, what it is told, and how it says what it has found."""

from __future__ import annotations

import collections
import dataclasses
import gc
import subprocess
import sys
import types
import warnings
from typing import Any, NamedTuple

import pytest
import torch

import dsa_verify
from dsa_verify import GuardError, GuardWarning, UsageError
from dsa_verify.metadata_guard import snapshot as snapshots


class Pair(NamedTuple):
    lens: torch.Tensor
    rest: Any


class Slotted:
    __slots__ = ("lens", "unset")


class Below(Slotted):
    """Has slots and a `__dict__`."""


@dataclasses.dataclass(frozen=True)
class Frozen:
    lens: torch.Tensor


def new() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int32)


def slotted(kind: type[Slotted] = Slotted) -> Any:
    made = kind()
    made.lens = new()
    return made


def space(**given: Any) -> Any:
    return types.SimpleNamespace(**given)


def said(guard: dsa_verify.MetadataGuard, metadata: Any = None, **given: Any) -> str:
    with pytest.raises(GuardError) as caught:
        guard.before_replay(metadata, **given)
    return str(caught.value)


# What is walked: (metadata, what replaces a tensor in it, the path that is named)
def _set(name: str) -> Any:
    return lambda value: setattr(value, name, new())


WALKED: dict[str, tuple[Any, Any, str]] = {
    "object": (lambda: space(lens=new()), _set("lens"), "metadata.lens"),
    "slots": (slotted, _set("lens"), "metadata.lens"),
    "slots and dict": (lambda: slotted(Below), _set("lens"), "metadata.lens"),
    "mapping": (lambda: {"lens": new(), 3: None}, lambda value: value.update(lens=new()), "metadata['lens']"),
    "list": (lambda: [None, new()], lambda value: value.__setitem__(1, new()), "metadata[1]"),
    "deque": (lambda: collections.deque([new()]), lambda value: value.__setitem__(0, new()), "metadata[0]"),
    "named tuple": (
        lambda: [Pair(new(), 1)],
        lambda v: v.__setitem__(0, v[0]._replace(lens=new())),
        "metadata[0].lens",
    ),
    "tuple": (lambda: [(1, new())], lambda value: value.__setitem__(0, (1, new())), "metadata[0][1]"),
    "frozen": (lambda: [Frozen(new())], lambda value: value.__setitem__(0, Frozen(new())), "metadata[0].lens"),
    "table of tables": (
        lambda: space(page_table=[1, 2, 3, slotted()]),
        lambda value: setattr(value.page_table[3], "lens", new()),
        "metadata.page_table[3].lens",
    ),
    "parameter": (
        lambda: space(weight=torch.nn.Parameter(torch.zeros(4))),
        lambda value: setattr(value, "weight", torch.nn.Parameter(torch.zeros(4))),
        "metadata.weight",
    ),
}


@pytest.mark.parametrize("kind", WALKED)
@pytest.mark.parametrize("first", [True, False], ids=["first replay", "later"])
def test_a_replaced_tensor_is_named_in(kind: str, first: bool) -> None:
    make, change, path = WALKED[kind]
    metadata = make()
    guard = dsa_verify.guard(metadata)
    if not first:
        guard.before_replay()
    change(metadata)
    assert said(guard).startswith(f"{path} is ")


def test_a_tensor_that_is_made_of_tensors_is_walked() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    metadata = space(both=TwoTensor(torch.zeros(4), torch.zeros(4)))
    guard = dsa_verify.guard(metadata)
    guard.before_replay()
    guard.before_replay()
    metadata.both.b = torch.zeros(4)
    assert said(guard).startswith("metadata.both.b is ")


def test_cycles_and_sharing_are_followed_once() -> None:
    inner = space(lens=new())
    metadata = space(first=inner, second=inner, layers={str(i): inner for i in range(50)})
    inner.up = metadata
    guard = dsa_verify.guard(metadata)
    assert len(guard._captured[None].quick.leaves) == 1
    for _ in range(3):
        guard.before_replay()
    # What was shared is now another object around the same tensors, and then around others.
    metadata.second = space(lens=inner.lens, up=metadata)
    guard.before_replay()
    metadata.second = space(lens=new(), up=metadata)
    assert said(guard).startswith("metadata.second.lens is another tensor")


def test_a_walk_into_the_whole_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MAX_NODES", 10)
    with pytest.raises(UsageError, match=r"more than 10 parts.*metadata\.many\[\d+\].*ignore="):
        dsa_verify.guard(space(lens=new(), many=list(range(20))))
    dsa_verify.guard(space(lens=new(), model=torch.nn.Linear(2, 2), kind=space, of=Slotted))


CHANGES = {
    "another dtype": (lambda m: setattr(m, "lens", m.lens.view(torch.float32)), "metadata.lens is float32, and was"),
    "resized in place": (lambda m: m.lens.resize_(2), "metadata.lens has shape [2], and was captured with [4]"),
    "another stride": (
        lambda m: m.lens.as_strided_((4,), (0,)),
        "metadata.lens has stride [0], and was captured with [1]",
    ),
    "moved within": (
        lambda m: setattr(m, "lens", m.whole[2:6]),
        "metadata.lens begins 8 bytes behind the place that was captured, in the same memory;",
    ),
    "moved back": (
        lambda m: setattr(m, "tail", m.whole[3:7]),
        "metadata.tail begins 4 bytes before the place that was captured, in the same memory;",
    ),
    "other memory in place": (lambda m: m.lens.set_(new()), "metadata.lens is another tensor (int32 [4])"),
    "None": (lambda m: setattr(m, "lens", None), "metadata.lens is None now, and was a tensor (int32 [4])"),
    "a number": (lambda m: setattr(m, "lens", 3), "metadata.lens is an int now, and was a tensor (int32 [4])"),
    "no longer None": (lambda m: setattr(m, "none", new()), "metadata.none is a tensor (int32 [4]) now, and was None"),
    "removed": (lambda m: delattr(m, "lens"), "metadata.lens was removed after the capture, where it was a tensor"),
    "list removed": (lambda m: delattr(m, "some"), "metadata.some was removed after the capture, where it was a list"),
    "added": (lambda m: setattr(m, "more", new()), "metadata.more was added after the capture (a tensor (int32 [4]))"),
    "added below": (lambda m: m.some.append([new()]), "metadata.some[1] was added after the capture (a list)"),
    "shorter": (lambda m: m.some.pop(), "metadata.some[0] was removed after the capture"),
    "another container": (lambda m: setattr(m, "some", tuple(m.some)), "metadata.some is a tuple now, and was a list"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("first", [True, False], ids=["first replay", "later"])
def test_a_change_is_named(name: str, first: bool) -> None:
    change, says = CHANGES[name]
    whole = torch.zeros(8, dtype=torch.int32)
    metadata = space(lens=whole[:4], tail=whole[4:], none=None, some=[new()], count=1, whole=whole)
    guard = dsa_verify.guard(metadata, storages=False)
    if not first:
        guard.before_replay()
    change(metadata)
    assert said(guard).startswith(says)


@pytest.mark.parametrize("first", [True, False], ids=["first replay", "later"])
def test_a_new_tensor_at_the_address_of_one_that_was_freed(first: bool) -> None:
    memory = bytearray(16)
    metadata = space(lens=torch.frombuffer(memory, dtype=torch.int32))
    guard, lenient = dsa_verify.guard(metadata), dsa_verify.guard(metadata, storages=False)
    if not first:
        guard.before_replay()
        lenient.before_replay()
    metadata.lens = None
    metadata.lens = torch.frombuffer(memory, dtype=torch.int32)
    lenient.before_replay()
    assert said(guard) == (
        "metadata.lens is a new tensor (int32 [4]) that happens to lie where the captured one lay, which was freed; "
        f"write into the captured tensor, or capture again (replay {0 if first else 1})"
    )


HARMLESS = {
    "a number": lambda m: setattr(m, "count", 2),
    "a number in the place of None": lambda m: setattr(m, "none", 2),
    "a number more": lambda m: setattr(m, "more", 2),
    "a number less": lambda m: delattr(m, "count"),
    "an equal view": lambda m: setattr(m, "lens", m.lens[:]),
    "another list": lambda m: setattr(m, "some", list(m.some)),
    "what is ignored": lambda m: setattr(m, "mirror", new()),
    "an empty tensor": lambda m: setattr(m, "empty", torch.zeros(0)),
    "content": lambda m: m.lens.fill_(7),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_no_alarm_for(name: str) -> None:
    metadata = space(lens=new(), none=None, some=[new()], count=1, mirror=new(), empty=torch.zeros(0))
    guard = dsa_verify.guard(metadata, ignore=("mirror",))
    guard.before_replay()
    HARMLESS[name](metadata)
    guard.before_replay()
    guard.before_replay()
    assert guard.found == 0


def test_numbers_are_compared_by_value_and_type_where_they_are_named() -> None:
    metadata = space(lens=new(), width=4, inner=space(scale=1.0, mode="decode", none=None))
    guard = dsa_verify.guard(metadata, numbers=("inner.scale", "width"))
    guard.before_replay()
    metadata.inner.mode = "verify"
    guard.before_replay()
    metadata.width = True
    assert said(guard) == (
        "metadata.width is True now, and was 4 when it was captured, which the graph has as a constant (replay 2)"
    )
    metadata.width, metadata.inner.scale = 4, 1
    assert said(guard).startswith("metadata.inner.scale is 1 now, and was 1.0 when it was captured")
    every = dsa_verify.guard(metadata, numbers=True)
    metadata.inner.none = 0
    assert said(every).startswith("metadata.inner.none is 0 now, and was None when it was captured")


def test_tensors_of_the_host_are_compared_where_there_are_no_others_or_when_asked_for() -> None:
    metadata = space(lens=new(), mirror=new())
    assert len(dsa_verify.guard(metadata)._captured[None].quick.leaves) == 2
    with pytest.raises(UsageError, match="holds no tensor that a graph could read"):
        dsa_verify.guard(metadata, host_tensors=False)


@pytest.mark.gpu
def test_tensors_of_the_host_are_not_read_by_a_graph_on_a_device() -> None:
    metadata = space(lens=new().cuda(), mirror=new(), pinned=new().pin_memory())
    guard = dsa_verify.guard(metadata)
    guard.before_replay()
    metadata.mirror = new()
    guard.before_replay()
    metadata.pinned = new().pin_memory()
    assert said(guard).startswith("metadata.pinned is another tensor")


@pytest.mark.gpu
def test_what_is_recorded_within_a_capture_adds_nothing_to_the_graph() -> None:
    metadata = space(lens=new().cuda(), out=new().cuda())
    guard = dsa_verify.guard(constants=("lens",), values_every=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metadata.out.copy_(metadata.lens)
        guard.captured(metadata)
        with pytest.raises(UsageError, match="during a capture"):
            guard.check()
    guard.wrap(graph).replay()
    guard.before_replay()
    assert guard.verdict() == []
    metadata.lens.add_(1)
    guard.check()
    with pytest.raises(GuardError, match=r"metadata\.lens has other content"):
        guard.verdict()


@pytest.mark.gpu
def test_checks_on_a_device_do_not_wait() -> None:
    metadata = space(lens=new().cuda(), out=new().cuda())

    def eager(copied: Any) -> None:
        copied.out.copy_(copied.lens)

    guard = dsa_verify.guard(metadata, eager=eager, constants=("lens",), pads={"lens": 0}, values_every=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metadata.out.copy_(metadata.lens)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            with guard.replaying(batch=2):
                graph.replay()
        guard.check(batch=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert guard.verdict() == []
    assert guard.value_checks == 7


def test_several_graphs_and_metadata_that_is_built_anew() -> None:
    memory = {key: new() for key in (1, 2)}
    guard = dsa_verify.guard()
    for key, tensor in memory.items():
        guard.captured({"lens": tensor}, key=key)
    for _ in range(3):
        for key, tensor in memory.items():
            guard.before_replay({"lens": tensor[:]}, key=key)
    assert said(guard, {"lens": memory[1]}, key=2).startswith("metadata['lens'] is another tensor")
    guard.captured({"lens": memory[1]}, key=2)  # captured again
    guard.before_replay({"lens": memory[1]}, key=2)


@pytest.mark.parametrize("weakly", [True, False])
def test_the_guard_keeps_no_memory_alive_once_it_is_given_metadata(weakly: bool) -> None:
    metadata = Frozen(new()) if weakly else [new()]
    guard = dsa_verify.guard()
    guard.captured(metadata)
    guard.before_replay(metadata)
    guard.check(metadata)
    place = guard._captured[None].quick.leaves[0].place
    gc.disable()  # what only a collection would free is kept alive, too
    try:
        del metadata
        assert place.freed
    finally:
        gc.enable()
    assert said(guard) == (
        "metadata was recorded at capture and is gone; give before_replay the one that is in use now (replay 1)"
    )


def test_a_mode_that_warns_says_it_once_and_one_that_collects_says_nothing() -> None:
    for mode in ("warn", "collect"):
        metadata = space(lens=new(), other=new())
        guard = dsa_verify.guard(metadata, mode=mode, name="attn_metadata")  # type: ignore[arg-type]
        kept, metadata.lens = metadata.lens, new()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                guard.before_replay()
        expected = ["attn_metadata.lens"] if mode == "warn" else []
        assert [str(each.message).split()[0] for each in caught] == expected
        assert [each.category for each in caught] == [GuardWarning] * len(expected)
        assert [(finding.kind, finding.replay) for finding in guard.findings] == [("address", i) for i in range(3)]
        del kept


def test_several_findings_are_raised_together() -> None:
    metadata = space(lens=new(), other=new())
    guard = dsa_verify.guard(metadata)
    metadata.lens = metadata.other = None
    with pytest.raises(GuardError, match=r"^metadata\.lens is None now.*\(replay 0\) \(and 1 more\)$") as caught:
        guard.before_replay()
    assert [finding.path for finding in caught.value.findings] == ["metadata.lens", "metadata.other"]


@pytest.mark.parametrize("value", ["0", "off", "OFF"])
def test_the_environment_switches_it_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_VERIFY_GUARD", value)
    metadata = space(lens=new())
    guard = dsa_verify.guard(metadata, eager=lambda copied: 1 / 0)
    metadata.lens = None
    graph = space(replay=lambda: replayed.append(1), pool=lambda: "pool")
    replayed: list[int] = []
    guard.before_replay()
    guard.check()
    wrapped = guard.wrap(graph)
    wrapped.replay()
    assert (guard.enabled, guard.verdict(), replayed, wrapped.pool()) == (False, [], [1], "pool")


def test_the_environment_chooses_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_VERIFY_GUARD", "collect")
    assert dsa_verify.guard().mode == "collect"
    monkeypatch.setenv("DSA_VERIFY_GUARD", "1")
    assert dsa_verify.guard().mode == "raise"
    monkeypatch.setenv("DSA_VERIFY_GUARD", "maybe")
    with pytest.raises(UsageError, match="DSA_VERIFY_GUARD is 'maybe'; unset it, or set it to one of 0, off, raise"):
        dsa_verify.guard()


WRONG = {
    "mode: 'loud' is none": {"mode": "loud"},
    "every: 0 must be an integer of 1 or more": {"every": 0},
    "values_every: -1 must be an integer of 0 or more": {"values_every": -1},
    "pads: lens: 'first' is no rule": {"pads": {"lens": "first"}},
    r"pads: lens: \(0, 0\) is no rule": {"pads": {"lens": (0, 0)}},
    "constants: 'cu' names nothing in the metadata; what can be named: lens": {"constants": ("cu",)},
    "pads: 'cu' names nothing in the metadata; what can be named: lens": {"pads": {"cu": 0}},
    "numbers: 'width' names nothing in the metadata; what can be named: count": {"numbers": ("width",)},
}


@pytest.mark.parametrize("says", WRONG)
def test_an_argument_that_is_wrong_or_has_no_effect_is_refused(says: str) -> None:
    with pytest.raises(UsageError, match=says):
        dsa_verify.guard(space(lens=new(), count=1), **WRONG[says])  # type: ignore[arg-type]


def test_metadata_without_a_tensor_is_refused() -> None:
    for nothing in (space(count=1), 3, {}):
        with pytest.raises(UsageError, match="holds no tensor that a graph could read"):
            dsa_verify.guard(nothing)


def test_pads_need_the_batch() -> None:
    guard = dsa_verify.guard(space(lens=new()), pads={"lens": 0})
    with pytest.raises(UsageError, match="give before_replay or check batch="):
        guard.check()


PADS = {
    "a number": (0, [5, 6, 0, 0], [5, 6, 0, 7], "at [3] it holds 7, pad rows must hold 0; 1 of 2 pad elements differ"),
    "rows of a request": ((0, 2), [5, 6, 7, 8], None, None),
    "rows of a request, wrong": ((0, 1), [5, 6, 0, 0], [5, 6, 9, 9], "at [2] it holds 9, pad rows must hold 0; 2 of 2"),
    "prefix sums": ("last", [0, 5, 11, 11], [0, 5, 11, 12], "at [3] it holds 12, pad rows must hold 11; 1 of 1"),
}


@pytest.mark.parametrize("name", PADS)
def test_rows_beyond_the_batch(name: str) -> None:
    rule, right, wrong, says = PADS[name]
    metadata = space(lens=torch.tensor(right))
    guard = dsa_verify.guard(metadata, pads={"lens": rule}, mode="collect")
    guard.check(batch=2)
    guard.check(batch=4)
    assert guard.verdict() == []
    if wrong is not None:
        metadata.lens.copy_(torch.tensor(wrong))
        guard.check(batch=2)
        (finding,) = guard.verdict()
        assert (finding.kind, finding.path) == ("pad", "metadata.lens")
        assert says in finding.sentence


def test_eager_work_that_is_never_judged_is_said() -> None:
    guard = dsa_verify.guard(space(lens=new()), eager=lambda copied: None, values_every=1)
    guard.before_replay()
    assert said(guard) == (
        "metadata was not compared with eager work: nothing said that the replay before was over; call "
        "after_replay(), use replaying(), or wrap the graph (replay 1)"
    )


def test_a_replay_that_fails_leaves_no_copy_behind() -> None:
    metadata = space(lens=new())
    guard = dsa_verify.guard(metadata, eager=lambda copied: None, values_every=1)
    broken = guard.wrap(space(replay=lambda: 1 / 0))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            broken.replay()


def test_eager_work_that_returns_what_is_no_field_is_refused() -> None:
    for returned, says in (({"cu": new()}, r"it returned metadata\['cu'\]"), ([1], "it returned no tensor")):
        guard = dsa_verify.guard(space(lens=new()), eager=lambda copied, returned=returned: returned)
        with pytest.raises(UsageError, match=says):
            guard.check()


def test_eager_work_of_another_form_is_a_finding() -> None:
    guard = dsa_verify.guard(space(lens=new()), eager=lambda copied: space(lens=copied.lens.long()))
    guard.check()
    with pytest.raises(GuardError, match=r"metadata\.lens is int32 \[4\] on cpu, and eager work computes int64 \[4\]"):
        guard.verdict()


def test_nan_equals_itself_and_zero_has_a_sign() -> None:
    values = torch.tensor([float("nan"), 0.0, 1.0])
    metadata = space(scale=values)
    guard = dsa_verify.guard(metadata, eager=lambda copied: None, mode="collect")
    guard.check()
    assert guard.verdict() == []
    wanted = torch.tensor([float("nan"), -0.0, 1.0])
    other = dsa_verify.guard(metadata, eager=lambda copied: {"scale": wanted}, mode="collect")
    other.check()
    assert "at [1] it holds 0.0, eagerly it is -0.0; 1 of 3 elements differ" in other.verdict()[0].sentence


def test_a_guard_that_compared_nothing_says_so() -> None:
    with pytest.raises(GuardError, match="nothing was compared: no replay was announced to the guard"):
        dsa_verify.guard(space(lens=new())).verdict()


def test_a_comparison_that_cannot_be_made_does_not_look_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = dsa_verify.guard(space(lens=new()))
    monkeypatch.setattr(snapshots, "parts_of", lambda value: 1 / 0)
    assert said(guard).startswith("metadata could not be compared with the capture: ZeroDivisionError")


def test_a_server_that_imports_it_imports_little() -> None:
    code = """
import sys, dsa_verify
dsa_verify.guard
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("dsa_verify.")}
assert rooms <= {"base", "nested", "metadata_guard"}, rooms
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
