"""Version: which dsa-verify this is, also where it was never installed and runs from its source tree."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "dsa-verify"
PROJECT_FILE: Final = Path(__file__).parents[2] / "pyproject.toml"
FROM_SOURCE: Final = "from a source tree"


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def own_version() -> str:
    """Return the version, such as "0.1.0", with FROM_SOURCE if it is not installed."""
    installed = package_version(DISTRIBUTION)
    if installed is not None:
        return installed
    try:
        project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))["project"]
        return f"{project['version']} {FROM_SOURCE}"
    except (OSError, ValueError, KeyError):
        return FROM_SOURCE
