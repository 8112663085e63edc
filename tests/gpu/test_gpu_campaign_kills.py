"""On a GPU: the supervisor or a shard's process killed with -9 at random moments; after resuming, no finding is lost or
doubled, and the report says what was lost of the work in flight.

DSA_VERIFY_KILLS says how many moments. The same on a CPU, with played shards: tests/campaign/test_campaign.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fuzz.campaign.locks import holder
from fuzz.campaign.shard_folder import read_progress, shard_folder, shard_numbers
from fuzz.campaign.supervisor import runs_in

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

KILLS = int(os.environ.get("DSA_VERIFY_KILLS", "2"))
SHARDS = 2
ROUNDS = 2048  # of a shard
PATIENCE_S = 300.0
DEVICE = "cuda"
AT_ONCE = 5  # campaigns, each with at most so many kills
MOST_KILLS = 10
SUBJECT = """
from dsa_verify.subjects.pipelines.basic import Decode


class WrongLength(Decode):
    def in_graph(self):
        super().in_graph()
        self._buffers["cache_seqlens_int32"].add_(1)  # whatever the length, so that it shrinks in no time
"""


class Run:
    """Campaigns in `folder` of the subject that is there, on `device`."""

    def __init__(self, folder: Path, device: str) -> None:
        (folder / "wrong_subject.py").write_text(SUBJECT)
        paths = [str(folder), os.environ.get("PYTHONPATH", "")]
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        self._options = ["--systems", "decode", "--subject", "wrong_subject:WrongLength", "--device", device]
        self._options += ["--batch", "4", "--set", "context=640", "--set", "request_rows=16"]
        self._options += ["--rounds-per-shard", str(ROUNDS), "--max-rounds", str(SHARDS * ROUNDS), "--workers", "1"]

    def start(self, root: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dsa_verify", "campaign", "run", str(root), *self._options]
        return subprocess.Popen(command, env=self._environment, stdout=subprocess.DEVNULL)

    def report(self, root: Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "dsa_verify", "campaign", "report", str(root), "--json"]
        facts: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
        return facts


def at_work(root: Path) -> list[int]:
    """The shards' processes."""
    folders = [shard_folder(root, number) for number in shard_numbers(root)]
    last = [(folder, holder(folder / "lock")) for folder in folders]
    return [each.pid for folder, each in last if each is not None and runs_in(folder, each.pid)]


def in_flight(root: Path) -> int:
    return sum(read_progress(shard_folder(root, number))["rounds"] for number in shard_numbers(root))


def survive(run: Run, root: Path, most: int, draw: random.Random, longest_s: float) -> int:
    """Run the campaign in `root` to its end through up to `most` kills, `longest_s` apart at most; how many there
    were."""
    kills, process = 0, run.start(root)
    try:
        while process.poll() is None:
            due = time.monotonic() + draw.uniform(0.0, longest_s)
            # The first of them while rounds are in flight, the others whenever they come.
            while process.poll() is None and (time.monotonic() < due or (not kills and not in_flight(root))):
                assert time.monotonic() < due + PATIENCE_S
                time.sleep(0.01)
            if kills == most or process.poll() is not None:
                continue
            if kills % 3:
                for pid in at_work(root)[:1]:
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
            else:
                process.kill()
                process.wait()
                kills += 1
                process = run.start(root)
    finally:
        process.kill()
    assert process.wait() == 1
    return kills


def shown(facts: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(f["key"], f["state"], f["sightings"], f["shard"], f["path"]) for f in facts["findings"]]


def test_killed_at_random_moments_it_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    """As many campaigns as KILLS kills take, some of them at once."""
    run, started = Run(tmp_path, DEVICE), time.monotonic()
    assert run.start(tmp_path / "undisturbed").wait(PATIENCE_S * SHARDS) == 1
    longest_s = (time.monotonic() - started) / SHARDS
    whole = run.report(tmp_path / "undisturbed")
    assert {finding["field"] for finding in whole["findings"]} == {"cache_seqlens_int32"}

    def killed(number: int, most: int) -> tuple[int, int]:
        """(kills, rounds lost) of one campaign that lost and doubled nothing."""
        root = tmp_path / f"killed-{number}"
        kills = survive(run, root, most, random.Random(number), longest_s)
        assert kills
        facts = run.report(root)
        assert shown(facts) == shown(whole)
        assert facts["rounds_executed"] == whole["rounds_executed"]
        assert facts["canaries"] == whole["canaries"]
        assert {attempt["ended"] for attempt in facts["attempts"]} <= {"interrupted", "killed"}
        return kills, facts["rounds_lost_in_flight"]

    number, left, lost = 0, KILLS, 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while left:
            shares = [min(MOST_KILLS, left - i * MOST_KILLS) for i in range(min(AT_ONCE, -(-left // MOST_KILLS)))]
            ended = list(pool.map(killed, range(number, number + len(shares)), shares))
            number += len(shares)
            left -= sum(kills for kills, _ in ended)
            lost += sum(rounds for _, rounds in ended)
    print(f"{KILLS} kills over {number} campaigns, {lost} rounds reported lost")
    assert lost > 0
