"""Which GPU an xdist worker gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsa_verify.base.gpu_pinning import pin_gpu, visible_gpus


def machine(root: Path, *, nodes: int = 0, proc: int = 0) -> Path:
    """The part of a file system that shows GPUs: device nodes, and the driver's folders."""
    (root / "dev").mkdir()
    for name in [*(f"nvidia{i}" for i in range(nodes)), "nvidiactl", "nvidia-uvm", "null"]:
        (root / "dev" / name).touch()
    for i in range(proc):
        (root / f"proc/driver/nvidia/gpus/0000:0{i}:00.0").mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    "listed, gpus",
    [
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("2, 5", ["2", "5"]),
        ("GPU-8932f937-d72c,MIG-41b3", ["GPU-8932f937-d72c", "MIG-41b3"]),
        ("3,-1,4", ["3"]),
    ],
)
def test_the_variable_goes_before_the_machine(tmp_path: Path, listed: str, gpus: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}, machine(tmp_path, nodes=8)) == gpus


@pytest.mark.parametrize("nodes, proc, count", [(0, 0, 0), (2, 0, 2), (0, 3, 3), (1, 8, 1), (12, 12, 12)])
def test_counted_without_the_variable(tmp_path: Path, nodes: int, proc: int, count: int) -> None:
    assert visible_gpus({}, machine(tmp_path, nodes=nodes, proc=proc)) == [str(i) for i in range(count)]


def test_workers_take_turns(tmp_path: Path) -> None:
    root = machine(tmp_path, nodes=3)
    chosen = []
    for worker in range(5):
        environment = {"PYTEST_XDIST_WORKER": f"gw{worker}"}
        assert pin_gpu(environment, root) == environment["CUDA_VISIBLE_DEVICES"]
        chosen.append(environment["CUDA_VISIBLE_DEVICES"])
    assert chosen == ["0", "1", "2", "0", "1"]


def test_out_of_those_that_are_listed(tmp_path: Path) -> None:
    environment = {"PYTEST_XDIST_WORKER": "gw1", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}
    assert pin_gpu(environment, machine(tmp_path, nodes=8)) == environment["CUDA_VISIBLE_DEVICES"] == "GPU-b"


def test_once_only_also_in_a_subprocess_that_has_workers_of_its_own(tmp_path: Path) -> None:
    root = machine(tmp_path, nodes=4)
    environment = {"PYTEST_XDIST_WORKER": "gw3"}
    assert pin_gpu(environment, root) == "3"
    for worker in ("gw3", "gw0"):
        child = environment | {"PYTEST_XDIST_WORKER": worker}
        assert pin_gpu(child, root) is None
        assert child["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize(
    "environment, nodes",
    [({}, 4), ({"PYTEST_XDIST_WORKER": "master"}, 4), ({"PYTEST_XDIST_WORKER": "gw0"}, 0)],
    ids=["no xdist", "the controller", "no GPU"],
)
def test_nothing_to_choose(tmp_path: Path, environment: dict[str, str], nodes: int) -> None:
    before = dict(environment)
    assert pin_gpu(environment, machine(tmp_path, nodes=nodes)) is None
    assert environment == before


def test_no_gpu_stays_hidden(tmp_path: Path) -> None:
    environment = {"PYTEST_XDIST_WORKER": "gw1", "CUDA_VISIBLE_DEVICES": ""}
    assert pin_gpu(environment, machine(tmp_path, nodes=2)) is None
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_too_late_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    environment = {"PYTEST_XDIST_WORKER": "gw1"}
    with pytest.warns(RuntimeWarning, match="gw1 was not given GPU 1 of its own: CUDA is initialised already"):
        assert pin_gpu(environment, machine(tmp_path, nodes=2)) is None
    assert environment == {"PYTEST_XDIST_WORKER": "gw1"}
