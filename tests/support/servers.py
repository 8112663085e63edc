"""Runs a server in a process of its own that has this package's entry points, and what it said."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
MINI = ROOT / "tests" / "support" / "mini_engines"


@dataclasses.dataclass(frozen=True)
class Served:
    """How a server ended; `said`: the lines of ours on standard error."""

    status: int
    out: str
    err: str

    @property
    def said(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("dsa-verify")]


def entry_points() -> dict[str, dict[str, str]]:
    """Those of this package for engines, by group, as pyproject.toml has them."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    return {group: groups[group] for group in ("sglang.srt.plugins", "vllm.general_plugins")}


def installed(folder: Path) -> Path:
    """Make `folder` one in which a distribution of these entry points seems installed."""
    metadata = folder / "dsa_verify_seen-0.1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dsa-verify-seen\nVersion: 0.1\n")
    lines = [
        line
        for group, names in entry_points().items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in names.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def serve(script: Path, arguments: Sequence[str], tmp_path: Path, *, real: bool = False, **environment: str) -> Served:
    """Run `script` in `tmp_path`, where findings go to the folder `found`. `real`: with the engines that this process
    can import, instead of those in miniature."""
    engines = sys.path if real else [str(MINI)]
    places = [*engines, str(installed(tmp_path / "site")), str(ROOT), str(ROOT / "tests" / "support")]
    places.append(str(ROOT / "examples"))
    usual = {key: value for key, value in os.environ.items() if not key.startswith(("DSA_VERIFY", "PYTEST"))}
    usual |= {"PYTHONPATH": os.pathsep.join(places), "DSA_VERIFY_DIR": "found", **environment}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], cwd=tmp_path, env=usual, capture_output=True, text=True, timeout=300
    )
    return Served(done.returncode, done.stdout, done.stderr)
