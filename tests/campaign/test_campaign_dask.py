"""Dask: two worker processes, one of which is killed while it has a shard, find what the local pool finds."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from played import PYTHONPATH, facts_of, hold, is_held, let_go, plan_of, run, shown, wait_until
from rich.console import Console
from support import SMALL

from dsa_verify.base.errors import UsageError
from fuzz.campaign import executors
from fuzz.campaign.campaign import Limits, run_campaign
from fuzz.campaign.display import Display
from fuzz.campaign.executors import Pool, open_pool
from fuzz.campaign.locks import holder
from fuzz.campaign.plan import load_or_create_plan
from fuzz.campaign.report import report_lines
from fuzz.campaign.shard_folder import shard_folder
from fuzz.campaign.supervisor import FolderUnseen, supervise_in_slot

HERE = Path(__file__).parent
SHARDS = 3


@pytest.fixture(autouse=True)
def played_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)


def test_a_worker_that_is_killed_costs_no_finding(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="needs the package distributed")
    root, said = tmp_path / "cluster", io.StringIO()
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
    )
    with cluster, open_pool(cluster.scheduler_address.replace("tcp:", "dask:"), "cpu") as pool:
        assert pool.width == 2
        workers = cluster.scheduler.workers
        hold(root)
        with ThreadPoolExecutor(1) as aside:
            ended = aside.submit(run, root, "wrong", SHARDS, pool=pool, said=said)
            wait_until(lambda: is_held(root, 0) and is_held(root, 1))
            killed, before = holder(shard_folder(root, 0) / "owner"), set(workers)
            assert killed is not None
            assert killed.here
            os.kill(killed.pid, signal.SIGKILL)
            wait_until(lambda: len(workers) == 2 and set(workers) != before)  # its nanny has started another
            let_go(root)
            assert ended.result(120) == 1
        with pytest.raises(FolderUnseen, match="sees no campaign of this plan there"):
            pool.executor.submit(
                supervise_in_slot, plan_of("wrong").shard(0), shard_folder(tmp_path / "unshared", 0)
            ).result(60)
    assert run(tmp_path / "local", "wrong", SHARDS) == 1
    facts, local = facts_of(root), facts_of(tmp_path / "local")
    assert len(local["findings"]) > 1
    assert shown(facts) == shown(local)
    assert facts["shards_ended"] == {"complete": SHARDS}
    assert facts["canaries"] == {"reported": SHARDS}
    ended = f"its supervisor ({killed}) ended before the shard did; the shard is run again"
    lost = f"interrupted: {ended} (16 rounds in flight lost)"
    assert [line.strip() for line in report_lines(facts, root) if "in flight lost" in line] == [f"shard 0: {lost}"]
    assert f"shard 0: {lost}" in said.getvalue()


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_no_finding_of_a_real_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed", reason="needs the package distributed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (HERE.parent / "support", HERE.parents[1]))))
    values = {"systems": ("decode",), "subject": "test_campaign_shard:WrongLength", "rounds_a_shard": 64}
    values |= {"device": "cpu", "preset": "tiny", "settings": SMALL, "batches": (4,)}
    limits = Limits(budget_s=None, max_rounds=3 * 64)

    def campaign(root: Path, pool: Pool) -> int:
        return run_campaign(
            root, load_or_create_plan(root, values, {}), limits, pool, Display(Console(file=io.StringIO()))
        )

    root = tmp_path / "cluster"
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
    )
    address = cluster.scheduler_address.replace("tcp:", "dask:")
    with cluster, open_pool(address, "cpu") as pool, ThreadPoolExecutor(1) as aside:
        ended = aside.submit(campaign, root, pool)
        wait_until(lambda: (shard_folder(root, 0) / "progress.json").exists())
        killed = holder(shard_folder(root, 0) / "owner")
        assert killed is not None
        os.kill(killed.pid, signal.SIGKILL)
        assert ended.result(400) == 1
    with open_pool("local", "cpu", 2) as pool:
        assert campaign(tmp_path / "local", pool) == 1
    facts, local = facts_of(root), facts_of(tmp_path / "local")
    assert [finding["field"] for finding in local["findings"]] == ["cache_seqlens_int32"]
    # Which shard had shrunk it when another came to it depends on which was first.
    assert [(f["key"], f["state"], f["sightings"]) for f in facts["findings"]] == [
        (f["key"], f["state"], f["sightings"]) for f in local["findings"]
    ]
    assert facts["rounds_executed"] == local["rounds_executed"]
    assert [attempt["ended"] for attempt in facts["attempts"]] == ["interrupted"]


def test_a_scheduler_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="needs the package distributed")
    monkeypatch.setattr(executors, "CONNECT_S", 0.2)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        words = rf"executor dask://127\.0\.0\.1:{port}: no scheduler answered in 0\.2 s"
        with pytest.raises(UsageError, match=words), open_pool(f"dask://127.0.0.1:{port}", "cpu"):
            pass


def test_dask_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"pip install dsa-verify\[campaign\]"), open_pool("dask://host:1", "auto"):
        pass
