"""Limits: what a round of a system may hold, as far as the fuzzer has to know it before it draws one.

`Job.table` and the case reader refuse what is outside; a fuzzer that ran into a refusal would count rounds that never
took place.
"""

from __future__ import annotations

from typing import Final

from dsa_verify.geometry import Geometry
from dsa_verify.ragged_rules import graph_tokens
from dsa_verify.schedules import VARIANTS, Placement

# The schedule of an all-zero batch is undefined at multiples of so many requests (contract 3.6).
_UNDEFINED_ROWS: Final = 32


def adds_draft(system: str) -> bool:
    """Whether `seq_lens` is the prefix before the draft, so that N more tokens are live (contract 0.1)."""
    return system in ("target_verify", "ragged_verify")


def most_requests(system: str, geometry: Geometry, bucket: int) -> int:
    """Live requests that a round of `bucket` can hold: each needs a request row, and a token row (contract 9)."""
    most = min(bucket, geometry.request_rows - 1)
    return min(most, graph_tokens(geometry, bucket)) if system == "ragged_verify" else most


def undefined_when_empty(system: str, geometry: Geometry, bucket: int) -> bool:
    """Whether a full batch of lengths 0 has no defined schedule (contract 3.6)."""
    if not geometry.indexer or VARIANTS[geometry.schedule].placement is not Placement.TAIL:
        return False
    rows = bucket * (geometry.draft_tokens if system == "draft_extend" else 1)
    return rows % _UNDEFINED_ROWS == 0
