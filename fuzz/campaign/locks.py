"""Locks: who writes a folder. The campaign's, by the process that indexes it; a shard's, by its process and its owner.

A shard's owner is whoever supervises it. There may be two that want to be: a scheduler that takes a worker for dead
gives its shard to another one, and a campaign that was killed may be resumed while workers elsewhere still run its
shards. Only the owner writes the folder or starts a process in it; another one waits, and takes what the owner leaves.

A lock ends with the process that holds it, so that of a dead one is free: what a lock file says is for people. On a
network file system the same holds once its server has given up the machine that held it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dsa_verify.base.errors import HarnessError
from fuzz.campaign.shard_folder import OWNER_FILE, signs_of_life

POLL_S: Final = 0.2
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def this_host() -> str:
    return os.uname().nodename


class FolderInUse(HarnessError):
    """Another process writes this folder."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process, and the machine that it runs on."""

    pid: int
    host: str

    @property
    def here(self) -> bool:
        return self.host == this_host()

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host}"


@contextlib.contextmanager
def held(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path` and write into it who does; FolderInUse if another does, unless to `wait` is wanted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise FolderInUse(
                f"{path.parent} is in use by {holder(path) or 'a process'}; wait for it, or end it"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise HarnessError(f"{path}: its file system has no locks ({error}); mount it with locks") from error
        file.truncate(0)
        file.write(f"{os.getpid()} {this_host()}")
        file.flush()
        yield


def holder(path: Path) -> Holder | None:
    """Return the process that last held the lock `path`; None if that is not known."""
    try:
        pid, _, host = path.read_text(encoding="utf-8").partition(" ")
    except FileNotFoundError:
        return None
    return Holder(pid=int(pid), host=host) if pid.isdigit() and host else None


@contextlib.contextmanager
def owned(folder: Path, *, patience_s: float, over: Callable[[], bool]) -> Iterator[bool]:
    """Own the shard's `folder`, and yield whether it is owned, which it is not if another has it and `over()` is true.

    FolderInUse if the other has given no sign of life for `patience_s`.
    """
    signs, seen = signs_of_life(folder), time.monotonic()
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(held(folder / OWNER_FILE))
                break
            except FolderInUse as error:
                if signs_of_life(folder) != signs:
                    signs, seen = signs_of_life(folder), time.monotonic()
                elif time.monotonic() - seen > patience_s:
                    raise FolderInUse(f"{error}: it has given no sign of life for {patience_s:g} s") from None
            if over():
                yield False
                return
            time.sleep(POLL_S)
        yield True
