"""--dsa-seed."""

from __future__ import annotations

import json

import pytest

WRONG = "def test(dsa): dsa.verify('decode', Wrong, batches=(4,), rounds=1)"


def test_other_seeds_give_other_rounds(session, pytester: pytest.Pytester) -> None:
    for seed in (0, 7):
        session(WRONG, f"--dsa-seed={seed}", f"--dsa-findings=seed{seed}")
    first, second = (json.loads(next(pytester.path.glob(f"seed{seed}/*.json")).read_text()) for seed in (0, 7))
    assert (first["seed"], second["seed"]) == (0, 7)
    assert first["rounds"][0]["requests"] != second["rounds"][0]["requests"]


@pytest.mark.parametrize("value", ["-1", "x", str(1 << 63)])
def test_bad_value(pytester: pytest.Pytester, value: str) -> None:
    result = pytester.runpytest_inprocess(f"--dsa-seed={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*error: argument --dsa-seed: {value!r} is not an integer in 0..*"])
