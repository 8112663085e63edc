"""What a wrong value of decode context parallelism says about itself: whose row of a pool it is, which id float32
cannot hold, which rank's log-sum-exp took the others with it (contract 8.2, 8.3, 8.7).

Each explanation names the contract's rule only after it has found the value again: in another rank's pool, in the
round's own selection worked out in float32, or beside a special log-sum-exp. diagnose.py tries them on each element.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final

import torch

from dsa_verify.contract.explanation import Cause, Explanation
from dsa_verify.contract.finding import Diagnosis, Facts
from dsa_verify.contract.layout import Row
from dsa_verify.diagnosis.evidence import Element, Evidence
from dsa_verify.diagnosis.places import as_float

_OF_RANK: Final = re.compile(r"rank(\d+)_(\w+)")


def stored_elsewhere(evidence: Evidence, e: Element) -> Explanation | None:
    """A row of a pool that holds another virtual slot's token, or whose own token went to another row."""
    place = _rank_of(e)
    if e.field.row is not Row.SLOT or place is None:
        return None
    rank = place[0]
    found = _slot_zero(evidence, e) or _at_the_virtual_slot(evidence, e, rank) or _of_another_rank(evidence, e, rank)
    if found is None:
        virtual, locations = _virtual(evidence, e.row, rank), evidence.now.inputs.get("out_cache_loc")
        if not e.row or locations is None or virtual not in locations.tolist():
            return None
        found = Explanation(Diagnosis.NEVER_WRITTEN, Cause.NOT_STORED, {"slot": virtual, "owner": rank})
    return found.with_facts(ranks=evidence.layout.geometry.dcp_size)


def reserved_slot(evidence: Evidence, e: Element) -> Explanation | None:
    """Row 0 of rank 0's pool, whatever it holds."""
    place = _rank_of(e)
    if e.field.row is not Row.SLOT or place is None or e.row or _virtual(evidence, 0, place[0]):
        return None
    return Explanation(Diagnosis.WRONG_VALUE, Cause.RESERVED_SLOT)


def _slot_zero(evidence: Evidence, e: Element) -> Explanation | None:
    """The reserved slot, which is row 0 of rank 0, and of nobody else's pool."""
    locations, rows = (evidence.now.inputs.get(name) for name in ("out_cache_loc", "kv_rows"))
    if e.row or locations is None or rows is None or e.got not in rows[locations == 0, e.column].tolist():
        return None
    return Explanation(Diagnosis.WRONG_OWNER, Cause.RESERVED_SLOT_STORED)


def _at_the_virtual_slot(evidence: Evidence, e: Element, rank: int) -> Explanation | None:
    owner, row = _place(evidence, e.row)
    if (owner, row) == (rank, e.row) or not e.got or _held(evidence, owner, row, e.column) != e.got:
        return None
    facts: Facts = {"slot": e.row, "owner": owner, "row": row}
    return Explanation(Diagnosis.WRONG_OWNER, Cause.AT_THE_VIRTUAL_SLOT, facts)


def _of_another_rank(evidence: Evidence, e: Element, rank: int) -> Explanation | None:
    for other in range(evidence.layout.geometry.dcp_size):
        if other != rank and e.got and _held(evidence, other, e.row, e.column) == e.got:
            facts: Facts = {"slot": _virtual(evidence, e.row, other), "owner": other}
            return Explanation(Diagnosis.WRONG_OWNER, Cause.TOKEN_OF_ANOTHER_RANK, facts)
    return None


def rounded_id(evidence: Evidence, e: Element) -> Explanation | None:
    """A share of the selections that is right for the ids as float32 holds them."""
    place, selection = _rank_of(e), evidence.now.inputs.get("selection")
    if place is None or selection is None or place[1] not in ("localized", "packed", "packed_counts"):
        return None
    rank, name = place
    ids = selection[e.row].long()
    lost = ids[_single(ids) != ids]
    if not len(lost):
        return None
    shares = _shares_in_float32(evidence, ids, rank)
    owned = shares[shares >= 0]
    given = {"localized": shares, "packed": owned, "packed_counts": torch.tensor([len(owned)])}[name]
    if (int(given[e.column]) if e.column < len(given) else -1) != e.got:
        return None
    slot, kept = int(lost[0]), int(_single(lost[0]))
    moved = _place(evidence, slot)[0] != _place(evidence, kept)[0]
    facts: Facts = {"slot": slot, "kept": kept, "other_rank": moved}
    return Explanation(Diagnosis.WRONG_OWNER, Cause.IDS_IN_FLOAT32, facts)


def one_rank_for_all(evidence: Evidence, e: Element) -> Explanation | None:
    """A merge that is lost because of one rank whose log-sum-exp is no number."""
    lses = evidence.now.inputs.get("partial_lse")
    if lses is None or e.field.name not in ("merged_out", "merged_lse"):
        return None
    head = e.column if e.field.name == "merged_lse" else e.column // evidence.layout.geometry.head_dim
    ranks = lses[:, e.row, head].tolist()
    special = [rank for rank, lse in enumerate(ranks) if math.isnan(lse) or lse == math.inf]
    got, want = (as_float(word) for word in (e.got, e.want))
    if not special or math.isnan(want) or (math.isfinite(got) and got):
        return None
    rank = special[0]
    facts: Facts = {
        "all": ", ".join(f"{lse:.6g}" for lse in ranks),
        "rank": rank,
        "lse": f"{ranks[rank]:g}",
        "others_count": any(map(math.isfinite, ranks)),
    }
    return Explanation(Diagnosis.WRONG_VALUE, Cause.RANK_TAKES_THE_MERGE, facts)


def selected_elsewhere(evidence: Evidence, e: Element) -> Explanation | None:
    """Another position's slot where a selected one belongs."""
    if e.field.name != "selected_slots":
        return None
    if e.got == 0:
        return Explanation(Diagnosis.WRONG_VALUE, Cause.SLOT_ZERO_SELECTED)
    got, want = (evidence.owner(value) for value in (e.got, e.want))
    if got is None or want is None:
        return None
    others = evidence.now.requests[e.row] not in got.rows
    facts: Facts = {
        "position": got.token,
        "owner": str(got) if others else "the same request",
        "aside": got.aside,
        "expected": want.token,
    }
    kind = Diagnosis.REQUEST_MAP if others else Diagnosis.WRONG_VALUE
    return Explanation(kind, Cause.OTHER_POSITION_SELECTED, facts)


# Where things lie ----------------------------------------------------------------------------------------------------


def _rank_of(e: Element) -> tuple[int, str] | None:
    """(rank, the rest of the name) of a field that is one rank's."""
    found = _OF_RANK.fullmatch(e.field.name)
    return None if found is None else (int(found[1]), found[2])


def _place(evidence: Evidence, slot: int) -> tuple[int, int]:
    """(rank, local row) of a virtual slot (contract 8.1)."""
    geometry = evidence.layout.geometry
    turn, rank = divmod(slot // geometry.dcp_block, geometry.dcp_size)
    return rank, turn * geometry.dcp_block + slot % geometry.dcp_block


def _virtual(evidence: Evidence, row: int, rank: int) -> int:
    """The inverse of `_place`."""
    size: int = evidence.layout.geometry.dcp_size
    block: int = evidence.layout.geometry.dcp_block
    return (row // block * size + rank) * block + row % block


def _held(evidence: Evidence, rank: int, row: int, column: int) -> int | None:
    """What the pool of `rank` must hold."""
    pool = evidence.now.want.get(f"rank{rank}_kv_pool")
    return int(pool[row, column]) if pool is not None and row < pool.shape[0] else None


def _single(values: torch.Tensor) -> torch.Tensor:
    """int64 `values` after a float32 has held them."""
    return values.float().long()


def _shares_in_float32(evidence: Evidence, slots: torch.Tensor, rank: int) -> torch.Tensor:
    """Of int64 virtual `slots`, the local row of each that `rank` owns, -1 for the others, all in float32."""
    geometry, single = evidence.layout.geometry, _single(slots)
    turn = single // geometry.dcp_block
    row = turn // geometry.dcp_size * geometry.dcp_block + single % geometry.dcp_block
    return torch.where((slots >= 0) & (turn % geometry.dcp_size == rank), _single(row), -1)


PATTERNS: Final[tuple[Callable[[Evidence, Element], Explanation | None], ...]] = (
    stored_elsewhere,
    reserved_slot,
    rounded_id,
    one_rank_for_all,
    selected_elsewhere,
)
