"""Rules of K-pool metadata that hold for subject and oracle alike: sizes, liveness and refusals (contract 0.3, 4).

A pool is `pool_size` consecutive tokens that share one index key. Nothing here computes a metadata value: what an
oracle and a pipeline must each work out for themselves has no place in a module that both import.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal

from dsa_verify.errors import UsageError
from dsa_verify.geometry import MAX_DRAFT_TOKENS, Geometry

if TYPE_CHECKING:  # the reader of cases needs the rules only, in processes that have no other use for NumPy
    import numpy as np
    import numpy.typing as npt

Mode = Literal["decode", "target_verify", "draft_extend"]

POOLED_PAGE_SIZE: Final = 64
GROUP_TOPK: Final = (128, 160, 192, 224, 256, 512, 2048)
MAX_TOPK: Final = 2048
SCALED_DOWN_PRESETS: Final = ("tiny", "tiny_indexer", "tiny_pool")


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
    """How many of the first columns of `write_loc` a consumer reads, in the shape of `seq_lens` (contract 4.2).

    `accept_lens`: the accepted tokens of draft-extend. Pad requests have none, which the caller knows.
    """
    start = seq_lens - shortest_length(mode, geometry)
    written: npt.NDArray[np.int64] | int = rows_per_request(mode, geometry)
    if mode == "draft_extend":
        if accept_lens is None:
            raise UsageError("accept_lens: None in draft_extend; it decides which candidates are live, so pass it")
        written = accept_lens
    return (start + written) // geometry.pool_size - start // geometry.pool_size


def check_pool_geometry(geometry: Geometry, *, where: str = "") -> None:
    """UsageError, with the remedy, if `geometry` is one that pooling does not support (contract 0.3)."""
    for name, low, high in (("draft_tokens", 1, MAX_DRAFT_TOKENS), ("topk", 1, MAX_TOPK)):
        value = getattr(geometry, name)
        if not low <= value <= high:
            raise UsageError(f"{where}{name}: {value} is outside {low}..{high}; choose a value inside")
    pool, page, topk = geometry.pool_size, geometry.page_size, geometry.topk
    if pool == 1:
        return
    scaled_down = geometry.preset in SCALED_DOWN_PRESETS
    if page != POOLED_PAGE_SIZE and not scaled_down:
        raise UsageError(
            f"{where}page_size: {page} with pool_size {pool}; pooling exists for page_size {POOLED_PAGE_SIZE} only, "
            f"use it, or pool_size 1, or preset {' or '.join(SCALED_DOWN_PRESETS)}"
        )
    for name, value in (("page_size", page), ("topk", topk)):
        if value % pool:
            raise UsageError(f"{where}pool_size: {pool} does not divide {name} {value}; use a pool_size that does")
    if not scaled_down and topk // pool not in GROUP_TOPK:
        allowed = ", ".join(str(groups * pool) for groups in GROUP_TOPK if groups * pool <= MAX_TOPK)
        raise UsageError(
            f"{where}topk: {topk} is {topk // pool} pools of {pool} tokens, for which there is no top-k kernel; "
            f"with this pool_size use a topk of {allowed}"
        )
