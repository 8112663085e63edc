"""vLLM's own code replayed beside the oracles, where vLLM can be imported; and that what went wrong would be seen."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from support import SMALL, backend

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.adapters.traced import SHOWN_DIGITS
from dsa_verify.subjects.adapters.vllm import SUBJECTS, runner, standins, wheel
from dsa_verify.subjects.adapters.vllm.draft_decode import SPECULATOR
from dsa_verify.systems.catalogue import SYSTEMS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vllm, installed or laid out (docs/engines-vllm.md)"
)
BUCKETS = (4, 2)
# Full and padded, growing and shrinking, moved to other batch rows and pages, alternating buckets, idle.
ROUNDS = [
    Round(bucket=4, seq_lens=(9, 37, 1, 4), requests=(1, 2, 3, 4)),
    Round(bucket=4, seq_lens=(10, 3), requests=(1, 2), poison="plausible"),
    Round(bucket=2, seq_lens=(8,), requests=(5,), remap=(5,)),
    Round(bucket=4, seq_lens=(5, 11, 12), requests=(3, 1, 8), remap=(1, 8), poison="stale", twice=True),
    Round(bucket=4, seq_lens=(), requests=()),
    Round(bucket=2, seq_lens=(13, 7), requests=(2, 2), poison="plausible"),
    Round(bucket=4, seq_lens=(36, 35, 34, 33), requests=(4, 3, 2, 1), remap=(4,)),
]
RAGGED = [(3, 1, 2, 3), (1, 3), (2,), (3, 2, 1), (), (2, 2), (1, 1, 1, 1)]


def rounds_of(system: str) -> list[Round]:
    if system != "draft_extend":
        return ROUNDS
    static = [each.replace(extend_lens=tuple(3 for _ in each.seq_lens)) for each in ROUNDS]
    return static + [each.replace(extend_lens=lens) for each, lens in zip(ROUNDS, RAGGED, strict=True)]


def findings_of(name: str, rounds: list[Round] | None = None, **changes: object) -> list[Finding]:
    system = SUBJECTS[name].system
    drafts = 1 if system == "decode" else 3
    geometry = SYSTEMS[system].geometry("tiny", {**SMALL, "draft_tokens": drafts, **changes})
    rounds = rounds or rounds_of(system)
    setup, counts = ReplaySetup.make(SYSTEMS[system], geometry, BUCKETS, 0, f"vllm:{name}", None, backend()), Counts()
    found = verify_rounds(setup, [setup.table(rounds)], counts, folder=None)
    assert found or counts.rounds_checked == len(rounds)
    return found


@pytest.mark.parametrize("name", SUBJECTS)
def test_vllm_agrees_with_the_oracles(name: str) -> None:
    assert findings_of(name) == []


@pytest.mark.parametrize("view, dtype", [("strided", "int32"), ("offset", "int64")])
def test_vllm_agrees_whatever_the_form_of_its_inputs(view: str, dtype: str) -> None:
    assert findings_of("target_verify_flat", ROUNDS[:4], input_view=view, index_dtype=dtype) == []


def test_vllm_agrees_where_pages_have_one_token_and_there_is_no_wide_table() -> None:
    assert findings_of("target_verify_flat", ROUNDS[:4], page_size=1) == []
    assert findings_of("decode", ROUNDS[:4], wide_table=False) == []


def test_a_table_wider_than_vllms_is_refused() -> None:
    with pytest.raises(UsageError, match=r"table_width: vLLM's block table has .* columns.*leave table_width out"):
        findings_of("decode", ROUNDS[:1], table_width=4096)
    assert findings_of("decode", ROUNDS[:1], table_width=3) == []


def test_rows_of_requests_where_vllm_has_them() -> None:
    """Two query tokens a request: vLLM's kernels take them without flattening, on a CPU too."""
    assert not runner.decided_to_flatten(1)
    assert findings_of("target_verify", draft_tokens=2) == []


@pytest.mark.parametrize("name", ["draft_extend", "draft_extend_varlen", "draft_extend_adaptive"])
def test_requests_of_which_none_is_extended_are_no_step_of_vllms(name: str) -> None:
    none = [each.replace(extend_lens=(0,) * len(each.seq_lens)) for each in ROUNDS]
    some = rounds_of("draft_extend")[-len(ROUNDS) :]
    assert findings_of(name, [each for pair in zip(some, none, strict=True) for each in pair]) == []


def test_a_result_says_which_files_it_judged() -> None:
    setup = ReplaySetup.make(SYSTEMS["decode"], Geometry.resolve("tiny"), (2,), 0, "vllm:decode", None, backend())
    found = setup.factory.provenance()  # type: ignore[attr-defined]
    assert found["vllm"] == wheel.version()
    assert all(len(found[module]) == SHOWN_DIGITS for module in runner.MODULES)
    assert (found["stand_ins"] == "none") == (not standins.installed())


# What is wrong is seen -----------------------------------------------------------------------------------------------


def spoiled(module: str, name: str, spoil: Callable[..., Any]) -> Any:
    """vLLM's function `name` with `spoil(original, *its arguments)` instead."""
    original = wheel.attribute(module, name)
    return mock.patch.object(wheel.require(module), name, lambda *args, **rest: spoil(original, *args, **rest))


def test_lengths_of_pad_rows_that_are_left_as_they_were_are_seen() -> None:
    def keep_tail(original: Any, rows: Any, starts: Any, computed: Any, positions: Any, lengths: torch.Tensor) -> None:
        kept = lengths.clone()
        original(rows, starts, computed, positions, lengths)
        lengths[len(rows) :].copy_(kept[len(rows) :])

    with spoiled(runner.BATCH, "prepare_pos_seq_lens", keep_tail):
        found = findings_of("decode", ROUNDS[:2])
    assert [(each.field, each.diagnosis) for each in found[:1]] == [("cache_seqlens_int32", Diagnosis.NEVER_WRITTEN)]


def test_block_tables_of_the_batch_before_are_seen() -> None:
    gather = wheel.attribute(runner.BLOCK_TABLES, "BlockTables").gather_block_tables
    calls: list[int] = []

    def skip_the_fourth(self: Any, rows: torch.Tensor, num_reqs_padded: int, **rest: Any) -> Any:
        calls.append(1)
        if len(calls) % 4:
            return gather(self, rows, num_reqs_padded=num_reqs_padded, **rest)
        return tuple(table[:num_reqs_padded] for table in self.input_block_tables)

    with mock.patch.object(wheel.require(runner.BLOCK_TABLES).BlockTables, "gather_block_tables", skip_the_fourth):
        found = findings_of("target_verify_flat")
    assert "page_table_1" in {each.field for each in found}


def test_metadata_in_fresh_buffers_is_seen() -> None:
    """As vLLM once had it: the graph keeps reading what was captured."""
    builder = wheel.attribute(runner.INDEXER, "DeepseekV32IndexerMetadataBuilder")
    build = builder.build

    def build_afresh(self: Any, *args: Any, **rest: Any) -> Any:
        made = build(self, *args, **rest)
        made.decode.seq_lens = made.decode.seq_lens.clone()
        return made

    with mock.patch.object(builder, "build", build_afresh):
        found = findings_of("target_verify_flat", ROUNDS[:3])
    assert found
    assert {each.diagnosis for each in found} <= {Diagnosis.BUFFER_REPLACED, Diagnosis.ALLOCATES}


def test_a_draft_step_that_does_not_advance_is_seen() -> None:
    def stand_still(original: Any, *args: Any) -> None:
        original(*args, advance_draft_positions=False)

    with spoiled(SPECULATOR, "prepare_decode_inputs", stand_still):
        found = findings_of("draft_decode", ROUNDS[:1])
    assert {each.field for each in found} >= {"cache_seqlens_int32", "dsa_seqlens_expanded"}
    assert all(each.got == each.want - 1 for each in found if each.field == "cache_seqlens_int32")  # type: ignore[operator]


def test_host_lengths_are_not_what_adaptive_verification_goes_by() -> None:
    """Were the even split of the host taken for the device's, the rows of requests would be others."""
    step = runner.Runner.step

    def believe_the_host(self: Any, requests: Any, batch: int) -> Any:
        even = runner._evenly(sum(each.query for each in requests), len(requests)) if requests else []
        shifted = [
            runner.Request(row=each.row, computed=each.computed + each.query - many, query=many, blocks=each.blocks)
            for each, many in zip(requests, even, strict=True)
        ]
        return step(self, shifted, batch)

    with mock.patch.object(runner.Runner, "step", believe_the_host):
        found = findings_of("draft_extend_adaptive")
    assert "dsa_seqlens_expanded" in {each.field for each in found}
