"""Pool: trials of many mutants, several at a time, each in a process forked for it."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Final

from tests.mutants import trial
from tests.mutants.catalogue import Mutant
from tests.mutants.reach import Door
from tests.mutants.trial import KILLED, NO_MEMORY, Verdict

# Without a beat for so long a trial hangs: many times what a configuration takes to open, on a busy machine, too.
SILENCE_S: Final = {"cpu": 180.0, "cuda": 120.0}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A mutant, or None for the code as it is, and the doors it is shown to."""

    mutant: Mutant | None
    doors: tuple[Door, ...]

    @property
    def name(self) -> str:
        return self.mutant.name if self.mutant is not None else f"no mutant, {', '.join(map(str, self.doors))}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    task: Task
    verdict: Verdict
    wall_s: float


@dataclasses.dataclass(slots=True, kw_only=True)
class _Running:
    task: Task
    process: BaseProcess
    started: float
    heard: float


def run(
    tasks: Iterable[Task], device: str, jobs: int, *, quick: int | None = None, silence_s: float | None = None
) -> Iterator[Result]:
    """The results of `tasks`, as they come. What lacked memory beside others is tried again alone, at the end.

    `quick`: as in trial.run. `silence_s`: instead of SILENCE_S.
    """
    lacking, silence_s = [], silence_s or SILENCE_S[device]
    for result in _run(tasks, device, jobs, quick, silence_s):
        if result.verdict.outcome == NO_MEMORY and jobs > 1:
            lacking.append(result.task)
        else:
            yield _with_memory(result)
    for result in _run(lacking, device, 1, quick, silence_s):
        yield _with_memory(result)


def _with_memory(result: Result) -> Result:
    """Alone on a device, a lack of memory is the mutant's doing."""
    if result.verdict.outcome != NO_MEMORY:
        return result
    return dataclasses.replace(result, verdict=dataclasses.replace(result.verdict, outcome=KILLED))


def _run(tasks: Iterable[Task], device: str, jobs: int, quick: int | None, silence_s: float) -> Iterator[Result]:
    trial.prepare(device)
    left, running = iter(tasks), dict[Connection, _Running]()
    try:
        while True:
            while len(running) < jobs and (task := next(left, None)) is not None:
                receive, each = _start(task, device, quick)
                running[receive] = each
            if not running:
                return
            ready = wait(list(running), timeout=1.0)
            for receive in list(running):
                each = running[receive]
                verdict = _heard(receive, each) if receive in ready else _silent(each, silence_s)
                if verdict is not None:
                    del running[receive]
                    receive.close()
                    each.process.join()
                    yield Result(task=each.task, verdict=verdict, wall_s=time.monotonic() - each.started)
    finally:
        for each in running.values():
            each.process.kill()
            each.process.join()


def _start(task: Task, device: str, quick: int | None) -> tuple[Connection, _Running]:
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    body: Callable[..., None] = trial.run
    process = context.Process(target=body, args=(task.mutant, task.doors, device, quick, send), daemon=True)
    process.start()
    send.close()
    now = time.monotonic()
    return receive, _Running(task=task, process=process, started=now, heard=now)


def _heard(receive: Connection, each: _Running) -> Verdict | None:
    """The verdict, if what there is to read is one or the end of the process."""
    each.heard = time.monotonic()
    try:
        said: Verdict | None = receive.recv()
    except EOFError:
        each.process.join()
        return Verdict(outcome=KILLED, by="crash", how=f"the process died, exit code {each.process.exitcode}")
    return said


def _silent(each: _Running, silence_s: float) -> Verdict | None:
    if time.monotonic() - each.heard < silence_s:
        return None
    each.process.kill()
    return Verdict(outcome=KILLED, by="hang", how=f"nothing heard for {silence_s:.0f} s")
