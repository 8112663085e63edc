"""The shipped cases: one for each planted fault, as small as it gets, and what each once caught.

The cases plant nothing, so a right pipeline passes every one of them. `found` says what the rounds are there for: the
fault, as `dsa-verify replay CASE --fault` takes it, then the sentence of the finding, then, of some, a public bug of
the same kind.
"""

from __future__ import annotations

import re
from pathlib import Path

from dsa_verify.errors import UsageError
from dsa_verify.scenario import Scenario


def paths(system: str = "*") -> list[Path]:
    """The case files, sorted by name: those of `system`, or all."""
    return sorted(Path(__file__).parent.glob(f"{system}-*.json"))


def caught(case: Scenario) -> tuple[str, str]:
    """(fault, sentence) of what `case` once caught; UsageError if its `found` does not say so."""
    said = re.fullmatch(r"fault (\w+(?::\w+)?): (.+)", case.found or "")
    if said is None:
        raise UsageError(f"found: {case.found!r} names no fault; write 'fault NAME: ' before the sentence")
    return said[1], said[2]
