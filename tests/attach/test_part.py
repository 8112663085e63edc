"""What keeps a part from harming the server that it is attached to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_verify.attach import graph_guards, part, sglang_dsa
from dsa_verify.attach.graph_guards import GraphGuards
from dsa_verify.attach.part import Finding, Part, Report
from dsa_verify.attach.settings import Settings


class Owner:
    """Owns graphs."""


def report(folder: Path, **settings: Any) -> Report:
    return Report(Settings(parts=("guard",), folder=folder, **settings), lambda rank: "start")


def fail() -> None:
    raise ValueError("ours")


def test_a_failure_detaches_and_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, calls = Part("guard", report(tmp_path)), []
    one.call(fail)
    one.call(calls.append, 1)
    one.call(fail)
    assert calls == []
    assert capsys.readouterr().err.splitlines() == [
        "start",
        "dsa-verify, rank 0: guard is detached, the server goes on without it: ValueError: ours",
    ]


def test_a_strict_failure_goes_through(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ours"):
        Part("guard", report(tmp_path, strict=True)).call(fail)


def test_a_strict_finding_ends_the_server(tmp_path: Path) -> None:
    one = Part("guard", report(tmp_path, strict=True))
    with pytest.raises(Finding, match="guard: it moved"):
        one.call(one.found, "it moved")
    calm = Part("guard", report(tmp_path))
    calm.call(calm.found, "it moved")


def test_a_slow_call_is_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, calls = Part("overlay", report(tmp_path)), []
    monkeypatch.setattr(part, "MAX_CALL_S", -1.0)
    one.call(calls.append, 1)
    one.call(calls.append, 2)
    assert calls == [1]


def test_what_is_said_is_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = Part("overlay", report(tmp_path))
    for number in range(100):
        one.found(f"finding {number}")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 + part.MAX_SAID + 1
    assert said[-1] == f"dsa-verify, rank 0: overlay: no more is said here; see {tmp_path}"


def test_graphs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_guards, "MAX_GRAPHS", 2)
    guards, owner = GraphGuards(report(tmp_path)), Owner()
    held = SimpleNamespace(lens=torch.ones(3))
    for key in (1, 2, 2, 3):
        guards.call(guards.captured, owner, key, "metadata", lambda: held)
    assert not guards.enabled


def test_a_graph_is_forgotten_with_its_owner(tmp_path: Path) -> None:
    guards, owner = GraphGuards(report(tmp_path)), Owner()
    held = SimpleNamespace(lens=torch.ones(3))
    guards.captured(owner, 1, "metadata", lambda: held)
    assert len(guards._guarded) == 1
    del owner
    assert len(guards._guarded) == 0


def test_every_other_replay_is_looked_at(tmp_path: Path) -> None:
    guards, owner = GraphGuards(report(tmp_path, every=2)), Owner()
    held = SimpleNamespace(lens=torch.ones(3))
    guards.captured(owner, 1, "metadata", lambda: held)
    guards.before_replay(owner, 1)
    held.lens = torch.ones(3)
    guards.before_replay(owner, 1)
    assert not guards._finding
    guards.before_replay(owner, 1)
    assert guards._finding.startswith("metadata.lens is another tensor")


def test_guards_that_are_switched_off_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSA_VERIFY_GUARD", "0")
    guards = GraphGuards(report(tmp_path))
    guards.call(guards.captured, Owner(), 1, "metadata", lambda: SimpleNamespace(lens=torch.ones(3)))
    assert "DSA_VERIFY_GUARD switches guards off; unset it" in capsys.readouterr().err


@pytest.mark.parametrize("made", [sglang_dsa.DsaOverlays, sglang_dsa.DsaCapture])
def test_recorders_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    monkeypatch.setattr(sglang_dsa, "MAX_RECORDERS", 0)
    monkeypatch.setattr(sglang_dsa.atexit, "register", lambda _: None)
    one = made(report(tmp_path))
    mode = SimpleNamespace(is_decode_or_idle=lambda: True)
    tensor = torch.ones(2)
    batch = SimpleNamespace(batch_size=2, forward_mode=mode, seq_lens=tensor, req_pool_indices=tensor)
    backend = Owner()
    backend.req_to_token, backend.forward_metadata = tensor, None  # type: ignore[attr-defined]
    one.call(one.prepared, backend, batch)
    assert not one.enabled
