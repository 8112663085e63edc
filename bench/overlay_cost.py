"""What the overlay costs: a serving loop of steps of 3 ms without a hook, with a disabled overlay, and with every
replay checked, in blocks that take turns in one run, so that all of them see the same clocks and neighbours.

    python bench/overlay_cost.py [--step-ms 3] [--blocks 40] [--steps 25] [--bucket 14] [--draft-tokens 4]

A step fills the static inputs, replays the captured metadata pipeline (system padded), calls the hook and replays a
forward pass made of matrix products that fill the GPU. Twice: with the host running ahead, and with the host waiting
for each step, as an engine does that reads its tokens. The summary of the overlay is printed too: the cost is that of
checks that took place.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import torch

from dsa_verify.base.device import choose_device

ROUNDS: Final = 64  # that are prepared before anything is timed
WARM_STEPS: Final = 30
PRODUCT: Final = 4096  # rows and columns of one matrix product of the forward pass


class Loop:
    """A serving loop whose rounds were drawn before, so that the host does little more than launch."""

    def __init__(self, bucket: int, draft_tokens: int, step_ms: float, device: torch.device):
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
        from serving_loop import ServingLoop

        from dsa_verify.graphs import open_backend
        from dsa_verify.subjects.pipelines.padded import Padded
        from dsa_verify.systems.catalogue import get_system

        mode = {"padded_mode": "verify", "draft_tokens": draft_tokens} if draft_tokens > 1 else {}
        self.geometry = get_system("padded").geometry("deepseek_v4", mode)
        self.bucket, self.device = bucket, device
        self.loop = ServingLoop(
            Padded, system="padded", geometry=self.geometry, bucket=bucket, backend=open_backend(device)
        )
        self.raws: list[int] = []
        self._drawn: dict[str, list[torch.Tensor]] = {"seq_lens": [], "req_pool_indices": [], "out_cache_loc": []}
        for i in range(ROUNDS):
            raw = min(2 + i % 12, bucket)
            self.loop.step(raw)
            self.raws.append(raw)
            for name, kept in self._drawn.items():
                kept.append(getattr(self.loop.inputs, name).clone())
        self._forward = _forward_of(step_ms, device)
        self._at = 0

    def step(self, hook: Callable[[int], None] | None) -> None:
        at = self._at = (self._at + 1) % ROUNDS
        for name, kept in self._drawn.items():
            getattr(self.loop.inputs, name).copy_(kept[at])
        self.loop.replay()
        if hook is not None:
            hook(self.raws[at])
        self._forward()


def _forward_of(step_ms: float, device: torch.device) -> Callable[[], None]:
    """A graph of as many matrix products as take `step_ms`."""
    left, right = (torch.randn(PRODUCT, PRODUCT, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def products(count: int) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                torch.mm(left, right, out=out)
        return graph.replay

    torch.mm(left, right, out=out)
    torch.cuda.synchronize()
    count = 8
    for _ in range(3):  # the first timing is of a GPU that has not reached its clock
        replay = products(count)
        milliseconds = min(_wall_ms(replay) for _ in range(10))
        count = max(1, round(count * step_ms / milliseconds))
    return products(count)


def _wall_ms(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _block_us(loop: Loop, hook: Callable[[int], None] | None, steps: int, *, wait: bool) -> float:
    """Microseconds a step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        loop.step(hook)
        if wait:
            torch.cuda.current_stream(loop.device).synchronize()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / steps


@click.command()
@click.option("--step-ms", default=3.0, show_default=True, help="What the forward pass takes.")
@click.option("--blocks", default=40, show_default=True, help="Blocks of each variant.")
@click.option("--steps", default=25, show_default=True, help="Steps of a block.")
@click.option("--bucket", default=14, show_default=True, help="Requests of the captured batch.")
@click.option("--draft-tokens", default=4, show_default=True, help="N; 1 is decode.")
def main(step_ms: float, blocks: int, steps: int, bucket: int, draft_tokens: int) -> None:
    device = choose_device("cuda")
    from dsa_verify.overlay import Overlay

    loop = Loop(bucket, draft_tokens, step_ms, device)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        on = Overlay.attach(system="padded", geometry=loop.geometry, directory=folder, prepare_on_demand=False)
        on.prepare(bucket, loop.loop.inputs, loop.loop.outputs)
        spent: list[float] = []

        def hook_of(overlay: Any, times: list[float] | None) -> Callable[[int], None]:
            def hook(raw: int) -> None:
                if overlay.enabled:
                    start = time.perf_counter()
                    overlay.check(raw_batch=raw, bucket=bucket, inputs=loop.loop.inputs, outputs=loop.loop.outputs)
                    if times is not None:
                        times.append(time.perf_counter() - start)

            return hook

        variants: dict[str, Callable[[int], None] | None] = {
            "no hook": None,
            "disabled": hook_of(Overlay.disabled, None),
            "on": hook_of(on, spent),
        }
        print(
            f"{torch.cuda.get_device_name(device)}, bucket {bucket}, N {draft_tokens}, {blocks} blocks of {steps} steps"
        )
        for wait in (False, True):
            for hook in variants.values():
                _block_us(loop, hook, WARM_STEPS, wait=wait)
            spent.clear()
            found: dict[str, list[float]] = {name: [] for name in variants}
            for i in range(blocks):
                # Each variant comes first as often as the others.
                names = list(variants)
                for name in names[i % len(names) :] + names[: i % len(names)]:
                    found[name].append(_block_us(loop, variants[name], steps, wait=wait))
            _print(found, spent, "the host waits for each step" if wait else "the host runs ahead")
        print(on.close().text())


def _print(found: dict[str, list[float]], spent: list[float], title: str) -> None:
    print(title)
    base = statistics.median(found["no hook"])
    for name, times in found.items():
        middle = statistics.median(times)
        low, high = min(times), max(times)
        added = statistics.median(mine - plain for mine, plain in zip(times, found["no hook"], strict=True))
        print(
            f"  {name:<10} {middle:9.1f} us a step ({low:.1f} to {high:.1f}), "
            f"{added:+7.1f} us beside the block without a hook, {added / base:+.2%}"
        )
    print(f"  the call of check: {statistics.median(spent) * 1e6:.1f} us of the host, {len(spent)} calls")


if __name__ == "__main__":
    main()
