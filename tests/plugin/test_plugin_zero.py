"""A session that collected `dsa` tests and checked no round fails."""

from __future__ import annotations

import pytest
import torch

FAILED = "FAILED: * test(s) use the dsa fixture, but no round was checked: nothing is verified"


@pytest.mark.parametrize(
    "text",
    [
        "def test(dsa): pass",
        "@pytest.mark.skip\ndef test(dsa): pass",
        "@pytest.fixture\ndef mine(dsa): return dsa\n@pytest.mark.skip\ndef test(mine): pass",
        "@pytest.fixture\ndef dsa(dsa): return dsa\n@pytest.mark.skip\ndef test(dsa): pass",
    ],
    ids=["without verify", "skipped", "through a fixture", "through an override"],
)
def test_zero_rounds_fail(session, text: str) -> None:
    result = session(text)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["0 round(s) checked, 0 finding(s)", FAILED, "next: pytest -ra *"])


@pytest.mark.parametrize(
    "text, options",
    [
        ("def test(): pass", ()),
        ("def test(): pass\ndef test_dsa(dsa): pass", ("-k", "not dsa")),
        ("def test(dsa): pass", ("--collect-only",)),
        ("@pytest.fixture\ndef dsa(): return 'of another project'\ndef test(dsa): pass", ()),
    ],
    ids=["none", "deselected", "collect-only", "a stranger"],
)
def test_no_dsa_test_is_no_failure(session, text: str, options: tuple[str, ...]) -> None:
    result = session(text, *options)
    assert result.ret == pytest.ExitCode.OK
    assert "round(s) checked" not in result.stdout.str()


def test_a_skip_for_lack_of_a_gpu_is_named(session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = "@pytest.mark.gpu\ndef test(dsa): pass"
    assert session(text).ret == pytest.ExitCode.OK
    asked_for = session(text, "--dsa-device=cuda")
    assert asked_for.ret == pytest.ExitCode.USAGE_ERROR
    asked_for.stderr.fnmatch_lines(["ERROR: --dsa-device: device 'cuda' is not there; *"])
