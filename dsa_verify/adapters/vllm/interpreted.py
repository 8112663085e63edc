"""Interpreted: lets Triton's interpreter, on a CPU, leave out arithmetic whose result nothing reads."""

from __future__ import annotations

import dataclasses

import torch


def leave_out_unread_checks(device: torch.device) -> None:
    """From now on no overflow check is computed for each sum and product that is interpreted; nothing on CUDA.

    Such a check is what a kernel asserts in Triton's debug mode; outside of it the interpreter spends half its time on
    checks that it then drops.
    """
    if device.type == "cuda":
        return
    from triton.runtime.interpreter import interpreter_builder

    if not interpreter_builder.options.debug:
        interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
