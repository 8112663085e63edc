"""Live block: what a campaign is doing, redrawn on a terminal; plain lines elsewhere, or where NO_COLOR is set."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fuzz.campaign.report import visited

PLAIN_EVERY_S: Final = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunningShard:
    """A shard that runs: its `rounds` so far, `silent_s` since its last heartbeat, `attempts` that were lost."""

    number: int
    system: str
    rounds: int
    silent_s: float | None
    attempts: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CampaignSnapshot:
    """The display shows this. `left_s`, `rounds_left`: None where the campaign has no such limit."""

    facts: Mapping[str, Any]
    running: Sequence[RunningShard]
    rounds_per_s: float
    left_s: float | None
    rounds_left: int | None
    health: Sequence[str] = ()


class Display:
    """`say` writes a line that stays; `show` what will be replaced."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self.live = self._console.is_terminal and "NO_COLOR" not in os.environ
        self._block: Live | None = None
        self._shown = -PLAIN_EVERY_S

    @contextlib.contextmanager
    def open(self) -> Iterator[Display]:
        if not self.live:
            yield self
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as self._block:
            yield self

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def show(self, snapshot: CampaignSnapshot) -> None:
        if self._block is not None:
            self._block.update(block(snapshot), refresh=True)
        elif time.monotonic() - self._shown >= PLAIN_EVERY_S:
            self._shown = time.monotonic()
            self.say(line(snapshot))


def line(snapshot: CampaignSnapshot) -> str:
    """Return the block as one line."""
    facts = snapshot.facts
    return ", ".join(
        [
            f"{facts['rounds_executed'] + sum(shard.rounds for shard in snapshot.running):,} rounds",
            f"{snapshot.rounds_per_s:,.0f} rounds/s",
            f"{len(facts['findings'])} unique finding(s)",
            f"coverage {visited(facts)}",
            f"{len(snapshot.running)} shard(s) running",
            f"left: {left(snapshot)}",
        ]
    )


def left(snapshot: CampaignSnapshot) -> str:
    """Return time and rounds left, as far as there are limits."""
    parts = []
    if snapshot.left_s is not None:
        minutes, seconds = divmod(max(int(snapshot.left_s), 0), 60)
        parts.append(f"{minutes // 60}:{minutes % 60:02}:{seconds:02}")
    if snapshot.rounds_left is not None:
        parts.append(f"{snapshot.rounds_left:,} rounds")
    return " or ".join(parts) or "no limit"


def block(snapshot: CampaignSnapshot) -> Table:
    """Return the block: figures, then a row for each shard that runs, then the devices' health."""
    facts = snapshot.facts
    table = Table.grid(padding=(0, 2))
    rounds = facts["rounds_executed"] + sum(shard.rounds for shard in snapshot.running)
    table.add_row("rounds", f"{rounds:,} ({snapshot.rounds_per_s:,.0f} rounds/s)")
    table.add_row("findings", f"{len(facts['findings'])} unique")
    table.add_row("coverage", visited(facts))
    table.add_row("left", left(snapshot))
    for shard in snapshot.running:
        sign = "starting" if shard.silent_s is None else f"last sign of life {shard.silent_s:.0f} s ago"
        lost = f", {shard.attempts} attempt(s) lost" if shard.attempts else ""
        table.add_row(f"shard {shard.number}", f"{shard.system}, {shard.rounds:,} rounds, {sign}{lost}")
    for text in snapshot.health:
        table.add_row("health", text)
    return table


class Health:
    """Temperature, load and memory of each GPU, as far as nvidia-ml-py (extra: gpu) is installed; otherwise nothing."""

    def __init__(self) -> None:
        self._library: Any = None
        with contextlib.suppress(Exception):  # not installed, or no driver: this is for people, and never fails
            import pynvml

            pynvml.nvmlInit()
            self._library = pynvml

    def lines(self) -> list[str]:
        library = self._library
        if library is None:
            return []
        found = []
        with contextlib.suppress(Exception):
            for i in range(library.nvmlDeviceGetCount()):
                handle = library.nvmlDeviceGetHandleByIndex(i)
                degrees = library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)
                load = library.nvmlDeviceGetUtilizationRates(handle).gpu
                memory = library.nvmlDeviceGetMemoryInfo(handle)
                found.append(f"GPU {i}: {degrees} °C, {load} % busy, {memory.used >> 30} of {memory.total >> 30} GiB")
        return found
