"""EngineForm: what an engine holds otherwise than the contract on purpose is right, and nothing else is."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import DEVICE, EagerDecode, decode_round, setup_of, small

from dsa_verify.base.errors import UsageError
from dsa_verify.buffers.region import Control
from dsa_verify.contract.engine_form import NO_DIFFERENCES, EngineForm, PadRows, engine_form
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.subject import Inputs
from dsa_verify.judge.pad_rows import normalised_pad_rows
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.adapters.vllm.basic import DraftExtend
from dsa_verify.systems.basic import decode, target_verify

ROUNDS = [decode_round(4, 9, 20), decode_round(4, 3, 4, 5, 6), decode_round(4, 7), decode_round(4)]


class ZeroPads(EagerDecode):
    """As some engines do: pad rows have no length. `pad` is what they are given."""

    pad = 0

    def in_graph(self) -> None:
        super().in_graph()
        lengths = self.buffers["cache_seqlens_int32"]
        lengths.copy_(torch.where(self.inputs.req_pool_indices == 0, self.pad, lengths))

    def allocate(self, geometry, inputs, buffers) -> None:  # type: ignore[no-untyped-def]
        super().allocate(geometry, inputs, buffers)
        self.inputs, self.buffers = inputs, buffers

    @staticmethod
    def engine_form() -> EngineForm:
        return EngineForm(pads={"cache_seqlens_int32": PadRows(value=0)})


class OtherPads(ZeroPads):
    pad = 7


def findings_of(subject: type) -> list[Finding]:
    setup, counts = setup_of(subject, buckets=(4,)), Counts()
    found = verify_rounds(setup, [setup.table(ROUNDS)], counts, folder=None)
    assert counts.rounds_checked == len(ROUNDS)
    return found


def test_pad_rows_of_the_engines_own_value_are_right() -> None:
    assert findings_of(ZeroPads) == []


def test_pad_rows_of_another_value_are_not() -> None:
    found = findings_of(OtherPads)
    assert [(each.field, each.got, each.want, each.round) for each in found] == [("cache_seqlens_int32", 7, 1, 0)]


def test_without_a_form_of_its_own_a_subject_has_the_contracts() -> None:
    assert engine_form(EagerDecode) is NO_DIFFERENCES

    class Undeclared(ZeroPads):
        engine_form = None

    found = findings_of(Undeclared)
    assert [(each.field, each.got) for each in found] == [("cache_seqlens_int32", 0)]
    assert found[0].diagnosis is not Diagnosis.FLAKY


def test_a_form_under_its_former_name_is_heeded() -> None:
    form = EngineForm(pads={"seq_lens": PadRows(value=0)})

    class Former(EagerDecode):
        own_form = staticmethod(lambda: form)

    assert engine_form(Former) is form


def test_a_form_is_refused_for_rows_that_stand_for_no_request() -> None:
    form = EngineForm(pads={"cu_seqlens_k": PadRows(value=0)})
    layout = decode(small(), 2)
    with pytest.raises(UsageError, match="the rows of cu_seqlens_k stand for no request"):
        normalised_pad_rows(form, layout, {}, {}, None, None)  # type: ignore[arg-type]


def test_one_buffer_for_all_batches_and_lengths_of_their_own_change_the_layout() -> None:
    layout = decode(small(), 2)
    own = EngineForm(shared=True, aliases={"dsa_seqlens_expanded": None}).layout(layout)
    assert all(field.shared for field in own)
    assert not all(field.shared for field in layout)
    assert (layout["dsa_seqlens_expanded"].alias, own["dsa_seqlens_expanded"].alias) == ("cache_seqlens_int32", None)
    assert own["paged_mqa_ctx_lens_2d"].alias == layout["paged_mqa_ctx_lens_2d"].alias


# The rows themselves -------------------------------------------------------------------------------------------------


def int32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def shown(
    layout: Layout, form: EngineForm, name: str, got: torch.Tensor, want: torch.Tensor, requests: list[int]
) -> object:
    """What the judge is shown of `got` where batch row b, of two token rows, is that of `requests[b]`."""
    inputs = Inputs.of(
        {
            "seq_lens": int32(*(4 for _ in requests)),
            "req_pool_indices": int32(*requests).long(),
            "req_to_token": int32([0]),
            "extend_lens": int32(*(5 if each == 3 else 2 for each in requests)),
        }
    )
    owners = int32(*(row for row in range(len(requests)) for _ in range(2)))
    lengths = int32(*(0 for _ in requests))
    control = Control(live_tokens=lengths, live_candidates=lengths, token_rows=int32(4), row_request=owners)
    rows = normalised_pad_rows(form, layout, {name: got}, {name: want}, inputs, control)[name]
    rows.update()
    return rows.copy.tolist()


TABLE = EngineForm(pads={"real_page_table": PadRows(value=0, columns=1)})


def tables(*first: int) -> torch.Tensor:
    """[4, pages] with these first columns and 8 beyond."""
    pages = target_verify(small(draft_tokens=2), 2)["real_page_table"].columns
    return int32(*([value] + [8] * (pages - 1) for value in first))


def test_only_the_named_columns_of_a_pad_row_must_hold_the_value() -> None:
    layout = target_verify(small(draft_tokens=2), 2)
    want = tables(5, 6)[:, :].clone()  # one row a request, as oracles keep them
    got = tables(5, 5, 0, 3)
    result = shown(layout, TABLE, "real_page_table", got, want, [1, 0])
    assert result[:3] == [got[0].tolist(), got[1].tolist(), want[1].tolist()]  # type: ignore[index]
    assert result[3][0] == 3, "a pad row that is not reset stays wrong"  # type: ignore[index]
    assert result[3][1:] == want[1, 1:].tolist()  # type: ignore[index]


def test_live_rows_are_never_taken_for_pad_rows() -> None:
    layout = target_verify(small(draft_tokens=2), 2)
    form = EngineForm(pads={"dsa_seqlens_expanded": PadRows(value=0)})
    want = int32(5, 6, 2, 3)
    assert shown(layout, form, "dsa_seqlens_expanded", int32(0, 6, 0, 0), want, [1, 0]) == [0, 6, 2, 3]


def test_an_idle_round_is_not_judged() -> None:
    layout = target_verify(small(draft_tokens=2), 2)
    form = EngineForm(pads={"dsa_seqlens_expanded": PadRows(value=0)})
    want = int32(2, 3, 2, 3)
    assert shown(layout, form, "dsa_seqlens_expanded", int32(1, 9, 9, 9), want, [0, 0]) == [2, 3, 2, 3]


def test_a_request_that_the_engine_cannot_be_given_is_not_judged() -> None:
    layout = target_verify(small(draft_tokens=2), 2)
    want = int32(0, 0, 2, 3)
    form = dataclasses.replace(DraftExtend.engine_form(), pads={"dsa_seqlens_expanded": PadRows(value=0)})
    got = int32(-1, 0, 9, 3)
    assert shown(layout, form, "dsa_seqlens_expanded", got, want, [3, 1]) == [0, 0, 9, 3]


def test_pad_rows_beside_no_request_that_the_engine_can_be_given_are_not_judged() -> None:
    layout = target_verify(small(draft_tokens=2), 2)
    want = int32(0, 0, 2, 3)
    form = dataclasses.replace(DraftExtend.engine_form(), pads={"dsa_seqlens_expanded": PadRows(value=0)})
    got = int32(-1, 0, 9, 9)
    assert shown(layout, form, "dsa_seqlens_expanded", got, want, [3, 0]) == [0, 0, 2, 3]
    assert shown(layout, form, "dsa_seqlens_expanded", got, want, [1, 0]) == [-1, 0, 9, 9]
