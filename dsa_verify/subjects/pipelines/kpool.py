"""K-pool metadata as optimised: the write plan in one launch, the pooled views in another (contract 4.1, 4.2).

Both write in place, allocate nothing, may be captured or called before a replay, and are compiled once per mode and
geometry whatever the lengths are. `real_page_table` must have been refreshed before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import triton

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.kpool import Mode, candidates, pooled_pages
from dsa_verify.contract.subject import Inputs
from dsa_verify.subjects.pipelines.kpool_kernel import DECODE, EXTEND, VERIFY, pooled_views_kernel, write_plan_kernel

REQUEST_LANES: Final = 32
PAGE_BLOCK: Final = 512
# The interpreter pays by the operation, not by the element: there one program takes many requests at once.
INTERPRETED_LANES: Final = 64
INTERPRETED_GROUP: Final = 64

_MODES: Final = {"decode": DECODE, "target_verify": VERIFY, "draft_extend": EXTEND}


def update_write_plan(
    mode: Mode,
    geometry: Geometry,
    inputs: Inputs,
    real_page_table: torch.Tensor,
    out: Mapping[str, torch.Tensor],
    accept_lens: torch.Tensor | None = None,
) -> None:
    """The fields of contract 4.2 but the schedule and the top-k plan, each contiguous, into `out`.

    `req` int64 [bs], `write_start` and `tail_logical_start` int32 [bs], `write_loc` int64 [bs, C]; except in decode
    `seqlens_per_q` and `pool_seqlens_per_q` int32 [bs * N]; in draft-extend `effective_n_per_batch` int32 [bs].
    `real_page_table`: int32 [bs * n, pages]. `accept_lens`: integer [bs], needed in draft-extend, unused elsewhere.
    """
    batch = inputs.seq_lens.shape[0]
    tokens = real_page_table.shape[0] // batch
    columns = candidates(tokens, geometry)
    assert "effective_n_per_batch" not in out or accept_lens is not None, "draft_extend has accept_lens (contract 4.2)"
    accepted = inputs.seq_lens if accept_lens is None else accept_lens
    unused = out["write_start"]
    lanes = REQUEST_LANES if unused.is_cuda else min(INTERPRETED_LANES, triton.next_power_of_2(batch))
    write_plan_kernel[(triton.cdiv(batch, lanes),)](
        inputs.seq_lens,
        inputs.req_pool_indices,
        accepted,
        real_page_table,
        out["req"],
        out["write_start"],
        out["tail_logical_start"],
        out["write_loc"],
        out.get("seqlens_per_q", unused),
        out.get("pool_seqlens_per_q", unused),
        out.get("effective_n_per_batch", unused),
        batch,
        inputs.seq_lens.stride(0),
        inputs.req_pool_indices.stride(0),
        accepted.stride(0),
        real_page_table.stride(0),
        tokens,
        columns,
        geometry.pages,
        MODE=_MODES[mode],
        POOL=geometry.pool_size,
        PAGE=geometry.page_size,
        LANES=lanes,
        TOKEN_LANES=triton.next_power_of_2(tokens),
        CANDIDATE_LANES=triton.next_power_of_2(columns),
    )


def update_pooled_views(
    mode: Mode,
    geometry: Geometry,
    inputs: Inputs,
    real_page_table: torch.Tensor,
    out: Mapping[str, torch.Tensor],
) -> None:
    """`pooled_real_page_table` int32 [bs * n, pooled pages] up to each live length, and in decode
    `pooled_cache_seqlens_int32` int32 [bs], into `out` (contract 4.1). Draft-extend has N rows per request here."""
    batch, columns = inputs.seq_lens.shape[0], pooled_pages(geometry)
    tokens = real_page_table.shape[0] // batch
    table = out["pooled_real_page_table"]
    group = 1 if table.is_cuda else min(INTERPRETED_GROUP, triton.next_power_of_2(batch))
    pooled_views_kernel[(triton.cdiv(batch, group),)](
        inputs.seq_lens,
        real_page_table,
        out.get("pooled_cache_seqlens_int32", table),
        table,
        batch,
        inputs.seq_lens.stride(0),
        real_page_table.stride(0),
        table.stride(0),
        tokens,
        columns,
        MODE=_MODES[mode],
        POOL=geometry.pool_size,
        PAGE=geometry.page_size,
        BLOCK=min(PAGE_BLOCK, triton.next_power_of_2(columns)),
        GROUP=group,
    )
