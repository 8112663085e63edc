"""Ends: what `replay` and `fuzz` print and write, and with which status they end, once their child has ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dsa_verify.run.delivered import LINGER_S, End
from dsa_verify.run.post_mortem import Told, tell


def report(end: End, options: Mapping[str, Any]) -> int:
    """Return the exit status; `options` are those of the command. A signal that told the command to end ends it."""
    if end.verdict is None and end.told is not None and end.code == -end.told:
        end_by(end.told)
    if end.lingered:
        click.echo(f"dsa-verify: the process did not end within {LINGER_S:g} s of its verdict, which stands", err=True)
    told = tell(end)
    if told is not None:
        return _say(told, end, options)
    assert end.verdict is not None
    return end.verdict


def end_by(number: int) -> None:
    """End this process by a signal, as it would have ended without a child."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    with contextlib.suppress(OSError):  # SIGKILL has no other way
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _say(told: Told, end: End, options: Mapping[str, Any]) -> int:
    from dsa_verify.report import document
    from dsa_verify.report.terminal import BAD, Terminal
    from dsa_verify.run.runner import Outcome, RunResult

    runs: list[RunResult] = end.progress.last_results or []
    command, path, lost = save(told, end.pid, options["folder"])
    finding = told.finding()
    with Terminal(0) as terminal:
        if finding is not None:
            finding = dataclasses.replace(finding, case=path, reproduce=command)
            runs = runs or [RunResult(system=finding.system, subject=finding.subject, device="", graph="")]
            runs[-1].findings.append(finding)
            runs[-1].outcomes.append(Outcome(name=finding.diagnosis.value, findings=(finding,), wall_s=0.0))
            terminal.finding(finding)
        else:
            terminal.say(f"dsa-verify: {told.sentence}", BAD)
            if command is not None:
                terminal.say(f"  the rounds up to then: {command}")
        for line in (*told.lines(), *lost):
            terminal.say(f"  {line}")
        terminal.verdict(runs, told.status)
    return document.save(runs, told.status, options["json_path"], options.get("junit_path"))


def save(told: Told, pid: int, folder: Path) -> tuple[str | None, str | None, list[str]]:
    """Write the case of `told`, instead of what process `pid` had written before its last rounds. The command that
    replays it and its path, if there is one; what is said if it could not be saved."""
    if told.scenario is None:
        return None, None, []
    if not told.scenario.rounds:
        return None, None, ["no case: the rounds of one chunk were too many to be kept"]
    from dsa_verify.run.verify import _save

    try:
        path = _save(told.scenario, told.stem, folder)
        (folder / f"running-{pid}.json").unlink(missing_ok=True)
    except OSError as error:
        return None, None, [f"the case could not be saved: {error}"]
    return (None, None, []) if path is None else (told.command(path), str(path), [])
