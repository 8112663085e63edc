"""Attached to a server with vLLM's names through its plugin loader, with the graphs of either model runner."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import MINI, Served, serve

RUNNERS = ("wrapper", "manager")


def mini(runner: str, what: str, tmp_path: Path, **environment: str) -> Served:
    return serve(MINI / "serve_vllm.py", [runner, what], tmp_path, **{"DSA_VERIFY": "guard", **environment})


@pytest.mark.parametrize("runner", RUNNERS)
def test_it_is_silent_where_nothing_is_wrong(tmp_path: Path, runner: str) -> None:
    served = mini(runner, "clean", tmp_path, DSA_VERIFY="guard,overlay")
    assert (served.status, served.out.splitlines()[-1]) == (0, "served"), served.err
    (start,) = served.said
    assert "is attached to vllm (version unknown), rank 0: guard at CUDAGraphWrapper, CudaGraphManager; " in start
    assert "cannot attach overlay (vLLM has block tables, and no map from requests to tokens" in start
    assert "FlashMLASparseMetadataBuilder (vllm.v1.attention.backends.mla.flashmla_sparse cannot be imported" in start
    assert served.out.startswith("before a device []")


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_rebinding_is_named(tmp_path: Path, runner: str, strict: str) -> None:
    served = mini(runner, "rebound", tmp_path, DSA_VERIFY_STRICT=strict)
    path = {
        "wrapper": "CUDAGraphWrapper['layer.0'].decode.seq_lens",
        "manager": "metadata['DeepseekV32IndexerMetadataBuilder'].decode.seq_lens",
    }[runner]
    said = [line for line in served.said if "rank 0: guard: " in line]
    assert said, served.err
    assert f"guard: {path} is another tensor (int32 [4]) than the captured one" in said[0]
    assert "(graph '4 requests', replay " in said[0]
    assert len(said) == len(set(said)) == (2 if strict == "0" else 1)  # once for each graph
    assert (served.status == 0) is (strict == "0")


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_failure_of_ours_is_said_once_and_does_not_reach_the_server(tmp_path: Path, runner: str) -> None:
    served = mini(runner, "raises", tmp_path)
    assert (served.status, served.out.splitlines()[-1]) == (0, "served"), served.err
    assert len([line for line in served.said if "guard is detached, the server goes on without it: " in line]) == 1
    assert len(served.said) == 2
    assert "Traceback" not in served.err
    assert mini(runner, "raises", tmp_path, DSA_VERIFY_STRICT="1").status != 0
