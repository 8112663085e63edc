"""One GPU for each pytest-xdist worker, chosen before anything can have initialised CUDA.

CUDA reads CUDA_VISIBLE_DEVICES once, so this has to run while the worker's first module is imported: later is too
late. That is also why it counts the GPUs itself instead of asking torch.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
WORKER: Final = "PYTEST_XDIST_WORKER"
# Set to what was chosen. A subprocess inherits it and the narrowed list, of which it must not choose once more.
PINNED: Final = "DSA_VERIFY_PINNED"
ROOT: Final = Path("/")


def visible_gpus(environment: MutableMapping[str, str] = os.environ, root: Path = ROOT) -> list[str]:
    """The GPUs this process may use, as entries of CUDA_VISIBLE_DEVICES: indices or UUIDs."""
    listed = environment.get(VISIBLE)
    if listed is not None:
        entries: list[str] = []
        for entry in (part.strip() for part in listed.split(",")):
            if not entry or entry.startswith("-"):
                break  # as CUDA does: an invalid entry hides itself and all that follow
            entries.append(entry)
        return entries
    # A container is given some of the device nodes but shows all GPUs of its host in /proc: the nodes go first.
    nodes = [path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    count = len(nodes) or len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    return [str(index) for index in range(count)]


def pin_gpu(environment: MutableMapping[str, str] = os.environ, root: Path = ROOT) -> str | None:
    """Narrow CUDA_VISIBLE_DEVICES to one GPU in an xdist worker that is not pinned yet, and return that GPU.

    Worker i gets GPU i modulo their number. The function returns None where it changed nothing, and warns
    (RuntimeWarning) where it is too late.
    """
    worker = re.fullmatch(r"gw(\d+)", environment.get(WORKER, ""))
    if worker is None or PINNED in environment:
        return None
    gpus = visible_gpus(environment, root)
    if not gpus:
        return None
    chosen = gpus[int(worker[1]) % len(gpus)]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        warnings.warn(
            f"worker {worker[0]} was not given GPU {chosen} of its own: CUDA is initialised already; "
            "import dsa_verify.base.gpu_pinning and call pin_gpu() before what initialises it",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    environment[VISIBLE] = environment[PINNED] = chosen
    return chosen
