"""Verdicts on a GPU: the child forks before CUDA is there, and a crash in a long chunk leaves the rounds up to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsa_verify.rounds.case_file import read_case
from dsa_verify.run.verify import JOURNAL_ROUNDS

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MINE = """
import os, time
from dsa_verify.subjects.pipelines.basic import Decode

class Late(Decode):
    calls = 0

    def before_replay(self):
        super().before_replay()
        self.calls += 1
        if self.calls == 120:
            self.strike()

class Right(Late):
    def strike(self): pass

class Exits(Late):
    def strike(self): os._exit(0)

class Spins(Late):
    def strike(self): time.sleep(1000)
"""
ENDS = {
    "Right": (0, "all equal; exit status 0"),
    "Exits": (
        1,
        "the process ended itself with exit status 0, as os._exit does, in before_replay of round",
    ),
    "Spins": (1, "no progress for 20 s in before_replay of round"),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_end_in_a_long_chunk(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    command = [
        sys.executable,
        "-m",
        "dsa_verify.cli.main",
        "fuzz",
        "--system",
        "decode",
        "--batch",
        "4",
        "--timeout",
        "20",
    ]
    done = subprocess.run(
        [*command, "--device", "cuda", "--preset", "tiny", "--rounds", "2000", "--subject", f"mine:{name}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
    )
    status, words = ENDS[name]
    assert (done.returncode, words in done.stdout) == (status, True), done.stdout + done.stderr
    if status:
        case = re.search(r"reproduce: dsa-verify replay (\S+)", done.stdout)[1]  # type: ignore[index]
        number = int(re.search(r"in before_replay of round (\d+)", done.stdout)[1])  # type: ignore[index]
        rounds = read_case(tmp_path / case).rounds
        assert len(rounds) == number + 1 > JOURNAL_ROUNDS
        assert f"(mine:{name}, bucket {rounds[-1].bucket})" in done.stdout
