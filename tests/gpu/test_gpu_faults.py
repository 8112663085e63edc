"""On a GPU: every planted fault is caught in live CUDA graphs at the size of a real model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsa_verify.base.errors import STATUS_DEVICE_LOST
from dsa_verify.graphs import open_backend
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.case_file import read_case
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects import faults
from dsa_verify.subjects.faults.conduct import WrongOnce
from dsa_verify.systems.catalogue import SYSTEMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
# What a fault needs of the geometry to have an effect.
NEEDS: dict[str, dict[str, object]] = {
    "unclamped_window": {"padded_mode": "draft_extend"},
    "wrong_owner": {"dcp_size": 2},
    "advances_twice": {"warm_ups": "together"},
}
CASES = [(system, name) for system in SYSTEMS for name in faults.names(system) if name != "lost_device"]


@pytest.fixture(autouse=True)
def strikes_again() -> Iterator[None]:
    WrongOnce.struck = False
    yield
    WrongOnce.struck = False


@pytest.mark.parametrize("system, name", CASES)
def test_a_fault_is_caught_in_cuda_graphs(system: str, name: str):
    preset = "glm53_flash" if name == "stale_draft_steps" else SYSTEMS[system].preset("cuda")
    needed = NEEDS.get(name, {})
    geometry = SYSTEMS[system].geometry(preset, needed)
    config = diagnostic_matrix(SYSTEMS[system], geometry, batches=[4], drafts=[4], fixed=frozenset(needed))[0]
    backend = open_backend(torch.device("cuda", torch.cuda.current_device()), "cuda")
    subject = "glue" if name == "glues_idle" else None
    setup = ReplaySetup.make(SYSTEMS[system], config.geometry, config.buckets, 0, subject, name, backend)
    findings = verify_rounds(setup, setup.with_foreign_work(config.chunks()), Counts(), folder=None)
    assert findings
    assert findings[0].diagnosis in faults.FAULTS[name].diagnoses, findings[0].sentence


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_lost_device_ends_the_process_with_its_own_status(system: str, tmp_path: Path):
    """In a process of its own: after an illegal access nothing it says may be believed."""
    command = [sys.executable, "-m", "dsa_verify.cli.main", "replay", "--system", system, "--fault", "lost_device"]
    command += ["--batch", "4", "--device", "cuda", "--findings", str(tmp_path)]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == STATUS_DEVICE_LOST, done.stdout + done.stderr
    (path,) = tmp_path.glob("device-lost-*.json")
    assert read_case(path).fault == "lost_device"
    assert "illegal memory access" in done.stdout + done.stderr
