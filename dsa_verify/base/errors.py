"""The errors that this package raises, each with an exit status of the command line.

A message names the field, the value, the limit and the remedy. A wrong *subject* is not an error but a `Finding`
(status 1); `CaptureError` and `ReplayError` are how a graph backend tells the replayer about one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

STATUS_EQUAL = 0
STATUS_MISMATCH = 1
STATUS_USAGE = 2
STATUS_HARNESS = 3
STATUS_NOTHING_VERIFIED = 4
STATUS_DEVICE_LOST = 5
STATUS_FLAKY = 6
STATUS_NO_ROOM = 7
STATUS_OUT_OF_MEMORY = 8
STATUS_INTERRUPTED = 130

MEANINGS: Final[Mapping[int, str]] = {
    STATUS_EQUAL: "every round was checked and is equal",
    STATUS_MISMATCH: "an element differs, or the subject fails, hangs, forks, or ends the process",
    STATUS_USAGE: "the command was used wrongly, or a case file is not valid",
    STATUS_HARNESS: "the harness or an oracle is broken, or no verdict arrived",
    STATUS_NOTHING_VERIFIED: "nothing was verified",
    STATUS_DEVICE_LOST: "the device was lost",
    STATUS_FLAKY: "a difference was flaky: it did not show again",
    STATUS_NO_ROOM: "the disk is full, so there is no verdict",
    STATUS_OUT_OF_MEMORY: "memory ran out, so there is no verdict",
    STATUS_INTERRUPTED: "the run was interrupted; results so far are saved",
}


class DsaVerifyError(Exception):
    """Base of every error this package raises on purpose; `status` is the exit status it maps to."""

    status = STATUS_HARNESS


class UsageError(DsaVerifyError):
    """An argument, preset, subject name or case file is wrong, and the reader can mend it."""

    status = STATUS_USAGE


class CaptureError(DsaVerifyError):
    """The body of a graph did something that cannot be captured, or raised.

    `operation` names what it was doing (an ATen operation, a Tensor method) where that is known.
    """

    status = STATUS_MISMATCH

    def __init__(self, message: str, operation: str | None = None):
        super().__init__(message)
        self.operation = operation


class ReplayError(DsaVerifyError):
    """A recorded graph cannot be replayed: a buffer that it captured is gone."""

    status = STATUS_MISMATCH


class GuardError(DsaVerifyError):
    """A guard found that a graph would not read, or has not computed, what it must.

    `findings`: all that was found at once (`dsa_verify.GuardFinding`); the message has the first sentence.
    """

    status = STATUS_MISMATCH

    def __init__(self, message: str, findings: Sequence[object] = ()):
        super().__init__(message)
        self.findings = tuple(findings)


class HarnessError(DsaVerifyError):
    """The toolkit itself or an oracle is broken, so there is no verdict about the subject."""

    status = STATUS_HARNESS


class NothingVerified(DsaVerifyError):
    """The run ended without checking a single round."""

    status = STATUS_NOTHING_VERIFIED


class OutOfMemory(DsaVerifyError):
    """Memory ran out, which says nothing about the subject: there is no verdict."""

    status = STATUS_OUT_OF_MEMORY


class DeviceLost(DsaVerifyError):
    """The device reported a sticky error, so nothing that this process says later may be believed."""

    status = STATUS_DEVICE_LOST
