"""StartLine: the one line at start that says what is attached, what is not, and why."""

from __future__ import annotations

import importlib
from typing import Any

from dsa_verify.attach.settings import Settings
from dsa_verify.base.version import own_version


class StartLine:
    """`engine`, `version`: of the server; the version is None where its package is not installed as one."""

    def __init__(self, engine: str, version: str | None, settings: Settings):
        self.engine = f"{engine} {version or '(version unknown)'}"
        self._settings = settings
        self._attached: dict[str, list[str]] = {}
        self._cannot: list[str] = []

    def attached(self, part: str, where: str) -> None:
        """Note that `part` is attached to `where`."""
        places = self._attached.setdefault(part, [])
        if where not in places:
            places.append(where)

    def cannot(self, what: str, why: str) -> None:
        """Note that `what` cannot be attached."""
        self._cannot.append(f"{what} ({why})")

    def text(self, rank: int) -> str:
        """Return the line."""
        parts = [f"{part} at {', '.join(places)}" for part, places in self._attached.items()] or ["nothing"]
        strict = ", strict" if self._settings.strict else ""
        cannot = f"; cannot attach {'; '.join(self._cannot)}" if self._cannot else ""
        return (
            f"dsa-verify {own_version()} is attached to {self.engine}, rank {rank}{strict}: {'; '.join(parts)}{cannot}"
            f"; findings go to {self._settings.folder}"
        )

    def find(self, module: str, path: str) -> Any:
        """Return the attribute `path` of `module`; None if there is none, which is noted with its reason."""
        try:
            found: Any = importlib.import_module(module)
        except Exception as error:  # what an engine's module raises when it is imported has no end
            self.cannot(path, f"{module} cannot be imported: {type(error).__name__}: {error}")
            return None
        for name in path.split("."):
            found = getattr(found, name, None)
            if found is None:
                self.cannot(path, f"{module} of {self.engine} has no {name}")
                return None
        return found
