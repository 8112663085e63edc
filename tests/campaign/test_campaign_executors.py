"""Executors: a campaign takes any, says when one has failed it, and lets go of one that does not answer."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from played import PYTHONPATH, facts_of, plan_of, run, shown, values_of

from dsa_verify.base.errors import HarnessError, UsageError
from fuzz.campaign import campaign as campaign_module
from fuzz.campaign import executors
from fuzz.campaign.executors import Pool, Worker, check_worker, look_around, open_pool
from fuzz.campaign.plan import load_or_create_plan, read_plan
from fuzz.campaign.shard_folder import shard_folder
from fuzz.campaign.supervisor import FolderUnseen, slot, supervise_in_slot


@pytest.fixture(autouse=True)
def played_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)


class Answers(Executor):
    """Gives every shard the same answer, without running it."""

    def __init__(self, answer: Callable[[Future[Any]], object]) -> None:
        self._answer = answer

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._answer(future)
        return future


class Lost(Exception):
    """The worker is dead."""


def pool_of(executor: Executor) -> Pool:
    return Pool(executor=executor, width=2, devices=("there",), lost=(Lost,))


def cancel(future: Future[Any]) -> None:
    future.cancel()
    future.set_running_or_notify_cancel()


# Any executor --------------------------------------------------------------------------------------------------------


def test_any_executor_is_given_the_same_work(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        assert run(tmp_path / "processes", "wrong", pool=pool_of(executor)) == 1
    run(tmp_path / "local", "wrong")
    assert shown(facts_of(tmp_path / "processes")) == shown(facts_of(tmp_path / "local"))


@pytest.mark.parametrize(
    "answer, words",
    [
        (cancel, "shard 0: the executor dropped it"),
        (lambda future: future.set_exception(BrokenExecutor("a child died")), r"the executor broke \(a child died\)"),
    ],
)
def test_an_executor_that_fails_ends_the_campaign(
    tmp_path: Path, answer: Callable[[Future[Any]], object], words: str
) -> None:
    with pytest.raises(HarnessError, match=f"{words}.*resume with the same command"):
        run(tmp_path, "wrong", 1000, pool=pool_of(Answers(answer)))
    assert not (tmp_path / "stop").exists()
    assert read_plan(tmp_path).subject == "wrong"


def test_a_shard_that_was_lost_with_its_workers_is_given_up_and_the_next_one_run(tmp_path: Path) -> None:
    lost = pool_of(Answers(lambda future: future.set_exception(Lost("its fourth worker died"))))
    said = io.StringIO()
    assert run(tmp_path, "wrong", 2, pool=lost, said=said) == 3
    assert [(each["shard"], each["ended"], each["text"]) for each in facts_of(tmp_path)["failed"]] == [
        (0, "given up", "Lost: its fourth worker died"),
        (1, "given up", "Lost: its fourth worker died"),
    ]
    assert "shard 1: given up: Lost: its fourth worker died (0 rounds in flight lost)" in said.getvalue()
    run(tmp_path, "wrong")
    assert facts_of(tmp_path)["shards_ended"] == {"complete": 1, "unfinished": 1}


def test_shards_that_do_not_end_are_left_to_their_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop file stays for them until the campaign is resumed."""
    waits: list[int] = []

    def interrupted_once(flights: Any, **options: Any) -> Any:
        waits.append(len(flights))
        if len(waits) == 1:
            raise KeyboardInterrupt
        # Cancelled, those that run elsewhere would be taken for ended.
        assert not any(flight.cancelled() for flight in flights)
        return wait(flights, **options)

    monkeypatch.setattr(campaign_module, "wait", interrupted_once)
    monkeypatch.setattr(campaign_module, "END_WAIT_S", 0.1)
    said = io.StringIO()
    assert run(tmp_path, "wrong", 2, pool=pool_of(Answers(lambda future: None)), said=said) == 130
    assert waits[0] == 2  # both were in flight
    assert "shard 1: did not end within 0.1 s and is left to its worker" in said.getvalue()
    assert (tmp_path / "stop").exists()
    assert run(tmp_path, "wrong") == 1
    assert not (tmp_path / "stop").exists()


def test_results_that_come_into_sight_late_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over a network file system. Those that never do are on another disk."""
    there = tmp_path / "there"
    run(there, "wrong")
    result = supervise_in_slot(plan_of("wrong").shard(0), shard_folder(there, 0))
    elsewhere = pool_of(Answers(lambda future: future.set_result(result)))
    looks = 0
    done = campaign_module.Campaign._done

    def late(campaign: Any, number: int) -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            shard_folder(there, 0).parent.rename(tmp_path / "here" / "shards")
        return done(campaign, number)

    monkeypatch.setattr(campaign_module, "TICK_S", 0.01)
    monkeypatch.setattr(campaign_module, "SEE_WAIT_S", 0.1)
    said = io.StringIO()
    assert run(tmp_path / "nowhere", "wrong", pool=elsewhere, said=said) == 4
    assert "shard 0: its results are on another disk; unite the folders with `merge`" in said.getvalue()
    monkeypatch.setattr(campaign_module.Campaign, "_done", late)
    monkeypatch.setattr(campaign_module, "SEE_WAIT_S", 60.0)
    assert run(tmp_path / "here", "wrong", pool=elsewhere) == 1


def test_whoever_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    spec, folder = plan_of("wrong").shard(3), shard_folder(tmp_path, 3)
    words = f"{tmp_path}: process .* is to run shard 3, sees no campaign of this plan there; it must see that folder"
    with pytest.raises(FolderUnseen, match=words) as unseen:
        supervise_in_slot(spec, folder)
    assert str(pickle.loads(pickle.dumps(unseen.value))) == str(unseen.value)  # from a worker to the campaign
    load_or_create_plan(tmp_path, values_of(plan_of("right")), {})
    with pytest.raises(FolderUnseen):
        supervise_in_slot(spec, folder)
    assert not folder.exists()


# Named executors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["threads", "dask://host", "dask://host:port"])
def test_an_unknown_executor_is_refused(reference: str) -> None:
    with pytest.raises(UsageError, match="use local, or dask://HOST:PORT"), open_pool(reference, "auto"):
        pass


def test_each_thread_of_the_local_pool_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "visible_gpus", lambda: ["3", "GPU-b"])
    barrier = threading.Barrier(2)

    def look() -> str:
        barrier.wait(5)
        return str(slot.environment["CUDA_VISIBLE_DEVICES"])

    with open_pool("local", "auto") as pool:
        found = [pool.executor.submit(look) for _ in range(2)]
        assert {future.result(5) for future in found} == {"3", "GPU-b"}
        assert pool.devices == ("GPU 3", "GPU GPU-b")
    with pytest.raises(UsageError, match=r"workers: 3 exceeds the 2 GPU\(s\)"), open_pool("local", "auto", 3):
        pass


@pytest.mark.parametrize(
    "gpus, threads, device, words",
    [
        (("0",), 1, "auto", None),
        ((), 8, "auto", None),
        (("0", "1"), 8, "cpu", None),
        (("0", "1"), 1, "auto", r"1 thread\(s\) for 2 GPU\(s\), which shards would share"),
        (("0",), 2, "cuda", r"2 thread\(s\) for 1 GPU\(s\), which shards would share"),
        ((), 1, "cuda", "shows no GPU"),
    ],
)
def test_a_worker_has_a_gpu_of_its_own(gpus: tuple[str, ...], threads: int, device: str, words: str | None) -> None:
    worker = Worker(version=look_around().version, gpus=gpus)
    if words is None:
        check_worker("tcp://there", worker, threads, device)
        return
    with pytest.raises(UsageError, match=f"worker tcp://there: .*{words}"):
        check_worker("tcp://there", worker, threads, device)


def test_a_worker_has_the_same_version() -> None:
    with pytest.raises(UsageError, match=r"has dsa-verify 0\.0\.0, and here is"):
        check_worker("tcp://there", Worker(version="0.0.0", gpus=()), 1, "cpu")
