"""Journal: the case that is about to be launched, on disk before it is launched.

A fault of a device, a crash or a hang leaves no one who could say what was running; the journal does. It is written
wherever a setup launches anything, the confirmation of a finding included, so what lies there when a process is found
dead is what it died of. Its age, and that of the progress beside it, is the heartbeat that the supervisor watches.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

from dsa_verify.base.atomic_write import write_atomically
from dsa_verify.contract.round import Scenario
from dsa_verify.contract.round_table import RoundTable
from dsa_verify.replay.setup import ReplaySetup
from fuzz.campaign.shard_folder import JOURNAL_FILE, PROGRESS_FILE, STOP_FILE, campaign_root, write_json

HEARTBEAT_S: Final = 0.5
_TABLES: Final = 2  # chunks in the journal: that which is launched and the one before, which may have prepared it


class Stopped(Exception):
    """The campaign asked its shards to end."""


class Journal:
    """The journal of the process that runs the shard in `folder`.

    `rounds` were launched; `checked` of them had been judged when the next chunk was launched: what came after cannot
    be believed if the process dies.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stop = campaign_root(folder) / STOP_FILE
        self._tables: deque[RoundTable] = deque(maxlen=_TABLES)
        self._beat = 0.0
        self.rounds = self.checked = 0

    def opening(self, setup: ReplaySetup) -> None:
        """`setup` allocates, warms up and captures."""
        self._tables.clear()
        self.running(setup.scenario([], found="while it was captured"))

    def launching(self, setup: ReplaySetup, table: RoundTable) -> None:
        """`setup` replays `table`, after what it replayed since it was opened."""
        self._tables.append(table)
        rounds = [round_ for each in self._tables for round_ in each.rounds()]
        self.checked = self.rounds
        self.running(setup.scenario(rounds, found="while it was replayed"))

    def running(self, case: Scenario, *, durable: bool = True) -> None:
        """Something of `case` is launched. `durable`: it must outlive the machine, too."""
        write_atomically(self._folder / JOURNAL_FILE, case.to_json(), durable=durable)
        self.beat(force=True)

    def count(self, rounds: int) -> None:
        """Note that so many more rounds were launched; Stopped if the campaign is over."""
        self.rounds += rounds
        self.alive(rounds)

    def alive(self, rounds: int) -> None:
        """Note that rounds were launched that are not counted. Stopped as in `count`."""
        self.clock()

    def beat(self, *, force: bool = False) -> None:
        """Write progress now and then."""
        now = time.monotonic()
        if not force and now - self._beat < HEARTBEAT_S:
            return
        self._beat = now
        # Not durable: a heartbeat says nothing once the machine is down, and waiting for the disk costs rounds.
        write_json(
            self._folder / PROGRESS_FILE, {"rounds": self.rounds, "checked": self.checked, "at": now}, durable=False
        )

    def clock(self) -> float:
        """Return time.monotonic(), as a sign of life from whoever asks for it; Stopped if the campaign is over."""
        self.beat()
        if self._stop.exists():
            raise Stopped
        return time.monotonic()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JournalledSetup(ReplaySetup):
    """A setup that launches nothing that is not in `journal`. `planted`: whether its fault is what a shard plants to
    show that it can see, and not what the campaign was asked to plant."""

    journal: Journal
    planted: bool = False

    @classmethod
    def of(cls, setup: ReplaySetup, journal: Journal, **changes: Any) -> JournalledSetup:
        values = {field.name: getattr(setup, field.name) for field in dataclasses.fields(ReplaySetup)}
        return cls(**{**values, **changes}, journal=journal)

    def opening(self) -> None:
        self.journal.opening(self)

    def launching(self, table: RoundTable) -> None:
        self.journal.launching(self, table)
