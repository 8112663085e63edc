"""Guard: a session whose process a subject ends is not green. pytest goes on in a child, which hands its status back.

The fork comes before conftests are loaded, so before torch, and before pytest captures output: terminal, --pdb, -s and
Ctrl-C are the child's as they were this process's. A session in which nothing is verified ends as it would without a
guard, whatever ends it. Workers of pytest-xdist need none: their controller fails the test that a worker died in.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NoReturn

import pytest

from dsa_verify.contract import progress
from dsa_verify.run.delivered import LINGER_S, End, can_supervise, left_threads, supervise

SESSION: Final = pytest.StashKey[pytest.Session]()
_guarded: pytest.Config | None = None


def guard(config: pytest.Config) -> None:
    """Go on in a child, for which this process only waits; or here, where it is not pytest's own or runs no tests."""
    global _guarded
    options = config.known_args_namespace
    if not _is_program() or options.dsa_no_guard or _runs_no_tests(config) or not can_supervise():
        return
    attended = options.usepdb or options.trace
    end = supervise(
        0.0 if attended else options.dsa_timeout,
        lambda record: LINGER_S if record.slots[progress.JUDGED] and record.last_threads else None,
        stack_on_signals=False,
    )
    if end is None:
        _guarded = config
        return
    try:
        _end(end, options.dsa_findings)
    except Exception:  # nothing may go on with the session in this process, too
        traceback.print_exc()
        os._exit(pytest.ExitCode.INTERNAL_ERROR)


def begin_to_verify() -> None:
    """Note that this session owes a verdict from here on."""
    progress.current().slots[progress.JUDGED] = 1


def hand_over(config: pytest.Config) -> None:
    """Hand over as the last step of a session: its exit status, and the threads that will keep the process."""
    record = progress.current()
    session = config.stash.get(SESSION, None)
    if config is _guarded and session is not None and isinstance(record, progress.SharedProgress):
        record.threads(left_threads())
        record.deliver(int(session.exitstatus))


def _is_program() -> bool:
    """Return whether this is the first session of a process that is pytest itself."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    named = spec.name == "pytest.__main__" if spec is not None else Path(file or "").stem in ("pytest", "py.test")
    # Marked there, as sessions within a session (pytester) import this module anew.
    first = not hasattr(main, "_dsa_verify_session")
    main._dsa_verify_session = True  # type: ignore[attr-defined]
    return named and first


def _runs_no_tests(config: pytest.Config) -> bool:
    options = config.known_args_namespace
    elsewhere = getattr(options, "numprocesses", None) or getattr(options, "tx", None)
    return bool(elsewhere or options.collectonly or options.help or options.version)


def _end(end: End, folder: Path) -> NoReturn:
    """End this process as its child did, or should have."""
    if end.told is not None and end.code == -end.told:
        _end_by(end.told)
    told = None
    if end.lingered:
        _say(
            f"dsa-verify: {len(end.progress.last_threads)} thread(s) kept the process for {LINGER_S:g} s after the "
            f"session and are ended: {', '.join(end.progress.last_threads)}; its verdict stands"
        )
    elif end.progress.slots[progress.JUDGED]:
        from dsa_verify.run.post_mortem import tell

        told = tell(end)
    if told is not None:
        from dsa_verify.report.ends import save

        _, path, lost = save(told, end.pid, folder)
        lines = [f"dsa-verify: {told.sentence}", *(f"  {line}" for line in (*told.lines(), *lost))]
        lines += [f"  case:      {path}"] if path else []
        lines += [f"  reproduce: {end.progress.last_test}"] if end.progress.last_test else []
        for sentence, reproduce in end.progress.last_results or []:
            lines += [f"dsa-verify: found before: {sentence}", f"  reproduce: {reproduce}"]
        status = told.status if told.diagnosis is not None else pytest.ExitCode.INTERNAL_ERROR
        _say("", *lines, f"dsa-verify: the session did not come to its end; exit status {int(status)}")
        os._exit(status)
    if end.code < 0 and not end.lingered:
        _end_by(-end.code)
    # Whatever the process did after its session, it does not better its status.
    os._exit((0 if end.lingered else end.code) or end.verdict or 0)


def _end_by(number: int) -> None:
    from dsa_verify.report.ends import end_by  # not for the many sessions that just end

    end_by(number)


def _say(*lines: str) -> None:
    for line in lines:
        print(line)
    sys.stdout.flush()


# Workers of pytest-xdist ---------------------------------------------------------------------------------------------


def left_cases(folder: Path) -> Iterable[Path]:
    """Yield the cases in `folder` of processes that ended while they ran them, under names that say so."""
    for path in sorted(folder.glob("running-*.json")):
        pid = path.stem.partition("-")[2]
        try:
            ended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            ended = True
        if ended:
            yield path.rename(folder / f"ended-{pid}.json")
