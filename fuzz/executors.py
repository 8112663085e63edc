"""Executors: where shards run. Any concurrent.futures.Executor will do; two come with names.

`local`: a thread for each GPU of this machine (or each core, where there is none), each of which watches one child.
`dask://HOST:PORT`: the workers of a Dask cluster. Its nannies restart workers that die, and the scheduler gives their
shards to others; a shard done twice writes the same files, so nothing is doubled. The workers must see the campaign's
folder under the same path; folders on separate disks are united by `merge`.
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

from dsa_verify.errors import UsageError
from dsa_verify.pinning import PINNED, VISIBLE, visible_gpus
from fuzz.supervise import slot

# How often the scheduler gives a shard whose worker died to another one.
RETRIES: Final = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """`width`: shards that can run at once. `devices`: where, for people."""

    executor: Executor
    width: int
    devices: tuple[str, ...]


@contextlib.contextmanager
def open_pool(reference: str, device: str, workers: int | None = None) -> Iterator[Pool]:
    """The pool named `local` or `dask://HOST:PORT`, for plans on `device`; at most `workers` shards at once."""
    if reference == "local":
        with _local(device, workers) as pool:
            yield pool
    elif re.fullmatch(r"dask://[^/:]+:\d+", reference):
        with _dask(reference.removeprefix("dask://"), workers) as pool:
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
def _dask(address: str, workers: int | None) -> Iterator[Pool]:
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError(
            f"executor dask://{address}: the package distributed is missing ({error}); pip install dsa-verify[campaign]"
        ) from error
    client: Any
    with Client(f"tcp://{address}", set_as_default=False) as client:
        threads: dict[str, int] = client.nthreads()
        if not threads:
            raise UsageError(f"executor dask://{address}: the scheduler has no worker; start one with: dask worker")
        # Impure: a shard that runs again after a kill is run, not looked up.
        executor = client.get_executor(pure=False, retries=RETRIES)
        yield Pool(executor=executor, width=workers or sum(threads.values()), devices=tuple(sorted(threads)))
