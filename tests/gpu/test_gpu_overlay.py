"""On a GPU: the overlay around a serving loop whose metadata is in live CUDA graphs at the size of a real model. It
never waits, never changes a byte, takes no more memory as it goes on, and names what is planted."""

from __future__ import annotations

import gc
import importlib
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dsa_verify.base.errors import NothingVerified
from dsa_verify.contract.geometry import Geometry
from dsa_verify.graphs import open_backend
from dsa_verify.overlay import Overlay
from dsa_verify.overlay.ring import CaptureRing
from dsa_verify.rounds.case_file import read_case
from dsa_verify.subjects import faults
from dsa_verify.subjects.pipelines.padded import Padded
from dsa_verify.systems.catalogue import SYSTEMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
BUCKET = 14
CHECKS = 640
MODES = {"decode": 1, "verify": 4}


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module("serving_loop")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def geometry_of(mode: str = "verify", **changes: Any) -> Geometry:
    return SYSTEMS["padded"].geometry("deepseek_v4", {"padded_mode": mode, "draft_tokens": MODES[mode], **changes})


def loop_of(serving: ModuleType, *, geometry: Geometry | None = None, fault: str | None = None) -> Any:
    device = torch.device("cuda", torch.cuda.current_device())
    return serving.ServingLoop(
        Padded if fault is None else faults.plant(fault, Padded),
        system="padded",
        geometry=geometry or geometry_of(),
        bucket=BUCKET,
        backend=open_backend(device, "cuda"),
    )


def attach(loop: Any, folder: Path, **options: Any) -> Overlay:
    overlay = Overlay.attach(
        system="padded", geometry=loop.geometry, directory=folder, prepare_on_demand=False, **options
    )
    overlay.prepare(BUCKET, loop.inputs, loop.outputs)
    return overlay


def hook_of(loop: Any, overlay: Any) -> Callable[[int], None]:
    def hook(raw: int) -> None:
        if overlay.enabled:
            with no_waiting():
                overlay.check(raw_batch=raw, bucket=BUCKET, inputs=loop.inputs, outputs=loop.outputs)

    return hook


def run(loop: Any, overlay: Any, checks: int) -> None:
    hook = hook_of(loop, overlay)
    for i in range(checks):
        loop.step(2 + i % 12, hook)


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    text = (folder / "overlay-padded-rank0.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


@pytest.mark.parametrize("mode", MODES)
def test_640_checks_of_a_sound_server(serving: ModuleType, tmp_path: Path, mode: str) -> None:
    """Raw batches 2 to 13 of bucket 14, every field over its full width, pad rows included; polled on the way."""
    loop = loop_of(serving, geometry=geometry_of(mode))
    overlay = attach(loop, tmp_path, first=CHECKS)
    hook = hook_of(loop, overlay)
    for i in range(CHECKS):
        loop.step(2 + i % 12, hook)
        if i % 50 == 0:
            with no_waiting():
                overlay.poll()
    assert not overlay.enabled
    summary = overlay.close()
    assert summary.clean, summary.text()
    assert (summary.checked, summary.mismatches, summary.not_compared) == (CHECKS, 0, ())
    assert set(summary.batches) == {(raw, BUCKET) for raw in range(2, 14)}
    print(summary.text())


@pytest.mark.parametrize(
    "fault, field, diagnosis, first",
    [
        ("not_refreshed:page_table", "page_table", "stale", 1),
        ("off_by_one_page:page_table", "page_table", "boundary", 0),
        ("wrong_draft_offset:seq_lens_casual", "seq_lens_casual", "draft offset", 0),
        ("frozen_at_capture", "seq_lens_casual", "frozen at capture", 0),
    ],
)
def test_a_planted_fault_is_named(
    serving: ModuleType, tmp_path: Path, fault: str, field: str, diagnosis: str, first: int
) -> None:
    loop = loop_of(serving, fault=fault)
    overlay = attach(loop, tmp_path)
    run(loop, overlay, 24)
    summary = overlay.close()
    assert summary.mismatches == 24 - first, summary.text()
    line = next(line for line in lines_of(tmp_path, "difference") if line["field"] == field)
    assert (line["diagnosis"], line["replay"]) == (diagnosis, first), line["sentence"]
    (case,) = lines_of(tmp_path, "case")
    assert case["replays"] == list(range(first + 1)), "the ring stopped at the failing round, on the device"
    assert len(read_case(Path(line["case"])).rounds) == first + 1


def digests(serving: ModuleType, folder: Path, **options: Any) -> tuple[list[str], Any]:
    """Of all inputs and metadata after each hook; and the overlay, still open."""
    loop = loop_of(serving, fault="wrong_draft_offset:seq_lens_casual", geometry=geometry_of(context=8192))
    overlay: Any = Overlay.disabled
    if "reference" in options:
        make = options.pop("reference")
        overlay = attach(loop, folder, reference=None if make is None else make(loop), **options)
    found = []
    hook = hook_of(loop, overlay)
    for i in range(24):
        loop.step(i % 15, hook)
        found.append(loop.digest())
    return found, overlay


def test_metadata_is_bit_for_bit_what_it_is_without_it(serving: ModuleType, tmp_path: Path) -> None:
    """With the oracle, with the server's own preparation in place, and with one that raises half-way."""

    def own(loop: Any) -> Callable[[int, int], None]:
        return lambda raw, bucket: loop.subject.inner.in_graph()

    def raising(loop: Any) -> Callable[[int, int], None]:
        def prepare(raw: int, bucket: int) -> None:
            for tensor in loop.outputs.values():
                tensor.fill_(-77)
            raise ValueError("no pages left")

        return prepare

    without, _ = digests(serving, tmp_path / "0")
    assert len(set(without)) == 24
    for number, reference in enumerate((None, own), 1):
        found, overlay = digests(serving, tmp_path / str(number), reference=reference)
        assert found == without
        assert overlay.close().mismatches == 24
    found, overlay = digests(serving, tmp_path / "3", reference=raising)
    assert found == without
    with pytest.raises(NothingVerified, match="COULD NOT RUN 24 times: the reference raised ValueError: no pages left"):
        overlay.close()


def test_it_takes_no_more_memory_as_it_goes_on(serving: ModuleType, tmp_path: Path) -> None:
    loop = loop_of(serving, fault="off_by_one_page:page_table", geometry=geometry_of(context=8192))
    overlay = attach(loop, tmp_path)
    run(loop, overlay, 24)
    gc.collect()  # what other tests left in reference cycles would be given back while this one looks
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        run(loop, overlay, 24)
        overlay.poll()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert overlay.close().checked == 264


def test_inside_a_capture_it_does_not_run_and_does_not_spoil_it(serving: ModuleType, tmp_path: Path) -> None:
    loop = loop_of(serving, geometry=geometry_of(context=8192))
    overlay = attach(loop, tmp_path)
    run(loop, overlay, 1)
    out = torch.zeros(4, device=loop.device)
    stream, graph = torch.cuda.Stream(loop.device), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        out.add_(1)
        overlay.check(raw_batch=2, bucket=BUCKET, inputs=loop.inputs, outputs=loop.outputs)
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == [1.0] * 4
    summary = overlay.close()
    assert summary.checked == 1
    assert list(summary.could_not_run) == [
        "the server was capturing a graph on this stream; put the hook where it replays"
    ]


def test_a_server_on_a_stream_of_its_own(serving: ModuleType, tmp_path: Path) -> None:
    """What is taken is what that stream has at the hook: right after it the metadata is overwritten."""
    loop = loop_of(serving, geometry=geometry_of(context=8192))
    overlay = attach(loop, tmp_path)
    hook = hook_of(loop, overlay)

    def hook_and_spoil(raw: int) -> None:
        hook(raw)
        for tensor in loop.outputs.values():
            tensor.fill_(-5)

    stream = torch.cuda.Stream(loop.device)
    stream.wait_stream(torch.cuda.current_stream(loop.device))
    with torch.cuda.stream(stream):
        for i in range(60):
            loop.step(2 + i % 12, hook_and_spoil)
    summary = overlay.close()
    assert summary.clean, summary.text()
    assert summary.checked == 60


def test_recording_never_waits_and_replays(serving: ModuleType, tmp_path: Path) -> None:
    loop = loop_of(serving)
    ring = CaptureRing("padded", loop.geometry, widest=BUCKET, device=loop.device, rounds=32)
    loop.step(5, lambda raw: ring.record(raw_batch=raw, bucket=BUCKET, inputs=loop.inputs))
    lens = []

    def hook(raw: int) -> None:
        with no_waiting():
            ring.record(raw_batch=raw, bucket=BUCKET, inputs=loop.inputs)
        lens.append(tuple(length for _, length in loop.live))

    for i in range(100):
        loop.step(2 + i % 12, hook)
    dump = ring.dump(tmp_path)
    assert dump.not_representable == ()
    rounds = dump.scenario.rounds
    assert [round_.seq_lens for round_ in rounds] == lens[-len(rounds) :]
    assert (len(rounds), dump.left_out) == (32, 0)
    assert any(round_.remap for round_ in rounds)
