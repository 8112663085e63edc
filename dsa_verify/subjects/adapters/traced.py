"""Traced: what a result says about an engine's code, whichever engine: digests of its files, and what ran them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

import torch

from dsa_verify.base.device import INTERPRET
from dsa_verify.base.version import package_version

SHOWN_DIGITS: Final = 12  # of a sha256: enough to tell files apart, short enough to read


def digest(path: Path) -> str:
    """The first digits of the sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:SHOWN_DIGITS]


def toolchain() -> dict[str, str]:
    """Keys: "torch", "triton" (versions), "capability"."""
    return {
        "torch": torch.__version__,
        "triton": package_version("triton") or "not installed",
        "capability": capability(),
    }


def capability() -> str:
    """Return what kernels run on in this process: "sm90" and the like, or "interpreted"."""
    if os.environ.get(INTERPRET, "0") not in ("", "0") or not torch.cuda.is_available():
        return "interpreted"
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"
