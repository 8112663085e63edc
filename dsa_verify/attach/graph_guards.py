"""GraphGuards: the metadata guard over the graphs of a server, whoever owns them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, Final
from weakref import WeakKeyDictionary

from dsa_verify.attach.part import Part, Report
from dsa_verify.base.errors import UsageError
from dsa_verify.metadata_guard.guard import SWITCH as GUARD_SWITCH
from dsa_verify.metadata_guard.guard import MetadataGuard, guard
from dsa_verify.overlay.summary import LineLog

MAX_GRAPHS: Final = 4096  # that are guarded in one process


def new_guard(name: str, every: int) -> MetadataGuard:
    """Return a guard that keeps its findings: this is all that the attachment knows of how one is made. UsageError if
    the environment switches guards off."""
    made = guard(name=name, every=every, mode="collect")
    if not made.enabled:
        raise UsageError(f"{GUARD_SWITCH} switches guards off; unset it")
    made.mode = "collect"  # whatever the environment says of guards that an engine has made itself
    return made


class GraphGuards(Part):
    """The guards of one process. An `owner` holds graphs, and `key` names one of them: sentences show it."""

    def __init__(self, report: Report):
        super().__init__("guard", report)
        self._guarded: WeakKeyDictionary[Any, dict[Hashable, _Guarded]] = WeakKeyDictionary()
        self._graphs = 0
        self._told: set[tuple[str, str, Hashable]] = set()
        self._log: LineLog | None = None

    def captured(self, owner: Any, key: Hashable, name: str, current: Callable[[], Any]) -> None:
        """A graph captures what `current` returns, which sentences call `name`. UsageError beyond MAX_GRAPHS."""
        graphs = self._guarded.setdefault(owner, {})
        if key not in graphs:
            if self._graphs >= MAX_GRAPHS:
                raise UsageError(f"{self._graphs} graphs are guarded and another is captured; that many are the limit")
            self._graphs += 1
        graphs[key] = _Guarded(new_guard(name, self.report.settings.every), current)
        graphs[key].guard.captured(current(), key=key)

    def before_replay(self, owner: Any, key: Hashable) -> None:
        """The graph is replayed next; nothing is done for one that was not seen when it was captured."""
        found = self._guarded.get(owner, {}).get(key)
        metadata = None if found is None else found.current()
        if found is None or metadata is None:
            return
        found.guard.before_replay(metadata, key=key)
        if found.guard.findings:
            self._tell(found.guard)

    def _tell(self, one: MetadataGuard) -> None:
        """Say each finding once, however many replays show it."""
        findings, one.findings = one.findings, []
        for finding in findings:
            once = (finding.kind, finding.path, finding.key)
            if once in self._told:
                continue
            self._told.add(once)
            self._log = self._log or self.log()
            self._log.write({"kind": finding.kind, "path": finding.path, "sentence": finding.sentence})
            self.found(finding.sentence)


@dataclasses.dataclass(frozen=True, slots=True)
class _Guarded:
    """A guard of one graph, and where its metadata is now; None where that is gone."""

    guard: MetadataGuard
    current: Callable[[], Any]
