"""A session that verifies nothing imports neither torch nor the library."""

from __future__ import annotations

import pytest

REPORT = """
import sys
def pytest_unconfigure():
    heavy = ("torch", "triton", "numpy", "dsa_verify.run.runner")
    print("\\nloaded:", sorted(name for name in sys.modules if name in heavy))
"""


@pytest.mark.parametrize(
    "text, options",
    [
        ("def test(): pass", ()),
        ("import pytest\ndef test(): pass\n@pytest.mark.gpu\ndef test_gpu(dsa): pass", ("-m", "not gpu")),
        ("import pytest\n@pytest.mark.gpu\ndef test(dsa): pass", ("--collect-only", "--dsa-preset=tiny")),
    ],
    ids=["unrelated", "deselected", "collect-only"],
)
def test_starting_is_cheap(pytester: pytest.Pytester, text: str, options: tuple[str, ...]) -> None:
    pytester.makeconftest(REPORT)
    pytester.makepyfile(text)
    result = pytester.runpytest_subprocess(*options)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["loaded: [[]]"])


def test_the_report_above_can_fail(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(REPORT)
    pytester.makepyfile("def test(): import numpy")
    pytester.runpytest_subprocess().stdout.fnmatch_lines(["loaded: [[]'numpy']"])
