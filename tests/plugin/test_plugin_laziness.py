"""A session that verifies nothing imports neither torch nor the library."""

from __future__ import annotations

import pytest

# A plugin that says so of the session, and of the process that guards it, which ends by os._exit.
REPORT = """
import os, sys
def report(who):
    heavy = ("torch", "triton", "numpy", "dsa_verify.run.runner")
    print(f"\\n{who}:", sorted(name for name in sys.modules if name in heavy), flush=True)
def pytest_unconfigure():
    report("loaded")
leave = os._exit
os._exit = lambda status: (report("guard"), leave(status))
"""


@pytest.mark.parametrize(
    "text, options, guarded",
    [
        ("def test(): pass", (), True),
        ("import pytest\ndef test(): pass\n@pytest.mark.gpu\ndef test_gpu(dsa): pass", ("-m", "not gpu"), True),
        ("import pytest\n@pytest.mark.gpu\ndef test(dsa): pass", ("--collect-only", "--dsa-preset=tiny"), False),
    ],
    ids=["unrelated", "deselected", "collect-only"],
)
def test_a_session_is_cheap(pytester: pytest.Pytester, text: str, options: tuple[str, ...], guarded: bool) -> None:
    pytester.makepyfile(text, loaded=REPORT)
    result = pytester.runpytest_subprocess("-p", "loaded", *options)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["loaded: [[]]", "guard: [[]]"][: 1 + guarded])


def test_the_report_above_can_fail(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test(): import numpy", loaded=REPORT)
    pytester.runpytest_subprocess("-p", "loaded").stdout.fnmatch_lines(["loaded: [[]'numpy']"])
