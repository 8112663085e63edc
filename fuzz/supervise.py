"""Supervise: runs one shard in a process of its own, keeps time, and says what a dead one died of.

A blocked CUDA call answers no signal, and a sticky error makes a process lie, so whoever judges is another process:
this one, which never touches a device. A dead process is believed only as to what it had judged before the chunk it
died in. That chunk, from the journal, is replayed in fresh processes; if it ends them as well, it is a finding. A
SIGKILL that does not come back was somebody else's, and the shard is done once more.

`supervise` is what an executor is given. It runs on the machine of the device, in a thread of any process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dsa_verify.errors import (
    STATUS_DEVICE_LOST,
    STATUS_EQUAL,
    STATUS_USAGE,
    HarnessError,
    UsageError,
)
from dsa_verify.scenario import Scenario, read_case
from fuzz.plan import ShardSpec
from fuzz.shard import LOCK_FILE, RESULT_FILE, SPEC_FILE, STATUS_NO_ROOM, STATUS_OUT_OF_MEMORY, ShardResult
from fuzz.shard_folder import (
    JOURNAL_FILE,
    PROGRESS_FILE,
    REPEAT_FOLDER,
    STOP_FILE,
    FindingKey,
    FindingRecord,
    FolderInUse,
    attempts_in,
    campaign_root,
    held,
    holder,
    read_progress,
    write_json,
    write_whole,
)

LOG_FILE: Final = "log.txt"
POLL_S: Final = 0.05
TIMEOUT_S: Final = 300.0
STOP_GRACE_S: Final = 30.0
KILL_WAIT_S: Final = 60.0
MOST_ATTEMPTS: Final = 6
# Of a case that ended a process. A hang costs its whole timeout each time.
REPEATS: Final = {"crashes": 3, "device lost": 3, "hangs": 1}
_LOCK_WAIT_S: Final = 10.0


class NoRoom(HarnessError):
    """A shard could not write: what it had written is whole, and resuming goes on from there."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How a process ended. `status`: its exit status, negative for a signal. `hung`: it was killed for silence;
    `stopped`: because the campaign is over."""

    status: int
    wall_s: float
    hung: bool = False
    stopped: bool = False

    @property
    def death(self) -> str | None:
        """What kind of death it was; None if the process ended by itself and in order."""
        if self.stopped:
            return None
        if self.hung:
            return "hangs"
        if self.status == STATUS_DEVICE_LOST:
            return "device lost"
        return "crashes" if self.status < 0 else None

    @property
    def killed(self) -> bool:
        """By SIGKILL, and not by its supervisor."""
        return self.status == -signal.SIGKILL and not self.hung and not self.stopped

    @property
    def words(self) -> str:
        if self.hung:
            return "gave no sign of life and was killed"
        if self.status == STATUS_DEVICE_LOST:
            return "lost its device"
        return f"died of {signal.Signals(-self.status).name}" if self.status < 0 else f"ended with status {self.status}"


def supervise(
    spec: ShardSpec, folder: Path, timeout_s: float = TIMEOUT_S, environment: Mapping[str, str] | None = None
) -> ShardResult:
    """Run `spec` in `folder` to an end, through as many processes as it takes; a shard that has a final result has it.

    `timeout_s`: silence after which a process is killed. `environment`: for the processes, over this one's. UsageError
    if the shard cannot be run as it is said; NoRoom. A failure of the harness is a result.
    """
    _end_leftover(folder)
    done = ShardResult.read(folder)
    if done is not None and done.final:
        return done
    _note_interrupted(folder)
    (folder / RESULT_FILE).unlink(missing_ok=True)
    watch = _Watch(folder=folder, timeout_s=timeout_s, environment={**os.environ, **_threads(), **(environment or {})})
    for _ in range(MOST_ATTEMPTS):
        result, spec = _attempt(spec, watch)
        if result is not None:
            return result
    last = attempts_in(folder)[-1]["text"]
    _write_attempt(folder, "given up", f"after {MOST_ATTEMPTS} attempts, the last of which {last}", 0, 0.0)
    return _ended(spec, watch, "given up", executed=0, failed=True)


def _attempt(spec: ShardSpec, watch: _Watch) -> tuple[ShardResult | None, ShardSpec]:
    """One process; (its result, spec), or (None, what to try next)."""
    folder = watch.folder
    write_json(folder / SPEC_FILE, spec.to_dict())
    end = watch.run([str(folder)])
    result = ShardResult.read(folder) if end.status == STATUS_EQUAL else None
    if result is not None:
        _clear(watch.folder)
        return result, spec
    reason = _reason(folder)
    if end.stopped:
        _note(watch, end, "stopped", "it did not end when the campaign did, and was killed")
        return _ended(spec, watch, "stopped", executed=0, write=False), spec
    if end.status == STATUS_USAGE:
        _clear(folder)
        raise UsageError(reason)
    if end.status == STATUS_NO_ROOM:
        _note(watch, end, "no room", reason)
        raise NoRoom(f"{folder}: {reason}; make room, then resume: what is there is whole")
    if end.status == STATUS_OUT_OF_MEMORY:
        return _without_memory(spec, watch, end, reason)
    if end.death is not None:
        return _explain(spec, watch, end), spec
    _note(watch, end, "harness failed", reason)
    return _ended(spec, watch, f"the harness failed: {reason}", executed=0, failed=True), spec


def _without_memory(spec: ShardSpec, watch: _Watch, end: _End, reason: str) -> tuple[ShardResult | None, ShardSpec]:
    """Half of the batch, once; no finding."""
    case = _journalled(watch.folder)
    path = _keep(watch.folder, case, "out-of-memory") if case is not None else None
    executed = read_progress(watch.folder)["checked"]
    _note(watch, end, "out of memory", f"{reason}; its case is {path}")
    if spec.batch_divisor == 1:
        return None, dataclasses.replace(spec, batch_divisor=2)
    return _ended(spec, watch, "skipped: out of memory, with half of the batch too", executed=executed), spec


# Deaths --------------------------------------------------------------------------------------------------------------


def _explain(spec: ShardSpec, watch: _Watch, end: _End) -> ShardResult | None:
    """Attribute a death to its case by dying of it again; None if it was nobody's, so that the shard is done anew."""
    kind, folder = end.death, watch.folder
    assert kind is not None
    case = _journalled(folder)
    if case is None:
        text = f"{end.words} before it had launched anything ({_reason(folder)}); done anew"
        _note(watch, end, "killed" if end.killed else kind, text)
        return None
    executed = read_progress(folder)["checked"]
    log = _reason(folder)
    path = _keep(folder, case, kind)
    shown, last_round = 0, None
    for _ in range(REPEATS[kind]):
        again = watch.run([str(folder), str(folder / path), spec.plan.device], at=folder / REPEAT_FOLDER)
        if again.stopped:
            _note(watch, end, "stopped", f"the campaign ended while a shard that {end.words} was explained")
            return _ended(spec, watch, "stopped", executed=0, write=False)
        if again.death == kind and (again.status == end.status or kind == "hangs"):
            shown += 1
            last_round = read_progress(folder / REPEAT_FOLDER)["rounds"]
        elif end.killed:
            break
    # Nothing kills itself with SIGKILL by mistake: one that does not come back every time came from outside.
    if end.killed and shown < REPEATS[kind]:
        _note(watch, end, "killed", f"{end.words}, which its case did not do again; done anew")
        return None
    if last_round is not None and last_round < len(case.rounds):
        case = dataclasses.replace(case, rounds=case.rounds[: last_round + 1])
        path = _keep(folder, case, kind)
    where = f"in round {last_round} of its case" if last_round is not None and case.rounds else "in its case"
    sentence = f"{kind}: {case.found}, the process {end.words}; {where} again {shown} of {REPEATS[kind]} times; {log}"
    finding = {
        "system": case.system,
        "subject": case.subject or "",
        "diagnosis": kind,
        "sentence": sentence,
        "field": None,
        "round": last_round,
        "draft_tokens": case.geometry.draft_tokens,
    }
    FindingRecord(
        key=FindingKey.of(finding),
        state="confirmed" if shown == REPEATS[kind] else "flaky",
        finding=finding,
        case=path,
        shown=shown,
        repeats=REPEATS[kind],
        note="not shrunk: each candidate would cost a process",
    ).write(folder)
    _note(watch, end, kind, sentence, executed)
    return _ended(spec, watch, kind, executed=executed)


def _journalled(folder: Path) -> Scenario | None:
    """What was launched last, without the planted fault it may have run with: none of those ends a process."""
    path = folder / JOURNAL_FILE
    return dataclasses.replace(read_case(path), fault=None) if path.exists() else None


def _keep(folder: Path, case: Scenario, kind: str) -> str:
    """Write the case beside those of other findings; its path in the folder."""
    text = dataclasses.replace(case, found=f"{kind} {case.found or ''}".strip()).to_json()
    stem = f"{case.system}-{kind.replace(' ', '-')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    write_whole(folder / "cases" / f"{stem}.json", text)
    return f"cases/{stem}.json"


# What is written down ------------------------------------------------------------------------------------------------


def _note(watch: _Watch, end: _End, ended: str, text: str, executed: int = 0) -> None:
    """That an attempt ended without a result of its own, and the rounds of its work that are lost."""
    rounds = read_progress(watch.folder)["rounds"]
    _write_attempt(watch.folder, ended, text, max(rounds - executed, 0), end.wall_s)
    _clear(watch.folder)


def _note_interrupted(folder: Path) -> None:
    """What an earlier supervisor, which is gone, did not come to write down."""
    if (folder / PROGRESS_FILE).exists():
        text = "the supervisor ended before the shard did; done anew"
        _write_attempt(folder, "interrupted", text, read_progress(folder)["rounds"], 0.0)
    _clear(folder)


def _write_attempt(folder: Path, ended: str, text: str, rounds_lost: int, wall_s: float) -> None:
    number = len(attempts_in(folder))
    attempt = {"attempt": number, "ended": ended, "text": text, "rounds_lost": rounds_lost, "wall_s": round(wall_s, 3)}
    write_json(folder / "attempts" / f"{number:04d}.json", attempt)


def _ended(
    spec: ShardSpec, watch: _Watch, ended: str, *, executed: int, failed: bool = False, write: bool = True
) -> ShardResult:
    """The result of a shard whose process left none. One that failed leaves none either, so that resuming redoes it."""
    result = ShardResult(
        number=spec.number,
        system=spec.system,
        configuration="",
        ended=ended,
        requested=spec.plan.rounds_a_shard,
        executed=executed,
        wall_s=round(watch.wall_s, 3),
        failed=failed,
    )
    if write and not failed:
        result.write(watch.folder)
    return result


def _reason(folder: Path) -> str:
    """What the process said last."""
    path = folder / LOG_FILE
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    said = [line.removeprefix("dsa-verify: ") for line in lines if line.startswith("dsa-verify: ")]
    return (said or [line.strip() for line in lines if line.strip()] or ["it said nothing"])[-1]


# The process ---------------------------------------------------------------------------------------------------------


class _Watch:
    """Starts processes for one shard and keeps time."""

    def __init__(self, *, folder: Path, timeout_s: float, environment: Mapping[str, str]) -> None:
        self.folder, self.wall_s = folder, 0.0
        self._timeout_s, self._environment = timeout_s, environment
        self._stop = campaign_root(folder) / STOP_FILE

    def run(self, arguments: list[str], at: Path | None = None) -> _End:
        """A fresh interpreter, not a fork: of a process that has touched a device no copy is of any use. `at`: where it
        writes its journal and progress, if not in the shard's folder."""
        start = time.monotonic()
        _clear(at or self.folder)
        with (self.folder / LOG_FILE).open("w", encoding="utf-8") as log:
            # The process ends when its standard input does, that is, with whoever holds the other end.
            process = subprocess.Popen(
                [sys.executable, "-m", "fuzz.shard", *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environment},
                start_new_session=True,
            )
            try:
                hung, stopped = self._wait(process, at or self.folder)
            finally:
                _kill(process)
        wall_s = time.monotonic() - start
        self.wall_s += wall_s
        return _End(status=process.returncode, wall_s=wall_s, hung=hung, stopped=stopped)

    def _wait(self, process: subprocess.Popen[bytes], at: Path) -> tuple[bool, bool]:
        """Until it ends; (killed for silence, killed because the campaign is over)."""
        sign, seen = _sign(at), time.monotonic()
        stopping: float | None = None
        while True:
            try:
                process.wait(POLL_S)
                return False, False
            except subprocess.TimeoutExpired:
                pass
            now = time.monotonic()
            if _sign(at) != sign:
                sign, seen = _sign(at), now
            elif now - seen > self._timeout_s:
                return True, False
            if stopping is None and self._stop.exists():
                stopping = now
            if stopping is not None and now - stopping > STOP_GRACE_S:
                return False, True


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    try:
        process.wait(KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        raise HarnessError(
            f"process {process.pid} cannot be killed within {KILL_WAIT_S:g} s, so its driver holds it; reset its device"
        ) from None
    assert process.stdin is not None
    process.stdin.close()


def _sign(at: Path) -> tuple[int, ...]:
    """What changes while a process lives: when its files were written, whatever the clock that says so."""
    found = []
    for name in (JOURNAL_FILE, PROGRESS_FILE):
        try:
            found.append((at / name).stat().st_mtime_ns)
        except FileNotFoundError:
            found.append(0)
    return tuple(found)


def _clear(at: Path) -> None:
    """Remove what is there only while a process runs in `at`."""
    at.mkdir(parents=True, exist_ok=True)
    for path in (at / JOURNAL_FILE, at / PROGRESS_FILE, *(at / "cases").glob("running-*.json")):
        path.unlink(missing_ok=True)


def _end_leftover(folder: Path) -> None:
    """End the process that an earlier supervisor left at work here: two of them would write the same files."""
    lock = folder / LOCK_FILE
    patience = time.monotonic() + _LOCK_WAIT_S
    while lock.exists():
        try:
            with held(lock):
                return
        except FolderInUse:
            if time.monotonic() > patience:
                raise
            pid = holder(lock)
            if pid is not None and _is_shard(pid):
                os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)


def _is_shard(pid: int) -> bool:
    """Whether a process of this machine is a shard: with a shared folder, the holder may be on another one."""
    try:
        return b"fuzz.shard" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


# One device for each thread of a local pool --------------------------------------------------------------------------

slot = threading.local()


def supervise_in_slot(spec: ShardSpec, folder: Path, timeout_s: float = TIMEOUT_S) -> ShardResult:
    """`supervise` on the device of this thread, if it was given one; else on what this process may use."""
    return supervise(spec, folder, timeout_s, getattr(slot, "environment", None))


def _threads() -> dict[str, str]:
    """A process for each core leaves no core to a second thread."""
    return {"OMP_NUM_THREADS": "1"} if "OMP_NUM_THREADS" not in os.environ else {}
