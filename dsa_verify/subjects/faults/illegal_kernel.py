"""A kernel that writes where no memory is; imported only by the fault that plants it, and only on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_far_away(pointer, elements):
    tl.store(pointer + elements, 1)
