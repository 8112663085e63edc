"""System: a layout, its oracle and its shipped subjects, by name.

Oracles and subjects are named by `module:attribute` strings and imported when asked for, so that neither side can
reach the other through this table, and so that listing the systems imports no kernels.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.system import OF_OTHERS, OWN_TABLES, System, as_system, of_device
from dsa_verify.systems import dcp, decode, draft_extend, mtp, padded, ragged_verify, target_verify
from dsa_verify.systems.engines import check_system, engine_subject
from dsa_verify.systems.trust import installed_subjects, installed_systems

if TYPE_CHECKING:
    from dsa_verify.contract.subject import SubjectFactory

DEFAULT_SUBJECT: Final = "triton"
# What only pipelines of our own take in every form, on every device: others have the indexer that they were asked for
# with, or none, and its metadata for the device that they run on.
OWN_PIPELINES: Final = "dsa_verify.subjects.pipelines."
OF_THE_SUBJECT: Final = frozenset({"indexer", "architecture", "schedule"})


_SHIPPED: Final = (decode, target_verify, draft_extend, ragged_verify, padded, dcp, mtp)
SYSTEMS: Final[dict[str, System]] = {module.SYSTEM.name: module.SYSTEM for module in _SHIPPED}
_REFERENCES: Final[dict[str, str]] = {}  # by name of a system that was found by `module:attribute`, what that was


def register(system: System) -> System:
    """Make `system` known by its name, as the shipped ones are. UsageError if another one has that name."""
    if SYSTEMS.setdefault(system.name, system) is not system:
        raise UsageError(f"system {system.name!r}: another system has this name; give yours one of its own")
    return system


def get_system(name: str) -> System:
    """Return the system of this name, shipped, registered or of an installed package, or the one that a reference
    `module:attribute` leads to. That one is known by its name from then on, too. UsageError if there is none."""
    known = next((each for each, reference in _REFERENCES.items() if reference == name), name)
    if known in SYSTEMS:
        return SYSTEMS[known]
    installed = installed_systems()
    reference = name if ":" in name else installed.get(name)
    if reference is None:
        listed = ", ".join([*SYSTEMS, *installed])
        raise UsageError(f"system {name!r} is unknown; known systems: {listed}; or give module:attribute")
    from dsa_verify.contract.subject import load_attribute  # imports torch

    return _remember(as_system(load_attribute(reference), name), reference)


def known_as(given: object) -> str:
    """Return the name by which `given` is known from now on: a name or `module:attribute`, a System, or a declaration
    (a class), which a case then refers to by its module and name."""
    if isinstance(given, str):
        return given
    system = as_system(given, getattr(given, "__qualname__", str(given)))
    if isinstance(given, type):
        return _remember(system, f"{given.__module__}:{given.__qualname__}").name
    return register(system).name


def _remember(system: System, reference: str) -> System:
    register(system)
    _REFERENCES[system.name] = reference
    return system


def reference_of(system: System) -> str:
    """Return what leads another process to `system`: its name, or the `module:attribute` that it was found by."""
    return _REFERENCES.get(system.name, system.name)


def system_of_case(name: str, trusts: Callable[[str], bool]) -> System | None:
    """Return the system that a case names; None for a name of nothing. UsageError for a reference to code that is
    neither shipped nor installed, that nobody has named in this process, and that `trusts` says no to."""
    if name in SYSTEMS:
        return SYSTEMS[name]  # without a search of all that is installed, which takes longer than to read the case
    installed = installed_systems()
    if ":" not in name:
        return get_system(name) if name in installed else None
    if name not in {*_REFERENCES.values(), *installed.values()} and not trusts(name):
        raise UsageError(
            f"system: {name!r} is neither a shipped system nor an installed one, and a case runs no other code "
            f"unasked; if you know it, give --system {shlex.quote(name)}, or --trust"
        )
    return get_system(name)


def systems_to_run(names: Sequence[str], subject: str | None, of_fault: Sequence[str] | None = None) -> list[str]:
    """Return which systems a run covers: those named, else the one that an engine's subject belongs to, else the
    default. Of the default only those `of_fault`, to which a fault that is planted belongs; all of these, if none is a
    default.

    UsageError for an unknown system, or one that `subject` does not belong to.
    """
    for name in names:
        check_system(subject, get_system(name).name)
    engine = engine_subject(subject)
    default = [name for name, system in SYSTEMS.items() if system.by_default]
    if of_fault is not None:
        default = [name for name in default if name in of_fault] or list(of_fault)
    return list(dict.fromkeys(names or ([engine.system] if engine is not None else default)))


def resolve_geometry(
    system: System,
    subject: object,
    device_type: str,
    preset: str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    run: Iterable[str] = (),
) -> tuple[Geometry, frozenset[str]]:
    """Return the geometry that a run of `subject` (a reference, a factory or None) starts from, and the fields of it
    that are fixed, so that no matrix turns them over: `settings`, and what an engine's subject asks for beside them,
    with OWN_TABLES. Whether there is an indexer is fixed where a preset is named, and for a subject that is not ours,
    which also has OF_OTHERS.

    `preset` (None: that of the subject, else of the system) and `settings` are what the run says itself, the latter for
    all systems of the `run`: a size of another one of them is left out. UsageError for a wrong one.
    """
    others = {size.name for name in run for size in get_system(name).sizes} - {size.name for size in system.sizes}
    settings = {name: value for name, value in settings.items() if name not in others}
    engine = engine_subject(subject) if isinstance(subject, str) else None
    wanted = {**system.asks, **({} if engine is None else engine.settings), **settings}
    presets = system.presets if engine is None or engine.presets is None else engine.presets
    fixed = set(wanted) if preset is None else {*wanted, "indexer"}
    if preset is None:
        preset = of_device(presets, device_type)
    if engine is not None:
        fixed.add(OWN_TABLES)
    if not is_ours(system, subject):
        fixed |= OF_THE_SUBJECT | {OF_OTHERS}
    return system.geometry(preset, wanted), frozenset(fixed)


def default_subject(system: System) -> str:
    """Return the subject of a run that names none: "triton", else the first of the system."""
    return DEFAULT_SUBJECT if DEFAULT_SUBJECT in system.subjects else next(iter(system.subjects), DEFAULT_SUBJECT)


def is_ours(system: System, subject: object) -> bool:
    """Return whether `subject` (a reference, a factory or None) is a pipeline of this project."""
    name = default_subject(system) if subject is None else subject
    return isinstance(name, str) and system.subjects.get(name, "").startswith(OWN_PIPELINES)


def subject_factory(system: System, reference: str | None) -> tuple[str, SubjectFactory]:
    """Return (label, factory) of a shipped name, an engine's subject, an installed entry point or `module:attribute`.

    UsageError for a name of nothing, or of something that makes no subjects. What is named is imported, so a name that
    comes out of a case is checked first (trust.py).
    """
    from dsa_verify.contract.subject import check_factory, load_attribute  # imports torch

    label = default_subject(system) if reference is None else reference
    engine = engine_subject(label)
    if engine is not None:
        check_system(label, system.name)
        factory = load_attribute(engine.reference)
    elif label in system.subjects:
        factory = load_attribute(system.subjects[label])
    elif ":" in label:
        factory = load_attribute(label)
    else:
        installed = installed_subjects()
        if label not in installed:
            known = ", ".join([*system.subjects, *installed])
            raise UsageError(
                f"subject {label!r} is unknown for {system.name}; known: {known}; or give module:attribute"
            )
        point = installed[label]
        factory = load_attribute(f"{point.module}:{point.attr}")
    check_factory(label, factory)
    return label, factory
