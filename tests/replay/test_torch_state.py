"""TorchState: a subject that changes what torch does in the whole process is told so, and nobody else is blamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import EagerDecode, decode_round, setup_of
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsa_verify.base.torch_state import TorchState
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.graphs.without_dynamo import import_no_dynamo
from dsa_verify.rounds.case_file import read_case
from dsa_verify.run.verify import Counts, verify_rounds

ROUNDS = [decode_round(bucket, 5 + i) for i in range(6) for bucket in (4, 2)]


class Asks(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@import_no_dynamo
class Looks(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


KEPT: list[object] = []


def enter(context) -> None:
    KEPT.append(context)
    context.__enter__()


CHANGES: dict[str, tuple[Callable[[], None], str]] = {
    "dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        "changed the default dtype from torch.float32 to torch.float64, for",
    ),
    "device": (lambda: torch.set_default_device("meta"), "changed the default device from cpu to meta, for"),
    "grad": (lambda: enter(torch.no_grad()), "changed the grad mode from on to off, for"),
    "inference": (lambda: enter(torch.inference_mode()), "inference mode from off to on"),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        "changed the deterministic algorithms from off to on, for",
    ),
    "function mode": (lambda: enter(Asks()), "changed the function modes from none to Asks, for"),
    "dispatch mode": (lambda: enter(Looks()), "changed the dispatch modes from none to Looks, for"),
}


class Changes(EagerDecode):
    """Does `change` at the call number `at` (the first: 1) of `stage` in one bucket."""

    change: Callable[[], None]
    stage: str
    at: int

    def __init__(self) -> None:
        self.calls = 0
        self.note("construct")

    def note(self, stage: str) -> None:
        if stage == self.stage:
            self.calls += 1
            if self.calls == self.at:
                type(self).change()

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.note("allocate")

    def before_replay(self) -> None:
        self.note("before_replay")

    def in_graph(self) -> None:
        super().in_graph()
        self.note("in_graph")


def made(name: str, stage: str, at: int = 1) -> type:
    members = {"change": staticmethod(CHANGES[name][0]), "stage": stage, "at": at}
    return type("Made", (Changes,), members)


def verify(subject: type, rounds: list[Round] = ROUNDS, folder: Path | None = None) -> list[Finding]:
    setup = setup_of(subject)
    return verify_rounds(setup, [setup.table(rounds)], Counts(), folder=folder)


@pytest.fixture(autouse=True)
def state_is_kept() -> Iterator[None]:
    """Whatever a subject did, this process is as it was."""
    KEPT.clear()
    before = TorchState.now()
    yield
    now = TorchState.now()
    before.put_back()
    assert now == before


@pytest.mark.parametrize("name", CHANGES)
def test_what_allocate_changes_is_named_and_put_back(name: str) -> None:
    (finding,) = verify(made(name, "allocate"))
    assert finding.diagnosis is Diagnosis.CHANGES_TORCH
    assert finding.sentence.startswith("changes torch's state: bucket 4: allocate changed the ")
    assert CHANGES[name][1] in finding.sentence
    assert finding.sentence.endswith("the whole process; put it back before returning")


@pytest.mark.parametrize(
    "stage, at, said, round_",
    [
        ("construct", 1, "bucket 4: construct changed", 0),
        ("in_graph", 2, "bucket 4: warm-up changed", 0),
        ("before_replay", 2 + 1, "bucket 4: before_replay changed", 0),
        ("before_replay", 2 + 3, "bucket 4: before_replay changed", 4),
    ],
)
def test_the_stage_and_the_round_are_named(stage: str, at: int, said: str, round_: int) -> None:
    (finding,) = verify(made("dtype", stage, at))
    assert said in finding.sentence
    assert finding.round == round_


def test_what_changes_late_is_found_after_the_chunk_and_its_round_by_another_look(tmp_path: Path) -> None:
    (finding,) = verify(made("dtype", "before_replay", 2 + 6), folder=tmp_path)
    assert finding.diagnosis is Diagnosis.CHANGES_TORCH
    assert "bucket 4: before_replay changed the default dtype" in finding.sentence
    assert finding.round == 10
    assert read_case(Path(finding.case or "")).rounds == tuple(ROUNDS[:11])


def test_what_the_harness_fails_of_is_the_subjects_doing() -> None:
    """On a CPU the poison of the next round, or the oracle, fails on meta tensors."""
    (finding,) = verify(made("device", "before_replay", 2 + 6))
    assert finding.diagnosis is Diagnosis.CHANGES_TORCH
    assert "before_replay changed the default device from cpu to meta" in finding.sentence


def test_what_is_put_back_before_it_returns_is_no_finding() -> None:
    class Tidy(EagerDecode):
        def before_replay(self) -> None:
            with torch.no_grad(), torch.device("meta"):
                torch.ones(1)

    assert verify(Tidy) == []


@pytest.mark.gpu
def test_a_current_stream_that_is_left_changed_is_named() -> None:
    class Streams(EagerDecode):
        def before_replay(self) -> None:
            torch.cuda.set_stream(torch.cuda.Stream())

    (finding,) = verify(Streams)
    assert "warm-up changed the stream from " in finding.sentence
