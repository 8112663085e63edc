"""vLLM as a second engine, without vLLM: its table of subjects, what is refused and what is listed as not covered, what
is said where it is missing, and the stand-ins."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from support import DEVICE

from dsa_verify.base.errors import STATUS_USAGE, UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.subject import load_attribute, not_covered, provenance
from dsa_verify.subjects.adapters import vllm
from dsa_verify.subjects.adapters.vllm import basic, standins, wheel
from dsa_verify.systems.basic import decode, draft_extend, target_verify
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.systems.engines import engine_subject

LAYOUTS = {"decode": decode, "target_verify": target_verify, "draft_extend": draft_extend}
SUMS = {"cu_seqlens_q", "cu_seqlens_k", "dsa_cu_seqlens_q", "dsa_cu_seqlens_k"}


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that can find no vLLM."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(wheel, "_folder", lambda: None)
    monkeypatch.setattr(wheel, "package_version", lambda name: None)


@pytest.mark.parametrize("name", vllm.SUBJECTS)
def test_each_subject_is_one_of_its_system(name: str) -> None:
    found = engine_subject(f"vllm:{name}")
    assert found is not None
    assert found.system in SYSTEMS
    factory = load_attribute(found.reference)
    assert factory.name == found.name
    covered = LAYOUTS[found.system](Geometry.resolve("tiny", {"draft_tokens": 3}), 2)
    assert {"cache_seqlens_int32", "page_table_1"} <= {field.name for field in covered}


def test_an_unknown_subject_is_told_from_the_known() -> None:
    with pytest.raises(UsageError, match=r"'vllm:verify' is unknown; vllm has decode, draft_decode, target_verify"):
        engine_subject("vllm:verify")


# Without vLLM --------------------------------------------------------------------------------------------------------


def test_a_missing_vllm_is_named_with_its_remedy(nowhere: None) -> None:
    with pytest.raises(UsageError, match=r"vllm is not installed; pip install vllm, or put files") as caught:
        provenance(basic.Decode)
    assert caught.value.status == STATUS_USAGE


def test_a_release_without_a_module_or_a_part_of_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(wheel, "_install_stand_ins", lambda: None)
    monkeypatch.setattr(wheel, "_folder", lambda: Path("somewhere"))
    monkeypatch.setattr(importlib, "import_module", lambda name: missing("vllm.v1.gone"))
    with pytest.raises(
        UsageError, match=r"has no module vllm.v1.gone; use a release that has it, or lay out that file"
    ):
        wheel.require("vllm.v1.attention")
    monkeypatch.setattr(importlib, "import_module", lambda name: missing("numba"))
    with pytest.raises(UsageError, match=r"needs the module numba, which is not installed"):
        wheel.require("vllm.v1.attention")
    monkeypatch.setattr(wheel, "require", lambda name: object())
    with pytest.raises(UsageError, match=r"has no build; use a release that has it"):
        wheel.attribute("vllm.v1.attention", "build")


def test_an_import_that_fails_otherwise_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(wheel, "_install_stand_ins", lambda: None)
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(
        UsageError, match=r"importing vllm.v1 raised RuntimeError: no driver; this is vllm .* with torch"
    ):
        wheel.require("vllm.v1")


def test_the_version_of_a_laid_out_tree_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "package_version", lambda name: None)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "vllm" / "v1").mkdir(parents=True)
    assert wheel.version() == "unknown (laid out)"
    text = "__all__ = [\"__version__\"]\nversion: str\n__version__ = version = '0.33.0'\n__commit_id__ = 'abc'\n"
    (tmp_path / "vllm" / "_version.py").write_text(text)
    assert wheel.version() == "0.33.0 (laid out)"


# What is refused, and what is not covered ----------------------------------------------------------------------------


def test_pools_are_refused_before_vllm_is_imported(nowhere: None) -> None:
    with pytest.raises(UsageError, match=r"'vllm:decode': pool_size 4: .*set pool_size=1"):
        basic.Decode().allocate(Geometry.resolve("tiny_pool"), None, None)  # type: ignore[arg-type]


def layout_of(system: str, **changes: object) -> Layout:
    return LAYOUTS[system](Geometry.resolve("tiny", {"draft_tokens": 2, **changes}), 2)


@pytest.mark.parametrize(
    "subject, system, changes, more",
    [
        (basic.Decode, "decode", {"draft_tokens": 1}, set()),
        (basic.TargetVerifyFlat, "target_verify", {}, set()),
        (basic.TargetVerifyVarlen, "target_verify", {"architecture": 100}, {"paged_mqa_ctx_lens_2d"}),
        (basic.DraftExtend, "draft_extend", {"wide_table": True}, set()),
        (
            basic.DraftExtend,
            "draft_extend",
            {"indexer": True, "multiprocessors": 5, "schedule": "tiny", "plan_rules": "tiny"},
            {"paged_mqa_schedule_metadata", "topk_v2_plan"},
        ),
    ],
)
def test_what_vllm_does_not_have_is_listed(
    subject: type, system: str, changes: dict[str, object], more: set[str], nowhere: None
) -> None:
    layout = layout_of(system, **changes)
    listed = not_covered(subject, layout, DEVICE)
    assert set(listed) == SUMS | {name for name in more if name in layout}
    assert all(reason for reason in listed.values())


def test_rows_of_requests_are_not_taken_for_rows_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for flattened, more in ((True, set()), (False, {"real_page_table"})):
        monkeypatch.setattr(basic.runner, "decided_to_flatten", lambda drafts, decided=flattened: decided)
        listed = not_covered(basic.TargetVerify, layout_of("target_verify"), DEVICE)
        assert set(listed) == SUMS | more


# Stand-ins -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def finder(tmp_path: Path) -> standins._Finder:
    (tmp_path / "v1").mkdir()
    own = tmp_path / "envs.py"
    own.write_text("ANSWER = 42\n")
    return standins._Finder(tmp_path)


def stand_in(finder: standins._Finder, name: str) -> object:
    spec = finder.find_spec(name, None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


def test_own_code_comes_from_its_file_and_no_other_package_is_touched(finder: standins._Finder) -> None:
    assert finder.find_spec("vllmish", None) is None
    assert finder.find_spec("torch", None) is None
    assert "vllm.envs" in standins.OWN_CODE
    assert stand_in(finder, "vllm.envs").ANSWER == 42  # type: ignore[attr-defined]
    assert finder.find_spec("vllm.v1.attention.backend", None) is None, "a file that was not laid out is missing"


def test_a_stand_in_is_no_more_than_names(finder: standins._Finder) -> None:
    config = stand_in(finder, "vllm.config")
    stands_for = config.VllmConfig  # type: ignore[attr-defined]
    assert config.VllmConfig is stands_for  # type: ignore[attr-defined]
    assert stands_for[int] is stands_for
    assert stands_for.Mode.FULL is stands_for.Mode.FULL

    class Derived(stands_for):  # type: ignore[valid-type,misc]
        def __init__(self, value: int):
            self.value = value

    assert Derived(3).value == 3
    with pytest.raises(UsageError, match=r"vllm.config.VllmConfig: a stand-in"):
        stands_for()
    with pytest.raises(AttributeError):
        config.__path_of_nothing__  # type: ignore[attr-defined] # noqa: B018


def test_a_platform_answers_for_the_device_that_kernels_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert (standins.Platform().is_cuda(), standins.Platform().device_type) == (False, "cpu")
    monkeypatch.delenv("TRITON_INTERPRET")
    found = standins.Platform()
    assert (found.is_cuda(), found.device_type) == (True, "cuda")
    assert [found.is_device_capability_family(family) for family in (90, 100)] == [True, False]
