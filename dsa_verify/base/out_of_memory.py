"""This module recognises out-of-memory errors, which are never findings about a subject."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Final

from dsa_verify.base.errors import DeviceLost, OutOfMemory

# Allocators that have no exception of their own: the driver's (by PyTorch, by Triton), PyTorch's of the CPU, cuBLAS's.
_SIGNS: Final = (
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_SHOWN: Final = 200  # characters of what an allocator says, which lists every process on the device


@contextlib.contextmanager
def translate_out_of_memory() -> Iterator[None]:
    """Raise OutOfMemory for whatever is raised inside because memory ran out, in code of the subject, too."""
    try:
        yield
    except (OutOfMemory, DeviceLost):
        raise
    except Exception as error:
        if find_out_of_memory(error) is None:
            raise
        said = " ".join(str(error).split()) or type(error).__name__
        said = said if len(said) <= _SHOWN else said[:_SHOWN] + "..."
        raise OutOfMemory(
            f"out of memory, so there is no verdict about the subject: {said}; free some memory, or ask "
            "for smaller batches (--batch) or a shorter context (--set context=...)"
        ) from error


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error that `error` is or came of; None if it is something else."""
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
