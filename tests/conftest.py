"""Fixtures of more than one file of unit tests."""

from __future__ import annotations

import gc
import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import played
import pytest
import torch

from dsa_verify.cli import main as cli
from dsa_verify.graphs import Backend, open_backend


def pytest_collection_finish() -> None:
    """Spare each of the many collections the modules that all tests share, of which nothing is ever collected."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture
def dsa_verify(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the command in an empty folder; (exit status, everything printed)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["dsa-verify", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return int(stop.value.code or 0), printed.out + printed.err

    return run


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example of a serving loop."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    return importlib.import_module("serving_loop")


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def graphs(request: pytest.FixtureRequest) -> Backend:
    """Emulated graphs on a CPU, and real ones on a GPU."""
    if request.param == "emulated":
        return open_backend(torch.device("cpu"), "emulated")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return open_backend(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For many small operations, which several threads only slow down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Campaigns whose shards are played (played.py) ------------------------------------------------------------------------


@pytest.fixture
def played_shards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", played.PYTHONPATH)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "campaign"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign of SHARDS shards that has ended with findings. Only to be read: many tests look at it."""
    root = tmp_path_factory.mktemp("undisturbed") / "campaign"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", played.PYTHONPATH)
        assert played.run(root, "wrong", played.SHARDS) == 1
    return root


@pytest.fixture
def ended(root: Path, undisturbed: Path) -> Path:
    """A copy of it, to do as one likes with."""
    return Path(shutil.copytree(undisturbed, root))
