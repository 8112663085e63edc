"""Attached to SGLang's and vLLM's own classes through their own loading code, where they can be imported on a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from servers import Served, serve
from support import DEVICE

HERE = Path(__file__).parent
missing = [name for name in ("sglang", "msgspec", "transformers") if importlib.util.find_spec(name) is None]
needs_sglang = pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)} (a tree of SGLang's wheel)")
pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="stand-ins of a CPU are part of it")

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vllm, installed or laid out (docs/engines-vllm.md)"
)


def sglang(system: str, what: str, tmp_path: Path, parts: str, **environment: str) -> Served:
    return serve(HERE / "serve_real_sglang.py", [system, what], tmp_path, real=True, DSA_VERIFY=parts, **environment)


def vllm(form: str, what: str, tmp_path: Path) -> Served:
    # It ships plugins of its own, which need all of it.
    settings = {"DSA_VERIFY": "guard", "VLLM_PLUGINS": "dsa_verify"}
    return serve(HERE / "serve_real_vllm.py", [form, what], tmp_path, real=True, **settings)


@needs_sglang
@pytest.mark.parametrize("system", ["decode", "target_verify"])
def test_the_dsa_backend_is_attached_and_clean(tmp_path: Path, system: str) -> None:
    served = sglang(system, "clean", tmp_path, "guard,overlay,capture")
    assert (served.status, served.out.splitlines()[-1]) == (0, "served"), served.err
    assert "is attached to sglang 0.5" in served.said[0]
    assert "guard at FullCudaGraphBackend.replay" in served.said[0]
    assert "cannot be imported" not in served.said[0]
    assert any(f"overlay of {system}, rank 0: all equal: " in line for line in served.said)
    assert not [line for line in served.said if "guard:" in line or "detached" in line]


@needs_sglang
@pytest.mark.parametrize("system", ["decode", "v4"])
def test_a_rebinding_in_a_backend_is_named(tmp_path: Path, system: str) -> None:
    served = sglang(system, "rebound", tmp_path, "guard")
    path = {"decode": "DeepseekSparseAttnBackend.real_page_table", "v4": "DeepseekV4AttnBackend.seq_lens"}[system]
    said = [line for line in served.said if f"rank 0: guard: {path} is another tensor " in line]
    assert said, served.err
    assert served.status == 0
    assert sglang(system, "rebound", tmp_path, "guard", DSA_VERIFY_STRICT="1").status != 0


@needs_sglang
def test_a_wrong_page_of_the_dsa_backend_is_named(tmp_path: Path) -> None:
    served = sglang("decode", "wrong", tmp_path, "overlay")
    assert any("overlay: boundary: real_page_table[0, 0] " in line for line in served.said), served.err


@needs_sglang
def test_the_v4_backend_is_guarded_and_clean(tmp_path: Path) -> None:
    served = sglang("v4", "clean", tmp_path, "guard,overlay,capture")
    assert (served.status, len(served.said)) == (0, 1), served.err
    assert "overlay and capture at DeepseekV4AttnBackend (it makes its metadata inside the graph)" in served.said[0]


@needs_sglang
def test_nothing_of_it_is_attached_while_it_is_off(tmp_path: Path) -> None:
    served = sglang("decode", "clean", tmp_path, "off")
    assert (served.status, served.said) == (0, []), served.err


@needs_vllm
@pytest.mark.parametrize("form", ["decode", "flat", "varlen"])
def test_the_indexer_of_vllm_is_guarded_and_clean(tmp_path: Path, form: str) -> None:
    served = vllm(form, "clean", tmp_path)
    assert (served.status, served.out.splitlines()[-1], len(served.said)) == (0, "served", 1), served.err
    assert "is attached to vllm 0." in served.said[0]


@needs_vllm
def test_a_rebinding_in_the_indexer_of_vllm_is_named(tmp_path: Path) -> None:
    served = vllm("decode", "rebound", tmp_path)
    said = "guard: metadata['DeepseekV32IndexerMetadataBuilder'].decode.seq_lens is another tensor "
    assert [line for line in served.said if said in line], served.err
