"""`dsa-verify subjects` lists what `--subject` takes beside `module:attribute`, and says whether it can run here."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import click
import torch

from dsa_verify.base.errors import NothingVerified, UsageError
from dsa_verify.contract.subject import load_attribute, provenance
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.systems.engines import EngineSubject, check_device, engine_subjects
from dsa_verify.systems.trust import installed_subjects


def run(device: torch.device) -> None:
    """Print the shipped subjects of each system, those of installed packages, then those of each engine."""
    for system in SYSTEMS.values():
        click.echo(f"{system.name:<14} {', '.join(system.subjects)}")
    for point in installed_subjects().values():
        click.echo(f"{'installed':<14} {point.name} ({point.value})")
    by_engine: dict[str, list[EngineSubject]] = {}
    for subject in engine_subjects():
        by_engine.setdefault(subject.name.partition(":")[0], []).append(subject)
    for engine, subjects in by_engine.items():
        click.echo()
        for line in engine_lines(engine, subjects, device):
            click.echo(line)


def engine_lines(engine: str, subjects: Sequence[EngineSubject], device: torch.device) -> list[str]:
    """A head line, then one for each of `subjects` of `engine`, with why it cannot run unless that is so of all."""
    if importlib.util.find_spec(engine) is None:
        absent: str | None = f"{engine} is not installed (docs/engines.md says how to point at it)"
        reasons = [absent for _ in subjects]
    else:
        reasons = [why_not_here(subject, device) for subject in subjects]
    able = reasons.count(None)
    shared = reasons[0] if not able and len(set(reasons)) == 1 else None
    head = f"{engine}: {able} of {len(subjects)} subjects can run on {device}"
    lines = [f"{head}: {shared}" if shared else head]
    width = max(len(subject.name) for subject in subjects)
    for subject, why in zip(subjects, reasons, strict=True):
        lines.append(f"  {subject.name:<{width}}  {subject.system:<14} {subject.summary}")
        if why is not None and why != shared:
            lines.append(f"  {'':<{width}}  not here: {why}")
    return lines


def why_not_here(subject: EngineSubject, device: torch.device) -> str | None:
    """Say what `subject` lacks on `device`, found out by importing it; None if nothing."""
    try:
        check_device(subject.name, device)
        provenance(load_attribute(subject.reference))
    except (UsageError, NothingVerified) as error:
        return str(error)
    return None
