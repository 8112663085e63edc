"""Memory: what its lack looks like. It is no verdict about a subject.

A shard that lacks memory is done again with half of the batch (supervise.py).
"""

from __future__ import annotations

import sys
from typing import Final

from dsa_verify.errors import DsaVerifyError

# Of a shard's process; beside those of errors.py, which say what a run means.
STATUS_OUT_OF_MEMORY: Final = 8
# Allocators that have no exception of their own: the driver's (by PyTorch, by Triton), PyTorch's of the CPU, cuBLAS's.
_SIGNS: Final = (
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class OutOfMemory(DsaVerifyError):
    """Memory did not suffice: no verdict about the subject."""

    status = STATUS_OUT_OF_MEMORY


def lack_of_memory(error: BaseException) -> BaseException | None:
    """The lack of memory that `error` is or came of; None if it is something else."""
    kinds: tuple[type[BaseException], ...] = (MemoryError, OutOfMemory)
    torch = sys.modules.get("torch")  # not imported for this: what is not loaded has raised nothing
    if torch is not None:
        kinds += (torch.OutOfMemoryError,)
    cause: BaseException | None = error
    while cause is not None:
        signs = isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in _SIGNS)
        if signs or isinstance(cause, kinds):
            return cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None
