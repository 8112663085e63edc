"""--dsa-rounds."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("argument, rounds", [("", 2), (", rounds=3", 3)])
def test_rounds_of_each_configuration(session, argument: str, rounds: int) -> None:
    result = session(f"def test(dsa): dsa.verify('decode', batches=(1, 2){argument})", "--dsa-rounds=2")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"{2 * rounds} round(s) checked, 0 finding(s)"])


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", "9" * 20])
def test_bad_value(pytester: pytest.Pytester, value: str) -> None:
    result = pytester.runpytest_inprocess(f"--dsa-rounds={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*error: argument --dsa-rounds: {value!r} is not an integer in 1..*"])
