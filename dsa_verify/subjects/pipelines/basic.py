"""The optimised decode, target-verify and draft-extend subjects: lengths and tables in one launch, the indexer's
metadata after it, everything in the graph. `schedule_life.py` arranges the same work otherwise."""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
import triton
import triton.language as tl

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.pipelines.basic_kernel import DECODE, EXTEND, VERIFY, metadata_kernel
from dsa_verify.subjects.pipelines.indexer import IndexerMetadata

COLUMN_BLOCK: Final = 1024
REQUEST_LANES: Final = 128
# Table programs to aim for: about four a multiprocessor of a large GPU, so a wide row is spread over several.
TABLE_PROGRAMS: Final = 528
INTERPRETED_GROUP: Final = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The tables of a launch are divided like this: `shares` programs to a row, each taking `block` columns at a time;
    `workers` programs that take `group` requests at once."""

    block: int
    shares: int
    workers: int
    group: int


def divide_tables(geometry: Geometry, batch: int, *, interpreted: bool) -> Division:
    """Divide the tables of `batch` requests."""
    block = max(min(COLUMN_BLOCK, triton.next_power_of_2(geometry.columns)), geometry.page_size)
    shares = max(1, min(-(-geometry.columns // block), TABLE_PROGRAMS // batch))
    if interpreted:
        # The interpreter pays by the operation, not by the element: there one worker takes all requests at once.
        group = min(INTERPRETED_GROUP, triton.next_power_of_2(batch))
        return Division(block=block, shares=shares, workers=1, group=group)
    return Division(block=block, shares=shares, workers=batch * shares, group=1)


def _draft_lanes(mode: tl.constexpr, draft_tokens: int) -> int:
    """Return lanes for the token rows of a request: a power of two."""
    lanes: int = triton.next_power_of_2(draft_tokens)
    # Triton 3.6 compiles no sum along an axis of one, over 32 requests or more, where lengths are loaded (EXTEND).
    return lanes if mode is DECODE else max(lanes, 2)


class InGraph:
    """Everything in the graph, nothing before the replay (contract 1.1 to 1.4)."""

    name = "triton"
    mode = DECODE

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        for constant in ("cu_seqlens_q", "dsa_cu_seqlens_q"):
            tensor = buffers[constant]
            tensor.copy_(torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device))
        self._indexer = IndexerMetadata(geometry, inputs, buffers) if geometry.indexer else None

    def before_replay(self) -> None:
        pass

    def in_graph(self) -> None:
        self._launch()
        if self._indexer is not None:
            self._indexer.refresh()

    def _launch(self) -> None:
        """Lengths and tables."""
        geometry, inputs, out = self._geometry, self._inputs, self._buffers
        batch = inputs.seq_lens.shape[0]
        real = out["real_page_table"]
        wide = out.get("page_table_1", real)
        extend = inputs.own.get("extend_lens", inputs.seq_lens)
        context_lens = out["paged_mqa_ctx_lens_2d"]
        division = divide_tables(geometry, batch, interpreted=not real.is_cuda)
        metadata_kernel[(1 + division.workers,)](
            inputs.seq_lens,
            inputs.req_pool_indices,
            inputs.req_to_token,
            extend,
            out["cache_seqlens_int32"],
            out["cu_seqlens_k"],
            out["dsa_seqlens_expanded"],
            out["dsa_cache_seqlens_int32"],
            out["dsa_cu_seqlens_k"],
            context_lens,
            wide,
            real,
            batch,
            inputs.seq_lens.stride(0),
            inputs.req_pool_indices.stride(0),
            extend.stride(0),
            inputs.req_to_token.stride(0),
            geometry.draft_tokens,
            geometry.columns,
            geometry.pages,
            wide.stride(0),
            real.stride(0),
            geometry.topk,
            MODE=self.mode,
            POOL=geometry.pool_size,
            PAGE=geometry.page_size,
            WIDE=geometry.wide_table,
            CONTEXT_PER_REQUEST=out.layout["paged_mqa_ctx_lens_2d"].alias is None,
            SHARES=division.shares,
            BLOCK=division.block,
            LANES=min(REQUEST_LANES, triton.next_power_of_2(batch)),
            DRAFT_LANES=_draft_lanes(self.mode, geometry.draft_tokens),
            GROUP=division.group,
        )


class Decode(InGraph):
    """Contract 1.1."""

    mode = DECODE


class TargetVerify(InGraph):
    """Contract 1.2."""

    mode = VERIFY


class DraftExtend(InGraph):
    """Contract 1.3, static and ragged alike."""

    mode = EXTEND
