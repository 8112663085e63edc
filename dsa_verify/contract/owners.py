"""Owners: whose token a slot is, as the request table of a round shows it.

Page ids of this harness say for which request row they were drawn (rounds.py). But rows take pages of one another, as a
prefix cache has them do, and keep them when the other moves on; so what counts is who has a page now, and what it was
drawn for is said only of a page that nobody has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round_table import owner_of_slot
from dsa_verify.contract.static_inputs import PAD_REQUEST


@dataclasses.dataclass(frozen=True, slots=True)
class Owner:
    """The request rows whose token `token` a slot is. `now`: False if it was drawn for them, but nobody has it."""

    rows: tuple[int, ...]
    token: int
    now: bool = True

    def __str__(self) -> str:
        first, *others = (str(row) for row in self.rows)
        if not others:
            return f"request {first}"
        return f"requests {', '.join([first, *others[:-1]])} and {others[-1]}, which share this page"

    @property
    def aside(self) -> str:
        """A sentence adds this about a slot that nobody has."""
        return "" if self.now else " on pages that it does not have in this round"


OwnerOf = Callable[[int], Owner | None]


def drawn_for(geometry: Geometry) -> OwnerOf:
    """Return fn(slot) -> the row that it was drawn for, which has it where nothing moved; None if it was for nobody."""

    def owner_of(slot: int) -> Owner | None:
        found = owner_of_slot(geometry, slot)
        return None if found is None else Owner(found[:1], found[1])

    return owner_of


def held_in(geometry: Geometry, table: torch.Tensor) -> OwnerOf:
    """Return fn(slot) -> the rows of `req_to_token` that have it now, or else the row that it was drawn for. `table`,
    int32 [request rows, token columns], is read when the first slot is asked for."""
    page, drawn = geometry.allocator_page, drawn_for(geometry)

    @functools.cache
    def starts() -> np.ndarray:
        return table[:, ::page].cpu().numpy()

    @functools.cache
    def owner_of(slot: int) -> Owner | None:
        rows, pages = np.nonzero(starts() == slot - slot % page)
        if not len(rows) or rows[0] == PAD_REQUEST:  # all of whose columns are page 0
            nobody = drawn(slot)
            return None if nobody is None else dataclasses.replace(nobody, now=False)
        # A prefix has each page where it was, so all have it for the same tokens.
        return Owner(tuple(rows.tolist()), int(pages[0]) * page + slot % page)

    return owner_of
