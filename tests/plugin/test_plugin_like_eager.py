"""dsa.replays_like_eager."""

from __future__ import annotations

import pytest


def test_a_callable_that_passes_counts_its_rounds(session) -> None:
    result = session("""
import torch

def test(dsa):
    result = dsa.replays_like_eager(lambda x: x * 2, torch.rand(4, 8), batch=("x",))
    assert result.equal and result.rounds == dsa.rounds_checked == 24
""")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["24 round(s) checked, 0 finding(s)"])


WRONG = """
import torch

def shifted(x, by):
    return x + by

def test(dsa):
    dsa.replays_like_eager(shifted, (torch.tensor([3, 5]), 1), change={"by": (2, 9), "x": "keep"})
"""


def test_one_that_fails_says_what_was_seen_and_how_to_see_it_again(session) -> None:
    result = session(WRONG, "--dsa-rounds=1", "--dsa-seed=7")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    sentence = "shifted does not replay like eager work: round 2: output?0? is 4, eagerly it is *; 2 of 2 elements *"
    command = "pytest test_mine.py::test --dsa-preset=tiny --dsa-rounds=1 --dsa-seed=7"
    result.stdout.fnmatch_lines(
        [sentence, f"  reproduce: {command}", "3 round(s) checked, 1 finding(s)", sentence, f"next: {command}"]
    )


def test_a_wrong_argument_is_a_usage_error(session) -> None:
    result = session(WRONG.replace('"by"', '"bye"'))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*change: 'bye' names no tensor and no number of the inputs; they are x, by"])
