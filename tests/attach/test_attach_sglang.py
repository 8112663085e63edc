"""Attached to a server with SGLang's names through its plugin loader: clean, a rebinding and a wrong value are named, a
failure of ours does not reach the server, and nothing is imported while it is off."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from servers import MINI, Served, serve

from dsa_verify.base.errors import STATUS_EQUAL
from dsa_verify.overlay.snapshot import judge
from dsa_verify.overlay.snapshot_file import read_snapshot
from dsa_verify.rounds.case_file import read_case

START = r"dsa-verify \S+ is attached to sglang \(version unknown\), rank 0"


def mini(what: str, tmp_path: Path, steps: int = 40, **environment: str) -> Served:
    return serve(MINI / "serve_sglang.py", [what, str(steps)], tmp_path, **environment)


def test_all_parts_are_attached_and_silent_where_nothing_is_wrong(tmp_path: Path) -> None:
    served = mini("clean", tmp_path, DSA_VERIFY="guard,overlay,capture")
    assert served.status == 0, served.err
    start, *rest = served.said
    parts = (
        ": overlay at DeepseekSparseAttnBackend.init_forward_metadata_out_graph; "
        "capture at DeepseekSparseAttnBackend.init_forward_metadata_out_graph; guard at FullCudaGraphBackend.replay; "
    )
    assert re.match(START + re.escape(parts), start), start
    assert "cannot attach DeepseekV4AttnBackend.init_forward_metadata_out_graph" in start
    assert "cannot be imported: ModuleNotFoundError" in start
    assert start.endswith("; findings go to found")
    assert len([line for line in served.said if "is attached to" in line]) == 1
    assert [line for line in rest if ": all equal: 40 checked of 40 replays, 0 mismatches" in line]
    assert not [line for line in rest if "detached" in line or "guard:" in line]
    case = next((tmp_path / "found" / "rank0").glob("captured-decode-*.json"))
    assert len(read_case(case).rounds) == 40
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"overlay-decode-rank0.jsonl", "rank0"}


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_rebinding_is_named(tmp_path: Path, strict: str) -> None:
    served = mini("rebound", tmp_path, DSA_VERIFY="guard", DSA_VERIFY_STRICT=strict)
    said = "guard: DeepseekSparseAttnBackend.cache_seqlens_int32 is another tensor (int32 [4]) than the captured one"
    lines = [line for line in served.said if said in line]
    assert len(lines) == 1, served.err
    assert lines[0].startswith(f"dsa-verify, rank 0: {said}, which the graph still uses")
    assert lines[0].endswith("(graph 4, replay 0)")
    assert "0x" not in lines[0]
    assert (served.status == 0) is (strict == "0")
    assert (", strict: " in served.said[0]) is (strict == "1")
    (line,) = (tmp_path / "found" / "guard-rank0.jsonl").read_text().splitlines()
    assert json.loads(line)["path"] == "DeepseekSparseAttnBackend.cache_seqlens_int32"
    if strict == "1":
        assert "dsa_verify.attach.part.Finding: guard: " in served.err


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_wrong_value_is_named(tmp_path: Path, strict: str) -> None:
    served = mini("wrong", tmp_path, DSA_VERIFY="overlay", DSA_VERIFY_STRICT=strict)
    found = [line for line in served.said if "overlay: boundary: real_page_table[0, 0] (batch row 0, request " in line]
    assert found, served.err
    assert "it is the right value +1 page" in found[0]
    assert "(replay 3, bucket 4); replay it: dsa-verify replay found/captured-decode-" in found[0]
    assert (served.status == 0) is (strict == "0")
    if strict == "0":
        assert "37 mismatches" in served.err
        lines = [json.loads(line) for line in (tmp_path / "found" / "overlay-decode-rank0.jsonl").open()]
        assert {line["field"] for line in lines if line["kind"] == "difference"} == {"real_page_table"}


@pytest.mark.parametrize("part", ["overlay", "capture"])
def test_a_failure_of_ours_is_said_once_and_does_not_reach_the_server(tmp_path: Path, part: str) -> None:
    served = mini("raises", tmp_path, DSA_VERIFY=part)
    assert (served.status, served.out.split()[:2]) == (0, ["served", "40"]), served.err
    if part == "capture":  # an overlay counts what it could not check and goes on
        assert len([line for line in served.said if "capture is detached, the server goes on without it" in line]) == 1
    else:
        assert len([line for line in served.said if "could not run" in line and "req_to_token" in line]) >= 1
    assert "Traceback" not in served.err
    strict = mini("raises", tmp_path, DSA_VERIFY=part, DSA_VERIFY_STRICT="1")
    assert strict.status != 0


def test_a_dump_is_written_when_a_file_asks_for_it(tmp_path: Path) -> None:
    served = mini("dump", tmp_path, steps=100, DSA_VERIFY="capture")
    assert served.status == 0, served.err
    (path,) = (tmp_path / "found").glob("snapshot-decode-rank0-*.json")
    assert f"this step of decode is in found/{path.name}; dsa-verify judge found/{path.name}" in served.err
    judged = judge(read_snapshot(path))
    assert judged.found == ()
    assert judged.summary.status == STATUS_EQUAL


def test_a_process_without_a_model_is_left_alone(tmp_path: Path) -> None:
    served = serve(MINI / "tokenize_sglang.py", [], tmp_path, DSA_VERIFY="guard,overlay,capture")
    assert (served.status, served.out.strip(), served.err) == (0, "dsa_verify.attach.start", "")


@pytest.mark.parametrize("value", ["gard", "guard,overlays", ","])
@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_part_that_there_is_not_is_said(tmp_path: Path, value: str, strict: str) -> None:
    served = serve(MINI / "tokenize_sglang.py", [], tmp_path, DSA_VERIFY=value, DSA_VERIFY_STRICT=strict)
    assert (served.status == 0) is (strict == "0")
    assert "dsa-verify: nothing is attached to sglang: UsageError: DSA_VERIFY: " in served.err
    assert "none of guard, overlay, capture; set it to one or more, by commas" in served.err
