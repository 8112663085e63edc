"""A snapshot: one step of a server, posted as a file, is judged without a replay; and what is wrong with a file is said
with its place, value and remedy."""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import EagerDecode, backend, small

from dsa_verify.base.errors import STATUS_EQUAL, STATUS_MISMATCH, STATUS_USAGE, UsageError
from dsa_verify.cli.main import main
from dsa_verify.contract.geometry import Geometry
from dsa_verify.overlay.ring import CaptureRing
from dsa_verify.overlay.snapshot import judge
from dsa_verify.overlay.snapshot_file import MAX_ELEMENTS, read_snapshot, write_snapshot
from dsa_verify.subjects.pipelines.basic import TargetVerify
from dsa_verify.subjects.pipelines.padded import Padded
from dsa_verify.systems.catalogue import SYSTEMS

pytestmark = pytest.mark.usefixtures("one_thread")
BUCKET, RAW = 4, 3
Edit = Callable[[dict[str, Any]], None]


def step_of(serving: ModuleType, system: str = "decode", geometry: Geometry | None = None, factory: Any = None) -> Any:
    """A serving loop after a few steps, the last one of RAW requests."""
    geometry = geometry or small(request_rows=30)
    loop = serving.ServingLoop(
        factory or EagerDecode, system=system, geometry=geometry, bucket=BUCKET, backend=backend(), graph=False
    )
    for raw in (2, BUCKET, RAW):
        loop.step(raw)
    return loop


def written(loop: Any, path: Path, **outputs: torch.Tensor) -> Path:
    write_snapshot(
        path,
        system=loop.system,
        geometry=loop.geometry,
        bucket=BUCKET,
        raw_batch=RAW,
        inputs=loop.inputs.tensors(),
        outputs={**loop.outputs, **outputs},
    )
    return path


@pytest.fixture
def loop(serving: ModuleType) -> Any:
    return step_of(serving)


@pytest.fixture
def path(loop: Any, tmp_path: Path) -> Path:
    return written(loop, tmp_path / "step.json")


def edited(path: Path, edit: Edit) -> Path:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    return path


def status(*arguments: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dsa-verify", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    assert isinstance(end.value.code, int)
    return end.value.code


# What is said ---------------------------------------------------------------------------------------------------------


def test_a_right_step_is_equal(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(read_snapshot(path)).found == ()
    assert status("judge", path) == STATUS_EQUAL
    out = capsys.readouterr().out
    assert "fields of decode judged (bucket 4, raw batch 3), all equal; exit status 0" in out


def test_a_wrong_page_is_named_with_its_request(loop: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = loop.outputs["real_page_table"].clone()
    table[1, 0] += 1
    path, out = written(loop, tmp_path / "step.json", real_page_table=table), tmp_path / "out.json"
    assert status("judge", path, "--json", out) == STATUS_MISMATCH
    printed = capsys.readouterr().out
    row, length = loop.live[1]
    assert "FOUND in decode (snapshot, bucket 4, raw batch 3)" in printed
    assert f"boundary: real_page_table[1, 0] (batch row 1, request {row}, length {length}" in printed
    assert "it is the right value +1 page" in printed
    assert "rule: docs/contract/1-basic.md#1.1" in printed
    found = json.loads(out.read_text())
    assert (found["status"], [each["field"] for each in found["found"]]) == (STATUS_MISMATCH, ["real_page_table"])
    assert found["found"][0]["elements"] == [[1, 0, int(table[1, 0]), int(table[1, 0]) - 1]]


def test_a_dead_element_may_hold_anything(loop: Any, tmp_path: Path) -> None:
    table = loop.outputs["real_page_table"].clone()
    table[:, -1] = 12345  # every request of the loop is shorter than that
    assert max(length for _, length in loop.live) <= (table.shape[1] - 1) * loop.geometry.page_size
    assert judge(read_snapshot(written(loop, tmp_path / "step.json", real_page_table=table))).found == ()


def test_a_pad_row_that_was_not_reset_is_found(loop: Any, tmp_path: Path) -> None:
    loop.inputs.seq_lens[RAW] = 9
    loop.replay()
    found = judge(read_snapshot(written(loop, tmp_path / "step.json"))).found
    assert [(each.kind, each.field, each.diagnosis) for each in found] == [("input", "seq_lens", "pad tail not reset")]
    assert "input seq_lens[3] is 9, it must be 1: with raw batch 3, batch rows 3 to 3 are pad rows" in found[0].sentence


@pytest.mark.parametrize(
    "system, factory, preset, sizes, field",
    [
        ("target_verify", TargetVerify, "tiny", {"draft_tokens": 3}, "dsa_seqlens_expanded"),
        ("padded", Padded, "tiny_v4", {"padded_mode": "verify", "draft_tokens": 3}, "swa_page_indices"),
    ],
)
def test_other_systems_are_judged_too(
    serving: ModuleType, tmp_path: Path, system: str, factory: Any, preset: str, sizes: Any, field: str
) -> None:
    geometry = SYSTEMS[system].geometry(preset, {"request_rows": 30, **sizes})
    loop = step_of(serving, system, geometry, factory)
    assert judge(read_snapshot(written(loop, tmp_path / "right.json"))).found == ()
    wrong = loop.outputs[field].clone()
    wrong[(0,) * wrong.dim()] += 1
    found = judge(read_snapshot(written(loop, tmp_path / "wrong.json", **{field: wrong}))).found
    assert [each.field for each in found] == [field]


def test_a_few_fields_will_do(path: Path) -> None:
    edited(path, lambda data: data["outputs"].pop("page_table_1"))
    judged = judge(read_snapshot(path))
    assert (judged.summary.not_compared, judged.found) == (("page_table_1",), ())


def test_a_case_of_the_ring_is_replayed(loop: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = CaptureRing("decode", loop.geometry, widest=BUCKET, device=loop.device)
    loop.step(RAW, lambda raw: ring.record(raw_batch=raw, bucket=BUCKET, inputs=loop.inputs))
    assert status("judge", ring.dump(tmp_path).path) == STATUS_EQUAL
    assert "1 replay checked" in capsys.readouterr().out


# The file -------------------------------------------------------------------------------------------------------------


def test_what_is_written_is_what_is_read(loop: Any, path: Path) -> None:
    found = read_snapshot(path)
    assert (found.system.name, found.geometry, found.bucket, found.raw_batch) == ("decode", loop.geometry, BUCKET, RAW)
    assert {name: tensor.tolist() for name, tensor in found.outputs.items()} == {
        name: tensor.tolist() for name, tensor in loop.outputs.items()
    }
    for row, length in loop.live:
        assert found.inputs["req_to_token"][row, :length].tolist() == loop.request_map[row, :length].tolist()


def test_it_holds_no_other_request(loop: Any, path: Path) -> None:
    data = json.loads(path.read_text())
    assert data["request_rows"] == sorted({0, *(row for row, _ in loop.live)})
    assert data["inputs"]["req_to_token"]["shape"][0] == len(data["request_rows"])


def test_lists_will_do(path: Path) -> None:
    found = read_snapshot(path)

    def edit(data: dict[str, Any]) -> None:
        data["inputs"]["seq_lens"] = found.inputs["seq_lens"].tolist()
        data["outputs"]["real_page_table"] = found.outputs["real_page_table"].tolist()
        lens = found.outputs["cache_seqlens_int32"]
        data["outputs"]["cache_seqlens_int32"] = {"dtype": "int32", "shape": [4], "data": lens.tolist()}

    again = read_snapshot(edited(path, edit))
    for name in found.outputs:
        assert torch.equal(again.outputs[name], found.outputs[name])
        assert again.outputs[name].dtype is found.outputs[name].dtype
    assert judge(again).found == ()


def _set(*keys: str, to: object) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = to

    return edit


def _drop(*keys: str) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        for key in keys[:-1]:
            data = data[key]
        del data[keys[-1]]

    return edit


LENS = ("outputs", "cache_seqlens_int32")
ONES = base64.b64encode(b"\1\0\0\0" * 4).decode()


@pytest.mark.parametrize(
    "edit, told",
    [
        (_set("snapshot", to=2), r"snapshot: 2 is not 1, the one this version reads"),
        (_set("sistem", to=2), r"'sistem': is an unknown key; known keys: snapshot, system"),
        (_set("system", to="prefill"), r"system: 'prefill' is unknown; use one of decode, "),
        (_set("system", to="os:system"), r"system: 'os:system' is neither a shipped system nor an installed one"),
        (_set("preset", to="glm"), r"preset: 'glm' is unknown; use one of "),
        (_set("geometry", to={"topk": 0}), r"geometry.topk: 0 is outside 1..2048"),
        (_set("bucket", to=True), r"bucket: is a bool; write an integer"),
        (_set("bucket", to=0), r"bucket: 0 is outside 1..16384"),
        (_set("raw_batch", to=5), r"raw_batch: 5 is outside 0..4"),
        (_drop("raw_batch"), r"raw_batch: is missing; add an integer"),
        (_drop("inputs"), r"inputs: is missing; add an object"),
        (_drop("inputs", "seq_lens"), r"inputs.seq_lens: is missing; add it"),
        (_set("inputs", "lens", to=[1]), r"inputs.lens: is unknown; inputs: seq_lens, req_pool_indices, req_to_token"),
        (_set("inputs", "seq_lens", to=[1]), r"inputs.seq_lens: has shape \[1\], it must be \[4\]; mend it, or bucket"),
        (_set("inputs", "seq_lens", to=3), r"inputs.seq_lens: is an integer; write a nested list, or an object"),
        (_set("inputs", "seq_lens", to=[1, 2, 3, "4"]), r"inputs.seq_lens: '4' is not a number of int64; write one"),
        (
            _set("inputs", "seq_lens", to=[1, 2, 3, 1 << 70]),
            r"inputs.seq_lens: 1180591620717411303424 does not fit int",
        ),
        (_set("inputs", "req_to_token", to=[[1, 2], [3]]), r"inputs.req_to_token: its rows have 2 entries and other"),
        (_set("inputs", "req_to_token", to=[1, 2]), r"inputs.req_to_token: has shape \[2\]; it must have rows"),
        (_set("inputs", "req_to_token", to=[[1]] * 4), r"inputs.req_to_token: has 1 columns, and the longest request"),
        (_set("request_rows", to=[1]), r"request_rows: 1 rows, and inputs.req_to_token has 4; give one for each"),
        (_set("request_rows", to=[1, 1]), r"request_rows: \[1, 1\] is no list of different request rows"),
        (_set("request_rows", to=[0, 1, 2, 1 << 40]), rf"request_rows: row 1099511627776 .* more than {MAX_ELEMENTS}"),
        (_set("outputs", to={}), r"outputs: is empty; give one or more of cache_seqlens_int32, "),
        (_set("outputs", "page_tables", to=[]), r"outputs.page_tables: is unknown; fields of decode: cache_seqlens"),
        (_set(*LENS, to=[[1, 2, 3, 4]]), r"cache_seqlens_int32: has shape \[1, 4\], it must be \[4\]; mend it, or"),
        (_set(*LENS, "dtype", to="int64"), r"base64: holds 16 bytes, int64 \[4\] has 32; mend one"),
        (
            _set(*LENS, to={"dtype": "float32", "shape": [4], "base64": ONES}),
            r"outputs.cache_seqlens_int32: is float32, it must be int32; dump it as the engine holds it",
        ),
        (_set(*LENS, "dtype", to="fp8"), r"cache_seqlens_int32.dtype: 'fp8' is unknown; use one of int32, int64"),
        (_set(*LENS, "shape", to=[1 << 40]), r"shape: \[1099511627776\] is no list of sizes whose product is"),
        (_set(*LENS, "base64", to="!"), r"cache_seqlens_int32.base64: is not base64"),
        (_drop(*LENS, "base64"), r"cache_seqlens_int32: has both base64 and data, or neither; give one of them"),
        (
            _set(*LENS, to={"dtype": "int32", "shape": [3], "data": [1, 2, 3, 4]}),
            r"its data have shape \[4\], and shape says \[3\]; mend one",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(path: Path, edit: Edit, told: str) -> None:
    with pytest.raises(UsageError, match=rf"step\.json: .*{told}"):
        read_snapshot(edited(path, edit))


def test_a_system_whose_step_says_nothing_is_refused(path: Path) -> None:
    with pytest.raises(UsageError, match=r"step\.json: system 'dcp': .*; use dsa-verify replay"):
        read_snapshot(edited(path, lambda data: data.update(system="dcp", preset="tiny", geometry={})))


@pytest.mark.parametrize("text, told", [("", "not JSON"), ("[]", "is a list, not an object"), ("[" * 9999, "not JSON")])
def test_what_is_no_snapshot_ends_with_the_status_of_a_wrong_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    path = tmp_path / "step.json"
    path.write_text(text)
    assert status("judge", path) == STATUS_USAGE
    assert told in capsys.readouterr().err


def test_a_file_that_is_too_large_is_not_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    assert status("judge", path) == STATUS_USAGE
    assert "67108865 bytes exceed 67108864" in capsys.readouterr().err


def test_without_safetensors_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.safetensors"
    path.write_bytes(b"no matter")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UsageError, match=r"not installed; pip install safetensors, or write the snapshot as JSON"):
        read_snapshot(path)


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="needs safetensors")
def test_safetensors_hold_the_same(path: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    found, data = read_snapshot(path), json.loads(path.read_text())
    said = {key: value for key, value in data.items() if key not in ("inputs", "outputs", "request_rows")}
    tensors = {f"inputs.{name}": tensor for name, tensor in found.inputs.items()}
    tensors |= {f"outputs.{name}": tensor.clone() for name, tensor in found.outputs.items()}
    other = tmp_path / "step.safetensors"
    save_file(tensors, str(other), metadata={"snapshot": json.dumps(said)})
    assert judge(read_snapshot(other)).found == ()
    save_file(tensors, str(other))
    with pytest.raises(UsageError, match="metadata 'snapshot': missing"):
        read_snapshot(other)
    save_file({**tensors, "lens": tensors["inputs.seq_lens"].clone()}, str(other), {"snapshot": json.dumps(said)})
    with pytest.raises(UsageError, match=r"tensor 'lens': is neither inputs\.NAME nor outputs\.NAME"):
        read_snapshot(other)
    other.write_bytes(b"12345678" * 4)
    with pytest.raises(UsageError, match="not safetensors"):
        read_snapshot(other)
