"""This measures how many rounds the fuzzer needs to find each planted fault, and how small its case becomes.

The table is in bench/fault_medians.md. It has for each fault and system the median over seeds of the rounds up to the
first that is wrong.

    python bench/fault_medians.py [--seeds 10] [--system decode ...] [--device auto] [--jobs 2]
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import click

MOST_ROUNDS: Final = 20_000
CHUNK_ROUNDS: Final = 16
# What a fault needs of geometry and subject to have an effect.
NEEDS: Final[dict[str, dict[str, Any]]] = {
    "stale_draft_steps": {"preset": "tiny_pool"},
    "unclamped_window": {"padded_mode": "draft_extend"},
    "wrong_owner": {"dcp_size": 2},
    "no_empty_rule": {"dcp_size": 2},
    "glues_idle": {"subject": "glue"},
    "advances_twice": {"warm_ups": "together"},
}
# They end the process, or say so themselves that they strike once.
LEFT_OUT: Final = ("lost_device", "flaky")


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    system: str
    fault: str
    rounds: list[int]
    case_rounds: int
    requests: int
    shrink_s: float


def measure(system_name: str, fault: str, seeds: int, device_name: str) -> Line:
    """One line of the table."""
    from dsa_verify.base.device import choose_device

    device = choose_device(device_name)
    from dsa_verify.graphs import open_backend
    from dsa_verify.replay.setup import ReplaySetup
    from dsa_verify.rounds.case_file import read_case
    from dsa_verify.rounds.matrix import diagnostic_matrix
    from dsa_verify.subjects.faults.conduct import WrongOnce
    from dsa_verify.systems.catalogue import SYSTEMS
    from fuzz.fuzzer import fuzz
    from fuzz.reduce.shrink import shrink
    from fuzz.reduce.trials import Signature

    WrongOnce.struck = False
    system, needed = SYSTEMS[system_name], dict(NEEDS.get(fault, {}))
    subject, preset = needed.pop("subject", None), needed.pop("preset", system.preset("cpu"))
    geometry = system.geometry(preset, needed)
    config = diagnostic_matrix(
        system, geometry, batches=[6], drafts=[3] if system.drafts else None, fixed=frozenset(needed)
    )[0]
    backend = open_backend(device)
    taken, small, took = [], None, 0.0
    for seed in range(seeds):
        setup = ReplaySetup.make(system, config.geometry, config.buckets, seed, subject, fault, backend)
        with tempfile.TemporaryDirectory() as folder:
            result = fuzz(setup, MOST_ROUNDS, seed, folder=Path(folder), chunk_rounds=CHUNK_ROUNDS)
            taken.append(result.executed if result.findings else MOST_ROUNDS + 1)
            if result.findings and small is None:
                finding = result.findings[0]
                start = time.perf_counter()
                small = shrink(read_case(Path(str(finding.case))), Signature.of(finding), backend)
                took = time.perf_counter() - start
    rounds = small.scenario.rounds if small else ()
    requests = sum(round_.raw_batch for round_ in rounds)
    return Line(system_name, fault, taken, len(rounds), requests, took)


@click.command()
@click.option("--seeds", default=10, show_default=True)
@click.option("--system", "systems", multiple=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--jobs", default=2, show_default=True)
def main(seeds: int, systems: tuple[str, ...], device: str, jobs: int) -> None:
    from dsa_verify.subjects import faults
    from dsa_verify.systems.catalogue import SYSTEMS

    work = [(name, fault) for name in systems or SYSTEMS for fault in faults.names(name) if fault not in LEFT_OUT]
    print("| System | Fault | Rounds, median (most) | Case | Shrunk in |\n|---|---|---|---|---|", flush=True)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        lines = [pool.submit(measure, name, fault, seeds, device) for name, fault in work]
        for future in lines:
            line = future.result()
            case = f"{line.case_rounds} rounds, {line.requests} requests"
            found = f"{statistics.median(line.rounds):g} ({max(line.rounds)})"
            print(f"| {line.system} | `{line.fault}` | {found} | {case} | {line.shrink_s:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
