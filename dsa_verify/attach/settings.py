"""Settings of an attachment, which the environment holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dsa_verify.base.errors import UsageError

PARTS: Final = ("guard", "overlay", "capture")
SWITCH: Final = "DSA_VERIFY"  # entry.py has these two as well, since it imports nothing
STRICT: Final = "DSA_VERIFY_STRICT"
FOLDER: Final = "DSA_VERIFY_DIR"
EVERY: Final = "DSA_VERIFY_EVERY"
DEFAULT_FOLDER: Final = "dsa-verify"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`parts`: of PARTS, those that are asked for. `strict`: whether a finding or a failure of ours ends the server.
    `folder`: where findings go. `every`: one in so many replays is looked at."""

    parts: tuple[str, ...]
    strict: bool = False
    folder: Path = Path(DEFAULT_FOLDER)
    every: int = 1

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """Return what `environment` says. UsageError for a value that is none of those it may have."""
        asked = [word.strip().lower() for word in environment.get(SWITCH, "").split(",") if word.strip()]
        unknown = [word for word in asked if word not in PARTS]
        if unknown or not asked:
            known = ", ".join(PARTS)
            raise UsageError(f"{SWITCH}: {', '.join(unknown)!r} is none of {known}; set it to one or more, by commas")
        strict = environment.get(STRICT, "").strip()
        if strict not in ("", "0", "1"):
            raise UsageError(f"{STRICT}: {strict!r} is neither 0 nor 1; set it to one of them")
        every = environment.get(EVERY, "").strip() or "1"
        if not every.isdecimal() or not 1 <= int(every[:10]) <= 1 << 31:
            raise UsageError(f"{EVERY}: {every!r} is no integer from 1 to 2147483648; set it to one")
        return cls(
            parts=tuple(part for part in PARTS if part in asked),
            strict=strict == "1",
            folder=Path(environment.get(FOLDER, "").strip() or DEFAULT_FOLDER),
            every=int(every),
        )
