"""Edges: tables with gaps behind their rows, tables of 2**31 elements, and who may run them."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import DEVICE, EagerDecode, backend, small

from dsa_verify.base.errors import DeviceLost
from dsa_verify.buffers import input_memory
from dsa_verify.buffers.arena import GUARD_WORD, Arena
from dsa_verify.buffers.region import LOUD_WORD
from dsa_verify.cli import main as cli
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.geometry import TABLE_GAP, Geometry
from dsa_verify.contract.round_table import token_slots
from dsa_verify.contract.static_inputs import KV_WORDS
from dsa_verify.diagnosis import patterns
from dsa_verify.rounds import edge_configs as edges_module
from dsa_verify.rounds.case_file import read_case
from dsa_verify.rounds.edge_configs import Edge, EdgeKind, edges, why_not_here
from dsa_verify.rounds.matrix import Config, undefined_when_empty
from dsa_verify.run.runner import Runner, RunResult, new_result
from dsa_verify.subjects.pipelines.dcp import Dcp, Place
from dsa_verify.systems.catalogue import SYSTEMS, get_system

EMPTY_SYSTEMS = [name for name, system in SYSTEMS.items() if system.empty_rows]
CPU = torch.device("cpu")
COPIED = ("decode", "target_verify", "draft_extend", "mtp")  # whose page tables a copy may meet with gaps
WITH_TABLES = (*COPIED, "ragged_verify")
FAR = EdgeKind.FAR
NOT_ON_A_CPU = [
    f"{what}: on a CUDA device only, an interpreter would take too long"
    for what in (
        "the largest batch",
        "requests of a million tokens",
        "request rows up to 2**31 elements apart",
        "tables of 2049 x 1048576, more than 2**31 elements",
    )
]


def run_of(config: Config, subject: Any = None) -> RunResult:
    run = new_result(config.system.name, subject, backend())
    Runner(backend=backend(), folder=None).matrix([config], subject, run)
    return run


def gap_edge(system: str) -> Config:
    found = edges(get_system(system), small(system), seed=0, fixed=frozenset())
    (config,) = [edge.config for edge in found if edge.kind is EdgeKind.GAP]
    return config


def test_rows_of_a_strided_table_have_a_guarded_gap_behind_them() -> None:
    layout = SYSTEMS["decode"].layout(small(table_view="strided"), 3)
    arena = Arena([layout], DEVICE, LOUD_WORD)
    buffers = arena.at(3)
    for name in ("page_table_1", "real_page_table"):
        columns = layout[name].shape[1]
        assert buffers[name].stride() == (columns + TABLE_GAP, 1)
        gap = buffers[name].as_strided(
            (3, TABLE_GAP), (columns + TABLE_GAP, 1), buffers[name].storage_offset() + columns
        )
        assert bool((gap == GUARD_WORD).all())
    assert all(buffers[name].is_contiguous() for name in buffers if "page_table" not in name)
    words = sum(guard.words.numel() for guard in arena.guards) + sum(
        buffers[field.name].numel() for field in layout if field.alias is None
    )
    assert words * 4 == arena.words.numel() * 4, "every byte is a buffer's or a guard's"


on_cpu = pytest.mark.skipif(DEVICE.type == "cuda", reason="about what a CPU cannot run")


@pytest.mark.parametrize("system", COPIED)
def test_our_own_pipelines_keep_to_the_rows_of_a_strided_table(system: str) -> None:
    run = run_of(gap_edge(system))
    assert [finding.sentence for finding in run.findings] == []
    assert (run.counts.rounds_checked, run.counts.guard_hits) == (3, 0)


def test_a_pipeline_that_takes_rows_for_adjacent_is_found() -> None:
    class Adjacent(EagerDecode):
        def in_graph(self) -> None:
            super().in_graph()
            table = self.out["page_table_1"]
            flat = table.as_strided((table.numel(),), (1,), table.storage_offset())
            flat.copy_(table.reshape(-1))

    run = run_of(gap_edge("decode"), Adjacent)
    width = gap_edge("decode").geometry.columns
    assert {finding.field for finding in run.findings} == {"page_table_1"}
    (wrong,) = [finding for finding in run.findings if finding.diagnosis is not Diagnosis.PAST_THE_END]
    assert "elements behind one another were written as if they lay" in wrong.sentence, wrong.sentence
    (guard,) = [finding for finding in run.findings if finding.diagnosis is Diagnosis.PAST_THE_END]
    assert "into the gap behind the rows of page_table_1, the first 0 bytes beyond the end of row 0" in guard.sentence
    assert run.counts.guard_hits >= min(width, TABLE_GAP)


def edges_of(name: str) -> list[Edge]:
    """Of a system with the geometry that it has on a GPU."""
    system = get_system(name)
    return edges(system, system.geometry(system.preset("cuda")), seed=0, fixed=frozenset())


UNLIKE = ("draft_extend", "padded", "dcp")


@pytest.mark.parametrize(
    "system",
    # The others lay out these rounds as one of these does.
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("draft_extend", "padded", "dcp")))
        for name in SYSTEMS
    ],
)
def test_the_largest_batch_and_the_longest_requests_are_scripted_whole(system: str) -> None:
    kinds = {edge.kind: edge.config for edge in edges_of(system)}
    largest, *_ = kinds[EdgeKind.BATCH].chunks()
    assert (kinds[EdgeKind.BATCH].rounds, int(largest.raw.max())) == (17, 16_384)
    longest, *_ = kinds[EdgeKind.LONG].chunks()
    assert (kinds[EdgeKind.LONG].rounds, int(longest.seq_lens.max())) == (17, 1 << 20)


@pytest.mark.parametrize("system", WITH_TABLES)
def test_the_widest_tables_are_live_beyond_element_2_31(system: str) -> None:
    wide = [edge for edge in edges_of(system) if edge.kind is EdgeKind.WIDE]
    assert len(wide) == (2 if system == "mtp" else 1)
    for edge in wide:
        config = edge.config
        table = config.system.layout(config.geometry, config.buckets[0])
        name = "step0_page_table_1" if system == "mtp" else "page_table_1"
        first_of_last = table[name].elements - (4 if config.system.drafts else 1) * config.geometry.columns
        assert first_of_last == 1 << 31
        for round_ in (round_ for chunk in config.chunks() for round_ in chunk.rounds()):
            assert (len(round_.seq_lens), round_.seq_lens[-1]) == (config.buckets[0], 1 << 20)
        owned = sum(field.elements for field in table if field.name.endswith("page_table_1"))
        assert edge.device_bytes >= 2 * 2 * owned * 4
    assert [edge.config.geometry.own.get("draft_steps") for edge in wide] == ([2, 4] if system == "mtp" else [None])


@pytest.fixture
def short_integers(monkeypatch: pytest.MonkeyPatch) -> int:
    """The number at which they wrap to its negative, so that what 32 bits do not hold fits a test."""
    limit = 1 << 13
    monkeypatch.setattr(input_memory, "FAR_ELEMENTS", limit)
    monkeypatch.setattr(input_memory, "_LEAD_COLUMNS", 64)
    monkeypatch.setattr(patterns, "INT32_END", limit)
    return limit


def far_edge() -> Config:
    (edge,) = (edge for edge in edges(get_system("decode"), small(), seed=0, fixed=frozenset()) if edge.kind is FAR)
    return edge.config


def test_our_own_pipelines_reach_request_rows_that_are_far_apart(short_integers: int) -> None:
    config = far_edge()
    assert (config.geometry.input_view, config.geometry.index_dtype) == ("far", "int32")
    run = run_of(config)
    assert [finding.sentence for finding in run.findings] == []
    assert run.counts.rounds_checked == 3


def test_an_offset_of_a_request_row_that_wraps_is_named(short_integers: int) -> None:
    class Wraps(EagerDecode):
        def in_graph(self) -> None:
            super().in_graph()
            table, requests = self.inputs.req_to_token, self.inputs.req_pool_indices.long()
            offsets = requests * table.stride(0)
            offsets = torch.where(offsets >= short_integers, offsets - 2 * short_integers, offsets)
            first = table.storage_offset() - short_integers
            memory = table.as_strided((2 * short_integers,), (1,), first)
            columns = torch.arange(self.out["page_table_1"].shape[1], device=table.device)
            read = memory[(short_integers + offsets)[:, None] + columns]
            live = columns < self.inputs.seq_lens[:, None]
            self.out["page_table_1"].copy_(torch.where(live, read, self.out["page_table_1"]))

    run = run_of(far_edge(), Wraps)
    (finding,) = run.findings
    assert (finding.field, finding.diagnosis) == ("page_table_1", Diagnosis.WRONG_VALUE)
    assert finding.sentence.endswith(
        "that lies before the request table: row 8 times a stride of 1024 is 8192, which 32 bits do not hold "
        "(contract 1.7)"
    )


def test_what_is_written_before_a_far_request_table_is_seen(short_integers: int) -> None:
    class Writes(EagerDecode):
        def in_graph(self) -> None:
            super().in_graph()
            table = self.inputs.req_to_token
            table.as_strided((4,), (1,), table.storage_offset() - 100).fill_(-5)

    run = run_of(far_edge(), Writes)
    assert {finding.diagnosis for finding in run.findings} == {Diagnosis.BEFORE_THE_START}
    assert run.counts.guard_hits > 0


def test_far_request_rows_take_as_much_memory_whatever_is_copied() -> None:
    of_mtp = edges(get_system("mtp"), get_system("mtp").geometry("deepseek_v32"), seed=0, fixed=frozenset())
    assert [edge.device_bytes for edge in of_mtp if edge.kind is FAR] == [40 << 30]


def pools_edge(preset: str = "deepseek_v32", fixed: frozenset[str] = frozenset()) -> Edge:
    found = edges(get_system("dcp"), get_system("dcp").geometry(preset), seed=0, fixed=fixed)
    (edge,) = (edge for edge in found if edge.kind is EdgeKind.POOLS)
    return edge


@pytest.mark.parametrize("preset", ["deepseek_v32", "tiny"])
def test_every_token_lies_beyond_word_2_31_of_its_ranks_pool(preset: str) -> None:
    """Contract 8.2: with 16 bytes a token, from row 2**29 on."""
    edge = pools_edge(preset)
    geometry, (table,) = edge.config.geometry, edge.config.chunks()
    slots = token_slots(geometry, np.arange(1, geometry.request_rows), np.zeros(geometry.request_rows - 1, np.int64))
    first = geometry.first_page * geometry.allocator_page
    assert int(slots.min()) >= first
    assert first // geometry.dcp_size * KV_WORDS >= 1 << 31
    assert int(slots.max()) < geometry.slots <= 1 << 31
    assert int(table.raw.max()) == len(slots)
    layout = edge.config.system.layout(geometry, edge.config.buckets[0])
    pools = [field.elements * 4 for field in layout if field.name.endswith("kv_pool")]
    assert len(pools) == 2
    assert edge.device_bytes == 2 * 2 * sum(pools) + 4 * pools[0]
    assert edge.device_bytes < 110 << 30, "an H200 has the room"


def test_large_pools_are_offered_where_there_is_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    edge, what = pools_edge(), "pools of more than 2**31 words a rank"
    assert why_not_here(edge, CPU) == f"{what}: on a CUDA device only, for they take up to 96 GiB"
    for free, why in ((139, None), (80, f"{what}: needs 96 GiB of device memory, 80 GiB are free")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free << 30, 139 << 30))
        assert why_not_here(edge, torch.device("cuda", 0)) == why
    for field in ("first_page", "dcp_size", "context"):
        kinds = {
            edge.kind
            for edge in edges(get_system("dcp"), get_system("dcp").geometry("tiny"), seed=0, fixed=frozenset({field}))
        }
        assert EdgeKind.POOLS not in kinds


@pytest.fixture
def small_pools(monkeypatch: pytest.MonkeyPatch) -> int:
    """The word from which 32 bits no longer reach, so that such pools fit a test."""
    monkeypatch.setattr(edges_module, "POOL_WORDS", 1 << 13)
    monkeypatch.setattr(edges_module, "BATCH_CONTEXT", 64)
    return 1 << 13


@pytest.mark.parametrize("wraps", [False, True])
def test_a_row_of_a_pool_whose_offset_wraps_is_found(small_pools: int, wraps: bool) -> None:
    class Wraps(Dcp):
        def _write(self, place: Place) -> None:
            locations, pool = self._inputs.out_cache_loc, self._of(place, "kv_pool")
            rows = locations // place.size
            mine = (locations % place.size == place.rank) & (locations > 0) & (rows * pool.shape[1] < small_pools)
            kept = torch.where(mine[:, None], self._inputs.kv_rows, pool[rows])
            pool.index_copy_(0, rows, kept)

    config = dataclasses.replace(pools_edge("tiny").config, rounds=1)
    run = run_of(config, Wraps if wraps else None)
    fields = {"rank0_kv_pool", "rank1_kv_pool"} if wraps else set()
    assert {finding.field for finding in run.findings} == fields
    assert {finding.diagnosis for finding in run.findings} <= {Diagnosis.NEVER_WRITTEN}


def test_a_batch_wider_than_the_requests_has_pads() -> None:
    """As the widest tables need it: their requests would need more slots than there are."""
    config = Config(system=get_system("decode"), geometry=small(request_rows=5), buckets=(12,), rounds=3, seed=0)
    (table,) = config.chunks()
    assert table.raw.tolist() == [4, 4, 4]
    assert run_of(config).counts.rounds_checked == 3


def test_what_a_run_settles_itself_is_not_overridden() -> None:
    system, geometry = get_system("decode"), Geometry.resolve("tiny")
    notes = [edge.config.note for edge in edges(system, geometry, seed=0, fixed=frozenset({"table_view"}))]
    assert notes == [
        "the largest batch",
        "requests of a million tokens",
        "request rows up to 2**31 elements apart",
        "tables of 2049 x 1048576, more than 2**31 elements",
    ]
    notes = [edge.config.note for edge in edges(system, geometry, seed=0, fixed=frozenset({"context"}))]
    assert notes == ["tables with a gap behind each row", "request rows up to 2**31 elements apart"]


def empty_edge(system: str) -> Edge:
    geometry = small(system, indexer=True, topk=64)
    *others, last = edges(get_system(system), geometry, seed=0, fixed=frozenset())
    assert EdgeKind.EMPTY not in {edge.kind for edge in others}
    return last


@pytest.mark.parametrize("system", EMPTY_SYSTEMS)
def test_our_own_pipelines_survive_a_batch_that_is_empty_throughout(system: str) -> None:
    edge = empty_edge(system)
    assert edge.kind is EdgeKind.EMPTY
    assert edge.config.name.endswith("every length 0")
    run = run_of(edge.config)
    assert [finding.sentence for finding in run.findings] == []
    assert run.counts.rounds_checked == 1


def test_a_batch_that_is_empty_throughout_is_said_of_a_lost_device(tmp_path: Path) -> None:
    class Lost(EagerDecode):
        def before_replay(self) -> None:
            if not bool(self.inputs.seq_lens.any()):
                raise DeviceLost("cuda:0 reports a sticky error")

    config = empty_edge("decode").config
    run = new_result("decode", Lost, backend())
    says = "sticky error; round 0 is 32 requests of length 0: .* is undefined, .*contract 3.6.*; the rounds up to then"
    with pytest.raises(DeviceLost, match=says):
        Runner(backend=backend(), folder=tmp_path).matrix([config], Lost, run)
    (path,) = tmp_path.glob("*.json")
    case = read_case(path)
    assert (case.rounds, case.buckets) == (config.script, (32,))
    assert "contract 3.6" in (case.found or "")


def test_a_verify_step_of_empty_requests_is_none_of_these() -> None:
    """Its rows count the draft, so that none has length 0."""
    geometry = small(indexer=True, topk=64, draft_tokens=4)
    assert undefined_when_empty(SYSTEMS["draft_extend"], geometry, 32)
    assert not undefined_when_empty(SYSTEMS["target_verify"], geometry, 32)


def test_nothing_is_said_of_it_where_something_else_took_the_device_down() -> None:
    class Lost(EagerDecode):
        def before_replay(self) -> None:
            if bool((self.inputs.seq_lens == 2).any()):
                raise DeviceLost("cuda:0 reports a sticky error")

    config = empty_edge("decode").config
    assert config.script is not None
    (only,) = config.script
    other = dataclasses.replace(config, script=(dataclasses.replace(only, seq_lens=(2,) + (0,) * 31),))
    with pytest.raises(DeviceLost, match=r"^cuda:0 reports a sticky error$"):
        run_of(other, Lost)


@pytest.mark.parametrize(
    "system, changes",
    [
        ("target_verify", {}),
        ("decode", {"indexer": False}),
        ("decode", {"schedule": "V3"}),
        ("decode", {"pool_size": 4}),
    ],
)
def test_where_every_batch_has_a_schedule_no_empty_one_is_special(system: str, changes: dict[str, Any]) -> None:
    geometry = small(**{"indexer": True, "topk": 64, **changes})
    found = edges(get_system(system), geometry, seed=0, fixed=frozenset())
    assert EdgeKind.EMPTY not in {edge.kind for edge in found}


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_a_door_to_offsets_that_32_bits_do_not_hold(system: str) -> None:
    kinds = [edge.kind for edge in edges_of(system)]
    assert {EdgeKind.BATCH, EdgeKind.LONG, EdgeKind.FAR} <= set(kinds)
    assert (EdgeKind.WIDE in kinds) == (system != "dcp"), "whose tables hold one page of each rank only"


def test_the_widest_table_of_padded_begins_its_last_request_beyond_element_2_31() -> None:
    (edge,) = (edge for edge in edges_of("padded") if edge.kind is EdgeKind.WIDE)
    config = edge.config
    layout = config.system.layout(config.geometry, config.buckets[0])
    widest = max(layout, key=lambda field: field.columns)
    assert widest.elements - config.geometry.draft_tokens * widest.columns >= 1 << 31
    (table,) = config.chunks()
    assert (table.raw == config.buckets[0]).all()


def test_ranks_share_the_largest_batch() -> None:
    ranks = {edge.kind: edge.config.geometry.dcp_size for edge in edges_of("dcp")}
    assert ranks == {EdgeKind.BATCH: 4, EdgeKind.LONG: 8, EdgeKind.FAR: 2, EdgeKind.POOLS: 2}
    fixed = get_system("dcp").geometry("deepseek_v32", {"dcp_size": 3})
    found = edges(get_system("dcp"), fixed, seed=0, fixed=frozenset({"dcp_size"}))
    assert {edge.config.geometry.dcp_size for edge in found} == {3}


def test_what_a_machine_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gap, batch, long, far, wide = edges(get_system("decode"), Geometry.resolve("tiny"), seed=0, fixed=frozenset())
    assert why_not_here(gap, CPU) is None
    assert [why_not_here(edge, CPU) for edge in (batch, long, far, wide)] == NOT_ON_A_CPU
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 139 << 30))
    why = why_not_here(wide, torch.device("cuda", 0))
    assert why is not None
    assert why.endswith("needs 72 GiB of device memory, 8 GiB are free")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (139 << 30, 139 << 30))
    assert why_not_here(wide, torch.device("cuda", 0)) is None


@on_cpu
def test_the_command_runs_what_it_can_and_lists_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["replay", "--system", "decode", "--edges", "--batch", "1", "--rounds", "1", "--preset", "tiny"]
    monkeypatch.setattr(sys, "argv", ["dsa-verify", *arguments, "--device", "cpu", "--json", "r.json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    result = json.loads(Path("r.json").read_text())
    assert (result["configs"], result["rounds_checked"]) == (2, 1 + 3)
    assert result["not_run"] == NOT_ON_A_CPU
    assert f"  not run: {result['not_run'][0]}\n" in capsys.readouterr().out


@on_cpu
def test_edges_have_no_effect_with_a_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.json").write_text(
        json.dumps({"schema": 1, "system": "decode", "preset": "tiny", "buckets": [1], "rounds": []})
    )
    monkeypatch.setattr(sys, "argv", ["dsa-verify", "replay", "c.json", "--edges", "--device", "cpu"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert (stop.value.code, "--edges: has no effect with a CASE" in capsys.readouterr().err) == (2, True)
