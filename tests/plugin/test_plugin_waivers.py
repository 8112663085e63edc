"""--dsa-waivers, --dsa-no-waivers."""

from __future__ import annotations

import pytest

WRONG = "def test(dsa): dsa.verify('decode', Wrong, batches=(1,), rounds=2)"
RIGHT = "def test(dsa): dsa.verify('decode', Right, batches=(1,), rounds=2)"
LEDGER = """
schema = 1
[[waiver]]
id = "known"
subject = "test_mine:{subject}"
versions = {{ dsa-verify = ">=0.0.1" }}
system = "decode"
field = "dsa_cache_seqlens_int32"
diagnosis = "never written"
reason = "this is how it was published (contract 2.3)"
"""


def test_a_waived_difference_passes_and_is_named(session, pytester: pytest.Pytester) -> None:
    pytester.maketxtfile(ledger=LEDGER.format(subject="Wrong"))
    result = session(WRONG, "--dsa-waivers=ledger.txt")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["4 round(s) checked, 0 finding(s) beyond 1 named waiver: known (* rounds)"])


def test_a_difference_that_is_gone_fails_the_test(session, pytester: pytest.Pytester) -> None:
    pytester.maketxtfile(ledger=LEDGER.format(subject="Right"))
    result = session(RIGHT, "--dsa-waivers=ledger.txt")
    result.assert_outcomes(failed=1)
    gone = "waiver known: the difference in dsa_cache_seqlens_int32 was not seen in 4 rounds; remove it"
    result.stdout.fnmatch_lines([gone, "4 round(s) checked, 1 finding(s)"])
    result.stdout.fnmatch_lines(["next: pytest test_mine.py::test --dsa-preset=tiny --dsa-waivers=ledger.txt"])


def test_without_waivers_everything_is_judged(session) -> None:
    result = session(WRONG, "--dsa-no-waivers")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*reproduce: *.json --subject test_mine:Wrong --no-waivers"])


def test_a_bad_ledger_is_one_clear_line(session, pytester: pytest.Pytester) -> None:
    pytester.maketxtfile(ledger="schema = 7")
    result = session(RIGHT, "--dsa-waivers=ledger.txt")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["ledger.txt: must hold schema = 1 and*"])
    session(RIGHT, "--dsa-waivers=ledger.txt", "--dsa-no-waivers").stdout.fnmatch_lines(
        ["--dsa-waivers: has no effect with --dsa-no-waivers; give one of them"]
    )
