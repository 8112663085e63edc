"""This module makes a round hold a boundary of contract 10, whatever it held before."""

from __future__ import annotations

from typing import Any, Final

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.system import System
from dsa_verify.rounds.matrix import undefined_when_empty
from fuzz.engine.boundaries import ONE_TWICE, OTHER_PAGES, Boundary, Kind, full_rows, lengths_of_total

# The length of the first request, relative to the draft.
_EXTEND_LENGTHS: Final = {"longer than the length": -1, "equal to the length": 0}


def fewest_requests(boundary: Boundary) -> int:
    """Return how many live requests a round needs to hold `boundary`."""
    if boundary.which == "middle":
        return 3
    several = boundary.which in (ONE_TWICE, "nothing by one request")
    return 0 if boundary.kind is Kind.BATCH else 2 if several else 1


def force_boundary(boundary: Boundary, base: Round, system: System, geometry: Geometry) -> Round:
    """Return `base` with `boundary` in it; `base` has the bucket and enough requests for it."""
    lengths = _lengths(boundary, base, system, geometry)
    seq_lens = defined(system, geometry, base.bucket, tuple(lengths))
    return base.replace(seq_lens=seq_lens, **_other_changes(boundary, base, system, geometry))


def _lengths(boundary: Boundary, base: Round, system: System, geometry: Geometry) -> list[int]:
    """Return the lengths of `base`, changed as far as `boundary` asks for it."""
    raw, lengths = base.raw_batch, list(base.seq_lens)
    match boundary.kind:
        case Kind.LENGTH:
            lengths[raw // 2] = boundary.value
        case Kind.EMPTY:
            places = {"first": [0], "last": [raw - 1], "middle": [raw // 2], "all": range(raw)}[boundary.which]
            lengths = [0 if place in places else max(length, 1) for place, length in enumerate(lengths)]
        case Kind.TILES | Kind.LONG_ROWS:
            lengths = list(lengths_of_total(boundary, system, geometry) or lengths)
        case Kind.WRITE:
            pools = (geometry.context - system.shortest_length(geometry) - boundary.value) // geometry.pool_size
            lengths[-1] = system.shortest_length(geometry) + boundary.value + pools // 2 * geometry.pool_size
        case Kind.EXTEND if boundary.which in _EXTEND_LENGTHS:
            lengths[0] = geometry.draft_tokens + _EXTEND_LENGTHS[boundary.which]
        case Kind.SUM:
            lengths = [geometry.context] * raw
    return lengths


def _other_changes(boundary: Boundary, base: Round, system: System, geometry: Geometry) -> dict[str, Any]:
    """Return by field what `boundary` changes of `base` beside its lengths."""
    first, *others = base.requests or (0,)
    match boundary.kind:
        case Kind.TILES | Kind.LONG_ROWS if "verify_lens" in base.lens:
            return {"verify_lens": full_rows(system, geometry, base.bucket)}
        case Kind.WRITE if "accept_lens" in base.lens:
            return {"accept_lens": (*base.accept_lens[:-1], boundary.extra)}
        case Kind.EXTEND:
            return _extend_lens(boundary.which, base, geometry.draft_tokens)
        case Kind.ROW if boundary.value not in base.requests:
            return {"requests": (boundary.value, *others)}
        case Kind.ALIAS:
            assert boundary.which in (ONE_TWICE, OTHER_PAGES)
            return {"requests": (first, *others[:-1], first)} if boundary.which == ONE_TWICE else {"remap": (first,)}
    return {}


def _extend_lens(which: str, base: Round, n: int) -> dict[str, Any]:
    if which in _EXTEND_LENGTHS:
        return {"extend_lens": (n, *base.extend_lens[1:])} if base.lens.get("extend_lens") else {}
    if which == "nothing by one request":
        return {"extend_lens": (0, *(n,) * (base.raw_batch - 1))}
    return {"extend_lens": (0 if which == "nothing at all" else n,) * base.raw_batch}


def defined(system: System, geometry: Geometry, bucket: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return `lengths`, but not all zero where the contract leaves that undefined (3.6)."""
    if lengths and len(lengths) == bucket and not any(lengths) and undefined_when_empty(system, geometry, bucket):
        return (1, *lengths[1:])
    return lengths
