"""What the shipped cases say that they once caught."""

from __future__ import annotations

import re

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.round import Scenario


def caught(case: Scenario) -> tuple[str, str]:
    """Return (fault, sentence) of what `case` once caught; UsageError if its `found` does not say so."""
    said = re.fullmatch(r"fault (\w+(?::\w+)?): (.+)", case.found or "")
    if said is None:
        raise UsageError(f"found: {case.found!r} names no fault; write 'fault NAME: ' before the sentence")
    return said[1], said[2]
