"""On two GPUs: each xdist worker has one of its own, and the ranks of a decode context parallel group agree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs in one process"),
]

# Each waits for the other, so that both workers have one.
MEETING = """
import os, pathlib, time, pytest, torch
HERE = pathlib.Path({here!r})
@pytest.mark.parametrize("which", [0, 1])
def test_meet(dsa, which):
    assert dsa.verify("decode", batches=(2,), rounds=5, context=640).counts.rounds_checked == 5
    assert torch.cuda.device_count() == 1
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    (HERE / f"{{which}}.txt").write_text(f"{{os.environ['PYTEST_XDIST_WORKER']}} {{uuid}}")
    until = time.monotonic() + 120
    while not (HERE / f"{{1 - which}}.txt").exists():
        assert time.monotonic() < until, "the other worker did not come"
        time.sleep(0.1)
"""


def outside() -> dict[str, str]:
    """The environment without what a worker of this session was given."""
    kept = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "DSA_VERIFY_PINNED", "PYTEST_CURRENT_TEST")
    return {key: value for key, value in os.environ.items() if key not in kept}


def test_two_workers_have_two_gpus(tmp_path: Path) -> None:
    (tmp_path / "test_meeting.py").write_text(MEETING.format(here=str(tmp_path)))
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "load", "-q", "test_meeting.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=outside(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    workers, uuids = zip(*((tmp_path / f"{which}.txt").read_text().split() for which in (0, 1)), strict=True)
    assert len(set(workers)) == len(set(uuids)) == 2


@pytest.mark.parametrize("seed", [0, 1])
def test_two_ranks_equal_the_oracle_of_one_device(seed: int) -> None:
    """Both logarithms; write, localisation, gather and merge are in one graph a rank, NCCL included (contract 8)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "dsa_verify.cli.dcp_ranks", "--seed", str(seed)]
    environment = outside() | {"NCCL_NVLS_ENABLE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EQUAL: 2 ranks, 100 rounds, nccl collectives in one CUDA graph a rank" in done.stdout
