"""Waivers: what a ledger names is counted and does not fail, nothing else is covered, and what is gone fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import DEVICE, EagerDecode, backend, decode_round, small
from waiver_support import (
    DSA,
    LENGTHS,
    ROUNDS,
    STALE,
    WAIVED,
    UnwrittenLengths,
    judge,
    ledger_of,
    seen,
    verify,
)

from dsa_verify.base.errors import STATUS_EQUAL, STATUS_MISMATCH
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.diagnosis.not_waived import Covered
from dsa_verify.judge.schedule_laws import Law
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.runner import Runner, RunResult, new_result, status_of
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.waivers.waivers import Ledger, choose_ledger

# What is covered, and what is not ------------------------------------------------------------------------------------


def test_a_waived_difference_is_counted_and_stops_nothing() -> None:
    """Under every poison, and where rounds are replayed twice and buckets take turns."""
    findings, counts = verify(UnwrittenLengths, WAIVED)
    assert findings == []
    assert (counts.mismatches, counts.guard_hits, counts.rounds_checked) == (0, 0, len(ROUNDS))
    (use,) = counts.waivers.values()
    assert (use.id, use.field, use.checked, use.due) == ("known", DSA, len(ROUNDS), len(ROUNDS))
    assert use.rounds >= len(ROUNDS) - 1, "a stale value may be the right one by chance"
    assert use.words == counts.waived >= use.rounds
    assert not use.gone
    assert judge(UnwrittenLengths, choose_ledger(None, True))[0], "without a ledger it is a finding"


class AlsoLengths(UnwrittenLengths):
    def spoil(self) -> None:
        self.out[LENGTHS].add_(1)


class AlsoInTheField(UnwrittenLengths):
    def spoil(self) -> None:
        self.out[DSA][1:2].fill_(5)


class AlsoOtherwiseInTheSecondReplay(UnwrittenLengths):
    """DSA is written if the inputs are those of the replay before."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.before = torch.zeros_like(inputs.seq_lens)

    def spoil(self) -> None:
        again = (self.before == self.inputs.seq_lens).all()
        self.out[DSA].add_(again.int())
        self.before.copy_(self.inputs.seq_lens)


@pytest.mark.parametrize(
    "subject, fault, wanted",
    [
        (AlsoLengths, None, (LENGTHS, Diagnosis.BOUNDARY)),
        (AlsoInTheField, None, (DSA, None)),
        (AlsoOtherwiseInTheSecondReplay, None, (DSA, Diagnosis.NOT_IDEMPOTENT)),
        (UnwrittenLengths, f"past_the_end:{DSA}", (DSA, Diagnosis.PAST_THE_END)),
        (UnwrittenLengths, f"other_bucket:{DSA}", (DSA, Diagnosis.OTHER_BUCKET)),
        (UnwrittenLengths, f"output_replaced:{DSA}", (DSA, Diagnosis.BUFFER_REPLACED)),
        (UnwrittenLengths, "input_overwritten", ("seq_lens", Diagnosis.INPUT_OVERWRITTEN)),
    ],
)
def test_what_is_wrong_beside_it_is_found(
    subject: type, fault: str | None, wanted: tuple[str, Diagnosis | None]
) -> None:
    few = fault is None and subject is not AlsoOtherwiseInTheSecondReplay
    findings, counts = (judge if few else verify)(subject, ledger_of(subject), fault=fault)
    field, diagnosis = wanted
    assert {finding.field for finding in findings} == {field}
    assert diagnosis is None or findings[0].diagnosis is diagnosis
    assert counts.waived > 0
    if subject is AlsoInTheField:
        assert findings[0].place is not None
        assert findings[0].place.startswith(f"{DSA}[1]"), "the row before it is waived"


@pytest.mark.parametrize(
    "changes",
    [
        {"field": LENGTHS},
        {"subject": "support:EagerDecode"},
        {"system": "target_verify"},
        {"diagnosis": "frozen at capture"},
        {"versions": {"dsa-verify": "<0.0.1"}},
        {"versions": {"no-such-package": ">=0"}},
        {"when": {"topk": ">=9"}},
    ],
    ids=str,
)
def test_another_field_subject_system_diagnosis_version_or_geometry_is_not_covered(changes: dict[str, Any]) -> None:
    findings, counts = judge(UnwrittenLengths, ledger_of(UnwrittenLengths, **changes))
    assert seen(findings) == [(DSA, Diagnosis.NEVER_WRITTEN)]
    assert counts.mismatches > counts.waived
    assert counts.waived == 0 or "diagnosis" in changes, "a poison may be what was right at capture"


def test_a_waiver_of_some_buckets_covers_no_other() -> None:
    findings, _ = verify(UnwrittenLengths, ledger_of(UnwrittenLengths, when={"bucket": ">=4"}))
    assert [(finding.field, finding.bucket) for finding in findings] == [(DSA, 2)]


class Frozen(EagerDecode):
    """Lengths are what they were at capture, 1 each."""

    row_0 = 1

    def in_graph(self) -> None:
        super().in_graph()
        self.out[LENGTHS].fill_(1)
        self.out[LENGTHS][:1].fill_(self.row_0)


class FrozenButOne(Frozen):
    row_0 = 2


def test_a_frozen_word_is_what_was_right_at_capture() -> None:
    frozen = {"field": LENGTHS, "diagnosis": "frozen at capture"}
    findings, counts = verify(Frozen, ledger_of(Frozen, **frozen))
    assert (findings, counts.waivers[f"known {LENGTHS}"].rounds) == ([], len(ROUNDS))
    findings, counts = judge(FrozenButOne, ledger_of(FrozenButOne, **frozen))
    assert [finding.field for finding in findings] == [LENGTHS]
    assert counts.waived > 0


# What the device alone cannot say ------------------------------------------------------------------------------------


class OneMore(EagerDecode):
    """Every live length is one more than it is."""

    def in_graph(self) -> None:
        super().in_graph()
        self.out[LENGTHS].add_((self.inputs.req_pool_indices > 0).int())


class OneMoreThenSwapped(OneMore):
    """In rounds of four requests from the length `turn` on, rows 0 and 1 are swapped instead."""

    turn = 0

    def in_graph(self) -> None:
        super().in_graph()
        lengths, rows = self.out[LENGTHS], torch.arange(self.out[LENGTHS].numel(), device=DEVICE)
        swapped = torch.where(rows == 0, 1, torch.where(rows == 1, 0, rows))
        turned = self.inputs.seq_lens[:1] >= self.turn
        lengths.copy_(torch.where(turned & (rows < 2), self.inputs.seq_lens[swapped], lengths).int())


class SwappedLater(OneMoreThenSwapped):
    turn = 36


BOUNDARY = {"field": LENGTHS, "diagnosis": "boundary"}


def test_the_first_round_of_each_bucket_is_explained_and_the_rest_is_counted() -> None:
    findings, counts = verify(OneMore, ledger_of(OneMore, **BOUNDARY))
    assert findings == []
    (use,) = counts.waivers.values()
    live = sum(round_.raw_batch for round_ in ROUNDS)
    assert (use.rounds, use.words, counts.mismatches) == (len(ROUNDS), live, 0)


def test_a_word_of_the_first_round_that_is_called_otherwise_is_a_finding() -> None:
    findings, _ = judge(OneMoreThenSwapped, ledger_of(OneMoreThenSwapped, **BOUNDARY))
    assert seen(findings) == [(LENGTHS, Diagnosis.REQUEST_MAP)]
    assert findings[0].sentence.endswith("; waiver known covers only what is boundary")
    assert findings[0].differing == 2, "the rows that are not swapped are what the waiver is for"


def test_what_a_second_replay_or_another_bucket_changes_is_not_covered() -> None:
    findings, counts = verify(OneMore, ledger_of(OneMore, **BOUNDARY), fault=f"second_replay:{LENGTHS}")
    assert seen(findings) == [(LENGTHS, Diagnosis.NOT_IDEMPOTENT)]
    assert "length 7) was 8 after the first replay and 9 after a second one" in findings[0].sentence
    assert counts.waived > 0
    late = {"field": DSA, "diagnosis": ["stale", "frozen at capture", "never written"]}
    findings, counts = verify(UnwrittenLengths, ledger_of(UnwrittenLengths, **late), fault=f"other_bucket:{DSA}")
    assert seen(findings) == [(DSA, Diagnosis.OTHER_BUCKET)]
    assert counts.waived > 0


@pytest.mark.parametrize(
    "entry, other, covered",
    [
        ({"cause": "one unit off"}, {"cause": "one id off"}, "boundary, because of 'one id off'"),
        (
            {"cause": ["sum off", "one unit off"]},
            {"cause": ["sum off", "one id off"]},
            "boundary, because of 'one id off' or 'sum off'",
        ),
        (
            {"subject_says": "one more than"},
            {"subject_says": "two more"},
            "boundary, and of which the subject says 'two more'",
        ),
    ],
    ids=["cause", "causes", "subject_says"],
)
def test_a_waiver_may_say_how_its_difference_is_explained(
    entry: dict[str, Any], other: dict[str, Any], covered: str
) -> None:
    """By what was recognised, or by what the subject itself says."""
    assert judge(Explains, ledger_of(Explains, **BOUNDARY, **entry))[0] == []
    (finding,) = judge(Explains, ledger_of(Explains, **BOUNDARY, **other))[0]
    assert (finding.cause, finding.facts["size"]) == ("one unit off", 1)
    assert finding.sentence.endswith(f"; waiver known covers only what is {covered}")


class Explains(OneMore):
    def explain(self, field: str, row: int, column: int, got: int, want: int) -> str | None:
        return "one more than it is"


def test_what_was_covered_and_lies_there_still_is_not_explained_again() -> None:
    """A field that is written at capture keeps what is wrong in it, and why it is so shows in the round of it only."""
    lasting = {"field": "cu_seqlens_q", "diagnosis": "out of range", "subject_says": "it came with length 17"}
    rounds = [decode_round(4, 17, 5), decode_round(4, 9, 5), decode_round(4, 17, 6)]
    setup = ReplaySetup.make(
        SYSTEMS["decode"], small(), (4,), 0, Lasting, None, backend(), ledger_of(Lasting, **lasting)
    )
    waived: set[Covered] = set()
    assert confirm(setup, rounds, waived=waived) == []
    assert waived == {(4, "known cu_seqlens_q")}
    (finding,) = confirm(setup, [*rounds, decode_round(4, 20, 5)])
    assert (finding.field, finding.got) == ("cu_seqlens_q", 120)


class Lasting(EagerDecode):
    """A request of 17 tokens or more in row 0 leaves a constant wrong."""

    def in_graph(self) -> None:
        super().in_graph()
        length = self.inputs.seq_lens[0]
        spoiled = self.out["cu_seqlens_q"][1:2]
        spoiled.copy_(torch.where(length >= 17, length.int() + 100, spoiled))

    def explain(self, field: str, row: int, column: int, got: int, want: int) -> str | None:
        return f"it came with length {int(self.inputs.seq_lens[0])}"


def test_either_of_two_diagnoses_is_covered() -> None:
    both = {**BOUNDARY, "diagnosis": ["boundary", "request map"]}
    assert judge(OneMoreThenSwapped, ledger_of(OneMoreThenSwapped, **both))[0] == []


def test_what_was_never_written_is_covered_whatever_a_finding_would_call_it() -> None:
    """Where the poison is what lay there before, that is the poison of an earlier round, which nobody recognises."""
    rounds = [decode_round(4, 31, 20, 28, 10, poison="plausible"), decode_round(4, 30, 19, 27, 9, poison="stale")]
    two = ledger_of(UnwrittenLengths, diagnosis=["never written", "draft offset"])
    setup = ReplaySetup.make(SYSTEMS["decode"], small(), (4,), 0, UnwrittenLengths, None, backend(), two)
    waived: set[Covered] = set()
    assert confirm(setup, rounds, waived=waived) == []
    assert waived == {(4, f"known {DSA}")}


def test_a_later_round_is_not_explained() -> None:
    """Which is why a ledger should say "never written" where it can."""
    findings, counts = verify(SwappedLater, ledger_of(SwappedLater, **BOUNDARY))
    assert (findings, counts.waivers[f"known {LENGTHS}"].rounds) == ([], len(ROUNDS))


class OneMoreAtFirst(OneMore):
    """Wrong in the first capture of this process only."""

    captures = 0

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        OneMoreAtFirst.captures += 1
        self.right = OneMoreAtFirst.captures > 1

    def in_graph(self) -> None:
        EagerDecode.in_graph(self) if self.right else super().in_graph()


def test_what_does_not_show_when_it_is_explained_is_flaky(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneMoreAtFirst, "captures", 0)
    findings, _ = judge(OneMoreAtFirst, ledger_of(OneMoreAtFirst, **BOUNDARY))
    assert seen(findings) == [(LENGTHS, Diagnosis.FLAKY)]
    assert "so it is not what waiver known is for" in findings[0].sentence


# Gone ----------------------------------------------------------------------------------------------------------------


def run_of(subject: type, ledger: Ledger, **rest: Any) -> RunResult:
    run = new_result("decode", subject, backend(), ledger)
    configs = diagnostic_matrix(SYSTEMS["decode"], small(), batches=[4, 2], rounds=2)
    Runner(backend=backend(), folder=None, ledger=ledger, **rest).matrix(configs, subject, run)
    return run


def test_a_difference_that_is_gone_fails_the_run() -> None:
    run = run_of(EagerDecode, ledger_of("support:EagerDecode"))
    (use,) = run.gone
    assert (run.findings, status_of([run])) == ([], STATUS_MISMATCH)
    assert use.sentence == f"waiver known: the difference in {DSA} was not seen in 4 rounds; remove it"
    run = run_of(UnwrittenLengths, WAIVED)
    assert (run.gone, status_of([run])) == ([], STATUS_EQUAL)


@pytest.mark.parametrize("shows", [{"bucket": ">=5"}, {"rounds": ">2"}, {"topk": 9}])
def test_a_run_that_need_not_show_it_does_not_fail(shows: dict[str, Any]) -> None:
    run = run_of(EagerDecode, ledger_of("support:EagerDecode", shows=shows))
    assert (run.gone, status_of([run])) == ([], STATUS_EQUAL)
    assert run.counts.waivers[f"known {DSA}"].checked == 4


def test_a_waiver_that_does_not_apply_is_not_gone() -> None:
    run = run_of(EagerDecode, ledger_of("support:EagerDecode", versions={"dsa-verify": "<0.0.1"}))
    assert (run.gone, run.counts.waivers) == ([], {})
    (why,) = run.other_versions
    assert why.startswith("waiver known does not apply: dsa-verify 0.")
    assert why.endswith(" is outside <0.0.1")


def test_a_case_or_an_interrupted_run_says_nothing_about_what_is_gone() -> None:
    ledger = ledger_of("support:EagerDecode")
    setup = ReplaySetup.make(SYSTEMS["decode"], small(), (4,), 0, "support:EagerDecode", None, backend(), ledger)
    run = new_result("decode", "support:EagerDecode", backend(), ledger)
    Runner(backend=backend(), folder=None, ledger=ledger).case(setup.scenario(ROUNDS[:1]), None, run)
    assert (run.gone, status_of([run])) == ([], STATUS_EQUAL)
    run = run_of(EagerDecode, ledger)
    assert run.gone
    run.interrupted = True
    assert not run.gone


# The published gap ---------------------------------------------------------------------------------------------------

MTP, ORACLE = SYSTEMS["mtp"], "oracles.mtp:MtpOracle"
GAP = {"system": "mtp", "field": STALE, "when": {"draft_steps": ">=4"}}
STEPS = [
    Round(bucket=4, seq_lens=(9, 37, 17, 33), requests=(3, 4, 5, 6)),
    Round(bucket=4, seq_lens=(21, 1, 4), requests=(7, 8, 2), poison="plausible"),
    Round(bucket=4, seq_lens=(2, 3, 30, 4), requests=(4, 3, 6, 5), poison="stale", twice=True),
]


SIZES = {"pool_size": 1, "context": 37, "topk": 8, "multiprocessors": 2, "request_rows": 9}


def steps_setup(
    subject: object, ledger: Ledger, fault: str | None = "stale_draft_steps", steps: int = 4
) -> ReplaySetup:
    geometry = MTP.geometry("tiny_pool", {**SIZES, "draft_steps": steps})
    return ReplaySetup.make(MTP, geometry, (4,), 0, subject, fault, backend(), ledger)  # type: ignore[arg-type]


def test_the_published_gap_of_three_draft_steps_is_waived_field_by_field() -> None:
    """Schedules by their laws, too, and plans as the lists that they are (contract 2.3)."""
    setup, counts = steps_setup(ORACLE, ledger_of(ORACLE, **GAP)), Counts()
    assert verify_rounds(setup, [setup.table(STEPS)], counts, folder=None) == []
    assert (counts.mismatches, counts.rounds_checked) == (0, len(STEPS))
    assert {use.field: use.rounds for use in counts.waivers.values()} == dict.fromkeys(STALE, len(STEPS))


def test_the_gap_is_gone_where_there_is_none() -> None:
    setup, counts = steps_setup(ORACLE, ledger_of(ORACLE, **GAP), None), Counts()
    assert verify_rounds(setup, [setup.table(STEPS[:1])], counts, folder=None) == []
    assert {use.field for use in counts.waivers.values() if use.gone} == set(STALE)
    assert steps_setup(ORACLE, ledger_of(ORACLE, **GAP), None, steps=3).waivers == (), "two steps never take that path"


@pytest.mark.slow
def test_the_fourth_step_is_judged_while_three_are_waived() -> None:
    label = "test_waivers:AlsoTheFourth"
    setup = steps_setup(also_the_fourth, ledger_of(label, **GAP), steps=5)
    findings = verify_rounds(setup, [setup.table(STEPS[:1])], Counts(), folder=None)
    assert [finding.field for finding in findings] == ["step3_topk_v2_plan"]


def also_the_fourth() -> Any:
    from oracles.mtp import MtpOracle

    class AlsoTheFourth(MtpOracle):
        def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
            super().allocate(geometry, inputs, buffers)
            self.buffers = buffers

        def in_graph(self) -> None:
            super().in_graph()
            self.buffers["step3_topk_v2_plan"][:1].add_(1)

    return AlsoTheFourth()


also_the_fourth.__qualname__ = "AlsoTheFourth"


@pytest.mark.parametrize("law", [Law.ORDER, Law.TILE])
def test_a_waiver_may_say_which_law_is_broken(law: Law) -> None:
    """What is poisoned names no tile, in whatever order."""
    subject, field = "oracles.decode:DecodeOracle", "paged_mqa_schedule_metadata"
    ledger, geometry = ledger_of(subject, field=field, law=law.value), Geometry.resolve("tiny_pool", SIZES)
    setup = ReplaySetup.make(SYSTEMS["decode"], geometry, (4,), 0, subject, f"skip_refresh:{field}", backend(), ledger)
    counts = Counts()
    findings = verify_rounds(setup, [setup.table(STEPS[:1])], counts, folder=None)
    assert counts.waivers[f"known {field}"].rounds == 1
    if law is Law.TILE:
        assert findings == []
        return
    (finding,) = findings
    assert (finding.field, finding.law, finding.to_dict()["law"]) == (field, "existing tile", "existing tile")
    assert finding.sentence.endswith("; waiver known covers only what is never written, breaking the law of order")


def test_a_list_is_unwritten_as_a_whole_or_not_at_all() -> None:
    """The judge sees a list sorted: where an entry lies there says nothing about what was written (contract 5)."""
    ledger = ledger_of("test_waivers:OnlyTheHead", field="topk_v2_plan")
    setup = ReplaySetup.make(
        SYSTEMS["decode"], Geometry.resolve("tiny_pool", SIZES), (4,), 0, only_the_head, None, backend(), ledger
    )
    counts = Counts()
    (finding,) = verify_rounds(setup, [setup.table(STEPS[:1])], counts, folder=None)
    assert (finding.field, counts.waived) == ("topk_v2_plan", 0)


def only_the_head() -> Any:
    from oracles.decode import DecodeOracle

    class OnlyTheHead(DecodeOracle):
        def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
            super().allocate(geometry, inputs, buffers)
            self.items = buffers["topk_v2_plan"][1:]

        def in_graph(self) -> None:
            before = self.items.clone()
            super().in_graph()
            self.items.copy_(before)

    return OnlyTheHead()


only_the_head.__qualname__ = "OnlyTheHead"
