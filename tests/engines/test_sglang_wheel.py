"""How SGLang is found: what is said where it is missing, what a result says of it, and CPU tensors for its kernels."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import triton
from fake_sglang import importable, lay_out

from dsa_verify.base.errors import STATUS_NOTHING_VERIFIED, STATUS_USAGE, NothingVerified, UsageError
from dsa_verify.subjects.adapters.sglang import wheel
from dsa_verify.subjects.adapters.traced import capability

CPU = torch.device("cpu")
GUARDED = """
def halve(tensor):
    assert tensor.is_cuda
    assert tensor.dim() == 1, "one dimension"
    return tensor // 2
"""
Tree = Callable[..., None]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    """Lays out modules of SGLang, given by name without the package, for this test alone."""
    with importable(tmp_path, monkeypatch):
        yield lambda **modules: lay_out(tmp_path, {f"{name}.py": text for name, text in modules.items()})


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.status == STATUS_USAGE
    return str(caught.value)


def test_listing_the_subjects_imports_neither_sglang_nor_torch() -> None:
    code = "import sys, dsa_verify.subjects.adapters.sglang as table; assert len(table.SUBJECTS) > 3\n"
    code += "assert not {'sglang', 'torch', 'triton'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_sglang_the_remedy_is_named(tree: Tree) -> None:
    assert refusal(lambda: wheel.require("sglang.kernels.thing")) == (
        "sglang.kernels.thing cannot be imported: sglang is not installed; pip install sglang, or put a laid-out tree "
        "of its wheel on PYTHONPATH"
    )


def test_a_release_without_the_module_is_named(tree: Tree, tmp_path: Path) -> None:
    tree(version="__version__ = '0.5.9'")
    assert refusal(lambda: wheel.require("sglang.thing")) == (
        f"sglang.thing cannot be imported: this sglang (0.5.9, in {tmp_path / 'sglang'}) has no module sglang.thing; "
        "use a release that has it"
    )
    assert "0.5.9" in refusal(lambda: wheel.attribute("sglang.version", "kernel"))


NOW, BEFORE = "sglang.kernels.ops.attention.dsa.kpool_metadata", "sglang.kernels.ops.attention.dsa_kpool_metadata"


def test_what_0_5_22_has_elsewhere_is_found_there(tree: Tree, tmp_path: Path) -> None:
    lay_out(tmp_path, {"kernels/ops/attention/dsa_kpool_metadata/decode.py": "def fused(): return 22"})
    assert wheel.require(f"{NOW}.decode").__name__ == f"{BEFORE}.decode"
    assert wheel.attribute(f"{NOW}.decode", "fused_kpool")() == 22
    assert f"{BEFORE}.decode" in wheel.provenance(f"{NOW}.decode")
    assert "has no other_kpool" not in refusal(lambda: wheel.attribute(f"{NOW}.decode", "other_kpool"))
    assert "has no module" in refusal(lambda: wheel.require(f"{NOW}.verify"))


def test_where_it_is_in_its_place_nothing_else_is_taken(tree: Tree, tmp_path: Path) -> None:
    place = "kernels/ops/attention/dsa"
    lay_out(tmp_path, {f"{place}/kpool_metadata/decode.py": "def fused(): return 23"})
    lay_out(tmp_path, {f"{place}_kpool_metadata/decode.py": "def fused_kpool(): return 22"})
    assert wheel.require(f"{NOW}.decode").__name__ == f"{NOW}.decode"
    assert "has no fused_kpool" in refusal(lambda: wheel.attribute(f"{NOW}.decode", "fused_kpool"))


def test_a_missing_dependency_is_named(tree: Tree) -> None:
    tree(thing="import no_such_dependency.part")
    text = refusal(lambda: wheel.require("sglang.thing"))
    assert "it needs the module no_such_dependency, which is not installed" in text
    assert "pip install sglang brings all that it needs" in text


def test_whatever_an_import_raises_is_passed_on_in_words(tree: Tree) -> None:
    tree(version="__version__ = '0.5.23'", thing="raise OSError('no driver')")
    text = refusal(lambda: wheel.require("sglang.thing"))
    assert text.startswith("importing sglang.thing raised OSError: no driver; this is sglang 0.5.23 with torch ")


@pytest.mark.parametrize("ending", ["", "raise OSError('no driver')"])
def test_triton_is_left_as_it_is_for_kernels_of_others(tree: Tree, ending: str) -> None:
    """SGLang's utilities replace one of its functions by one that no kernel can call."""
    own = triton.next_power_of_2
    tree(thing=f"import triton\nsetattr(triton, 'next_power_of_2', lambda n: n)\n{ending}")
    with contextlib.suppress(UsageError):
        wheel.require("sglang.thing")
    assert triton.next_power_of_2 is own


def test_on_a_cpu_only_the_question_for_a_gpu_is_left_out(tree: Tree) -> None:
    tree(guarded=GUARDED)
    tensor = torch.arange(4)
    with pytest.raises(AssertionError):
        wheel.require("sglang.guarded").halve(tensor)
    halve = wheel.attribute("sglang.guarded", "halve", CPU)
    assert halve(tensor).tolist() == [0, 0, 1, 1]
    with pytest.raises(AssertionError, match="one dimension"):
        halve(tensor.view(2, 2))
    assert halve.__code__.co_filename == wheel.require("sglang.guarded").__file__
    with pytest.raises(AssertionError):
        wheel.attribute("sglang.guarded", "halve", torch.device("cuda"))(tensor)


def test_what_needs_a_gpu_says_so_with_a_status_of_its_own() -> None:
    with pytest.raises(NothingVerified) as caught:
        wheel.need_gpu("subject 'x'", CPU, "compiles CUDA")
    assert caught.value.status == STATUS_NOTHING_VERIFIED
    assert str(caught.value) == (
        "subject 'x' needs a CUDA GPU and this run is on cpu: it compiles CUDA; give --device cuda where there is one"
    )
    wheel.need_gpu("subject 'x'", torch.device("cuda", 0), "compiles CUDA")


def test_provenance_is_of_the_very_files(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(version="__version__ = '0.5.23'", guarded=GUARDED)
    source = tmp_path / "sglang" / "csrc" / "copy.cuh"
    source.parent.mkdir()
    source.write_text("// a kernel")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert wheel.provenance("sglang.guarded", files=["csrc/copy.cuh"]) == {
        "sglang": "0.5.23",
        "sglang.guarded": hashlib.sha256(GUARDED.encode()).hexdigest()[:12],
        "csrc/copy.cuh": hashlib.sha256(b"// a kernel").hexdigest()[:12],
        "torch": torch.__version__,
        "triton": "1.0",
        "capability": "interpreted",
    }
    assert "csrc/other.cuh does not exist" in refusal(lambda: wheel.provenance(files=["csrc/other.cuh"]))


@pytest.mark.parametrize("text", ["__version__ = '0.0.0.dev0'", "", None])
def test_a_placeholder_does_not_pass_for_a_version(tree: Tree, text: str | None) -> None:
    tree(**({"guarded": GUARDED} if text is None else {"version": text}))
    assert wheel.provenance()["sglang"] == "unknown (no package metadata)"


def test_the_capability_is_that_of_the_gpu_unless_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert capability() == "sm90"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert capability() == "interpreted"
