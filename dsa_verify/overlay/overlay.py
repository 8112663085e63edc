"""Overlay: checks the metadata of a live server, for the first n replays or one in m, and changes nothing of it.

Attached where metadata has just been prepared, it compares a copy of inputs and metadata with one of two references
(docs/overlay.md): the oracle of a system, or the server's own ordinary preparation.

A check waits for nothing. On the server's stream it takes (one copy); the oracle and the judge run on another stream
beside what the server does next, out of CUDA graphs that belong to the overlay. Results are collected by `poll`, which
does not wait either, and by `close`, which does. While it is disabled the hook costs one attribute test.

This module is imported by servers: it imports torch, and Triton only when the first check is prepared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from dsa_verify.base.errors import NothingVerified, UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.overlay.inputs import input_specs
from dsa_verify.overlay.setup import Reference, Setup, Shared, compared
from dsa_verify.overlay.summary import LineLog, Reasons, Summary
from dsa_verify.systems.catalogue import get_system

if TYPE_CHECKING:
    from dsa_verify.overlay.bucket_check import BucketCheck

MAX_BUCKET_BYTES: Final = 2 << 30
MAX_BUCKETS: Final = 256
MAX_CASES: Final = 8
KEEP_ROUNDS: Final = 16
RECENT_REPLAYS: Final = 4096  # whose raw batch is remembered
_log: Final = logging.getLogger("dsa_verify.overlay")


class NullOverlay:
    """A null overlay stands where nothing is to be checked, and does nothing."""

    enabled: Final = False

    def prepare(self, bucket: int, inputs: Any, outputs: Any, *, also: Sequence[torch.Tensor] = ()) -> None:
        """Do nothing."""

    def check(
        self, *, raw_batch: int, bucket: int, inputs: Any, outputs: Any, also: Sequence[torch.Tensor] = ()
    ) -> None:
        """Do nothing."""

    def poll(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Return no summary, because nothing was to be checked."""


class Overlay:
    """`attach` makes an overlay. `enabled` says whether `check` has anything to do; test it in the hook.

    One thread calls `check` and `prepare`; any may call `poll`.
    """

    disabled: ClassVar[NullOverlay] = NullOverlay()

    def __init__(self, setup: Setup):
        self._setup = setup
        self.enabled = True
        self._left = setup.first
        self._replays = 0
        self._launched = 0
        self._checks: dict[int, BucketCheck] = {}
        self._opened: list[BucketCheck] = []
        self._device: Shared | None = None
        self._reasons = Reasons()
        self._moved: Counter[str] = Counter()
        self._new_moves: deque[tuple[int, int, int, str, str]] = deque(maxlen=RECENT_REPLAYS)
        self._raws: dict[int, int] = {}
        self._recent: deque[int] = deque()
        self._told: set[tuple[int, str]] = set()
        self._cases: list[str] = []
        self._lock = threading.Lock()
        self._summary: Summary | None = None
        self._log = LineLog(setup.path, setup.on_line)
        self._log.write({"kind": "attached", **setup.to_dict()}, always=True)

    @classmethod
    def attach(
        cls,
        *,
        system: str,
        geometry: Geometry | str,
        directory: Path | str,
        rank: int = 0,
        first: int | None = None,
        every: int = 1,
        fields: Sequence[str] | None = None,
        input_names: Mapping[str, str] | None = None,
        output_names: Mapping[str, str] | None = None,
        reference: Reference | None = None,
        check_pad_rows: bool = True,
        keep_rounds: int = KEEP_ROUNDS,
        widest: int | None = None,
        subject: str | None = None,
        prepare_on_demand: bool = True,
        max_bytes: int = MAX_BUCKET_BYTES,
        on_line: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> Overlay:
        """Return an overlay that checks one in `every` replays until it has checked `first` (None: for ever).

        `geometry`: of the server, or the name of a preset. `fields`: those that are compared, all of the system's by
        default. `input_names`, `output_names`: field -> path into what the hook is given, dots going into mappings and
        attributes; by default the fields' own names (`dsa_verify.Inputs`, the contract).

        `reference(raw_batch, bucket)`: the server's own preparation, which rewrites the live metadata in place on the
        current stream; None compares with the oracle. `check_pad_rows`: whether pad rows of the inputs must hold their
        pad values (contract 0.2). `keep_rounds`: checked rounds, of buckets up to `widest` (by default the first that
        is prepared), of which a difference makes a case (0: none); in it the server's pipeline is called `subject`.
        `prepare_on_demand`: whether the first check of a bucket may prepare it, which waits; otherwise it could not
        run. `max_bytes`: device memory of one bucket. `on_line(line)` is told of each line that is written, by whoever
        calls `poll` or `close`.

        Lines and cases go to `directory`. UsageError for an argument that is wrong.
        """
        known = get_system(system)
        resolved = known.geometry(geometry) if isinstance(geometry, str) else geometry
        known.check_geometry(resolved)
        input_specs(known, resolved)  # refuses a system that no check can know
        compared(known.layout(resolved, 1), fields)  # refuses what is no field
        for name, value, least in (("first", first, 1), ("every", every, 1), ("rank", rank, 0)):
            if value is not None and value < least:
                raise UsageError(f"{name}: {value} is below {least}; use {least} or more")
        return cls(
            Setup(
                system=known,
                geometry=resolved,
                directory=Path(directory),
                rank=rank,
                first=first,
                every=every,
                fields=None if fields is None else tuple(fields),
                input_names=input_names,
                output_names=output_names,
                reference=reference,
                check_pad_rows=check_pad_rows,
                keep_rounds=keep_rounds,
                widest=widest,
                subject=subject,
                prepare_on_demand=prepare_on_demand,
                max_bytes=max_bytes,
                on_line=on_line,
            )
        )

    def prepare(self, bucket: int, inputs: Any, outputs: Any, *, also: Sequence[torch.Tensor] = ()) -> None:
        """Make everything that checks of `bucket` need, over these tensors; waits for the device.

        Arguments as in `check`. Call it after the server has captured its own graphs. UsageError for tensors that
        cannot be those of the system. Prepared again, a bucket is checked over the new tensors.
        """
        with self._lock, torch.inference_mode(False):
            self._checks[bucket] = self._open(bucket, inputs, outputs, also)
            self._opened.append(self._checks[bucket])

    def check(
        self, *, raw_batch: int, bucket: int, inputs: Any, outputs: Any, also: Sequence[torch.Tensor] = ()
    ) -> None:
        """Check the metadata that has just been prepared for a replay of `bucket` with `raw_batch` live requests.

        `inputs`, `outputs`: a mapping or an object with the server's tensors, the inputs for at least `bucket`
        requests, pad rows included. `also`: other tensors that the `reference` writes, to be put back. Waits for
        nothing and raises nothing: what cannot be done is counted, and reported by `poll` and `close`.
        """
        replay = self._replays
        self._replays += 1
        if replay % self._setup.every:
            return
        try:
            self._check(replay, raw_batch, bucket, inputs, outputs, also)
        except Exception as error:  # a diagnostic must not be what ends the server
            self._reasons.add(replay, _reason(error))
        if self._left is not None:
            self._left -= 1
            self.enabled = self._left > 0

    def poll(self) -> None:
        """Collect what has ended and write its lines, waiting for nothing; call it off the hot path, now and then.

        Each call asks the device for the results or takes what the one before has asked for.
        """
        with self._lock:
            self._collect(wait=False)

    def close(self) -> Summary:
        """Wait for the checks that are under way, write what is left and the summary. No check runs after it.

        Raises NothingVerified, after all that, if no check took place: that is no pass.
        """
        with self._lock:
            if self._summary is None:
                self.enabled = False
                self._end()
            summary = self._summary
        assert summary is not None
        if not summary.checked:
            raise NothingVerified(summary.text())
        return summary

    def __enter__(self) -> Overlay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            with contextlib.suppress(NothingVerified):
                self.close()

    # The hot path ----------------------------------------------------------------------------------------------------

    def _check(
        self, replay: int, raw_batch: int, bucket: int, inputs: Any, outputs: Any, also: Sequence[torch.Tensor]
    ) -> None:
        if self._summary is not None:
            raise UsageError("the overlay is closed")
        if not 0 <= raw_batch <= bucket:
            raise UsageError(f"raw_batch: {raw_batch} is outside 0..{bucket}, the bucket")
        reason = self._device.stream.reason_not_to_run() if self._device is not None else _capturing()
        if reason is not None:
            raise UsageError(reason)
        if bucket not in self._checks:
            if not self._setup.prepare_on_demand:
                raise UsageError(f"bucket {bucket} was not prepared")
            self.prepare(bucket, inputs, outputs, also=also)
        assert self._device is not None
        with torch.inference_mode():  # so that tensors of the server which were made in it may be written
            moved = self._checks[bucket].run(replay, raw_batch, inputs, outputs, also)
        self._launched += 1
        self._raws[replay] = raw_batch
        self._recent.append(replay)
        if len(self._recent) > RECENT_REPLAYS:
            del self._raws[self._recent.popleft()]
        for name, change in moved.items():
            if not self._moved[name]:
                self._new_moves.append((replay, raw_batch, bucket, name, change))
            self._moved[name] += 1

    def _open(self, bucket: int, inputs: Any, outputs: Any, also: Sequence[torch.Tensor]) -> BucketCheck:
        from dsa_verify.overlay.bucket_check import BucketCheck

        setup = self._setup
        if len(self._opened) >= MAX_BUCKETS:
            raise UsageError(f"bucket {bucket}: {MAX_BUCKETS} buckets have been prepared; attach another overlay")
        if self._device is None:
            self._device = Shared.of(setup, bucket, inputs)
        ring = self._device.ring_for(bucket)
        return BucketCheck(
            setup, bucket, inputs, outputs, also=also, facts=self._device.facts, stream=self._device.stream, ring=ring
        )

    # Off the hot path ------------------------------------------------------------------------------------------------

    def _collect(self, *, wait: bool) -> None:
        """Take what the device has sent; what a difference left is asked for, and the next one may leave its own."""
        self._write_news()
        if self._device is None:
            return
        case_is_there = self._device.kept_is_there(wait=wait)
        failing = [check for check in self._opened if self._has_failed(check, case_is_there=case_is_there, wait=wait)]
        for check in failing:
            check.evidence.ask()
        if failing:
            self._device.ask_for_kept()
        for check in failing:
            check.rearm()
        if not wait:
            self._ask()

    def _has_failed(self, check: BucketCheck, *, case_is_there: bool, wait: bool) -> bool:
        """Log what `check` has sent, and return whether a difference left evidence that has yet to be asked for."""
        if check.evidence.asked:
            if case_is_there and check.evidence.ready(wait=wait):
                self._tell(check)
            return False
        if not check.counters.ready(wait=wait):
            return False
        if int(check.counters.host["kept"]):
            return True
        self._tell_the_rest(check)
        return False

    def _ask(self) -> None:
        for check in self._opened:
            if not check.counters.asked and not check.evidence.asked:
                check.counters.ask()

    def _tell(self, check: BucketCheck) -> None:
        """The lines of the check that left evidence, then of others."""
        from dsa_verify.overlay.report import explained

        lines = explained(check, check.evidence.host)
        case = self._save_case(lines[0].diagnosis, lines[0].field) if lines else None
        # Only what the judge has kept could be told again.
        kept = {(difference.round, difference.region.name) for difference in check.tally().first}
        for line in lines:
            self._told |= {(line.replay, line.field)} & kept
            self._log.write(dataclasses.replace(line, case=case).to_dict() | {"rank": self._setup.rank})
        self._tell_the_rest(check)

    def _tell_the_rest(self, check: BucketCheck) -> None:
        from dsa_verify.overlay.report import unexplained

        for line in unexplained(check, check.tally(), lambda *at: at in self._told, self._raws):
            self._told.add((line.replay, line.field))
            self._log.write(line.to_dict() | {"rank": self._setup.rank})

    def _save_case(self, diagnosis: str | None, field: str) -> str | None:
        device = self._device
        assert device is not None
        if device.ring is None or device.kept is None or len(self._cases) >= MAX_CASES:
            return None
        try:
            # The sentence would name what the case does not reveal: requests and pages of the server.
            dump = device.ring.save(**device.kept.host, folder=self._setup.directory, found=f"{diagnosis}: {field}")
        except UsageError as error:
            self._note("no case", reason=str(error))
            return None
        path = str(dump.path)
        left_out, not_representable = dump.left_out, dump.not_representable
        self._note("case", case=path, replays=dump.numbers, left_out=left_out, not_representable=not_representable)
        if path not in self._cases:
            self._cases.append(path)
        return path

    def _write_news(self) -> None:
        """Write the lines of what the hot path has only noted."""
        while self._reasons.new:
            replay, reason = self._reasons.new.popleft()
            self._note("could not run", replay=replay, reason=reason)
        while self._new_moves:
            replay, raw, bucket, name, change = self._new_moves.popleft()
            sentence = (
                f"buffer replaced: {name} of bucket {bucket}: {change} since it was prepared; a graph that captured "
                "the old one still reads it (contract 1)"
            )
            self._note("buffer replaced", replay=replay, raw_batch=raw, bucket=bucket, field=name, sentence=sentence)

    def _note(self, kind: str, **facts: object) -> None:
        """Write a line of this rank."""
        self._log.write({"kind": kind, "rank": self._setup.rank, **facts})

    def _end(self) -> None:
        try:
            if self._device is not None:
                self._device.stream.synchronise()
            # Twice: what the last poll had asked for, and what came after it; each may lead to evidence.
            for _ in range(2):
                self._ask()
                self._collect(wait=True)
                self._collect(wait=True)
            for check in self._opened:
                check.counters.ask()
                check.counters.ready(wait=True)
        except RuntimeError as error:
            self._reasons.add(self._replays, f"the results could not be collected: {_reason(error)}")
        self._summary = self._summarised()
        self._write_news()
        self._log.write({"kind": "summary", **self._summary.to_dict()}, always=True)
        _log.log(logging.INFO if self._summary.clean else logging.ERROR, "%s", self._summary.text())

    def _summarised(self) -> Summary:
        batches: Counter[tuple[int, int]] = Counter()
        words: Counter[str] = Counter()
        mismatches = 0
        for check in self._opened:
            times, wrong = check.counters.host["by_raw"].tolist()
            batches.update({(raw, check.bucket): count for raw, count in enumerate(times) if count})
            mismatches += sum(wrong)
            words.update({region.name: count for region, count in check.tally().differing.items()})
        checked = sum(batches.values())
        if self._launched > checked:
            self._reasons.add(self._replays, "it was launched and not seen to end", self._launched - checked)
        setup = self._setup
        known = setup.system.layout(setup.geometry, max(self._checks, default=1))
        names = tuple(field.name for field in known if setup.fields is None or field.name in setup.fields)
        return Summary(
            system=setup.system.name,
            rank=setup.rank,
            reference=setup.reference_name,
            replays=self._replays,
            checked=checked,
            mismatches=mismatches,
            address_changes=dict(self._moved),
            could_not_run=dict(self._reasons.counts),
            batches=dict(sorted(batches.items())),
            differing_words=dict(words),
            compared=names,
            not_compared=tuple(field.name for field in known if field.name not in names),
            cases=tuple(self._cases),
            lines_left_out=self._log.left_out,
        )


def _capturing() -> str | None:
    """Say why nothing may be prepared now, before it is known on which device; None if it may."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "the server was capturing a graph on this stream; put the hook where it replays"
    return None


def _reason(error: Exception) -> str:
    """Return one short line."""
    lines = str(error).splitlines() or [""]
    known = isinstance(error, UsageError) or type(error).__name__ == "ReferenceFailed"
    text = lines[0] if known else f"{type(error).__name__}: {lines[0]}"
    return text if len(text) <= 240 else text[:237] + "..."
