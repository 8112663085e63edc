"""Supervise: runs one shard in a process of its own, keeps time, and says what a dead one died of.

A blocked CUDA call answers no signal, and a sticky error makes a process lie, so whoever judges is another process:
this one, which never touches a device. A dead process is believed only as to what it had judged before the chunk it
died in. That chunk, from the journal, is replayed in fresh processes; if it ends them as well, it is a finding. A
signal that people send and that does not come back was somebody else's, and the shard is done once more.

`supervise` is what an executor is given. It runs on the machine of the device, in a thread of any process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dsa_verify.base.atomic_write import write_atomically
from dsa_verify.base.errors import (
    STATUS_DEVICE_LOST,
    STATUS_EQUAL,
    STATUS_INTERRUPTED,
    STATUS_NO_ROOM,
    STATUS_OUT_OF_MEMORY,
    STATUS_USAGE,
    HarnessError,
    UsageError,
)
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.round import Scenario
from dsa_verify.rounds.case_file import read_case
from dsa_verify.systems.catalogue import get_system
from fuzz.campaign.locks import FolderInUse, Holder, held, holder, owned, this_host
from fuzz.campaign.plan import PLAN_FILE, Plan, ShardSpec, parse_plan
from fuzz.campaign.shard_folder import (
    JOURNAL_FILE,
    LOCK_FILE,
    OWNER_FILE,
    PROGRESS_FILE,
    REPEAT_FOLDER,
    RESULT_FILE,
    SPEC_FILE,
    STOP_FILE,
    FindingRecord,
    ShardResult,
    attempts_in,
    campaign_root,
    read_json,
    read_progress,
    signs_of_life,
    write_json,
)
from fuzz.campaign.worker_main import STATUS_OFFSET

LOG_FILE: Final = "log.txt"
POLL_S: Final = 0.05
TIMEOUT_S: Final = 300.0
STOP_GRACE_S: Final = 30.0
KILL_WAIT_S: Final = 60.0
MOST_ATTEMPTS: Final = 6
# Of a case that ended a process. A hang costs its whole timeout each time.
REPEATS: Final = {Diagnosis.CRASHES: 3, Diagnosis.DEVICE_LOST: 3, Diagnosis.HANGS: 1}
_LOCK_WAIT_S: Final = 10.0
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


class NoRoom(HarnessError):
    """A shard could not write: what it had written is whole, and resuming goes on from there."""


class FolderUnseen(HarnessError):
    """Whoever is to run a shard does not see the campaign's folder."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """A process ended like this. `status`: its exit status, negative for a signal. `orderly`: it gave that status
    itself. `hung`: it was killed for silence; `stopped`: because the campaign is over."""

    status: int
    wall_s: float
    orderly: bool
    hung: bool = False
    stopped: bool = False

    @classmethod
    def of(cls, returncode: int, wall_s: float, hung: bool, stopped: bool) -> _End:
        orderly = STATUS_OFFSET <= returncode <= STATUS_OFFSET + STATUS_INTERRUPTED
        status = returncode - STATUS_OFFSET if orderly else returncode
        return cls(status=status, wall_s=wall_s, orderly=orderly, hung=hung, stopped=stopped)

    @property
    def death(self) -> Diagnosis | None:
        """Return the kind of death. It is None if the process ended by itself and in order."""
        if self.stopped:
            return None
        if self.hung:
            return Diagnosis.HANGS
        if not self.orderly:
            return Diagnosis.CRASHES
        return Diagnosis.DEVICE_LOST if self.status == STATUS_DEVICE_LOST else None

    @property
    def killed(self) -> bool:
        """Return whether it was killed by a signal that people and machines send, and not by its supervisor."""
        return -self.status in _FROM_OUTSIDE and not self.hung and not self.stopped

    @property
    def words(self) -> str:
        if self.hung:
            return "gave no sign of life and was killed"
        if self.death is Diagnosis.DEVICE_LOST:
            return "lost its device"
        if self.status < 0:
            return f"died of {signal.Signals(-self.status).name}"
        return f"exited with status {self.status} (code under test called exit)"


def supervise(
    spec: ShardSpec, folder: Path, timeout_s: float = TIMEOUT_S, environment: Mapping[str, str] | None = None
) -> ShardResult:
    """Run `spec` in `folder` to an end, through as many processes as it takes; a shard that has a final result has it.

    While another supervisor owns the folder, its end is waited for. `timeout_s`: silence after which a process is
    killed. `environment`: for the processes, over this one's. UsageError if the shard cannot be run as it is said;
    NoRoom; FolderInUse if the folder's owner is silent. A failure of the harness is a result.
    """
    watch = _Watch(folder=folder, timeout_s=timeout_s, environment={**os.environ, **_threads(), **(environment or {})})
    before = holder(folder / OWNER_FILE)
    with owned(folder, patience_s=timeout_s + KILL_WAIT_S, over=watch.stopping) as ours:
        if ours:
            _end_leftover(folder)
            done = ShardResult.read(folder)
            if done is not None and done.final:
                return done
            _note_interrupted(folder, before)
        if not ours or watch.stopping():
            return _ended(spec, watch, "stopped", executed=0, write=False)
        (folder / RESULT_FILE).unlink(missing_ok=True)
        return _attempts(spec, watch)


def _attempts(spec: ShardSpec, watch: _Watch) -> ShardResult:
    """Run processes until one leaves a result. At most MOST_ATTEMPTS are made."""
    folder = watch.folder
    for _ in range(MOST_ATTEMPTS):
        result, spec = _attempt(spec, watch)
        if result is not None:
            return result
    last = attempts_in(folder)[-1]["text"]
    _write_attempt(folder, "given up", f"after {MOST_ATTEMPTS} attempts, the last of which {last}", 0, 0.0)
    return _ended(spec, watch, "given up", executed=0, failed=True)


def give_up(folder: Path, why: str) -> None:
    """Note that the shard of `folder` and its supervisor were lost, to be redone; FolderInUse if one is there."""
    before = holder(folder / OWNER_FILE)
    with held(folder / OWNER_FILE):
        _note_interrupted(folder, before)
        _write_attempt(folder, "given up", why, 0, 0.0)


def _attempt(spec: ShardSpec, watch: _Watch) -> tuple[ShardResult | None, ShardSpec]:
    """Run one process. Return (its result, spec), or (None, the specification to try next)."""
    folder = watch.folder
    write_json(folder / SPEC_FILE, spec.to_dict())
    end = watch.run([str(folder)])
    result = ShardResult.read(folder) if end.orderly and end.status == STATUS_EQUAL else None
    if result is not None:
        _clear(watch.folder)
        return result, spec
    reason = _reason(folder)
    if end.stopped:
        _note(watch, end, "stopped", "it did not end when the campaign did, and was killed")
        return _ended(spec, watch, "stopped", executed=0, write=False), spec
    if end.death is not None and (end.status <= 0 or end.orderly or (folder / JOURNAL_FILE).exists()):
        return _explain(spec, watch, end), spec
    if end.orderly and end.status == STATUS_INTERRUPTED:
        _note(watch, end, "killed", "it was interrupted; the shard is run again")
        return None, spec
    if end.orderly and end.status == STATUS_USAGE:
        _clear(folder)
        raise UsageError(reason)
    if end.orderly and end.status == STATUS_NO_ROOM:
        with contextlib.suppress(OSError):  # for which there may be no room either; what is to be said is said
            _note(watch, end, "no room", reason)
        raise NoRoom(
            f"{folder}: {reason}. Free disk space and run the same command again; files already written are intact."
        )
    if end.orderly and end.status == STATUS_OUT_OF_MEMORY:
        return _without_memory(spec, watch, end, reason)
    _note(watch, end, "harness failed", reason)
    return _ended(spec, watch, f"the harness failed: {reason}", executed=0, failed=True), spec


def _without_memory(spec: ShardSpec, watch: _Watch, end: _End, reason: str) -> tuple[ShardResult | None, ShardSpec]:
    """Try half of the batch, once. A lack of memory is never a finding."""
    case = _journalled(watch.folder, spec.plan.fault)
    path = _keep(watch.folder, case, "out-of-memory") if case is not None else None
    executed = read_progress(watch.folder)["checked"]
    _note(watch, end, "out of memory", f"{reason}; its case is {path}")
    if spec.batch_divisor == 1:
        return None, dataclasses.replace(spec, batch_divisor=2)
    return _ended(spec, watch, "skipped: out of memory, with half of the batch too", executed=executed), spec


# Deaths --------------------------------------------------------------------------------------------------------------


def _explain(spec: ShardSpec, watch: _Watch, end: _End) -> ShardResult | None:
    """Repeat the case of a death to see whether it causes it. None if it does not, and the shard is to run again."""
    kind, folder = end.death, watch.folder
    assert kind is not None
    case = _journalled(folder, spec.plan.fault)
    if case is None:
        text = f"{end.words} before it had launched anything ({_reason(folder)}); the shard is run again"
        _note(watch, end, "killed" if end.killed else kind.value, text)
        return None
    executed = read_progress(folder)["checked"]
    log = _reason(folder)
    path = _keep(folder, case, kind.value)
    finding = Finding(
        system=get_system(case.system).name,
        subject=case.subject or "",
        diagnosis=kind,
        sentence=f"{kind.value}: {case.found}, the process {end.words}; {log}",
        draft_tokens=case.geometry.draft_tokens,
    )
    record = FindingRecord.of(finding, case=path)
    if not end.killed:
        record.write(folder)  # so that it is not lost with a supervisor that ends while it repeats the case
    repeats = _repeat(spec, watch, end, path)
    if repeats.stopped:
        _note(watch, end, "stopped", f"the campaign ended while a shard that {end.words} was explained")
        return _ended(spec, watch, "stopped", executed=0, write=False)
    shown, last_round = repeats.shown, repeats.last_round
    # Nothing sends itself such a signal by mistake: one that does not come back every time came from outside.
    if end.killed and shown < REPEATS[kind]:
        _note(watch, end, "killed", f"{end.words}, which its case did not do again; the shard is run again")
        return None
    if last_round is not None and last_round < len(case.rounds):
        case = dataclasses.replace(case, rounds=case.rounds[: last_round + 1])
        path = _keep(folder, case, kind.value)
    where = f"in round {last_round} of its case" if last_round is not None and case.rounds else "in its case"
    sentence = (
        f"{kind.value}: {case.found}, the process {end.words}; {where} again {shown} of {REPEATS[kind]} times; {log}"
    )
    state, note = "confirmed" if shown == REPEATS[kind] else "flaky", "not shrunk: each candidate would cost a process"
    if repeats.why_not is not None:
        state, note = "found", f"its case could not be repeated: {repeats.why_not}"
    dataclasses.replace(
        FindingRecord.of(dataclasses.replace(finding, sentence=sentence, round=last_round), case=path),
        state=state,
        shown=shown,
        repeats=REPEATS[kind],
        note=note,
    ).write(folder)
    _note(watch, end, kind.value, sentence, executed)
    return _ended(spec, watch, kind.value, executed=executed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Repeats:
    """The repeats of a death gave this. `shown`: how many repeats died as the shard had. `last_round`: the last round
    that one of them had launched. `why_not`: why a repeat came to no end. `stopped`: the campaign ended meanwhile."""

    shown: int
    last_round: int | None
    why_not: str | None
    stopped: bool = False


def _repeat(spec: ShardSpec, watch: _Watch, end: _End, path: str) -> _Repeats:
    """Replay the case at `path` in processes of its own, to see whether each dies as `end` says."""
    kind, folder = end.death, watch.folder
    assert kind is not None
    shown, last_round, why_not = 0, None, None
    for _ in range(REPEATS[kind]):
        again = watch.run([str(folder), str(folder / path), spec.plan.device], at=folder / REPEAT_FOLDER)
        if again.stopped:
            return _Repeats(shown=shown, last_round=last_round, why_not=why_not, stopped=True)
        if again.death is kind and (again.status == end.status or kind is Diagnosis.HANGS):
            shown += 1
            last_round = read_progress(folder / REPEAT_FOLDER)["rounds"]
        elif end.killed:
            break
        elif again.death is None and again.status != STATUS_EQUAL:
            why_not = _reason(folder)
    return _Repeats(shown=shown, last_round=last_round, why_not=why_not)


def _journalled(folder: Path, fault: str | None) -> Scenario | None:
    """Return what was launched last, with the `fault` that the campaign plants, if any, and without the shard's own
    that it may have run with: none of those ends a process."""
    path = folder / JOURNAL_FILE
    return dataclasses.replace(read_case(path), fault=fault) if path.exists() else None


def _keep(folder: Path, case: Scenario, kind: str) -> str:
    """Write the case beside those of other findings; its path in the folder."""
    text = dataclasses.replace(case, found=f"{kind} {case.found or ''}".strip()).to_json()
    stem = f"{get_system(case.system).name}-{kind.replace(' ', '-')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    write_atomically(folder / "cases" / f"{stem}.json", text)
    return f"cases/{stem}.json"


# What is written down ------------------------------------------------------------------------------------------------


def _note(watch: _Watch, end: _End, ended: str, text: str, executed: int = 0) -> None:
    """Note that an attempt ended without a result of its own, and how many rounds are lost with it."""
    rounds = read_progress(watch.folder)["rounds"]
    _write_attempt(watch.folder, ended, text, max(rounds - executed, 0), end.wall_s)
    _clear(watch.folder)


def _note_interrupted(folder: Path, before: Holder | None) -> None:
    """Note what the supervisor that was there `before` could not write down before it ended."""
    if (folder / PROGRESS_FILE).exists():
        text = f"its supervisor ({before or 'unknown'}) ended before the shard did; the shard is run again"
        _write_attempt(folder, "interrupted", text, read_progress(folder)["rounds"], 0.0)
    _clear(folder)


def _write_attempt(folder: Path, ended: str, text: str, rounds_lost: int, wall_s: float) -> None:
    number = len(attempts_in(folder))
    attempt = {"attempt": number, "ended": ended, "text": text, "rounds_lost": rounds_lost, "wall_s": round(wall_s, 3)}
    write_json(folder / "attempts" / f"{number:04d}.json", attempt)


def _ended(
    spec: ShardSpec, watch: _Watch, ended: str, *, executed: int, failed: bool = False, write: bool = True
) -> ShardResult:
    """Return the result of a shard whose process left none, as one that failed does, so that resuming redoes it."""
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
    """Return the last line that the process wrote to its log."""
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

    def stopping(self) -> bool:
        """Return whether the campaign is over."""
        return self._stop.exists()

    def run(self, arguments: list[str], at: Path | None = None) -> _End:
        """Run a fresh interpreter, not a fork: of a process that has touched a device no copy is of any use. `at`:
        where it writes its journal and progress, if not in the shard's folder."""
        start = time.monotonic()
        _clear(at or self.folder)
        with (self.folder / LOG_FILE).open("w", encoding="utf-8") as log:
            # The process ends when its standard input does, that is, with whoever holds the other end.
            process = subprocess.Popen(
                [sys.executable, "-m", "fuzz.campaign.worker_main", *arguments],
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
        return _End.of(process.returncode, wall_s, hung, stopped)

    def _wait(self, process: subprocess.Popen[bytes], at: Path) -> tuple[bool, bool]:
        """Until it ends; (killed for silence, killed because the campaign is over)."""
        signs, seen = signs_of_life(at), time.monotonic()
        stopping: float | None = None
        while True:
            try:
                process.wait(POLL_S)
                return False, False
            except subprocess.TimeoutExpired:
                pass
            now = time.monotonic()
            if signs_of_life(at) != signs:
                signs, seen = signs_of_life(at), now
            elif now - seen > self._timeout_s:
                return True, False
            if stopping is None and self.stopping():
                stopping = now
            if stopping is not None and now - stopping > STOP_GRACE_S:
                return False, True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all that it started: a helper that outlives it keeps its locks, memory and device."""
    kill_group(process.pid)
    try:
        process.wait(KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        raise HarnessError(
            f"process {process.pid} cannot be killed within {KILL_WAIT_S:g} s, so its driver holds it; reset its device"
        ) from None
    assert process.stdin is not None
    process.stdin.close()


def _clear(at: Path) -> None:
    """Remove what is there only while a process runs in `at`, and what one that was killed had half written."""
    at.mkdir(parents=True, exist_ok=True)
    half_written = (*at.glob(".*"), *at.glob("*/.*"))
    for path in (at / JOURNAL_FILE, at / PROGRESS_FILE, *(at / "cases").glob("running-*.json"), *half_written):
        path.unlink(missing_ok=True)


def _end_leftover(folder: Path) -> None:
    """End the process that an earlier owner left at work here: two of them would write the same files."""
    lock = folder / LOCK_FILE
    patience = time.monotonic() + _LOCK_WAIT_S
    while lock.exists():
        try:
            with held(lock):
                return
        except FolderInUse:
            if time.monotonic() > patience:
                raise
            left = holder(lock)
            if left is not None and left.here and runs_in(folder, left.pid):
                kill_group(left.pid)
            time.sleep(POLL_S)


def kill_group(pid: int) -> None:
    """End the shard's process `pid`, which leads a group of its own unless it was started by hand, and its group."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) != pid:
            os.kill(pid, signal.SIGKILL)
            return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def runs_in(folder: Path, pid: int) -> bool:
    """Return whether the process is a shard's in `folder`: its id may be another's by now, or another container's."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"fuzz.campaign.worker_main" in words and os.fsencode(folder) in words


# One device for each thread of a local pool --------------------------------------------------------------------------

slot = threading.local()


def supervise_in_slot(spec: ShardSpec, folder: Path, timeout_s: float = TIMEOUT_S) -> ShardResult:
    """Return `supervise` on the device of this thread, if it was given one; else on what this process may use. What an
    executor is given, so it may run on another machine; FolderUnseen if the campaign's folder is not there."""
    root = campaign_root(folder)
    if not _is_there(spec.plan, root):
        raise FolderUnseen(
            f"{root}: process {os.getpid()} of {this_host()}, which is to run shard {spec.number}, sees no "
            f"campaign of this plan there; it must see that folder under the same path, as on one machine or over NFS"
        )
    return supervise(spec, folder, timeout_s, getattr(slot, "environment", None))


def _is_there(plan: Plan, root: Path) -> bool:
    data = read_json(root / PLAN_FILE)
    return data is not None and parse_plan(data) == parse_plan(json.loads(json.dumps(plan.to_dict())))


def _threads() -> dict[str, str]:
    """A process for each core leaves no core to a second thread."""
    return {"OMP_NUM_THREADS": "1"} if "OMP_NUM_THREADS" not in os.environ else {}
