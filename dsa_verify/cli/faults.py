"""`dsa-verify faults` lists the faults that can be planted and what each spoils."""

from __future__ import annotations

import click

from dsa_verify.subjects.faults import FAULTS, names
from dsa_verify.systems.catalogue import get_system


def run(system: str | None) -> None:
    """List the faults, those of `system` alone if it is given. UsageError for an unknown system."""
    listed = names(None if system is None else get_system(system).name)
    width = max(map(len, listed))
    for name in listed:
        fault = FAULTS[name]
        where = f"  [{fault.field}]" if fault.field else ""
        click.echo(f"{name:<{width}}  {fault.summary}{where}")
