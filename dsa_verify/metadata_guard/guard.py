"""The guard: a few lines in an engine's runner that see when a graph would read other memory than it captured.

Where a graph was captured, `captured` records the place and form of each tensor in the metadata. Before each replay
`before_replay` compares, on the host and without a wait. On demand, or at every k-th replay, contents are compared on
the device: fields that are constant, rows beyond the batch, and the whole of it with eager work on a copy. Results
are collected by later calls without a wait, and by `verdict`, which waits.

This module is imported by servers: it imports torch, and nothing of the rest of the project but errors and walks.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import torch

from dsa_verify.base.errors import DeviceLost, GuardError, UsageError
from dsa_verify.metadata_guard.captured import Captured, Settings
from dsa_verify.metadata_guard.finding import GuardFinding, GuardWarning
from dsa_verify.metadata_guard.paths import Patterns
from dsa_verify.metadata_guard.snapshot import Scope
from dsa_verify.metadata_guard.values import PadRule, Pending

SWITCH: Final = "DSA_VERIFY_GUARD"
OFF: Final = ("0", "off")
MODES: Final = ("raise", "warn", "collect")
MAX_PENDING: Final = 64  # checks on the device whose results nobody has collected yet
MAX_FINDINGS: Final = 1000  # that are kept; the rest is counted
NEVER_JUDGED: Final = (
    "was not compared with eager work: nothing said that the replay before was over; call after_replay(), use "
    "replaying(), or wrap the graph"
)
Mode = Literal["raise", "warn", "collect"]


def guard(
    metadata: Any = None,
    *,
    eager: Callable[[Any], Any] | None = None,
    key: Hashable = None,
    name: str = "metadata",
    constants: Iterable[str] = (),
    pads: Mapping[str, object] | None = None,
    numbers: bool | Iterable[str] = False,
    ignore: Iterable[str] = (),
    host_tensors: bool | None = None,
    storages: bool = True,
    every: int = 1,
    values_every: int = 0,
    mode: Mode = "raise",
) -> MetadataGuard:
    """Return a guard over the metadata of captured graphs; `metadata`, if given, is that of the first one.

    `metadata` is any nested object of tensors: dataclasses, named tuples, mappings, sequences, objects with `__dict__`
    or `__slots__`. `key` names its graph (`MetadataGuard.captured`), `name` stands for it in sentences.

    Before a replay these are compared with the capture, at every `every`-th replay and always at the first one:
    address, shape, stride, dtype, device and memory of each tensor, and which attributes there are. Arguments name
    parts by paths such as `page_table`, `layers[3].lens` or `*.lens`, and all that lies below them. `numbers`: plain
    values (numbers, texts, None) that the graph has as constants and that must not change (True: all). `ignore`: what
    is not looked at. `host_tensors`: whether tensors in pageable host memory are compared; None: only if there are no
    others. `storages`: whether a new tensor at the address of one that was freed is a finding.

    On the device, by `check()` and at every `values_every`-th replay, the first one included (0: by `check()` alone):
    `constants`: fields whose content must be that of the capture. `pads`: by field, what rows beyond the batch must
    hold: a number, "last" (what the last row of the batch holds, as in prefix sums), or a pair of that and the rows of
    each request. `eager(copy)`: recomputes the metadata from a copy of it, in place (returning None), or returns the
    tensors that it computed: an object like the metadata, or a mapping from paths. It must compute all that the graph
    does, and compare equal bit by bit.

    `mode`: "raise" raises GuardError, "warn" issues a GuardWarning once for each path and kind, "collect" only keeps
    findings. The environment variable DSA_VERIFY_GUARD overrides it with one of these, and 0 or off switch guards off.
    Raises UsageError for an argument that is wrong or has no effect.
    """
    if isinstance(numbers, bool):
        numbers = ("*",) if numbers else ()
    for option, value, least in (("every", every, 1), ("values_every", values_every, 0)):
        if type(value) is not int or value < least:
            raise UsageError(f"{option}: {value!r} must be an integer of {least} or more")
    settings = Settings(
        scope=Scope(ignore=Patterns(ignore), numbers=Patterns(numbers), host=host_tensors),
        constants=Patterns(constants),
        pads={path: PadRule.of(rule, path) for path, rule in (pads or {}).items()},
        eager=eager,
        storages=storages,
    )
    enabled, mode = _switch(mode)
    made = MetadataGuard(settings, name=name, every=every, values_every=values_every, mode=mode, enabled=enabled)
    if metadata is not None:
        made.captured(metadata, key=key, keep=True)
    return made


def _switch(mode: Mode) -> tuple[bool, Mode]:
    """Return whether guards are on, and the mode, which the environment may override."""
    if mode not in MODES:
        raise UsageError(f"mode: {mode!r} is none; use one of {', '.join(MODES)}")
    told = os.environ.get(SWITCH, "").strip().lower()
    if told in OFF:
        return False, mode
    for known in MODES:
        if told == known:
            return True, known
    if told not in ("", "1", "on"):
        raise UsageError(f"{SWITCH} is {told!r}; unset it, or set it to one of {', '.join((*OFF, *MODES))}")
    return True, mode


class MetadataGuard:
    """`dsa_verify.guard` makes one. One thread uses it.

    `enabled`: whether anything is done; it may be switched at any time. `findings`: what was found, at most
    MAX_FINDINGS; `found`: how many there were. `replays`, `compared`, `value_checks`: how many replays were announced,
    how many of them were compared on the host, and how many checks on the device were made.
    """

    def __init__(
        self, settings: Settings, *, name: str, every: int, values_every: int, mode: Mode, enabled: bool
    ) -> None:
        self.enabled = enabled
        self.mode = mode
        self.findings: list[GuardFinding] = []
        self.found = self.replays = self.compared = self.value_checks = 0
        self._settings, self._name = settings, name
        self._every, self._values_every = every, values_every
        self._captured: dict[Hashable, Captured] = {}
        self._pending: deque[tuple[Captured, Pending]] = deque()
        self._told: set[tuple[str, str, Hashable]] = set()

    def captured(self, metadata: Any, *, key: Hashable = None, keep: bool = False) -> None:
        """Record `metadata` as what the graph `key` captures; what was recorded for `key` before is forgotten.

        Call it at the end of a capture or after it. Without `keep` the guard holds no reference to the object, if that
        is possible, so that it sees when memory is freed. Raises UsageError if there is no tensor in it, or if an
        argument of the guard names nothing in it.
        """
        if self.enabled:
            self._captured[key] = Captured(metadata, key, self._settings, keep)

    def before_replay(self, metadata: Any = None, *, key: Hashable = None, batch: int | None = None) -> None:
        """Compare `metadata` with what the graph `key` captured; None: the object that was recorded.

        Call it right before the replay, on the stream of the replay, when all inputs are written. `batch`: how many
        requests are live, for `pads`. Raises GuardError in mode "raise" if anything differs, if nothing was recorded
        for `key`, and if a check on the device that has ended meanwhile has failed.
        """
        if not self.enabled:
            return
        captured = self._captured.get(key)
        self.replays += 1
        if captured is None:
            self._tell_unknown(key)
            return
        number = captured.replays
        captured.replays = number + 1
        root = self._root_of(captured, metadata)
        values_due = self._values_every and not number % self._values_every
        if root is not None and (values_due or not number % self._every):
            self._compare(captured, root, certain=number > 0)
            if values_due:
                self._compare_inputs(captured, root, batch)
        if self._pending:
            self.poll()

    def after_replay(self, metadata: Any = None, *, key: Hashable = None, batch: int | None = None) -> None:
        """Judge the replay of the graph `key` against eager work, if `before_replay` has taken a copy for it."""
        if not self.enabled:
            return
        captured = self._captured.get(key)
        if captured is not None and captured.has_copy:
            root = metadata if metadata is not None else captured.current()
            if root is not None:
                self._pend(captured, captured.compare_with_eager(root), batch)

    @contextlib.contextmanager
    def replaying(self, metadata: Any = None, *, key: Hashable = None, batch: int | None = None) -> Iterator[None]:
        """Inside, the graph `key` is replayed once: `before_replay` on the way in, `after_replay` on the way out."""
        self.before_replay(metadata, key=key, batch=batch)
        try:
            yield
        except BaseException:
            if key in self._captured:
                self._captured[key].drop_copy()
            raise
        self.after_replay(metadata, key=key, batch=batch)

    def wrap(
        self, graph: Any, *, key: Hashable = None, current: Callable[[], Any] | None = None, batch: Any = None
    ) -> GuardedGraph:
        """Return an object that replays `graph`, such as a `torch.cuda.CUDAGraph`, as `replaying` does.

        `current()` returns the metadata of the replay, `batch()` the number of its live requests; by default the
        metadata is what was recorded, and no batch is known.
        """
        return GuardedGraph(self, graph, key, current or _nothing, batch or _nothing)

    def check(self, metadata: Any = None, *, key: Hashable = None, batch: int | None = None) -> None:
        """Compare `metadata` on the device now, after a replay of the graph `key`: constants, pads, and eager work on a
        copy of it as it is now. That supposes that the graph leaves its inputs alone; else use `values_every`.

        Only launches work on the current stream; `poll` and `verdict` collect its results. Raises UsageError during a
        capture, and GuardError as `before_replay` does.
        """
        if not self.enabled:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UsageError("guard: check was called during a capture, where it would be captured; call it outside")
        captured = self._captured.get(key)
        if captured is None:
            self._tell_unknown(key)
            return
        root = self._root_of(captured, metadata)
        if root is None or not self._compare(captured, root, certain=False):
            return
        found = captured.compare_inputs(captured.quick.tensors(root) or [], batch)
        if self._settings.eager is not None:
            found += captured.compare_with_eager(root)
        self._pend(captured, found, batch)

    def poll(self) -> None:
        """Collect the results of checks that have ended, without a wait. Raises GuardError in mode "raise"."""
        while self._pending and self._pending[0][1].is_there:
            self._collect(*self._pending.popleft())

    def verdict(self) -> list[GuardFinding]:
        """Wait for all checks on the device; return all findings. Raises GuardError in mode "raise" for a new one, and
        if nothing was compared at all."""
        while self._pending:
            self._collect(*self._pending.popleft())
        if self.enabled and not self.compared + self.value_checks and not self.found:
            sentence = "nothing was compared: no replay was announced to the guard"
            self._tell([GuardFinding(kind="not checked", path=self._name, sentence=sentence)])
        return list(self.findings)

    # ------------------------------------------------------------------------------------------------------------------

    def _root_of(self, captured: Captured, metadata: Any) -> Any:
        if metadata is not None:
            captured.forget_root()
            return metadata
        root = captured.current()
        if root is None:
            says = "was recorded at capture and is gone; give before_replay the one that is in use now"
            self._tell([self._finding(captured, "not checked", "", says)])
        return root

    def _compare(self, captured: Captured, root: Any, certain: bool) -> bool:
        """Compare on the host; return whether all is as it was. `certain`: whether the quick comparison will do."""
        self.compared += 1
        try:
            if certain and captured.is_same(root):
                return True
            changes = captured.changes(root)
        except Exception as error:  # what could not be compared must not look compared
            says = f"could not be compared with the capture: {type(error).__name__}: {error}"
            self._tell([self._finding(captured, "not checked", "", says)], error)
            return False
        self._tell([self._finding(captured, change.kind, change.path, change.says) for change in changes])
        return not changes

    def _compare_inputs(self, captured: Captured, root: Any, batch: int | None) -> None:
        tensors = captured.quick.tensors(root)
        if tensors is None:
            return  # told of already, or a form that only the full comparison can read
        if captured.has_copy:
            self._tell([self._finding(captured, "not checked", "", NEVER_JUDGED)])
        found = captured.compare_inputs(tensors, batch)
        if found:
            self._pend(captured, found, batch)
        if self._settings.eager is not None:
            captured.copy_inputs(root)

    def _pend(self, captured: Captured, found: list[Any], batch: int | None) -> None:
        self.value_checks += 1
        while len(self._pending) >= MAX_PENDING:
            self._collect(*self._pending.popleft())
        self._pending.append((captured, captured.pend(found, batch)))

    def _collect(self, captured: Captured, pending: Pending) -> None:
        try:
            failed = pending.read()
        except RuntimeError as error:
            raise DeviceLost(f"the results of a guard cannot be read, end this process: {error}") from error
        self._tell(
            [
                self._finding(captured, judged.kind, judged.path, says, pending.about, pending.replay)
                for judged, says in failed
            ]
        )

    def _finding(
        self, captured: Captured, kind: str, path: str, says: str, about: str = "", replay: int | None = None
    ) -> GuardFinding:
        replay = captured.replays - 1 if replay is None else replay
        graph = f"graph {captured.key!r}, " if captured.key is not None else ""
        sentence = f"{self._name}{path} {says} ({graph}replay {max(replay, 0)}{about})"
        return GuardFinding(kind=kind, path=f"{self._name}{path}", sentence=sentence, key=captured.key, replay=replay)

    def _tell_unknown(self, key: Hashable) -> None:
        graph = f"graph {key!r}" if key is not None else "a graph"
        sentence = f"{graph} is replayed, and no {self._name} was recorded for it; call captured() where it is captured"
        self._tell([GuardFinding(kind="unknown", path=self._name, sentence=sentence, key=key)])

    def _tell(self, findings: list[GuardFinding], cause: Exception | None = None) -> None:
        if not findings:
            return
        self.found += len(findings)
        self.findings += findings[: max(MAX_FINDINGS - len(self.findings), 0)]
        if self.mode == "raise":
            more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
            raise GuardError(f"{findings[0].sentence}{more}", findings) from cause
        for finding in findings if self.mode == "warn" else ():
            once = (finding.kind, finding.path, finding.key)
            if once not in self._told:
                self._told.add(once)
                warnings.warn(finding.sentence, GuardWarning, stacklevel=4)


class GuardedGraph:
    """A graph whose replays are guarded (`MetadataGuard.wrap`). Everything but `replay` is the graph's own."""

    def __init__(
        self,
        guard: MetadataGuard,
        graph: Any,
        key: Hashable,
        current: Callable[[], Any],
        batch: Callable[[], int | None],
    ) -> None:
        self._guard, self._graph, self._key = guard, graph, key
        self._current, self._batch = current, batch

    def replay(self) -> None:
        """Compare, replay the graph, and judge the replay if that is due."""
        if not self._guard.enabled:
            self._graph.replay()
            return
        metadata, batch = self._current(), self._batch()
        with self._guard.replaying(metadata, key=self._key, batch=batch):
            self._graph.replay()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


def _nothing() -> None:
    return None
