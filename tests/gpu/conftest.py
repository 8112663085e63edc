"""What every test on a GPU has around it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Several processes share the device: what a test has freed must not stay with its process."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@pytest.fixture
def much_memory(memory_given_back: None) -> Iterator[None]:
    """For tests that take tens of GiB: one of them at a time, whichever processes they are in."""
    with (Path(tempfile.gettempdir()) / f"dsa-verify-much-memory-{os.getuid()}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
