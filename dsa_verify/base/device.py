"""This module chooses the device of a run and says what is installed on it.

Triton decides between compiling and interpreting when a kernel is decorated, so the device has to be chosen before
any module with kernels is imported: `choose_device` is called first by every door (command line, pytest plugin).
"""

from __future__ import annotations

import os
import platform
import re
import sys
from typing import Any, Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.base.version import own_version, package_version

INTERPRET: Final = "TRITON_INTERPRET"


def choose_device(text: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:i` and set up Triton for it. UsageError if it is missing."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise UsageError(f"device {text!r} is unknown; use auto, cpu, cuda or cuda:INDEX")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "cpu" or (text == "auto" and not available):
        # A run on the CPU needs the interpreter whatever the machine has.
        os.environ[INTERPRET] = "1"
        _check_not_too_late(interpreted=True)
        return torch.device("cpu")
    index = check_there(text)
    if os.environ.get(INTERPRET, "0") not in ("", "0"):
        raise UsageError(f"device {text!r} needs compiled kernels, but {INTERPRET} is set; unset it, or use cpu")
    _check_not_too_late(interpreted=False)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def check_there(text: str) -> int:
    """Return the index of the device for `cuda` or `cuda:i` without initialising it.

    Raises UsageError if this process does not see it.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(text.partition(":")[2] or 0)
    if index >= available:
        raise UsageError(f"device {text!r} is not there; this process sees {available} CUDA device(s); use auto or cpu")
    return index


def _check_not_too_late(*, interpreted: bool) -> None:
    """Raise UsageError if Triton was imported before and decided otherwise."""
    standard = sys.modules.get("triton.language.standard")
    if standard is None or (type(standard.cumsum).__name__ == "InterpretedFunction") == interpreted:
        return
    remedy = f"set {INTERPRET}=1 before it starts" if interpreted else f"unset {INTERPRET}"
    raise UsageError(
        f"triton was imported before the device was chosen, to {'compile' if interpreted else 'interpret'} kernels; "
        f"{remedy}, or ask for the device before importing kernels"
    )


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions and hardware, as every result records them."""
    facts: dict[str, Any] = {
        "dsa_verify": own_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "platform": platform.platform(),
        "device_name": platform.processor() or platform.machine(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device_name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return facts
