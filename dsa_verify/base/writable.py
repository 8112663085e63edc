"""Where results are written: refused before the run if it cannot be, and told without a traceback if it fails later."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dsa_verify.base.errors import STATUS_EQUAL, STATUS_HARNESS, UsageError


def check_file(name: str) -> Path:
    """The file `name`, as a path; UsageError if it cannot be written. Found out by trying, and nothing is left."""
    if not name:
        raise UsageError("the name is empty; name a file")
    if os.path.isdir(name):
        raise UsageError(f"{name}: is a folder; name a file")
    folder = os.path.dirname(name) or "."
    if not os.path.isdir(folder):
        raise UsageError(f"{name}: the folder {folder} does not exist; create it")
    there = os.path.exists(name)
    if there and not os.path.isfile(name):  # a pipe or a device: opened once, it may be at its end
        if not os.access(name, os.W_OK):
            raise UsageError(f"{name}: cannot be written (Permission denied); name another file")
        return Path(name)
    try:
        with open(name, "ab"):
            pass
        if not there:
            os.unlink(os.path.realpath(name))
    except OSError as error:
        raise UsageError(f"{name}: cannot be written ({error.strerror}); name another file") from None
    return Path(name)


def check_folder(name: str) -> Path:
    """The folder `name`, as a path, which need not exist yet; UsageError if no file can be put there."""
    if not name:
        raise UsageError("the name is empty; name a folder")
    nearest = os.path.abspath(name)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    probe = os.path.join(nearest, f".dsa-verify.{os.getpid()}")
    try:
        with open(probe, "ab"):
            pass
        os.unlink(probe)
    except OSError as error:
        raise UsageError(f"{name}: nothing can be put there ({error.strerror}); name another folder") from None
    return Path(name)


def write(path: Path, text: str, status: int) -> int:
    """Write `text`; if it cannot be written, that is said, and a run that would have passed has the status of a broken
    harness. Any other `status` stands: a finding is one whether or not its report could be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        click.echo(f"dsa-verify: {path}: could not be written ({error.strerror}); make room, and run again", err=True)
        return STATUS_HARNESS if status == STATUS_EQUAL else status
    return status
