"""Verify: a finding leaves a case that shows it again, a clean run leaves nothing, and no round is lost on the way."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import DEVICE, EagerDecode, backend, decode_round, setup_of, small

from dsa_verify.base import atomic_write
from dsa_verify.base.errors import DeviceLost, HarnessError
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.round import Round
from dsa_verify.contract.round_table import RoundTable
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.case_file import read_case
from dsa_verify.rounds.matrix import Config, diagnostic_matrix
from dsa_verify.run import verify as verify_module
from dsa_verify.run.runner import Runner, RunResult, new_result
from dsa_verify.run.verify import JOURNAL_ROUNDS, Counts, verify_rounds
from dsa_verify.subjects.faults.conduct import WrongOnce
from dsa_verify.systems.catalogue import SYSTEMS

EAGER = "support:EagerDecode"
ROUNDS = [
    decode_round(4, 5, 17, 37, 1),
    decode_round(2, 9, 8),
    decode_round(4, 4, 3, 2, remap=(1, 3), poison="plausible"),
    decode_round(2, 1, poison="stale", twice=True),
    decode_round(4, 10, 11, 12, 13, poison="stale"),
    decode_round(4, 36, 35, 34, 33, twice=True),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "findings"


def verify(
    folder: Path | None, rounds: list[Round] = ROUNDS, subject: object = EAGER, fault: str | None = None, **rest: object
) -> tuple[list[Finding], Counts]:
    counts = Counts()
    setup = setup_of(subject, fault=fault)  # type: ignore[arg-type]
    findings = verify_rounds(setup, [setup.table(rounds)], counts, folder=folder, **rest)  # type: ignore[arg-type]
    return findings, counts


def replay_case(path: str) -> RunResult:
    scenario = read_case(Path(path))
    run = new_result(scenario.system, scenario.subject, backend())
    Runner(backend=backend(), folder=None).case(scenario, None, run)
    return run


def test_a_clean_run_counts_everything_and_leaves_no_folder(folder: Path):
    ticks: list[int] = []
    findings, counts = verify(folder, on_rounds=ticks.append)
    assert findings == []
    assert not folder.exists()
    assert sum(ticks) == counts.replays == counts.rounds_checked == len(ROUNDS)
    layout = SYSTEMS["decode"].layout(small(), 4)
    owned = sum(field.alias is None for field in layout)
    assert counts.fields_checked == len(ROUNDS) * owned
    assert counts.elements_compared > counts.fields_checked
    assert counts.configs == 1
    assert counts.mismatches == counts.address_changes == counts.guard_hits == counts.compilations_after_warmup == 0


def test_counts_add_up(folder: Path):
    _, first = verify(folder)
    _, second = verify(folder, ROUNDS[:2])
    first.add(second)
    assert (first.configs, first.replays) == (2, len(ROUNDS) + 2)


@pytest.mark.parametrize(
    "fault", ["off_by_one_page", "past_the_end", "other_bucket", "second_replay", "input_overwritten", "skip_refresh"]
)
def test_a_finding_writes_a_case_that_shows_it_again(folder: Path, fault: str):
    (finding,), counts = verify(folder, fault=fault)
    assert counts.mismatches + counts.guard_hits > 0
    assert finding.case is not None
    assert finding.reproduce == f"dsa-verify replay {finding.case} --subject support:EagerDecode"
    assert [path.name for path in folder.iterdir()] == [Path(finding.case).name], "no journal is left"
    scenario = read_case(Path(finding.case))
    assert (scenario.subject, scenario.fault, scenario.found) == (EAGER, fault, finding.sentence)
    assert 1 <= len(scenario.rounds) <= 2, "the fewest rounds that show it"
    again = replay_case(finding.case)
    assert [(f.diagnosis, f.field, f.place, f.bucket) for f in again.findings] == [
        (finding.diagnosis, finding.field, finding.place, finding.bucket)
    ]


def test_the_case_of_a_subject_that_fails_shows_it_again(folder: Path):
    (finding,), _ = verify(folder, fault="allocates_in_replay")
    assert finding.diagnosis is Diagnosis.ALLOCATES
    assert finding.case is not None
    (again,) = replay_case(finding.case).findings
    assert (again.diagnosis, again.sentence) == (finding.diagnosis, finding.sentence)


def test_a_case_can_be_run_with_another_subject_or_without_its_fault(folder: Path):
    (finding,), _ = verify(folder, fault="off_by_one_page")
    scenario = read_case(Path(finding.case or ""))
    run = new_result("decode", EAGER, backend())
    Runner(backend=backend(), folder=None).case(scenario, EAGER, run, fault="second_replay")
    assert run.findings == []
    assert run.counts.rounds_checked == 1


class SlowToFail(EagerDecode):
    """Wrong from the fifth replay of a bucket on: no window shorter than that shows it."""

    def allocate(self, geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.replays = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def in_graph(self) -> None:
        super().in_graph()
        self.replays.add_(1)
        self.out["cache_seqlens_int32"].add_((self.replays >= 5 + 2).int())  # two of the warm-up


def test_the_window_of_a_case_grows_until_it_shows_the_finding(folder: Path):
    rounds = [decode_round(4, 5 + i, 6, 7, 8) for i in range(12)]
    (finding,), _ = verify(folder, rounds, f"{__name__}:SlowToFail")
    assert finding.diagnosis is not Diagnosis.FLAKY
    assert finding.round == 4
    scenario = read_case(Path(finding.case or ""))
    assert scenario.rounds == tuple(rounds[:5]), "the rounds up to the first wrong one"
    assert replay_case(finding.case or "").findings[0].sentence == finding.sentence


def test_two_different_findings_never_share_a_file(folder: Path):
    (first,), _ = verify(folder, fault="off_by_one_page")
    (second,), _ = verify(folder, ROUNDS[1:], fault="off_by_one_page")
    (third,), _ = verify(folder, fault="off_by_one_page")
    assert first.case != second.case
    assert first.case == third.case
    assert len(list(folder.iterdir())) == 2


def test_what_does_not_show_again_is_flaky(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(WrongOnce, "struck", False)
    (finding,), _ = verify(folder, fault="flaky")
    assert finding.diagnosis is Diagnosis.FLAKY
    assert finding.field == "cache_seqlens_int32"
    assert finding.sentence.startswith("flaky: field cache_seqlens_int32 differed in round ")
    scenario = read_case(Path(finding.case or ""))
    assert scenario.rounds == tuple(ROUNDS[: (finding.round or 0) + 1])
    assert replay_case(finding.case or "").findings == [], "it struck once"


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (finding,), _ = verify(None, fault="off_by_one_page")
    assert (finding.case, finding.reproduce) == (None, None)
    assert list(tmp_path.iterdir()) == []


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str, durable: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic_write, "_replace", full)


@pytest.mark.parametrize("fault", ["off_by_one_page", "allocates_in_replay", "flaky"])
def test_a_finding_outlives_its_case(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str):
    full_disk(monkeypatch)
    monkeypatch.setattr(WrongOnce, "struck", False)
    (finding,), _ = verify(folder, fault=fault)
    assert (finding.case, finding.reproduce, finding.not_saved) == (None, None, "No space left on device")
    assert finding.loss == "the case could not be saved: No space left on device"
    assert finding.sentence
    assert not list(folder.iterdir())


def test_a_journal_that_cannot_be_written_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    for _ in range(2):
        findings, counts = verify(tmp_path / "file" / "findings")
        assert (findings, counts.rounds_checked) == ([], len(ROUNDS))
    said = f"dsa-verify: {tmp_path}/file/findings: nothing can be saved there (Not a directory), so a crash would leave"
    assert capsys.readouterr().err == f"{said} no case\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the fault is real and ends the process; see tests/gpu")
def test_a_lost_device_is_told_where_nothing_can_be_saved(folder: Path, monkeypatch: pytest.MonkeyPatch):
    full_disk(monkeypatch)
    setup = setup_of(EAGER, fault="lost_device")
    with pytest.raises(DeviceLost, match=r"illegal memory .*; the rounds up to then could not be saved: No space left"):
        verify_rounds(setup, [setup.table(ROUNDS)], Counts(), folder=folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the fault is real and ends the process; see tests/gpu")
def test_a_lost_device_saves_the_rounds_up_to_then(folder: Path):
    counts = Counts()
    setup = setup_of(EAGER, fault="lost_device")
    with pytest.raises(DeviceLost) as caught:
        verify_rounds(setup, [setup.table(ROUNDS)], counts, folder=folder)
    (path,) = folder.iterdir()
    assert str(caught.value).endswith(f"; the rounds up to then are in {path}")
    assert "illegal memory access" in str(caught.value)
    scenario = read_case(path)
    assert scenario.rounds == tuple(ROUNDS)
    assert scenario.fault == "lost_device"
    assert counts.replays < len(ROUNDS)


def oracle_setup(oracle: type) -> ReplaySetup:
    setup = setup_of(EAGER)
    system = dataclasses.replace(setup.system, oracle=f"{__name__}:{oracle.__name__}")
    return dataclasses.replace(setup, system=system)


class OracleOutOfBounds(EagerDecode):
    def in_graph(self) -> None:
        super().in_graph()
        table = self.out["cu_seqlens_k"]
        table.as_strided((1,), (1,), table.storage_offset() + table.numel()).fill_(3)


class OracleThatRaises(EagerDecode):
    def in_graph(self) -> None:
        raise ValueError("broken oracle")


@pytest.mark.parametrize("oracle, text", [(OracleOutOfBounds, "wrote beyond its buffer"), (OracleThatRaises, "broken")])
def test_a_broken_oracle_gives_no_verdict(folder: Path, oracle: type, text: str):
    setup = oracle_setup(oracle)
    with pytest.raises(HarnessError, match=text):
        verify_rounds(setup, [setup.table(ROUNDS)], Counts(), folder=folder)


# The journal ---------------------------------------------------------------------------------------------------------


def journal(folder: Path) -> Path:
    return folder / f"running-{os.getpid()}.json"


def test_the_rounds_are_on_disk_while_they_run(folder: Path):
    seen = []

    def look(count: int) -> None:
        seen.append(read_case(journal(folder)))

    verify(folder, on_rounds=look)
    assert len(seen) == len(ROUNDS)
    assert all(scenario.rounds == tuple(ROUNDS) for scenario in seen)
    assert seen[0].subject == EAGER
    assert not folder.exists()


def test_the_journal_is_there_before_the_subject_is_opened(folder: Path):
    present = []

    class Looks(EagerDecode):
        def allocate(self, geometry, inputs: Inputs, buffers: Buffers) -> None:
            super().allocate(geometry, inputs, buffers)
            present.append(journal(folder).exists())

    verify(folder, subject=Looks)
    assert present == [True, True]


def test_a_long_chunk_keeps_no_journal_and_reports_once(folder: Path):
    ticks: list[int] = []
    rounds = [decode_round(2, 5)] * (JOURNAL_ROUNDS + 1)
    _, counts = verify(folder, rounds, on_rounds=lambda count: ticks.append(count) or not folder.exists())
    assert ticks == [JOURNAL_ROUNDS + 1]
    assert counts.rounds_checked == JOURNAL_ROUNDS + 1


def test_an_interrupt_keeps_the_counts_and_clears_the_journal(folder: Path):
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    runner = Runner(backend=backend(), folder=folder, on_rounds=interrupt)
    run = new_result("decode", EAGER, backend())
    configs = diagnostic_matrix(SYSTEMS["decode"], small(), batches=[3])
    with pytest.raises(KeyboardInterrupt):
        runner.matrix(configs, EAGER, run)
    assert run.interrupted
    assert run.counts.replays == run.counts.rounds_checked == 1
    assert run.wall_s > 0
    assert not folder.exists()


# Several chunks and configurations -----------------------------------------------------------------------------------


class WrongFrom(EagerDecode):
    """Wrong once a length is 30 or more."""

    def in_graph(self) -> None:
        super().in_graph()
        self.out["cu_seqlens_k"][-1:].add_((self.inputs.seq_lens.max() >= 30).int())


def chunks_of(*sizes: int) -> Iterator[list[Round]]:
    for i, size in enumerate(sizes):
        yield [decode_round(4, 30 if (i, j) == (2, 1) else 5 + j % 9) for j in range(size)]


def test_a_finding_in_a_later_chunk_names_its_round_and_keeps_its_case_short(folder: Path):
    counts, pulled = Counts(), []
    setup = setup_of(f"{__name__}:WrongFrom")

    def tables() -> Iterator[RoundTable]:
        for rounds in chunks_of(3, 4, 5, 6):
            pulled.append(len(rounds))
            yield setup.table(rounds, 0)

    (finding,) = verify_rounds(setup, tables(), counts, folder=folder)
    assert pulled == [3, 4, 5], "what comes after the finding is not drawn"
    assert counts.replays == 12
    scenario = read_case(Path(finding.case or ""))
    assert [round_.seq_lens for round_ in scenario.rounds] == [(30,)]
    assert finding.round == 0, "rounds are counted within the case"


def test_the_evidence_of_two_chunks_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the newest rounds alone do not show it, the chunk before is used too."""
    tried = []
    monkeypatch.setattr(verify_module, "confirm", lambda setup, rounds, waived=None: tried.append(list(rounds)) or [])
    setup = setup_of(f"{__name__}:WrongFrom")
    chunks = list(chunks_of(3, 4, 5))
    (finding,) = verify_rounds(setup, (setup.table(rounds, 0) for rounds in chunks), Counts(), folder=folder)
    assert [len(rounds) for rounds in tried] == [1, 2, 3, 6]
    assert tried[-1] == (chunks[1] + chunks[2])[:6]
    assert finding.diagnosis is Diagnosis.FLAKY
    assert finding.round == 3 + 4 + 1


def test_a_runner_goes_over_all_configurations_and_tells_at_once(folder: Path):
    told: list[Finding] = []
    runner = Runner(backend=backend(), folder=folder, keep_going=True, on_finding=told.append)
    configs: list[Config] = diagnostic_matrix(SYSTEMS["decode"], small(), batches=[2, 3])
    clean = new_result("decode", EAGER, backend())
    runner.matrix(configs, EAGER, clean)
    assert (clean.counts.configs, clean.counts.rounds_checked, clean.findings) == (2, 34, [])
    wrong = new_result("decode", EAGER, backend())
    runner.matrix(configs, EAGER, wrong, fault="off_by_one_page")
    assert wrong.counts.configs == 2
    assert told == wrong.findings
    assert len(told) >= 2
    document = wrong.to_dict()
    assert document["mismatches"] == wrong.counts.mismatches > 0
    assert document["findings"][0]["diagnosis"] == "boundary"


def test_a_runner_stops_at_the_first_finding_unless_told_otherwise(folder: Path):
    configs = diagnostic_matrix(SYSTEMS["decode"], small(), batches=[2, 3])
    run = new_result("decode", EAGER, backend())
    Runner(backend=backend(), folder=folder).matrix(configs, EAGER, run, fault="off_by_one_page")
    assert run.counts.configs == 1
    assert run.stopped_early
