"""Rules of K-pool metadata that hold for subject and oracle alike: sizes, liveness and refusals (contract 0.3, 4).

A pool is `pool_size` consecutive tokens that share one index key. Nothing here computes a metadata value: what an
oracle and a pipeline must each work out for themselves has no place in a module that both import.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry

if TYPE_CHECKING:  # the reader of cases needs the rules only, in processes that have no other use for NumPy
    import numpy as np
    import numpy.typing as npt

Mode = Literal["decode", "target_verify", "draft_extend"]


def rows_per_request(mode: Mode, geometry: Geometry) -> int:
    """n: tokens that one request writes, and its rows in `real_page_table` (contract 4.2)."""
    return 1 if mode == "decode" else geometry.draft_tokens


def candidates(mode: Mode, geometry: Geometry) -> int:
    """C: pools that n tokens can close, the columns of `write_loc` (contract 4.2)."""
    return -(-rows_per_request(mode, geometry) // geometry.pool_size)


def pooled_pages(geometry: Geometry) -> int:
    """Columns of `pooled_real_page_table` (contract 4.1)."""
    return -(-geometry.pages // geometry.pool_size)


def shortest_length(mode: Mode, geometry: Geometry) -> int:
    """The smallest `seq_lens` whose write start is not negative, which contract 4.2 leaves undefined; 0 in modes that
    start at the length, or have no write plan."""
    return {"decode": 1, "mtp": 1, "draft_extend": geometry.draft_tokens}.get(mode, 0)


def check_lengths(mode: Mode, geometry: Geometry, seq_lens: Iterable[int], *, where: str = "") -> None:
    """UsageError for the first length that would start its writes below position 0 (contract 4.2)."""
    shortest = shortest_length(mode, geometry)
    for b, length in enumerate(seq_lens):
        if length < shortest:
            raise UsageError(
                f"{where}seq_lens[{b}]: {length} is below {shortest}, so that {mode} with pool_size "
                f"{geometry.pool_size} would write before position 0; use {shortest} or more"
            )


def live_candidates(
    mode: Mode,
    geometry: Geometry,
    seq_lens: npt.NDArray[np.int64],
    accept_lens: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int64]:
    """Return how many of the first columns of `write_loc` a consumer reads, in the shape of `seq_lens` (contract 4.2).

    `accept_lens`: the accepted tokens of draft-extend. Pad requests have none, which the caller knows.
    """
    start = seq_lens - shortest_length(mode, geometry)
    written: npt.NDArray[np.int64] | int = rows_per_request(mode, geometry)
    if mode == "draft_extend":
        if accept_lens is None:
            raise UsageError("accept_lens: None in draft_extend; it decides which candidates are live, so pass it")
        written = accept_lens
    return (start + written) // geometry.pool_size - start // geometry.pool_size
