"""The overlay over every system: it takes for live what the rounds say is live, agrees with what is right, and no
garbage in a server's buffers can make it fail."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DEVICE, backend, setup_of

from dsa_verify.buffers.arena import TORCH_DTYPES, Arena
from dsa_verify.buffers.input_buffers import InputBuffers
from dsa_verify.buffers.region import LOUD_WORD, Control, field_regions
from dsa_verify.buffers.region_kernels import RegionTable
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.padded import PADDED_MODES
from dsa_verify.contract.round_table import RoundTable
from dsa_verify.contract.subject import Inputs, current_outputs
from dsa_verify.judge.judge import Judge, live_words
from dsa_verify.overlay import Overlay
from dsa_verify.overlay.copies import GroupedCopy
from dsa_verify.overlay.inputs import LegalInputs, Taken, input_specs, token_columns
from dsa_verify.overlay.launch import OwnStream
from dsa_verify.replay.bucket import CapturedBucket
from dsa_verify.rounds.matrix import Config, diagnostic_matrix
from dsa_verify.systems.catalogue import SYSTEMS

ROUNDS = 6
SMALLEST = {"context": 60, "request_rows": 12}
CONFIGS: list[tuple[str, str, dict[str, Any]]] = [
    ("decode", "tiny", SMALLEST),
    ("decode", "tiny_pool", SMALLEST),
    ("target_verify", "tiny", SMALLEST | {"draft_tokens": 2}),
    ("target_verify", "tiny_pool", SMALLEST | {"draft_tokens": 4}),
    ("draft_extend", "tiny", SMALLEST | {"draft_tokens": 3}),
    ("draft_extend", "tiny_pool", SMALLEST | {"draft_tokens": 4}),
    ("ragged_verify", "tiny", {"context": 60, "request_rows": 20, "draft_tokens": 3}),
    ("mtp", "tiny_pool", SMALLEST | {"draft_steps": 2}),
    ("padded", "tiny_v4", {"padded_mode": "decode", "request_rows": 12}),
    *(
        ("padded", "tiny_v4", {"padded_mode": mode, "draft_tokens": 3, "request_rows": 12})
        for mode in PADDED_MODES
        if mode != "decode"
    ),
]
IDS = [f"{system}-{preset}-{overrides.get('padded_mode', '')}" for system, preset, overrides in CONFIGS]
every_system = pytest.mark.parametrize("system, preset, overrides", CONFIGS, ids=IDS)


def config_of(system: str, preset: str, overrides: dict[str, Any], rounds: int) -> Config:
    geometry = SYSTEMS[system].geometry(preset, overrides)
    drafts = [geometry.draft_tokens] if SYSTEMS[system].drafts else None
    fixed = frozenset(overrides) - {"draft_tokens"}
    return diagnostic_matrix(SYSTEMS[system], geometry, batches=[4], drafts=drafts, fixed=fixed, rounds=rounds)[0]


def full_rows(layout: Layout, want: dict[str, torch.Tensor], control: Control) -> dict[str, torch.Tensor]:
    """What an oracle of `layout.for_oracle()` has, with a row for each token, and the loud poison where it is dead."""
    owners = control.row_request.long()
    rows = {
        field.name: (want[field.name][owners] if field.one_row_per_request else want[field.name]).clone()
        for field in layout
    }
    outputs = {field.name: rows[field.name if field.alias is None else field.alias] for field in layout}
    outputs = {field.name: outputs[field.name].view(field.shape) for field in layout}
    for region in field_regions(layout, outputs, want, control):
        region.got[~live_words(region)] = LOUD_WORD
    return outputs


def check_what_is_right(system: str, preset: str, overrides: dict[str, Any], folder: Path) -> int:
    """That an overlay finds the oracle's own outputs equal, in every round of the matrix, with dead elements loud;
    how many it checked."""
    config = config_of(system, preset, overrides, ROUNDS)
    geometry, bucket = config.geometry, max(config.buckets)
    (table,) = config.chunks()
    input_buffers = InputBuffers(
        SYSTEMS[system], geometry, bucket, DEVICE, capacity=ROUNDS, remap_slots=table.remap_rows.shape[1]
    )
    input_buffers.upload(table)
    layout, (inputs, for_oracle) = SYSTEMS[system].layout(geometry, bucket), input_buffers.inputs(bucket)
    want = Arena([layout.for_oracle()], DEVICE, 0).at(bucket)
    oracle = SYSTEMS[system].make_oracle()
    oracle.allocate(geometry, for_oracle, want)
    overlay = Overlay.attach(system=system, geometry=geometry, directory=folder)
    there: dict[str, torch.Tensor] = {}
    for replayed, raw in zip(table.bucket.tolist(), table.raw.tolist(), strict=True):
        input_buffers.step(replayed)
        if replayed != bucket:
            continue
        oracle.in_graph()
        outputs = full_rows(layout, dict(want), input_buffers.control(bucket)[0])
        there = there or outputs
        for name, tensor in outputs.items():
            there[name].copy_(tensor)
        overlay.check(raw_batch=raw, bucket=bucket, inputs=inputs, outputs=there)
    summary = overlay.close()
    assert summary.clean, summary.text()
    assert summary.checked == table.bucket.tolist().count(bucket) > 1
    assert summary.not_compared == ()
    return summary.checked


@every_system
def test_what_is_right_is_equal_and_only_what_is_live_is_compared(
    system: str, preset: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    """Rounds of the matrix, pad rows and dead elements included: which are dead is worked out on the host."""
    check_what_is_right(system, preset, overrides, tmp_path)


def test_a_preparation_of_ones_own_writes_every_row(tmp_path: Path) -> None:
    """Unlike the oracle, which has one row of a table for all the tokens of a request (contract 1.2)."""
    geometry = Geometry.resolve("tiny", {"context": 60, "request_rows": 6, "draft_tokens": 2})
    layout = SYSTEMS["target_verify"].layout(geometry, 2)
    slots = torch.arange(6 * token_columns(geometry), dtype=torch.int32, device=DEVICE).view(6, -1)
    inputs = Inputs(
        seq_lens=torch.tensor([30, 9], device=DEVICE),
        req_pool_indices=torch.tensor([2, 4], device=DEVICE),
        req_to_token=slots,
    )
    want = Arena([layout.for_oracle()], DEVICE, 0).at(2)
    oracle = SYSTEMS["target_verify"].make_oracle()
    oracle.allocate(geometry, inputs, want)
    oracle.in_graph()
    owners = torch.tensor([0, 0, 1, 1], device=DEVICE)
    right = {
        field.name: want[field.name][owners] if field.one_row_per_request else want[field.name] for field in layout
    }
    live = {name: right[layout[name].alias or name].view(layout[name].shape).clone() for name in right}
    live["real_page_table"][3, 1] += 1
    live["real_page_table"][3, -1] += 1  # dead

    def prepare(raw: int, bucket: int) -> None:
        for name, tensor in live.items():
            tensor.copy_(right[layout[name].alias or name].view(tensor.shape))

    overlay = Overlay.attach(system="target_verify", geometry=geometry, directory=tmp_path, reference=prepare)
    overlay.check(raw_batch=2, bucket=2, inputs=inputs, outputs=live)
    assert overlay.close().differing_words == {"real_page_table": 1}
    assert live["real_page_table"][3, 1] == right["real_page_table"][3, 1] + 1
    lines = [json.loads(line) for line in (tmp_path / "overlay-target_verify-rank0.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["kind"] == "difference"]
    assert "real_page_table[3, 1] (batch row 1, request 4, length 9, draft position 1, page 1" in line["sentence"]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Kernels instead of plain torch, interpreted, and everything that is captured on a GPU captured: there a graph
    refuses what would wait for the device, here the emulated one does. How often each graph was replayed."""
    replays: Counter[int] = Counter()
    capture = OwnStream.capture

    def counting(self: OwnStream, body: Any) -> Any:
        number, replay = len(replays), (capture if self.cuda else capturing)(self, body)
        replays[number] = 0

        def counted() -> None:
            replays[number] += 1
            replay()

        return counted

    monkeypatch.setattr(OwnStream, "capture", counting)
    if DEVICE.type == "cuda":
        return replays
    from dsa_verify.overlay.copies_kernel import CopyTable

    def copying(self: GroupedCopy, pieces: Any, device: torch.device, when: torch.Tensor | None = None) -> None:
        self._launch = CopyTable([piece for piece in pieces if piece.to.numel()], device, when).launch

    def judging(self: Judge, *args: Any) -> None:
        made(self, *args)
        self.table = RegionTable(self.regions, DEVICE)

    def capturing(self: OwnStream, body: Any) -> Any:
        self._kept.append(body)
        body()
        return backend().capture(body).replay

    made = Judge.__init__
    monkeypatch.setattr(Judge, "__init__", judging)
    monkeypatch.setattr(GroupedCopy, "__init__", copying)
    return replays


@pytest.mark.slow
@every_system
def test_its_work_can_be_captured(
    system: str, preset: str, overrides: dict[str, Any], tmp_path: Path, replays: Counter[int]
) -> None:
    checked = check_what_is_right(system, preset, overrides, tmp_path)
    assert replays == {0: checked, 1: checked}  # what takes, and what judges


def test_a_difference_leaves_its_evidence_in_a_graph(tmp_path: Path, replays: Counter[int]) -> None:
    """The device itself decides that it is made: of the first check that differs, and until it has been read."""
    geometry = Geometry.resolve("tiny", {"context": 20, "request_rows": 6})
    layout = SYSTEMS["decode"].layout(geometry, 2)
    inputs = {
        "seq_lens": torch.tensor([3, 1], device=DEVICE),
        "req_pool_indices": torch.tensor([2, 0], device=DEVICE),
        "req_to_token": torch.zeros((6, token_columns(geometry)), dtype=torch.int32, device=DEVICE),
    }
    outputs = Arena([layout], DEVICE, 0).at(2)
    oracle = SYSTEMS["decode"].make_oracle()
    oracle.allocate(geometry, Inputs.of(inputs), outputs)
    overlay = Overlay.attach(system="decode", geometry=geometry, directory=tmp_path)
    for length in (3, 7, 9, 4):
        inputs["seq_lens"][0] = length
        oracle.in_graph()
        outputs["dsa_cache_seqlens_int32"][0] += int(length > 5)
        overlay.check(raw_batch=1, bucket=2, inputs=inputs, outputs=dict(outputs))
        if length == 9:
            poll_thrice(overlay)
    summary = overlay.close()
    assert (summary.checked, summary.mismatches) == (4, 2), summary.text()
    lines = [json.loads(line) for line in (tmp_path / "overlay-decode-rank0.jsonl").read_text().splitlines()]
    first, second = [line for line in lines if line["kind"] == "difference"]
    assert (first["replay"], first["diagnosis"]) == (1, "boundary")
    assert "(batch row 0, request 2, length 7) is 8, must be 7: it is the right value + one token" in first["sentence"]
    assert (second["replay"], second["diagnosis"]) == (2, None)
    (case,) = [line for line in lines if line["kind"] == "case"]
    assert case["replays"] == [0, 1]


def poll_thrice(overlay: Overlay) -> None:
    for _ in range(3):
        overlay.poll()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()


@pytest.mark.slow
@every_system
def test_the_shipped_pipelines_pass(system: str, preset: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(system, preset, overrides, 17)
    setup = setup_of(system=system, geometry=config.geometry, buckets=config.buckets)
    overlay = Overlay.attach(system=system, geometry=config.geometry, directory=tmp_path)
    replayer = setup.open(config.rounds)

    def check(table: RoundTable, captured: CapturedBucket, row: int) -> bool:
        outputs = current_outputs(captured.subject, captured.buffers)
        overlay.check(raw_batch=int(table.raw[row]), bucket=captured.bucket, inputs=captured.inputs, outputs=outputs)
        return False

    for table in config.chunks():
        replayer.replay(table, after_round=partial(check, table))
    summary = overlay.close()
    assert summary.clean, summary.text()
    assert summary.checked == 17


@every_system
def test_liveness_is_what_the_rounds_say(system: str, preset: str, overrides: dict[str, Any]) -> None:
    """The rules of rounds.py once more, on the device."""
    config = config_of(system, preset, overrides, 24)
    raw = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    layouts = {bucket: SYSTEMS[system].layout(config.geometry, bucket) for bucket in config.buckets}
    checks = {bucket: legal_inputs(layout, raw) for bucket, layout in layouts.items()}
    table = next(iter(config.chunks()))
    assert len(set(table.raw.tolist())) > 3
    for i, bucket in enumerate(table.bucket.tolist()):
        legal, taken = checks[bucket]
        for name, tensor in taken.values.items():
            if name != "out_cache_loc":
                tensor.copy_(torch.from_numpy(table.drawn(name)[i, :bucket]))
        raw.fill_(int(table.raw[i]))
        legal.update()
        rows = int(table.token_rows[i])
        control = legal.control
        assert control.live_tokens.tolist() == table.live_tokens[i, :bucket].tolist()
        assert control.live_candidates.tolist() == table.live_candidates[i, :bucket].tolist()
        assert control.token_rows.tolist() == [rows]
        assert control.row_request.tolist()[:rows] == table.row_request[i, :rows].tolist()


def legal_inputs(layout: Layout, raw: torch.Tensor) -> tuple[LegalInputs, Taken]:
    taken = Taken(
        values={
            spec.name: torch.zeros(spec.shape(layout.bucket), dtype=TORCH_DTYPES[spec.dtype], device=DEVICE)
            for spec in input_specs(SYSTEMS[layout.system], layout.geometry)
        },
        rows=torch.zeros((layout.bucket, token_columns(layout.geometry)), dtype=torch.int32, device=DEVICE),
        full_to_swa=torch.zeros(50, dtype=torch.int32, device=DEVICE) if layout.system == "padded" else None,
    )
    return LegalInputs(layout, taken, request_rows=12, raw=raw, check_pad_rows=True), taken


@every_system
def test_no_garbage_can_make_the_oracle_fail(
    system: str, preset: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    """On a device an index out of bounds would end the server. Here it would raise, and so could not have run."""
    geometry = SYSTEMS[system].geometry(preset, overrides)
    layout, generator = SYSTEMS[system].layout(geometry, 5), torch.Generator().manual_seed(0)
    specs = input_specs(SYSTEMS[system], geometry)
    inputs = {spec.name: torch.zeros(spec.shape(5), dtype=torch.int64, device=DEVICE) for spec in specs}
    inputs["req_to_token"] = torch.zeros((7, token_columns(geometry)), dtype=torch.int32, device=DEVICE)
    inputs["full_to_swa"] = torch.zeros(50, dtype=torch.int32, device=DEVICE)
    outputs = {field.name: torch.zeros(field.shape, dtype=TORCH_DTYPES[field.dtype], device=DEVICE) for field in layout}
    overlay = Overlay.attach(system=system, geometry=geometry, directory=tmp_path, keep_rounds=2)
    for bits, raw in ((3, 5), (7, 3), (62, 4)):
        for name, tensor in inputs.items():
            if name != "full_to_swa":
                reach = 1 << (min(bits, 30) if tensor.dtype is torch.int32 else bits)
                tensor.copy_(torch.randint(-reach, reach, tuple(tensor.shape), generator=generator))
        overlay.check(raw_batch=raw, bucket=5, inputs=inputs, outputs=outputs)
        overlay.poll()
        overlay.poll()
    summary = overlay.close()
    assert summary.could_not_run == {}
    assert summary.checked == summary.mismatches == 3
    assert "req_pool_indices" in summary.differing_words
    lines = [json.loads(line) for line in (tmp_path / f"overlay-{system}-rank0.jsonl").read_text().splitlines()]
    assert any("out of range: input req_pool_indices[" in line.get("sentence", "") for line in lines)
