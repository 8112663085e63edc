"""Executors: where shards run. Any concurrent.futures.Executor will do; two come with names.

`local`: a thread for each GPU of this machine (or each core, where there is none), each of which watches one child.
`dask://HOST:PORT`: the workers of a Dask cluster, each of which is to have one GPU and one thread, or no GPU. Its
nannies restart workers that die, and the scheduler gives their shards to others. The workers must see the campaign's
folder under the same path, and have the same dsa-verify.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import re
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Final

from dsa_verify.base.errors import HarnessError, UsageError
from dsa_verify.base.gpu_pinning import PINNED, VISIBLE, visible_gpus
from dsa_verify.base.version import package_version
from fuzz.campaign.supervisor import slot

CONNECT_S: Final = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """An executor that runs `width` shards at once on `devices`, whose names are for people.

    The executor raises one of `lost` for a shard whose workers died while others can go on. Any other error of the
    executor ends a campaign.
    """

    executor: Executor
    width: int
    devices: tuple[str, ...]
    lost: tuple[type[Exception], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker of a cluster: its version of dsa-verify, and its GPUs as entries of CUDA_VISIBLE_DEVICES."""

    version: str
    gpus: tuple[str, ...]


@contextlib.contextmanager
def open_pool(reference: str, device: str, workers: int | None = None) -> Iterator[Pool]:
    """Open the pool named `local` or `dask://HOST:PORT` for plans on `device`. At most `workers` shards run at once."""
    if reference == "local":
        with _local(device, workers) as pool:
            yield pool
    elif re.fullmatch(r"dask://[^/:]+:\d+", reference):
        with _dask(reference.removeprefix("dask://"), device, workers) as pool:
            yield pool
    else:
        raise UsageError(f"executor {reference!r} is unknown; use local, or dask://HOST:PORT of a Dask scheduler")


@contextlib.contextmanager
def _local(device: str, workers: int | None) -> Iterator[Pool]:
    gpus = [] if device == "cpu" else visible_gpus()
    if device == "cuda" and not gpus:
        raise UsageError("device 'cuda' is not there: this machine shows no GPU; use auto or cpu")
    width = workers or len(gpus) or os.cpu_count() or 1
    if gpus and width > len(gpus):
        raise UsageError(f"workers: {width} exceeds the {len(gpus)} GPU(s) of this machine; one shard runs on each")
    slots: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    for i in range(width):
        # Chosen before the child starts: once CUDA is initialised in a process, it is too late.
        slots.put({VISIBLE: gpus[i], PINNED: gpus[i]} if gpus else {})

    def take_slot() -> None:
        slot.environment = slots.get()

    with ThreadPoolExecutor(width, thread_name_prefix="shard", initializer=take_slot) as executor:
        names = [f"GPU {gpu}" for gpu in gpus[:width]] or [f"CPU {i}" for i in range(width)]
        yield Pool(executor=executor, width=width, devices=tuple(names))


@contextlib.contextmanager
def _dask(address: str, device: str, workers: int | None) -> Iterator[Pool]:
    try:
        from distributed import Client, KilledWorker
    except ImportError as error:
        raise UsageError(
            f"executor dask://{address}: the package distributed is missing ({error}); pip install dsa-verify[campaign]"
        ) from error
    try:
        client: Any = Client(f"tcp://{address}", set_as_default=False, timeout=CONNECT_S)
    except OSError as error:
        raise UsageError(
            f"executor dask://{address}: no scheduler answered in {CONNECT_S:g} s ({error}); start one with: dask "
            "scheduler"
        ) from error
    with client:
        threads: dict[str, int] = client.nthreads()
        if not threads:
            raise UsageError(
                f"executor dask://{address}: the scheduler has no worker; start one with: dask worker {address}"
            )
        try:
            found: dict[str, Worker] = client.run(look_around)
        except Exception as error:  # of whatever kind a worker met with
            raise HarnessError(
                f"executor dask://{address}: its workers cannot run dsa-verify ({type(error).__name__}: {error}); "
                "install there what is installed here"
            ) from error
        for name, worker in found.items():
            check_worker(name, worker, threads.get(name, 1), device)
        # Impure: a shard that runs again after a kill is run, not looked up. What a shard raises would not become
        # another thing by doing it again: only those of dead workers go to others, which is the scheduler's own rule.
        executor = client.get_executor(pure=False)
        yield Pool(
            executor=executor,
            width=workers or sum(threads.values()),
            devices=tuple(sorted(threads)),
            lost=(KilledWorker,),
        )


def look_around() -> Worker:
    """Return the version and the GPUs of the process that calls this."""
    return Worker(version=package_version("dsa-verify") or "unknown", gpus=tuple(visible_gpus()))


def check_worker(name: str, worker: Worker, threads: int, device: str) -> None:
    """Check a worker. UsageError if it has another version than this process, or if its shards would share a GPU."""
    mine = look_around().version
    if worker.version != mine:
        raise UsageError(f"worker {name}: has dsa-verify {worker.version}, and here is {mine}; install the same")
    if device == "cpu":
        return
    if device == "cuda" and not worker.gpus:
        raise UsageError(f"worker {name}: shows no GPU, and the campaign is for device cuda; use auto or cpu")
    if worker.gpus and (threads, len(worker.gpus)) != (1, 1):
        raise UsageError(
            f"worker {name}: {threads} thread(s) for {len(worker.gpus)} GPU(s), which shards would share; start one "
            "worker for each: CUDA_VISIBLE_DEVICES=0 dask worker --nthreads 1 HOST:PORT"
        )
