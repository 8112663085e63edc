"""Triton's interpreter, as kernels that compile need it: what it lacks, and arithmetic that it does for nothing."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch


@functools.cache
def _mend() -> None:
    # The interpreter keeps the type of what was compared as that of the result, so that a scalar condition which is
    # spread over a mask arrives at the load or store as integers and is refused ("mask has unsupported dtype").
    from triton.runtime.interpreter import InterpreterBuilder

    original = InterpreterBuilder.create_splat

    def create_splat(self: Any, shape: Any, scalar: Any) -> Any:
        handle = original(self, shape, scalar)
        if scalar.data.dtype == np.bool_:
            handle.data = handle.data.astype(np.bool_)
        return handle

    InterpreterBuilder.create_splat = create_splat


def mend_scalar_masks(device: torch.device) -> None:
    """From now on a condition stays one when it is spread; nothing on a CUDA device, where nothing is interpreted."""
    if device.type != "cuda":
        _mend()


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
