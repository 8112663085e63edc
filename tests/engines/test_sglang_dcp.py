"""SGLang's functions of decode context parallelism as subjects: what the table says of them, what is refused, and that
the ordinary doors find each published defect and say in words what is wrong, shown with a small function that has the
same defect; with SGLang itself where it can be imported."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import DEVICE, backend

from dsa_verify.base.errors import STATUS_USAGE, UsageError
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.round import Round
from dsa_verify.contract.subject import load_attribute
from dsa_verify.contract.system import OWN_TABLES
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.runner import Runner, RunResult, new_result
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.adapters import sglang
from dsa_verify.subjects.adapters.sglang import dcp as adapter
from dsa_verify.subjects.adapters.sglang import wheel
from dsa_verify.systems.catalogue import OF_OTHERS, OF_THE_SUBJECT, SYSTEMS, resolve_geometry
from fuzz.reduce.shrink import shrink
from fuzz.reduce.trials import Signature

SYSTEM = SYSTEMS["dcp"]
SMALL = {"context": 37, "request_rows": 9, "topk": 8, "table_width": 40, "token_table_width": 40}
NAMES = [name for name, subject in sglang.SUBJECTS.items() if subject.system == "dcp"]
# Seed 8: one rank of two has a NaN where the other has a finite log-sum-exp. Request 3's slot lies in the pool twice.
ROUNDS = [Round(bucket=4, seq_lens=(9, 37, 17), requests=(3, 4, 5), seed=8)]
needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang cannot be imported")


def settings_of(name: str, **overrides: object) -> dict[str, Any]:
    return {**SMALL, **sglang.SUBJECTS[name].settings, **overrides}


def findings_of(name: str, rounds: list[Round] = ROUNDS, **overrides: object) -> dict[str, Finding]:
    """The findings of the subject, by field."""
    geometry = SYSTEM.geometry("tiny", settings_of(name, **overrides))
    setup = ReplaySetup.make(SYSTEM, geometry, (4,), 0, f"sglang:{name}", None, backend())
    findings = verify_rounds(setup, [setup.table(rounds)], Counts(), folder=None)
    return {finding.field or "": finding for finding in findings}


# The table -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_subject_says_what_it_covers(name: str) -> None:
    """No code of SGLang is needed to say so, and what is left out has a reason."""
    subject = sglang.SUBJECTS[name]
    factory = load_attribute(subject.reference)
    assert factory().name.startswith("sglang:dcp")
    layout = SYSTEM.layout(SYSTEM.geometry("tiny", settings_of(name)), 4)
    missing = factory.not_covered(layout, DEVICE)
    covered = [field.name for field in layout if field.name not in missing]
    assert covered
    assert all(missing.values())
    assert (not missing) is (name == "dcp")


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_subjects_ask_for_the_geometry_that_shows_their_limits(device_type: str) -> None:
    """Ids beyond float32's integers, the base of the MHA backends; what a run sets itself has the last word."""
    geometry, fixed = resolve_geometry(SYSTEM, "sglang:dcp_npu", device_type)
    assert geometry.first_page * geometry.replace(dcp_size=2).allocator_page > 1 << 24
    assert {"first_page", "dcp_size"} <= fixed
    assert resolve_geometry(SYSTEM, "sglang:dcp_mha_merge", device_type)[0].log_base == "e"
    views = [resolve_geometry(SYSTEM, f"sglang:{name}", device_type) for name in ("dcp_columns", "dcp_columns_far")]
    assert [(geometry.input_view, "input_view" in fixed) for geometry, fixed in views] == [
        ("strided", True),
        ("plain", True),  # whose table is its matter
    ]
    geometry, fixed = resolve_geometry(SYSTEM, "sglang:dcp_npu", device_type, settings={"first_page": 3, "topk": 9})
    assert (geometry.first_page, geometry.dcp_size, geometry.topk) == (3, 2, 9)
    assert fixed == {"first_page", "dcp_size", "topk", OWN_TABLES, OF_OTHERS, *OF_THE_SUBJECT}
    assert resolve_geometry(SYSTEM, None, device_type)[1] == frozenset()


def test_the_matrix_does_not_turn_over_what_a_subject_asks_for() -> None:
    geometry, fixed = resolve_geometry(SYSTEM, "sglang:dcp_mha_merge", "cpu", settings=SMALL)
    configs = diagnostic_matrix(SYSTEM, geometry, batches=[1, 2, 3], fixed=fixed)
    assert {(config.geometry.dcp_size, config.geometry.log_base) for config in configs} == {(2, "e")}


def test_what_the_functions_do_not_take_is_refused() -> None:
    with pytest.raises(UsageError, match="dcp_block: 4 is not 1"):
        adapter.Dcp().allocate(SYSTEM.geometry("tiny", {"dcp_block": 4}), None, None)  # type: ignore[arg-type]
    narrow = SYSTEM.geometry("tiny", {"table_width": 7})
    for subject in (adapter.Dcp(), adapter.Columns(), adapter.FarColumns()):
        with pytest.raises(UsageError, match=r"table_width: 7 columns are fewer than the .* tokens of a request"):
            subject.allocate(narrow, None, None)  # type: ignore[arg-type]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang can be imported")
def test_without_sglang_a_run_says_how_to_get_it() -> None:
    with pytest.raises(UsageError, match="pip install sglang") as refused:
        new_result("dcp", "sglang:dcp_nope", backend())
    assert refused.value.status == STATUS_USAGE


# The doors, each with a small function that has the defect -----------------------------------------------------------


class Double:
    """In SGLang's place: functions of the same names and arguments, in a few torch operations. Those of a published
    defect have it, the others are right."""

    def __init__(self) -> None:
        self._rank, self._size = 0, 1

    def attribute(self, module: str, name: str, device: torch.device | None = None) -> Any:
        return getattr(self, name)

    def require(self, module: str) -> Any:
        return SimpleNamespace(current_platform=None)

    def provenance(self, *modules: str) -> dict[str, str]:
        return {}

    def get_parallel(self) -> Double:
        return self

    @contextlib.contextmanager
    def override(self, attn_dcp_size: int, attn_dcp_rank: int) -> Iterator[None]:
        self._rank, self._size = attn_dcp_rank, attn_dcp_size
        yield

    def set_mla_kv_buffer_dcp_sharded_triton(
        self, pool: torch.Tensor, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor | None
    ) -> None:
        if rope is None:  # every row, at the slot itself
            reach = pool.as_strided((int(pool.untyped_storage().nbytes() // 16), 4), (4, 1))
            reach.index_copy_(0, loc, nope)
            return
        mine = (loc > 0) & (loc % self._size == self._rank)
        row = torch.where(mine, loc // self._size, 0)
        pool.index_copy_(0, row, torch.where(mine[:, None], torch.cat([nope, rope], 1), pool[row]))

    def set_mla_kv_buffer_naive(
        self, pool: torch.Tensor, loc: torch.Tensor, nope: torch.Tensor, rope: None, **place: int
    ) -> None:
        mine = loc % place["dcp_world_size"] == place["dcp_rank"]
        pool[loc[mine] // place["dcp_world_size"]] = nope[mine]

    def remap_dcp_sparse_indices(
        self, ids: torch.Tensor, size: int, rank: int, *, interleave_size: int
    ) -> torch.Tensor:
        single = ids.float()
        mine = (single >= 0) & (single % size == rank)
        kept = torch.where(mine, (single / size).floor(), -1).int()
        return kept.gather(1, torch.argsort((~mine).int(), dim=1, stable=True))

    def transform_index_page_table_decode(self, page_table: torch.Tensor, topk_indices: torch.Tensor) -> torch.Tensor:
        """Positions as if they lay densely where there are 2048; rows by a product that wraps at 2**31."""
        rows, width = topk_indices.shape
        start, stride = page_table.storage_offset(), page_table.stride(0)
        whole = page_table.as_strided((page_table.untyped_storage().nbytes() // 4,), (1,), 0)
        positions = topk_indices.as_strided((rows, width), (width, 1)) if width == 2048 else topk_indices
        row = (torch.arange(rows, device=positions.device) * stride + (1 << 31)) % (1 << 32) - (1 << 31)
        return torch.where(positions < 0, -1, whole[start + row[:, None] + positions.clamp(min=0)])

    def cp_lse_ag_out_rs_mha(
        self, out: torch.Tensor, lse: torch.Tensor, group: Any, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        everyone = group.all_gather(lse, dim=0).view(group.world_size, *lse.shape)
        whole = everyone.logsumexp(0)
        merged = group.all_reduce(out * (lse - whole).exp().nan_to_num(0.0, 0.0, 0.0)[..., None])
        share = whole.shape[1] // group.world_size
        mine = slice(share * group.rank_in_group, share * (group.rank_in_group + 1))
        return merged[:, mine].contiguous(), whole[:, mine].contiguous()


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    double = Double()
    monkeypatch.setattr(adapter, "wheel", double)
    return double


@pytest.mark.slow
def test_nothing_is_found_where_nothing_is_wrong(double: Double) -> None:
    """The same functions, outside of what their defects need."""
    assert findings_of("dcp_rope", dcp_size=3, input_view="strided") == {}
    assert findings_of("dcp_nope_torch", [Round(bucket=4, seq_lens=(9, 37, 17, 5), requests=(3, 4, 5, 6))]) == {}
    assert findings_of("dcp_npu", first_page=1) == {}
    assert findings_of("dcp_columns_far_tiled", topk=8) == {}  # the last row is a pad row
    assert findings_of("dcp_columns", input_view="plain") == {}


def test_the_nope_write_is_found(double: Double) -> None:
    """Contract 8.2: whose the token is that lies there, and where the token is that does not."""
    found = findings_of("dcp_nope")
    assert set(found) == {"rank0_kv_pool", "rank1_kv_pool"}
    sentences = " ".join(finding.sentence for finding in found.values())
    assert "alone stores, at its row" in sentences
    assert "it was stored at the virtual slot itself (contract 8.2; 2 ranks)" in sentences
    assert "has not been stored at its row (contract 8.2; 2 ranks); it is at row" in sentences


def test_slot_0_of_the_torch_write_is_found(double: Double) -> None:
    """Owner and division are right. The slot of a request without a token is 0."""
    rounds = [Round(bucket=4, seq_lens=(9, 0, 17, 4), requests=(3, 4, 5, 6), seed=8)]
    found = findings_of("dcp_nope_torch", rounds)
    assert {field: finding.diagnosis for field, finding in found.items()} == {"rank0_kv_pool": Diagnosis.WRONG_OWNER}
    assert "slot 0 hold, which is reserved for padding" in found["rank0_kv_pool"].sentence


def test_ids_in_float32_are_found(double: Double) -> None:
    """Contract 8.3."""
    found = findings_of("dcp_npu")
    assert {finding.diagnosis for finding in found.values()} == {Diagnosis.WRONG_OWNER}
    for finding in found.values():
        assert "that is right for the ids in float32, which holds 33" in finding.sentence
        assert "which makes another rank its owner (contract 8.3)" in finding.sentence


def test_one_ranks_nan_is_found(double: Double) -> None:
    """Contract 8.7. Three ranks do not divide two heads."""
    found = findings_of("dcp_mha_merge", dcp_size=3)
    assert set(found) == {"merged_out", "merged_lse"}
    for finding in found.values():
        assert "counts as a rank that has nothing, and must not take the others' part" in finding.sentence


def test_a_32_bit_product_is_found(double: Double) -> None:
    """Contract 8.3: the last row of the batch is the one that begins beyond 2**31 entries."""
    rounds = [Round(bucket=4, seq_lens=(9, 37, 17, 5), requests=(3, 4, 5, 6), seed=8)]
    found = findings_of("dcp_columns_far_tiled", rounds, topk=8)["selected_slots"]
    assert found.place is not None
    assert found.place.startswith("selected_slots[3, 0] (batch row 3, request 6, length 5, entry 0)")
    assert found.sentence.endswith(
        "row 3 of the table begins at entry 2147483649, which 32 bits do not hold: this was read 2147483647 entries "
        "before the table begins"
    )


def test_strided_sources_are_found(double: Double) -> None:
    """Contract 8.3: positions that do not lie densely."""
    found = findings_of("dcp_columns")["selected_slots"]
    assert "that is position" in found.sentence
    assert "its first 4224 behind that of the row before" in found.sentence
    assert "read 1 and 2048 apart, as if they lay densely" in found.sentence


@pytest.mark.slow
def test_a_finding_shrinks_to_a_round(double: Double) -> None:
    geometry = SYSTEM.geometry("tiny", settings_of("dcp_npu"))
    setup = ReplaySetup.make(SYSTEM, geometry, (4,), 0, "sglang:dcp_npu", None, backend())
    rounds = [*ROUNDS * 3, Round(bucket=4, seq_lens=(30, 2), requests=(7, 8), seed=3)]
    finding = verify_rounds(setup, [setup.table(rounds)], Counts(), folder=None)[0]
    small = shrink(setup.scenario(rounds), Signature.of(finding), backend(), budget_s=20.0)
    assert len(small.scenario.rounds) == 1
    assert small.scenario.subject == "sglang:dcp_npu"


# SGLang itself -------------------------------------------------------------------------------------------------------


def matrix_of(name: str, batches: list[int]) -> RunResult:
    """As `dsa-verify replay --subject` does it, with a few rounds of the batches."""
    geometry, fixed = resolve_geometry(SYSTEM, f"sglang:{name}", DEVICE.type)
    configs = diagnostic_matrix(SYSTEM, geometry, rounds=6, batches=batches, fixed=fixed)
    run = new_result("dcp", f"sglang:{name}", backend())
    Runner(backend=backend(), folder=None).matrix(configs, f"sglang:{name}", run)
    return run


@needs_sglang
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("name", ["dcp", "dcp_rope", "dcp_combine", "dcp_gather"])
def test_what_is_right(name: str) -> None:
    run = matrix_of(name, [1, 4, 3])
    assert run.findings == []
    assert run.counts.rounds_checked == 18
    assert run.provenance["sglang"] == wheel.version()


DEFECTS = {
    "dcp_nope": "contract 8.2",
    "dcp_npu": "that is right for the ids in float32",
    "dcp_columns": "as if they lay densely",
    "dcp_columns_far": "which 32 bits do not hold",
    "dcp_columns_far_tiled": "which 32 bits do not hold",
    "dcp_columns_far_extend": "which 32 bits do not hold",
    "dcp_mha_merge": "must not take the others' part of the merge with it",
}


@needs_sglang
@pytest.mark.parametrize("name", DEFECTS)
def test_what_is_wrong(name: str) -> None:
    assert any(DEFECTS[name] in finding.sentence for finding in matrix_of(name, [4]).findings)


@needs_sglang
def test_the_torch_write_stores_slot_0() -> None:
    """Only where a request without a token is live."""
    rounds = [Round(bucket=4, seq_lens=(9, 0, 17, 4), requests=(3, 4, 5, 6), seed=8)]
    found = findings_of("dcp_nope_torch", rounds)
    assert set(found) == {"rank0_kv_pool"}
    assert "reserved for padding" in found["rank0_kv_pool"].sentence
