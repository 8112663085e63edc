"""The capture ring: rounds of a live server become a case that shows the same finding at home, is small, reveals
nothing, and says what it cannot say."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import DEVICE, EagerDecode, backend, small

from dsa_verify.base.errors import STATUS_MISMATCH, UsageError
from dsa_verify.cli.main import main
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Scenario
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.overlay import Overlay
from dsa_verify.overlay.pages import list_pages
from dsa_verify.overlay.ring import CaptureRing
from dsa_verify.overlay.ring_case import MAX_CASE_BYTES, Recorded, to_case
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.case_file import parse_case, read_case
from dsa_verify.systems.catalogue import SYSTEMS
from fuzz.reduce.shrink import shrink
from fuzz.reduce.trials import Signature
from oracles.padded import PaddedOracle

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("one_thread")


class StaleDecode(EagerDecode):
    """Reads the page table of the requests of the round before, wherever a batch row has another request now."""

    name = "stale"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        self._requests = inputs.req_pool_indices.clone()
        super().allocate(geometry, dataclasses.replace(inputs, req_pool_indices=self._requests), buffers)
        self._now = inputs.req_pool_indices

    def in_graph(self) -> None:
        super().in_graph()
        self._requests.copy_(self._now)


class StalePages(PaddedOracle):
    """Refreshes the page table of a batch row only when its request has another length than in the round before."""

    name = "stale pages"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self._lens = torch.zeros_like(inputs.seq_lens)

    def in_graph(self) -> None:
        table, lens = self._buffers["page_table"], self._inputs.seq_lens
        kept = table.clone()
        super().in_graph()
        same = (lens == self._lens)[self._owner]
        table.copy_(torch.where(same[:, None], kept, table))
        self._lens.copy_(lens)


def loop_of(serving: ModuleType, factory: Any, *, bucket: int = 5, geometry: Geometry | None = None) -> Any:
    geometry = geometry or small(request_rows=30)
    system = "padded" if geometry.preset == "tiny_v4" else "decode"
    return serving.ServingLoop(factory, system=system, geometry=geometry, bucket=bucket, backend=backend(), graph=False)


def recorded_run(serving: ModuleType, folder: Path, raws: list[int], **ring: Any) -> tuple[Any, Any, list[Any]]:
    """(dump, loop, what the loop really did) of a run of decode over `raws`."""
    loop = loop_of(serving, StaleDecode)
    keep = CaptureRing("decode", loop.geometry, widest=5, device=DEVICE, **ring)
    done: list[Any] = []

    def hook(raw: int) -> None:
        keep.record(raw_batch=raw, bucket=5, inputs=loop.inputs)
        done.append([(row, length, tuple(loop._pages[row])) for row, length in loop.live])

    for raw in raws:
        loop.step(raw, hook)
    return keep.dump(folder), loop, done


def findings(scenario: Scenario, subject: str | None = None) -> list[Finding]:
    setup = ReplaySetup.make(
        SYSTEMS[scenario.system],
        scenario.geometry,
        scenario.buckets,
        scenario.seed,
        subject or scenario.subject,
        scenario.fault,
        backend(),
    )
    return confirm(setup, scenario.rounds)


# Round trip -----------------------------------------------------------------------------------------------------------


def test_a_case_says_what_the_server_did(serving: ModuleType, tmp_path: Path) -> None:
    """Same lengths, the same requests under other names, and a remap wherever a request came back on other pages."""
    dump, _, done = recorded_run(serving, tmp_path, [3, 5, 0, 4, 2, 5, 5, 1] * 2)
    scenario = dump.scenario
    assert dump.not_representable == ()
    assert dump.left_out == 0
    assert len(scenario.rounds) == len(done) == 16
    assert read_case(dump.path) == dataclasses.replace(scenario, name=dump.path.stem)
    names: dict[int, int] = {}
    pages: dict[int, tuple[int, ...]] = {}
    remaps = 0
    for round_, live in zip(scenario.rounds, done, strict=True):
        assert round_.seq_lens == tuple(length for _, length, _ in live)
        moved = set()
        for name, (row, _, held) in zip(round_.requests, live, strict=True):
            assert names.setdefault(row, name) == name
            before = pages.get(row, ())
            common = min(len(before), len(held))
            if before[:common] != held[:common]:
                moved.add(name)
            pages[row] = held
        assert set(round_.remap) == moved
        remaps += len(moved)
    assert remaps, "no request came back on other pages: the run says nothing about remaps"
    assert sorted(names.values()) == list(range(1, len(names) + 1))


def test_a_fault_found_live_is_found_at_home_and_shrinks(serving: ModuleType, tmp_path: Path) -> None:
    dump, _, _ = recorded_run(serving, tmp_path, [2, 4, 3], subject="test_capture_ring:StaleDecode")
    found = findings(dump.scenario)
    assert {finding.field for finding in found} == {"page_table_1", "real_page_table"}
    assert found[0].round == 0, "the first round already has other requests than the capture"
    assert findings(dump.scenario, "support:EagerDecode") == []
    ticks = itertools.count()  # a budget of replays, so that the test takes as long on any machine
    shrunk = shrink(dump.scenario, Signature.of(found[0]), backend(), budget_s=24, clock=lambda: float(next(ticks)))
    assert (shrunk.finding.field, shrunk.finding.diagnosis) == (found[0].field, found[0].diagnosis)
    assert (len(shrunk.scenario.rounds), shrunk.scenario.rounds[-1].raw_batch) == (1, 1)


def test_a_failed_check_becomes_a_case_by_itself(serving: ModuleType, tmp_path: Path) -> None:
    failed_check(serving, tmp_path)


def failed_check(serving: ModuleType, tmp_path: Path) -> tuple[Scenario, Finding]:
    """The ring stops at the failing round, on the device: what the server does until somebody asks is not kept."""
    geometry = SYSTEMS["padded"].geometry("tiny_v4", {"request_rows": 30})
    loop = loop_of(serving, StalePages, geometry=geometry)
    overlay = Overlay.attach(
        system="padded", geometry=geometry, directory=tmp_path, subject="test_capture_ring:StalePages"
    )

    def hook(raw: int) -> None:
        overlay.check(raw_batch=raw, bucket=5, inputs=loop.inputs, outputs=loop.outputs)

    for raw in (3, 5, 2, 4, 5):
        loop.step(raw, hook)
    rows, lens = loop.inputs.req_pool_indices, loop.inputs.seq_lens
    lens.copy_(lens.min())
    for shift in (0, 1):  # the second time other requests have the same lengths: the table is not refreshed
        rows.copy_(rows.roll(shift))
        loop.inputs.out_cache_loc.copy_(loop.inputs.req_to_token[rows, lens - 1])
        loop.subject.in_graph()
        hook(5)
    loop.step(4, hook)
    summary = overlay.close()
    lines = [json.loads(line) for line in (tmp_path / "overlay-padded-rank0.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["kind"] == "difference" and line["diagnosis"]]
    (case,) = [line for line in lines if line["kind"] == "case"]
    assert summary.cases == (line["case"],) == (case["case"],)
    assert case["replays"][-1] == line["replay"] == 6, "the failing round is the last"
    assert case["not_representable"] == []
    scenario = read_case(Path(line["case"]))
    assert scenario.found == f"{line['diagnosis']}: page_table"
    found = findings(scenario)
    assert [finding.field for finding in found] == [line["field"]] == ["page_table"]
    assert found[0].diagnosis.value == line["diagnosis"] == Diagnosis.STALE.value
    return scenario, found[0]


@pytest.mark.slow
def test_the_case_of_a_failed_check_shrinks(serving: ModuleType, tmp_path: Path) -> None:
    scenario, finding = failed_check(serving, tmp_path)
    shrunk = shrink(scenario, Signature.of(finding), backend(), budget_s=600.0)
    assert len(shrunk.scenario.rounds) == 2
    assert shrunk.finding.diagnosis is finding.diagnosis


def test_a_case_replays_from_the_command_line(
    serving: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dump, _, _ = recorded_run(serving, tmp_path, [2, 3], subject="test_capture_ring:StaleDecode")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["dsa-verify", "replay", str(dump.path), "--trust", "--device", str(DEVICE)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert "FOUND in decode (test_capture_ring:StaleDecode" in capsys.readouterr().out
    assert stopped.value.code == STATUS_MISMATCH


# The ring -------------------------------------------------------------------------------------------------------------


def test_the_oldest_rounds_make_room(serving: ModuleType, tmp_path: Path) -> None:
    raws = [1, 2, 3, 4, 5, 4, 3, 2]
    for kept in (1, 3, 8, 50):
        dump, _, done = recorded_run(serving, tmp_path, raws, rounds=kept)
        lens = [tuple(length for _, length, _ in live) for live in done]
        assert [round_.seq_lens for round_ in dump.scenario.rounds] == lens[-kept:]
        assert dump.numbers == tuple(range(8))[-kept:]


def test_frozen_it_keeps_what_it_has(serving: ModuleType, tmp_path: Path) -> None:
    loop = loop_of(serving, EagerDecode)
    ring = CaptureRing("decode", loop.geometry, widest=5, device=DEVICE, rounds=2)
    numbers = []
    for raw, then in ((1, None), (3, None), (2, ring.freeze), (3, None), (4, ring.thaw), (5, None)):
        loop.step(raw, lambda raw: ring.record(raw_batch=raw, bucket=5, inputs=loop.inputs))
        if then is not None:
            then()
        numbers.append([round_.raw_batch for round_ in ring.dump(tmp_path).scenario.rounds])
    assert numbers == [[1], [1, 3], [3, 2], [3, 2], [3, 2], [2, 5]]


def test_inputs_may_lie_elsewhere_and_be_longer(serving: ModuleType, tmp_path: Path) -> None:
    """Two buckets over the same slots, and a round whose lengths are in another tensor."""
    loop = loop_of(serving, EagerDecode)
    ring = CaptureRing("decode", loop.geometry, widest=5, device=DEVICE)
    loop.step(2, lambda raw: ring.record(raw_batch=raw, bucket=3, inputs=loop.inputs))
    loop.step(4, lambda raw: ring.record(raw_batch=raw, bucket=5, inputs=loop.inputs))
    other = {**loop.inputs.tensors(), "seq_lens": loop.inputs.seq_lens + 1}
    ring.record(raw_batch=4, bucket=5, inputs=other)
    rounds = ring.dump(tmp_path).scenario.rounds
    assert [(round_.bucket, round_.raw_batch) for round_ in rounds] == [(3, 2), (5, 4), (5, 4)]
    assert rounds[2].seq_lens == tuple(length + 1 for length in rounds[1].seq_lens)


def test_sizes_have_limits(tmp_path: Path) -> None:
    geometry = Geometry.resolve("deepseek_v32")
    with pytest.raises(UsageError, match=r"rounds: 4096 rounds of 512 .* 2\d{3} pages each take .* the limit is 256"):
        CaptureRing("decode", geometry, widest=512, device=DEVICE, rounds=4096)
    with pytest.raises(UsageError, match=r"rounds: 0 is outside 1\.\.4096"):
        CaptureRing("decode", geometry, widest=1, device=DEVICE, rounds=0)
    with pytest.raises(UsageError, match="system 'dcp': its outputs hold"):
        CaptureRing("dcp", SYSTEMS["dcp"].geometry("tiny"), widest=1, device=DEVICE)
    ring = CaptureRing("decode", small(), widest=2, device=DEVICE)
    with pytest.raises(UsageError, match="raw_batch: 3 of bucket 2; 0 <= raw_batch <= bucket <= 2"):
        ring.record(raw_batch=3, bucket=2, inputs=None)
    with pytest.raises(UsageError, match="the ring holds no round that a case can say; record at least one"):
        ring.dump(tmp_path)


# What a case says -----------------------------------------------------------------------------------------------------


def round_of(number: int, requests: list[int], lens: list[int], pages: list[list[int]], **rest: Any) -> Recorded:
    return Recorded(
        number=number,
        bucket=rest.pop("bucket", 8),
        seq_lens=tuple(lens),
        requests=tuple(requests),
        lens=rest.pop("lens", {}),
        pages=tuple(map(tuple, pages)),
        **rest,
    )


def test_a_request_is_remapped_when_a_page_it_had_is_another(tmp_path: Path) -> None:
    rounds = [
        round_of(0, [17], [9], [[5, 6, 7]]),
        round_of(1, [17], [13], [[5, 6, 7, 8]]),  # it grew
        round_of(2, [17], [3], [[5]]),  # it shrank
        round_of(3, [17], [13], [[5, 6, 7, 9]]),  # and grew over another page
        round_of(4, [23, 17], [1, 13], [[1], [4, 6, 7, 9]]),  # another first page
        round_of(5, [17, 17], [13, 2], [[4, 6, 7, 9], [4]]),  # two batch rows of one request
    ]
    scenario = to_case(rounds, SYSTEMS["decode"], small()).scenario
    assert [round_.requests for round_ in scenario.rounds] == [(1,), (1,), (1,), (1,), (2, 1), (1, 1)]
    assert [round_.remap for round_ in scenario.rounds] == [(), (), (), (1,), (1,), ()]
    assert {round_.poison for round_ in scenario.rounds} == {"stale"}


def test_it_reveals_no_page_and_no_request_row(serving: ModuleType, tmp_path: Path) -> None:
    rounds = [round_of(i, [40_001, 52_002], [9, 5], [[70_001, 70_002, 70_003], [80_001, 80_002]]) for i in range(3)]
    dump = to_case(rounds, SYSTEMS["decode"], small(), found="stale: page_table_1")
    assert max(map(int, re.findall(r"\d+", dump.text))) < 100
    assert dump.scenario.geometry.request_rows < 10


def test_it_takes_less_than_100_kilobytes_and_keeps_the_latest(serving: ModuleType) -> None:
    requests = list(range(1, 257))
    geometry = small(request_rows=300)
    rounds = [
        round_of(i, requests, [1 + (i + b) % 37 for b in range(256)], [[b] for b in range(256)], bucket=256)
        for i in range(120)
    ]
    dump = to_case(rounds, SYSTEMS["decode"], geometry)
    size, held = len(dump.text.encode()), len(dump.scenario.rounds)
    assert size <= MAX_CASE_BYTES == 100_000
    assert size > MAX_CASE_BYTES - 2 * size // held, "one more would have fitted"
    assert (dump.numbers[-1], dump.left_out) == (119, 120 - held)
    assert parse_case(dump.text).rounds[-1].seq_lens == rounds[-1].seq_lens
    assert len(to_case(rounds, SYSTEMS["decode"], geometry, limit_bytes=10_000).text) <= 10_000
    with pytest.raises(UsageError, match="round 119: 256 requests take more than 900 bytes as a case"):
        to_case(rounds, SYSTEMS["decode"], geometry, limit_bytes=900)


def test_what_a_case_cannot_say_is_counted(serving: ModuleType) -> None:
    rounds = [
        round_of(0, [3, 4], [5, 5], [[7, 8], [8, 9]], broken=2),
        round_of(1, [3, 0], [5, 5], [[7, 8], [0, 0]], broken=1, misplaced=4),
        round_of(2, [3], [99], [[7]]),
        round_of(3, [-1], [1], [[7]]),
    ]
    dump = to_case(rounds, SYSTEMS["decode"], small())
    assert len(dump.scenario.rounds) == 2
    said = "\n".join(dump.not_representable)
    assert all(line.startswith("not representable: ") for line in dump.not_representable)
    for words in (
        "3 live slot(s) are not consecutive and aligned within their page",
        "4 token(s) are written elsewhere than where the request map has them",
        "1 page(s) belong to several requests of one round",
        "1 live batch row(s) name request 0",
        "1 round(s) left out: a length outside 0..context 37",
        "1 round(s) left out: a request row below 0",
    ):
        assert words in said
    with pytest.raises(UsageError, match="no round that a case can say: a length outside"):
        to_case(rounds[2:3], "decode", small())


def test_slots_that_do_not_lie_as_their_page_says_are_counted_while_recording(
    serving: ModuleType, tmp_path: Path
) -> None:
    loop = loop_of(serving, EagerDecode)
    ring = CaptureRing("decode", loop.geometry, widest=5, device=DEVICE)
    loop.step(3)
    (row, length), page = loop.live[0], loop.geometry.allocator_page
    loop.inputs.req_to_token[row, 1] += 1  # not consecutive
    loop.inputs.req_to_token[row, length:] = 12345  # dead
    ring.record(raw_batch=3, bucket=5, inputs=loop.inputs)
    assert "not representable: 1 live slot(s)" in ring.dump(tmp_path).not_representable[0]
    loop.inputs.req_to_token[row, :page] += 1  # not aligned; the one from before is still not consecutive
    ring.record(raw_batch=3, bucket=5, inputs=loop.inputs)
    assert "not representable: 3 live slot(s)" in ring.dump(tmp_path).not_representable[0]


def test_tokens_that_are_written_elsewhere_are_counted_while_recording(serving: ModuleType, tmp_path: Path) -> None:
    drafts = {"padded_mode": "verify", "draft_tokens": 3}
    loop = loop_of(
        serving, PaddedOracle, geometry=SYSTEMS["padded"].geometry("tiny_v4", {"request_rows": 30, **drafts})
    )
    ring = CaptureRing("padded", loop.geometry, widest=5, device=DEVICE)
    loop.step(3, lambda raw: ring.record(raw_batch=raw, bucket=5, inputs=loop.inputs))
    assert ring.dump(tmp_path).not_representable == (), "the tokens of pad rows all lie in slot 0"
    loop.inputs.out_cache_loc[5:] += 1  # the last live token, and pad rows
    ring.record(raw_batch=2, bucket=5, inputs=loop.inputs)
    assert "1 token(s) are written elsewhere" in ring.dump(tmp_path).not_representable[0]


@pytest.mark.parametrize("page, columns", [(4, 22), (1, 9), (16, 40)])
def test_the_page_kernel_lists_what_plain_torch_lists(page: int, columns: int) -> None:
    from dsa_verify.overlay.pages_kernel import launch

    generator = torch.Generator().manual_seed(page)
    pages = -(-columns // page)
    ids = torch.randint(1, 1 << 20, (7, pages), generator=generator, dtype=torch.int32)
    slots = (ids[:, :, None] * page + torch.arange(page, dtype=torch.int32)).flatten(1)[:, :columns].to(DEVICE)
    slots[2, 0] += 1
    slots[3, columns - 1] += 5
    index = torch.tensor([1, 2, 3, 3, 6], device=DEVICE)
    ends = torch.tensor([columns, columns, columns, columns - 1, 0], dtype=torch.int32, device=DEVICE)
    got, want = (torch.full((5, pages + 1), 77, dtype=torch.int32, device=device) for device in (DEVICE, "cpu"))
    broken, expected = (torch.zeros(1, dtype=torch.int32, device=device) for device in (DEVICE, "cpu"))
    launch(slots, index, ends, page, got, broken)
    list_pages(slots.cpu(), index.cpu(), ends.cpu(), page, want, expected)
    assert torch.equal(got.cpu(), want)
    assert torch.equal(broken.cpu(), expected)
    assert (broken.item() > 0) == (page > 1)
    live = -(-(columns - 1) // page)
    assert got[3, :live].tolist() == (slots[3, : columns - 1 : page] // page).tolist()
    assert got[3, live:].tolist() == [-1] * (pages + 1 - live)
    assert got[4].tolist() == [-1] * (pages + 1)
