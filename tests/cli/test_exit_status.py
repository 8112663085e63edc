"""Exit statuses: one table, which the help shows, and one function that says what an error stands for."""

from __future__ import annotations

import errno

import pytest

from dsa_verify.base import errors
from dsa_verify.base.exit_status import exit_status, in_a_line, is_expected
from dsa_verify.cli.main import STATUSES
from fuzz.campaign.shard_folder import CaseNotSaved


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error, status",
    [
        (errors.UsageError("batch: 0 is too few"), 2),
        (errors.HarnessError("the oracle is broken"), 3),
        (errors.NothingVerified("no round"), 4),
        (errors.DeviceLost("an illegal access"), 5),
        (chained(errors.DeviceLost("while it asked for memory"), MemoryError()), 5),
        (CaseNotSaved("stale: x"), 7),
        (OSError(errno.ENOSPC, "No space left on device"), 7),
        (PermissionError(errno.EACCES, "Permission denied"), 3),
        (errors.OutOfMemory("free some"), 8),
        (MemoryError(), 8),
        (chained(RuntimeError("the subject raised"), MemoryError()), 8),
        (KeyboardInterrupt(), 130),
        (SystemExit(0), 3),
        (AssertionError("unexpected"), 3),
    ],
    ids=lambda value: f"{type(value).__name__}-{value}" if isinstance(value, BaseException) else str(value),
)
def test_what_an_error_stands_for(error: BaseException, status: int) -> None:
    assert exit_status(error) == status
    assert status in errors.MEANINGS
    assert is_expected(error) is not (status == 3 and not isinstance(error, errors.DsaVerifyError))


def test_an_error_says_its_type_where_it_is_not_ours() -> None:
    assert in_a_line(errors.UsageError("batch: 0 is too few")) == "batch: 0 is too few"
    assert in_a_line(MemoryError()) == "MemoryError: "


def test_the_help_has_every_status() -> None:
    constants = {value for name, value in vars(errors).items() if name.startswith("STATUS_")}
    assert constants == set(errors.MEANINGS)
    shown = [line.split(maxsplit=1) for line in STATUSES.splitlines()[2:]]
    assert [(int(status), text) for status, text in shown] == list(errors.MEANINGS.items())
