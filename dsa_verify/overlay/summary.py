"""Summary: what an overlay did, and the log of JSON lines that it ends.

A summary never calls equal what was not checked: checks that could not run are counted by reason beside those that
did, and no check at all is a verdict of its own.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from dsa_verify.base.errors import STATUS_EQUAL, STATUS_MISMATCH, STATUS_NOTHING_VERIFIED

MAX_LINES: Final = 10_000
MAX_REASONS: Final = 32
OTHER_REASONS: Final = "other reasons"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`replays`: calls of the hook while it was enabled. `checked`: checks whose end the device has reported.
    `mismatches`: those of them in which anything differed. `address_changes`: outputs that a replay found elsewhere
    than where they were, by field. `could_not_run`: checks that did not take place, by reason. `batches`: checks by
    (raw batch, bucket). `differing_words`: by field or input, over all checks. `compared`, `not_compared`: fields.
    `cases`: files that replay the rounds before a difference. `lines_left_out`: what the log had no room for."""

    system: str
    rank: int
    reference: str
    replays: int
    checked: int
    mismatches: int
    address_changes: Mapping[str, int]
    could_not_run: Mapping[str, int]
    batches: Mapping[tuple[int, int], int]
    differing_words: Mapping[str, int]
    compared: tuple[str, ...]
    not_compared: tuple[str, ...]
    cases: tuple[str, ...] = ()
    lines_left_out: int = 0

    @property
    def clean(self) -> bool:
        """Return True if there was a check, every check that was due took place, and none found anything."""
        return bool(self.checked) and not (self.mismatches or self.address_changes or self.could_not_run)

    @property
    def status(self) -> int:
        """Return the exit status that this has earned: that of a mismatch, of nothing verified, or 0."""
        if self.mismatches or self.address_changes:
            return STATUS_MISMATCH
        return STATUS_EQUAL if self.checked else STATUS_NOTHING_VERIFIED

    @property
    def verdict(self) -> str:
        """Return the verdict in a few words; "all equal" only if `clean`."""
        if self.mismatches or self.address_changes:
            return f"{self.mismatches} mismatches"
        if not self.checked:
            return "NOTHING WAS CHECKED"
        return "INCOMPLETE" if self.could_not_run else "all equal"

    def text(self) -> str:
        """Return a few lines for a log."""
        lines = [
            f"overlay of {self.system}, rank {self.rank}: {self.verdict}: {self.checked} checked of {self.replays} "
            f"replays, {self.mismatches} mismatches"
        ]
        if self.batches:
            lines.append(f"  batches (raw of bucket: checks): {_batches_text(self.batches)}")
        if self.differing_words:
            lines.append("  differing words: " + ", ".join(f"{name} {n}" for name, n in self.differing_words.items()))
        if self.address_changes:
            lines.append("  moved: " + ", ".join(f"{name} {n} times" for name, n in self.address_changes.items()))
        lines += [f"  COULD NOT RUN {count} times: {reason}" for reason, count in self.could_not_run.items()]
        if self.not_compared:
            lines.append(f"  not compared: {', '.join(self.not_compared)}")
        lines += [f"  case: {case}" for case in self.cases]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary for JSON; `batches` becomes a list of {"raw_batch", "bucket", "checks"}."""
        batches = [
            {"raw_batch": raw, "bucket": bucket, "checks": checks} for (raw, bucket), checks in self.batches.items()
        ]
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**values, "batches": batches, "clean": self.clean, "verdict": self.verdict, "status": self.status}


def _batches_text(batches: Mapping[tuple[int, int], int]) -> str:
    buckets = sorted({bucket for _, bucket in batches}, reverse=True)
    return "; ".join(
        f"bucket {bucket}: " + ", ".join(f"{raw}: {n}" for (raw, of), n in sorted(batches.items()) if of == bucket)
        for bucket in buckets
    )


class Reasons:
    """Reasons why checks could not run: at most MAX_REASONS texts, and how often each occurred."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.new: deque[tuple[int, str]] = deque()  # those not told yet

    def add(self, replay: int, reason: str, count: int = 1) -> None:
        if reason not in self.counts and len(self.counts) >= MAX_REASONS:
            reason = OTHER_REASONS
        if reason not in self.counts:
            self.new.append((replay, reason))
        self.counts[reason] += count


class LineLog:
    """Appends JSON objects to a file, a line each, MAX_LINES of them at most; `always` counts for nothing. `on_line` is
    told of each object that was written."""

    def __init__(self, path: Path, on_line: Callable[[Mapping[str, Any]], None] | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.left_out = path, 0
        self._lines, self._on_line = 0, on_line

    def write(self, line: Mapping[str, Any], *, always: bool = False) -> None:
        if not always and self._lines >= MAX_LINES:
            self.left_out += 1
            return
        self._lines += 1
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._on_line is not None:
            self._on_line(line)
