"""Part: one of guard, overlay and capture in one process of a server; and Report, where all of them say what they have.

A part is called from inside the server. What it raises ends itself and not the server: it is said once, and the part
does nothing from then on. With DSA_VERIFY_STRICT=1 the server is to end, and the error goes through.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from dsa_verify.attach.settings import Settings
from dsa_verify.base.errors import DsaVerifyError
from dsa_verify.base.exit_status import in_a_line
from dsa_verify.overlay.summary import LineLog

MAX_SAID: Final = 20  # findings of one part on standard error; the file has more
MAX_CALL_S: Final = 60.0  # a call that takes longer is the last one


class Finding(DsaVerifyError):
    """A part has found something, and DSA_VERIFY_STRICT=1 asks for the end of the server."""


class Report:
    """Lines of this process on standard error, each with its rank, and the start line before all others."""

    def __init__(self, settings: Settings, start_line: Callable[[int], str]):
        self.settings = settings
        self._start_line, self._begun = start_line, False
        self._rank: int | None = None

    @property
    def rank(self) -> int:
        """The rank of this process; 0 where nothing is distributed. It is looked up once, when it is first needed."""
        if self._rank is None:
            spread = torch.distributed.is_available() and torch.distributed.is_initialized()
            self._rank = torch.distributed.get_rank() if spread else 0
        return self._rank

    def begin(self) -> None:
        """Say the start line, if nobody has yet."""
        if not self._begun:
            self._begun = True
            self._print(self._start_line(self.rank))

    def say(self, text: str) -> None:
        """Say one line; whatever it says."""
        self.begin()
        self._print(f"dsa-verify, rank {self.rank}: {text}")

    @staticmethod
    def _print(text: str) -> None:
        try:
            print(text, file=sys.stderr, flush=True)
        except (OSError, ValueError):  # nobody reads it any more
            return


class Part:
    """`name`: of PARTS. `enabled`: whether it still does anything."""

    def __init__(self, name: str, report: Report):
        self.name, self.report, self.enabled = name, report, True
        self._said, self._finding = 0, ""

    def call(self, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call `function`, unless this part is detached.

        With DSA_VERIFY_STRICT=1 it raises what `function` raises, and Finding for what was found; else nothing.
        """
        if not self.enabled:
            return
        began = time.perf_counter()
        try:
            function(*args, **kwargs)
        except Exception as error:
            self.detach(in_a_line(error))
            if self.report.settings.strict:
                raise
        if time.perf_counter() - began > MAX_CALL_S:
            self.detach(f"a call took more than {MAX_CALL_S:.0f} s")
        if self._finding and self.report.settings.strict:
            raise Finding(f"{self.name}: {self._finding}")

    def detach(self, why: str) -> None:
        """Do nothing from now on, and say why, once."""
        if self.enabled:
            self.enabled = False
            try:
                self.report.say(f"{self.name} is detached, the server goes on without it: {why}")
            except Exception:  # the server must not end of what was to be said about us
                return

    def found(self, sentence: str) -> None:
        """Say what was found; of the first MAX_SAID each, then no more."""
        self._finding = self._finding or sentence
        self._said += 1
        if self._said <= MAX_SAID:
            self.report.say(f"{self.name}: {sentence}")
        if self._said == MAX_SAID:
            self.report.say(f"{self.name}: no more is said here; see {self.report.settings.folder}")

    def log(self) -> LineLog:
        """Return a file of this part and rank for lines of JSON, which is bounded."""
        return LineLog(self.report.settings.folder / f"{self.name}-rank{self.report.rank}.jsonl")


def is_capturing() -> bool:
    """Return whether what is launched now would become part of a graph of the server."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
