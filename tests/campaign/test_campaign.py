"""Campaign: killed at any moment it loses no finding and doubles none; a death is attributed; silence is told apart.

Shards are played by campaign_double/sitecustomize.py, so that what is tested is all that surrounds them. What a real
shard does is tested in test_campaign_shard.py.
"""

from __future__ import annotations

import errno
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from played import ROUNDS, SHARDS, facts_of, hold, let_go, plan_of, run, shown, values_of, wait_until
from rich.console import Console

from dsa_verify.base.errors import HarnessError, UsageError
from dsa_verify.cli import campaign as commands
from dsa_verify.cli.campaign import main, parse_time
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.rounds.case_file import read_case
from fuzz.campaign import supervisor as supervise_module
from fuzz.campaign.display import CampaignSnapshot, Display, RunningShard
from fuzz.campaign.locks import FolderInUse, held, holder
from fuzz.campaign.merge import merge
from fuzz.campaign.plan import Plan, load_or_create_plan, parse_plan, read_plan
from fuzz.campaign.report import report_lines, summary
from fuzz.campaign.shard_folder import (
    attempts_in,
    findings_in,
    read_json,
    read_progress,
    shard_folder,
    shard_numbers,
    write_json,
)
from fuzz.campaign.state import CampaignState
from fuzz.campaign.supervisor import runs_in, supervise
from fuzz.campaign.verdicts import note_recheck, waive
from fuzz.campaign.worker_main import STATUS_OFFSET

pytestmark = pytest.mark.usefixtures("played_shards")
KILLS = int(os.environ.get("DSA_VERIFY_KILLS", "4"))


# Killed --------------------------------------------------------------------------------------------------------------


def start(root: Path) -> subprocess.Popen[bytes]:
    options = ["--systems", "decode", "--subject", "wrong", "--rounds-per-shard", str(ROUNDS), "--device", "cpu"]
    command = [
        sys.executable,
        "-m",
        "dsa_verify",
        "campaign",
        str(root),
        "--max-rounds",
        str(SHARDS * ROUNDS),
        "--workers",
        "2",
    ]
    return subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)


def at_work(root: Path) -> list[int]:
    """The shards' processes."""
    folders = [shard_folder(root, number) for number in shard_numbers(root)]
    last = [(folder, holder(folder / "lock")) for folder in folders]
    return [each.pid for folder, each in last if each is not None and runs_in(folder, each.pid)]


def in_flight(root: Path) -> int:
    return sum(read_progress(shard_folder(root, number))["rounds"] for number in shard_numbers(root))


def survive(root: Path, most: int, draw: random.Random) -> int:
    """Run the campaign in `root` to its end through up to `most` kills; how many there were."""
    kills, process = 0, start(root)
    try:
        while process.poll() is None:
            if kills:
                time.sleep(draw.uniform(0.0, 0.8))
            while not kills and process.poll() is None and not in_flight(root):
                time.sleep(0.01)  # the first of them while work is in flight, the others whenever they come
            if kills == most or process.poll() is not None:
                continue
            if kills % 3:
                for pid in at_work(root)[:1]:
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
            else:
                process.kill()
                process.wait()
                kills += 1
                process = start(root)
    finally:
        process.kill()
    assert process.returncode == 1
    return kills


def test_killed_at_random_moments_it_loses_nothing_and_doubles_nothing(tmp_path: Path, undisturbed: Path) -> None:
    """As many campaigns as KILLS kills take."""
    draw, whole, left, lost = random.Random(KILLS), facts_of(undisturbed), KILLS, 0
    assert len(whole["findings"]) > 1
    while left:
        root = tmp_path / f"killed-{left}"
        kills = survive(root, left, draw)
        assert kills
        left -= kills
        facts = facts_of(root)
        assert shown(facts) == shown(whole)
        assert facts["rounds_executed"] == whole["rounds_executed"] == SHARDS * ROUNDS
        assert facts["canaries"] == {"reported": SHARDS}
        assert {attempt["ended"] for attempt in facts["attempts"]} <= {"interrupted", "killed"}
        lost += facts["rounds_lost_in_flight"]
        assert any("in flight lost" in line for line in report_lines(facts, root)) is bool(facts["attempts"])
    assert lost > 0


def test_a_shard_left_at_work_is_ended_before_its_folder_is_used(root: Path) -> None:
    folder = shard_folder(root, 0)
    write_json(folder / "spec.json", plan_of("hangs").shard(0).to_dict())
    command = [sys.executable, "-m", "fuzz.campaign.worker_main", str(folder)]
    orphan = subprocess.Popen(command, stdin=subprocess.PIPE)
    wait_until(lambda: read_progress(folder)["rounds"] == 16)
    assert supervise(plan_of("wrong").shard(0), folder).ended == "complete"
    assert orphan.wait(5) == -signal.SIGKILL
    assert orphan.stdin is not None
    orphan.stdin.close()
    (attempt,) = attempts_in(folder)
    assert (attempt["ended"], attempt["rounds_lost"]) == ("interrupted", 16)


@pytest.mark.parametrize("leads, ends", [(False, STATUS_OFFSET + 130), (True, -signal.SIGKILL)])
def test_a_shard_ends_with_its_supervisor(root: Path, leads: bool, ends: int) -> None:
    """And its group, if it has one of its own, with it."""
    folder = shard_folder(root, 0)
    write_json(folder / "spec.json", plan_of("hangs").shard(0).to_dict())
    command = [sys.executable, "-m", "fuzz.campaign.worker_main", str(folder)]
    orphan = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=leads)
    assert orphan.stdin is not None
    orphan.stdin.close()
    assert orphan.wait(20) == ends


def test_two_campaigns_in_one_folder_are_refused(root: Path) -> None:
    run(root, "right", 0)
    with held(root / "campaign.lock"), pytest.raises(FolderInUse, match=f"in use by process {os.getpid()}"):
        run(root, "right", 1)


# Deaths --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "behaviour, diagnosis, words, timeout_s",
    [
        ("segfaults", "crashes", "died of SIGSEGV; in round 3 of its case again 2 of 2 times", 20.0),
        ("loses the device", "device lost", "lost its device; in round 3 of its case again 2 of 2 times", 20.0),
        ("hangs", "hangs", "gave no sign of life and was killed; in round 3 of its case again 1 of 1 times", 2.5),
    ],
)
def test_a_death_is_attributed_to_its_case(
    root: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, diagnosis: str, words: str, timeout_s: float
) -> None:
    """The journal holds rounds 16 to 23 and the repeat stops at round 19 of them, the fourth."""
    monkeypatch.setattr(supervise_module, "REPEATS", dict.fromkeys(supervise_module.REPEATS, 2) | {Diagnosis.HANGS: 1})
    assert run(root, behaviour, timeout_s=timeout_s) == 1
    (finding,) = facts_of(root)["findings"]
    assert (finding["diagnosis"], finding["state"]) == (diagnosis, "confirmed")
    assert words in finding["sentence"]
    assert [round_.seq_lens for round_ in read_case(root / finding["path"]).rounds] == [(16,), (17,), (18,), (19,)]
    facts = facts_of(root)
    assert facts["rounds_executed"] == 16  # what was judged before the chunk that killed it
    assert facts["shards_ended"] == {diagnosis: 1}


def test_a_death_that_does_not_come_back_is_flaky(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(supervise_module.REPEATS, Diagnosis.CRASHES, 2)
    assert run(root, "segfaults once") == 6
    (finding,) = facts_of(root)["findings"]
    assert (finding["state"], finding["shown"], finding["repeats"]) == ("flaky", 0, 2)


@pytest.mark.parametrize("behaviour, ended", [("hungry", "complete"), ("insatiable", "skipped: out of memory")])
def test_out_of_memory_is_no_finding(root: Path, behaviour: str, ended: str) -> None:
    run(root, behaviour)
    facts = facts_of(root)
    assert facts["findings"] == []
    assert next(iter(facts["shards_ended"])).startswith(ended)
    attempts = [attempt for attempt in facts["attempts"] if attempt["ended"] == "out of memory"]
    assert len(attempts) == (1 if behaviour == "hungry" else 2)
    assert read_case(shard_folder(root, 0) / attempts[0]["text"].rpartition(" ")[2]).rounds
    spec = read_json(shard_folder(root, 0) / "spec.json")
    assert spec is not None
    assert spec["batch_divisor"] == 2


def test_a_full_disk_is_told_and_the_shard_redone(root: Path) -> None:
    with pytest.raises(HarnessError, match="Free disk space and run the same command again"):
        run(root, "fills the disk")
    assert [attempt["ended"] for attempt in facts_of(root)["attempts"]] == ["no room"]
    assert facts_of(root)["status"] == 3
    assert run(root, "fills the disk") == 0
    facts = facts_of(root)
    assert (facts["shards_ended"], facts["rounds_executed"]) == ({"complete": 1}, ROUNDS)


def test_a_disk_that_is_full_for_the_supervisor_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(supervise_module, "write_json", full)
    with pytest.raises(HarnessError, match=r"No space left on device\. Free disk space and run the same command again"):
        run(root, "right")


def test_a_broken_harness_gives_no_verdict_and_is_redone(root: Path) -> None:
    assert run(root, "breaks the harness", 2) == 3
    facts = facts_of(root)
    assert facts["shards_ended"] == {"unfinished": 2}
    assert "AssertionError: a broken assumption" in facts["failed"][0]["text"]


def test_a_plan_that_cannot_be_run_is_not_begun(root: Path) -> None:
    with pytest.raises(UsageError, match="subject 'is misspelt' is unknown"):
        run(root, "is misspelt")
    with pytest.raises(UsageError, match="holds no campaign"):
        read_plan(root)


def test_a_plan_that_has_begun_is_kept(ended: Path) -> None:
    """Its findings are not to be taken for another's, even where no shard has ended."""
    for path in ended.glob("shards/*/result.json"):
        path.unlink()
    plan = {**(read_json(ended / "campaign.json") or {}), "subject": "is misspelt"}
    write_json(ended / "campaign.json", plan)
    with pytest.raises(UsageError, match="subject 'is misspelt' is unknown"):
        run(ended, "is misspelt")
    assert read_plan(ended).subject == "is misspelt"


# The planted fault ---------------------------------------------------------------------------------------------------


def test_a_planted_fault_that_is_not_in_its_folder_ends_with_status_3(root: Path) -> None:
    assert run(root, "loses its canary") == 3
    facts = facts_of(root)
    assert [canary["number"] for canary in facts["canaries_missing"]] == [0]
    assert "shard 0: the planted fault skip_refresh was not reported" in report_lines(facts, root)[-2]


def test_a_planted_fault_is_no_finding(root: Path) -> None:
    assert run(root, "right") == 0
    facts = facts_of(root)
    assert (facts["findings"], facts["canaries"]) == ([], {"reported": 1})
    assert [record.key.planted for record in findings_in(shard_folder(root, 0))] == [True]


# Limits --------------------------------------------------------------------------------------------------------------


def test_the_budget_ends_the_shards_in_flight_and_resuming_redoes_them(root: Path) -> None:
    hold(root)
    run(root, "right", 1000, budget_s=2.0)
    assert facts_of(root)["shards_ended"] == {"stopped": 2}
    assert not (root / "stop").exists()
    let_go(root)
    run(root, "right", 2)
    assert facts_of(root)["shards_ended"] == {"complete": 2}


def test_resuming_runs_only_what_is_left(ended: Path) -> None:
    def written() -> dict[int, int]:
        return {n: (shard_folder(ended, n) / "result.json").stat().st_mtime_ns for n in range(SHARDS)}

    before = written()
    run(ended, "wrong", SHARDS + 1)
    assert shard_numbers(ended) == [*range(SHARDS + 1)]
    assert written() == before


@pytest.mark.parametrize("text, seconds", [("90s", 90), ("1.5m", 90), ("8h", 28_800), ("2d", 172_800)])
def test_times(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["8", "h", "-1h", "0s", "1h30m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write 90s, 30m, 8h or 2d"):
        parse_time(text)


# The plan ------------------------------------------------------------------------------------------------------------


def test_a_plan_is_read_back_as_it_was(root: Path) -> None:
    plan = Plan(systems=("decode", "mtp"), seed=7, settings={"context": 40}, batches=(4, 2), preset="tiny")
    assert parse_plan(json.loads(json.dumps(plan.to_dict()))) == plan
    assert [plan.shard(number).system for number in range(3)] == ["decode", "mtp", "decode"]
    assert len({plan.shard(number).seed for number in range(1000)}) == 1000


@pytest.mark.parametrize(
    "change, words",
    [
        ({"schema": 2}, "schema: 2 is not 1"),
        ({"sede": 1}, "sede: unknown"),
        ({"seed": "1"}, "seed: '1' is str, not int"),
        ({"seed": -1}, "seed: -1 is outside 0"),
        ({"systems": []}, "must name at least one system"),
        ({"systems": ["decod"]}, "systems: 'decod' is unknown"),
        ({"batches": [True]}, "must hold int only"),
        ({"preset": "huge"}, "preset: 'huge' is unknown"),
        ({"subject": ""}, "subject: empty; name a pipeline"),
    ],
)
def test_a_plan_is_read_strictly(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_plan({**plan_of("right").to_dict(), **change})


def test_a_plan_of_before_there_were_faults_and_drafts_is_read() -> None:
    plan = plan_of("right")
    before = {key: value for key, value in plan.to_dict().items() if key not in ("fault", "drafts", "waivers")}
    assert parse_plan(before) == plan


def test_resuming_with_another_plan_is_refused(root: Path) -> None:
    load_or_create_plan(root, {"seed": 1}, {"systems": ("decode",)})
    assert load_or_create_plan(root, {"seed": 1}, {}).seed == 1
    with pytest.raises(UsageError, match=r"--seed: 2 differs from 1, .* leave it out to resume"):
        load_or_create_plan(root, {"seed": 2}, {})


# The state -----------------------------------------------------------------------------------------------------------


def test_the_state_of_a_campaign_that_runs_is_that_of_its_folders(ended: Path) -> None:
    """Shards are read again as they end, in any order, and some of them twice."""
    shutil.move(ended / "shards", ended / "aside")
    state = CampaignState.read(ended)
    assert state.shards == {}
    shutil.move(ended / "aside", ended / "shards")
    for number in (2, 0, 3, 0, 1):
        state = state.with_shards([number])
    assert summary(state) == facts_of(ended)
    assert [each["visited"] for each in summary(state)["coverage"]] == [9]


def test_the_index_that_campaigns_once_had_is_ignored(ended: Path) -> None:
    before = facts_of(ended)
    (ended / "campaign.sqlite").write_bytes(b"whatever it holds")
    assert facts_of(ended) == before
    assert command("report", str(ended)).exit_code == 1
    assert run(ended, "wrong", SHARDS) == 1


def test_a_report_leads_to_the_rule_of_each_finding(ended: Path) -> None:
    facts = facts_of(ended)
    rules = [line for line in report_lines(facts, ended) if line == "  rule: docs/contract/1-basic.md#1.1"]
    assert len(rules) == len(facts["findings"]) > 0


def test_waived_and_gone(ended: Path) -> None:
    root = ended
    keys = [finding["key"] for finding in facts_of(root)["findings"]]
    for key in keys:
        waive(root, key, "issue 7")
    facts = facts_of(root)
    assert ({finding["state"] for finding in facts["findings"]}, facts["status"]) == ({"waived"}, 0)
    note_recheck(root, keys[0], 0, 3, SHARDS)
    facts = facts_of(root)
    assert [finding["state"] for finding in facts["findings"]] == ["gone", *["waived"] * (len(keys) - 1)]
    assert facts["status"] == 1
    assert f"{keys[0]} is waived for issue 7 and gone: remove the waiver" in report_lines(facts, root)
    with pytest.raises(UsageError, match="finding 'else' is unknown"):
        waive(root, "else", "issue 7")


# Merge and recheck ---------------------------------------------------------------------------------------------------


def test_merge_unites_the_shards_of_one_plan(root: Path, tmp_path: Path, undisturbed: Path) -> None:
    halves = tmp_path / "first", tmp_path / "second"
    for i, half in enumerate(halves):
        load_or_create_plan(half, {}, values_of(plan_of("wrong")))
        for number in range(i, SHARDS, 2):
            shutil.copytree(shard_folder(undisturbed, number), shard_folder(half, number))
    assert merge(halves, root) == SHARDS
    assert merge(halves, root) == 0
    assert shown(facts_of(root)) == shown(facts_of(undisturbed))


def test_merge_takes_a_shard_from_where_it_has_ended(root: Path, tmp_path: Path, undisturbed: Path) -> None:
    begun = tmp_path / "begun"
    shutil.copytree(undisturbed, begun)
    for path in begun.glob("shards/*/result.json"):
        path.unlink()
    assert merge([begun, undisturbed], root) == 2 * SHARDS
    assert shown(facts_of(root)) == shown(facts_of(undisturbed))
    assert facts_of(root)["shards_ended"] == {"complete": SHARDS}


def test_merge_refuses_another_plan(root: Path, tmp_path: Path) -> None:
    run(tmp_path / "first", "wrong", 0)
    run(tmp_path / "second", "right", 0)
    with pytest.raises(UsageError, match="follows another plan"):
        merge([tmp_path / "first", tmp_path / "second"], root)


def test_recheck_tells_what_is_gone(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case is replayed three times, in processes of their own."""
    root = ended
    first, *others = [finding["key"] for finding in facts_of(root)["findings"]]
    replayed: list[list[str]] = []

    def replay(line: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        replayed.append(line)
        return subprocess.CompletedProcess(line, 0 if line[4] == replayed[0][4] else 1, b"", b"")

    monkeypatch.setattr(subprocess, "run", replay)
    result = command("recheck", str(root))
    assert result.output.splitlines()[0] == f"{first}: shown 0 of 3 times; gone"
    assert len(replayed) == 3 * (1 + len(others))
    states = {finding["key"]: finding["state"] for finding in facts_of(root)["findings"]}
    assert states == {first: "gone", **dict.fromkeys(others, "shrunk")}


# What a person sees --------------------------------------------------------------------------------------------------

SHOWN = CampaignSnapshot(
    facts={"rounds_executed": 1000, "findings": [{}, {}], "coverage": [{"visited": 1, "possible": 4}]},
    running=[RunningShard(number=7, system="mtp", rounds=234, silent_s=2.4, attempts=1)],
    rounds_per_s=56.7,
    left_s=3723.0,
    rounds_left=None,
    health=["GPU 0: 40 °C"],
)


def seen(*moments: CampaignSnapshot, terminal: bool = True) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, no_color=True, _environ={})
    display = Display(console)
    with display.open():
        for moment in moments:
            display.show(moment)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = seen(SHOWN)
    for part in (
        "1,234 (57 rounds/s)",
        "2 unique",
        "25.0 % of what 1 configuration(s) can visit",
        "1:02:03",
        "mtp, 234 rounds, last sign of life 2 s ago, 1 attempt(s) lost",
        "GPU 0: 40 °C",
    ):
        assert part in text


@pytest.mark.parametrize("terminal, no_color", [(False, None), (True, "1")])
def test_elsewhere_there_are_plain_lines_now_and_then(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, no_color: str | None
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", no_color)
    assert seen(SHOWN, SHOWN, terminal=terminal) == (
        "1,234 rounds, 57 rounds/s, 2 unique finding(s), coverage 25.0 % of what 1 configuration(s) can visit, "
        "1 shard(s) running, left: 1:02:03\n"
    )


# The command line ----------------------------------------------------------------------------------------------------


def command(*arguments: str) -> Any:
    return CliRunner().invoke(main, arguments)


def test_the_commands(root: Path) -> None:
    options = ["--systems", "decode", "--subject", "wrong", "--rounds-per-shard", str(ROUNDS), "--device", "cpu"]
    result = command(str(root), "--max-rounds", str(2 * ROUNDS), "--workers", "2", *options)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[0] == f"campaign in {root}: decode, seed 0, on CPU 0, CPU 1"
    assert sum(line.startswith("SHRUNK decode-field_") for line in lines) == len(facts_of(root)["findings"])
    assert lines[-1] == "96 rounds: findings; exit status 1"
    assert command("status", str(root)).output.splitlines()[:4] == [
        "shards:         2 (2 complete)",
        "rounds:         96 executed of 96 requested",
        f"findings:       {len(facts_of(root)['findings'])} shrunk",
        "planted faults: 2 reported",
    ]
    assert "coverage:       90.0 % of what 1 configuration(s) can visit" in command("status", str(root)).output
    result = command("report", str(root), "--json")
    assert (result.exit_code, json.loads(result.output)["rounds_executed"]) == (1, 96)
    assert command("merge", str(root), "--into", str(root.parent / "copy")).output.startswith("2 shard(s) taken")
    assert isinstance(command("report", str(root / "nowhere")).exception, UsageError)


@pytest.mark.parametrize(
    "options, systems",
    [
        (["--system", "mtp", "--system", "decode"], ("mtp", "decode")),
        (["--systems", "mtp, decode"], ("mtp", "decode")),
        ([], ("decode", "target_verify", "draft_extend")),
    ],
)
def test_systems_are_named_as_in_every_command(
    root: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], systems: tuple[str, ...]
) -> None:
    planned: list[Plan] = []
    monkeypatch.setattr(commands, "run_campaign", lambda root, plan, *rest: planned.append(plan) or 0)
    given = ["--fault", "skip_refresh", "--draft-tokens", "3", "--draft-tokens", "2", "--device", "cpu"]
    result = command(str(root), "--max-rounds", "48", *options, *given)
    assert result.exit_code == 0, result.exception
    (plan,) = planned
    assert (plan.systems, plan.fault, plan.drafts) == (systems, "skip_refresh", (3, 2))
    assert read_plan(root) == plan
    with pytest.raises(UsageError, match="--fault: rows_rolled differs from skip_refresh"):
        load_or_create_plan(root, {"fault": "rows_rolled"}, {})


@pytest.mark.parametrize(
    "options, words",
    [
        (["--system", "decode", "--systems", "mtp"], "--systems: has no effect with --system"),
        (["--batch", "4", "--batch", "4"], r"batches: \[4, 4\] names one of them twice"),
        (["--set", "context=40", "--set", "context=41"], "--set: context is given twice; give it once"),
        (["--draft-tokens", "3", "--set", "draft_tokens=2"], "drafts: has no effect with a setting of draft_tokens"),
        (["--draft-tokens", "17"], r"drafts\[0\]: 17 is outside 1..16"),
        (["--fault", ""], "fault: empty; name one of `dsa-verify faults`"),
    ],
)
def test_options_that_contradict_themselves_are_refused_as_in_fuzz(root: Path, options: list[str], words: str) -> None:
    result = command(str(root), "--max-rounds", "48", "--device", "cpu", *options)
    assert isinstance(result.exception, UsageError)
    assert re.search(words, str(result.exception))
    assert not root.exists()


def test_help_names_the_statuses_and_imports_no_torch() -> None:
    code = "import sys; from dsa_verify.cli.campaign import main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "a planted fault was not reported" in command("--help").output
