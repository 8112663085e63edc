"""Files are written whole or not at all, so that a kill at any moment leaves the old one or the new one.

Several processes may share a folder, and one may remove it, which it finds empty, when another is about to write there.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Final

# How often a folder may be removed between being made and being written to.
FOLDER_TRIES: Final = 5


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` by `text` at once; its folder is made. `durable`: it also survives the machine going down.

    OSError if there is no room; what was there before is then still there.
    """
    for left in reversed(range(FOLDER_TRIES)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _replace(path, text, durable)
            break
        except FileNotFoundError:
            if not left:
                raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def reason_of(error: OSError) -> str:
    """Say why a file could not be written, without the name of the temporary file."""
    return error.strerror or str(error)


def _replace(path: Path, text: str, durable: bool) -> None:
    # Of this thread alone: threads and processes may write the same file at the same time.
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
