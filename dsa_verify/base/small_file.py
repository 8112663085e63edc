"""Case file: what may be opened as one. A case comes from somebody else as often as not, so what it is on disk is
looked at before it is opened, and before anything heavy is imported: a pipe would block, and a device has no end.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Final

from dsa_verify.base.errors import UsageError

MAX_CASE_BYTES: Final = 64 << 20
_KINDS: Final = {
    stat.S_IFDIR: os.strerror(errno.EISDIR),
    stat.S_IFIFO: "it is a pipe",
    stat.S_IFSOCK: "it is a socket",
    stat.S_IFCHR: "it is a device",
    stat.S_IFBLK: "it is a device",
}


def check_case(name: str | Path) -> Path:
    """`name` as a path; UsageError unless it is a regular file of at most MAX_CASE_BYTES, or a link to one."""
    path = Path(name)
    try:
        found = path.stat()
    except OSError as error:
        raise cannot_be_read(path, error.strerror) from None
    if not stat.S_ISREG(found.st_mode):
        raise cannot_be_read(path, _KINDS.get(stat.S_IFMT(found.st_mode), "it is not a file"))
    if found.st_size > MAX_CASE_BYTES:
        raise UsageError(
            f"{path}: {found.st_size} bytes exceed {MAX_CASE_BYTES}, the most that a case file may have; "
            "give the path of a JSON text, or split the case"
        )
    return path


def holds_rounds(path: Path) -> bool:
    """Return whether `path` is a case rather than anything else; whoever reads it says what is wrong with it."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "rounds" in data


def cannot_be_read(path: Path, reason: str | None) -> UsageError:
    """Return the error for a file of which nothing can be read."""
    return UsageError(f"{path}: cannot be read as a case file ({reason}); give the path of a JSON text")
