"""GuardFinding: one thing that a guard has found, in words and as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GuardFinding:
    """`path` names the attribute, such as `metadata.page_table[3].lens`; `replay` counts the replays of the graph `key`
    from 0. `kind` is one of KINDS. The sentence holds no address."""

    kind: str
    path: str
    sentence: str
    key: Hashable = None
    replay: int = 0


KINDS = (
    "address",  # a tensor lies elsewhere
    "freed",  # the captured memory was given back
    "shape",
    "stride",
    "dtype",
    "device",
    "rebound",  # what was a tensor or container is none any more, or the reverse
    "removed",
    "added",
    "number",  # a plain value that the graph has as a constant
    "constant",  # the content of a field that was declared constant
    "pad",  # rows beyond the batch do not hold what was declared
    "value",  # the graph has computed other bits than eager work
    "unknown",  # no metadata was recorded for this graph
    "not checked",  # a check could not be done
)


class GuardWarning(UserWarning):
    """A guard in mode "warn" has found something."""
