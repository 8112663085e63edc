"""The section of the terminal summary."""

from __future__ import annotations

import pytest

from dsa_verify.pytest_plugin.plugin import MAX_LISTED_FINDINGS, Seen, _summary

BOTH = """
def test_right(dsa): dsa.verify('decode', batches=(1,), rounds=3)
def test_wrong(dsa): dsa.verify('decode', Wrong, batches=(1,), rounds=2)
"""


def section(result: pytest.RunResult) -> list[str]:
    start = next(i for i, line in enumerate(result.outlines) if line.strip("= ") == "dsa-verify")
    end = next(i for i, line in enumerate(result.outlines) if i > start and line.startswith("="))
    return [line for line in result.outlines[start + 1 : end] if line]


def test_lines_after_a_finding(session) -> None:
    count, sentence, reproduce, last = section(session(BOTH))
    assert count == "8 round(s) checked, 1 finding(s)"
    assert sentence.startswith("never written: dsa_cache_seqlens_int32[0] ")
    assert reproduce.startswith("  reproduce: PYTHONPATH=. dsa-verify replay dsa-findings/")
    assert last == reproduce.replace("  reproduce", "next")


def test_lines_without_a_finding(session) -> None:
    assert section(session(BOTH, "-k", "right")) == [
        "6 round(s) checked, 0 finding(s)",
        "next: pytest --dsa-rounds=1000  (the same configurations for longer)",
    ]


def test_what_two_tests_find_is_listed_once(session) -> None:
    twice = "@pytest.mark.parametrize('i', range(2))\n"
    result = session(twice + "def test_wrong(dsa, i): dsa.verify('decode', Wrong, batches=(1,), rounds=2)")
    result.assert_outcomes(failed=2)
    count, _, reproduce, last = section(result)
    assert count == "4 round(s) checked, 1 finding(s)"
    assert last == reproduce.replace("  reproduce", "next")


def test_what_two_workers_find_is_listed_once() -> None:
    seen = Seen()
    for worker in ([["a", "x"], ["b", "y"], ["a", "x"]], [["b", "y"], ["b", "z"]]):
        seen.add_findings(worker)
    assert seen.findings == [["a", "x"], ["b", "y"], ["b", "z"]]


def test_long_lists_are_cut_and_counted() -> None:
    findings = [[f"sentence {i}", f"command {i}"] for i in range(MAX_LISTED_FINDINGS + 3)]
    lines = list(_summary(Seen(tests=1, rounds=1, findings=findings)))
    assert len(lines) == 1 + 2 * MAX_LISTED_FINDINGS + 2
    assert lines[-2:] == ["and 3 more", "next: command 0"]


@pytest.mark.parametrize("no_color", [False, True])
def test_colours(session, monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    monkeypatch.delenv("PY_COLORS", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    text = session(BOTH, "-k", "right").stdout.str()
    assert ("\x1b[1mnext: pytest" in text) is not no_color
    assert ("\x1b" in text) is not no_color
