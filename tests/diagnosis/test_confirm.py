"""Confirm: what is said of subjects that are wrong in ways that look alike, from the subject to the sentence."""

from __future__ import annotations

import pytest
import torch
from support import EagerDecode, decode_round, setup_of, small

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.systems.catalogue import SYSTEMS

LENGTHS = "cache_seqlens_int32"
ROUNDS = [decode_round(4, 17, 5, 30), decode_round(4, 18, 6, 31)]


class Late(EagerDecode):
    """The lengths of the replay before."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.before = inputs.seq_lens.int()

    def in_graph(self) -> None:
        super().in_graph()
        self.out[LENGTHS].copy_(self.before)
        self.before.copy_(self.inputs.seq_lens)


class Frozen(Late):
    def in_graph(self) -> None:
        EagerDecode.in_graph(self)
        self.out[LENGTHS].copy_(self.before)


class WrittenAtWarmUp(Late):
    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.calls = 0

    def in_graph(self) -> None:
        kept = self.out[LENGTHS].clone()
        EagerDecode.in_graph(self)
        self.calls += 1
        if self.calls > 2:
            self.out[LENGTHS].copy_(kept)


class FloorsPages(EagerDecode):
    def in_graph(self) -> None:
        super().in_graph()
        size, pages = self.geometry.page_size, self.out["real_page_table"]
        column = torch.arange(pages.shape[1], device=pages.device)
        pages.masked_fill_(column >= (self.inputs.seq_lens // size)[:, None], 0)


class SaysTooMuch(Frozen):
    def explain(self, field: str, row: int, column: int, got: int, want: int) -> str:
        raise RuntimeError("no words for it")


def first(subject: type | None, rounds: list[Round] = ROUNDS, **rest: object) -> Finding:
    return confirm(setup_of(subject, **rest), rounds)[0]  # type: ignore[arg-type]


def test_one_replay_late_is_told_from_frozen_by_one_more_replay() -> None:
    late, frozen = first(Late), first(Frozen)
    assert late.diagnosis is Diagnosis.STALE
    assert late.sentence == (
        f"stale: {LENGTHS}[0] (batch row 0, request 1, length 17) is 1, must be 17: it is the value at capture, and "
        "right when the same inputs are replayed again: one replay late"
    )
    assert frozen.diagnosis is Diagnosis.FROZEN
    assert frozen.sentence.endswith(
        "is 1, must be 17: it is the value for the inputs at capture, also when the same inputs are replayed again: it "
        "is frozen at capture"
    )
    assert (frozen.got, frozen.want, frozen.round) == (1, 17, 0)


def test_what_no_replay_writes_is_not_frozen() -> None:
    finding = first(WrittenAtWarmUp, [decode_round(4, 17, 5, poison="stale")])
    assert finding.diagnosis is Diagnosis.NEVER_WRITTEN
    # On a GPU the harness's own graphs have poisoned the words once, so that they are not as at capture any more.
    ends = ("the next replay leaves the poison there: no replay writes it", "so it was never written at all")
    assert finding.sentence.endswith(ends)


def test_requests_of_the_round_before_are_stale() -> None:
    finding = first(EagerDecode, fault="stale_request_map")
    assert finding.diagnosis is Diagnosis.STALE
    assert finding.sentence.endswith("one replay late")


@pytest.mark.parametrize("lengths", [(17, 5, 30), (3, 5, 30), (3, 2, 1)])
def test_floor_for_ceiling_is_a_boundary(lengths: tuple[int, ...]) -> None:
    finding = first(FloorsPages, [decode_round(4, *lengths)])
    assert finding.field == "real_page_table"
    assert finding.diagnosis is Diagnosis.BOUNDARY
    assert finding.sentence.endswith("as floor for ceiling leaves it")


def test_a_pad_row_is_called_one() -> None:
    assert first(EagerDecode, fault="pad_rows_untouched").place == f"{LENGTHS}[3] (batch row 3, pad row)"


def test_a_subject_that_raises_while_it_explains_keeps_its_finding() -> None:
    finding = first(SaysTooMuch)
    assert finding.diagnosis is Diagnosis.FROZEN
    assert finding.sentence.endswith("frozen at capture; explain raised RuntimeError: no words for it")


# Planted faults ------------------------------------------------------------------------------------------------------


def dcp(fault: str) -> Finding:
    return first(None, [decode_round(2, 5)], system="dcp", fault=fault, geometry=small("dcp", dcp_size=2), buckets=(2,))


def test_mixed_logarithms_are_recognised() -> None:
    assert dcp("wrong_log_base").sentence.endswith("right value times ln 2: natural and base-2 logarithm mixed up")


def test_the_reserved_slot_is_called_that() -> None:
    assert dcp("writes_slot_0").sentence == (
        "wrong value: rank0_kv_pool[0, 0] (row 0 of the pool) is 7, must be 0: that is slot 0, the reserved one, which "
        "nothing may write (contract 8.2)"
    )


@pytest.mark.parametrize("mode, found", [("draft_extend", True), ("draft_block", False), ("decode", False)])
def test_a_window_is_unclamped_where_rows_are_shorter_than_the_draft(mode: str, found: bool) -> None:
    draft = {} if mode == "decode" else {"draft_tokens": 4}
    geometry = SYSTEMS["padded"].geometry("tiny_v4", {"padded_mode": mode, **draft})
    setup = setup_of(system="padded", fault="unclamped_window", geometry=geometry, buckets=(2,))
    findings = confirm(setup, [decode_round(2, 30)])
    assert bool(findings) is found
    if found:
        assert findings[0].diagnosis is Diagnosis.OUT_OF_RANGE
        assert findings[0].place == "swa_topk_lengths[4] (batch row 1, pad row, draft position 0)"


def test_a_fault_that_needs_an_indexer_names_a_preset_that_has_one() -> None:
    with pytest.raises(UsageError) as caught:
        setup_of(system="mtp", fault="stale_draft_steps", geometry=SYSTEMS["mtp"].geometry("tiny"))
    assert str(caught.value) == (
        "fault 'stale_draft_steps' needs an indexer (--preset tiny_pool) and draft_steps of 4 or more"
    )


# Rounds that are replayed twice --------------------------------------------------------------------------------------

TWICE = [decode_round(4, 17, 5, 30, twice=True)]
PLACE = f"{LENGTHS}[0] (batch row 0, request 1, length 17)"


class OneMore(EagerDecode):
    def in_graph(self) -> None:
        super().in_graph()
        self.out[LENGTHS].add_(1)


class AdvancesItsLengths(EagerDecode):
    """Right in the first replay, and in any other over the inputs that this one leaves."""

    def in_graph(self) -> None:
        super().in_graph()
        self.inputs.seq_lens.add_(1)


def said(subject: type, **rest: object) -> list[tuple[str | None, Diagnosis]]:
    return [(each.field, each.diagnosis) for each in confirm(setup_of(subject, **rest), TWICE)]  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [None, "past_the_end", "before_the_start", "wider_bucket_rows"])
def test_what_both_replays_do_wrong_is_one_finding(fault: str | None) -> None:
    buckets = (4,) if fault is None else (6, 4)
    (finding,) = confirm(setup_of(OneMore if fault is None else EagerDecode, fault=fault, buckets=buckets), TWICE)
    assert finding.diagnosis is not Diagnosis.NOT_IDEMPOTENT


def test_a_second_replay_is_held_against_the_first() -> None:
    wrong, again = confirm(setup_of(OneMore, fault=f"second_replay:{LENGTHS}"), TWICE)
    assert wrong.sentence.startswith(f"boundary: {PLACE} is 18, must be 17: "), "what the first replay left"
    assert again.sentence == (
        f"not idempotent: {PLACE} was 18 after the first replay and 19 after a second one on the same inputs"
    )
    assert (again.got, again.want) == (19, 18)


def test_a_second_replay_that_puts_things_right_is_not_idempotent() -> None:
    late, again = confirm(setup_of(Late), TWICE)
    assert late.diagnosis is Diagnosis.STALE
    assert late.sentence.startswith(f"stale: {PLACE} is 1, must be 17: ")
    assert again.sentence == (
        f"not idempotent: {PLACE} was 1 after the first replay and 17 after a second one on the same inputs"
    )


def test_a_replay_that_changes_its_inputs_is_not_called_unrepeatable() -> None:
    assert said(AdvancesItsLengths) == [("seq_lens", Diagnosis.INPUT_OVERWRITTEN)]
