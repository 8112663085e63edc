"""Version: which dsa-verify this is, also where it was never installed and runs from its source tree."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "dsa-verify"
PROJECT_FILE: Final = Path(__file__).parents[2] / "pyproject.toml"
FROM_SOURCE: Final = "from a source tree"


def own_version() -> str:
    """Return the version, such as "0.1.0", with FROM_SOURCE if it is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        pass
    try:
        project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))["project"]
        return f"{project['version']} {FROM_SOURCE}"
    except (OSError, ValueError, KeyError):
        return FROM_SOURCE
