"""Stands in for what a shard does, for tests of what happens around it: processes, folders, reports.

Python imports this first where its folder is on PYTHONPATH. A shard then takes a fraction of a second, as torch is
never imported, and writes what a real one writes, in the same order. The plan's `subject` says how it behaves.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

CHUNK, CHUNKS = 8, 6
HELD_AT = 16
FATAL_ROUND = 19


def work_shard(spec: Any, folder: Path, device: str) -> None:
    from dsa_verify.base.atomic_write import write_atomically
    from fuzz.campaign.shard_folder import STOP_FILE, FindingKey, FindingRecord, ShardResult, campaign_root, write_json

    behaviour = spec.plan.subject
    ended = "complete"

    def find(field: str, planted: bool = False) -> None:
        facts = {"system": spec.system, "subject": behaviour, "field": field, "diagnosis": "stale", "sentence": field}
        facts |= {"contract": ["docs/contract/1-basic.md#1.1"]}
        key = FindingKey.of(facts, planted=planted)
        write_atomically(folder / "cases" / f"{field}.json", "{}")
        for state in ("found", "confirmed", "shrunk"):
            FindingRecord(key=key, state=state, finding=facts, case=f"cases/{field}.json").write(folder)
            time.sleep(0.005)

    for chunk in range(CHUNKS):
        start = chunk * CHUNK
        write_atomically(folder / "journal.json", case(start, CHUNK).to_json())
        write_json(folder / "progress.json", {"rounds": start, "checked": start}, durable=False)
        time.sleep(0.01)
        if start == HELD_AT:
            wait_while_held(campaign_root(folder) / "hold", folder / "progress.json")
        if start <= FATAL_ROUND < start + CHUNK:
            misbehave(behaviour)
            run_short(behaviour, spec.batch_divisor, folder)
        write_json(folder / "progress.json", {"rounds": start + CHUNK, "checked": start}, durable=False)
        if behaviour == "wrong" and (spec.seed + chunk) % 3 == 0:
            find(f"field_{(spec.seed + chunk) % 5}")
        if (campaign_root(folder) / STOP_FILE).exists():
            ended = "stopped"
            break
    if behaviour != "loses its canary":
        find("canary", planted=True)
    ShardResult(
        number=spec.number,
        system=spec.system,
        configuration="double",
        ended=ended,
        requested=CHUNK * CHUNKS,
        executed=start + CHUNK,
        canary={"fault": "skip_refresh", "verdict": "reported", "finding": "canary", "why": None},
        coverage={"possible": 10, "never": [["a", str(spec.number)], ["b", "always"]], "digest": ""},
    ).write(folder)


def run_short(behaviour: str, batch_divisor: int, folder: Path) -> None:
    """Run out of memory or of disk, if the behaviour says so."""
    from dsa_verify.base.errors import OutOfMemory

    if (behaviour == "hungry" and batch_divisor == 1) or behaviour == "insatiable":
        raise OutOfMemory("CUDA out of memory")
    if behaviour == "fills the disk" and not (folder / "was full").exists():
        (folder / "was full").touch()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))


def wait_while_held(held: Path, sign_of_life: Path) -> None:
    """So that a test can do something while work is in flight, however long that takes it."""
    end = time.monotonic() + 120
    while held.exists() and not held.with_name("stop").exists():
        assert time.monotonic() < end, "held for two minutes"
        os.utime(sign_of_life)
        time.sleep(0.05)


def misbehave(behaviour: str) -> None:
    if behaviour == "segfaults":
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour.startswith("exits with "):
        os._exit(int(behaviour.removeprefix("exits with ")))
    if behaviour == "leaves a helper and segfaults":
        helper = subprocess.Popen(["sleep", "600"], close_fds=False)
        with Path("helpers").open("a") as file:
            file.write(f"{helper.pid}\n")
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour.startswith("gets ") and not Path("got it").exists():
        Path("got it").touch()
        number = signal.Signals[behaviour.removeprefix("gets ")]
        # A test run in the background ignores some of them, and so would all that it starts.
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(1)
    if behaviour == "segfaults once" and not Path("segfaulted").exists():
        Path("segfaulted").touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "loses the device":
        from dsa_verify.base.errors import DeviceLost

        raise DeviceLost("the device reported: an illegal memory access")
    if behaviour == "hangs":
        time.sleep(60)
    if behaviour == "is misspelt":
        from dsa_verify.base.errors import UsageError

        raise UsageError("subject 'is misspelt' is unknown")
    if behaviour == "breaks the harness":
        raise AssertionError("a broken assumption")


def replay_step_by_step(path: Path, folder: Path, device: str) -> None:
    from dsa_verify.rounds.case_file import read_case
    from fuzz.campaign.shard_folder import write_json

    scenario = read_case(path)
    for i, round_ in enumerate(scenario.rounds):
        write_json(folder / "progress.json", {"rounds": i, "checked": i}, durable=False)
        if round_.seq_lens == (FATAL_ROUND,):
            misbehave(scenario.subject or "")


def case(start: int, count: int) -> Any:
    """Rounds whose lengths are their numbers."""
    from dsa_verify.contract.geometry import Geometry
    from dsa_verify.contract.round import Round, Scenario
    from fuzz.campaign.plan import ShardSpec
    from fuzz.campaign.shard_folder import read_json

    spec = ShardSpec.from_dict(read_json(Path(sys.argv[1]) / "spec.json") or {})
    rounds = tuple(Round(bucket=1, seq_lens=(i,), requests=(1,)) for i in range(start, start + count))
    return Scenario(
        system=spec.system,
        geometry=Geometry.resolve("tiny"),
        buckets=(1,),
        rounds=rounds,
        subject=spec.plan.subject,
        found="while it was replayed",
    )


for name, attributes in {
    "dsa_verify.base.device": {"choose_device": lambda text: text},
    "fuzz.campaign.worker": {"work_shard": work_shard, "replay_step_by_step": replay_step_by_step},
}.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(attributes)
