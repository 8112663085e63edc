"""Batch: what the rules of what is live may depend on (live.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A rule may depend on these facts of a batch. `row` [B]: the batch rows in order. `bucket`, `raw`, `tokens` [M,
    1]: batch rows, live requests and token rows of the graph. `lens`: by name, [M, B], what the round says of each
    request, pads included."""

    row: Any
    bucket: Any
    raw: Any
    tokens: Any
    seq_lens: Any
    lens: Mapping[str, Any]


Fewer = Callable[[Any, Batch], Any]  # (numpy or torch, batch) -> [M, B]
