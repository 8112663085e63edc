"""The command, or a part of a test, in a process forked off this one, where all that it needs is imported already.

A process of its own like any other: its folder, its streams, its exit status and its signals. What is not tested with
it is the start of the interpreter, and what it imports when.
"""

from __future__ import annotations

import atexit
import importlib
import io
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from dsa_verify.base.device import choose_device
from dsa_verify.cli import main as cli

ROOT = Path(__file__).parents[2]
STREAM_LOST = 120  # Python's own status where a standard stream cannot be flushed at the end
FAILED = 99  # no status of the command's


class Forked:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Return the exit status, or the negative number of the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def start(folder: Path, arguments: Sequence[str], out: IO[Any], err: IO[Any]) -> Forked | subprocess.Popen[bytes]:
    """Start `dsa-verify` with these arguments in `folder`."""
    if torch.cuda.is_available():  # a process that is forked off one that uses the device cannot use it
        command = [sys.executable, "-m", "dsa_verify", *arguments]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
        return subprocess.Popen(command, cwd=folder, stdout=out, stderr=err, env=environment)
    import_all()
    return fork(lambda: _be_the_command(folder, arguments), out, err)


def fork(body: Callable[[], object], out: IO[Any], err: IO[Any]) -> Forked:
    """Do `body`, and nothing else, in a child of this process, with streams of its own."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if not pid:
        _do(body, out, err)
    return Forked(pid)


@cache
def import_all() -> None:
    """Import whatever a verification imports, some of it late."""
    for module in ("dsa_verify.cli.replay", "dsa_verify.report.ends", "dsa_verify.cli.fuzz"):
        importlib.import_module(module)
    from dsa_verify.contract.geometry import Geometry
    from dsa_verify.graphs import open_backend
    from dsa_verify.rounds.matrix import diagnostic_matrix
    from dsa_verify.run.runner import Runner, new_result
    from dsa_verify.systems.catalogue import get_system

    backend = open_backend(choose_device("auto"))
    configs = diagnostic_matrix(get_system("decode"), Geometry.resolve("tiny"), rounds=1, batches=(1,))
    run = new_result("decode", None, backend)
    Runner(backend=backend, folder=None).matrix(configs, None, run, fault="skip_refresh")
    assert run.findings


def _be_the_command(folder: Path, arguments: Sequence[str]) -> None:
    os.chdir(folder)
    cli.can_supervise = lambda: True
    sys.argv = ["dsa-verify", *arguments]
    cli.main()


def _do(body: Callable[[], object], out: IO[Any], err: IO[Any]) -> NoReturn:
    status: object = FAILED
    atexit._clear()  # what this process has to clear up is not the child's
    torch.set_num_threads(1)  # the others of this process are not in the child, which would wait for them
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = _stream(1, "<stdout>"), _stream(2, "<stderr>", line_buffering=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            body()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            traceback.print_exc()
        try:
            sys.stdout.flush()
        except OSError:
            status = STREAM_LOST
    finally:
        os._exit(status if isinstance(status, int) else FAILED)


def _stream(fd: int, name: str, **options: bool) -> io.TextIOWrapper:
    """A standard stream as an interpreter makes it."""
    raw = io.FileIO(fd, "w", closefd=False)
    raw.name = name
    return io.TextIOWrapper(io.BufferedWriter(raw), **options)
