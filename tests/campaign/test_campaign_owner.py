"""Owners: two supervisors never run one shard at the same time, and what a dead one has left is free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from played import HELD_AT, PYTHONPATH, hold, is_held, let_go, plan_of, wait_until

from fuzz.campaign import locks
from fuzz.campaign import supervisor as supervise
from fuzz.campaign.locks import FolderInUse, held, holder, owned
from fuzz.campaign.shard_folder import attempts_in, findings_in, read_json, shard_folder, signs_of_life, write_json
from fuzz.campaign.supervisor import give_up


@pytest.fixture(autouse=True)
def played_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shard_folder(tmp_path, 0)


def test_a_second_supervisor_takes_what_the_first_leaves(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler gave the shard to a second worker while the first still lived."""
    looks: list[Path] = []  # one as each begins, one each time that the folder is another's
    monkeypatch.setattr(locks, "signs_of_life", lambda at: looks.append(at) or signs_of_life(at))
    spec = plan_of("wrong").shard(0)
    hold(tmp_path)
    with ThreadPoolExecutor(2) as workers:
        first = workers.submit(supervise.supervise, spec, folder)
        wait_until(lambda: is_held(tmp_path))
        child = holder(folder / "lock")
        second = workers.submit(supervise.supervise, spec, folder)
        wait_until(lambda: len(looks) > 2)
        assert not second.done()
        assert holder(folder / "lock") == child
        let_go(tmp_path)
        assert first.result(60).ended == "complete"
        assert second.result(60) == first.result()
    assert attempts_in(folder) == []
    assert len(findings_in(folder)) > 1


def test_the_shard_of_a_dead_owner_is_free(folder: Path) -> None:
    code = f"""
from pathlib import Path
import os, signal
from fuzz.campaign.locks import owned
with owned(Path({str(folder)!r}), patience_s=1.0, over=lambda: False) as ours:
    assert ours
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    dead = holder(folder / "owner")
    assert dead is not None
    write_json(folder / "progress.json", {"rounds": HELD_AT, "checked": 0})
    assert supervise.supervise(plan_of("wrong").shard(0), folder).ended == "complete"
    (attempt,) = attempts_in(folder)
    assert (attempt["ended"], attempt["rounds_lost"]) == ("interrupted", HELD_AT)
    assert attempt["text"] == f"its supervisor ({dead}) ended before the shard did; the shard is run again"


def test_an_owner_that_is_silent_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "KILL_WAIT_S", 0.0)
    words = rf"in use by process {os.getpid()} of .*: it has given no sign of life for 0\.3 s"
    with held(folder / "owner"), pytest.raises(FolderInUse, match=words):
        supervise.supervise(plan_of("wrong").shard(0), folder, 0.3)


def test_an_owner_that_shows_signs_of_life_is_waited_for(folder: Path) -> None:
    """Beyond the patience that a silent one is given."""
    looks = 0

    def over() -> bool:
        nonlocal looks
        looks += 1
        write_json(folder / "progress.json", {"rounds": looks, "checked": 0})
        return looks == 4

    with held(folder / "owner"), owned(folder, patience_s=1.5 * locks.POLL_S, over=over) as ours:
        assert not ours


def test_a_campaign_that_is_over_waits_for_no_owner(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "stop").touch()
    with held(folder / "owner"):
        result = supervise.supervise(plan_of("wrong").shard(0), folder)
    assert (result.ended, result.final) == ("stopped", False)
    assert [path.name for path in folder.iterdir()] == ["owner"]


def test_a_campaign_that_is_over_begins_nothing_and_notes_what_was_lost(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "stop").touch()
    write_json(folder / "progress.json", {"rounds": HELD_AT, "checked": 0})
    assert supervise.supervise(plan_of("wrong").shard(0), folder).ended == "stopped"
    assert [attempt["rounds_lost"] for attempt in attempts_in(folder)] == [HELD_AT]
    assert not (folder / "spec.json").exists()


def test_only_a_process_of_this_shard_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock's holder is this process, which lives to tell."""
    monkeypatch.setattr(supervise, "_LOCK_WAIT_S", 0.1)
    with held(folder / "lock"), pytest.raises(FolderInUse):
        supervise.supervise(plan_of("wrong").shard(0), folder)


def test_a_shard_that_its_executor_lost_is_given_up_unless_someone_has_it(folder: Path) -> None:
    write_json(folder / "progress.json", {"rounds": HELD_AT, "checked": 0})
    give_up(folder, "KilledWorker: four times")
    assert [(each["ended"], each["rounds_lost"]) for each in attempts_in(folder)] == [
        ("interrupted", HELD_AT),
        ("given up", 0),
    ]
    with held(folder / "owner"), pytest.raises(FolderInUse):
        give_up(folder, "KilledWorker: four times")


def test_what_a_killed_process_had_half_written_is_removed(folder: Path) -> None:
    for name in (".journal.json.1.1", "findings/.a.json.1.1"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert supervise.supervise(plan_of("wrong").shard(0), folder).ended == "complete"
    assert not [*folder.glob(".*"), *folder.glob("*/.*")]
    assert json.loads((folder / "result.json").read_text()) == read_json(folder / "result.json")
