"""`dsa-verify doctor` says what this machine can verify, found out by trying it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Final

import click
import torch

from dsa_verify.base.device import environment
from dsa_verify.base.errors import STATUS_EQUAL, STATUS_HARNESS
from dsa_verify.base.version import package_version
from dsa_verify.graphs import open_backend
from dsa_verify.systems.engines import ENGINES, engine_subjects

OPTIONAL: Final = {
    "sgl-deep-gemm": "DeepGEMM schedules as a subject (extra: deepgemm)",
    "cuda-bindings": "looking inside graphs (extra: gpu)",
    "nvidia-ml-py": "GPU health (extra: gpu)",
    "hypothesis": "fuzzing (extra: test)",
    "pytest-xdist": "pytest -n auto (extra: test)",
}


def run(device: torch.device) -> int:
    """Print the report and return status 0 if everything that is needed works, 3 otherwise."""
    backend = open_backend(device)
    for key, value in environment(device).items():
        click.echo(f"{key:<16} {value}")
    click.echo(f"{'device':<16} {device}, {backend.name} graphs")
    checks: dict[str, Callable[[], str]] = {
        "kernels": lambda: _kernels(device),
        "graphs": lambda: _graphs(device),
        "pipeline": lambda: _pipeline(device),
    }
    status = STATUS_EQUAL
    for name, check in checks.items():
        try:
            click.echo(f"{name:<16} ok: {check()}")
        except Exception as error:  # a doctor reports whatever the patient has
            status = STATUS_HARNESS
            click.echo(f"{name:<16} FAILED: {type(error).__name__}: {error}")
    for package, use in OPTIONAL.items():
        found = package_version(package)
        click.echo(f"{package:<16} {found or 'not installed'}: {use}")
    for engine in ENGINES:
        found = "importable" if importlib.util.find_spec(engine) is not None else "not installed"
        count = sum(subject.name.startswith(f"{engine}:") for subject in engine_subjects())
        click.echo(f"{engine:<16} {found}: {count} subjects of its own code (dsa-verify subjects says which can run)")
    click.echo("ready: dsa-verify replay" if status == STATUS_EQUAL else "not ready: see the lines that say FAILED")
    return status


def _kernels(device: torch.device) -> str:
    from dsa_verify.buffers.region import Kind, Region
    from dsa_verify.buffers.region_kernels import RegionTable
    from dsa_verify.judge.judge import Judge, Phase

    words = torch.zeros((4, 8), dtype=torch.int32, device=device)
    other = words.clone()
    other[2, 3] = 1
    region = Region(kind=Kind.FIELD, name="probe", got=words, want=other)
    judge = Judge([region], device, torch.zeros(1, dtype=torch.int64, device=device))
    judge.table = RegionTable([region], device)
    judge.launch(Phase.REPLAY)
    tally = judge.poll()
    if tally.count() != 1 or (tally.first[0].row, tally.first[0].column) != (2, 3):
        raise RuntimeError(f"the judge's kernel saw {tally.count()} differences where there is one")
    return "interpreted" if device.type == "cpu" else "compiled"


def _graphs(device: torch.device) -> str:
    backend = open_backend(device)
    source = torch.zeros(4, dtype=torch.int32, device=device)
    target = torch.zeros_like(source)

    def body() -> None:
        target.copy_(source + 1)

    body()
    target.zero_()
    graph = backend.capture(body, pool=backend.new_pool())
    if int(target.sum()):
        raise RuntimeError("capture executed what it should only have recorded")
    source.fill_(2)
    graph.replay()
    if target.tolist() != [3] * 4:
        raise RuntimeError(f"a replay gave {target.tolist()}, not the value of its new inputs")
    return backend.name


def _pipeline(device: torch.device) -> str:
    from dsa_verify.contract.geometry import Geometry
    from dsa_verify.rounds.matrix import diagnostic_matrix
    from dsa_verify.run.runner import Runner, new_result
    from dsa_verify.systems.catalogue import get_system

    backend = open_backend(device)
    result = new_result("decode", None, backend)
    configs = diagnostic_matrix(get_system("decode"), Geometry.resolve("tiny"), batches=[4], rounds=5)
    Runner(backend=backend, folder=None).matrix(configs, None, result)
    if result.findings:
        raise RuntimeError(result.findings[0].sentence)
    return f"{result.counts.rounds_checked} rounds of decode equal"
