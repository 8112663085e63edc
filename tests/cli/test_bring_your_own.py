"""What docs/bring-your-own.md promises: its code is the template's, it is right, each common mistake is called by its
name, and nothing that is missing is passed over."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support import DEVICE, setup_of, small

from dsa_verify.base.errors import UsageError
from dsa_verify.cli import new
from dsa_verify.contract.map_outputs import map_outputs
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.systems.basic import decode
from dsa_verify.systems.catalogue import SYSTEMS

ROOT = Path(__file__).parents[2]
MISTAKES = {
    "FrozenBatch": "frozen at capture",
    "NewTensor": "allocates in replay",
    "ReadsOnTheHost": "synchronises in capture",
    "PageOffByOne": "boundary",
    "LiveRowsOnly": "never written",
    "AdvancesItsInput": "input overwritten",
}


@pytest.fixture
def mistakes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("mistakes")


def found(subject: type) -> list[str]:
    config = diagnostic_matrix(SYSTEMS["decode"], small(), batches=[4])[0]
    setup = setup_of(subject, geometry=config.geometry, buckets=config.buckets)
    return [finding.diagnosis.value for finding in verify_rounds(setup, config.chunks(), Counts(), folder=None)]


def test_the_example_is_right_short_and_what_the_document_shows(
    mistakes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(mistakes.PagedDecode) == []
    text = (ROOT / "examples/paged_decode.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) < 40
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/bring-your-own.md").read_text(), re.DOTALL)
    assert shown == text
    monkeypatch.setattr(new, "_importable", lambda name: False)  # the example itself is, here
    new.run("paged_decode", tmp_path)
    assert (tmp_path / "paged_decode.py").read_text() == text


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_called_by_its_name(mistakes: ModuleType, name: str) -> None:
    subject = getattr(mistakes, name)
    assert found(subject)[0] == MISTAKES[name]
    assert subject.__doc__.startswith(MISTAKES[name])
    assert f"`{MISTAKES[name]}`" in (ROOT / "docs/bring-your-own.md").read_text()


def test_every_mistake_is_tested(mistakes: ModuleType) -> None:
    wrong = [name for name, value in vars(mistakes).items() if isinstance(value, type) and name != "PagedDecode"]
    assert set(wrong) == set(MISTAKES)


def test_what_new_writes_passes_its_own_test(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    new.run("my_kernel", pytester.path)
    monkeypatch.syspath_prepend(str(pytester.path))
    assert "class MyKernel" in (pytester.path / "my_kernel.py").read_text()
    result = pytester.runpytest_inprocess("-p", "no:hypothesispytest", "--dsa-rounds=2", "test_my_kernel.py")
    result.assert_outcomes(passed=1)
    with pytest.raises(UsageError, match=r"my_kernel\.py: exists already; choose another name"):
        new.run("my_kernel", pytester.path)


@pytest.mark.parametrize("name", ["my-kernel", "class", "", "a.b"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a module"):
        new.run(name, tmp_path)


@pytest.mark.parametrize("name", ["json", "sys", "dsa_verify", "__main__"])
def test_a_name_that_is_taken_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}': a module of that name is installed already"):
        new.run(name, tmp_path)
    assert not list(tmp_path.iterdir())


# Mapping -------------------------------------------------------------------------------------------------------------

LAYOUT = decode(small(), 2)


def tensors() -> dict[str, torch.Tensor]:
    return {field.name: torch.zeros(field.shape, dtype=torch.int32, device=DEVICE) for field in LAYOUT}


@dataclasses.dataclass
class Metadata:
    lengths: torch.Tensor
    tables: dict[str, torch.Tensor]


class Backend:
    def __init__(self, held: dict[str, torch.Tensor]):
        self.forward_metadata = Metadata(lengths=held.pop("cache_seqlens_int32"), tables=held)


def test_fields_are_found_in_dicts_dataclasses_and_objects() -> None:
    held = tensors()
    assert map_outputs(held, LAYOUT) == held
    names = {name: f"forward_metadata.tables.{name}" for name in held if name != "cache_seqlens_int32"}
    names["cache_seqlens_int32"] = "forward_metadata.lengths"
    got = map_outputs(Backend(dict(held)), LAYOUT, names)
    assert {name: id(tensor) for name, tensor in got.items()} == {name: id(tensor) for name, tensor in held.items()}


def test_all_that_is_missing_is_listed() -> None:
    held: dict[str, object] = dict(tensors())
    del held["cu_seqlens_k"]
    held["page_table_1"] = [1, 2]
    said = (
        r"2 field\(s\) of decode have no tensor: cu_seqlens_k \(int32 \[3\], contract 1\.1\): cu_seqlens_k is missing; "
        r"page_table_1 .*: page_table_1 is a list; say where they are"
    )
    with pytest.raises(UsageError, match=said):
        map_outputs(held, LAYOUT)
    with pytest.raises(
        UsageError, match="names: lengths are not fields of decode; its fields are cache_seqlens_int32,"
    ):
        map_outputs(tensors(), LAYOUT, {"lengths": "cache_seqlens_int32"})
