"""The guard: `--dsa-no-guard`, `--dsa-timeout`, and sessions whose process is ended under them.

Most sessions here only say that a subject is running: what is said of its end comes from that. One has a subject.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsa_verify.pytest_plugin import guard as pytest_guard

# A test in which the process is, as far as anybody can see, in round 12 of a subject.
IN_A_SUBJECT = """
import os, signal, threading, time
from dsa_verify.contract import progress
from dsa_verify.pytest_plugin import guard as pytest_guard

def verify():
    pytest_guard.begin_to_verify()
    slots = progress.current().slots
    slots[progress.STAGE], slots[progress.BUCKET], slots[progress.ROUND] = progress.BEFORE_REPLAY, 4, 12
    progress.current().test("pytest test_mine.py::test")
    return slots
"""
SAID = "dsa-verify: crashes: bucket 4: the process ended itself with exit status 0, as os._exit does, in before_replay*"


def test_a_subject_that_ends_the_process_fails_the_session(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_mine="""
import os
import mine

def test_right(dsa): dsa.verify("decode", batches=(1,), rounds=2)
def test_wrong(dsa): dsa.verify("decode", mine.Mine, batches=(1,), rounds=6)
def test_never(dsa): assert False
""",
        mine="""
import os
from dsa_verify.subjects.pipelines.basic import Decode

class Mine(Decode):
    calls = 0

    def before_replay(self):
        super().before_replay()
        self.calls += 1
        if self.calls == 2 + 3:
            os._exit(0)
""",
    )
    result = pytester.runpytest_subprocess("--dsa-device=cpu", "--dsa-preset=tiny")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "dsa-verify: crashes: bucket 1: the process ended itself with exit status 0, as os._exit does, in before_*",
            "  case:      dsa-findings/decode-crashes-*.json",
            "  reproduce: pytest test_mine.py::test_wrong --dsa-device=cpu --dsa-preset=tiny",
            "dsa-verify: the session did not come to its end; exit status 1",
        ]
    )
    assert [path.name.partition("-crashes-")[0] for path in Path("dsa-findings").iterdir()] == ["decode"]


@pytest.mark.parametrize(
    "body, options, status, said",
    [
        ("verify(); os._exit(0)", (), 1, SAID),
        ("verify(); os._exit(0)", ("-s",), 1, SAID),
        (
            "verify()[progress.STAGE] = 0; os._exit(0)",
            (),
            3,
            "dsa-verify: no verdict arrived: *in code that is not*",
        ),
        (
            "verify(); os.kill(os.getpid(), 11)",
            (),
            1,
            "dsa-verify: crashes: bucket 4: the process was ended by SIG*",
        ),
        ("verify(); os.kill(os.getpid(), 9)", (), 3, "dsa-verify: no verdict arrived: *by signal 9 (SIGKILL)*"),
        ("verify(); time.sleep(60)", ("--dsa-timeout=0.5",), 1, "dsa-verify: hangs: bucket 4: no progress for 0.5 s *"),
        ("verify()[progress.STAGE] = 0; time.sleep(1.5)", ("--dsa-timeout=0.5",), 0, "*1 passed*"),
        ("verify()[progress.STAGE] = 0; assert False", (), 1, "*1 failed*"),
    ],
)
def test_an_end_without_a_verdict_has_words(
    pytester: pytest.Pytester, body: str, options: tuple[str, ...], status: int, said: str
) -> None:
    pytester.makepyfile(test_mine=f"{IN_A_SUBJECT}\ndef test(): {body}")
    result = pytester.runpytest_subprocess(*options)
    assert result.ret == status
    result.stdout.fnmatch_lines([said])


@pytest.mark.parametrize(
    "body, status",
    [
        ("os._exit(0)", 0),
        ("os._exit(5)", 5),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.execv('/bin/sh', ['sh', '-c', 'exit 7'])", 7),
        ("pytest.exit('enough', 9)", 9),
        ("threading.Thread(target=time.sleep, args=(1,)).start()", 0),
    ],
)
def test_a_session_that_verifies_nothing_ends_as_it_did(pytester: pytest.Pytester, body: str, status: int) -> None:
    pytester.makepyfile(f"import os, pytest, signal, threading, time\ndef test(): {body}")
    result = pytester.runpytest_subprocess()
    assert result.ret == status
    assert "dsa-verify:" not in result.stdout.str()


def test_what_ends_after_the_session_makes_nothing_green(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import atexit, os\ndef test():\n    atexit.register(os._exit, 0)\n    assert False")
    assert pytester.runpytest_subprocess().ret == 1


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 2), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_to_the_session_ends_it_as_it_did(pytester: pytest.Pytester, number: int, status: int) -> None:
    pytester.makepyfile("import pathlib, time\ndef test():\n    pathlib.Path('here').touch()\n    time.sleep(60)")
    process = started(pytester)
    while not Path("here").exists():
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(30) == status
    assert ("no tests ran" in Path("out").read_text()) == (number == signal.SIGINT)


@pytest.mark.parametrize(
    "options, guarded",
    [((), True), (("--dsa-no-guard",), False), (("-n0",), True), (("--collect-only",), False)],
)
def test_the_guard_is_one_process_more(pytester: pytest.Pytester, options: tuple[str, ...], guarded: bool) -> None:
    pytester.makeconftest("import os, pathlib\npathlib.Path('parent').write_text(str(os.getppid()))")
    pytester.makepyfile("def test(): pass")
    process = started(pytester, *options)
    assert process.wait(30) == 0
    assert (Path("parent").read_text() == str(process.pid)) is guarded


def test_a_session_within_a_program_is_not_guarded(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_mine="import os\ndef test(): print('parent', os.getppid())")
    program = "import os, pytest\nprint('program', os.getppid())\npytest.main(['-sq', 'test_mine.py'])"
    words = pytester.run(sys.executable, "-c", program).stdout.str().split()
    assert words[words.index("program") + 1] == words[words.index("parent") + 1]


def test_cases_that_a_process_ended_in_are_told_from_those_that_run(tmp_path: Path) -> None:
    """Which is what the controller of pytest-xdist says of a worker that died."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid in (gone.pid, os.getpid()):
        (tmp_path / f"running-{pid}.json").touch()
    assert list(pytest_guard.left_cases(tmp_path)) == [tmp_path / f"ended-{gone.pid}.json"]
    assert not list(pytest_guard.left_cases(tmp_path))


def test_a_worker_that_dies_fails_its_test_and_leaves_its_case(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
import os, pathlib
def test():
    folder = pathlib.Path("dsa-findings")
    folder.mkdir()
    (folder / f"running-{os.getpid()}.json").touch()
    os._exit(0)
""")
    result = pytester.runpytest_subprocess("-n1", "--max-worker-restart=0")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["a process ended while it ran this case: dsa-findings/ended-*.json"])


def started(pytester: pytest.Pytester, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    with Path("out").open("w") as out:
        process: subprocess.Popen[bytes] = pytester.popen(command, stdout=out, stderr=out)
    return process
