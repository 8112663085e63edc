"""Faults: planted defects, as wrappers around any subject, that measure what the toolkit can see.

A fault never edits a pipeline. It runs the whole wrapped subject and spoils one thing around it: an output after it
was written, an input before it is read, a buffer, the capture itself. `FAULTS` says of each what the verifier must
call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.layout import Layout, Lifetime
from dsa_verify.contract.subject import Subject, SubjectFactory, make_subject
from dsa_verify.subjects.faults import conduct, dcp, inputs, outputs
from dsa_verify.subjects.faults.fault import DECLARED, Fault
from dsa_verify.subjects.faults.wrapper import Wrapper
from dsa_verify.systems.catalogue import get_system

# As lists show them: by module, then as the module has them.
FAULTS: Final[dict[str, Fault]] = {
    name: each
    for module in (outputs, dcp, inputs, conduct)
    for name, each in DECLARED.items()
    if each.wrap.__module__ == module.__name__
}


def names(system: str | None = None) -> list[str]:
    """Names of all faults, or of those that apply to `system`."""
    return [name for name, fault in FAULTS.items() if system is None or fault.applies(system)]


def in_layouts(reference: str, layouts: Sequence[Layout]) -> str:
    """Return the fault `NAME` with a field of a user's own system, if it needs one that none of `layouts` has."""
    fault, field = get_fault(reference)
    own = not fault.of_input and layouts[0].system not in fault.systems and fault.applies(layouts[0].system)
    if ":" in reference or not field or not own or any(field in layout for layout in layouts):
        return reference
    written = (each.name for layout in layouts for each in layout if each.lifetime is not Lifetime.CAPTURE)
    return f"{reference}:{next(written, field)}"


def get_fault(reference: str) -> tuple[Fault, str]:
    """(fault, field) of `NAME` or `NAME:FIELD`."""
    name, _, field = reference.partition(":")
    if name not in FAULTS:
        raise UsageError(f"fault {name!r} is unknown; known faults: {', '.join(FAULTS)}")
    fault = FAULTS[name]
    if field and not fault.field:
        raise UsageError(f"fault {name!r} has no field to choose; leave out {':' + field!r}")
    return fault, field or fault.field


def brings_foreign_work(reference: str) -> bool:
    """Return whether the fault `NAME:FIELD` is in work between the replays, which its subject then declares."""
    return hasattr(get_fault(reference)[0].wrap, "foreign_work")


def forgotten_inputs(reference: str | None) -> frozenset[str]:
    """The static inputs whose pad tails the fault `NAME:FIELD` leaves alone."""
    if reference is None:
        return frozenset()
    fault, field = get_fault(reference)
    return frozenset({field}) if fault.of_input else frozenset()


def check_field(reference: str, layouts: Sequence[Layout]) -> None:
    """UsageError unless a fault `NAME:FIELD` finds its field in one of `layouts`, written by replays, or its input."""
    fault, field = get_fault(reference)
    if fault.of_input:
        names = [spec.name for spec in get_system(layouts[0].system).inputs(layouts[0].geometry)]
        if field not in names:
            raise UsageError(f"fault input {field!r} is not in {layouts[0].system}; its inputs: {', '.join(names)}")
        return
    holding = [layout for layout in layouts if field in layout]
    if field and not holding and fault.needs and field == fault.field:
        raise UsageError(f"fault {fault.name!r} needs {fault.needs}")
    if field and not holding:
        known = ", ".join(each.name for each in max(layouts, key=lambda layout: len(layout.fields)))
        raise UsageError(f"fault field {field!r} is not in {layouts[0].system} as captured; its fields: {known}")
    refreshes = fault.wrap in (outputs.SkipRefresh, outputs.NotRefreshed)
    if field and refreshes and holding[0][field].lifetime is Lifetime.CAPTURE:
        raise UsageError(f"fault field {field!r} is written at capture only; choose one that replays write")


def systems_of(reference: str | None) -> tuple[str, ...] | None:
    """The systems that the fault `NAME` or `NAME:FIELD` belongs to; None without one."""
    return None if reference is None else get_fault(reference)[0].systems


def plant(reference: str, factory: SubjectFactory, system: str | None = None) -> SubjectFactory:
    """A factory of subjects with the fault `NAME` or `NAME:FIELD` planted in what `factory` makes."""
    fault, field = get_fault(reference)
    if system is not None and not fault.applies(system):
        raise UsageError(f"fault {fault.name!r} has no effect in {system}; it applies to {', '.join(fault.systems)}")
    siblings: list[Wrapper] = []

    def make() -> Subject:
        wrapper = fault.wrap(make_subject(factory), "" if fault.of_input else field)
        wrapper.siblings = siblings
        siblings.append(wrapper)
        return wrapper

    return make
