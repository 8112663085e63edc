"""Facts of padded-replay metadata that hold for subject and oracle alike: modes, widths, refusals (contract 7.1).

Nothing here computes a metadata value: what an oracle and a pipeline must each work out for themselves has no place in
a module that both import.
"""

from __future__ import annotations

from typing import Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry

PADDED_MODES: Final = ("decode", "verify", "draft_block", "draft_extend")
LOW_RATIOS: Final = (1, 2)
# Their page table is a placeholder of one page (contract 7.1): neither reads beyond the sliding window.
PLACEHOLDER_MODES: Final = ("draft_block", "draft_extend")


def page_columns(geometry: Geometry) -> int:
    """Columns of `page_table`."""
    return 1 if geometry.padded_mode in PLACEHOLDER_MODES else geometry.pages


def write_location_dtype(geometry: Geometry) -> str:
    """Dtype of `raw_out_loc`: a captured verify graph holds it in 32 bits."""
    return "int32" if geometry.padded_mode == "verify" else "int64"


def check_padded_geometry(geometry: Geometry) -> None:
    """Raise UsageError, with the remedy, if contract 7 leaves metadata of `geometry` undefined."""
    if geometry.padded_mode == "draft_block" and geometry.draft_tokens < 2:
        raise UsageError(
            f"draft_tokens: {geometry.draft_tokens} leaves a draft block without a token; use 2 or more, "
            "or another padded_mode"
        )
    ratios = [("sparse_ratio", geometry.sparse_ratio), ("dense_ratio", geometry.dense_ratio)]
    if geometry.low_ratios:
        ratios += [("low_ratios", ratio) for ratio in LOW_RATIOS]
    for name, ratio in ratios:
        if geometry.page_size % ratio:
            raise UsageError(
                f"{name}: ratio {ratio} does not divide page_size {geometry.page_size}, so that a compressed entry "
                "would lie in two pages; use a ratio that does"
            )
