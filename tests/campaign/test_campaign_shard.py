"""A shard: findings are repeated and shrunk, a planted fault comes out at the other end, the journal comes first."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DEVICE, SMALL, EagerDecode, decode_round, setup_of

from dsa_verify.base.atomic_write import write_atomically
from dsa_verify.base.errors import HarnessError, OutOfMemory
from dsa_verify.base.out_of_memory import find_out_of_memory
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.round import Round
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.replay import compilations
from dsa_verify.replay.observation import Observation
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.case_file import read_case
from fuzz.campaign import supervisor as supervise_module
from fuzz.campaign import worker as shard_work
from fuzz.campaign.journal import Journal, JournalledSetup, Stopped
from fuzz.campaign.plan import Plan, ShardSpec, load_or_create_plan
from fuzz.campaign.report import summary
from fuzz.campaign.shard_folder import ShardResult, findings_in, read_progress, shard_folder
from fuzz.campaign.state import CampaignState
from fuzz.campaign.supervisor import supervise
from fuzz.campaign.worker import work_shard
from fuzz.reduce import trials as trials_module

HERE = Path(__file__).parent
ROUNDS = 32


class WrongLength(EagerDecode):
    """A request of 9 tokens is taken for one of 10."""

    def in_graph(self) -> None:
        super().in_graph()
        lengths = self.out["cache_seqlens_int32"]
        lengths.add_((lengths == 9).int())


class WrongTwice(EagerDecode):
    def in_graph(self) -> None:
        super().in_graph()
        self.out["cache_seqlens_int32"].add_(1)
        self.out["real_page_table"].add_(1)


class WrongAtFirst(EagerDecode):
    """Wrong in the first rounds of this process only."""

    captures = 0

    def allocate(self, *arguments: Any) -> None:
        super().allocate(*arguments)
        WrongAtFirst.captures += 1
        self.first = WrongAtFirst.captures <= 2

    def in_graph(self) -> None:
        super().in_graph()
        if self.first:
            self.out["cache_seqlens_int32"].add_(1)


class OutOfMemoryInWarmUp(EagerDecode):
    def before_replay(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


class OutOfMemoryInReplay(EagerDecode):
    """In its own words, which come of the allocator's."""

    replays = 0

    def before_replay(self) -> None:
        self.replays += 1
        if self.replays == 4:
            try:
                torch.empty(1 << 60, dtype=torch.uint8)
            except RuntimeError as error:
                raise ValueError("no workspace") from error


class OutOfPages(EagerDecode):
    def before_replay(self) -> None:
        raise RuntimeError("the page pool is out of memory pages")


class EndsItsProcess(EagerDecode):
    """Dies, as if by the hand of another, on the fifth replay of the bucket of 4."""

    replays = 0

    def before_replay(self) -> None:
        self.replays += self.inputs.seq_lens.numel() == 4
        if self.replays == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def spec_of(subject: str = "support:EagerDecode", number: int = 0, **rest: Any) -> ShardSpec:
    values = {"rounds_a_shard": ROUNDS, "preset": "tiny", "settings": SMALL, "batches": (4,), **rest}
    return Plan(systems=("decode",), subject=subject, device=DEVICE.type, **values).shard(number)


def work(root: Path, subject: str = "support:EagerDecode", number: int = 0, **rest: Any) -> ShardResult:
    spec = spec_of(subject, number, **rest)
    load_or_create_plan(root, dataclasses.asdict(spec.plan), {})
    return work_shard(spec, shard_folder(root, number), DEVICE)


def facts_of(root: Path) -> dict[str, Any]:
    return summary(CampaignState.read(root))


def test_a_right_subject_has_no_finding_but_the_planted_one(tmp_path: Path) -> None:
    result = work(tmp_path)
    assert (result.ended, result.executed, result.requested) == ("complete", ROUNDS, ROUNDS)
    assert result.canary is not None
    assert result.canary["verdict"] == "reported"
    (record,) = findings_in(shard_folder(tmp_path, 0))
    assert (record.key.planted, record.state, record.shown, record.repeats) == (True, "shrunk", 3, 3)
    assert record.shrunk is not None
    case = read_case(shard_folder(tmp_path, 0) / record.shrunk)
    assert case.fault == result.canary["fault"]
    assert result.coverage is not None
    assert len(result.coverage["never"]) < result.coverage["possible"]
    assert facts_of(tmp_path)["status"] == 0


@pytest.fixture
def unshrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where shrinking is not what is tested, it only takes time."""
    monkeypatch.setattr(shard_work, "_shrink", lambda case, *rest: case)


@pytest.fixture
def without_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_work, "_canary", lambda *arguments: None)


def test_the_fault_that_a_campaign_is_given_is_a_finding_beside_the_one_that_a_shard_plants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unshrunk: None
) -> None:
    monkeypatch.setattr(shard_work, "CANARIES", ("past_the_end",))
    monkeypatch.setattr(shard_work, "CANARY_ROUNDS", 16)
    monkeypatch.setattr(shard_work, "MOST_FINDINGS", 1)
    result = work(tmp_path, fault="rows_rolled")
    assert result.canary is not None
    assert result.canary["fault"] == "past_the_end"
    records = findings_in(shard_folder(tmp_path, 0))
    assert {record.key.planted for record in records} == {True, False}
    (own,) = {read_case(shard_folder(tmp_path, 0) / str(r.case)).fault for r in records if not r.key.planted}
    assert own == "rows_rolled"
    assert facts_of(tmp_path)["status"] == 1


@pytest.mark.parametrize("fault", shard_work.CANARIES)
def test_every_planted_fault_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unshrunk: None, fault: str
) -> None:
    """Well within the rounds that it is given."""
    monkeypatch.setattr(shard_work, "CANARIES", (fault,))
    monkeypatch.setattr(shard_work, "CANARY_ROUNDS", 16)
    monkeypatch.setattr(shard_work, "REPEATS", 1)
    folder, spec = shard_folder(tmp_path, 0), spec_of(batches=(2,))
    setup = JournalledSetup.of(shard_work._setup(spec, setup_of().backend), Journal(folder))
    assert shard_work._canary(spec, setup, folder)["verdict"] == "reported"


def test_a_planted_fault_over_which_the_process_was_killed_is_reported_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unshrunk: None
) -> None:
    """It was confirmed and about to be shrunk: the shard, run again, must not leave it at that."""
    monkeypatch.setattr(shard_work, "CANARIES", ("past_the_end",))
    monkeypatch.setattr(shard_work, "CANARY_ROUNDS", 16)
    monkeypatch.setattr(shard_work, "REPEATS", 1)
    folder, spec = shard_folder(tmp_path, 0), spec_of(batches=(2,))
    setup = JournalledSetup.of(shard_work._setup(spec, setup_of().backend), Journal(folder))
    with monkeypatch.context() as patch:
        patch.setattr(shard_work, "_shrink", killed)
        with pytest.raises(KeyboardInterrupt):
            shard_work._canary(spec, setup, folder)
    assert [record.state for record in findings_in(folder)] == ["confirmed"]
    assert shard_work._canary(spec, setup, folder)["verdict"] == "reported"
    assert [record.state for record in findings_in(folder)] == ["shrunk"]


def killed(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_finding_is_repeated_shrunk_and_written_once(tmp_path: Path, without_canary: None) -> None:
    results = [work(tmp_path, "test_campaign_shard:WrongLength", number, rounds_a_shard=64) for number in (0, 1)]
    facts = facts_of(tmp_path)
    (finding,) = facts["findings"]
    assert (finding["field"], finding["state"], finding["sightings"]) == ("cache_seqlens_int32", "shrunk", 2)
    assert (finding["shown"], finding["repeats"]) == (3, 3)
    assert [round_.seq_lens for round_ in read_case(tmp_path / finding["path"]).rounds] == [(9,)]
    assert facts["status"] == 1
    (second,) = findings_in(shard_folder(tmp_path, 1))
    assert (second.state, second.note) == ("confirmed", "not shrunk: shard 0 has done it")
    # Done again, as after a kill, a shard writes the same.
    again = work(tmp_path / "again", "test_campaign_shard:WrongLength", rounds_a_shard=64)
    assert findings_in(shard_folder(tmp_path / "again", 0)) == findings_in(shard_folder(tmp_path, 0))
    assert dataclasses.replace(results[0], wall_s=0.0) == dataclasses.replace(again, wall_s=0.0)


@pytest.mark.slow
def test_a_subject_that_is_always_wrong_ends_the_shard_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unshrunk: None
) -> None:
    """Its own finding stands in for the planted one where both cannot be told from each other."""
    monkeypatch.setattr(shard_work, "MOST_FINDINGS", 2)
    monkeypatch.setattr(shard_work, "CANARIES", ("past_the_end",))
    result = work(tmp_path, "test_campaign_shard:AlwaysWrong", rounds_a_shard=10_000)
    assert result.ended == "after 2 findings"
    assert result.executed < 10_000
    assert result.canary is not None
    assert result.canary["verdict"] == "reported"
    monkeypatch.setattr(shard_work, "CANARIES", ("second_replay",))
    result = work(tmp_path, "test_campaign_shard:AlwaysWrong", 1, rounds_a_shard=10_000)
    assert result.canary is not None
    assert result.canary["verdict"] == "masked"
    facts = facts_of(tmp_path)
    assert (facts["status"], facts["canaries_missing"]) == (1, [])
    assert {finding["field"] for finding in facts["findings"]} == {"dsa_cu_seqlens_k"}


class AlwaysWrong(EagerDecode):
    def in_graph(self) -> None:
        super().in_graph()
        self.out["dsa_cu_seqlens_k"][1:].add_(1)


def test_what_does_not_show_again_is_flaky_with_its_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_canary: None
) -> None:
    monkeypatch.setattr(WrongAtFirst, "captures", 0)
    work(tmp_path, "test_campaign_shard:WrongAtFirst")
    (finding,) = facts_of(tmp_path)["findings"]
    assert (finding["diagnosis"], finding["state"], finding["shown"], finding["repeats"]) == ("flaky", "flaky", 0, 3)


class CompilesOnce(EagerDecode):
    """As if a kernel of its were compiled at the fifth call in this process."""

    calls = 0

    def before_replay(self) -> None:
        CompilesOnce.calls += 1
        if CompilesOnce.calls == 2 * 2 + 5:  # warm-ups of two buckets
            compilations._note(None, {})


def test_a_late_compilation_is_neither_repeated_nor_made_small_but_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_canary: None
) -> None:
    monkeypatch.setattr(compilations, "_seen", [])
    monkeypatch.setattr(CompilesOnce, "calls", 0)
    work(tmp_path, "test_campaign_shard:CompilesOnce")
    (finding,) = facts_of(tmp_path)["findings"]
    assert (finding["diagnosis"], finding["state"]) == ("recompiles", "confirmed")
    assert facts_of(tmp_path)["status"] == 1
    monkeypatch.setattr(CompilesOnce, "calls", 0)
    work(tmp_path / "allowed", "test_campaign_shard:CompilesOnce", allow_compilations=True)
    assert facts_of(tmp_path / "allowed")["findings"] == []


def test_a_blind_judge_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Observation, "first_wrong_round", None)
    monkeypatch.setattr(shard_work, "CANARY_ROUNDS", 48)
    result = work(tmp_path)
    assert result.canary is not None
    assert (result.canary["verdict"], result.canary["why"]) == ("missing", "48 rounds showed nothing")
    facts = facts_of(tmp_path)
    assert facts["status"] == 3
    assert [canary["number"] for canary in facts["canaries_missing"]] == [0]


@pytest.mark.parametrize(
    "subject, words",
    [("OutOfMemoryInWarmUp", "Tried to allocate 20 GiB"), ("OutOfMemoryInReplay", "ValueError: no workspace")],
)
def test_out_of_memory_is_not_the_subjects_failure(
    tmp_path: Path, without_canary: None, subject: str, words: str
) -> None:
    with pytest.raises(OutOfMemory, match=words):
        work(tmp_path, f"test_campaign_shard:{subject}")
    assert findings_in(shard_folder(tmp_path, 0)) == []


def test_a_failure_that_only_reads_like_it_is_the_subjects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_canary: None, unshrunk: None
) -> None:
    monkeypatch.setattr(shard_work, "MOST_FINDINGS", 1)
    work(tmp_path, "test_campaign_shard:OutOfPages")
    (finding,) = facts_of(tmp_path)["findings"]
    assert finding["diagnosis"] == "raises"


@pytest.mark.parametrize(
    "error, lacks",
    [
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_what_lacks_memory(error: Exception, lacks: bool) -> None:
    outer = HarnessError("the oracle cannot be captured")
    outer.__cause__ = error
    assert find_out_of_memory(outer) is (error if lacks else None)


# The journal ---------------------------------------------------------------------------------------------------------


def test_whatever_is_launched_is_in_the_journal_first(tmp_path: Path) -> None:
    folder = shard_folder(tmp_path, 0)
    journal = Journal(folder)
    seen: list[tuple[int, ...]] = []

    class Looks(EagerDecode):
        def before_replay(self) -> None:
            seen.append(tuple(len(round_.seq_lens) for round_ in read_case(folder / "journal.json").rounds))

    setup = JournalledSetup.of(setup_of(Looks), journal)
    replayer = setup.open(4)
    assert set(seen) == {()}  # a capture has a case of its own
    seen.clear()
    for lengths in ((5, 6, 7), (8, 9), (3,)):
        replayer.run(setup.table([decode_round(4, *lengths)]))
    assert seen == [(3,), (3, 2), (2, 1)]  # with the chunk before, which may have prepared it


def test_progress_tells_what_was_judged_from_what_was_in_flight(tmp_path: Path) -> None:
    folder = shard_folder(tmp_path, 0)
    journal = Journal(folder)
    setup = JournalledSetup.of(setup_of(EagerDecode), journal)
    replayer = setup.open(4)
    table = setup.table([decode_round(4, 5)] * 3)
    replayer.run(table)
    journal.count(3)
    replayer.run(table)
    assert read_progress(folder) | {"at": 0} == {"rounds": 3, "checked": 3, "at": 0}
    write_atomically(tmp_path / "stop", "")
    journal._beat = 0.0  # so that progress is due
    with pytest.raises(Stopped):
        journal.count(3)
    assert read_progress(folder) | {"at": 0} == {"rounds": 6, "checked": 3, "at": 0}


def test_the_end_of_a_campaign_is_seen_at_every_chunk(tmp_path: Path) -> None:
    """A device may need less than a heartbeat for one."""
    journal = Journal(shard_folder(tmp_path, 0))
    journal.opening(JournalledSetup.of(setup_of(EagerDecode), journal))  # which is a heartbeat
    journal.count(3)
    write_atomically(tmp_path / "stop", "")
    for sign_of_life in (lambda: journal.count(3), lambda: journal.alive(3), journal.clock):
        with pytest.raises(Stopped):
            sign_of_life()


def test_what_is_launched_to_shrink_a_case_is_in_the_journal_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_canary: None
) -> None:
    launched: list[bool] = []

    def looked(setup: ReplaySetup, rounds: Sequence[Round]) -> list[Finding]:
        case = read_case(shard_folder(tmp_path, 0) / "journal.json")
        launched.append((case.buckets, case.rounds) == (setup.buckets, tuple(rounds)))
        return confirm(setup, rounds)

    monkeypatch.setattr(trials_module, "confirm", looked)
    work(tmp_path, "test_campaign_shard:WrongLength")
    assert len(launched) > 3
    assert all(launched)


def test_all_findings_are_written_down_before_the_first_is_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_canary: None
) -> None:
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shard_work, "_repeated", killed)
    with pytest.raises(KeyboardInterrupt):
        work(tmp_path, "test_campaign_shard:WrongTwice")
    records = findings_in(shard_folder(tmp_path, 0))
    assert {record.state for record in records} == {"found"}
    assert {record.key.field for record in records} >= {"cache_seqlens_int32", "real_page_table"}


# A process -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_subject_that_ends_its_process_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By SIGKILL, which is a finding only because it comes back every time. A fault was planted in it as it died, which
    has no part in that."""
    monkeypatch.setitem(supervise_module.REPEATS, Diagnosis.CRASHES, 1)
    load_or_create_plan(tmp_path, dataclasses.asdict(spec_of("test_campaign_shard:EndsItsProcess").plan), {})
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (HERE.parent / "support", HERE.parents[1])))}
    spec = spec_of("test_campaign_shard:EndsItsProcess")
    result = supervise(spec, shard_folder(tmp_path, 0), 60.0, environment)
    assert result.ended == "crashes"
    facts = facts_of(tmp_path)
    (finding,) = facts["findings"]
    assert (finding["diagnosis"], finding["state"], finding["shown"]) == ("crashes", "confirmed", 1)
    assert "the process died of SIGKILL" in finding["sentence"]
    case = read_case(tmp_path / finding["path"])
    assert len(case.rounds) <= 5
    assert case.rounds[-1].bucket == 4
    assert case.fault is None
    assert [attempt["ended"] for attempt in facts["attempts"]] == ["crashes"]
