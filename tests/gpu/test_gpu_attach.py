"""Attached to servers in miniature whose graphs are CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import MINI, serve

pytestmark = pytest.mark.gpu


def test_sglangs_names_all_parts_clean(tmp_path: Path) -> None:
    served = serve(MINI / "serve_sglang.py", ["clean", "200"], tmp_path, DSA_VERIFY="guard,overlay,capture")
    assert served.status == 0, served.err
    assert [line for line in served.said if ": all equal: 200 checked of 200 replays" in line], served.err
    assert not [line for line in served.said if "guard:" in line or "detached" in line]


@pytest.mark.parametrize(
    "what, told", [("rebound", "guard: Deep"), ("wrong", "overlay: boundary: real_page_table[0, 0]")]
)
def test_sglangs_names_something_wrong(tmp_path: Path, what: str, told: str) -> None:
    served = serve(MINI / "serve_sglang.py", [what], tmp_path, DSA_VERIFY="guard,overlay")
    assert served.status == 0, served.err
    assert [line for line in served.said if told in line], served.err


@pytest.mark.parametrize("runner", ["wrapper", "manager"])
@pytest.mark.parametrize("what", ["clean", "rebound"])
def test_vllms_names(tmp_path: Path, runner: str, what: str) -> None:
    served = serve(MINI / "serve_vllm.py", [runner, what], tmp_path, DSA_VERIFY="guard")
    assert served.status == 0, served.err
    assert bool([line for line in served.said if "rank 0: guard: " in line]) is (what == "rebound"), served.err
