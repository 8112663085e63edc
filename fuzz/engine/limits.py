"""Limits: what a round of a system may hold, as far as the fuzzer has to know it before it draws one.

`ReplaySetup.table` and the case reader refuse what is outside; a fuzzer that ran into a refusal would count rounds that
never took place.
"""

from __future__ import annotations

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.system import System


def most_requests(system: System, geometry: Geometry, bucket: int) -> int:
    """Return the live requests that `bucket` can hold: each needs a request row, and a token row (contract 9)."""
    most = min(bucket, geometry.request_rows - 1)
    return min(most, system.capacity(geometry, bucket))
