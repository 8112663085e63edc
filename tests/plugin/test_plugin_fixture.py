"""The `dsa` fixture: what passes, what fails, and what a failure says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsa_verify.pytest_plugin.fixture import TEST_BATCHES, TEST_DRAFTS

WRONG = "def test(dsa): dsa.verify('decode', Wrong, batches=(1,), rounds=2)\n"
OUTPUT = """\
decode, subject test_mine:Wrong, on DEVICE: 1 finding(s) in 2 round(s) checked; the configurations after it were not run

never written: dsa_cache_seqlens_int32[0] (batch row 0, request R, length 1) is -1633771874, must be 1: \
it still holds the poison, so it was never written in this replay
  rule:      docs/contract/1-basic.md#1.1
  case:      dsa-findings/decode-dsa_cache_seqlens_int32-never-written-X.json
  reproduce: PYTHONPATH=. dsa-verify replay dsa-findings/decode-dsa_cache_seqlens_int32-never-written-X.json \
--subject test_mine:Wrong
"""


def test_a_pipeline_of_ones_own(session) -> None:
    result = session("""
class Mine:
    name = "mine"

    def allocate(self, geometry, inputs, buffers):
        self.inner = Right()
        self.inner.allocate(geometry, inputs, buffers)

    def before_replay(self): pass

    def in_graph(self): self.inner.in_graph()

def test(dsa):
    run = dsa.verify("decode", Mine, batches=(1, 3), rounds=2)
    assert run.subject == "test_mine:Mine"
    assert run.counts.rounds_checked == dsa.rounds_checked == 4
""")
    result.assert_outcomes(passed=1)


def test_the_shipped_subject_in_the_default_configurations(session) -> None:
    result = session("def test(dsa): dsa.verify('target_verify', rounds=1)")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"{len(TEST_BATCHES) * len(TEST_DRAFTS)} round(s) checked, 0 finding(s)"])


@pytest.mark.parametrize("batches, found", [("(4,)", True), ("(1, 4)", True), ("(4,), input_view='plain'", False)])
def test_a_stride_that_is_ignored_is_found_in_one_batch(session, batches: str, found: bool) -> None:
    """A single configuration would have plain inputs of 64 bits alone."""
    result = session(f"""
import dataclasses

class Dense:
    name = "dense"

    def allocate(self, geometry, inputs, buffers):
        lens = inputs.seq_lens
        dense = lens.as_strided(lens.shape, (1,), lens.storage_offset())
        self.inner = Right()
        self.inner.allocate(geometry, dataclasses.replace(inputs, seq_lens=dense), buffers)

    def before_replay(self): pass

    def in_graph(self): self.inner.in_graph()

def test(dsa):
    dsa.verify("decode", Dense, batches={batches}, rounds=1)
""")
    result.assert_outcomes(passed=not found, failed=found)


@pytest.mark.parametrize(
    "arguments, forms",
    [
        ("batches=(4,)", "plain int64, strided int32"),
        ("batches=(1, 4)", "plain int64, strided int32"),
        ("batches=(1, 2, 4)", "plain int64, offset int32, strided int64"),
        ("batches=(4,), input_view='offset'", "offset int64, offset int32"),
        ("batches=(4,), input_view='offset', index_dtype='int64'", "offset int64"),
    ],
)
def test_strided_and_short_inputs_are_part_of_it(session, arguments: str, forms: str) -> None:
    result = session(f"""
from unittest import mock
from dsa_verify.run.runner import Runner

def test(dsa):
    configs = []
    with mock.patch.object(Runner, "matrix", lambda self, given, *rest: configs.extend(given)):
        with pytest.raises(pytest.fail.Exception):  # nothing was verified
            dsa.verify("decode", {arguments})
    of_inputs = [config.geometry for config in configs]
    assert ", ".join(f"{{each.input_view}} {{each.index_dtype}}" for each in of_inputs) == "{forms}"
""")
    result.assert_outcomes(passed=1)


def test_the_text_of_a_failure(session) -> None:
    result = session(WRONG)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    text = re.sub(r"[0-9a-f]{8}\.json", "X.json", result.stdout.str())
    text = re.sub(r"request \d+", "request R", re.sub(r"on (cpu|cuda:\d+):", "on DEVICE:", text))
    assert OUTPUT in text


def test_the_reproduce_line_shows_the_finding_again(session, pytester: pytest.Pytester) -> None:
    (pytester.mkdir("lib") / "pipeline.py").write_text(
        "from dsa_verify.subjects.faults import plant\n"
        "from dsa_verify.systems.catalogue import get_system, subject_factory\n"
        "def Mine(): return plant('skip_refresh', subject_factory(get_system('decode'), None)[1])()\n"
    )
    pytester.syspathinsert(pytester.path / "lib")
    result = session("import pipeline\n" + WRONG.replace("Wrong", "pipeline.Mine"))
    [line] = (line for line in result.outlines if line.startswith("next: "))
    assert line.startswith("next: PYTHONPATH=lib dsa-verify replay dsa-findings/")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    replay = subprocess.run(
        line.removeprefix("next: "), shell=True, env=environment, capture_output=True, text=True, check=False
    )
    assert replay.returncode == 1, replay.stdout + replay.stderr
    assert "never written: dsa_cache_seqlens_int32[0]" in replay.stdout


def test_a_local_subject_is_reproduced_by_its_test(session) -> None:
    result = session(
        "@pytest.mark.parametrize('name', ['x y'])\n"
        "def test(dsa, name): dsa.verify('decode', lambda: Wrong(), batches=(1,))",
        "--dsa-rounds=2",
        "--dsa-seed=3",
    )
    result.stdout.fnmatch_lines(
        ["next: pytest 'test_mine.py::test[[]x y]' --dsa-preset=tiny --dsa-rounds=2 --dsa-seed=3"]
    )


def test_case(session, pytester: pytest.Pytester) -> None:
    session(WRONG)
    [case] = pytester.path.glob("dsa-findings/*.json")
    result = session(
        f"""
def test_as_found(dsa): dsa.case("{case}")
def test_mended(dsa): assert dsa.case("{case}", Right).counts.rounds_checked == 1
""",
        "--dsa-trust",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*test_as_found*", "decode, subject test_mine:Wrong, *", "never written: *"])


def test_a_case_without_rounds_fails(session, pytester: pytest.Pytester) -> None:
    pytester.makefile(
        ".json", empty='{"schema": 1, "system": "decode", "preset": "tiny", "buckets": [1], "rounds": []}'
    )
    result = session("def test(dsa): dsa.case('empty.json')")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["decode, subject triton, *: no round was checked, so nothing is verified; *"])


@pytest.mark.parametrize(
    "call, message",
    [
        ("verify('decod')", "system 'decod' is unknown; known systems: *"),
        ("verify('decode', 'fast')", "subject 'fast' is unknown for decode; known: *"),
        ("verify('decode', '')", "subject '' is unknown for decode; known: *"),
        ("verify('decode', preset='')", "preset: '' is unknown; known presets: *"),
        ("verify('decode', Right())", "subject: <*> is a Decode already; give its class, *"),
        ("verify('decode', drafts=(2,))", "drafts: (2,) has no effect in decode; remove it"),
        ("verify('target_verify', draft_tokens=3)", "draft_tokens: set by the matrix; give drafts=(...) instead"),
        ("verify('decode', batches=())", "batches: () must name at least one number, each an integer of 1 or *"),
        ("verify('decode', batches=(0,))", "batches: (0,) must name at least one number, *"),
        ("verify('decode', batches=2)", "batches: 2 must name at least one number, *"),
        ("verify('decode', batches=('2',))", "batches: ('2',) must name at least one number, *"),
        ("verify('decode', batches='2')", "batches: '2' must name at least one number, *"),
        ("verify('decode', batches=(True,))", "batches: (True,) must name at least one number, *"),
        ("verify('decode', batches=(2, 2))", "batches: (2, 2) names a number twice; name each once"),
        ("verify('target_verify', drafts=2.0)", "drafts: 2.0 must name at least one number, *"),
        ("verify('decode', rounds=0)", "rounds: 0 must be an integer of 1 or more, or nothing is verified"),
        ("verify('decode', rounds=1.5)", "rounds: 1.5 must be an integer of 1 or more, or nothing is verified"),
        ("verify('decode', preset='huge')", "preset: 'huge' is unknown; known presets: *"),
        ("verify('decode', pages=3)", "'pages': unknown geometry field; known fields: *"),
        ("case('absent.json')", "absent.json: cannot be read as a case file *"),
    ],
)
def test_misuse_points_at_the_line(session, call: str, message: str) -> None:
    result = session(f"def test(dsa):\n    dsa.{call}")
    result.assert_outcomes(failed=1)
    pattern = re.sub(r"\[", "[[]", message)
    result.stdout.fnmatch_lines([f">*dsa.{call}", f"E *UsageError: {pattern}", "test_mine.py:*: UsageError"])
    assert "fixture.py" not in result.stdout.str()


def test_a_subject_of_no_name_does_not_replay_a_case(session, pytester: pytest.Pytester) -> None:
    session(WRONG)
    [case] = pytester.path.glob("dsa-findings/*.json")
    result = session(f"def test(dsa): dsa.case({str(case)!r}, '')")
    result.stdout.fnmatch_lines(["E *UsageError: subject '' is unknown for decode; known: *"])


def test_inputs_as_the_test_asks(session, pytester: pytest.Pytester) -> None:
    session(WRONG.replace("batches=(1,)", "batches=(1,), index_dtype='int32', input_view='strided'"))
    [case] = pytester.path.glob("dsa-findings/*.json")
    assert '"input_view": "strided"' in case.read_text()
    assert '"index_dtype": "int32"' in case.read_text()


def test_a_lack_of_memory_fails_the_test_in_words(session) -> None:
    result = session("""
import torch
from dsa_verify.subjects.pipelines.basic import Decode

class Greedy(Decode):
    def before_replay(self):
        torch.empty(1 << 60, dtype=torch.uint8)

def test_greedy(dsa):
    dsa.verify("decode", Greedy, batches=(1,))

def test_after(dsa): dsa.verify("decode", batches=(1,), rounds=1)
""")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*out of memory, so there is no verdict about the subject: * raised *"])


def test_a_lost_device_ends_the_session(session, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
from dsa_verify.subjects.faults import plant
from dsa_verify.systems.catalogue import get_system, subject_factory

def test_lost(dsa):
    shipped = subject_factory(get_system("decode"), None)[1]
    dsa.verify("decode", plant("lost_device", shipped), batches=(1,))

def test_after(dsa): dsa.verify("decode")
""")
    # On a GPU the device is really lost.
    run = pytester.runpytest_subprocess if torch.cuda.is_available() else pytester.runpytest_inprocess
    result = run("--dsa-preset=tiny")
    result.assert_outcomes(failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*the rounds up to then are in dsa-findings*", "!*the device is lost: *!"])
