"""Diagnose: every explanation from evidence made by hand, and what it takes for one to win over another."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from support import small

from dsa_verify.buffers.arena import GUARD_WORD
from dsa_verify.buffers.poison import plausible_words
from dsa_verify.buffers.region import LOUD_WORD, Kind, Region
from dsa_verify.contract.explanation import Cause, Explanation
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.owners import Owner, held_in
from dsa_verify.contract.round_table import token_slots
from dsa_verify.diagnosis.diagnose import Diagnosed, diagnose_field
from dsa_verify.diagnosis.evidence import Evidence, Moment
from dsa_verify.diagnosis.other_memory import explain_guard
from dsa_verify.diagnosis.places import describe_place
from dsa_verify.diagnosis.sentences import TEMPLATES, reason
from dsa_verify.judge.judge import Difference, Phase
from dsa_verify.systems.catalogue import SYSTEMS

BUCKET, N = 3, 4
GEOMETRY = small(draft_tokens=N, context=60, topk=32, pool_size=1)
LENGTHS, REQUESTS = (20, 33, 1), (5, 2, 0)  # the last row is a pad row


def layout_of(system: str = "target_verify") -> Layout:
    return SYSTEMS[system].layout(GEOMETRY, BUCKET)


def moment(
    round_: int = 7,
    seq_lens: tuple[int, ...] = LENGTHS,
    requests: tuple[int, ...] = REQUESTS,
    poison: str = "loud",
) -> Moment:
    """Target-verify of contract 1.2 with N = 4, by the formulas."""
    lengths = np.array(seq_lens)
    cache = lengths + N
    expanded = (lengths[:, None] + np.arange(1, N + 1)).reshape(-1)
    wide = token_slots(GEOMETRY, np.array(requests), np.zeros(BUCKET, np.int64))[:, : GEOMETRY.columns]
    want = {
        "cache_seqlens_int32": cache,
        "cu_seqlens_k": np.concatenate([[0], cache.cumsum()]),
        "dsa_seqlens_expanded": expanded,
        "dsa_cache_seqlens_int32": np.minimum(expanded, GEOMETRY.topk),
        "page_table_1": wide,
        "real_page_table": wide[:, :: GEOMETRY.page_size] // GEOMETRY.page_size,
    }
    return Moment(
        round=round_,
        bucket=BUCKET,
        raw=BUCKET - 1,
        seq_lens=seq_lens,
        requests=requests,
        row_request=tuple(np.repeat(np.arange(BUCKET), N).tolist()),
        live_tokens=tuple(cache.tolist()),
        live_candidates=(0,) * BUCKET,
        token_rows=BUCKET * N,
        poison=poison,
        want={name: torch.from_numpy(values.astype(np.int32)) for name, values in want.items()},
    )


IDLE = moment(-1, (1, 1, 1), (0, 0, 0))


def region_of(name: str) -> Region:
    field = layout_of()[name]
    return Region(
        kind=Kind.FIELD,
        name=name,
        got=torch.zeros((field.rows, field.columns), dtype=torch.int32),
        low=field.low,
        high=field.high,
    )


def difference(name: str, row: int, got: int, column: int = 0, now: Moment | None = None) -> Difference:
    """One word of a field that is right but for it."""
    field, now, region = layout_of()[name], now or moment(), region_of(name)
    want = now.value(field, row, column)
    assert want is not None
    assert want != got
    for r in range(field.rows):
        for c in range(field.columns):
            region.got[r, c] = now.value(field, r, c) or 0
    region.got[row, column] = got
    return Difference(region=region, round=7, phase=Phase.REPLAY, row=row, word=column, got=got, want=want)


def differences_of(name: str, got: list[int], now: Moment | None = None) -> list[Difference]:
    """All words of a field of one column."""
    want = [(now or moment()).value(layout_of()[name], row, 0) for row in range(len(got))]
    wrong = [difference(name, row, got[row], now=now) for row in range(len(got)) if got[row] != want[row]]
    for each in wrong:
        each.region.got[:, 0] = torch.tensor(got)
    return wrong


def diagnose(*differences: Difference, now: Moment | None = None, earlier: tuple[Moment, ...] = ()) -> tuple:
    evidence = Evidence(layout=layout_of(), now=now or moment(), earlier=earlier, capture=IDLE)
    return told(diagnose_field(evidence, differences))


def told(found: Diagnosed) -> tuple[Diagnosis, str, str]:
    return found.explanation.kind, found.sentence, found.place


def slot(request: int, token: int, step: int = 1) -> int:
    return int(token_slots(GEOMETRY, np.array([request]), np.zeros(1, np.int64))[0, token]) // step


EXPANDED = "dsa_seqlens_expanded"


def test_the_poison_means_never_written():
    diagnosis, sentence, place = diagnose(difference(EXPANDED, 5, LOUD_WORD))
    assert diagnosis is Diagnosis.NEVER_WRITTEN
    assert place == f"{EXPANDED}[5] (batch row 1, request 2, length 33, draft position 1)"
    assert sentence == (
        f"never written: {place} is {LOUD_WORD}, must be 35: "
        "it still holds the poison, so it was never written in this replay"
    )


def test_the_poison_of_an_earlier_round_means_never_written_at_all():
    _, sentence, _ = diagnose(difference(EXPANDED, 5, LOUD_WORD), now=moment(poison="stale"))
    assert sentence.endswith("so it was never written at all")


def test_the_plausible_poison_means_never_written():
    now = moment(poison="plausible")
    values = [int(plausible_words(region_of(EXPANDED), 7)[row, 0]) for row in range(4)]
    diagnosis, sentence, _ = diagnose(*[difference(EXPANDED, row, values[row]) for row in range(4)], now=now)
    assert diagnosis is Diagnosis.NEVER_WRITTEN
    assert sentence.endswith("it still holds the plausible poison, so it was never written in this replay")
    assert diagnose(difference(EXPANDED, 0, values[0]))[0] is not Diagnosis.NEVER_WRITTEN, "another poison"


@pytest.mark.parametrize("name, step", [("page_table_1", 1), ("real_page_table", 4)])
def test_the_slot_of_another_request_means_a_wrong_map(name: str, step: int):
    diagnosis, sentence, _ = diagnose(difference(name, 4, slot(6, 8, step), 8 // step))
    assert diagnosis is Diagnosis.REQUEST_MAP
    assert sentence.endswith("that is the same place of request 6")


def held(*prefixes: tuple[int, int, int]) -> torch.Tensor:
    """A request table in which rows have taken first pages of others."""
    rows = np.arange(GEOMETRY.request_rows)
    table = token_slots(GEOMETRY, rows, np.zeros_like(rows))
    for row, origin, pages in prefixes:
        table[row, : pages * GEOMETRY.allocator_page] = table[origin, : pages * GEOMETRY.allocator_page]
    return torch.from_numpy(table.astype(np.int32))


def test_a_slot_is_whose_the_table_says():
    table = held((4, 6, 3), (7, 6, 1))
    table[8] = torch.from_numpy(token_slots(GEOMETRY, np.array([8]), np.array([1]))[0])
    owner_of = held_in(GEOMETRY, table)
    assert owner_of(slot(6, 5)) == Owner((4, 6), 5)
    assert owner_of(slot(6, 2)) == Owner((4, 6, 7), 2)
    assert owner_of(slot(6, 13)) == Owner((6,), 13)
    assert owner_of(slot(4, 13)) == Owner((4,), 13)
    assert owner_of(slot(4, 5)) == Owner((4,), 5, now=False), "it was drawn for row 4, which has another there"
    assert owner_of(slot(8, 7)) == Owner((8,), 7, now=False)
    assert owner_of(0) is owner_of(-5) is None
    assert str(owner_of(slot(6, 2))) == "requests 4, 6 and 7, which share this page"


@pytest.mark.parametrize(
    "prefixes, got, says",
    [
        (((6, 8, 3),), slot(6, 8), "that is the same place of request 6 on pages that it does not have in this round"),
        (((6, 8, 3),), slot(8, 8), "that is the same place of requests 6 and 8, which share this page"),
        (((2, 8, 3),), slot(2, 8), "no pattern recognised"),  # what was drawn for a row is not its own any more
        (((2, 8, 1),), slot(8, 8), "that is the same place of request 8, with the same first page as this request"),
        (((2, 8, 4),), slot(8, 12), "that is token 12 of the same request, expected token 8"),
        (((2, 8, 1),), slot(8, 12), "no pattern recognised"),
    ],
)
def test_rows_that_share_pages_are_not_taken_for_one_another(prefixes: tuple, got: int, says: str):
    """Of batch row 1, which is request 2: no sentence names an owner that the table does not show."""
    now, table = moment(), held(*prefixes)
    now.want["page_table_1"][1] = table[2, : GEOMETRY.columns]
    wrong = difference("page_table_1", 4, got, 8, now=now)
    evidence = Evidence(layout=layout_of(), now=now, earlier=(), capture=IDLE, owner_of=held_in(GEOMETRY, table))
    assert told(diagnose_field(evidence, [wrong]))[1].endswith(says)


def test_a_stale_map_says_with_whom_its_request_shares():
    evidence = Evidence(
        layout=layout_of(),
        now=moment(),
        earlier=(moment(3, requests=(5, 6, 0)),),
        capture=IDLE,
        owner_of=held_in(GEOMETRY, held((6, 8, 3))),
    )
    _, sentence, _ = told(diagnose_field(evidence, [difference("page_table_1", 4, slot(8, 8), 8)]))
    assert sentence.endswith(
        "request 6, which sat in this batch row in round 3 and shares this page with 8: a stale map"
    )


def test_the_slot_of_an_earlier_request_of_this_row_means_a_stale_map():
    earlier = moment(3, requests=(5, 6, 0)), moment(4, requests=(6, 1, 0))
    diagnosis, sentence, _ = diagnose(difference("page_table_1", 4, slot(6, 8), 8), earlier=earlier)
    assert diagnosis is Diagnosis.REQUEST_MAP
    assert sentence.endswith("that is request 6, which sat in this batch row in round 3: a stale map")


@pytest.mark.parametrize(
    "row, column, got, says",
    [
        (2, 4, slot(2, 12), r"\[4, 12\]: .* written as"),
        (2, 4, slot(5, 0), r"\[1, 0\]: .* read as"),
        (3, 0, slot(5, 56), r"\[1, 56\]: .* read as"),  # beyond its length, and yet known by its owner
        (1, 2, GUARD_WORD, r"what lies in the gap behind row 0: .* read as"),
    ],
)
def test_rows_taken_for_adjacent(row: int, column: int, got: int, says: str):
    """60 columns and a gap of 64."""
    layout = SYSTEMS["target_verify"].layout(GEOMETRY.replace(table_view="strided"), BUCKET)
    evidence = Evidence(layout=layout, now=moment(), earlier=(), capture=IDLE)
    _, sentence, _ = told(diagnose_field(evidence, [difference("page_table_1", row, got, column)]))
    assert re.search(says + r" if they lay 60 apart \(contract 2.2\)$", sentence), sentence
    assert "124 elements behind" in sentence
    assert "apart" not in diagnose(difference("page_table_1", row, got, column))[1], "no gap, no such rows"


@pytest.mark.parametrize("columns, wide", [(1 << 19, True), ((1 << 19) - 1, False)])
def test_a_table_that_32_bits_do_not_count_is_told(columns: int, wide: bool):
    layout = layout_of()
    field = dataclasses.replace(layout["page_table_1"], shape=(1 << 12, columns))
    evidence = Evidence(layout=dataclasses.replace(layout, fields=(field,)), now=moment(), earlier=(), capture=IDLE)
    _, sentence, _ = told(diagnose_field(evidence, [difference("page_table_1", 2, LOUD_WORD, 4)]))
    is_told = sentence.endswith("4096 rows of 524288 are 2147483648 elements, which 32 bits do not hold (contract 2.2)")
    assert is_told is wide


def test_the_value_of_an_earlier_round_means_stale():
    earlier = (moment(2, (20, 9, 1)), moment(3, (20, 9, 1)), moment(5, (20, 11, 1)))
    written = diagnose(difference(EXPANDED, 5, 9 + 2), earlier=earlier)
    assert written[0] is Diagnosis.STALE
    assert written[1].endswith("it was written, but with the value of round 3: computed from inputs not refreshed"), (
        "the latest of the rounds that had it"
    )
    kept = diagnose(difference(EXPANDED, 5, 9 + 2), earlier=earlier, now=moment(poison="stale"))
    assert kept[0] is Diagnosis.STALE
    assert kept[1].endswith("stale since round 3, whose value it still holds")


def test_the_values_at_capture_mean_frozen():
    frozen = differences_of("cache_seqlens_int32", [1 + N] * BUCKET)
    diagnosis, sentence, _ = diagnose(*frozen)
    assert diagnosis is Diagnosis.FROZEN
    assert sentence.endswith("capture: frozen at capture, or one replay late (this is the first replay of this batch)")
    diagnosis, sentence, _ = diagnose(*frozen, earlier=(moment(6, (21, 9, 1)),))
    assert diagnosis is Diagnosis.FROZEN
    assert sentence.endswith("it is the value for the inputs at capture, so something was frozen at capture")


def test_one_word_as_at_capture_is_not_frozen():
    """A row taken for a pad row, and what a mask leaves, hold the same."""
    diagnosis, sentence, _ = diagnose(difference("cache_seqlens_int32", 1, 1 + N))
    assert (diagnosis, sentence.rpartition(": ")[2]) == (
        Diagnosis.REQUEST_MAP,
        "that is the value of batch row 2, a pad row",
    )
    diagnosis, sentence, _ = diagnose(difference("real_page_table", 4, 0))
    assert diagnosis is Diagnosis.WRONG_VALUE
    assert sentence.endswith("no pattern recognised; it is the value at capture, which a mask or a memset leaves, too")


def test_a_zero_is_not_stale_by_accident():
    """Batch row 1 was a pad row in the round before."""
    earlier = (moment(6, (20, 1, 1), (5, 0, 0)),)
    assert diagnose(difference("real_page_table", 4, 0), earlier=earlier)[0] is Diagnosis.WRONG_VALUE


@pytest.mark.parametrize("row, column", [(4, 9), (0, 5)])
def test_a_last_page_that_is_left_0_is_a_boundary(row: int, column: int):
    now = moment(seq_lens=(18, 33, 1))
    diagnosis, sentence, _ = diagnose(difference("real_page_table", row, 0, column, now), now=now)
    end = now.live_tokens[row // N]
    assert diagnosis is Diagnosis.BOUNDARY
    tokens = f"tokens {column * 4} to {end - 1}"
    assert sentence.endswith(
        f"0 in place of the last page, which {tokens} fill in part: as floor for ceiling leaves it"
    )
    assert diagnose(difference("real_page_table", row, 0, column - 1, now), now=now)[0] is not Diagnosis.BOUNDARY


def test_a_table_of_zeros_has_no_boundary():
    now = moment(seq_lens=(18, 33, 1))
    found = difference("real_page_table", 0, 0, 5, now)
    found.region.got.zero_()
    assert diagnose(found, now=now)[0] is Diagnosis.WRONG_VALUE


@pytest.mark.parametrize("got, unsigned", [(-4, 4294967292), (99_999, None)])
def test_an_illegal_value_is_out_of_range(got: int, unsigned: int | None):
    diagnosis, sentence, _ = diagnose(difference(EXPANDED, 5, got))
    assert diagnosis is Diagnosis.OUT_OF_RANGE
    assert "legal values are 0 to 64" in sentence
    assert ("unsigned" in sentence) == (unsigned is not None)
    assert unsigned is None or f"sees {unsigned}" in sentence


@pytest.mark.parametrize(
    "row, got, why",
    [
        (5, 33 + 1, "that is the value of draft position 0"),
        (5, 33 + 3, "that is the value of draft position 2"),
        (4, 33, "it is -1 token: the draft position counts from elsewhere"),
        (7, 33 + 5, "it is +1 token: the draft position counts from elsewhere"),
    ],
)
def test_a_neighbouring_draft_position(row: int, got: int, why: str):
    diagnosis, sentence, _ = diagnose(difference(EXPANDED, row, got))
    assert diagnosis is Diagnosis.DRAFT_OFFSET
    assert sentence.endswith(why)


@pytest.mark.parametrize("name, row, got", [(EXPANDED, 5, 20 + 2), ("cache_seqlens_int32", 1, 20 + N)])
def test_the_value_of_another_batch_row_means_a_wrong_map(name: str, row: int, got: int):
    diagnosis, sentence, _ = diagnose(difference(name, row, got))
    assert diagnosis is Diagnosis.REQUEST_MAP
    assert sentence.endswith("that is the value of batch row 0, request 5")


@pytest.mark.parametrize(
    "got, why",
    [
        (33 + N + 1, "it is the right value + one token (1)"),
        (33 + N - 4, "it is the right value - one draft length (4)"),
        (33 + N + 8, "it is the right value + one page (8)"),
        (33 + N + 16, "it is the right value + one allocator page (16)"),
        (33 + N - 2, "it is the right value - one pool (2)"),
        (33 + N + 32, "it is the right value + one top-k (32)"),
    ],
)
def test_one_step_off_means_a_boundary(got: int, why: str):
    geometry = GEOMETRY.replace(page_size=8, pool_size=2, context=99)
    layout = SYSTEMS["target_verify"].layout(geometry, BUCKET)
    evidence = Evidence(layout=layout, now=moment(), earlier=(), capture=IDLE)
    diagnosis, sentence, _ = told(diagnose_field(evidence, [difference("cache_seqlens_int32", 1, got)]))
    assert (diagnosis, sentence.rpartition(": ")[2]) == (Diagnosis.BOUNDARY, why)


def test_another_token_of_the_same_request_means_a_boundary():
    diagnosis, sentence, _ = diagnose(difference("page_table_1", 4, slot(2, 12), 8))
    assert diagnosis is Diagnosis.BOUNDARY
    assert sentence.endswith("that is token 12 of the same request, expected token 8")


def test_the_next_page_of_nobody_means_a_boundary():
    """A page that belongs to nobody at this place, one beside the right one."""
    evidence = Evidence(layout=layout_of(), now=moment(), earlier=(), capture=IDLE)
    found = []
    for column in range(5):
        first = difference("real_page_table", 4, slot(2, column * 4, 4) + 1, column)
        found.append(told(diagnose_field(evidence, [first])))
    assert all(diagnosis is Diagnosis.BOUNDARY for diagnosis, _, _ in found)
    assert any(sentence.endswith("it is the right value +1 page") for _, sentence, _ in found)


def test_a_wrong_sum_says_by_how_much():
    diagnosis, sentence, place = diagnose(difference("cu_seqlens_k", 2, 24 + 37 - 13))
    assert diagnosis is Diagnosis.WRONG_VALUE
    assert place == "cu_seqlens_k[2] (the sum over the first 2 batch rows)"
    assert "the sum is off by -13" in sentence


STEP = "it is the first wrong element, so its step from the one before is off by as much"


@pytest.mark.parametrize(
    "got, ends",
    [
        (
            [24, 61, 66, 66],
            "each element is the one that belongs after it: shifted by one; the 0 that a sum begins with is missing",
        ),
        ([3, 24, 61, 66], "the sum is off by +3; the 0 that a sum begins with is missing"),
        ([0, 24, 66, 66], f"the sum is off by +5; {STEP}"),
        ([0, 0, 24, 61], "each element is the one that belongs before it: shifted by one"),
        ([0, 24, 60, 65], f"the sum is off by -1; {STEP}"),
    ],
)
def test_a_sum_that_is_shifted_says_so(got: list[int], ends: str):
    diagnosis, sentence, _ = diagnose(*differences_of("cu_seqlens_k", got))
    assert diagnosis is Diagnosis.WRONG_VALUE
    assert sentence.endswith(": " + ends)


def test_what_nothing_explains_is_a_wrong_value():
    diagnosis, sentence, _ = diagnose(difference(EXPANDED, 5, 55))
    assert diagnosis is Diagnosis.WRONG_VALUE
    assert sentence.endswith("no pattern recognised")


def test_a_second_replay_is_not_idempotent():
    second = dataclasses.replace(difference(EXPANDED, 5, 36), phase=Phase.SECOND_REPLAY)
    diagnosis, sentence, place = diagnose(second)
    assert diagnosis is Diagnosis.NOT_IDEMPOTENT
    assert sentence == (
        f"not idempotent: {place} was 35 after the first replay and 36 after a second one on the same inputs"
    )


def test_what_explains_most_elements_wins():
    """One element is draft position 0's value by chance; all three are those of round 3."""
    earlier = (moment(3, (20, 32, 1)),)
    differences = [difference(EXPANDED, row, 32 + row - 4 + 1) for row in (5, 6, 7)]
    assert diagnose(differences[0])[0] is Diagnosis.DRAFT_OFFSET
    assert diagnose(*differences, earlier=earlier)[0] is Diagnosis.STALE
    # The explanation must hold for the first element, which the sentence is about.
    mixed = [difference(EXPANDED, 4, 33), *[difference(EXPANDED, row, -9) for row in (5, 6, 7)]]
    assert diagnose(*mixed)[0] is Diagnosis.DRAFT_OFFSET


@pytest.mark.parametrize(
    "name, row, column, place",
    [
        ("cache_seqlens_int32", 2, 0, "cache_seqlens_int32[2] (batch row 2, pad row)"),
        ("dsa_cu_seqlens_k", 6, 0, "dsa_cu_seqlens_k[6] (the sum over the first 6 token rows)"),
        (
            "page_table_1",
            9,
            3,
            "page_table_1[9, 3] (batch row 2, pad row, draft position 1, page 0, token 3)",
        ),
        (
            "real_page_table",
            2,
            5,
            "real_page_table[2, 5] (batch row 0, request 5, length 20, draft position 2, page 5, token 20)",
        ),
    ],
)
def test_a_place_is_named_in_the_readers_terms(name: str, row: int, column: int, place: str):
    evidence = Evidence(layout=layout_of(), now=moment(), earlier=(), capture=IDLE)
    assert describe_place(evidence, evidence.layout[name], row, column) == place


def test_a_column_of_a_batch_row_is_a_draft_position():
    layout = SYSTEMS["target_verify"].layout(GEOMETRY.replace(architecture=100), BUCKET)
    evidence = Evidence(layout=layout, now=moment(), earlier=(), capture=IDLE)
    place = describe_place(evidence, layout["paged_mqa_ctx_lens_2d"], 1, 2)
    assert place == "paged_mqa_ctx_lens_2d[1, 2] (batch row 1, request 2, length 33, draft position 2)"


def test_a_ragged_row_is_counted_from_its_request():
    now = dataclasses.replace(moment(), row_request=(0, 1, 1, 1, 2), token_rows=5)
    evidence = Evidence(layout=layout_of("draft_extend"), now=now, earlier=(), capture=IDLE)
    field = evidence.layout[EXPANDED]
    assert describe_place(evidence, field, 3, 0).endswith("(batch row 1, request 2, length 33, draft position 2)")
    assert describe_place(evidence, field, 5, 0).endswith("(a row that no request owns in this round)")
    assert now.value(field, 5, 0) is None
    assert now.value(evidence.layout["dsa_cu_seqlens_q"], 5, 0) is None, "a field that was not kept"


def guard_difference(after: str | None, before: str | None, column: int) -> Difference:
    region = Region(
        kind=Kind.GUARD,
        name=after or before or "",
        got=torch.zeros((1, 1024), dtype=torch.int32),
        constant=GUARD_WORD,
        neighbours=(after, before),
    )
    return Difference(region=region, round=1, phase=Phase.REPLAY, row=0, word=column, got=7, want=GUARD_WORD)


@pytest.mark.parametrize(
    "after, before, column, text",
    [
        ("a", "b", 0, "wrote 8 bytes past field a, the first 0 bytes beyond its end"),
        ("a", "b", 511, "wrote 8 bytes past field a, the first 2044 bytes beyond its end"),
        ("a", "b", 1023, "wrote 8 bytes before field b, the first 4 bytes ahead of its start"),
        ("a", None, 1023, "wrote 8 bytes past field a, the first 4092 bytes beyond its end"),
        (None, "b", 0, "wrote 8 bytes before field b, the first 4096 bytes ahead of its start"),
    ],
)
def test_a_guard_tells_which_side_was_overrun(after: str | None, before: str | None, column: int, text: str):
    diagnosis = Diagnosis.PAST_THE_END if "past field" in text else Diagnosis.BEFORE_THE_START
    found = explain_guard(guard_difference(after, before, column), 2)
    assert (found.kind, reason(found)) == (diagnosis, text)


# Words ---------------------------------------------------------------------------------------------------------------


def test_every_cause_has_words_and_no_words_are_left_over() -> None:
    assert set(TEMPLATES) == set(Cause)


def test_the_facts_of_a_finding_are_numbers_and_texts() -> None:
    """So that results hold them as they are."""
    found = Explanation(Diagnosis.BOUNDARY, Cause.ONE_UNIT_OFF, {"sign": "+", "unit": "page", "size": 4})
    assert reason(found) == "it is the right value + one page (4)"
    more = found.with_facts(rows=2, columns=3, elements=6)
    assert reason(more).endswith("; 2 rows of 3 are 6 elements, which 32 bits do not hold (contract 2.2)")
    assert found.facts == {"sign": "+", "unit": "page", "size": 4}
