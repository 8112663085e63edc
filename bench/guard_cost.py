"""What the guard costs the host before a replay: microseconds for metadata of 32 tensors, switched off and on, for an
object that is kept, one that is built anew around the same tensors, and one that 61 layers share.

    python bench/guard_cost.py [--tensors 32] [--calls 20000]

With a GPU it also times a step of graphs that take some 3 ms with and without the guard, in blocks that take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch

import dsa_verify

BLOCKS = 15
STEP_MS = 3.0
PRODUCT = 4096  # rows and columns of the matrix products that a step is made of


class Metadata:
    """Attributes that are tensors, each with strides of its own."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.__dict__.update(tensors)


def microseconds(call: Callable[[], object], calls: int) -> float:
    """The least of BLOCKS blocks, a call."""
    best = float("inf")
    for _ in range(BLOCKS):
        start = time.perf_counter()
        for _ in range(calls // BLOCKS):
            call()
        best = min(best, (time.perf_counter() - start) / (calls // BLOCKS))
    return best * 1e6


def step_of(device: torch.device) -> Callable[[], None]:
    """A graph that takes some STEP_MS."""
    left = torch.randn(PRODUCT, PRODUCT, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(left)
    count = 4
    for _ in range(3):
        torch.mm(left, left, out=out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                torch.mm(left, left, out=out)
        graph.replay()
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        count = max(1, round(count * STEP_MS / 1e3 / (time.perf_counter() - start)))
    return graph.replay


def side_by_side(guard: dsa_verify.MetadataGuard, metadata: Any, device: torch.device) -> None:
    """Print what a step takes without the guard, with it off, and with it on; the host waits for each step."""
    replay = step_of(device)

    def block(enabled: bool | None) -> float:
        guard.enabled = bool(enabled)
        start = time.perf_counter()
        for _ in range(25):
            if enabled is not None:
                guard.before_replay(metadata)
            replay()
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / 25 * 1e6

    found: dict[str, list[float]] = {"no guard": [], "off": [], "on": []}
    variants = {"no guard": None, "off": False, "on": True}
    for i in range(41):
        for name in [*variants][i % 3 :] + [*variants][: i % 3]:
            found[name].append(block(variants[name]))
    base = statistics.median(found["no guard"][1:])
    for name, times in found.items():
        added = statistics.median(mine - plain for mine, plain in zip(times[1:], found["no guard"][1:], strict=True))
        print(f"  step, {name:<10} {statistics.median(times[1:]):9.1f} us, {added:+.1f} us, {added / base:+.2%}")


@click.command()
@click.option("--tensors", default=32, show_default=True, help="Tensors in the metadata.")
@click.option("--calls", default=20_000, show_default=True, help="Calls that are timed of each variant.")
def main(tensors: int, calls: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = {f"field_{i}": torch.zeros(8, 4 + i, dtype=torch.int32, device=device)[:, :4] for i in range(tensors)}
    metadata = Metadata(memory)
    rebuilt = [Metadata({name: tensor[:] for name, tensor in memory.items()}) for _ in range(16)]
    layers = {f"layers.{i}": metadata for i in range(61)}
    guard, shared = dsa_verify.guard(metadata), dsa_verify.guard(layers)
    turn = iter(range(10**9))
    print(f"{tensors} tensors on {device}, {calls} calls")
    for name, call in {
        "on, kept": lambda: guard.before_replay(metadata),
        "on, built anew": lambda: guard.before_replay(rebuilt[next(turn) % 16]),
        "on, shared by 61 layers": lambda: shared.before_replay(layers),
    }.items():
        print(f"  {name:<24} {microseconds(call, calls):7.2f} us")
    guard.enabled = False
    print(f"  {'off':<24} {microseconds(lambda: guard.before_replay(metadata), calls):7.2f} us")
    if device.type == "cuda":
        side_by_side(guard, metadata, device)


if __name__ == "__main__":
    main()
