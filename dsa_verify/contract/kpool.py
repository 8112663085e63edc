"""Rules of K-pool metadata that hold for subject and oracle alike: sizes (contract 0.3, 4).

A pool is `pool_size` consecutive tokens that share one index key. Nothing here computes a metadata value: what an
oracle and a pipeline must each work out for themselves has no place in a module that both import.
"""

from __future__ import annotations

from typing import Literal

from dsa_verify.contract.geometry import Geometry

Mode = Literal["decode", "target_verify", "draft_extend"]  # the forms of a write plan


def pooled_indexer(geometry: Geometry) -> bool:
    """Return whether the layout has a write plan, which asks more of the lengths (contract 4.2)."""
    return geometry.indexer and geometry.pool_size > 1


def candidates(tokens: int, geometry: Geometry) -> int:
    """Return C: pools that the `tokens` that a request writes can close, the columns of `write_loc` (contract 4.2)."""
    return -(-tokens // geometry.pool_size)


def pooled_pages(geometry: Geometry) -> int:
    """Columns of `pooled_real_page_table` (contract 4.1)."""
    return -(-geometry.pages // geometry.pool_size)
