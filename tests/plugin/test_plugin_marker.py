"""The `gpu` marker."""

from __future__ import annotations

import pytest
import torch

MARKED = "import pytest\n@pytest.mark.gpu\ndef test(): pass\n"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_registered(pytester: pytest.Pytester) -> None:
    pytester.runpytest_inprocess("--markers").stdout.fnmatch_lines(["@pytest.mark.gpu: needs a CUDA GPU; *"])
    pytester.makepyfile(MARKED)
    assert pytester.runpytest_inprocess("--strict-markers").ret == pytest.ExitCode.OK


def test_skipped_by_name_without_a_gpu(pytester: pytest.Pytester, no_gpu: None) -> None:
    pytester.makepyfile(MARKED + "def test_other(): pass")
    result = pytester.runpytest_inprocess("-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * needs a CUDA GPU; none is visible"])


def test_runs_with_a_gpu(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pytester.makepyfile(MARKED)
    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_skipped_by_name_when_the_device_is_the_cpu(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MARKED)
    result = pytester.runpytest_subprocess("-rs", "--dsa-device=cpu")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * needs a CUDA GPU; --dsa-device is cpu"])
