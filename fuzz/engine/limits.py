"""Limits: what a round of a system may hold, as far as the fuzzer has to know it before it draws one.

`ReplaySetup.table` and the case reader refuse what is outside; a fuzzer that ran into a refusal would count rounds that
never took place.
"""

from __future__ import annotations

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.ragged import graph_tokens
from dsa_verify.rounds.matrix import undefined_when_empty as undefined_when_empty


def adds_draft(system: str) -> bool:
    """Whether `seq_lens` is the prefix before the draft, so that N more tokens are live (contract 0.1)."""
    return system in ("target_verify", "ragged_verify")


def most_requests(system: str, geometry: Geometry, bucket: int) -> int:
    """Live requests that a round of `bucket` can hold: each needs a request row, and a token row (contract 9)."""
    most = min(bucket, geometry.request_rows - 1)
    return min(most, graph_tokens(geometry, bucket)) if system == "ragged_verify" else most
