"""Under pytest-xdist: workers report, the controller sums and judges."""

from __future__ import annotations

import pytest

BOTH = """
def test_right(dsa): dsa.verify('decode', batches=(1,), rounds=3)
def test_wrong(dsa): dsa.verify('decode', Wrong, batches=(1,), rounds=2)
"""
# What each worker has seen, without the seconds that a verification takes to import.
AS_IF_VERIFIED = """
import pytest
from dsa_verify.pytest_plugin.plugin import SEEN

@pytest.mark.parametrize("rounds", [2, 3])
def test(rounds, request, worker_id):
    seen = request.config.stash[SEEN]
    seen.rounds += rounds
    seen.findings.append([f"found by {worker_id}", "command"])
"""


def test_a_worker_reports_rounds_and_findings(session) -> None:
    result = session(BOTH, "-n1")
    result.assert_outcomes(passed=1, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["8 round(s) checked, 1 finding(s)", "never written: *", "next: PYTHONPATH=. dsa-verify replay *"]
    )


def test_reports_of_all_workers_are_summed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(AS_IF_VERIFIED)
    result = pytester.runpytest_inprocess("-n2")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["5 round(s) checked, 2 finding(s)"])
    result.stdout.fnmatch_lines_random(["found by gw0", "found by gw1"])


def test_zero_rounds_of_all_workers_fail(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.skip\ndef test(dsa): pass\ndef test_other(): pass")
    result = pytester.runpytest_inprocess("-n2")
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAILED: 1 test(s) use the dsa fixture, but no round was checked: *"])


def test_each_worker_sees_one_gpu(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    for name in ("PYTEST_XDIST_WORKER", "DSA_VERIFY_PINNED"):  # this test may itself run in a worker
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile("""
import os, pytest
@pytest.mark.parametrize("i", range(4))
def test(i, worker_id):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == {"gw0": "GPU-a", "gw1": "GPU-b"}[worker_id]
""")
    pytester.runpytest_subprocess("-n2").assert_outcomes(passed=4)
