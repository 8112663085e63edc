"""--dsa-device."""

from __future__ import annotations

import pytest
import torch

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def test_default_is_the_gpu_if_there_is_one(session) -> None:
    result = session(
        f"def test(dsa): dsa.verify('decode', batches=(1,), rounds=1); assert str(dsa.device) == '{DEVICE}'"
    )
    result.assert_outcomes(passed=1)


def test_cpu_interprets_kernels_of_test_modules(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pytester.makeconftest("import os; seen = os.environ.get('TRITON_INTERPRET')")
    pytester.makepyfile("from conftest import seen\ndef test(): assert seen == '1'")
    pytester.runpytest_subprocess("--dsa-device=cpu").assert_outcomes(passed=1)
    pytester.runpytest_subprocess("--dsa-device=auto").assert_outcomes(failed=1)


@pytest.mark.parametrize("options", [(), ("-n2",)], ids=["alone", "xdist"])
def test_an_absent_device_is_one_usage_error(session, options: tuple[str, ...]) -> None:
    text = "@pytest.mark.parametrize('i', range(4))\ndef test(dsa, i): dsa.verify('decode')"
    result = session(text, "--dsa-device=cuda:99", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --dsa-device: device 'cuda:99' is not there; this process sees * CUDA device(s); use auto or cpu"]
    )
    assert [word for word in ("Traceback", "failed", "nothing is verified") if word in result.stdout.str()] == []


def test_an_absent_device_that_no_test_needs_is_no_error(session) -> None:
    assert session("def test(): pass", "--dsa-device=cuda:99").ret == pytest.ExitCode.OK


@pytest.mark.parametrize("value", ["gpu", "cuda:", "cuda:x", "CPU", ""])
def test_bad_value(pytester: pytest.Pytester, value: str) -> None:
    result = pytester.runpytest_inprocess(f"--dsa-device={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"*error: argument --dsa-device: {value!r} is unknown; use auto, cpu, cuda or cuda:INDEX"]
    )
