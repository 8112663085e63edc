"""Verdicts that arrive, and what is said where none does.

A run is forked off this process, where everything is imported already; that it forks in turn is what is tested. The
last tests start the command as a user does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import forked
import pytest

from dsa_verify.rounds.case_file import read_case
from dsa_verify.run.verify import JOURNAL_ROUNDS

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("DSA_VERIFY_KILLS", "3"))
SMALL = ("--system", "decode", "--preset", "tiny", "--batch", "1")
WARM_UPS, STRIKE = 2, 3
# Each strikes once, in a given call of before_replay of bucket 1, of which the first WARM_UPS are no rounds.
SUBJECTS = """
import ctypes, os, signal, sys, threading, time
from dsa_verify.subjects.pipelines.basic import Decode

class Late(Decode):
    calls, at, struck = 0, {at}, False

    def before_replay(self):
        super().before_replay()
        self.calls += 1
        if self.calls == self.at and not Late.struck:
            Late.struck = True
            self.strike()

class Exits(Late):
    def strike(self): os._exit(0)

class Exits7(Late):
    def strike(self): os._exit(7)

class CExits(Late):
    def strike(self): ctypes.CDLL(None)._exit(0)

class Faults(Late):
    def strike(self): os.kill(os.getpid(), signal.SIGSEGV)

class Aborts(Late):
    def strike(self): ctypes.CDLL(None).abort()

class Leaves(Late):
    def strike(self): sys.exit(0)

class Spins(Late):
    def strike(self):
        while True:
            time.sleep(0.01)

class Killed(Late):
    def strike(self): os.kill(os.getpid(), signal.SIGKILL)

class Forks(Late):
    def strike(self):
        if os.fork():
            os.wait()

class Starts(Late):
    def strike(self):
        import subprocess
        subprocess.run(["true"], check=True)
        pid = os.fork()
        if not pid:
            os._exit(3)
        os.waitpid(pid, 0)

class Leaks(Late):
    def strike(self): threading.Thread(target=time.sleep, args=(1000,), name="leaked").start()

class Silences(Late):
    def strike(self):
        os.close(1)
        os.close(2)
        sys.stdout.close()
        sys.stdout = sys.stderr = None

class Redirects(Late):
    def strike(self):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, sys.stdout.fileno())

class AllocateExits(Decode):
    def allocate(self, geometry, inputs, buffers): os._exit(0)

class CaptureExits(Decode):
    times = 0

    def in_graph(self):
        self.times += 1
        if self.times == 3:
            os._exit(0)
        super().in_graph()
"""

Run = Callable[..., tuple[int, str]]


def strike_in(call: int, folder: Path) -> None:
    (folder / "mine.py").write_text(SUBJECTS.format(at=WARM_UPS + call))


def round_of(call: int, case: Path) -> int:
    """The last round of `case`, which must be the one in which bucket 1 is prepared for time `call`."""
    *before, last = read_case(case).rounds
    calls = sum(1 + round_.twice for round_ in before if round_.bucket == 1)
    assert last.bucket == 1
    assert calls < call <= calls + 1 + last.twice
    return len(before)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the command in a child of this process; (what waiting for it gave, everything printed)."""
    strike_in(STRIKE, tmp_path)

    def run(*arguments: str, interrupt: Callable[[int], None] | None = None) -> tuple[int, str]:
        with (tmp_path / "out").open("w") as out:
            process = forked.start(tmp_path, arguments, out, out)
        if interrupt is not None:
            interrupt(process.pid)
        return process.wait(), (tmp_path / "out").read_text()

    return run


def case_of(text: str, folder: Path) -> tuple[Path, list[str]]:
    """The case that `text` names, and the command that replays it."""
    command = shlex.split(re.findall(r"(?:reproduce|the rounds up to then): (dsa-verify replay .+)", text)[-1])
    return folder / command[2], command[1:]


CRASHES = "crashes: bucket 1: the process "
LATE = "in before_replay of round %"
ENDS = {
    "Exits": (1, f"{CRASHES}ended itself with exit status 0, as os._exit does, {LATE}; no verdict arrived"),
    "Exits7": (1, f"{CRASHES}ended itself with exit status 7, as os._exit does, {LATE}; no verdict arrived"),
    "CExits": (1, f"{CRASHES}ended itself with exit status 0, as os._exit does, {LATE}; no verdict arrived"),
    "Faults": (1, f"{CRASHES}was ended by SIGSEGV {LATE}; no verdict arrived"),
    "Aborts": (1, f"{CRASHES}was ended by SIGABRT {LATE}; no verdict arrived"),
    "Leaves": (1, "raises in before_replay: bucket 1: before_replay raised SystemExit: 0"),
    "Spins": (1, f"hangs: bucket 1: no progress for 4 s {LATE} (strike, "),
    "Forks": (1, f"forks: bucket 1: a copy of the process came back from the subject {LATE} and was ended"),
    "Killed": (3, f"by signal 9 (SIGKILL), by somebody, or by the kernel for want of memory, {LATE}"),
    "AllocateExits": (
        1,
        f"{CRASHES}ended itself with exit status 0, as os._exit does, in allocate; no verdict arrived",
    ),
    "CaptureExits": (1, f"{CRASHES}ended itself with exit status 0, as os._exit does, in capture; no verdict arrived"),
}
AT_ONCE = ("AllocateExits", "CaptureExits")
THE_SAME_AGAIN = ("Exits7", "CExits", "Killed", "CaptureExits")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in THE_SAME_AGAIN)) for name in ENDS]
)
def test_each_end_has_its_words_its_status_its_round_and_its_case(run: Run, tmp_path: Path, name: str) -> None:
    expected, words = ENDS[name]
    timeout = ("--timeout", "4" if name == "Spins" else "60")
    status, text = run("replay", *SMALL, "--subject", f"mine:{name}", *timeout, "--json", "r.json", "--junit", "r.xml")
    assert status == expected, text
    path, command = case_of(text, tmp_path)
    if name in AT_ONCE:
        words = words.replace("bucket 1", "bucket 2")  # which is captured first
        assert len(read_case(path).rounds) == 1
    else:
        words = words.replace("%", str(round_of(STRIKE, path)))
    assert words in text
    assert json.loads((tmp_path / "r.json").read_text())["status"] == status
    assert not list((tmp_path / "dsa-findings").glob("running-*"))
    if name == "Spins":  # the stack of a hang names the calls of the subject
        stack = re.findall(r"^  in (\w+), (.*):\d+$", text, re.MULTILINE)
        assert stack == [("strike", str(tmp_path / "mine.py")), ("before_replay", str(tmp_path / "mine.py"))]
        assert 'type="hangs"' in (tmp_path / "r.xml").read_text()
    again, said = run(*command, *timeout)
    assert (again, words in said) == (status, True), said


@pytest.mark.parametrize("name, words", [("Leaks", "1 thread(s) still run and are ended: leaked"), ("Starts", "")])
def test_a_thread_that_is_left_or_a_program_that_is_started_changes_no_verdict(run: Run, name: str, words: str) -> None:
    start = time.monotonic()
    status, text = run("replay", *SMALL, "--subject", f"mine:{name}")
    assert (status, "17 replays checked, all equal; exit status 0" in text, words in text) == (0, True, True), text
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("name", ["Silences", "Redirects"])
def test_the_report_outlives_the_streams_of_the_subject(run: Run, name: str) -> None:
    status, text = run("replay", *SMALL, "--subject", f"mine:{name}", "--fault", "skip_refresh")
    assert (status, "finding(s); exit status 1" in text) == (1, True), text
    assert text.count("FOUND in decode") >= 1


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("replay", id="in a long chunk, which is not written to disk before it is replayed"),
        pytest.param("fuzz", id="in a later chunk, whose case holds the one before"),
    ],
)
def test_a_crash_leaves_all_rounds_up_to_its_own(run: Run, tmp_path: Path, command: str) -> None:
    strike_in(60, tmp_path)
    rounds = "110" if command == "replay" else "440"  # of which the first configuration gets its share
    status, text = run(command, *SMALL, "--rounds", rounds, "--subject", "mine:Exits", "--json", "r.json")
    assert [finding["diagnosis"] for finding in json.loads((tmp_path / "r.json").read_text())["findings"]] == [
        "crashes"
    ]
    path, again = case_of(text, tmp_path)
    number = round_of(60, path)
    assert number > JOURNAL_ROUNDS
    assert (status, f"in before_replay of round {number};" in text) == (1, True), text
    if command == "fuzz":
        status, said = run(*again)
        assert (status, case_of(said, tmp_path)[0]) == (1, path)


def test_what_was_found_before_the_end_is_not_lost(run: Run, tmp_path: Path) -> None:
    """Findings of an earlier configuration stand in the results of a run that a later one ends."""
    (tmp_path / "both.py").write_text("""
import os
from dsa_verify.subjects.pipelines.basic import TargetVerify

class Both(TargetVerify):
    def allocate(self, geometry, inputs, buffers):
        if geometry.draft_tokens == 4:
            os._exit(0)
        super().allocate(geometry, inputs, buffers)

    def in_graph(self): pass
""")
    drafts = ("--draft-tokens", "2", "--draft-tokens", "4", "--keep-going")
    small = ("--system", "target_verify", "--preset", "tiny", "--batch", "1", "--rounds", "2")
    status, text = run("replay", *small, *drafts, "--subject", "both:Both", "--json", "r.json")
    result = json.loads((tmp_path / "r.json").read_text())
    diagnoses = [finding["diagnosis"] for finding in result["findings"]]
    assert (status, diagnoses[0], diagnoses[-1]) == (1, "never written", "crashes"), text
    assert all((tmp_path / finding["case"]).exists() for finding in result["findings"])


def test_an_interrupt_is_told_to_the_child_and_the_results_are_kept(run: Run, tmp_path: Path) -> None:
    def interrupt(pid: int) -> None:
        until(lambda: (tmp_path / "out").exists() and "rounds of" in (tmp_path / "out").read_text())
        os.kill(pid, signal.SIGINT)

    status, text = run("fuzz", *SMALL, "--rounds", "1000000", "--json", "r.json", interrupt=interrupt)
    assert (status, "interrupted; results so far are kept" in text) == (130, True), text
    assert json.loads((tmp_path / "r.json").read_text())["status"] == 130


def test_a_signal_that_ends_the_command_ends_both(run: Run, tmp_path: Path) -> None:
    children: list[int] = []

    def end(pid: int) -> None:
        until(lambda: (tmp_path / "out").exists() and "emulated" in (tmp_path / "out").read_text())
        children.extend(children_of(pid))
        os.kill(pid, signal.SIGTERM)

    assert run("fuzz", *SMALL, "--rounds", "1000000", interrupt=end)[0] == -signal.SIGTERM
    assert len(children) == 1
    assert not is_alive(children[0])


# As a user starts it -------------------------------------------------------------------------------------------------


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    with (folder / "out").open("w") as out:
        return subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stdout=out, stderr=out, env=environment)


@pytest.mark.slow  # the kills below see that it has a child, and the runs above what is said of that one's end
def test_the_command_itself_is_supervised(tmp_path: Path) -> None:
    strike_in(STRIKE, tmp_path)
    assert start(tmp_path, "dsa_verify.cli.main", "replay", *SMALL, "--subject", "mine:Exits").wait() == 1
    assert ENDS["Exits"][1].partition("%")[0] in (tmp_path / "out").read_text()


TESTS = """
import mine

class Wrong(mine.Decode):
    def in_graph(self): pass

def test_wrong(dsa): dsa.verify("decode", Wrong, batches=(1,), rounds=2)
def test_long(dsa): dsa.verify("decode", batches=(1,), rounds=1_000_000)
"""
FORKED_BY_S = 4.0  # by then each has forked, which comes before anything heavy is imported
VICTIMS = (
    ("dsa_verify.cli.main", "replay", "--preset", "tiny", "--fault", "skip_refresh", "--keep-going"),
    ("dsa_verify.cli.main", "fuzz", *SMALL, "--rounds", "100000000"),
    ("pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--dsa-device=cpu", "-q", "test_mine.py"),
)


def test_a_kill_at_any_moment_is_never_status_0_and_loses_no_finding(tmp_path: Path) -> None:
    """Of the command or of its child; three at a time, as most of it is waiting."""
    draw = random.Random(12)
    for first in range(0, KILLS, len(VICTIMS)):
        processes, moments = [], []
        for i, command in enumerate(VICTIMS[: KILLS - first]):
            folder = tmp_path / f"{first + i}"
            folder.mkdir()
            strike_in(-WARM_UPS - 1, folder)
            (folder / "test_mine.py").write_text(TESTS)
            processes.append((folder, start(folder, *command)))
            moments.append((time.monotonic(), draw.uniform(0.5, 8), draw.random() < 0.5))
        for (folder, process), (start_s, delay_s, is_child) in sorted(
            zip(processes, moments, strict=True), key=lambda each: sum(each[1][:2])
        ):
            time.sleep(max(start_s + delay_s - time.monotonic(), 0))
            children = children_of(process.pid)
            assert children or delay_s < FORKED_BY_S
            assert process.poll() is None, (folder / "out").read_text()
            os.kill(children[0] if is_child and children else process.pid, signal.SIGKILL)
            status = process.wait()
            text = (folder / "out").read_text()
            assert status not in (0, 1), text
            assert status == -signal.SIGKILL or "no verdict arrived" in text or "pytest" in process.args, text
            until(lambda left=children: not any(is_alive(pid) for pid in left))
            for case in re.findall(r"reproduce: dsa-verify replay (\S+)|case: +(\S+)", text):
                assert read_case(folder / (case[0] or case[1])).rounds


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
