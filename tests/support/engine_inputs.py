"""Inputs as an engine holds them, for tests that play one: they lie in memory as the geometry says (contract 0.1)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from support import DEVICE

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round_table import token_slots

AROUND = -77  # what must not matter


def slots_of(geometry: Geometry) -> npt.NDArray[np.int64]:
    """The slot of each token of each request row, in which rows are of different generations."""
    rows = np.arange(geometry.request_rows)
    return token_slots(geometry, rows, rows % 3)


def input_of(geometry: Geometry, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """An input of this shape, in the geometry's `input_view`, and the memory that it lies in."""
    around = {"plain": shape, "offset": (shape[0] + 3, *shape[1:]), "strided": (*shape[:-1], 2 * shape[-1])}
    memory = torch.full(around[geometry.input_view], AROUND, dtype=dtype, device=DEVICE)
    if geometry.input_view == "plain":
        return memory, memory
    if geometry.input_view == "offset":
        return memory[3:], memory
    # A table is strided by rows only; a list by its elements.
    return memory[::2] if len(shape) == 1 else memory[:, : shape[1]], memory
