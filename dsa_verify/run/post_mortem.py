"""Post mortem: what is said of a process that ended without a verdict, or let a copy of itself come back.

Only what the evidence proves: how the process ended, in which stage, bucket and round, and that no verdict arrived. A
signal that people and the kernel send (SIGKILL, SIGTERM) says nothing about the subject. Neither does an end outside
the stages of the subject.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dsa_verify.base.errors import STATUS_HARNESS, STATUS_MISMATCH, STATUS_USAGE
from dsa_verify.contract import progress
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.round import Round, Scenario
from dsa_verify.rounds.case_file import parse_case
from dsa_verify.run.delivered import End
from dsa_verify.systems.catalogue import get_system
from dsa_verify.systems.trust import code_options

# What a process does to itself; others are sent to it, or may be.
_OWN_SIGNALS: Final = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)
SHOWN_FRAMES: Final = 8
_FRAME: Final = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
# Where the harness calls the subject: what is above it in a stack is the subject's doing.
_CALLERS: Final = frozenset({"_replay_subject", "_other_work", "_open_subject", "_check_pointers"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An end comes to an exit status, a sentence, what the subject was doing (innermost call first), and a case.

    The case ends with the round that ran; it is None if nothing was open. `diagnosis` is None if it is not a finding.
    """

    status: int
    sentence: str
    diagnosis: Diagnosis | None = None
    stack: tuple[str, ...] = ()
    scenario: Scenario | None = None
    options: tuple[str, ...] = ()
    bucket: int | None = None
    round: int | None = None

    def finding(self) -> Finding | None:
        """Return the finding without its case; None if it is not a finding, or nobody's."""
        if self.diagnosis is None or self.scenario is None:
            return None
        return Finding(
            system=get_system(self.scenario.system).name,
            subject=self.scenario.subject or "",
            diagnosis=self.diagnosis,
            sentence=self.sentence,
            bucket=self.bucket,
            round=self.round,
            draft_tokens=self.scenario.geometry.draft_tokens,
        )

    def lines(self) -> list[str]:
        """Return the lines that say what the subject was doing."""
        more = [f"and {len(self.stack) - SHOWN_FRAMES} more"] if len(self.stack) > SHOWN_FRAMES else []
        return [f"in {call}" for call in self.stack[:SHOWN_FRAMES]] + more

    @property
    def stem(self) -> str:
        """Return the text that the name of the case file begins with."""
        assert self.scenario is not None
        kind = "no-verdict" if self.diagnosis is None else self.diagnosis.value
        return f"{get_system(self.scenario.system).name}-{kind}"

    def command(self, path: Path) -> str:
        """Return the command that replays the case at `path`."""
        code = code_options(self.scenario.system, self.scenario.subject) if self.scenario is not None else []
        return shlex.join(["dsa-verify", "replay", str(path), *code, *self.options])


def tell(end: End) -> Told | None:
    """Return what there is to say of `end`; None if its verdict arrived and nothing is to be added to it."""
    slots = end.progress.slots
    if slots[progress.COPIES]:
        stage, bucket, round_ = (
            slots[slot] for slot in (progress.COPY_STAGE, progress.COPY_BUCKET, progress.COPY_ROUND)
        )
        sentence = f"forks: bucket {bucket}: {progress.copy_sentence(stage, round_)}"
        return _told(end, STATUS_MISMATCH, sentence, Diagnosis.FORKS, bucket, round_)
    if end.verdict is not None:
        return None
    stage, bucket, round_ = (slots[slot] for slot in (progress.STAGE, progress.BUCKET, progress.ROUND))
    where, how = progress.where(stage, round_), _how(end.code)
    if end.silent_s:
        return _tell_silence(end, stage, bucket, round_)
    by_itself = end.code >= 0 or -end.code in _OWN_SIGNALS
    if by_itself and stage in progress.OF_THE_SUBJECT:
        stack = _subject_stack(end.stack)
        sentence = f"crashes: bucket {bucket}: {how} {where}; no verdict arrived"
        return _told(end, STATUS_MISMATCH, sentence, Diagnosis.CRASHES, bucket, round_, stack)
    if by_itself and stage == progress.IMPORT:
        sentence = f"{how} while the module of the subject was imported, and a module that is imported must not exit"
        return _told(end, STATUS_USAGE, sentence)
    return _told(end, STATUS_HARNESS, f"no verdict arrived: {how} {where}", stack=_subject_stack(end.stack))


def _tell_silence(end: End, stage: int, bucket: int, round_: int) -> Told:
    stack = _subject_stack(end.stack)
    at = f" ({stack[0]})" if stack else ""
    silence = f"no progress for {end.silent_s:g} s {progress.where(stage, round_)}{at}"
    if stage in progress.OF_THE_SUBJECT:
        sentence = f"hangs: bucket {bucket}: {silence}; the process was killed"
        return _told(end, STATUS_MISMATCH, sentence, Diagnosis.HANGS, bucket, round_, stack)
    sentence = f"{silence}; the process was killed, no verdict"
    return _told(end, STATUS_USAGE if stage == progress.IMPORT else STATUS_HARNESS, sentence, stack=stack)


def _told(
    end: End,
    status: int,
    sentence: str,
    diagnosis: Diagnosis | None = None,
    bucket: int | None = None,
    round_: int | None = None,
    stack: Sequence[str] = (),
) -> Told:
    scenario, options = None, list[str]()
    if (opened := end.progress.opened) is not None:
        case, options = opened
        # The process that ended has imported a system of a user's own already.
        scenario = parse_case(case, trusts=lambda name: True)
        scenario = dataclasses.replace(scenario, rounds=tuple(rounds_run(end.progress, scenario)), found=sentence)
    return Told(
        status=status,
        sentence=sentence,
        diagnosis=diagnosis,
        stack=tuple(stack),
        scenario=scenario,
        options=tuple(options),
        bucket=bucket,
        round=None if round_ is None or round_ < 0 else round_,
    )


def rounds_run(record: progress.SharedProgress, head: Scenario) -> list[Round]:
    """Return the rounds that are still known, up to and with the one that ran; the first one if it came to none."""
    from dsa_verify.contract.round_table import complete_table  # numpy, which an end with a verdict does not need

    system = get_system(head.system)
    chunks = record.chunks([spec.name for spec in system.drawn(head.geometry)])
    tables = [complete_table(system, head.geometry, **columns) for columns in chunks]
    rounds = [round_ for table in tables for round_ in table.rounds()]
    ran = record.slots[progress.ROUND] - record.slots[progress.CHUNK_START] + 1
    rest = len(tables[-1]) - max(ran, 1) if tables else 0
    return rounds[: len(rounds) - rest]


def _how(code: int) -> str:
    if code >= 0:
        return f"the process ended itself with exit status {code}, as os._exit does,"
    name = _signal_name(-code)
    if -code in _OWN_SIGNALS:
        return f"the process was ended by {name}"
    lack = ", or by the kernel for want of memory" if -code == signal.SIGKILL else ""
    return f"the process was killed by signal {-code} ({name}), by somebody{lack},"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _subject_stack(text: str) -> list[str]:
    """`name, file:line` of the calls that the subject was in, innermost first; of the last dump in `text`."""
    for thread in reversed(re.split(r"\n\s*\n", text)):
        calls: list[Any] = list(_FRAME.finditer(thread))
        names = [call["name"] for call in calls]
        own = next((i for i, name in enumerate(names) if name in _CALLERS), None)
        if own is not None:
            return [f"{call['name']}, {call['file']}:{call['line']}" for call in calls[:own]]
    return []
