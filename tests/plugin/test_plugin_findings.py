"""--dsa-findings."""

from __future__ import annotations

import pytest

WRONG = "def test(dsa): dsa.verify('decode', Wrong, batches=(1,), rounds=1)"


def test_default_folder(session, pytester: pytest.Pytester) -> None:
    session(WRONG).assert_outcomes(failed=1)
    assert len(list(pytester.path.glob("dsa-findings/*.json"))) == 1


def test_given_folder(session, pytester: pytest.Pytester) -> None:
    result = session(WRONG, "--dsa-findings=over/there")
    result.stdout.fnmatch_lines(["  case:      over/there/decode-*.json"])
    assert len(list(pytester.path.glob("over/there/*.json"))) == 1
    assert not (pytester.path / "dsa-findings").exists()


def test_relative_to_where_pytest_was_started(session, pytester: pytest.Pytester) -> None:
    pytester.mkdir("elsewhere")
    session("def test(dsa, monkeypatch): monkeypatch.chdir('elsewhere'); dsa.verify('decode', Wrong, batches=(1,))")
    assert len(list(pytester.path.glob("dsa-findings/decode-*.json"))) == 1


def test_nothing_is_left_without_a_finding(session, pytester: pytest.Pytester) -> None:
    session("def test(dsa): dsa.verify('decode', batches=(1,), rounds=1)").assert_outcomes(passed=1)
    assert not (pytester.path / "dsa-findings").exists()


def test_a_finding_is_told_where_its_case_cannot_be_saved(session, pytester: pytest.Pytester) -> None:
    (pytester.path / "dsa-findings").write_text("no folder")
    result = session(WRONG)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "never written: dsa_cache_seqlens_int32*",
            "  the case could not be saved: File exists",
            "  reproduce: pytest test_mine.py::test --dsa-preset=tiny",
            "1 round(s) checked, 1 finding(s)",
            "never written: dsa_cache_seqlens_int32*",
            "  the case could not be saved: File exists",
            "next: pytest test_mine.py::test --dsa-preset=tiny",
        ]
    )


@pytest.mark.parametrize("value, said", [("file", "file: nothing can be put there (Not a*"), ("", "the name is*")])
def test_bad_value(pytester: pytest.Pytester, value: str, said: str) -> None:
    (pytester.path / "file").write_text("")
    result = pytester.runpytest_inprocess(f"--dsa-findings={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*error: argument --dsa-findings: {said}"])
