"""What the consumer of a field asks of its memory: own outputs that do not lie so are a finding, before any replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from support import DEVICE, backend, decode_round

from dsa_verify.buffers.arena import TORCH_DTYPES
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Field, Layout
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.judge.output_check import wrong_outputs
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.pipelines.basic import Decode
from dsa_verify.systems.catalogue import SYSTEMS

GEOMETRY = {"draft_tokens": 3, "architecture": 100, "schedule": "tiny_runs"}
SYSTEMS_WITH_INDEXER = ("decode", "target_verify", "draft_extend", "ragged_verify")
CASES = [(system, preset) for system in SYSTEMS_WITH_INDEXER for preset in ("tiny_indexer", "tiny_pool")]
CONTIGUOUS = {
    *("cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k"),
    *("dsa_cache_seqlens_int32", "dsa_cu_seqlens_q", "dsa_cu_seqlens_k"),
    *("paged_mqa_ctx_lens_2d", "paged_mqa_schedule_metadata"),
}
POOLED = {"write_plan_pool_seqlens_per_q", "write_plan_pool_schedule_metadata"}
TABLES = {"page_table_1", "real_page_table", "pooled_real_page_table"}


def layout_of(system: str, preset: str = "tiny_indexer", **changes: object) -> Layout:
    if not SYSTEMS[system].drafts:
        changes["draft_tokens"] = 1
    return SYSTEMS[system].layout(SYSTEMS[system].geometry(preset, {**GEOMETRY, **changes}), 4)


def own_outputs(layout: Layout, spoil: Callable[[Field], torch.Tensor | None] = lambda field: None) -> Mapping:
    """Tensors as an engine allocates them, aliases as views; `spoil` gives others in place of some."""
    made: dict[str, torch.Tensor] = {}
    for field in sorted(layout, key=lambda field: field.alias is not None):
        plain = torch.zeros(field.shape, dtype=TORCH_DTYPES[field.dtype], device=DEVICE)
        owned = plain if field.alias is None else made[field.alias].view(field.shape)
        other = spoil(field)
        made[field.name] = owned if other is None else other
    return made


def gapped(field: Field) -> torch.Tensor:
    """Whole rows, or single elements of one dimension, further apart than they are wide."""
    wide = torch.zeros((field.rows, field.columns + 5), dtype=TORCH_DTYPES[field.dtype], device=DEVICE)
    return wide[:, : field.columns] if len(field.shape) > 1 else wide[:, 0]


@pytest.mark.parametrize("system, preset", [case for case in CASES if case != ("ragged_verify", "tiny_pool")])
def test_what_consumers_need_contiguous_is_refused_otherwise(system: str, preset: str):
    """Each field alone. Tables may have rows further apart: their consumers are handed the stride."""
    layout = layout_of(system, preset)
    assert wrong_outputs(layout, own_outputs(layout)) == []
    asking = {field.name for field in layout if field.memory is not None}
    pooled = {"pooled_cache_seqlens_int32", "pooled_paged_mqa_schedule_metadata"} if system == "decode" else POOLED
    assert asking == (CONTIGUOUS | pooled if preset == "tiny_pool" else CONTIGUOUS)
    for field in layout:
        if field.alias is not None:
            continue
        spoiled = own_outputs(layout, lambda each, name=field.name: gapped(each) if each.name == name else None)
        wrong = [text for text in wrong_outputs(layout, spoiled) if text.startswith(f"{field.name} ")]
        if field.memory is None:
            assert wrong == []
            continue
        stride = f"has strides {list(spoiled[field.name].stride())}"
        (text,) = wrong
        assert text.startswith(f"{field.name} {stride}; {field.memory.consumer} needs it contiguous, with strides ")
        assert text.endswith(f"(contract {field.section}; {field.memory.source})")
    assert {field.name for field in layout if field.column_step and field.name in TABLES}.isdisjoint(asking)


def test_columns_of_a_table_are_dense():
    layout = layout_of("target_verify")
    for name in ("page_table_1", "real_page_table"):
        spoiled = own_outputs(
            layout,
            lambda field, name=name: (
                torch.zeros((field.rows, 2 * field.columns), dtype=torch.int32, device=DEVICE)[:, ::2]
                if field.name == name
                else None
            ),
        )
        (text,) = wrong_outputs(layout, spoiled)
        assert text == (
            f"{name} has strides {list(spoiled[name].stride())}; the elements of a row must be adjacent (contract 1.2)"
        )


def shifted(field: Field, words: int) -> torch.Tensor:
    """Contiguous, and `words` elements into an allocation."""
    return torch.zeros(field.elements + words, dtype=torch.int32, device=DEVICE)[words:].view(field.shape)


@pytest.mark.parametrize("words, beyond", [(1, 4), (2, 0), (3, 4)])
def test_rows_of_a_schedule_are_aligned_as_they_are_read(words: int, beyond: int):
    """Two words at once; nothing else is known to be read in larger pieces than its elements."""
    layout = layout_of("target_verify")
    spoiled = own_outputs(layout, lambda field: shifted(field, words) if field.alias is None else None)
    expected = [
        f"paged_mqa_schedule_metadata begins {beyond} bytes beyond a multiple of 8; DeepGEMM reads 8 bytes at once and "
        "needs an address that is one (contract 3; rows of 8 bytes, contiguous: contract 3.1 and 3.5)"
    ]
    assert wrong_outputs(layout, spoiled) == (expected if beyond else [])


def test_each_draft_step_is_looked_at():
    layout = layout_of("mtp")
    assert {field.memory is None for field in layout if field.name.endswith("_cu_seqlens_k")} == {False}
    spoiled = own_outputs(layout, lambda field: gapped(field) if field.name == "step2_cu_seqlens_k" else None)
    (text,) = wrong_outputs(layout, spoiled)
    assert text.startswith("step2_cu_seqlens_k has strides [6]; FlashAttention needs it contiguous, with strides [1] ")


class EveryOtherSum(Decode):
    """Right values, in every other element of a buffer of its own."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.own = {**buffers, "cu_seqlens_k": torch.stack((buffers["cu_seqlens_k"],) * 2, 1)[:, 0]}

    def in_graph(self) -> None:
        super().in_graph()
        self.own["cu_seqlens_k"].copy_(self._buffers["cu_seqlens_k"])

    def outputs(self) -> Mapping[str, torch.Tensor]:
        return self.own


def test_it_is_a_finding_of_a_run():
    geometry = Geometry.resolve("tiny", {"context": 37})
    setup = ReplaySetup.make(SYSTEMS["decode"], geometry, (4,), 0, EveryOtherSum, None, backend())
    (finding,) = verify_rounds(setup, [setup.table([decode_round(4, 5, 6, 7, 8)])], Counts(), folder=None)
    assert finding.diagnosis is Diagnosis.WRONG_OUTPUTS
    assert finding.sentence == (
        "wrong outputs: bucket 4: cu_seqlens_k has strides [2]; FlashAttention needs it contiguous, with strides [1] "
        "(contract 1.1; CHECK_CONTIGUOUS in its hopper/flash_api.cpp, and so in FlashMLA)"
    )
