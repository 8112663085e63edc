"""--dsa-cases."""

from __future__ import annotations

import json
import os
import re

import pytest

from dsa_verify.base.small_file import MAX_CASE_BYTES

# What stands for a replay where only collecting and counting matter, without the seconds that importing one takes.
STAND_IN = """
import pytest
from dsa_verify.pytest_plugin import plugin as pytest_plugin

class StandIn:
    def __init__(self, session): self.seen = session.config.stash[pytest_plugin.SEEN]
    def case(self, path): self.seen.rounds += 1

pytest_plugin.dsa_fixture = StandIn
"""
SKIPPED = """
def pytest_collection_modifyitems(items):
    for item in items: item.add_marker(pytest.mark.skip)
"""
LOADED = """
import sys
def pytest_unconfigure():
    heavy = ("torch", "triton", "numpy", "dsa_verify.run.runner")
    print("\\nloaded:", sorted(name for name in sys.modules if name in heavy))
"""
ROUND = {"bucket": 1, "seq_lens": [5], "requests": [3], "poison": "loud"}


@pytest.fixture
def stand_in(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsa_verify.pytest_plugin import plugin as pytest_plugin

    monkeypatch.setattr(pytest_plugin, "dsa_fixture", pytest_plugin.dsa_fixture)  # put back what the session changes
    pytester.makeconftest(STAND_IN)


def write(pytester: pytest.Pytester, *names: str, folder: str = "kept", **changes: object) -> None:
    """A case file of each name, all the same."""
    case = {"schema": 1, "system": "decode", "preset": "tiny", "buckets": [1], "rounds": [ROUND], **changes}
    (pytester.path / folder).mkdir(exist_ok=True)
    for name in names:
        (pytester.path / folder / f"{name}.json").write_text(json.dumps(case))


def items(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if "::" in line]


# Replayed ------------------------------------------------------------------------------------------------------------


def test_each_case_is_an_item_with_the_subject_that_it_names(session, pytester: pytest.Pytester) -> None:
    write(pytester, "right", "right.small")
    write(pytester, "wrong", subject="test_mine:Wrong")
    write(pytester, "absent", subject="test_mine:Absent")
    write(pytester, "idle", rounds=[])
    write(pytester, "typo", round=[])
    (pytester.path / "kept" / "notes.txt").write_text("not a case")
    result = session("", "-v", "--dsa-cases=kept", "--dsa-trust")
    result.assert_outcomes(passed=2, failed=4)
    result.stdout.fnmatch_lines(
        [
            "kept/absent.json::absent FAILED *",
            "kept/idle.json::idle FAILED *",
            "kept/right.json::right PASSED *",
            "kept/right.small.json::right.small PASSED *",
            "kept/typo.json::typo FAILED *",
            "kept/wrong.json::wrong FAILED *",
            "*_ case absent _*",
            "subject 'test_mine:Absent': 'test_mine' has no attribute 'Absent'; check the spelling",
            "*_ case idle _*",
            "decode, subject triton, *: no round was checked, so nothing is verified; *",
            "*_ case typo _*",
            '*/kept/typo.json: "round" is an unknown key; *',
            "*_ case wrong _*",
            "decode, subject test_mine:Wrong, *: 1 finding(s) in 1 round(s) checked",
            "never written: dsa_cache_seqlens_int32[[]0] (batch row 0, request 3, length 5) *",
            "  case:      dsa-findings/decode-*.json",
            "next: PYTHONPATH=. dsa-verify replay dsa-findings/decode-*.json --subject test_mine:Wrong",
        ]
    )
    assert "Traceback" not in result.stdout.str()


def test_a_failing_item_says_what_the_fixture_says(session, pytester: pytest.Pytester) -> None:
    write(pytester, "wrong", subject="test_mine:Wrong")
    result = session("def test_same(dsa): dsa.case('kept/wrong.json')", "--dsa-cases=kept", "--dsa-trust")
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    [of_item] = re.findall(r"_ case wrong _+\n(.+?)\n_+ ", text, re.DOTALL)
    [of_fixture] = re.findall(r"_ test_same _+\n(.+?)\n=+ ", text, re.DOTALL)
    assert "never written: " in of_item
    assert of_item == of_fixture


def test_a_subject_is_looked_for_where_pytest_was_started(session, pytester: pytest.Pytester) -> None:
    write(pytester, "wrong", subject="test_mine:Wrong")
    # test_mine is no test of this session, and so on no path
    result = session("", "--dsa-cases=kept", "--dsa-trust", "kept")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["never written: dsa_cache_seqlens_int32*"])


def test_the_device_is_the_one_asked_for(session, pytester: pytest.Pytester) -> None:
    write(pytester, "right")
    result = session("", "--dsa-cases=kept", "--dsa-device=cuda:99")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --dsa-device: device 'cuda:99' is not there; *"])


# Trusted -------------------------------------------------------------------------------------------------------------


UNASKED = "raise OSError('this module was imported')\n"


def test_code_that_a_case_names_is_not_run_unasked(session, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(theirs=UNASKED)
    write(pytester, "unasked", subject="theirs:Mine")
    result = session("def test_same(dsa): dsa.case('kept/unasked.json')", "--dsa-cases=kept")
    result.assert_outcomes(failed=2)
    said = (
        "subject: 'theirs:Mine' is neither a shipped subject nor an engine's nor an installed one, and a case runs no "
        "other code unasked; if you know it, list it under dsa_trust in the ini file, give --dsa-trust, or give "
        "dsa.case a subject"
    )
    # pytest's own summary repeats it, whole or cut as the terminal has it.
    of_item, of_fixture = result.stdout.str().partition("short test summary info")[0].split("_ test_same _")
    assert (of_item.count(said), of_fixture.count(said)) == (1, 1)
    assert "this module was imported" not in of_item + of_fixture


def test_the_ini_file_says_what_cases_may_name(session, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\naddopts = -p no:hypothesispytest\ndsa_trust =\n  other:Mine\n  test_mine:Right")
    write(pytester, "right", subject="test_mine:Right")
    write(pytester, "wrong", subject="test_mine:Wrong")
    session("", "--dsa-cases=kept").assert_outcomes(passed=1, failed=1)


def test_a_file_that_is_no_case_is_refused_before_torch_is_imported(pytester: pytest.Pytester) -> None:
    write(pytester, "huge")
    os.truncate(pytester.path / "kept" / "huge.json", MAX_CASE_BYTES + 1)
    pytester.makeconftest(LOADED)
    result = pytester.runpytest_subprocess("--dsa-cases=kept")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*/kept/huge.json: 67108865 bytes exceed 67108864, the most that *", "loaded: [[]]"])


def test_what_pytest_would_pass_over_is_refused(pytester: pytest.Pytester, stand_in: None) -> None:
    write(pytester, "a")
    os.mkfifo(pytester.path / "kept" / "pipe.json")
    result = pytester.runpytest_inprocess("--dsa-cases=kept")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --dsa-cases: */kept/pipe.json: cannot be read * (it is a pipe); *"])


# Collected -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ((), ["test_own.py::test", "kept/a.json::a", "kept/b.json::b"]),
        ((".",), ["test_own.py::test", "kept/a.json::a", "kept/b.json::b"]),
        (("test_own.py",), ["test_own.py::test", "kept/a.json::a", "kept/b.json::b"]),
        (("kept",), ["kept/a.json::a", "kept/b.json::b"]),
        (("kept/b.json",), ["kept/b.json::b"]),
        (("kept/b.json::b", "test_own.py"), ["kept/b.json::b", "test_own.py::test"]),
        (("-k", "b or own"), ["test_own.py::test", "kept/b.json::b"]),
    ],
    ids=["alone", "the folder above", "a test", "the folder", "a case", "a case and a test", "selected"],
)
def test_cases_beside_other_tests(
    pytester: pytest.Pytester, stand_in: None, arguments: tuple[str, ...], expected: list[str]
) -> None:
    write(pytester, "a", "b")
    write(pytester, "elsewhere", folder="others")
    (pytester.path / "kept" / "deeper").mkdir()
    (pytester.path / "kept" / "deeper" / "c.json").write_text("{}")
    pytester.makepyfile(test_own="def test(): pass")
    result = pytester.runpytest_inprocess("--dsa-cases=kept", "--collect-only", "-q", *arguments)
    assert result.ret == pytest.ExitCode.OK
    assert sorted(items(result)) == sorted(expected)


def test_without_the_option_json_is_nobodys(pytester: pytest.Pytester, stand_in: None) -> None:
    write(pytester, "a")
    assert pytester.runpytest_inprocess().ret == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize(
    "value, message",
    [
        ("absent", "ERROR: --dsa-cases: absent is not a folder; create it and put case files (*.json) there"),
        ("kept/a.json", "ERROR: --dsa-cases: kept/a.json is not a folder; *"),
        ("empty", "ERROR: --dsa-cases: empty holds no *.json, so nothing would be replayed; put a case there"),
        ("", "*error: argument --dsa-cases: the name is empty; give a folder of case files"),
    ],
)
def test_bad_value(pytester: pytest.Pytester, stand_in: None, value: str, message: str) -> None:
    write(pytester, "a")
    pytester.mkdir("empty")
    result = pytester.runpytest_inprocess(f"--dsa-cases={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_collecting_is_cheap(pytester: pytest.Pytester) -> None:
    write(pytester, "a", "b")
    pytester.makeconftest(LOADED)
    result = pytester.runpytest_subprocess("--dsa-cases=kept", "--collect-only", "-q")
    assert items(result) == ["kept/a.json::a", "kept/b.json::b"]
    result.stdout.fnmatch_lines(["loaded: [[]]"])


# Counted -------------------------------------------------------------------------------------------------------------


def test_the_summary_of_cases_alone_ends_with_where_to_find_more(pytester: pytest.Pytester, stand_in: None) -> None:
    write(pytester, "a", "b")
    result = pytester.runpytest_inprocess("--dsa-cases=kept")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["2 round(s) checked, 0 finding(s)", "next: dsa-verify fuzz --help *"])


def test_cases_that_are_all_skipped_fail(pytester: pytest.Pytester, stand_in: None) -> None:
    write(pytester, "a", "b")
    pytester.makeconftest(STAND_IN + SKIPPED)
    result = pytester.runpytest_inprocess("--dsa-cases=kept")
    result.assert_outcomes(skipped=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAILED: 2 test(s) use the dsa fixture or replay a case, but no round was checked: *"])


def test_workers_share_the_cases(pytester: pytest.Pytester, stand_in: None) -> None:
    write(pytester, "a", "b", "c", "d")
    result = pytester.runpytest_inprocess("--dsa-cases=kept", "-n2", "-v")
    result.assert_outcomes(passed=4)
    assert sorted(re.findall(r"PASSED (kept/\w\.json::\w)", result.stdout.str())) == [
        f"kept/{name}.json::{name}" for name in "abcd"
    ]
    result.stdout.fnmatch_lines(["4 round(s) checked, 0 finding(s)", "next: dsa-verify fuzz --help *"])
