"""Campaign: what must not be lost, doubled or denied, and what a subject may do to the process that runs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from played import ROUNDS, SHARDS, facts_of, plan_of, run, shown, values_of

from dsa_verify.base import writable as files
from dsa_verify.base.errors import STATUS_NO_ROOM
from dsa_verify.cli.campaign import main
from dsa_verify.contract.finding import Diagnosis
from fuzz.campaign import campaign as campaign_module
from fuzz.campaign import supervisor as supervise_module
from fuzz.campaign.locks import held
from fuzz.campaign.merge import merge
from fuzz.campaign.plan import load_or_create_plan
from fuzz.campaign.shard_folder import CaseNotSaved, attempts_in, findings_in, read_json, shard_folder, write_json
from fuzz.campaign.supervisor import _End, _Watch, supervise
from fuzz.campaign.verdicts import note_recheck
from fuzz.campaign.worker_main import STATUS_OFFSET, _status_of

pytestmark = pytest.mark.usefixtures("played_shards")


def command(*arguments: str) -> Any:
    return CliRunner().invoke(main, arguments)


# What is said of findings --------------------------------------------------------------------------------------------


def test_what_a_later_shard_sees_again_is_not_gone(ended: Path) -> None:
    finding, *_ = facts_of(ended)["findings"]
    note_recheck(ended, finding["key"], 0, 3, finding["sightings"])
    assert {each["key"]: each["state"] for each in facts_of(ended)["findings"]}[finding["key"]] == "gone"
    new = shard_folder(ended, SHARDS)
    shutil.copytree(shard_folder(ended, finding["shard"]), new)
    write_json(new / "result.json", (read_json(new / "result.json") or {}) | {"number": SHARDS})
    assert {each["key"]: each["state"] for each in facts_of(ended)["findings"]}[finding["key"]] == "shrunk"


def test_verdicts_given_at_once_are_all_kept(ended: Path) -> None:
    threads = [threading.Thread(target=note_recheck, args=(ended, f"key {i}", 0, 3, 1)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_json(ended / "rechecks.json") or {}) == 16


@pytest.mark.parametrize("diagnosis, repeats", [("hangs", 1), ("crashes", 3), ("stale", 3)])
def test_a_replay_that_does_not_end_shows_its_finding(
    ended: Path, monkeypatch: pytest.MonkeyPatch, diagnosis: str, repeats: int
) -> None:
    def never_ends(line: list[str], *, timeout: float, **options: object) -> object:
        raise subprocess.TimeoutExpired(line, timeout)

    path = next(ended.glob("shards/*/findings/*.json"))
    path.write_text(path.read_text().replace('"diagnosis": "stale"', f'"diagnosis": "{diagnosis}"'))
    monkeypatch.setattr(subprocess, "run", never_ends)
    assert f": shown {repeats} of {repeats} times\n" in command("recheck", str(ended), "--timeout", "1").output


def test_a_replay_that_verifies_nothing_is_no_verdict(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = subprocess.CompletedProcess([], 4, b"", b"dsa-verify: no GPU")
    monkeypatch.setattr(subprocess, "run", lambda *line, **options: ends)
    result = command("recheck", str(ended))
    assert result.exit_code != 0
    assert "cannot be replayed (status 4): dsa-verify: no GPU" in str(result.exception)


def test_a_time_of_a_replay_that_is_none_is_refused(ended: Path) -> None:
    assert "--timeout: 0 is not above 0" in str(command("recheck", str(ended), "--timeout", "0").exception)


def test_merge_keeps_what_either_folder_has_found(tmp_path: Path, undisturbed: Path) -> None:
    """A subject may be flaky, or one of the folders of another version of it."""
    without, into = tmp_path / "without", tmp_path / "into"
    shutil.copytree(undisturbed, without)
    for path in without.glob("shards/*/findings/*.json"):
        path.unlink()
    assert facts_of(without)["findings"] == []
    merge([without, undisturbed], into)
    assert shown(facts_of(into)) == shown(facts_of(undisturbed))
    begun = shutil.copytree(undisturbed, tmp_path / "begun")
    for path in begun.glob("shards/*/result.json"):
        path.unlink()
    merge([without], Path(begun))
    assert shown(facts_of(Path(begun))) == shown(facts_of(undisturbed))
    assert facts_of(Path(begun))["shards_ended"] == {"complete": SHARDS}


# Disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["result.json", "findings/new.json"])
@pytest.mark.parametrize("text", ["", "[1]", '{"number": 0}', "\ufffd"])
def test_what_cannot_be_read_is_told_and_not_passed_over(ended: Path, name: str, text: str) -> None:
    path = shard_folder(ended, 0) / name
    path.write_bytes(b"\xff\xfe" if text == "\ufffd" else text.encode())
    result = command("report", str(ended))
    assert result.exit_code == 3
    assert f"shard 0: damaged: {path} is corrupt" in result.output
    assert f"shard 0: damaged: {path} is corrupt" in command("status", str(ended)).output


DAMAGED_RESULTS = ({"requested": "many"}, {"ended": {}}, {"canary": [1]}, {"coverage": {"never": 3}})


@pytest.mark.parametrize("wrong", DAMAGED_RESULTS, ids=[next(iter(wrong)) for wrong in DAMAGED_RESULTS])
def test_a_damaged_shard_hides_no_other(ended: Path, wrong: dict[str, Any]) -> None:
    """Nor what it has found itself."""
    before = facts_of(ended)
    folder = shard_folder(ended, 1)
    write_json(folder / "result.json", (read_json(folder / "result.json") or {}) | wrong)
    (folder / "attempts").mkdir(exist_ok=True)
    (folder / "attempts" / "0000.json").write_text("{")
    after = facts_of(ended)
    assert [Path(each["text"].partition(" is corrupt")[0]).name for each in after["damage"]] == [
        "0000.json",
        "result.json",
    ]
    assert (shown(after), after["shards"]) == (shown(before), SHARDS)
    result = command("report", str(ended))
    assert result.exit_code == 3
    assert all(finding["key"] in result.output for finding in before["findings"])
    assert after["rounds_executed"] >= ROUNDS * (SHARDS - 1)


@pytest.mark.parametrize("name", ["waivers.json", "rechecks.json"])
def test_a_file_of_verdicts_that_cannot_be_read_is_told(ended: Path, name: str) -> None:
    write_json(ended / name, {"key": {}})
    error = command("report", str(ended)).exception
    assert getattr(error, "status", None) == 3
    assert str(error).startswith(f"{ended / name} is corrupt")


def test_a_second_file_of_one_finding_is_damaged(ended: Path) -> None:
    """It would be counted twice."""
    before, path = facts_of(ended), next(ended.glob("shards/*/findings/*.json"))
    shutil.copy(path, path.with_name("z.json"))
    assert [Path(each["text"].partition(" is corrupt")[0]).name for each in facts_of(ended)["damage"]] == ["z.json"]
    assert shown(facts_of(ended)) == shown(before)


def test_a_report_writes_nothing(ended: Path) -> None:
    """The folder may be one that cannot be written, or that of a campaign which runs."""
    before = {path: path.stat().st_mtime_ns for path in ended.rglob("*")}
    with held(ended / "campaign.lock"):
        before[ended / "campaign.lock"] = (ended / "campaign.lock").stat().st_mtime_ns
        result = command("report", str(ended))
    assert (result.exit_code, "findings; exit status 1" in result.output) == (1, True)
    assert {path: path.stat().st_mtime_ns for path in ended.rglob("*")} == before


@pytest.mark.parametrize(
    "arguments",
    [("DIR",), ("merge", "ENDED", "--into", "DIR"), ("waive", "LOCKED", "key", "--issue", "i"), ("recheck", "LOCKED")],
    ids=lambda arguments: arguments[0],
)
def test_a_folder_that_cannot_be_written_is_wrong_usage(
    ended: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    def read_only(name: str) -> Path:
        raise files.UsageError(f"{name}: nothing can be put there (Read-only file system); name another folder")

    if "LOCKED" in arguments:
        monkeypatch.setattr(campaign_module, "check_folder", read_only)
    names = {"DIR": "/proc/campaign", "ENDED": str(ended), "LOCKED": str(ended)}
    result = command(*(names.get(argument, argument) for argument in arguments))
    assert getattr(result.exception, "status", None) == 2
    assert ": nothing can be put there (" in str(result.exception)


def test_a_shard_whose_case_cannot_be_saved_has_no_room(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise CaseNotSaved("stale: page_table_1[0]; the case could not be saved: No space left on device")

    assert _status_of(work) == STATUS_NO_ROOM
    assert "stale: page_table_1[0]; the case could not be saved: No space" in capsys.readouterr().err


def test_a_log_that_is_full_is_no_death(tmp_path: Path) -> None:
    """What a shard cannot say must not end it otherwise than in order: that would be a crash of the subject."""
    line = [sys.executable, "-m", "fuzz.campaign.worker_main", str(tmp_path)]
    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen(line, stdin=subprocess.PIPE, stdout=full, stderr=full) as process,
    ):
        assert process.wait(60) == STATUS_OFFSET + 2  # there is no spec.json


def test_a_plan_is_settled_by_one_campaign_at_a_time(tmp_path: Path) -> None:
    root = tmp_path / "campaign"
    root.mkdir()
    with held(root / "campaign.lock"):
        result = command(str(root), "--max-rounds", "48", "--seed", "2", "--device", "cpu")
    assert "is in use by process" in str(result.exception)
    assert not (root / "campaign.json").exists()


def test_a_plan_that_is_wrong_leaves_no_folder(tmp_path: Path) -> None:
    result = command(str(tmp_path / "campaign"), "--systems", "decod")
    assert "systems: 'decod' is unknown" in str(result.exception)
    assert not (tmp_path / "campaign").exists()


# Deaths --------------------------------------------------------------------------------------------------------------


def folder_of(root: Path, behaviour: str) -> Path:
    load_or_create_plan(root, values_of(plan_of(behaviour)), {})
    return shard_folder(root, 0)


def test_a_death_is_written_down_before_it_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor may be killed while it repeats the case, and the death may never come again."""
    folder, once = folder_of(tmp_path / "campaign", "segfaults"), _Watch.run

    def killed(self: _Watch, arguments: list[str], at: Path | None = None) -> _End:
        if at is not None:
            raise KeyboardInterrupt
        return once(self, arguments, at)

    monkeypatch.setattr(_Watch, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        supervise(plan_of("segfaults").shard(0), folder)
    (record,) = findings_in(folder)
    assert (record.key.diagnosis, record.state) == ("crashes", "found")
    assert (folder / str(record.case)).exists()


@pytest.mark.parametrize("status", [0, 1, 2, 7, 8])
def test_a_subject_that_ends_its_process_is_a_death_whatever_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setitem(supervise_module.REPEATS, Diagnosis.CRASHES, 1)
    root = tmp_path / "campaign"
    assert run(root, f"exits with {status}") == 1
    (finding,) = facts_of(root)["findings"]
    assert (finding["diagnosis"], finding["state"]) == ("crashes", "confirmed")
    assert f"the process exited with status {status} (code under test called exit)" in finding["sentence"]


def test_what_a_subject_has_started_ends_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep the shard's lock, so that no repeat could run, and a device's memory."""
    monkeypatch.setitem(supervise_module.REPEATS, Diagnosis.CRASHES, 2)
    root = tmp_path / "campaign"
    assert run(root, "leaves a helper and segfaults") == 1
    (finding,) = facts_of(root)["findings"]
    assert (finding["state"], finding["shown"]) == ("confirmed", 2)
    pids = [int(line) for line in Path("helpers").read_text().split()]
    assert len(pids) == 3
    end = time.monotonic() + 20
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end, "a helper is still there"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT"])
def test_a_signal_from_outside_is_no_finding(tmp_path: Path, signal_name: str) -> None:
    root = tmp_path / "campaign"
    assert run(root, f"gets {signal_name}") == 0
    facts = facts_of(root)
    assert (facts["findings"], facts["rounds_executed"]) == ([], ROUNDS)
    (attempt,) = attempts_in(shard_folder(root, 0))
    assert (attempt["ended"], attempt["text"].endswith("the shard is run again")) == ("killed", True)


def test_a_case_that_cannot_be_repeated_is_not_called_flaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, once = folder_of(tmp_path / "campaign", "segfaults"), _Watch.run

    def broken(self: _Watch, arguments: list[str], at: Path | None = None) -> _End:
        if at is None:
            return once(self, arguments, at)
        (self.folder / "log.txt").write_text("dsa-verify: the folder is in use\n")
        return _End(status=3, wall_s=0.1, orderly=True)

    monkeypatch.setattr(_Watch, "run", broken)
    supervise(plan_of("segfaults").shard(0), folder)
    (record,) = findings_in(folder)
    assert (record.state, record.note) == ("found", "its case could not be repeated: the folder is in use")


def test_a_shard_that_is_interrupted_says_so(tmp_path: Path) -> None:
    """`python -m fuzz.campaign.worker_main` by hand, and Ctrl-C."""
    folder = folder_of(tmp_path / "campaign", "gets SIGINT")
    write_json(folder / "spec.json", plan_of("gets SIGINT").shard(0).to_dict())
    line = [sys.executable, "-m", "fuzz.campaign.worker_main", str(folder)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.read().decode()
    assert (process.returncode, said) == (STATUS_OFFSET + 130, "dsa-verify: interrupted\n")
