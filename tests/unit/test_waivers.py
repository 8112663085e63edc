"""Waivers: what a ledger names is counted and does not fail, nothing else is covered, and what is gone fails."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sqlite3
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from support import DEVICE, EagerDecode, backend, decode_round, small

from dsa_verify.commands import replay as replay_command
from dsa_verify.confirm import Covered, confirm
from dsa_verify.engines import engine_subject
from dsa_verify.errors import STATUS_EQUAL, STATUS_MISMATCH, UsageError
from dsa_verify.findings import Diagnosis, Finding
from dsa_verify.geometry import Geometry
from dsa_verify.job import Job
from dsa_verify.laws import Law
from dsa_verify.matrix import diagnostic_matrix
from dsa_verify.runs import Run, Runner, open_run, status_of
from dsa_verify.scenario import Round
from dsa_verify.subject import Buffers, Inputs
from dsa_verify.systems import SYSTEMS
from dsa_verify.verify import Counts, verify_rounds
from dsa_verify.waivers import (
    SHIPPED,
    WAIVABLE,
    Ledger,
    check_names,
    choose_ledger,
    fields_of,
    parse_ledger,
    read_ledger,
)
from fuzz import campaign, shard_work
from fuzz import command as fuzz_command
from fuzz.campaign_report import report_lines, summary
from fuzz.explain import explain
from fuzz.plan import Plan, ShardSpec, parse_plan, settle_plan
from fuzz.shard_folder import shard_folder
from fuzz.shrink import shrink
from fuzz.store import Store
from fuzz.trials import Signature

HERE = "test_waivers"
LENGTHS, DSA = "cache_seqlens_int32", "dsa_cache_seqlens_int32"
# Lengths far enough from each other that one more is no other row's.
ROUNDS = [
    decode_round(4, 5, 17, 33, 11),
    decode_round(2, 9, 25),
    decode_round(4, 14, 23, 2, remap=(1, 3), poison="plausible"),
    decode_round(2, 7, poison="stale", twice=True),
    decode_round(4, 31, 20, 28, 10, poison="stale"),
    decode_round(4, 36, 3, 19, 13, twice=True),
]


def entry_of(subject: object, /, **changes: Any) -> dict[str, Any]:
    """A waiver for words of DSA that are never written; a change to None takes the key out."""
    label = subject if isinstance(subject, str) else f"{HERE}:{subject.__name__}"  # type: ignore[attr-defined]
    entry = {
        "id": "known",
        "subject": label,
        "versions": {"dsa-verify": ">=0.0.1"},
        "system": "decode",
        "field": DSA,
        "diagnosis": "never written",
        "reason": "this is how it was published (contract 2.3)",
    } | changes
    return {key: value for key, value in entry.items() if value is not None}


def ledger_of(subject: object, /, **changes: Any) -> Ledger:
    return parse_ledger([entry_of(subject, **changes)], "test")


def verify(
    subject: type, ledger: Ledger, rounds: list[Round] = ROUNDS, fault: str | None = None
) -> tuple[list[Finding], Counts]:
    buckets = tuple(dict.fromkeys(round_.bucket for round_ in rounds))
    job = Job.make(SYSTEMS["decode"], small(), buckets, 0, subject, fault, backend(), ledger)
    counts = Counts()
    return verify_rounds(job, [job.table(rounds)], counts, folder=None), counts


def judge(subject: type, ledger: Ledger, fault: str | None = None) -> tuple[list[Finding], Counts]:
    """One round of one bucket, for what shows in the first one."""
    return verify(subject, ledger, ROUNDS[:1], fault)


def seen(findings: list[Finding]) -> list[tuple[str | None, Diagnosis]]:
    return [(finding.field, finding.diagnosis) for finding in findings]


class Unwritten(EagerDecode):
    """Leaves DSA and the sum of lengths as they are."""

    kept = (DSA, "cu_seqlens_k")

    def in_graph(self) -> None:
        before = {name: self.out[name].clone() for name in self.kept}
        super().in_graph()
        for name, tensor in before.items():
            self.out[name].copy_(tensor)
        self.spoil()

    def spoil(self) -> None:
        """What else is wrong."""


class UnwrittenLengths(Unwritten):
    kept = (DSA,)


WAIVED = ledger_of(UnwrittenLengths)


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
    assert counts.waived > 0
    late = {"field": DSA, "diagnosis": ["stale", "frozen at capture", "never written"]}
    findings, counts = verify(UnwrittenLengths, ledger_of(UnwrittenLengths, **late), fault=f"other_bucket:{DSA}")
    assert seen(findings) == [(DSA, Diagnosis.OTHER_BUCKET)]
    assert counts.waived > 0


def test_a_waiver_may_say_how_its_difference_is_explained() -> None:
    """By the diagnosis or by the subject itself."""
    for says, own in (("+ one token", None), ("one more than it is", "one more than it is")):
        ledger = ledger_of(Explains, **BOUNDARY, says=says)
        assert judge(Explains, ledger)[0] == []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Explains, "word", "unlike that" if own else Explains.word)
            patch.setattr(Explains, "step", 1 if own else 4)
            (finding,) = judge(Explains, ledger)[0]
        assert finding.sentence.endswith(f"; waiver known covers only what is boundary, and says {says!r}")


class Explains(OneMore):
    word, step = "one more than it is", 1

    def in_graph(self) -> None:
        super().in_graph()
        self.out[LENGTHS].add_((self.inputs.req_pool_indices > 0).int() * (self.step - 1))

    def explain(self, field: str, row: int, column: int, got: int, want: int) -> str | None:
        return self.word


def test_what_was_covered_and_lies_there_still_is_not_explained_again() -> None:
    """A field that is written at capture keeps what is wrong in it, and why it is so shows in the round of it only."""
    lasting = {"field": "cu_seqlens_q", "diagnosis": "out of range", "says": "it came with length 17"}
    rounds = [decode_round(4, 17, 5), decode_round(4, 9, 5), decode_round(4, 17, 6)]
    job = Job.make(SYSTEMS["decode"], small(), (4,), 0, Lasting, None, backend(), ledger_of(Lasting, **lasting))
    waived: set[Covered] = set()
    assert confirm(job, rounds, waived=waived) == []
    assert waived == {(4, "known cu_seqlens_q")}
    (finding,) = confirm(job, [*rounds, decode_round(4, 20, 5)])
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
    job = Job.make(SYSTEMS["decode"], small(), (4,), 0, UnwrittenLengths, None, backend(), two)
    waived: set[Covered] = set()
    assert confirm(job, rounds, waived=waived) == []
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


def run_of(subject: type, ledger: Ledger, **rest: Any) -> Run:
    run = open_run("decode", subject, backend(), ledger)
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
    job = Job.make(SYSTEMS["decode"], small(), (4,), 0, "support:EagerDecode", None, backend(), ledger)
    run = open_run("decode", "support:EagerDecode", backend(), ledger)
    Runner(backend=backend(), folder=None, ledger=ledger).case(job.scenario(ROUNDS[:1]), None, run)
    assert (run.gone, status_of([run])) == ([], STATUS_EQUAL)
    run = run_of(EagerDecode, ledger)
    assert run.gone
    run.interrupted = True
    assert not run.gone


# The published gap ---------------------------------------------------------------------------------------------------

MTP, ORACLE = SYSTEMS["mtp"], "oracles.mtp:MtpOracle"
STALE = [f"step{step}_{name}" for step in range(3) for name in ("paged_mqa_schedule_metadata", "topk_v2_plan")]
GAP = {"system": "mtp", "field": STALE, "when": {"draft_steps": ">=4"}}
STEPS = [
    Round(bucket=4, seq_lens=(9, 37, 17, 33), requests=(3, 4, 5, 6)),
    Round(bucket=4, seq_lens=(21, 1, 4), requests=(7, 8, 2), poison="plausible"),
    Round(bucket=4, seq_lens=(2, 3, 30, 4), requests=(4, 3, 6, 5), poison="stale", twice=True),
]


SIZES = {"pool_size": 1, "context": 37, "topk": 8, "multiprocessors": 2, "request_rows": 9}


def steps_job(subject: object, ledger: Ledger, fault: str | None = "stale_draft_steps", steps: int = 4) -> Job:
    geometry = Geometry.resolve("tiny_pool", {**SIZES, "draft_steps": steps})
    return Job.make(MTP, geometry, (4,), 0, subject, fault, backend(), ledger)  # type: ignore[arg-type]


def test_the_published_gap_of_three_draft_steps_is_waived_field_by_field() -> None:
    """Schedules by their laws, too, and plans as the lists that they are (contract 2.3)."""
    job, counts = steps_job(ORACLE, ledger_of(ORACLE, **GAP)), Counts()
    assert verify_rounds(job, [job.table(STEPS)], counts, folder=None) == []
    assert (counts.mismatches, counts.rounds_checked) == (0, len(STEPS))
    assert {use.field: use.rounds for use in counts.waivers.values()} == dict.fromkeys(STALE, len(STEPS))


def test_the_gap_is_gone_where_there_is_none() -> None:
    job, counts = steps_job(ORACLE, ledger_of(ORACLE, **GAP), None), Counts()
    assert verify_rounds(job, [job.table(STEPS[:1])], counts, folder=None) == []
    assert {use.field for use in counts.waivers.values() if use.gone} == set(STALE)
    assert steps_job(ORACLE, ledger_of(ORACLE, **GAP), None, steps=3).waivers == (), "two steps never take that path"


@pytest.mark.slow
def test_the_fourth_step_is_judged_while_three_are_waived() -> None:
    label = f"{HERE}:AlsoTheFourth"
    job = steps_job(also_the_fourth, ledger_of(label, **GAP), steps=5)
    findings = verify_rounds(job, [job.table(STEPS[:1])], Counts(), folder=None)
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
    job = Job.make(SYSTEMS["decode"], geometry, (4,), 0, subject, f"skip_refresh:{field}", backend(), ledger)
    counts = Counts()
    findings = verify_rounds(job, [job.table(STEPS[:1])], counts, folder=None)
    assert counts.waivers[f"known {field}"].rounds == 1
    if law is Law.TILE:
        assert findings == []
        return
    (finding,) = findings
    assert (finding.field, finding.law, finding.to_dict()["law"]) == (field, "existing tile", "existing tile")
    assert finding.sentence.endswith("; waiver known covers only what is never written, breaking the law of order")


def test_a_list_is_unwritten_as_a_whole_or_not_at_all() -> None:
    """The judge sees a list sorted: where an entry lies there says nothing about what was written (contract 5)."""
    ledger = ledger_of(f"{HERE}:OnlyTheHead", field="topk_v2_plan")
    job = Job.make(
        SYSTEMS["decode"], Geometry.resolve("tiny_pool", SIZES), (4,), 0, only_the_head, None, backend(), ledger
    )
    counts = Counts()
    (finding,) = verify_rounds(job, [job.table(STEPS[:1])], counts, folder=None)
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


# Doors ---------------------------------------------------------------------------------------------------------------


def toml_of(folder: Path, entry: Mapping[str, Any]) -> Path:
    lines = ["schema = 1", "[[waiver]]"]
    for key, value in entry.items():
        text = json.dumps(value)
        if isinstance(value, dict):
            text = "{ " + ", ".join(f"{name} = {json.dumps(each)}" for name, each in value.items()) + " }"
        lines.append(f"{key} = {text}")
    path = folder / "mine.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def replay(folder: Path, subject: str, **changes: Any) -> tuple[int, dict[str, Any], ElementTree.Element]:
    options = replay_command.Options(
        cases=(),
        systems=("decode",),
        preset="tiny",
        subject=subject,
        fault=None,
        rounds=4,
        seed=0,
        batches=(4,),
        drafts=(),
        settings=("context=37", "request_rows=9", "topk=8"),
        keep_going=False,
        json_path=folder / "r.json",
        junit_path=folder / "r.xml",
        folder=folder / "findings",
    )
    status = replay_command.run(dataclasses.replace(options, **changes), DEVICE)
    return status, json.loads((folder / "r.json").read_text()), ElementTree.parse(folder / "r.xml").getroot()[0]


def test_reports_name_what_was_waived(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = toml_of(tmp_path, entry_of(UnwrittenLengths))
    status, result, suite = replay(tmp_path, f"{HERE}:UnwrittenLengths", waivers=path)
    said = capsys.readouterr().out
    assert status == STATUS_EQUAL, said
    assert "  0 mismatches beyond 1 named waiver: known (4 rounds)\n" in said
    assert "4 replays checked, all equal beyond 1 named waiver; exit status 0" in said
    (use,) = result["waivers"]
    assert (use["id"], use["field"], use["rounds"], use["gone"]) == ("known", DSA, 4, False)
    assert result["waived"] == use["words"] > 0 == result["mismatches"]
    (fact,) = [each for each in suite.iter("property") if each.get("name") == f"waiver known: {DSA}"]
    assert str(fact.get("value")).startswith("4 of 4 rounds, ")
    status, result, _ = replay(tmp_path, f"{HERE}:UnwrittenLengths", no_waivers=True)
    assert (status, result["findings"][0]["reproduce"].endswith(".json --no-waivers")) == (STATUS_MISMATCH, True)


def test_reports_name_what_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = toml_of(tmp_path, entry_of("support:EagerDecode"))
    status, result, suite = replay(tmp_path, "support:EagerDecode", waivers=path)
    sentence = f"waiver known: the difference in {DSA} was not seen in 4 rounds; remove it"
    said = capsys.readouterr().out
    assert (status, result["findings"], result["waivers"][0]["gone"]) == (STATUS_MISMATCH, [], True)
    assert f"GONE: {sentence}" in said
    assert "0 finding(s), 1 waived difference(s) gone; exit status 1" in said
    (failure,) = suite.iter("failure")
    assert (failure.get("type"), failure.get("message")) == ("gone", sentence)
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")


def test_a_ledger_without_effect_is_refused(tmp_path: Path) -> None:
    path = toml_of(tmp_path, entry_of(UnwrittenLengths))
    with pytest.raises(UsageError, match=r"no waiver for support:EagerDecode of decode; leave it out"):
        replay(tmp_path, "support:EagerDecode", waivers=path)
    with pytest.raises(UsageError, match=r"--waivers: has no effect with --no-waivers"):
        replay(tmp_path, "support:EagerDecode", waivers=path, no_waivers=True)


def test_what_is_fuzzed_is_found_beside_a_waiver(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = fuzz_command.Options(
        systems=("decode",),
        preset="tiny",
        subject=f"{HERE}:AlsoShorter",
        fault=None,
        rounds=60,
        seed=3,
        batches=(4,),
        drafts=(),
        settings=("context=37", "request_rows=9", "topk=8"),
        resident=False,
        keep_going=False,
        shrink_s=0.0,
        json_path=tmp_path / "r.json",
        folder=tmp_path,
        waivers=toml_of(tmp_path, entry_of(AlsoShorter)),
    )
    assert fuzz_command.run(options, DEVICE) == STATUS_MISMATCH
    result = json.loads((tmp_path / "r.json").read_text())
    assert [finding["field"] for finding in result["findings"]] == [LENGTHS]
    assert result["waivers"][0]["rounds"] > 0
    assert f".json --waivers {tmp_path / 'mine.toml'}\n" in capsys.readouterr().out


def test_a_finding_is_shrunk_and_explained_beside_a_waiver() -> None:
    """The waived difference is in every round: only a trial that waives it gets past the first to the second."""
    ledger = ledger_of(AlsoShorter)
    job = Job.make(SYSTEMS["decode"], small(), (4,), 0, AlsoShorter, None, backend(), ledger)
    rounds = [decode_round(4, 21, 30, poison="plausible"), decode_round(4, 9, 30)]
    (finding,) = verify_rounds(job, [job.table(rounds)], Counts(), folder=None)
    signature, case = Signature.of(finding), job.scenario(rounds)
    steps = {"budget_s": 9, "subject": AlsoShorter, "ledger": ledger}
    small_case = shrink(case, signature, backend(), clock=itertools.count().__next__, **steps)  # type: ignore[arg-type]
    assert (small_case.finding.field, len(small_case.scenario.rounds)) == (LENGTHS, 2)
    assert small_case.accepted > 0
    said = explain(small_case.scenario, signature, backend(), clock=itertools.count().__next__, **steps)  # type: ignore[arg-type]
    assert said.confirmed > 0


class AlsoShorter(UnwrittenLengths):
    """A request that is shorter than what was in its row before is taken for one more."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.before = torch.zeros_like(inputs.seq_lens)

    def spoil(self) -> None:
        self.out[LENGTHS].add_((self.inputs.seq_lens < self.before).int())
        self.before.copy_(self.inputs.seq_lens)


def shard_facts(root: Path, entries: list[dict[str, Any]], number: int, subject: str) -> dict[str, Any]:
    plan = Plan(
        systems=("decode",),
        subject=subject,
        device=DEVICE.type,
        rounds_a_shard=16,
        preset="tiny",
        settings={"context": 37, "request_rows": 9, "topk": 8},
        batches=(4,),
        waivers=tuple(entries),
    )
    settled = settle_plan(root, dataclasses.asdict(plan), {})
    assert settled == settle_plan(root, {}, {}) == plan, "the ledger is part of the plan"
    shard_work.work_shard(ShardSpec(plan=plan, number=number), shard_folder(root, number), DEVICE)
    with Store(root) as store:
        store.rebuild()
        return summary(store)


@pytest.fixture
def without_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = {"fault": None, "verdict": "reported", "finding": None, "why": None}
    monkeypatch.setattr(shard_work, "_canary", lambda *arguments: verdict)


@pytest.mark.usefixtures("without_canary")
def test_a_campaign_lists_what_its_shards_waived(tmp_path: Path) -> None:
    entries = [entry_of(UnwrittenLengths)]
    facts = shard_facts(tmp_path, entries, 0, f"{HERE}:UnwrittenLengths")
    (finding,) = facts["findings"]
    assert (finding["state"], finding["issue"], finding["field"]) == ("waived", "known", DSA)
    assert finding["diagnosis"] == "never written"
    assert f"WAIVED for known {finding['key']} (in 1 shard(s))" in report_lines(facts, tmp_path)
    assert read_ledger(Path(facts["replay_options"][1])).waivers == parse_ledger(entries, "x").waivers


@pytest.mark.usefixtures("without_canary")
def test_a_campaign_fails_for_what_is_gone_from_all_its_shards(tmp_path: Path) -> None:
    facts = shard_facts(tmp_path, [entry_of("support:EagerDecode")], 0, "support:EagerDecode")
    (finding,) = facts["findings"]
    assert (finding["state"], finding["issue"]) == ("gone", "known")
    assert f"{finding['key']} is waived for known and gone: remove the waiver" in report_lines(facts, tmp_path)


def test_what_one_shard_has_seen_is_not_gone(tmp_path: Path) -> None:
    from fuzz.shard_folder import FindingKey, FindingRecord

    settle_plan(tmp_path, {}, {"systems": ("decode",)})
    key = FindingKey(system="decode", subject="x", field=DSA, diagnosis="never written", law=None)
    for number, state in enumerate(("gone", "waived", "gone")):
        record = FindingRecord(key=key, state=state, finding={"sentence": state}, waiver="known")
        record.write(shard_folder(tmp_path, number))
    with Store(tmp_path) as store:
        store.rebuild()
        (finding,) = summary(store)["findings"]
    assert (finding["state"], finding["issue"], finding["sightings"]) == ("waived", "known", 3)


def test_what_was_written_before_there_were_waivers_is_read(tmp_path: Path) -> None:
    plan = {key: value for key, value in Plan(systems=("decode",)).to_dict().items() if key != "waivers"}
    assert parse_plan(plan).waivers is None
    settle_plan(tmp_path, {}, {"systems": ("decode",)})
    with sqlite3.connect(tmp_path / "campaign.sqlite") as old:
        old.execute("CREATE TABLE sightings (key TEXT, shard INTEGER, PRIMARY KEY (key, shard))")
        old.execute("CREATE VIEW findings AS SELECT key FROM sightings")
    with Store(tmp_path) as store:
        store.rebuild()
        assert summary(store)["findings"] == []


def test_a_campaign_is_given_a_ledger_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr(campaign, "run_campaign", lambda root, plan, *rest: plans.append(plan) or STATUS_EQUAL)
    entry = entry_of(UnwrittenLengths)
    path = str(toml_of(tmp_path, entry))

    def begin(folder: str, *options: str) -> Result:
        return CliRunner().invoke(campaign.main, [str(tmp_path / folder), "--device", "cpu", *options])

    assert begin("mine", "--waivers", path).exit_code == STATUS_EQUAL
    assert begin("mine").exit_code == STATUS_EQUAL
    assert begin("none", "--no-waivers").exit_code == STATUS_EQUAL
    assert [plan.waivers for plan in plans] == [(entry,), (entry,), ()]
    assert plans[2].replay_options(tmp_path) == ["--no-waivers"]
    assert "differs from" in str(begin("mine", "--no-waivers").exception)
    assert "--waivers: has no effect with --no-waivers" in str(begin("x", "--waivers", path, "--no-waivers").exception)
    toml_of(tmp_path, entry | {"note": "x"})
    assert f"{path}: waiver[0].note: unknown" in str(begin("x", "--waivers", path).exception)


def test_no_fault_is_planted_where_a_waiver_would_cover_it(tmp_path: Path) -> None:
    plan = Plan(systems=("decode",), subject=f"{HERE}:UnwrittenLengths", device=DEVICE.type, preset="tiny")
    spec = plan.shard(0)
    job = Job.make(SYSTEMS["decode"], small(), (4,), 0, UnwrittenLengths, None, backend(), WAIVED)
    applicable = [name for name in shard_work.CANARIES if shard_work._applies(name, spec, job)]  # type: ignore[arg-type]
    assert "skip_refresh" not in applicable
    assert "not_refreshed" in applicable


# Reading -------------------------------------------------------------------------------------------------------------


def test_the_shipped_ledger_names_subjects_that_are_there() -> None:
    for waiver in read_ledger(SHIPPED).waivers:
        engine = engine_subject(waiver.subject)
        assert engine is not None
        assert engine.system == waiver.system
        assert "contract" in waiver.reason


def test_a_ledger_is_read_from_toml_and_json(tmp_path: Path) -> None:
    entry = entry_of(UnwrittenLengths, when={"topk": ">=4,<9", "indexer": False}, shows={"rounds": 17, "bucket": ">1"})
    ledger = read_ledger(toml_of(tmp_path, entry))
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps({"schema": 1, "waiver": [entry]}))
    assert read_ledger(path).waivers == ledger.waivers
    (waiver,) = ledger.waivers
    assert [(c.name, c.comparison, c.value) for c in waiver.when] == [
        ("topk", ">=", 4),
        ("topk", "<", 9),
        ("indexer", "==", False),
    ]
    assert waiver.covers(small(), 4)
    assert not waiver.covers(small(topk=9), 4)
    assert waiver.must_show(small(), 2, 17)
    assert not waiver.must_show(small(), 1, 17)
    assert not waiver.must_show(small(), 2, 16)
    assert not ledger_of(UnwrittenLengths).waivers[0].must_show(small(), 2, 0), "nothing was checked"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"note": "x"}, "waiver[0].note: unknown; its keys are id, subject"),
        ({"reason": None}, "waiver[0].reason: missing; every waiver has id, subject"),
        ({"reason": "  "}, "waiver[0].reason: '  ' is no text; say it in words"),
        ({"id": "Gap!"}, "waiver[0].id: 'Gap!' is not of small letters"),
        ({"system": "nope"}, "waiver[0].system: 'nope' is unknown; use one of decode"),
        ({"field": "nope"}, "field: 'nope' is no field of decode that owns memory; those are cache_seqlens_int32"),
        ({"field": "dsa_seqlens_expanded"}, "'dsa_seqlens_expanded' is no field of decode that owns memory"),
        ({"field": []}, "waiver[0].field: [] is neither a text nor a list of different ones"),
        ({"field": [DSA, DSA]}, "is neither a text nor a list of different ones"),
        ({"diagnosis": "nope"}, "waiver[0].diagnosis: 'nope' is nothing that can be waived; use one of never written"),
        ({"diagnosis": "past the end"}, "'past the end' is nothing that can be waived"),
        ({"diagnosis": "input overwritten"}, "'input overwritten' is nothing that can be waived"),
        ({"diagnosis": "law broken"}, "'law broken' is nothing that can be waived"),
        ({"law": "nope", "field": "paged_mqa_schedule_metadata"}, "law: 'nope' is unknown; use one of form, order"),
        ({"law": "order"}, f"law: {DSA} is no schedule"),
        ({"says": ""}, "waiver[0].says: '' is no text; say it in words"),
        ({"versions": {}}, "waiver[0].versions: {} must name packages and their versions"),
        ({"versions": ">=1"}, "waiver[0].versions: '>=1' must name packages"),
        ({"versions": {"sglang": ""}}, "waiver[0].versions.sglang: '' is no range of versions"),
        ({"versions": {"sglang": "0.5.x"}}, "waiver[0].versions.sglang: '0.5.x' is no range of versions"),
        ({"when": {"pages": 1}}, "waiver[0].when.pages: unknown; use bucket, or a field of the geometry"),
        ({"when": {"rounds": 1}}, "waiver[0].when.rounds: unknown"),
        ({"when": {"topk": "8 or so"}}, "waiver[0].when.topk: '8 or so' does not compare with it"),
        ({"when": {"indexer": ">=1"}}, "waiver[0].when.indexer: '>=1' does not compare with it"),
        ({"when": {"topk": True}}, "waiver[0].when.topk: True does not compare with it"),
        ({"subject": "sglang:nope"}, "subject 'sglang:nope' is unknown; sglang has"),
        ({"subject": "sglang:decode", "system": "mtp", "field": STALE}, "sglang:decode is of decode, not of mtp"),
    ],
    ids=str,
)
def test_what_is_not_exactly_so_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_names(ledger_of("support:EagerDecode", **changes))
    assert said in str(caught.value)


def test_two_waivers_of_one_field_are_refused() -> None:
    twice = [entry_of("support:EagerDecode"), entry_of("support:EagerDecode", id="other", when={"bucket": 2})]
    with pytest.raises(UsageError, match=r"waiver\[1\].id: 'known' is used twice"):
        parse_ledger([twice[0], twice[0]], "test")
    ledger = parse_ledger(twice, "test")
    with pytest.raises(UsageError, match=f"test: waivers known and other both cover {DSA} of support:EagerDecode at"):
        ledger.applying("decode", "support:EagerDecode", small(), (4, 2), EagerDecode)
    assert len(ledger.applying("decode", "support:EagerDecode", small(), (4,), EagerDecode)) == 1


@pytest.mark.parametrize(
    "text, said",
    [
        ("schema = 2", "must hold schema = 1"),
        ("schema = 1\nwaivers = []", "and nothing else"),
        ("schema = 1\nwaiver = 3", "must be a list of tables"),
        ("schema = ", "cannot be read as a ledger of waivers"),
    ],
)
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"^{path}: .*{said}"):
        read_ledger(path)
    with pytest.raises(UsageError, match=r"missing.toml: cannot be read"):
        read_ledger(tmp_path / "missing.toml")


class OfAnEngine(EagerDecode):
    @staticmethod
    def provenance() -> dict[str, str]:
        return {"dsa-verify": "7.2.0rc1", "engine": "unknown (no metadata)"}


@pytest.mark.parametrize(
    "versions, why",
    [
        ({"dsa-verify": ">=7,<8"}, None),
        ({"dsa-verify": "<7"}, "dsa-verify 7.2.0rc1 is outside <7"),
        ({"dsa-verify": ">=7", "packaging": ">=1"}, None),
        ({"packaging": "<1"}, "is outside <1"),
        ({"engine": ">=0"}, "engine 'unknown (no metadata)' is no version that can be compared with >=0"),
        ({"no-such-package": ">=0"}, "no-such-package is not what x is made of, and is not installed"),
    ],
    ids=str,
)
def test_versions_are_what_the_subject_says_or_what_is_installed(versions: dict[str, str], why: str | None) -> None:
    ledger = ledger_of("x", versions=versions)
    assert len(ledger.applying("decode", "x", small(), (4,), OfAnEngine)) == (why is None)
    lines = ledger.outside("decode", "x", OfAnEngine)
    assert (not lines) if why is None else lines[0].endswith(why)


def test_every_system_has_fields_to_waive() -> None:
    for name, system in SYSTEMS.items():
        geometry = Geometry.resolve(system.preset("cpu"))
        owned = {field.name for field in system.layout(geometry, 4) if field.alias is None}
        assert owned <= set(fields_of(name)), name
    assert {"rank7_kv_pool", "merged_lse"} <= set(fields_of("dcp"))
    assert {"step6_topk_v2_plan", "step0_write_plan_write_loc"} <= set(fields_of("mtp"))
    assert "write_plan_effective_n_per_batch" in fields_of("draft_extend")


def test_only_what_the_words_of_a_field_are_called_can_be_waived() -> None:
    never = {"PAST_THE_END", "BEFORE_THE_START", "OTHER_BUCKET", "INPUT_OVERWRITTEN", "TAIL_NOT_RESET", "WRONG_ROUTE"}
    never |= {"LAW_BROKEN", "BUFFER_REPLACED", "NOT_IDEMPOTENT", "WRONG_OUTPUTS", "RAISES", "SYNCHRONISES", "ALLOCATES"}
    assert not never & {each.name for each in WAIVABLE}
    assert never <= {each.name for each in Diagnosis}
