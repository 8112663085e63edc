"""Decode context parallelism on real ranks, one GPU each: every rank captures its step, NCCL collectives included, in
one CUDA graph, replays it on new inputs round after round and compares with the oracle of all ranks on its own device.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 -m dsa_verify.cli.dcp_ranks

`--backend gloo` runs the same logic on CPUs, eagerly where a graph would be replayed. Exit status of a process: 0
equal, 1 different, 4 nothing verified because GPUs are missing; torchrun itself makes 1 of any but 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click
import numpy as np
import torch
import torch.distributed

from dsa_verify.base.errors import STATUS_EQUAL, STATUS_MISMATCH, DsaVerifyError, NothingVerified, UsageError
from dsa_verify.base.exit_status import exit_status
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import POISONS, Round
from dsa_verify.systems.catalogue import get_system

BUCKET: Final = 8
MAX_RANKS: Final = 8
REMAP_EVERY: Final = 3
COMMAND: Final = "torchrun --nproc-per-node 2 -m dsa_verify.cli.dcp_ranks"
# Wide enough that ranges span several turns of eight ranks, small enough for hundreds of rounds a second.
SIZES: Final = {"context": 203, "request_rows": 33, "topk": 32, "heads": 4, "head_dim": 64}


@click.command()
@click.option(
    "--backend",
    type=click.Choice(["nccl", "gloo"]),
    default="nccl",
    show_default=True,
    help="Use these collectives. gloo runs the same logic on CPUs, without graphs.",
)
@click.option(
    "--rounds", type=click.IntRange(1, 100_000), default=100, show_default=True, help="Replay this many rounds."
)
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Draw the rounds from this seed."
)
def main(backend: str, rounds: int, seed: int) -> None:
    """Verify decode context parallelism on real ranks, one process a rank, which torchrun starts."""
    try:
        sys.exit(verify(backend, rounds, seed))
    except DsaVerifyError as error:
        print(f"dcp_ranks: {error}", file=sys.stderr, flush=True)
        sys.exit(exit_status(error))


def verify(backend: str, rounds: int, seed: int) -> int:
    """Return the exit status of this rank's process.

    Raises NothingVerified where GPUs are missing, and UsageError outside torchrun.
    """
    device = _device(backend)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise UsageError(f"RANK and WORLD_SIZE are not set; start one process a rank: {COMMAND}")
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated, hence the late imports
    with _process_group(backend, device) as (rank, size):
        from dsa_verify.replay.dcp_rank import RankRun

        geometry = get_system("dcp").geometry("tiny", {**SIZES, "dcp_size": size, "log_base": ("2", "e")[seed % 2]})
        run = RankRun(geometry, BUCKET, rank, device, rounds)
        try:
            run.replay(draw(geometry, rounds, seed))
            report = run.report()
        finally:
            run.close()
        print(f"rank {rank} of {size} on {_name(device)}: {report.line}", flush=True)
        differing = torch.tensor([report.differing], device=device)
        torch.distributed.all_reduce(differing)
        equal = int(differing) == 0
        if rank == 0:
            how = "in one CUDA graph a rank" if device.type == "cuda" else "eagerly, graphs emulated"
            verdict = "EQUAL" if equal else f"DIFFERENT in {int(differing)} words"
            print(f"{verdict}: {size} ranks, {rounds} rounds, {backend} collectives {how}", flush=True)
    return STATUS_EQUAL if equal else STATUS_MISMATCH


def draw(geometry: Geometry, count: int, seed: int) -> list[Round]:
    """Return `count` rounds, the same on every rank: any lengths, all requests different, some of them remapped."""
    rng = np.random.default_rng(seed)
    rounds = []
    for i in range(count):
        raw = int(rng.integers(1, BUCKET + 1))
        requests = (1 + rng.permutation(geometry.request_rows - 1)[:raw]).tolist()
        rounds.append(
            Round(
                bucket=BUCKET,
                seq_lens=tuple(rng.integers(0, geometry.context + 1, raw).tolist()),
                requests=tuple(requests),
                remap=(requests[0],) if i % REMAP_EVERY == 0 else (),
                poison=POISONS[i % len(POISONS)],
                seed=int(rng.integers(1 << 31)),
            )
        )
    return rounds


def _device(backend: str) -> torch.device:
    """Return this rank's device. Raises NothingVerified, with what is missing, where ranks cannot have a GPU each."""
    if backend == "gloo":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    needed = max(2, int(os.environ.get("LOCAL_WORLD_SIZE", "2")))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < needed:
        raise NothingVerified(
            f"{needed} GPUs are needed, one a rank, and {found} found; nothing was verified. "
            "Use --backend gloo for the logic alone"
        )
    return torch.device("cuda", local)


@contextmanager
def _process_group(backend: str, device: torch.device) -> Iterator[tuple[int, int]]:
    size = int(os.environ["WORLD_SIZE"])
    if not 2 <= size <= MAX_RANKS:
        raise UsageError(f"WORLD_SIZE: {size} ranks are outside 2..{MAX_RANKS}; start as many: {COMMAND}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    try:
        yield torch.distributed.get_rank(), size
    finally:
        torch.distributed.destroy_process_group()


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
