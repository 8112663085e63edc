"""Exit status: what an error that ends a process stands for, whoever raised it. MEANINGS in errors.py has the table."""

from __future__ import annotations

import errno
from typing import Final

from dsa_verify.base.errors import (
    STATUS_HARNESS,
    STATUS_INTERRUPTED,
    STATUS_NO_ROOM,
    STATUS_OUT_OF_MEMORY,
    DeviceLost,
    DsaVerifyError,
)
from dsa_verify.base.out_of_memory import find_out_of_memory

# Of an OSError: nothing more can be written.
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def exit_status(error: BaseException) -> int:
    """Return the exit status that `error` stands for; STATUS_HARNESS for one that nobody expected."""
    if isinstance(error, KeyboardInterrupt):
        return STATUS_INTERRUPTED
    if not isinstance(error, DeviceLost) and find_out_of_memory(error) is not None:
        return STATUS_OUT_OF_MEMORY
    if isinstance(error, DsaVerifyError):
        return error.status
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return STATUS_NO_ROOM
    return STATUS_HARNESS


def is_expected(error: BaseException) -> bool:
    """Return whether the text of `error` says all there is to say, so that no traceback is needed."""
    return exit_status(error) != STATUS_HARNESS or isinstance(error, DsaVerifyError)


def in_a_line(error: BaseException) -> str:
    """Return what `error` says, with its type where it is not one of this package's own."""
    return str(error) if isinstance(error, DsaVerifyError) else f"{type(error).__name__}: {error}"
