"""K-pool metadata in eager PyTorch: the pooled views and the write plan of the graph modes (contract 4.1, 4.2).

Everything is derived from the raw inputs, never from another output, and may be captured in a CUDA graph: shapes are
fixed, nothing synchronises, each function writes into tensors that exist. Where the contract says 64, P is
`page_size`. A write start below 0 is undefined, so lengths must pass `System.check_lengths`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.kpool import Mode, candidates
from dsa_verify.contract.subject import Inputs


def write_pooled_lengths(geometry: Geometry, inputs: Inputs, out: torch.Tensor) -> None:
    """`pooled_cache_seqlens_int32` of decode, int32 [bs]: whole pools only, 0 possible (contract 4.1)."""
    torch.floor_divide(inputs.seq_lens, geometry.pool_size, out=out)


def write_pooled_table(geometry: Geometry, inputs: Inputs, out: torch.Tensor) -> None:
    """`pooled_real_page_table` with one row per request, int32 [bs, pooled pages], full width (contract 4.1)."""
    page = geometry.allocator_page
    first_slots = inputs.req_to_token[:, : geometry.columns : page]
    torch.index_select(first_slots, 0, inputs.req_pool_indices, out=out)
    out.floor_divide_(page)


class WritePlan:
    """The write plan of one mode over one bucket (contract 4.2); made outside capture, for its constants.

    `accept_lens`: int32 [bs], read in draft-extend only and needed there.
    """

    def __init__(self, mode: Mode, geometry: Geometry, inputs: Inputs, accept_lens: torch.Tensor | None = None):
        assert mode != "draft_extend" or accept_lens is not None, "draft_extend has accept_lens (contract 4.2)"
        self._mode, self._geometry, self._inputs, self._accept_lens = mode, geometry, inputs, accept_lens
        self._tokens = 1 if mode == "decode" else geometry.draft_tokens
        self._seen_before_first = {"decode": 1, "target_verify": 0, "draft_extend": self._tokens}[mode]
        device = inputs.seq_lens.device
        self._steps = torch.arange(1, self._tokens + 1, dtype=torch.int64, device=device)
        self._candidates = torch.arange(candidates(self._tokens, geometry), dtype=torch.int64, device=device)

    def write(self, out: Mapping[str, torch.Tensor]) -> None:
        """Fills `req` int64 [bs], `write_start` and `tail_logical_start` int32 [bs], `write_loc` int64 [bs, C];
        except in decode `seqlens_per_q` and `pool_seqlens_per_q` int32 [bs * N]; in draft-extend
        `effective_n_per_batch` int32 [bs]."""
        pool = self._geometry.pool_size
        start = self._inputs.seq_lens - self._seen_before_first
        out["req"].copy_(self._inputs.req_pool_indices)
        out["write_start"].copy_(start)
        out["tail_logical_start"].copy_(start - torch.remainder(start, pool))
        self._write_locations(start, out["write_loc"])
        if self._mode != "decode":
            lengths = start.unsqueeze(1) + self._steps
            out["seqlens_per_q"].view(-1, self._tokens).copy_(lengths)
            out["pool_seqlens_per_q"].view(-1, self._tokens).copy_(lengths.floor_divide(pool))
        if self._mode == "draft_extend":
            assert self._accept_lens is not None
            out["effective_n_per_batch"].copy_(self._accept_lens)

    def _write_locations(self, start: torch.Tensor, out: torch.Tensor) -> None:
        """Row of the pooled cache that each pool a request may close is stored to."""
        geometry = self._geometry
        pool_ids = start.floor_divide(geometry.pool_size).unsqueeze(1) + self._candidates
        # Columns count physical pages, of which a pooled page spans pool_size.
        columns = pool_ids.floor_divide(geometry.page_size).mul_(geometry.pool_size).clamp_(0, geometry.pages - 1)
        requests = self._inputs.req_pool_indices.to(torch.int64).unsqueeze(1)
        slots = self._inputs.req_to_token[requests, columns * geometry.page_size].to(torch.int64)
        pages = slots.floor_divide(geometry.allocator_page)
        torch.add(pages * geometry.page_size, torch.remainder(pool_ids, geometry.page_size), out=out)
