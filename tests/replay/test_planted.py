"""Planted: a judge that sees nothing, or too much, is no judge, and what a trial of it leaves is what was there."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from support import DEVICE, EagerDecode, decode_round, setup_of, small

from dsa_verify.base.errors import HarnessError
from dsa_verify.buffers.region import Kind
from dsa_verify.contract.finding import Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Compare
from dsa_verify.contract.round import Round
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.diagnosis.places import as_float
from dsa_verify.replay import planted
from dsa_verify.replay.bucket import CapturedBucket
from dsa_verify.replay.replayer import Replayer
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.systems.catalogue import SYSTEMS

ROUNDS = [decode_round(4, 5, 17, 37, 1), decode_round(2, 9, 8), decode_round(4, 4, 3, 2, poison="stale", twice=True)]


def verify(subject: type, rounds: list[Round] = ROUNDS) -> tuple[list[Finding], Counts]:
    counts, setup = Counts(), setup_of(subject)
    return verify_rounds(setup, [setup.table(rounds)], counts, folder=None), counts


class NextPage(EagerDecode):
    """Every page is the next one."""

    def in_graph(self) -> None:
        super().in_graph()
        self.out["real_page_table"].add_(1)


# What a subject may do to torch: (owner, name, what becomes of the function).


def _never(old: Callable[..., object]) -> Callable[..., torch.Tensor]:
    return lambda a, b: torch.zeros(a.shape, dtype=torch.bool, device=a.device)


def _none(old: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: old(*args, **kwargs)[:0]


def _no_ones(old: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: old(*args, **kwargs).fill_(0)


def _as_zeros(old: Callable[..., object]) -> Callable[..., object]:
    return lambda tensor: old(torch.zeros_like(tensor))


BLINDED = [
    (torch.Tensor, "__ne__", _never),
    (torch.Tensor, "__and__", _never),
    (torch.Tensor, "__int__", lambda old: lambda tensor: 0),
    (torch.Tensor, "tolist", _as_zeros),
    (torch, "ones", _no_ones),
]
HARMLESS = [
    (torch, "ne", _never),
    (torch, "eq", _never),
    (torch.Tensor, "ne", _never),
    (torch.Tensor, "eq", _never),
    (torch.Tensor, "__eq__", _never),
    (torch, "equal", lambda old: lambda *args: True),
    (torch, "nonzero", _none),
    (torch.Tensor, "nonzero", _none),
]


Patch = tuple[object, str, Callable[..., Callable[..., object]]]


def patched_by(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> type:
    """NextPage that does `patch` when it is made."""
    owner, name, change = patch

    class Patches(NextPage):
        def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
            super().allocate(geometry, inputs, buffers)
            monkeypatch.setattr(owner, name, change(getattr(owner, name)))

    return Patches


def name_of(value: object) -> str:
    return str(getattr(value, "__name__", value))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the judge of a GPU is no torch function")
@pytest.mark.parametrize("owner, name, change", BLINDED, ids=name_of)
def test_a_subject_that_blinds_the_judge_ends_the_run(
    owner: object, name: str, change: Callable[..., Callable[..., object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HarnessError) as caught:
        verify(patched_by((owner, name, change), monkeypatch))
    assert "counts; no verdict can be drawn; the subject may have changed functions of torch" in str(caught.value)
    where = "torch.Tensor" if owner is torch.Tensor else "torch"
    assert f"{where}.{name}" in str(caught.value).partition(": since dsa-verify was imported ")[2]


@pytest.mark.parametrize("owner, name, change", HARMLESS, ids=name_of)
def test_what_the_judge_is_not_made_of_hides_nothing(
    owner: object, name: str, change: Callable[..., Callable[..., object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings, _ = verify(patched_by((owner, name, change), monkeypatch))
    assert "real_page_table" in [finding.field for finding in findings]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the judge of a GPU is no operator of torch")
def test_a_subject_that_replaces_a_kernel_of_torch_ends_the_run() -> None:
    libraries: list[torch.library.Library] = []

    class Replaces(NextPage):
        def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
            super().allocate(geometry, inputs, buffers)
            if not libraries:
                libraries.append(torch.library.Library("aten", "IMPL"))
                libraries[0].impl("ne.Tensor", lambda a, b: torch.zeros(a.shape, dtype=torch.bool), "CPU")

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(HarnessError, match="does not see a planted difference"):
                verify(Replaces)
    finally:
        for library in libraries:
            library._destroy()


# What is planted -----------------------------------------------------------------------------------------------------


def replayed(subject: type | None = EagerDecode, **rest: object) -> tuple[ReplaySetup, Replayer]:
    setup = setup_of(subject, **rest)  # type: ignore[arg-type]
    replayer = setup.open(len(ROUNDS))
    replayer.run(setup.table(ROUNDS))
    return setup, replayer


def test_a_word_of_every_field_a_guard_and_an_input_is_planted_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    original = planted._planted

    def watched(captured, words):
        seen.extend((word.region.kind.value, word.region.name) for word in words)
        assert all(word.made != word.was for word in words)
        return original(captured, words)

    monkeypatch.setattr(planted, "_planted", watched)
    _, replayer = replayed()
    arena, table = replayer.arena.words.clone(), replayer.input_buffers.inputs(4)[0].req_to_token.clone()
    planted.require_sight(replayer)
    fields = [name for kind, name in seen if kind == "field"]
    for captured in replayer.buckets.values():
        assert set(fields) >= {field.name for field in captured.layout if field.alias is None}
    assert {kind for kind, _ in seen} == {"field", "guard", "input"}
    assert torch.equal(arena, replayer.arena.words)
    assert torch.equal(table, replayer.input_buffers.inputs(4)[0].req_to_token)
    assert not any(tally.differing for tally in replayer.poll().values())


@pytest.mark.parametrize("kind", [Kind.FIELD, Kind.GUARD, Kind.INPUT])
def test_a_region_that_the_judge_does_not_look_at_is_missed(kind: Kind) -> None:
    _, replayer = replayed()
    captured = replayer.buckets[4]
    judge, launch = captured.judges.replay, captured.judge_replay

    def blind(phase) -> None:
        launch(phase)
        for index, region in enumerate(judge.regions):
            if region.kind is kind:
                judge.counters[0][index] = 0

    captured.judge_replay = blind
    with pytest.raises(
        HarnessError, match=f"does not see a planted difference, -?[0-9]+ for -?[0-9]+ in {kind.value} "
    ):
        planted.require_sight(replayer)


def test_a_judge_that_reports_what_nobody_planted_is_broken() -> None:
    _, replayer = replayed()
    captured = replayer.buckets[4]
    launch, looks = captured.judge_replay, []

    def imagines(phase) -> None:
        looks.append(phase)
        if len(looks) > 1:
            captured.fields["cu_seqlens_k"].got[0, 0] += 5
        launch(phase)

    captured.judge_replay = imagines
    with pytest.raises(HarnessError, match=r"reports field cu_seqlens_k, .* where nothing was planted"):
        planted.require_sight(replayer)


def test_what_is_planted_is_not_counted() -> None:
    findings, counts = verify(EagerDecode)
    assert findings == []
    assert counts.mismatches == counts.guard_hits == 0
    _, replayer = replayed()
    assert counts.elements_compared == sum(tally.compared for tally in replayer.poll().values())


@pytest.mark.parametrize(
    "system, geometry",
    [
        ("target_verify", Geometry.resolve("tiny_pool", {"draft_tokens": 2})),
        ("dcp", small("dcp", dcp_size=2)),
        ("padded", SYSTEMS["padded"].geometry("tiny_v4", {"padded_mode": "decode"})),
    ],
    ids=["schedules and lists", "floats and pools", "windows"],
)
def test_every_kind_of_field_can_be_planted(system: str, geometry: Geometry) -> None:
    setup = setup_of(system=system, geometry=geometry, buckets=(2,))
    replayer = setup.open(1)
    replayer.run(setup.table([decode_round(2, 30, 21)]))
    (captured,) = replayer.buckets.values()
    assert {word.region.name for word in planted._fields(captured)} == set(captured.fields)
    assert all(math.isfinite(as_float(word.made)) for word in planted._fields(captured) if _is_close(captured, word))
    planted.require_sight(replayer)


def _is_close(captured: CapturedBucket, word: planted._Word) -> bool:
    return captured.layout[word.region.name].compare is Compare.CLOSE


@pytest.mark.gpu
def test_a_gpu_plants_through_its_captured_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    _, replayer = replayed(None)
    torch.cuda.synchronize()
    before = replayer.arena.words.clone()
    planted.require_sight(replayer)
    assert torch.equal(before, replayer.arena.words)
    captured = replayer.buckets[4]
    monkeypatch.setattr(captured, "judge_replay", lambda phase: None)
    with pytest.raises(HarnessError, match="does not see a planted difference"):
        planted.require_sight(replayer)


def test_an_oracle_that_fails_after_a_function_was_replaced_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cheats(EagerDecode):
        def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
            super().allocate(geometry, inputs, buffers)

            def refuse(*args: object, **kwargs: object) -> None:
                raise RuntimeError("no more")

            if len(inputs.seq_lens) == 4:  # the oracle of bucket 2 comes next
                for name in ("where", "clamp", "cumsum", "arange"):
                    monkeypatch.setattr(torch, name, refuse)
                    if name != "where" and name != "arange":
                        monkeypatch.setattr(torch.Tensor, name, refuse)

        def in_graph(self) -> None:
            pass

    with pytest.raises(HarnessError, match=r"oracle of decode cannot be captured: .*; since dsa-verify was imported "):
        setup_of(Cheats).open(1)
