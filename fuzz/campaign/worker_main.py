"""Shard: one process's share of a campaign, a pure function of its specification.

It is started as `python -m fuzz.campaign.worker_main FOLDER`.

The process ends with a status of its own for each reason, and at once: after a sticky error nothing may be asked of the
device again. What it does is in shard_work.py; nothing heavy is imported before the folder is locked and the parent is
watched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsa_verify.base.errors import (
    STATUS_DEVICE_LOST,
    STATUS_EQUAL,
    STATUS_HARNESS,
    STATUS_INTERRUPTED,
    STATUS_NO_ROOM,
    STATUS_OUT_OF_MEMORY,
    DsaVerifyError,
    UsageError,
)
from dsa_verify.base.exit_status import exit_status, in_a_line, is_expected
from dsa_verify.base.out_of_memory import find_out_of_memory
from fuzz.campaign.locks import held
from fuzz.campaign.plan import ShardSpec
from fuzz.campaign.shard_folder import LOCK_FILE, REPEAT_FOLDER, SPEC_FILE, read_json

# The process ends with its status above this: with any other a subject has ended it.
STATUS_OFFSET: Final = 96


def _work(arguments: list[str], folder: Path) -> None:
    """Run the shard of `folder` in this process, or repeat a case. Raises what the statuses stand for."""
    from dsa_verify.base.device import choose_device

    if len(arguments) > 1:
        device = choose_device(arguments[2])
        from fuzz.campaign.worker import replay_step_by_step

        return replay_step_by_step(Path(arguments[1]), folder / REPEAT_FOLDER, device)
    data = read_json(folder / SPEC_FILE)
    if data is None:
        raise UsageError(f"{folder}: {SPEC_FILE} is missing; a campaign writes it")
    spec = ShardSpec.from_dict(data)
    device = choose_device(spec.plan.device)
    from fuzz.campaign.worker import work_shard

    work_shard(spec, folder, device)


def _status_of(work: Callable[[], None]) -> int:
    """Do `work` and return the exit status. The reason goes to standard error."""
    try:
        work()
        return STATUS_EQUAL
    except BaseException as error:
        status = _status(error)
        if status == STATUS_HARNESS and not is_expected(error):
            with contextlib.suppress(OSError):
                traceback.print_exc()
        else:
            _say(_reason(error, status))
        return status


def _status(error: BaseException) -> int:
    """Return the exit status of a shard. One whose device answers nothing any more has lost it, whoever says so."""
    status = exit_status(error)
    return STATUS_DEVICE_LOST if status == STATUS_HARNESS and _is_of_the_device(error) else status


def _is_of_the_device(error: BaseException) -> bool:
    return not isinstance(error, DsaVerifyError) and "CUDA error" in str(error)


def _reason(error: BaseException, status: int) -> str:
    """Say in a line what `error` is. One of ours says it itself, but for a lack of memory, which says its cause."""
    if status == STATUS_INTERRUPTED:
        return "interrupted"
    cause = find_out_of_memory(error) if status == STATUS_OUT_OF_MEMORY else None
    if cause is None and (status == STATUS_NO_ROOM or isinstance(error, DsaVerifyError)):
        return str(error)
    return f"{type(cause).__name__}: {cause}" if cause is not None else in_a_line(error)


def _say(text: str) -> None:
    """Write to standard error, the shard's log; that its disk may be full is no death of its own."""
    with contextlib.suppress(OSError):
        print(f"dsa-verify: {text}", file=sys.stderr, flush=True)


def _end_with_parent() -> None:
    """End this shard at once when its supervisor is gone: the next one must be able to begin it anew."""

    def watch() -> None:
        sys.stdin.buffer.read()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # what the subject has started, too
        os._exit(STATUS_OFFSET + STATUS_INTERRUPTED)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> int:
    """Run the shard of `FOLDER`, whose spec.json says what to run; or, given `FOLDER CASE DEVICE`, repeat that case."""
    _end_with_parent()
    folder = Path(arguments[0])

    def work() -> None:
        with held(folder / LOCK_FILE):
            _work(arguments, folder)

    return _status_of(work)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(STATUS_OFFSET + status)
