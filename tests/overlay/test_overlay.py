"""The overlay: it finds what is wrong in a live serving loop, says so in words, changes nothing, and never looks like a
pass where it did not look."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support import DEVICE, EagerDecode, backend, small

from dsa_verify.base.errors import STATUS_MISMATCH, STATUS_NOTHING_VERIFIED, NothingVerified, UsageError
from dsa_verify.buffers.arena import Arena
from dsa_verify.buffers.tail_reset import PaddedInputFiller
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.owners import Owner
from dsa_verify.contract.subject import Inputs
from dsa_verify.overlay import Overlay
from dsa_verify.overlay import summary as overlay_summary
from dsa_verify.overlay.copies import GroupedCopy, copy_plainly
from dsa_verify.overlay.piece import Piece
from dsa_verify.overlay.report import _owners
from dsa_verify.overlay.summary import Summary
from dsa_verify.subjects import faults
from dsa_verify.systems.catalogue import SYSTEMS

ROOT = Path(__file__).parents[2]
BUCKET = 6


pytestmark = pytest.mark.usefixtures("one_thread")


def verify_geometry(**changes: Any) -> Geometry:
    return SYSTEMS["padded"].geometry(
        "tiny_v4", {"padded_mode": "verify", "draft_tokens": 4, "request_rows": 40, **changes}
    )


class Hooked:
    """A serving loop with an overlay at its hook; `after` is done with each replay's metadata, once it was checked."""

    def __init__(
        self,
        serving: ModuleType,
        folder: Path,
        *,
        bucket: int = BUCKET,
        fault: str | None = None,
        overlay: Any = None,
        geometry: Geometry | None = None,
        reference: Callable[[Any], Callable[[int, int], None]] | None = None,
        **attach: Any,
    ):
        self.geometry, self.bucket, self.folder = geometry or verify_geometry(), bucket, folder
        factory = serving.CorePreparation
        self.loop = serving.ServingLoop(
            factory if fault is None else faults.plant(fault, factory),
            system="padded",
            geometry=self.geometry,
            bucket=bucket,
            backend=backend(),
            graph=False,
        )
        attach = {"fields": serving.FIELDS, "keep_rounds": 0, **attach}
        if reference is not None:
            attach["reference"] = reference(self.loop)
        self.overlay = overlay or Overlay.attach(system="padded", geometry=self.geometry, directory=folder, **attach)
        self.also: list[torch.Tensor] = []

    def hook(self, raw: int) -> None:
        if self.overlay.enabled:
            self.overlay.check(
                raw_batch=raw,
                bucket=self.bucket,
                inputs=self.loop.inputs,
                outputs=self.loop.outputs,
                also=self.also,
            )

    def run(self, *raws: int) -> Hooked:
        for raw in raws:
            self.loop.step(raw, self.hook)
        return self

    def lines(self, kind: str) -> list[dict[str, Any]]:
        text = (self.folder / "overlay-padded-rank0.jsonl").read_text()
        return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


# What it finds -------------------------------------------------------------------------------------------------------


def run_checks(serving: ModuleType, folder: Path, checks: int) -> Summary:
    hooked = Hooked(serving, folder, bucket=14, first=checks, keep_rounds=4)
    hooked.run(*(2 + i % 12 for i in range(checks + 12)))
    assert not hooked.overlay.enabled, "after `first` checks the hook costs one attribute test again"
    return hooked.overlay.close()


@pytest.mark.parametrize("checks", [120, pytest.param(640, marks=pytest.mark.slow)])
def test_a_sound_server_at_every_padded_batch(serving: ModuleType, tmp_path: Path, checks: int) -> None:
    summary = run_checks(serving, tmp_path, checks)
    assert (summary.checked, summary.mismatches, summary.replays) == (checks, 0, checks)
    assert set(summary.batches) == {(raw, 14) for raw in range(2, 14)}
    assert sum(summary.batches.values()) == checks
    assert summary.clean
    assert f"all equal: {checks} checked of {checks} replays, 0 mismatches" in summary.text()


@pytest.mark.parametrize(
    "fault, field, replay, words",
    [
        ("not_refreshed:page_table", "page_table", 1, r"stale: page_table\[\d+, \d+\] \(batch row \d, request \d+, .*"),
        (
            "off_by_one_page:page_table",
            "page_table",
            0,
            r"boundary: page_table.* page 0\) is \d+, must be \d+: it is .*",
        ),
        ("rows_rolled:seq_lens_casual", "seq_lens_casual", 0, r".*seq_lens_casual\[\d+\].*draft position \d\).*"),
        (
            "stale_request_map",
            "page_table",
            0,
            r"wrong value: page_table\[0, 0\] \(batch row 0, request .* value at capture, .*",
        ),
        ("wrong_draft_offset:seq_lens_casual", "seq_lens_casual", 0, r"draft offset: seq_lens_casual\[0\].*"),
    ],
)
def test_a_planted_fault_is_named(
    serving: ModuleType, tmp_path: Path, fault: str, field: str, replay: int, words: str
) -> None:
    hooked = Hooked(serving, tmp_path, fault=fault).run(2, 5, 6, 3)
    summary = hooked.overlay.close()
    line = hooked.lines("difference")[0]
    assert summary.mismatches == 4 - replay
    assert summary.status == STATUS_MISMATCH
    assert summary.verdict == f"{4 - replay} mismatches"
    assert (line["field"], line["replay"], line["bucket"]) == (field, replay, BUCKET)
    assert line["raw_batch"] == (2, 5)[replay]
    assert line["differing"] >= len(line["elements"]) > 0
    assert torch.tensor(line["elements"]).shape[1] == 4
    assert re.fullmatch(words, line["sentence"]), line["sentence"]
    assert line["contract"] == ["docs/contract/7-padded.md#7.1"]


def test_a_page_of_another_request_is_named_by_it(serving: ModuleType, tmp_path: Path) -> None:
    """The request map of this very check says whose page it is, in the server's own numbers."""
    hooked = Hooked(serving, tmp_path)

    def other_page(raw: int) -> None:
        row, length = hooked.loop.live[0]
        other, size = max(hooked.loop.live[1:], key=lambda each: each[1]), hooked.geometry.page_size
        assert other[1] > size
        page = int(hooked.loop.request_map[other[0], size]) // size  # its second page in the place of a first one
        hooked.loop.outputs["page_table"][2, 0] = page
        hooked.hook(raw)
        said.append(f"page_table[2, 0] (batch row 0, request {row}, length {length}, draft position 2, page 0)")
        said.append(f"is {page}, must be")
        said.append(f"that is token {size} of request {other[0]}")

    said: list[str] = []
    hooked.loop.step(4, other_page)
    hooked.overlay.close()
    (line,) = hooked.lines("difference")
    assert all(words in line["sentence"] for words in said)
    assert line["diagnosis"] == "request map"


def test_a_page_of_several_requests_is_named_by_all_of_them() -> None:
    """A server's prefix cache gives one page to several, and none of them is wrong to have it."""
    pages = torch.tensor([[7, 8, 9], [7, 5, 8], [7, 8, 4]])
    check = SimpleNamespace(setup=SimpleNamespace(geometry=SimpleNamespace(allocator_page=4)))
    now = SimpleNamespace(raw=3, seq_lens=(9, 12, 6), requests=(3, 1, 3))
    owner_of = _owners(check, {"pages": pages}, now)  # type: ignore[arg-type]
    assert owner_of(7 * 4 + 3) == Owner((3, 1), 3)
    assert owner_of(8 * 4 + 1) == Owner((3,), 5), "request 1 has it elsewhere"
    assert owner_of(5 * 4) == Owner((1,), 4)
    assert owner_of(4 * 4) is None, "beyond the length"


@pytest.mark.parametrize("name, pad", [("seq_lens", 1), ("req_pool_indices", 0), ("out_cache_loc", 0)])
def test_a_pad_tail_that_is_not_reset_is_seen(serving: ModuleType, tmp_path: Path, name: str, pad: int) -> None:
    """Both sides are made from the same tail, so that no comparison of outputs can see it (contract 0.2)."""
    hooked = Hooked(serving, tmp_path)
    specs = SYSTEMS["padded"].inputs(hooked.geometry)
    hooked.loop.filler = PaddedInputFiller(specs, hooked.loop.inputs.tensors(), skip_tail_reset=(name,))
    summary = hooked.run(6, 2).overlay.close()
    (line,) = hooked.lines("input")
    assert (line["field"], line["replay"], line["diagnosis"]) == (name, 1, "pad tail not reset")
    first = 2 * hooked.loop.outputs["page_table"].shape[0] // BUCKET if name == "out_cache_loc" else 2
    assert line["elements"][0][0] == first
    assert line["elements"][0][3] == pad
    assert "with raw batch 2, batch rows 2 to 5 are pad rows" in line["sentence"]
    assert (summary.mismatches, set(summary.differing_words)) == (1, {name})
    lenient = Hooked(serving, tmp_path / "lenient", check_pad_rows=False)
    lenient.loop.filler = PaddedInputFiller(specs, lenient.loop.inputs.tensors(), skip_tail_reset=(name,))
    assert lenient.run(6, 2).overlay.close().clean


def test_a_slot_that_no_pool_has_is_said_and_does_not_end_the_check(serving: ModuleType, tmp_path: Path) -> None:
    hooked = Hooked(serving, tmp_path)

    def spoil(raw: int) -> None:
        row, length = hooked.loop.live[1]
        hooked.loop.inputs.req_to_token[row, length - 1] = 1 << 30  # live
        hooked.loop.inputs.req_to_token[row, -1] = -7  # dead
        hooked.hook(raw)
        hooked.loop.inputs.req_to_token[row].copy_(hooked.loop.request_map[row])

    hooked.loop.step(4, spoil)
    hooked.run(5)
    summary = hooked.overlay.close()
    (line,) = hooked.lines("input")
    assert (line["field"], line["replay"], line["diagnosis"]) == ("req_to_token", 0, "out of range")
    assert "1 live slot(s) of the request map are outside the pool of" in line["sentence"]
    assert (summary.checked, summary.mismatches, summary.could_not_run) == (2, 1, {})


def test_an_output_that_was_replaced_is_said_and_still_checked(serving: ModuleType, tmp_path: Path) -> None:
    hooked = Hooked(serving, tmp_path).run(4)
    hooked.loop.outputs["page_table"] = torch.zeros_like(hooked.loop.outputs["page_table"])
    summary = hooked.run(3).overlay.close()
    (line,) = hooked.lines("buffer replaced")
    assert (line["field"], line["replay"]) == ("page_table", 1)
    assert "buffer replaced: page_table of bucket 6: pointer" in line["sentence"]
    assert summary.address_changes == {"page_table": 1}
    assert summary.differing_words["page_table"] > 0
    assert not summary.clean


def test_inputs_may_move(serving: ModuleType, tmp_path: Path) -> None:
    hooked = Hooked(serving, tmp_path).run(4)
    moved = {name: tensor.clone() for name, tensor in hooked.loop.inputs.tensors().items() if name != "full_to_swa"}
    moved["full_to_swa"] = hooked.loop.inputs.full_to_swa

    def hook(raw: int) -> None:
        for name, tensor in moved.items():
            tensor.copy_(getattr(hooked.loop.inputs, name))
        hooked.overlay.check(raw_batch=raw, bucket=BUCKET, inputs=moved, outputs=hooked.loop.outputs)

    hooked.loop.step(3, hook)
    summary = hooked.overlay.close()
    assert (summary.checked, summary.clean) == (2, True)


class Metadata:
    """How an engine may keep it: some here, some there."""

    def __init__(self, outputs: dict[str, torch.Tensor]):
        self.core = {"pages": outputs["page_table"]}
        self.seq_lens_casual = outputs["seq_lens_casual"]


def test_tensors_are_found_where_names_say(serving: ModuleType, tmp_path: Path) -> None:
    names = {"page_table": "core.pages"}
    hooked = Hooked(serving, tmp_path, fields=("page_table", "seq_lens_casual"), output_names=names)
    hooked.loop.outputs = Metadata(hooked.loop.outputs)
    assert hooked.run(4, 5).overlay.close().clean
    wrong = Hooked(serving, tmp_path / "wrong", fields=("page_table", "raw_out_loc"), output_names=names)
    wrong.loop.outputs = Metadata(wrong.loop.outputs)
    with pytest.raises(NothingVerified, match=r"raw_out_loc \(raw_out_loc\) is missing; say where they are with names"):
        wrong.run(4).overlay.close()


# It changes nothing ---------------------------------------------------------------------------------------------------


def digests(serving: ModuleType, folder: Path, **options: Any) -> list[str]:
    """Of all inputs and metadata after each hook, and of a tensor beside them that a reference writes."""
    hooked = Hooked(serving, folder, fault="wrong_draft_offset:seq_lens_casual", **options)
    beside = torch.arange(8, device=DEVICE)
    hooked.loop.beside = beside
    if hooked.overlay.enabled:
        hooked.also = [beside]
    found = []
    for raw in (4, 6, 2, 0, 5):
        hooked.run(raw)
        found.append(hooked.loop.digest() + str(beside.tolist()))
    if hooked.overlay.enabled:
        assert hooked.overlay.close().mismatches == options.get("mismatches", 5)
    return found


def own_preparation(loop: Any) -> Callable[[int, int], None]:
    """Right where the server's is not; writes a tensor beside the metadata, too."""
    subject = loop.subject.inner

    def prepare(raw: int, bucket: int) -> None:
        subject.in_graph()
        loop.beside.add_(1)

    return prepare


def same_preparation(loop: Any) -> Callable[[int, int], None]:
    return lambda raw, bucket: loop.subject.in_graph()


def raising_preparation(loop: Any) -> Callable[[int, int], None]:
    def prepare(raw: int, bucket: int) -> None:
        for tensor in (*loop.outputs.values(), loop.beside):
            tensor.fill_(-77)
        raise ValueError("no pages left")

    return prepare


def test_metadata_is_bit_for_bit_what_it_is_without_it(serving: ModuleType, tmp_path: Path) -> None:
    without = digests(serving, tmp_path / "a", overlay=Overlay.disabled)
    assert len(set(without)) == 5
    assert digests(serving, tmp_path / "b") == without
    assert digests(serving, tmp_path / "c", reference=own_preparation, fields=None) == without


def test_what_was_live_is_put_back_when_the_reference_raises(serving: ModuleType, tmp_path: Path) -> None:
    without = digests(serving, tmp_path / "a", overlay=Overlay.disabled)
    hooked = Hooked(
        serving,
        tmp_path / "b",
        fault="wrong_draft_offset:seq_lens_casual",
        reference=raising_preparation,
        fields=None,
    )
    hooked.loop.beside = torch.arange(8, device=DEVICE)
    hooked.also = [hooked.loop.beside]
    found = []
    for raw in (4, 6, 2, 0, 5):
        hooked.run(raw)
        found.append(hooked.loop.digest() + str(hooked.loop.beside.tolist()))
    assert found == without
    reason = "the reference raised ValueError: no pages left"
    with pytest.raises(NothingVerified, match=f"COULD NOT RUN 5 times: {reason}"):
        hooked.overlay.close()
    assert [line["reason"] for line in hooked.lines("could not run")] == [reason]


def test_the_servers_own_preparation_is_a_reference(serving: ModuleType, tmp_path: Path) -> None:
    """Only of the fields that it writes, whatever else the layout has."""
    hooked = Hooked(serving, tmp_path / "a", fault="off_by_one_page:page_table", reference=own_preparation, fields=None)
    hooked.loop.beside = torch.zeros(1, device=DEVICE)
    summary = hooked.run(4, 5, 0).overlay.close()
    assert (summary.checked, summary.reference) == (3, "own preparation")
    assert set(summary.differing_words) == {"page_table"}
    line = hooked.lines("difference")[0]
    assert line["diagnosis"] == "boundary"
    assert line["differing"] == hooked.loop.outputs["page_table"].numel()
    sound = Hooked(
        serving, tmp_path / "b", reference=lambda loop: lambda raw, bucket: loop.subject.in_graph(), fields=None
    )
    assert sound.run(4, 5, 0).overlay.close().clean


def test_it_works_inside_and_outside_inference_mode(serving: ModuleType, tmp_path: Path) -> None:
    for number, reference in enumerate((None, lambda loop: lambda raw, bucket: loop.subject.in_graph())):
        with torch.inference_mode():
            hooked = Hooked(
                serving, tmp_path / str(number), reference=reference, fields=None if reference else serving.FIELDS
            )
            hooked.run(4, 5)
        hooked.loop.step = hooked.loop.step
        with torch.inference_mode():
            hooked.run(3)
        hooked.overlay.poll()
        assert hooked.overlay.close().clean


# It says what it did not do -------------------------------------------------------------------------------------------


def test_no_check_at_all_ends_loudly(serving: ModuleType, tmp_path: Path) -> None:
    overlay = Overlay.attach(system="padded", geometry=verify_geometry(), directory=tmp_path)
    with pytest.raises(NothingVerified, match="NOTHING WAS CHECKED: 0 checked of 0 replays"):
        overlay.close()
    (line,) = [json.loads(x) for x in (tmp_path / "overlay-padded-rank0.jsonl").read_text().splitlines()][1:]
    assert (line["kind"], line["verdict"], line["clean"]) == ("summary", "NOTHING WAS CHECKED", False)
    assert line["status"] == STATUS_NOTHING_VERIFIED
    with (
        pytest.raises(RuntimeError, match="the server's own"),
        Overlay.attach(system="padded", geometry=verify_geometry(), directory=tmp_path),
    ):
        raise RuntimeError("the server's own error is not replaced")


def test_what_could_not_run_is_counted_and_is_no_pass(serving: ModuleType, tmp_path: Path) -> None:
    hooked = Hooked(serving, tmp_path, prepare_on_demand=False)
    loop, overlay = hooked.loop, hooked.overlay
    hooked.run(3)
    overlay.prepare(BUCKET, loop.inputs, loop.outputs)
    hooked.run(4)
    overlay.check(raw_batch=9, bucket=BUCKET, inputs=loop.inputs, outputs=loop.outputs)
    overlay.check(raw_batch=2, bucket=BUCKET, inputs=loop.inputs, outputs={})
    overlay.check(raw_batch=2, bucket=BUCKET, inputs=None, outputs=loop.outputs)
    summary = overlay.close()
    assert summary.checked == 1
    assert summary.mismatches == 0
    assert not summary.clean
    assert summary.verdict == "INCOMPLETE"
    reasons = list(summary.could_not_run)
    assert reasons[:2] == ["bucket 6 was not prepared", "raw_batch: 9 is outside 0..6, the bucket"]
    assert reasons[2].startswith("outputs of padded, bucket 6: page_table (page_table) is missing;")
    assert reasons[3].startswith("inputs of padded, bucket 6: seq_lens (seq_lens) is missing;")
    assert "COULD NOT RUN 1 times: bucket 6 was not prepared" in summary.text()
    overlay.check(raw_batch=2, bucket=BUCKET, inputs=loop.inputs, outputs=loop.outputs)
    assert overlay.close() is summary, "closed is closed"


def test_reasons_and_lines_are_bounded(serving: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay_summary, "MAX_LINES", 3)
    hooked = Hooked(serving, tmp_path, fault="stale_request_map")
    for raw in range(100, 140):
        hooked.overlay.check(raw_batch=raw, bucket=BUCKET, inputs=hooked.loop.inputs, outputs=hooked.loop.outputs)
    summary = hooked.run(4, 5).overlay.close()
    assert len(summary.could_not_run) == overlay_summary.MAX_REASONS + 1
    assert sum(summary.could_not_run.values()) == 40
    lines = (tmp_path / "overlay-padded-rank0.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert json.loads(lines[-1])["lines_left_out"] == summary.lines_left_out > 30


def test_one_in_m(serving: ModuleType, tmp_path: Path) -> None:
    hooked = Hooked(serving, tmp_path, every=3, first=2, fault="wrong_draft_offset:seq_lens_casual")
    hooked.run(*[4] * 9)
    summary = hooked.overlay.close()
    assert (summary.replays, summary.checked) == (4, 2)
    assert sorted({line["replay"] for line in hooked.lines("difference")}) == [0, 3]


def test_poll_reports_while_the_server_runs(serving: ModuleType, tmp_path: Path) -> None:
    """The first poll asks, the second has the counters, the third what the difference left behind."""
    hooked = Hooked(serving, tmp_path, fault="off_by_one_page:page_table").run(3)
    poll_thrice(hooked.overlay)
    assert [line["replay"] for line in hooked.lines("difference")] == [0]
    hooked.run(4, 5)
    poll_thrice(hooked.overlay)
    explained = [line for line in hooked.lines("difference") if line["diagnosis"]]
    assert [line["replay"] for line in explained] == [0, 1], "the evidence of the next one is kept, too"
    assert hooked.overlay.close().mismatches == 3


def poll_thrice(overlay: Overlay) -> None:
    for _ in range(3):
        overlay.poll()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"system": "dcp"}, "system 'dcp': its outputs hold what earlier replays wrote"),
        ({"system": "paded"}, "system 'paded' is unknown"),
        ({"fields": ("page_tabel",)}, "fields: page_tabel; the fields of padded are page_table,"),
        ({"fields": ()}, "fields: an empty list"),
        ({"first": 0}, "first: 0 is below 1"),
        ({"every": 0}, "every: 0 is below 1"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Overlay.attach(**{"system": "padded", "geometry": "tiny_v4", "directory": tmp_path, **arguments})


def test_tensors_of_another_form_are_refused_with_all_that_is_wrong(serving: ModuleType, tmp_path: Path) -> None:
    hooked = Hooked(serving, tmp_path)
    outputs = {**hooked.loop.outputs, "page_table": hooked.loop.outputs["page_table"][:, :-1]}
    with pytest.raises(UsageError, match=r"page_table is int32 \[24, 12\], it must be int32 \[24, 13\]"):
        hooked.overlay.prepare(BUCKET, hooked.loop.inputs, outputs)
    inputs = {**hooked.loop.inputs.tensors(), "seq_lens": torch.zeros(BUCKET - 1)}
    inputs["req_to_token"] = inputs["req_to_token"][:, :100]
    said = r"seq_lens is float32 \[5\], it must be int32 or int64 \[6\] or longer; req_to_token is int32 \[40, 100\]"
    with pytest.raises(UsageError, match=said):
        hooked.overlay.prepare(BUCKET, inputs, hooked.loop.outputs)
    with pytest.raises(UsageError, match="bucket 6: a check needs 0 MiB, the limit is 0; raise max_bytes"):
        Hooked(serving, tmp_path, max_bytes=1000).overlay.prepare(BUCKET, hooked.loop.inputs, hooked.loop.outputs)


# What it costs to have it ---------------------------------------------------------------------------------------------


def test_disabled_it_is_an_attribute(tmp_path: Path) -> None:
    overlay = Overlay.disabled
    assert overlay.enabled is False
    for call in (overlay.poll, overlay.close):
        assert call() is None
    assert overlay.prepare(1, None, None) is None
    assert overlay.check(raw_batch=1, bucket=1, inputs=None, outputs=None) is None


def imported_by(module: str, seen: set[str]) -> set[str]:
    """Modules that importing `module` imports, functions and type checking aside; into this package only."""
    if module in seen or not module.startswith("dsa_verify"):
        return seen | {module}
    seen = seen | {module}
    file = importlib.util.find_spec(module).origin  # type: ignore[union-attr]
    for node in ast.parse(Path(str(file)).read_text()).body:
        if isinstance(node, ast.Import):
            for name in node.names:
                seen = imported_by(name.name, seen)
        elif isinstance(node, ast.ImportFrom):
            seen = imported_by(str(node.module), seen)
            for name in node.names:
                part = f"{node.module}.{name.name}"
                package = importlib.util.find_spec(str(node.module)).submodule_search_locations  # type: ignore[union-attr]
                if package is not None and importlib.util.find_spec(part) is not None:
                    seen = imported_by(part, seen)
    return seen


def test_it_imports_no_kernels_before_it_is_used() -> None:
    found = imported_by("dsa_verify.overlay", set())
    assert {"torch", "dsa_verify.contract.geometry", "dsa_verify.systems.padded"} <= found
    assert not {"triton", "rich", "click", "pytest", "dsa_verify.buffers.region_kernels"} & found


@pytest.mark.slow
def test_importing_it_imports_no_kernels() -> None:
    code = (
        "import sys; from dsa_verify.overlay import Overlay; "
        "Overlay.attach(system='padded', geometry='tiny_v4', directory=sys.argv[1]); "
        "print([name for name in ('triton', 'rich', 'click', 'pytest') if name in sys.modules])"
    )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Pieces ---------------------------------------------------------------------------------------------------------------


def pieces_of(index: torch.Tensor) -> tuple[list[Piece], list[torch.Tensor]]:
    source = [
        torch.arange(5000, dtype=torch.int32, device=DEVICE).view(50, 100)[:, :77],
        torch.arange(9, device=DEVICE)[::2],
        torch.randn(7, device=DEVICE),
    ]
    rows = torch.arange(12, dtype=torch.int32, device=DEVICE).view(4, 3)
    to = [torch.zeros(each.shape, dtype=each.dtype, device=DEVICE) for each in source]
    picked = torch.zeros((len(index), 3), dtype=torch.int32, device=DEVICE)
    return [*map(Piece.of, to, source), Piece.of(picked, rows, index)], [*to, picked, *source, rows]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_copy_kernel_copies_what_plain_torch_copies(dtype: torch.dtype) -> None:
    from dsa_verify.overlay.copies_kernel import CopyTable

    index = torch.tensor([3, 0, 2, -1, 4, 1, 99], dtype=dtype, device=DEVICE)
    pieces, got = pieces_of(index)
    when = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    CopyTable(pieces, DEVICE, when).launch()
    GroupedCopy(pieces, DEVICE, when).launch()
    assert all(not tensor.any() for tensor in got[:4])
    when.fill_(1)
    CopyTable(pieces, DEVICE, when).launch()
    plain, want = pieces_of(index)
    copy_plainly(plain)
    for first, second in zip(got, want, strict=True):
        if first.dtype is not torch.float32:
            assert torch.equal(first, second)
    assert torch.equal(got[2], got[6]), "floats go by their bits"
    # What no row is becomes row 0: garbage must not take the device down.
    assert got[3].tolist() == [[9, 10, 11], [0, 1, 2], [6, 7, 8], [0, 1, 2], [0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_a_view_that_is_none_is_compared_by_itself(tmp_path: Path) -> None:
    """Decode's expanded lengths are its cache lengths (contract 1.1); where they are apart, one may be wrong."""
    layout = SYSTEMS["decode"].layout(small(), 4)
    inputs = Inputs(
        seq_lens=torch.tensor([5, 7, 1, 1]).to(DEVICE),
        req_pool_indices=torch.zeros(4, dtype=torch.int64, device=DEVICE),
        req_to_token=torch.zeros((9, small().token_columns), dtype=torch.int32, device=DEVICE),
    )
    buffers, server = Arena([layout], DEVICE, 0).at(4), EagerDecode()
    server.allocate(small(), inputs, buffers)
    server.in_graph()
    same, other = buffers["cache_seqlens_int32"], torch.full((4,), 5, dtype=torch.int32, device=DEVICE)
    for apart, wrong in ((same, {}), (other, {"dsa_seqlens_expanded": 3})):
        outputs = {**buffers, "dsa_seqlens_expanded": apart}
        overlay = Overlay.attach(system="decode", geometry=small(), directory=tmp_path)
        overlay.check(raw_batch=2, bucket=4, inputs=inputs, outputs=outputs)
        assert overlay.close().differing_words == wrong
