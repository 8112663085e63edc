"""Demand: makes a round hold a boundary of contract 10, whatever it held before."""

from __future__ import annotations

import dataclasses
from typing import Any

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.system import System
from fuzz.engine.boundaries import ONE_TWICE, OTHER_PAGES, Boundary, Kind, full_rows, lengths_of_total
from fuzz.engine.limits import undefined_when_empty


def fewest_requests(boundary: Boundary) -> int:
    """Live requests that a round needs to hold `boundary`."""
    if boundary.which == "middle":
        return 3
    several = boundary.which in (ONE_TWICE, "nothing by one request")
    return 0 if boundary.kind is Kind.BATCH else 2 if several else 1


def hold(boundary: Boundary, base: Round, system: System, geometry: Geometry) -> Round:
    """`base` with `boundary` in it; `base` has the bucket and enough requests for it."""
    raw, n = base.raw_batch, geometry.draft_tokens
    lengths, requests = list(base.seq_lens), list(base.requests)
    changes: dict[str, Any] = {}
    match boundary.kind:
        case Kind.LENGTH:
            lengths[raw // 2] = boundary.value
        case Kind.EMPTY:
            places = {"first": [0], "last": [raw - 1], "middle": [raw // 2], "all": range(raw)}[boundary.which]
            lengths = [0 if place in places else max(length, 1) for place, length in enumerate(lengths)]
        case Kind.TILES | Kind.LONG_ROWS:
            lengths = list(lengths_of_total(boundary, system, geometry) or lengths)
            if base.verify_lens is not None:
                changes["verify_lens"] = full_rows(system, geometry, base.bucket)
        case Kind.WRITE:
            pools = (geometry.context - system.shortest_length(geometry) - boundary.value) // geometry.pool_size
            lengths[-1] = system.shortest_length(geometry) + boundary.value + pools // 2 * geometry.pool_size
            if base.accept_lens is not None:
                changes["accept_lens"] = (*base.accept_lens[:-1], boundary.extra)
        case Kind.EXTEND:
            lengths[0], changes = _extend(boundary.which, base, n)
        case Kind.ROW:
            if boundary.value not in requests:
                requests[0] = boundary.value
        case Kind.SUM:
            lengths = [geometry.context] * raw
        case Kind.ALIAS if boundary.which == ONE_TWICE:
            requests[-1] = requests[0]
        case Kind.ALIAS:
            assert boundary.which == OTHER_PAGES
            changes["remap"] = (requests[0],)
    seq_lens = defined(system, geometry, base.bucket, tuple(lengths))
    return dataclasses.replace(base, seq_lens=seq_lens, requests=tuple(requests), **changes)


def _extend(which: str, base: Round, n: int) -> tuple[int, dict[str, Any]]:
    """(length of the first request, what else changes)."""
    first, rest = base.seq_lens[0], base.raw_batch - 1
    if which == "longer than the length":
        return n - 1, {"extend_lens": (n, *base.extend_lens[1:])} if base.extend_lens else {}
    if which == "equal to the length":
        return n, {"extend_lens": (n, *base.extend_lens[1:])} if base.extend_lens else {}
    if which == "nothing by one request":
        return first, {"extend_lens": (0, *(n,) * rest)}
    return first, {"extend_lens": (0 if which == "nothing at all" else n,) * (rest + 1)}


def defined(system: System, geometry: Geometry, bucket: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """`lengths`, but not all zero where the contract leaves that undefined (3.6)."""
    if lengths and len(lengths) == bucket and not any(lengths) and undefined_when_empty(system, geometry, bucket):
        return (1, *lengths[1:])
    return lengths
