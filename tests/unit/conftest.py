"""Fixtures of more than one file of unit tests."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example of a serving loop."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module("serving_loop")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For many small operations, which several threads only slow down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
