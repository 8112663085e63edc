"""What Triton's interpreter lacks to run kernels that compile: masks made of one comparison of scalars.

The interpreter keeps the type of what was compared as that of the result, so that a scalar condition which is spread
over a mask arrives at the load or store as integers and is refused ("mask has unsupported dtype").
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch


@functools.cache
def _mend() -> None:
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
