"""On a GPU: a subject that stores through a wild pointer, one that spins for ever and one that exhausts memory are each
attributed to their case, and the campaign goes on in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsa_verify.rounds.case_file import read_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SUBJECTS = """
import torch
from dsa_verify.subjects.faults.conduct import IllegalAccess
from dsa_verify.subjects.pipelines.basic import Decode

LAST_GOOD = 6  # calls of before_replay, of which the warm-up makes two


class _Late(Decode):
    def allocate(self, *given):
        super().allocate(*given)
        self._calls = 0

    def before_replay(self):
        self._calls += 1
        if self._calls > LAST_GOOD:
            self.misbehave()


def wild():
    return IllegalAccess(Decode(), "")


class Spins(_Late):
    def misbehave(self):
        torch.cuda._sleep(1 << 62)


class Greedy(_Late):
    def misbehave(self):
        torch.empty(1 << 44, dtype=torch.uint8, device="cuda")
"""


def campaign(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-m", "dsa_verify", "campaign", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.parametrize(
    "subject, ended, diagnosis",
    [("wild", "device lost", "device lost"), ("Spins", "hangs", "hangs"), ("Greedy", "out of memory", None)],
)
def test_a_subject_that_takes_its_process_down(tmp_path: Path, subject: str, ended: str, diagnosis: str | None) -> None:
    (tmp_path / "gpu_subjects.py").write_text(SUBJECTS)
    root = str(tmp_path / "campaign")
    options = ["--systems", "decode", "--subject", f"gpu_subjects:{subject}", "--device", "cuda", "--batch", "4"]
    options += ["--set", "context=640", "--set", "request_rows=16", "--timeout", "20"]
    done = campaign(tmp_path, "run", root, *options, "--rounds-per-shard", "64", "--max-rounds", "128")
    said = done.stdout + done.stderr
    facts = json.loads(campaign(tmp_path, "report", root, "--json").stdout)
    attempts = [attempt["ended"] for attempt in facts["attempts"]]
    assert ended in attempts, said
    assert facts["shards"] == 2, "the campaign went on after the first"
    real = [finding for finding in facts["findings"] if not finding["planted"]]
    if diagnosis is None:
        assert real == [], "a lack of memory is told apart from findings"
        return
    (finding,) = real
    assert finding["diagnosis"] == diagnosis, said
    assert finding["state"] in ("confirmed", "shrunk")
    case = read_case(Path(root) / finding["path"])
    assert case.fault is None
    assert case.rounds
