"""Options that `replay` and `fuzz` share, as parsed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dsa_verify.waivers.waivers import Ledger, choose_ledger


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of both commands; `settings` are KEY=VALUE texts."""

    systems: tuple[str, ...]
    preset: str | None
    subject: str | None
    fault: str | None
    rounds: int | None
    seed: int
    batches: tuple[int, ...]
    drafts: tuple[int, ...]
    settings: tuple[str, ...]
    keep_going: bool
    json_path: Path | None
    folder: Path
    waivers: Path | None = None
    no_waivers: bool = False
    allow_compilations: bool = False

    def ledger(self) -> Ledger:
        """Return the waivers that are chosen. UsageError for a file that is no ledger."""
        return choose_ledger(self.waivers, self.no_waivers).allowing_compilations(self.allow_compilations)
