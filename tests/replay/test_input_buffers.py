"""InputBuffers: what lies there after each step is what the rounds say, on both sides and in every form."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from support import DEVICE, small

from dsa_verify.buffers.input_buffers import InputBuffers
from dsa_verify.buffers.region import Kind, guard_regions, input_regions
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.geometry import INDEX_DTYPES, INPUT_VIEWS, Geometry
from dsa_verify.contract.padded import PADDED_MODES
from dsa_verify.contract.round import POISONS, Round
from dsa_verify.contract.round_table import RoundTable, tabulate, token_slots
from dsa_verify.contract.static_inputs import PAD_REQUEST
from dsa_verify.contract.subject import Inputs
from dsa_verify.diagnosis.other_memory import explain_guard
from dsa_verify.diagnosis.sentences import reason
from dsa_verify.judge.judge import Difference, Phase, expected_words, live_words
from dsa_verify.rounds.matrix import REMAPS_PER_ROUND, Config
from dsa_verify.systems.catalogue import SYSTEMS

WIDEST = 6


def make_input_buffers(
    system: str, geometry: Geometry, capacity: int = 32, remap_slots: int = REMAPS_PER_ROUND
) -> InputBuffers:
    return InputBuffers(SYSTEMS[system], geometry, WIDEST, DEVICE, capacity=capacity, remap_slots=remap_slots)


def table_of(system: str, geometry: Geometry, *rounds: Round, remap_slots: int = REMAPS_PER_ROUND) -> RoundTable:
    generations = np.zeros(geometry.request_rows, np.int64)
    return tabulate(SYSTEMS[system], geometry, rounds, generations, widest_bucket=WIDEST, remap_slots=remap_slots)


class Model:
    """What the buffers must hold, kept in NumPy."""

    def __init__(self, system: str, geometry: Geometry):
        self.geometry, self.extends = geometry, system == "draft_extend"
        self.seq_lens = np.full(WIDEST, SYSTEMS[system].pad_length(geometry))
        self.requests = np.full(WIDEST, PAD_REQUEST)
        self.extend_lens = np.full(WIDEST, geometry.draft_tokens)
        rows = np.arange(geometry.request_rows)
        self.table = token_slots(geometry, rows, np.zeros_like(rows))

    def step(self, table: RoundTable, i: int) -> None:
        bucket = int(table.bucket[i])
        self.seq_lens[:bucket] = table.seq_lens[i, :bucket]
        self.requests[:bucket] = table.requests[i, :bucket]
        if self.extends:
            self.extend_lens[:bucket] = table.lens["extend_lens"][i, :bucket]
        before = self.table.copy()
        moves = (table.remap_rows, table.remap_generations, table.remap_origins, table.remap_pages)
        for row, generation, origin, pages in zip(*(column[i] for column in moves), strict=True):
            if row >= 0:
                self.table[row] = token_slots(self.geometry, np.array([row]), np.array([generation]))
                shared = pages * self.geometry.allocator_page
                self.table[row, :shared] = before[origin, :shared]

    def check(self, input_buffers: InputBuffers) -> None:
        for inputs in input_buffers.inputs(WIDEST):
            assert inputs.seq_lens.tolist() == self.seq_lens.tolist()
            assert inputs.req_pool_indices.tolist() == self.requests.tolist()
            assert np.array_equal(inputs.req_to_token.cpu().numpy(), self.table)
            if self.extends:
                assert inputs.extend_lens.tolist() == self.extend_lens.tolist()
            else:
                assert "extend_lens" not in inputs.own


@pytest.mark.parametrize("system", sorted(SYSTEMS))
@pytest.mark.parametrize("form", INPUT_VIEWS)
@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_every_step_writes_its_round_and_nothing_else(system: str, form: str, dtype: str):
    """Rows beyond a round's bucket keep what wider buckets left there (contract 0.2)."""
    geometry = small(
        system,
        request_rows=WIDEST + 3,
        input_view=form,
        index_dtype=dtype,
        draft_tokens=2 if SYSTEMS[system].drafts else 1,
    )
    config = Config(system=SYSTEMS[system], geometry=geometry, buckets=(WIDEST, 2), rounds=40, seed=3)
    input_buffers, model = make_input_buffers(system, geometry), Model(system, geometry)
    model.check(input_buffers)
    steps = remaps = prefixes = 0
    for table in config.chunks():
        input_buffers.upload(table)
        for i in range(len(table)):
            bucket = int(table.bucket[i])
            control, poison = input_buffers.control(bucket)
            input_buffers.step(bucket)
            model.step(table, i)
            model.check(input_buffers)
            assert control.live_tokens.tolist() == table.live_tokens[i].tolist()
            assert control.token_rows.tolist() == [table.token_rows[i]]
            assert control.row_request.tolist() == table.row_request[i].tolist()
            assert poison.tolist() == [table.poison[i]]
            assert input_buffers.round_index.tolist() == [steps]
            steps += 1
            remaps += int((table.remap_rows[i] >= 0).sum())
            prefixes += int((table.remap_pages[i] > 0).sum())
    assert steps == 40
    assert remaps > 10, "the rounds used here move requests to other pages"
    assert prefixes > 2, "some of them take the first pages of another, or keep their own"


def test_a_prefix_is_what_the_origin_had_in_the_round_before():
    """Whatever becomes of the origin in the same round; behind it the pages are new, as those of any row that moves."""
    geometry = small(request_rows=9, context=30)
    page, whole = geometry.allocator_page, geometry.pages_per_row
    moved = dict(bucket=2, seq_lens=(5, 6), requests=(3, 4))
    table = table_of(
        "decode",
        geometry,
        Round(**moved, remap=(3, 4, 5), prefixes=((3, 4, 2), (4, 3, 1), (5, 5, 3))),
        Round(**moved, remap=(4,)),
        Round(**moved, remap=(6,), prefixes=((6, 3, whole),)),
    )
    input_buffers = make_input_buffers("decode", geometry)

    def drawn(row: int, generation: int) -> list[int]:
        return (token_slots(geometry, np.array([row]), np.array([generation]))[0, ::page] // page).tolist()

    def held(row: int) -> list[int]:
        tables = [inputs.req_to_token[row, ::page].tolist() for inputs in input_buffers.inputs(WIDEST)]
        assert tables[0] == tables[1]
        return [slot // page for slot in tables[0]]

    input_buffers.upload(table)
    input_buffers.step(2)
    assert held(3) == drawn(4, 0)[:2] + drawn(3, 1)[2:]
    assert held(4) == drawn(3, 0)[:1] + drawn(4, 1)[1:]
    assert held(5) == drawn(5, 0)[:3] + drawn(5, 1)[3:]
    input_buffers.step(2)
    assert held(4) == drawn(4, 2), "whoever moves on without a prefix shares nothing"
    assert held(3) == drawn(4, 0)[:2] + drawn(3, 1)[2:], "pages stay with those that took them"
    input_buffers.step(2)
    assert held(6) == held(3)


def test_floors_of_requests_reach_both_sides_and_pad_rows_keep_the_one_of_all():
    geometry = SYSTEMS["padded"].geometry("tiny_v4", {"request_floors": True, "replay_floor": 3, "request_rows": 9})
    input_buffers = make_input_buffers("padded", geometry)
    rounds = (
        Round(bucket=4, seq_lens=(5, 6, 7, 8), requests=(3, 4, 5, 6), lens={"replay_floors": (2, 0, 7, 5)}),
        Round(bucket=4, seq_lens=(5,), requests=(3,), lens={"replay_floors": (4,)}),
        Round(bucket=2, seq_lens=(5, 6), requests=(3, 4)),
    )
    input_buffers.upload(table_of("padded", geometry, *rounds))
    for bucket, floors in ((4, [2, 0, 7, 5]), (4, [4, 3, 3, 3]), (2, [3, 3])):
        input_buffers.step(bucket)
        for inputs in input_buffers.inputs(bucket):
            assert inputs.replay_floors.tolist() == floors
    assert make_input_buffers("padded", geometry.replace(request_floors=False)).inputs(2)[0].own.keys() == {
        "out_cache_loc",
        "full_to_swa",
    }


def test_an_input_that_a_system_has_not_is_refused_with_those_that_it_has():
    geometry = SYSTEMS["padded"].geometry("tiny_v4", {"request_rows": 9})
    inputs, _ = make_input_buffers("padded", geometry).inputs(2)
    with pytest.raises(AttributeError) as caught:
        inputs.kv_rows  # noqa: B018
    assert str(caught.value) == (
        "these inputs have no 'kv_rows'; the system's own inputs in this geometry are: out_cache_loc, full_to_swa"
    )
    other = inputs.replace(seq_lens=inputs.seq_lens.clone(), out_cache_loc=inputs.out_cache_loc.clone())
    assert other.tensors().keys() == inputs.tensors().keys()
    changed = {name for name, tensor in other.tensors().items() if tensor is not inputs.tensors()[name]}
    assert changed == {"seq_lens", "out_cache_loc"}


def test_the_model_sees_a_step_that_forgets_the_oracle(monkeypatch: pytest.MonkeyPatch):
    geometry = small()
    input_buffers, model = make_input_buffers("decode", geometry), Model("decode", geometry)
    table = table_of("decode", geometry, Round(bucket=2, seq_lens=(5, 6), requests=(3, 4), remap=(3,)))
    input_buffers.upload(table)
    with monkeypatch.context() as patched:
        patched.setattr(input_buffers, "_oracle", input_buffers._subject)
        input_buffers.step(2)
    model.step(table, 0)
    with pytest.raises(AssertionError):
        model.check(input_buffers)


def addresses(inputs: Inputs) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in inputs.tensors().items()}


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize("form", INPUT_VIEWS)
def test_inputs_have_the_form_that_was_asked_for(form: str, dtype: str):
    geometry = small(input_view=form, index_dtype=dtype, draft_tokens=2)
    input_buffers = make_input_buffers("draft_extend", geometry)
    subject, oracle = input_buffers.inputs(WIDEST)
    for inputs in (subject, oracle):
        assert str(inputs.seq_lens.dtype) == str(inputs.req_pool_indices.dtype) == f"torch.{dtype}"
        assert inputs.req_to_token.dtype == torch.int32
        assert tuple(inputs.req_to_token.shape) == (geometry.request_rows, geometry.token_columns)
    for tensor in oracle.tensors().values():
        assert tensor.is_contiguous(), "the oracle's inputs are plain whatever the subject's are"
    for name, tensor in subject.tensors().items():
        assert (tensor.stride(-1) > 1) == (form == "strided" and name != "req_to_token")
        assert tensor.is_contiguous() == (form != "strided")
        assert (tensor.data_ptr() % 16 != 0) == (form == "offset"), "an offset view is not even 16-byte aligned"
    if form == "strided":
        assert subject.req_to_token.stride(0) > geometry.token_columns


def own_strides(tensor: torch.Tensor) -> set[int]:
    """What an implementation may be handed of it: the distance of its columns, and of the rows that these are."""
    return set(tensor.stride()[-2:]) - {1}


@pytest.mark.parametrize("preset", ["", "pooled"])
@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_no_stride_of_a_strided_input_is_any_others(system: str, preset: str):
    """Nor a multiple of it: an index times the one would be another times the other."""
    ranks = {"dcp_size": 2} if system == "dcp" else {}
    changes = {"context": 603, "pool_size": 4, "indexer": True} if preset else ranks
    geometry = small(system, input_view="strided", draft_tokens=2 if SYSTEMS[system].drafts else 1, **changes)
    subject, _ = make_input_buffers(system, geometry).inputs(WIDEST)
    strides = {name: own_strides(each) for name, each in subject.tensors().items() if name != "full_to_swa"}
    assert all(strides.values()), "each has a gap"
    for one, other in itertools.permutations(strides, 2):
        clash = [(a, b) for a in strides[one] for b in strides[other] if a % b == 0]
        assert not clash, (one, other)


@pytest.mark.parametrize("form", INPUT_VIEWS)
def test_selections_and_what_ranks_computed_have_the_form_too(form: str):
    """As SGLang's own tests hand them over: `storage[::2, ::2]`, and floats of a receive buffer (contract 8.3, 8.7)."""
    inputs, oracle = make_input_buffers("dcp", small("dcp", input_view=form, dcp_size=2)).inputs(3)
    far = {"selected_positions": (0, 1), "selection": (0, 1), "kv_rows": (0,), "partial_out": (2,), "partial_lse": (2,)}
    for name, dimensions in far.items():
        tensor, plain = inputs.tensors()[name], oracle.tensors()[name]
        assert plain[0].is_contiguous()
        for dimension in range(1 if tensor.dim() == 2 else 2, tensor.dim()):
            assert (tensor.stride(dimension) != plain.stride(dimension)) == (
                form == "strided" and dimension in dimensions
            )
        assert (tensor.stride(0) != plain.stride(0)) == (form == "strided")


def test_buckets_see_prefixes_of_the_same_buffers():
    input_buffers = make_input_buffers("draft_extend", small(draft_tokens=2))
    (wide, wide_oracle), (narrow, narrow_oracle) = input_buffers.inputs(WIDEST), input_buffers.inputs(2)
    assert addresses(wide) == addresses(narrow)
    assert addresses(wide_oracle) == addresses(narrow_oracle)
    assert not set(addresses(wide).values()) & set(addresses(wide_oracle).values())
    assert tuple(narrow.seq_lens.shape) == (2,)


@pytest.mark.parametrize("form", INPUT_VIEWS)
def test_steps_leave_what_lies_around_the_inputs_alone(form: str):
    geometry = small(input_view=form)
    input_buffers = make_input_buffers("decode", geometry)
    input_buffers.upload(
        table_of("decode", geometry, Round(bucket=3, seq_lens=(5, 6, 7), requests=(1, 2, 3), remap=(2,)))
    )
    input_buffers.step(3)
    regions = guard_regions(input_buffers.guards, Kind.GUARD)
    assert {region.name for region in regions} == set(input_buffers.inputs(3)[0].tensors())
    assert len(regions) == 3 * (3 if form == "strided" else 2)
    for region in regions:
        want, checked = expected_words(region, live_words(region))
        assert checked.all()
        assert torch.equal(region.got, want)


@pytest.mark.parametrize("mode", ["dcp", *PADDED_MODES])
def test_the_location_of_no_token_is_0(mode: str):
    """Of a pad row, and of one shorter than its draft, which has no token at some positions (contract 0.1, 7.2)."""
    system, changes = (
        ("dcp", {"dcp_size": 2}) if mode == "dcp" else ("padded", {"padded_mode": mode, "draft_tokens": 3})
    )
    input_buffers = make_input_buffers(system, small(system, **changes))
    input_buffers.upload(table_of(system, small(system, **changes), Round(bucket=3, seq_lens=(0, 9), requests=(1, 2))))
    input_buffers.step(3)
    each = SYSTEMS[system].token_rows(small(system, **changes))
    for inputs in input_buffers.inputs(3):
        rows = inputs.out_cache_loc.view(3, each)
        assert rows[0].tolist() == [0] * each or mode in ("verify", "draft_block"), "whose tokens come after the length"
        assert rows[2].tolist() == [0] * each
        assert (rows[1] > 0).all()


def behind(tensor: torch.Tensor) -> torch.Tensor:
    """What lies right behind each element."""
    return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + 1)


def test_a_gap_holds_a_legal_value_whatever_was_written_there():
    """What takes elements for adjacent reads it."""
    geometry = small(input_view="strided")
    input_buffers = make_input_buffers("decode", geometry)
    subject, _ = input_buffers.inputs(WIDEST)
    slack = subject.req_to_token.stride(0) - geometry.token_columns
    gaps = {
        geometry.context: behind(subject.seq_lens),
        geometry.request_rows - 1: behind(subject.req_pool_indices),
        geometry.slots - 1: subject.req_to_token.as_strided(
            (geometry.request_rows, slack),
            (subject.req_to_token.stride(0), 1),
            subject.req_to_token.storage_offset() + geometry.token_columns,
        ),
    }
    for gap in gaps.values():
        gap.fill_(-7)
    input_buffers.upload(table_of("decode", geometry, Round(bucket=3, seq_lens=(5, 6, 7), requests=(1, 2, 3))))
    input_buffers.step(3)
    for legal, gap in gaps.items():
        assert (gap == legal).all()


def test_gaps_between_columns_are_filled_and_guarded():
    """Of `selection` and of one rank's log-sum-exps: what is written there is found, and gone in the next round."""
    geometry = small("dcp", input_view="strided", dcp_size=2)
    input_buffers = make_input_buffers("dcp", geometry)
    inputs, oracle = input_buffers.inputs(3)
    input_buffers.upload(
        table_of("dcp", geometry, *[Round(bucket=3, seq_lens=(5, 6, 7), requests=(1, 2, 3), seed=4)] * 2)
    )
    input_buffers.step(3)
    behind(inputs.selection)[1, 5] = -9
    inputs.partial_lse[1, 2, 0] = 77.0
    hits = []
    for region in [*guard_regions(input_buffers.guards, Kind.GUARD), *input_regions(inputs, oracle)]:
        want, checked = expected_words(region, live_words(region))
        hits += [(region, *place) for place in ((region.got != want) & checked).nonzero().tolist()]
    (guard, row, word), (lse, *place) = hits
    assert divmod(row, guard.gaps_per_row) == (1, 5)
    seen = Difference(region=guard, round=0, phase=Phase.REPLAY, row=row, word=word, got=-9, want=0)
    found = explain_guard(seen, 1)
    assert (found.kind, reason(found)) == (
        Diagnosis.PAST_THE_END,
        "wrote 4 bytes between the columns of selection, the first of them behind column 5 of row 1",
    )
    assert (lse.name, place) == ("partial_lse[1]", [2, 0])
    input_buffers.step(3)
    assert int(behind(inputs.selection)[1, 5]) == geometry.slots - 1


def test_a_request_that_moves_again_gets_other_pages():
    geometry = small()
    input_buffers = make_input_buffers("decode", geometry)
    before = input_buffers.inputs(1)[0].req_to_token[3].clone()
    seen = [before]
    input_buffers.upload(
        table_of("decode", geometry, *[Round(bucket=1, seq_lens=(5,), requests=(3,), remap=(3,)) for _ in range(3)])
    )
    for _ in range(3):
        input_buffers.step(1)
        seen.append(input_buffers.inputs(1)[0].req_to_token[3].clone())
    slots = torch.stack(seen)
    assert slots.unique().numel() == slots.numel(), "no slot of any of the four generations is used twice"


def test_reset_gives_the_state_in_which_engines_capture():
    geometry = small(draft_tokens=3, pool_size=4)
    input_buffers = make_input_buffers("draft_extend", geometry)
    input_buffers.upload(
        table_of(
            "draft_extend", geometry, Round(bucket=2, seq_lens=(30, 31), requests=(1, 2), lens={"extend_lens": (1, 0)})
        )
    )
    input_buffers.step(2)
    input_buffers.reset()
    for inputs in input_buffers.inputs(WIDEST):
        assert inputs.seq_lens.tolist() == [3 + 4] * WIDEST, "max(1, N + kp) with pooling (contract 0.2)"
        assert inputs.req_pool_indices.tolist() == [PAD_REQUEST] * WIDEST
        assert inputs.extend_lens.tolist() == [3] * WIDEST
    assert input_buffers.round_index.tolist() == [-1]
    input_buffers.step(2)
    assert input_buffers.inputs(2)[0].seq_lens.tolist() == [30, 31], "the first row again"


def test_a_feed_without_remap_slots_moves_nobody():
    geometry = small()
    input_buffers = make_input_buffers("decode", geometry, remap_slots=0)
    before = input_buffers.inputs(1)[0].req_to_token.clone()
    input_buffers.upload(table_of("decode", geometry, Round(bucket=1, seq_lens=(5,), requests=(3,)), remap_slots=0))
    input_buffers.step(1)
    assert torch.equal(input_buffers.inputs(1)[0].req_to_token, before)
    assert input_buffers.inputs(1)[0].seq_lens.tolist() == [5]


def test_the_poison_of_a_round_is_its_place_in_poisons():
    geometry = small()
    input_buffers = make_input_buffers("decode", geometry)
    input_buffers.upload(
        table_of("decode", geometry, *[Round(bucket=1, seq_lens=(5,), requests=(3,), poison=p) for p in POISONS])
    )
    kinds = []
    for _ in POISONS:
        input_buffers.step(1)
        kinds.append(int(input_buffers.control(1)[1]))
    assert kinds == [0, 1, 2]
