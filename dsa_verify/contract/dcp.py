"""Rules of decode context parallelism that hold for subject and oracle alike: sizes, limits and refusals (contract 8).

D ranks share one space of virtual token slots, of which each stores its own share. Nothing here says who owns a slot
or where it lies: that is what an oracle and a pipeline must each work out for themselves.
"""

from __future__ import annotations

from typing import Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry

LOG_BASES: Final = ("2", "e")
# Of a merge in float32: |got - exact| <= MERGE_BOUND * max(|exact|, largest |partial| of the row) for the outputs and
# <= MERGE_BOUND * max(|exact|, 1) for the log-sum-exp. In units of 2**-23 and with 8 ranks, a weight is off by 2.4 (an
# approximate exponential 2, its argument 0.4), the sum of 8 weighted outputs by 0.5 + 3.5 more, the sum of the weights
# by 3.5 more, the quotient by 0.5: 13 together. Scaling before gathering has shown 3e-6, 25 units (contract 8.7).
MERGE_BOUND: Final = 32 * 2.0**-23


def local_rows(slots: int, dcp_size: int, dcp_block: int = 1) -> int:
    """Rows of one rank's KV pool when virtual slots run from 0 to `slots` - 1: `size + page` of contract 8.5."""
    return -(-slots // (dcp_size * dcp_block)) * dcp_block


def shard_pages(geometry: Geometry) -> int:
    """Columns of a rank's page table: its pages of a request as long as the table is wide (contract 8.4)."""
    ranks: int = geometry.dcp_size
    return -(-geometry.columns // (geometry.page_size * ranks))


def check_dcp_geometry(geometry: Geometry, *, where: str = "") -> None:
    """Raise UsageError, with the remedy, if pages, blocks and ranks of `geometry` do not fit together (contract 8.1,
    8.8)."""
    size, block, page = geometry.dcp_size, geometry.dcp_block, geometry.page_size
    if geometry.pool_size > 1 and size > 1:
        raise UsageError(
            f"{where}pool_size: {geometry.pool_size} with dcp_size {size}; pooling is refused with several ranks, "
            "use pool_size 1 or dcp_size 1"
        )
    if page % block:
        raise UsageError(
            f"{where}dcp_block: {block} does not divide page_size {page}, so that a rank's rows of one page would not "
            "be consecutive; use a block that does"
        )
    if geometry.allocator_page % (page * size):
        raise UsageError(
            f"{where}dcp_size: an allocator page of {geometry.allocator_page} tokens is not whole pages of {page} on "
            f"{size} ranks, so that a slot and its position may have different owners; make it page_size * dcp_size"
        )
