"""Replayer: a right subject passes whatever the order of buckets, and each way of failing gets its own words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pytest
import torch
from support import DEVICE, EagerDecode, backend, decode_round, open_replayer, setup_of, small

from dsa_verify.base.errors import HarnessError, ReplayError
from dsa_verify.buffers.input_buffers import InputBuffers
from dsa_verify.buffers.region import LOUD_WORD, Kind
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Dead
from dsa_verify.contract.round import Round
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.judge.judge import Difference, Phase, Tally
from dsa_verify.replay import compilations
from dsa_verify.replay.bucket import AddressChange
from dsa_verify.replay.replayer import Replayer
from dsa_verify.replay.subject_stages import SubjectError
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.pipelines.padded import Padded
from dsa_verify.systems.catalogue import SYSTEMS

ROUNDS = [
    decode_round(4, 5, 17, 37, 1),
    decode_round(2, 9, 8, poison="plausible"),
    decode_round(4, 4, 3, 2, poison="stale", remap=(1, 3)),
    decode_round(2, 1, poison="stale", twice=True),
    decode_round(4, 0, 0, 36, 35, twice=True),
    decode_round(2, poison="loud"),
]


def run(subject: Callable[[], EagerDecode], rounds: list[Round], **rest: object) -> Replayer:
    setup = setup_of(subject, **rest)  # type: ignore[arg-type]
    replayer = setup.open(len(rounds))
    replayer.run(setup.table(rounds))
    return replayer


def differences(replayer: Replayer) -> list[Difference]:
    return [difference for tally in replayer.poll().values() for difference in tally.first]


def test_a_right_subject_passes_over_interleaved_buckets():
    replayer = run(EagerDecode, ROUNDS)
    tallies = replayer.poll()
    assert set(tallies) == {4, 2}
    for bucket, tally in tallies.items():
        assert tally.count() == 0
        assert tally.compared > 0
        assert replayer.buckets[bucket].rounds == 3
    assert replayer.rounds_run == len(ROUNDS)
    assert replayer.address_changes == []
    assert replayer.compilations == []


def test_the_shipped_subject_compiles_nothing_after_warmup():
    replayer = run(None, ROUNDS)  # type: ignore[arg-type]
    assert not differences(replayer)
    assert replayer.compilations == []


def test_only_what_compiles_while_rounds_run_is_counted(monkeypatch: pytest.MonkeyPatch):
    """Not the kernels of whoever explains what was found."""
    setup = setup_of(EagerDecode)
    replayer = setup.open(len(ROUNDS))

    def compile_one(*_: object) -> bool:
        compilations._note(None, {})
        return False

    monkeypatch.setattr(compilations, "_seen", [])

    compile_one()
    assert replayer.compilations == []
    replayer.replay(setup.table(ROUNDS), after_round=compile_one)
    compile_one()
    assert [(each.round, each.bucket) for each in replayer.compilations] == [
        (i, round_.bucket) for i, round_ in enumerate(ROUNDS)
    ]


def test_capture_executes_nothing_and_warmup_leaves_no_result():
    """Before the first round the counters are those of a fresh start."""
    replayer = open_replayer(EagerDecode)
    assert all(tally == Tally(compared=0, differing={}, first=()) for tally in replayer.poll().values())
    assert replayer.input_buffers.round_index.tolist() == [-1]


def test_after_round_can_stop_a_run():
    setup = setup_of(EagerDecode)
    replayer = setup.open(8)
    seen: list[tuple[int, int]] = []

    def stop_at_third(captured, row: int) -> bool:
        seen.append((captured.bucket, row))
        return row == 2

    replayer.replay(setup.table(ROUNDS), after_round=stop_at_third)
    assert seen == [(4, 0), (2, 1), (4, 2)]
    assert replayer.rounds_run == 3


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_run_tells_of_its_rounds_and_is_told_of_before_it_is_launched(one_by_one: bool):
    told: list[object] = []

    class Tells(EagerDecode):
        def before_replay(self) -> None:
            told.append("before_replay")

    table = setup_of(Tells).table(ROUNDS[:2])
    sizes = {"capacity": 2, "remap_slots": table.remap_rows.shape[1]}
    replayer = Replayer(SYSTEMS["decode"], small(), (4, 2), Tells, backend(), **sizes, on_launch=told.append)
    told.clear()
    seen = replayer.run(table, told.append, one_by_one=one_by_one)
    launched, *rest = told
    assert launched is table
    assert rest == (["before_replay", 1] * 2 if one_by_one else ["before_replay", "before_replay", 2])
    assert {bucket: each.rounds for bucket, each in seen.buckets.items()} == {4: 1, 2: 1}


def test_what_is_observed_is_what_was_seen_so_far():
    setup = setup_of(WrongFrom)
    replayer = setup.open(len(ROUNDS))
    assert replayer.observe().first_wrong_round is None
    assert replayer.run(setup.table(ROUNDS[1:2])).first_wrong_round is None
    seen = replayer.run(setup.table(ROUNDS))
    assert seen.first_wrong_round == 1, "the first of the second table"
    assert seen.tallies == replayer.poll()
    judged = {field.name for field in replayer.buckets[4].layout if field.alias is None}
    assert {bucket: (each.rounds, each.fields) for bucket, each in seen.buckets.items()} == {
        4: (3, len(judged)),
        2: (4, len(judged)),
    }


class NeverWrites(EagerDecode):
    """Leaves one output as it finds it."""

    def in_graph(self) -> None:
        kept = self.out["cache_seqlens_int32"].clone()
        super().in_graph()
        self.out["cache_seqlens_int32"].copy_(kept)


def test_after_a_reset_the_same_rounds_show_the_same_again():
    """Outputs that a stale poison leaves, pages that a remap moved, an address that changed, and every counter."""

    def seen_in(rounds: list[Round]) -> tuple[object, ...]:
        seen = replayer.run(setup.table(rounds))
        first = {
            bucket: [(each.round, each.phase, each.region, each.row, each.got) for each in tally.first]
            for bucket, tally in seen.tallies.items()
        }
        return first, seen.tallies, {bucket: each.rounds for bucket, each in seen.buckets.items()}

    setup = setup_of(NeverWrites)
    rounds = [decode_round(4, 5, 6, poison="stale", remap=(1,)), decode_round(2, 9, poison="stale", twice=True)]
    replayer = setup.open(len(ROUNDS), resettable=True)
    first = seen_in(rounds)
    assert seen_in(rounds) != first, "the rounds before are still seen"
    seen_in([decode_round(bucket, 9, 8, poison="plausible", remap=(1, 2)) for bucket in (4, 2)])
    replayer.address_changes.append(AddressChange(bucket=4, field="page_table_1", round=0, change="gone"))
    replayer.reset()
    assert replayer.observe().first_wrong_round is None
    assert replayer.rounds_run == 0
    assert seen_in(rounds) == first


def test_a_replayer_that_keeps_no_copy_cannot_be_reset():
    with pytest.raises(HarnessError, match="open it with resettable=True"):
        open_replayer(EagerDecode).reset()


class WrongFrom(EagerDecode):
    """Wrong where the longest length is 17 or more."""

    def in_graph(self) -> None:
        super().in_graph()
        self.out["cu_seqlens_k"][-1:].add_(self.inputs.seq_lens.max() >= 17)


def test_a_difference_is_counted_once_for_each_round_and_named():
    replayer = run(WrongFrom, ROUNDS)
    tally = replayer.poll()[4]
    assert tally.count(Kind.FIELD) == 3, "round 0, and both replays of round 4"
    assert [(d.round, d.phase, d.region.name, d.row, d.got - d.want) for d in tally.first] == [
        (0, Phase.REPLAY, "cu_seqlens_k", 4, 1),
        (4, Phase.REPLAY, "cu_seqlens_k", 4, 1),
        (4, Phase.SECOND_REPLAY, "cu_seqlens_k", 4, 1),
    ]
    assert replayer.poll()[2].count() == 0


class GrowsOnRepeat(EagerDecode):
    """Right at first, one more each time the same lengths come again."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.before = torch.zeros_like(inputs.seq_lens)

    def in_graph(self) -> None:
        super().in_graph()
        self.out["cache_seqlens_int32"].add_((self.before == self.inputs.seq_lens).all())
        self.before.copy_(self.inputs.seq_lens)


def test_a_second_replay_of_the_same_inputs_is_judged_as_such():
    first = differences(run(GrowsOnRepeat, [decode_round(4, 5, 6, 7, 8, twice=True)]))
    assert {(d.phase, d.region.name) for d in first} == {(Phase.SECOND_REPLAY, "cache_seqlens_int32")}
    assert not differences(run(GrowsOnRepeat, [decode_round(4, 5, 6, 7, 8)]))


# Buffers -------------------------------------------------------------------------------------------------------------


class OwnBuffers(EagerDecode):
    """Allocates its own outputs, as a real engine does."""

    def outputs_of(self, buffers: Buffers) -> dict[str, torch.Tensor]:
        own: dict[str, torch.Tensor] = {}
        for field in buffers.layout:
            if field.alias is None:
                own[field.name] = torch.zeros(field.shape, dtype=torch.int32, device=DEVICE)
        for field in buffers.layout:
            if field.alias is not None:
                own[field.name] = own[field.alias].view(field.shape)
        return own

    def outputs(self) -> Mapping[str, torch.Tensor]:
        return self.out


def test_outputs_outside_of_the_arena_are_judged_and_poisoned():
    replayer = run(OwnBuffers, ROUNDS)
    assert not differences(replayer)
    assert all(tally.compared for tally in replayer.poll().values())
    for captured in replayer.buckets.values():
        assert (captured.buffers["page_table_1"] == LOUD_WORD).all(), "the buffers it was offered are not written"


class OwnAndWrong(OwnBuffers):
    def in_graph(self) -> None:
        super().in_graph()
        self.out["real_page_table"][:1, :1].add_(1)


class OwnAndUnwritten(OwnBuffers):
    def in_graph(self) -> None:
        kept = self.out["dsa_cu_seqlens_k"].clone()
        super().in_graph()
        self.out["dsa_cu_seqlens_k"].copy_(kept)


def test_wrong_outputs_outside_of_the_arena_are_found():
    assert {d.region.name for d in differences(run(OwnAndWrong, ROUNDS[:1]))} == {"real_page_table"}
    unwritten = differences(run(OwnAndUnwritten, ROUNDS[:1]))
    assert {(d.region.name, d.got) for d in unwritten} == {("dsa_cu_seqlens_k", LOUD_WORD)}


class OwnLongRows(OwnBuffers):
    """Rows that are further apart than they are wide."""

    def outputs_of(self, buffers: Buffers) -> dict[str, torch.Tensor]:
        own = super().outputs_of(buffers)
        table = own["page_table_1"]
        own["page_table_1"] = torch.zeros((len(table), table.shape[1] + 9), dtype=torch.int32, device=DEVICE)[:, :-9]
        return own


def test_outputs_with_long_rows_are_accepted():
    replayer = run(OwnLongRows, ROUNDS)
    assert not differences(replayer)


class OtherBucketLast(EagerDecode):
    """Bucket 2 writes into a private buffer of bucket 4."""

    first: EagerDecode | None = None

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        if buffers.layout.bucket == 4:
            OtherBucketLast.first = self

    def in_graph(self) -> None:
        super().in_graph()
        if OtherBucketLast.first is not self and OtherBucketLast.first is not None:
            OtherBucketLast.first.out["dsa_cache_seqlens_int32"][:2].fill_(-7)


@pytest.mark.parametrize("buckets", [(4, 2, 4), (4, 2)])
def test_what_one_bucket_does_to_another_is_seen_before_and_at_the_end(buckets: tuple[int, ...]):
    """In the second case only `finish` can see it: bucket 4 is never replayed again."""
    rounds = [decode_round(bucket, 5, 6) for bucket in buckets]
    found = differences(run(OtherBucketLast, rounds))
    assert {(d.phase, d.region.name, d.row, d.got) for d in found} == {
        (Phase.BEFORE, "dsa_cache_seqlens_int32", row, -7) for row in (0, 1)
    }
    assert not differences(run(OtherBucketLast, rounds[:1]))


class OtherBucketAndWrong(OtherBucketLast):
    def in_graph(self) -> None:
        super().in_graph()
        if OtherBucketLast.first is self:
            self.out["dsa_cache_seqlens_int32"][3:].add_(1)


def test_words_of_one_field_are_counted_in_every_phase():
    replayer = run(OtherBucketAndWrong, [decode_round(4, 5, 6, 7, 8), decode_round(2, 5, 6)])
    tally = replayer.poll()[4]
    assert len(tally.first) == 1 + 2 + 1, "one word in REPLAY; the -7s and that word again in BEFORE"
    assert tally.count(Kind.FIELD) == len(tally.first)


# Addresses -----------------------------------------------------------------------------------------------------------


class Rebinds(EagerDecode):
    """From its third replay on hands out what `changed` makes of an output."""

    field = "real_page_table"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.buffers, self.calls = buffers, 0
        self.copy = buffers[self.field].clone()  # here, because before_replay may allocate nothing

    def before_replay(self) -> None:
        self.calls += 1
        if self.calls == 2 + 3:  # two of the warm-up
            self.change()

    def change(self) -> None:
        self.buffers[self.field] = self.copy


class Reshapes(Rebinds):
    def change(self) -> None:
        self.buffers[self.field] = self.buffers[self.field][:, :-1]


class Forgets(Rebinds):
    def change(self) -> None:
        del self.buffers[self.field]


@pytest.mark.parametrize("subject, change", [(Rebinds, "pointer "), (Forgets, "the output is gone")])
def test_the_ledger_names_the_round_in_which_an_output_moved(subject: type[Rebinds], change: str):
    replayer = run(subject, [decode_round(4, 5)] * 6, buckets=(4,))
    (seen,) = replayer.address_changes
    assert (seen.bucket, seen.field, seen.round) == (4, "real_page_table", 2)
    assert seen.change.startswith(change)


def test_the_ledger_sees_a_change_of_shape_when_it_is_polled():
    setup = setup_of(Reshapes, buckets=(4,))
    replayer = setup.open(6)
    replayer.replay(setup.table([decode_round(4, 5)] * 6))
    assert replayer.address_changes == []
    replayer.poll()
    (seen,) = replayer.address_changes
    assert seen.change == "shape (4, 10) became (4, 9)"
    replayer.poll()
    assert len(replayer.address_changes) == 1, "a change is listed once"


# Subjects that fail --------------------------------------------------------------------------------------------------


class Returns(EagerDecode):
    def outputs(self) -> Mapping[str, torch.Tensor]:
        return self.spoil(dict(self.out))

    def spoil(self, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class Missing(Returns):
    def spoil(self, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del out["dsa_cu_seqlens_k"]
        return out


class WrongShape(Returns):
    def spoil(self, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out["cu_seqlens_k"] = out["cu_seqlens_k"][:-1]
        return out


class WrongDtype(Returns):
    def spoil(self, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out["dsa_cu_seqlens_k"] = out["dsa_cu_seqlens_k"].long()
        return out


class BrokenAlias(Returns):
    def spoil(self, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out["dsa_seqlens_expanded"] = out["cache_seqlens_int32"].clone()
        return out


class StridedAlias(Returns):
    """The length of every third request, at the address of the first."""

    def spoil(self, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        lengths = out["cache_seqlens_int32"]
        out["dsa_seqlens_expanded"] = lengths.as_strided(lengths.shape, (3,), lengths.storage_offset())
        return out


class StridedColumn(Returns):
    def spoil(self, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        lengths = out["cache_seqlens_int32"]
        out["paged_mqa_ctx_lens_2d"] = lengths.as_strided((len(lengths), 1), (2, 1), lengths.storage_offset())
        return out


class OwnerMissing(Returns):
    def spoil(self, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del out["cache_seqlens_int32"]
        return out


class Everything(Returns):
    def spoil(self, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {}


class Transposed(Returns):
    def spoil(self, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows, columns = out["page_table_1"].shape
        out["page_table_1"] = torch.zeros((columns, rows), dtype=torch.int32, device=DEVICE).t()
        return out


@pytest.mark.parametrize(
    "subject, text",
    [
        (Missing, "dsa_cu_seqlens_k is missing (int32 [5], contract 1.1)"),
        (WrongShape, "cu_seqlens_k is int32 [4], it must be int32 [5] (contract 1.1)"),
        (WrongDtype, "dsa_cu_seqlens_k is int64 [5], it must be int32 [5] (contract 1.1)"),
        (BrokenAlias, "dsa_seqlens_expanded must share its memory with cache_seqlens_int32 (contract 1.1)"),
        (
            StridedAlias,
            "dsa_seqlens_expanded has strides [3], as a view of cache_seqlens_int32 it must have [1] (contract 1.1)",
        ),
        (
            StridedColumn,
            "paged_mqa_ctx_lens_2d has strides [2, 1], as a view of cache_seqlens_int32 it must have [1, 1] "
            "(contract 1.1)",
        ),
        (OwnerMissing, "cache_seqlens_int32 is missing (int32 [4], contract 1.1)"),
    ],
)
def test_wrong_outputs_are_named_with_what_they_must_be(subject: type[Returns], text: str):
    with pytest.raises(SubjectError) as caught:
        open_replayer(subject)
    assert str(caught.value) == text
    assert (caught.value.stage, caught.value.bucket, caught.value.kind) == ("allocate", 4, "wrong outputs")


class OddStrides(Returns):
    """Other strides where there is one element only, which no consumer can tell."""

    def spoil(self, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        lengths = out["cache_seqlens_int32"]
        out["dsa_seqlens_expanded"] = lengths.as_strided((1,), (3,), lengths.storage_offset())
        out["paged_mqa_ctx_lens_2d"] = lengths.as_strided((1, 1), (5, 7), lengths.storage_offset())
        return out


def test_strides_of_one_element_do_not_matter():
    assert not differences(run(OddStrides, [decode_round(1, 5)], buckets=(1,)))


class OwnerOfLongRows(OwnBuffers):
    """With pages of one token the two tables are one, here with rows further apart than they are wide."""

    def outputs_of(self, buffers: Buffers) -> dict[str, torch.Tensor]:
        own = super().outputs_of(buffers)
        rows, columns = own["page_table_1"].shape
        table = torch.zeros((rows, columns + 9), dtype=torch.int32, device=DEVICE)[:, :columns]
        return own | {"page_table_1": table, "real_page_table": self.alias_of(table)}

    def alias_of(self, table: torch.Tensor) -> torch.Tensor:
        return table


class AliasOfAdjacentRows(OwnerOfLongRows):
    def alias_of(self, table: torch.Tensor) -> torch.Tensor:
        return table.as_strided(table.shape, (table.shape[1], 1))


def test_an_alias_has_the_rows_of_its_owner():
    one_table = small(page_size=1)
    assert not differences(run(OwnerOfLongRows, ROUNDS[:1], geometry=one_table))
    with pytest.raises(SubjectError, match=r"real_page_table has strides \[37, 1\], as a view of page_table_1 it must"):
        open_replayer(AliasOfAdjacentRows, geometry=one_table)


def test_every_wrong_output_is_named_at_once():
    with pytest.raises(SubjectError) as caught:
        open_replayer(Everything)
    for field in SYSTEMS["decode"].layout(small(), 4):
        assert f"{field.name} is missing (int32 {list(field.shape)}" in str(caught.value)


def test_outputs_whose_rows_are_torn_are_wrong_outputs():
    with pytest.raises(SubjectError, match="page_table_1"):
        open_replayer(Transposed)


class RaisesAt(EagerDecode):
    stage = ""
    calls = 0

    def fail(self, stage: str) -> None:
        if stage == self.stage:
            raise ValueError("broken")

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.fail("allocate")

    def before_replay(self) -> None:
        self.calls += 1
        self.fail("before_replay" if self.calls == 2 + 2 else "")

    def in_graph(self) -> None:
        super().in_graph()
        self.fail("warm-up")
        self.fail("capture" if self.calls == 2 else "")


def factory_that_raises() -> EagerDecode:
    raise ValueError("broken")


@pytest.mark.parametrize("stage", ["construct", "allocate", "warm-up", "before_replay"])
def test_a_subject_that_raises_says_where(stage: str):
    subject: Callable[[], EagerDecode] = (
        factory_that_raises if stage == "construct" else type("Raises", (RaisesAt,), {"stage": stage})
    )
    with pytest.raises(SubjectError) as caught:
        run(subject, ROUNDS[:1] * 4, buckets=(4,))
    assert (caught.value.stage, caught.value.kind) == (stage, f"raises in {stage}")
    where = "factory_that_raises" if stage == "construct" else "fail"
    assert str(caught.value).startswith(f"{stage} raised ValueError: broken ({where}, {__file__}:")
    assert caught.value.round == (1 if stage == "before_replay" else 0)


@pytest.mark.parametrize("stage, method", [("allocate", "allocate"), ("warm-up", "in_graph"), ("replay", "in_graph")])
def test_a_subject_that_exits_is_its_own_failure(stage: str, method: str) -> None:
    """And no verdict: sys.exit(0) would be one that all is equal."""

    class Exits(EagerDecode):
        calls = 0

        def allocate(self, *given: object) -> None:
            super().allocate(*given)
            if stage == "allocate":
                raise SystemExit(0)

        def in_graph(self) -> None:
            super().in_graph()
            if stage == "warm-up":
                raise SystemExit(0)

        def before_replay(self) -> None:
            self.calls += 1
            if stage == "replay" and self.calls > 2:
                raise SystemExit(0)

    with pytest.raises(
        SubjectError, match=rf"raised SystemExit: 0 \({method if stage != 'replay' else 'before_replay'}, "
    ):
        run(Exits, ROUNDS)


@pytest.mark.parametrize("names, word", [("cache_seqlens_int32", "cache_seqlens_int32"), (("nope",), "nope")])
def test_what_is_ready_before_the_graph_is_named_by_fields(names: object, word: str) -> None:
    """A name that is none would leave its check out without a word."""

    class Ready(EagerDecode):
        ready_before_graph = names

    with pytest.raises(
        SubjectError, match=f"ready_before_graph: '{word}' is no field; it is a tuple of names of cache_"
    ):
        run(Ready, ROUNDS)


def test_a_subject_that_raises_under_capture_only():
    subject = type("Raises", (RaisesAt,), {"stage": "capture", "fail": lambda self, stage: None})

    def in_graph(self: RaisesAt) -> None:
        self.graphs = getattr(self, "graphs", 0) + 1
        EagerDecode.in_graph(self)
        if self.graphs == 3:
            raise ValueError("broken")

    subject.in_graph = in_graph  # type: ignore[attr-defined]
    with pytest.raises(SubjectError, match="ValueError: broken") as caught:
        open_replayer(subject)
    assert (caught.value.stage, caught.value.kind) == ("capture", "raises in capture")


class Synchronises(EagerDecode):
    def in_graph(self) -> None:
        super().in_graph()
        self.longest = int(self.inputs.seq_lens.max())


def test_a_subject_that_reads_on_the_host_in_capture():
    with pytest.raises(SubjectError, match="cannot be captured while doing") as caught:
        open_replayer(Synchronises)
    assert caught.value.kind == "synchronises in capture"


class KeepsInReplay(EagerDecode):
    """Its first replay may make constants (contract 3.7); the ones after that may not keep anything new."""

    limit = 0
    calls = 0

    def before_replay(self) -> None:
        self.calls += 1
        torch.ones(3, device=DEVICE).sum()
        if self.calls - 2 <= self.limit:
            self.kept = torch.empty(100, dtype=torch.int32, device=DEVICE)


def test_allocations_kept_by_before_replay_are_refused_after_the_first_round():
    lazy = type("Lazy", (KeepsInReplay,), {"limit": 1})
    assert not differences(run(lazy, ROUNDS[:1] * 6, buckets=(4,)))
    with pytest.raises(SubjectError, match=r"keeps 1 new allocation\(s\), the first 400 bytes made by") as caught:
        run(type("Greedy", (KeepsInReplay,), {"limit": 2}), ROUNDS[:1] * 6, buckets=(4,))
    assert (caught.value.kind, caught.value.round) == ("allocates in replay", 1)


# Inputs --------------------------------------------------------------------------------------------------------------


class WritesAt(EagerDecode):
    """Writes one element of -7, `at` elements beyond the start of the input `name`; `only`: at this bucket only."""

    name, at, only = "seq_lens", 0, 0

    def in_graph(self) -> None:
        super().in_graph()
        if self.only in (0, len(self.inputs.seq_lens)):
            memory = self.inputs.tensors()[self.name]
            memory.as_strided((1,), (1,), memory.storage_offset() + self.at).fill_(-7)


STRIDED = small(input_view="strided")
WIDTH, ROWS = STRIDED.token_columns, STRIDED.request_rows
PITCH = (
    InputBuffers(SYSTEMS["decode"], STRIDED, 4, DEVICE, capacity=1, remap_slots=0).inputs(4)[0].req_to_token.stride(0)
)


@pytest.mark.parametrize(
    "name, at, geometry, text",
    [
        (
            "seq_lens",
            3,
            STRIDED,
            "wrote 8 bytes into the gap behind the rows of seq_lens, the first 0 bytes beyond",
        ),
        ("seq_lens", -1, STRIDED, "wrote 8 bytes before field seq_lens, the first 8 bytes ahead of its start"),
        ("seq_lens", 8, STRIDED, "wrote 8 bytes past field seq_lens, the first 0 bytes beyond its end"),
        (
            "req_to_token",
            PITCH + WIDTH + 5,
            STRIDED,
            "wrote 4 bytes into the gap behind the rows of req_to_token, the",
        ),
        ("req_to_token", ROWS * PITCH, STRIDED, "wrote 4 bytes past field req_to_token, the first 0 bytes beyond its"),
        ("req_to_token", ROWS * WIDTH, small(), "wrote 4 bytes past field req_to_token, the first 0 bytes beyond its"),
        ("req_pool_indices", 4, small(), "wrote 8 bytes past field req_pool_indices, the first 0 bytes beyond its end"),
        (
            "req_pool_indices",
            -1,
            small(input_view="offset"),
            "wrote 8 bytes before field req_pool_indices, the first",
        ),
        ("seq_lens", 2, small(index_dtype="int32"), "input overwritten: seq_lens[2] is -7 after the replay, it was "),
    ],
)
def test_what_is_written_around_an_input_is_found(name: str, at: int, geometry: Geometry, text: str):
    """In the last case bucket 2 writes a row that belongs to bucket 4 only."""
    only = 2 if "overwritten" in text else 4
    subject = type("Writes", (WritesAt,), {"name": name, "at": at, "only": only})
    findings = confirm(setup_of(subject, geometry=geometry), ROUNDS)
    (sentence,) = [finding.sentence for finding in findings]
    assert text in sentence
    assert {finding.bucket for finding in findings} == {only}


def by_anothers_stride(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """What a kernel reads of `tensor` that is handed the strides of `other`."""
    return tensor.as_strided(tensor.shape, other.stride(), tensor.storage_offset())


class SwapsStrides(EagerDecode):
    """Right wherever both lists lie alike."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        lengths, requests = inputs.seq_lens, inputs.req_pool_indices
        swapped = dataclasses.replace(
            inputs,
            seq_lens=by_anothers_stride(lengths, requests),
            req_pool_indices=by_anothers_stride(requests, lengths),
        )
        super().allocate(geometry, swapped, buffers)


@pytest.mark.parametrize("form, wrong", [("plain", False), ("strided", True)])
def test_a_stride_that_is_another_inputs_is_found(form: str, wrong: bool):
    findings = confirm(setup_of(SwapsStrides, geometry=small(input_view=form)), ROUNDS)
    assert ({"cache_seqlens_int32", "page_table_1"} <= {finding.field for finding in findings}) is wrong
    assert bool(findings) is wrong


class WritesConstant(Padded):
    """Bucket 4 writes an entry of nobody's into a constant, where the first length is 5."""

    def in_graph(self) -> None:
        super().in_graph()
        if len(self._inputs.seq_lens) == 4:
            entry = self._full_to_swa[3:4]
            entry.copy_(torch.where(self._inputs.seq_lens[:1] == 5, -7, entry))


@pytest.mark.parametrize("buckets", [(4,), (4, 2), (4, 4)])
def test_a_constant_that_is_written_is_found_whatever_bucket_comes_last(buckets: tuple[int, ...]):
    setup = setup_of(WritesConstant, system="padded", geometry=SYSTEMS["padded"].geometry("tiny_v4"), buckets=(4, 2))
    rounds = [decode_round(bucket, 5 + i, 6) for i, bucket in enumerate(buckets)]
    (finding,) = verify_rounds(setup, [setup.table(rounds)], Counts(), folder=None)
    assert (finding.bucket, finding.round) == (4, 0)
    assert finding.sentence.startswith("input overwritten: full_to_swa[3] is -7 after the replay, it was ")


# Oracles that fail ---------------------------------------------------------------------------------------------------


class OracleThatRaises(EagerDecode):
    def in_graph(self) -> None:
        raise ValueError("broken oracle")


class OracleThatSynchronises(EagerDecode):
    def in_graph(self) -> None:
        super().in_graph()
        self.inputs.seq_lens.tolist()


class OracleOutOfBounds(EagerDecode):
    def in_graph(self) -> None:
        super().in_graph()
        table = self.out["cu_seqlens_k"]
        table.as_strided((1,), (1,), table.storage_offset() + table.numel()).fill_(3)


def replayer_with_oracle(oracle: type) -> Replayer:
    system = dataclasses.replace(SYSTEMS["decode"], oracle=f"{__name__}:{oracle.__name__}")
    return Replayer(system, small(), (2,), EagerDecode, backend(), capacity=4, remap_slots=0)


@pytest.mark.parametrize("oracle", [OracleThatRaises, OracleThatSynchronises])
def test_an_oracle_that_cannot_be_captured_is_the_harness_own_fault(oracle: type):
    with pytest.raises(HarnessError, match="the oracle of decode cannot be captured"):
        replayer_with_oracle(oracle)


def test_an_oracle_that_cannot_be_replayed_is_the_harness_own_fault_too():
    class Gone:
        def replay(self) -> None:
            raise ReplayError("a buffer is gone")

    replayer = open_replayer(EagerDecode)
    for captured in replayer.buckets.values():
        captured.oracle_graph = Gone()
    bucket = max(replayer.buckets)
    with pytest.raises(HarnessError, match="cannot be replayed: a buffer is gone"):
        replayer.run(setup_of(EagerDecode, buckets=tuple(replayer.buckets)).table([decode_round(bucket, 5)]))


def test_a_dead_rule_that_cannot_be_judged_is_refused_not_ignored():
    layout = SYSTEMS["decode"].layout(small(), 2)
    fields = tuple(dataclasses.replace(field, dead=Dead.INTACT) for field in layout)
    system = dataclasses.replace(SYSTEMS["decode"], layout=lambda *_: dataclasses.replace(layout, fields=fields))
    with pytest.raises(HarnessError, match="cannot be judged intact"):
        Replayer(system, small(), (2,), EagerDecode, backend(), capacity=4, remap_slots=0)


def test_an_oracle_that_writes_beyond_its_buffers_is_seen():
    replayer = replayer_with_oracle(OracleOutOfBounds)
    replayer.run(setup_of(EagerDecode, buckets=(2,)).table([decode_round(2, 5)], 0))
    assert {d.region.kind for d in differences(replayer)} == {Kind.ORACLE_GUARD}


# Warm-ups ------------------------------------------------------------------------------------------------------------


class Logs(EagerDecode):
    calls: list[str]

    def before_replay(self) -> None:
        self.calls.append("before_replay")

    def in_graph(self) -> None:
        super().in_graph()
        self.calls.append("in_graph")


@pytest.mark.parametrize(
    "warm_ups, calls",
    [
        ("refreshed", ["before_replay", "in_graph", "before_replay", "in_graph", "in_graph"]),
        ("together", ["before_replay", "in_graph", "in_graph", "in_graph"]),
    ],
)
def test_two_warm_ups_have_a_preparation_each_or_one_for_both(warm_ups: str, calls: list[str]):
    subject = type("OfThisTest", (Logs,), {"calls": []})
    open_replayer(subject, buckets=(2,), geometry=small(warm_ups=warm_ups))
    assert subject.calls == calls


def test_what_each_warm_up_advances_shows_only_after_warm_ups_together():
    def found(warm_ups: str) -> set[str]:
        return {
            d.region.name
            for d in differences(run(EagerDecode, ROUNDS, fault="advances_twice", geometry=small(warm_ups=warm_ups)))
        }

    assert found("refreshed") == set()
    assert found("together") == {"cache_seqlens_int32"}
