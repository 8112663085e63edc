"""Trust: which code a case may name by itself.

A case is shared: in a bug report, in the repository of another team, by a campaign on another machine. The subject in
it may be any `module:attribute`, and to load that is to run it. So a case names shipped subjects, engines' and those of
installed packages freely; anything else is not even imported unless whoever replays the case names it, or says that
what cases name may run.

Nothing here imports torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Protocol

from dsa_verify.base.errors import UsageError
from dsa_verify.systems.engines import engine_subject, engine_subjects

ENTRY_POINT_GROUP: Final = "dsa_verify.subjects"
SYSTEM_GROUP: Final = "dsa_verify.systems"


class HasSubjects(Protocol):
    """A system is asked for this here: its shipped subjects, by name, as `module:attribute`."""

    @property
    def subjects(self) -> Mapping[str, str]: ...


def installed_subjects() -> dict[str, EntryPoint]:
    """Return by name, the subjects of installed packages."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def installed_systems() -> dict[str, str]:
    """Return the systems of installed packages: by name, as `module:attribute`."""
    return {point.name: f"{point.module}:{point.attr}" for point in entry_points(group=SYSTEM_GROUP)}


def names_code(reference: str | None) -> bool:
    """Return whether `reference` is a `module:attribute`. UsageError for an engine's subject that does not exist."""
    return reference is not None and ":" in reference and engine_subject(reference) is None


def needs_trust(system: HasSubjects, reference: str | None) -> bool:
    """Return whether `reference` names code that is neither shipped nor installed as a subject."""
    if not names_code(reference):
        return False
    known = {*system.subjects.values(), *(subject.reference for subject in engine_subjects())}
    known |= {f"{point.module}:{point.attr}" for point in installed_subjects().values()}
    return reference not in known


def check_trust(system: HasSubjects, reference: str | None, remedy: str = "") -> None:
    """Raise UsageError if a case must not name `reference`; `remedy` says how to let it (default: as the command line
    does).

    Imports nothing that `reference` names.
    """
    if needs_trust(system, reference):
        asked = remedy or f"give --subject {shlex.quote(str(reference))}, or --trust"
        raise UsageError(
            f"subject: {str(reference)!r} is neither a shipped subject nor an engine's nor an installed one, and a "
            f"case runs no other code unasked; if you know it, {asked}"
        )


def code_options(system: str, subject: str | None) -> list[str]:
    """Return the words with which a replay of a case that names these is allowed to load them."""
    options = ["--system", system] if ":" in system else []
    return options + (["--subject", str(subject)] if names_code(subject) else [])
