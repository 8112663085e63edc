"""Delivered: a verdict is something that arrived. Subjects run in a child, which must hand its verdict back.

A subject may end its process (os._exit, a signal, abort() in C), never come back, or leave threads that keep it. None
of that is status 0. So the process forks before anything heavy is imported, the child goes on with the work, and the
parent, which runs no code of a subject, waits: for the verdict, for the end, for silence. What the child was doing is
read from memory that both share (progress.py).

A fork costs some milliseconds, and no device has been touched yet.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dsa_verify.base.errors import STATUS_DEVICE_LOST
from dsa_verify.contract import progress

TIMEOUT_S: Final = 600.0  # where no option says otherwise
POLL_S: Final = 0.1
LINGER_S: Final = 10.0  # what a child may take to end after its verdict
STACK_S: Final = 1.0  # what a hanging process may take to write its stacks
_PR_SET_PDEATHSIG: Final = 1
_SI_KERNEL: Final = 0x80  # a signal of the terminal, which the child was sent, too
_FIRST_FD: Final = 200  # where no subject closes or replaces what it takes for its own
_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A child ended like this. `code`: its exit status, or the negative number of a signal. `verdict`: what it handed
    back. `silent_s`: how long it may have made no progress, being killed for more; 0 if it was not. `stack`: what its
    threads were doing then, or when a signal ended it, as faulthandler writes it. `told`: the signal that told both to
    end, if one did. `lingered`: killed because it did not end after its verdict."""

    pid: int
    code: int
    verdict: int | None
    silent_s: float
    stack: str
    told: int | None
    lingered: bool
    progress: progress.SharedProgress


def can_supervise() -> bool:
    """Return whether this process may be forked: it has one thread, no torch yet, and the calls that are needed."""
    if "torch" in sys.modules or not all(hasattr(os, name) for name in ("fork", "memfd_create")):
        return False
    return hasattr(signal, "sigtimedwait") and len(list(Path("/proc/self/task").glob("*"))) == 1


def supervise(
    timeout_s: float,
    linger_s: Callable[[progress.SharedProgress], float | None],
    *,
    stack_on_signals: bool,
) -> End | None:
    """Fork. Return None in the child, which goes on with the work; in the parent, later, how the child ended.

    `timeout_s`: for how long the subject's code, or the device, may make no progress; 0: for ever. `linger_s(record)`:
    for how long the child may go on after its verdict; None: for ever. `stack_on_signals`: keep the stack of a child
    that a signal ends.
    """
    record = progress.share()
    stack_fd = above(os.memfd_create("stacks"))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody can wait for a child
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *_FORWARDED})
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        _end_with(parent)
        faulthandler.register(_dump_signal(), file=stack_fd, all_threads=True)
        if stack_on_signals:
            faulthandler.enable(stack_fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return None
    try:
        return _Watch(pid, record, stack_fd, timeout_s, linger_s).end()
    finally:
        progress.unshare()
        os.close(stack_fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def deliver(status: int, pid: int) -> None:
    """Hand `status` back and end, in child `pid`, once all is said. Threads that still run do not keep it."""
    record = progress.current()
    if os.getpid() != pid:
        record.end_copy(*(record.slots[slot] for slot in (progress.STAGE, progress.BUCKET, progress.ROUND)))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    record.deliver(status)
    if status != STATUS_DEVICE_LOST:  # nothing may be asked of a lost device, not even by what clears up
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
    os._exit(status)


def left_threads() -> list[str]:
    """The names of the threads that would keep this process from ending."""
    return [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]


def above(fd: int) -> int:
    """Return `fd` under another number, which is not the next that a subject opens or closes."""
    import fcntl

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
    finally:
        os.close(fd)


def _dump_signal() -> int:
    return signal.SIGRTMIN + 12


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that call
        os._exit(1)


class _Watch:
    """The parent's wait for child `pid`."""

    def __init__(
        self,
        pid: int,
        record: progress.SharedProgress,
        stack_fd: int,
        timeout_s: float,
        linger_s: Callable[[progress.SharedProgress], float | None],
    ):
        self._pid, self._record, self._stack_fd = pid, record, stack_fd
        self._timeout_s, self._linger_s = timeout_s, linger_s
        self._told: int | None = None

    def end(self) -> End:
        silent_s, after_s, hung, lingered = 0.0, 0.0, False, False
        limit_s: float | None = None
        sign, now = self._sign(), time.monotonic()
        while (code := self._code()) is None:
            self._forward(signal.sigtimedwait({signal.SIGCHLD, *_FORWARDED}, POLL_S))
            # No more than was watched: a machine or a process that was stopped in between has not been silent.
            before, now = now, time.monotonic()
            passed_s = min(now - before, 2 * POLL_S)
            if self._record.verdict is not None:
                after_s += passed_s
                limit_s = self._linger_s(self._record)
                lingered = limit_s is not None and after_s >= limit_s
            elif (seen := self._sign()) != sign or self._is_stopped():
                sign, silent_s = seen, 0.0
            else:
                silent_s += passed_s
                limit_s = self._limit_s()
                hung = limit_s is not None and silent_s >= limit_s
            if hung or lingered:
                code = self._kill(with_stack=hung)
                break
        return End(
            pid=self._pid,
            code=code,
            verdict=self._record.verdict,
            silent_s=limit_s if hung and limit_s is not None else 0.0,
            stack=self._stack(),
            told=self._told,
            lingered=lingered,
            progress=self._record,
        )

    def _code(self) -> int | None:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def _forward(self, got: Any) -> None:
        if got is None or got.si_signo == signal.SIGCHLD:
            return
        if got.si_signo != signal.SIGINT:
            self._told = got.si_signo
        if got.si_code != _SI_KERNEL:
            os.kill(self._pid, got.si_signo)

    def _sign(self) -> bytes:
        """Return what any progress changes."""
        return bytes(self._record.slots[: progress.VERDICT])

    def _limit_s(self) -> float | None:
        """Return for how long the present stage may show no progress. Work of the verifier itself has no limit."""
        stage = self._record.slots[progress.STAGE]
        if not self._timeout_s or not (stage in progress.OF_THE_SUBJECT or stage in (progress.IMPORT, progress.DEVICE)):
            return None
        # An engine takes its time to import, whatever its rounds may take.
        return max(self._timeout_s, TIMEOUT_S) if stage == progress.IMPORT else self._timeout_s

    def _is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return False

    def _kill(self, *, with_stack: bool) -> int:
        if with_stack:
            os.kill(self._pid, _dump_signal())
            deadline, size = time.monotonic() + STACK_S, -1
            while time.monotonic() < deadline and (not size or size != os.fstat(self._stack_fd).st_size):
                size = os.fstat(self._stack_fd).st_size
                time.sleep(POLL_S)
        os.kill(self._pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _stack(self) -> str:
        return os.pread(self._stack_fd, 1 << 20, 0).decode(errors="replace")
