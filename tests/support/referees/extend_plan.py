"""The eager plan of an extend step with pools, planned on the host and on the device (contract 4.3).

Each planner answers two questions, because under context parallelism they are asked of different rows: `writes`, over
all rows of all ranks, which pools this chunk closes and which tokens stay behind as a tail; `gather`, over the rows of
one rank, where the pooled keys of its requests lie once their pages are concatenated. The device planner may wait for
the sizes of its results, as eager code does. Both raise UsageError for the same inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry

HostPlan = dict[str, npt.NDArray[np.integer]]
DevicePlan = dict[str, torch.Tensor]


class HostPlanner:
    """Request after request in NumPy, as an engine plans from the host copies of its lengths.

    `seq_lens` (which include the chunk), `extend_lens` and `requests` have one entry per request; `real_page_table`:
    [bs, pages] with every page of every length.
    """

    def __init__(self, geometry: Geometry):
        self._geometry = geometry

    def writes(
        self,
        seq_lens: Sequence[int],
        extend_lens: Sequence[int],
        requests: Sequence[int],
        real_page_table: npt.NDArray[np.integer],
        ranks: int = 1,
    ) -> HostPlan:
        """A row for each pool that closes (`pool_*`), and for each request with tokens left over (`tail_*`).

        int64: `pool_req`, `pool_id`, `pool_chunk_src`, `pool_write_loc`, `pool_owner_rank`, `tail_req`,
        `tail_chunk_src`; int32: `pool_n_from_tail`, `pool_tail_logical_base`, `tail_dst_logical_start`,
        `tail_n_write`. A rank writes the pools that it owns. UsageError if an extend length is not positive.
        """
        size, page = self._geometry.pool_size, self._geometry.page_size
        _check(self._geometry, list(seq_lens), list(extend_lens), real_page_table.shape[1], least_extend=1)
        pools: list[tuple[npt.NDArray[np.int64], ...]] = []
        tails: list[tuple[int, int, int, int]] = []
        offset = 0
        for b, (seq, extend, request) in enumerate(zip(seq_lens, extend_lens, requests, strict=True)):
            start = seq - extend
            ids = np.arange(start // size, seq // size, dtype=np.int64)
            # A pool that began before the chunk takes its first tokens from the tail that was left behind.
            first_token = np.maximum(ids * size, start)
            pages = real_page_table[b, ids // page * size].astype(np.int64) // size
            source = offset + first_token - start
            pools.append((np.full_like(ids, request), ids, source, first_token - ids * size, pages * page + ids % page))
            done = max(seq // size * size, start)
            if done < seq:
                tails.append((request, done, offset + done - start, seq - done))
            offset += extend
        request_, ids_, source_, from_tail, location = (np.concatenate(parts) for parts in zip(*pools, strict=True))
        tail = np.array(tails, np.int64).reshape(-1, 4)
        return {
            "pool_req": request_,
            "pool_id": ids_,
            "pool_chunk_src": source_,
            "pool_n_from_tail": from_tail.astype(np.int32),
            "pool_tail_logical_base": (ids_ * size).astype(np.int32),
            "pool_write_loc": location,
            "pool_owner_rank": np.arange(len(ids_)) % ranks,
            "tail_req": tail[:, 0],
            "tail_dst_logical_start": tail[:, 1].astype(np.int32),
            "tail_chunk_src": tail[:, 2],
            "tail_n_write": tail[:, 3].astype(np.int32),
        }

    def gather(
        self,
        seq_lens: Sequence[int],
        extend_lens: Sequence[int],
        requests: Sequence[int],
        real_page_table: npt.NDArray[np.integer],
    ) -> HostPlan:
        """The pages of all requests one after the other, and for each token row the keys it may see among them.

        All int32: `ragged_concat_page_table` [pages in all]; `ks`, `ke` (first key and one past the last),
        `pooled_seq_lens_expanded` and `ragged_paged_page_table_row_index` [token rows]; `gather_rows` [1], the keys in
        all. A request of a rank may have no token rows.
        """
        size, page = self._geometry.pool_size, self._geometry.page_size
        _check(self._geometry, list(seq_lens), list(extend_lens), real_page_table.shape[1], least_extend=0)
        tables, starts, ends, pooled, rows = [], [], [], [], []
        before = 0
        for b, (seq, extend, request) in enumerate(zip(seq_lens, extend_lens, requests, strict=True)):
            count = -(-(seq // size) // page)
            tables.append(real_page_table[b, : count * size : size] // size)
            lengths = np.arange(seq - extend + 1, seq + 1) // size
            pooled.append(lengths)
            starts.append(np.full_like(lengths, before * page))
            ends.append(np.minimum(before * page + lengths, (before + count) * page))
            rows.append(np.full_like(lengths, request))
            before += count
        named: dict[str, list[Any]] = {
            "ragged_concat_page_table": tables,
            "ks": starts,
            "ke": ends,
            "pooled_seq_lens_expanded": pooled,
            "ragged_paged_page_table_row_index": rows,
        }
        plan: HostPlan = {name: np.concatenate(parts).astype(np.int32) for name, parts in named.items()}
        plan["gather_rows"] = np.array([before * page], np.int32)
        return plan


class DevicePlanner:
    """All requests at once in PyTorch; `seq_lens`, `extend_lens` and `requests` are integer tensors [bs]."""

    def __init__(self, geometry: Geometry):
        self._geometry = geometry

    def writes(
        self,
        seq_lens: torch.Tensor,
        extend_lens: torch.Tensor,
        requests: torch.Tensor,
        real_page_table: torch.Tensor,
        ranks: int = 1,
    ) -> DevicePlan:
        """As `HostPlanner.writes`, on the device of its arguments."""
        size, page = self._geometry.pool_size, self._geometry.page_size
        _check(self._geometry, seq_lens.tolist(), extend_lens.tolist(), real_page_table.shape[1], least_extend=1)
        seq, extend, request = (tensor.to(torch.int64) for tensor in (seq_lens, extend_lens, requests))
        start = seq - extend
        chunk = extend.cumsum(0) - extend
        first = start % size
        base = start // size
        closing = seq // size - base
        consumed = (closing * size - first).clamp(min=0)
        tail = extend - consumed

        owner = torch.repeat_interleave(closing)
        j = torch.arange(owner.numel(), device=owner.device) - (closing.cumsum(0) - closing)[owner]
        opening = j == 0
        pool_id = base[owner] + j
        pages = real_page_table[owner, pool_id // page * size].to(torch.int64) // size
        left = torch.nonzero(tail > 0).squeeze(1)
        return {
            "pool_req": request[owner],
            "pool_id": pool_id,
            "pool_chunk_src": chunk[owner] + torch.where(opening, 0, j * size - first[owner]),
            "pool_n_from_tail": torch.where(opening, first[owner], 0).to(torch.int32),
            "pool_tail_logical_base": (pool_id * size).to(torch.int32),
            "pool_write_loc": pages * page + pool_id % page,
            "pool_owner_rank": torch.arange(owner.numel(), device=owner.device) % ranks,
            "tail_req": request[left],
            "tail_dst_logical_start": (start + consumed)[left].to(torch.int32),
            "tail_chunk_src": (chunk + consumed)[left],
            "tail_n_write": tail[left].to(torch.int32),
        }

    def gather(
        self,
        seq_lens: torch.Tensor,
        extend_lens: torch.Tensor,
        requests: torch.Tensor,
        real_page_table: torch.Tensor,
    ) -> DevicePlan:
        """As `HostPlanner.gather`, on the device of its arguments."""
        size, page = self._geometry.pool_size, self._geometry.page_size
        _check(self._geometry, seq_lens.tolist(), extend_lens.tolist(), real_page_table.shape[1], least_extend=0)
        seq, extend, request = (tensor.to(torch.int64) for tensor in (seq_lens, extend_lens, requests))
        counts = (seq // size + page - 1) // page
        ends = counts.cumsum(0)

        page_owner = torch.repeat_interleave(counts)
        column = torch.arange(page_owner.numel(), device=seq.device) - (ends - counts)[page_owner]
        row_owner = torch.repeat_interleave(extend)
        ordinal = torch.arange(row_owner.numel(), device=seq.device) - (extend.cumsum(0) - extend)[row_owner]
        pooled = ((seq - extend)[row_owner] + ordinal + 1) // size
        ks = (ends - counts)[row_owner] * page
        plan = {
            "ragged_concat_page_table": real_page_table[page_owner, column * size] // size,
            "ks": ks,
            "ke": torch.minimum(ks + pooled, ends[row_owner] * page),
            "pooled_seq_lens_expanded": pooled,
            "ragged_paged_page_table_row_index": request[row_owner],
            "gather_rows": ends[-1:] * page,
        }
        return {name: tensor.to(torch.int32) for name, tensor in plan.items()}


def _check(geometry: Geometry, seq_lens: list[int], extend_lens: list[int], pages: int, *, least_extend: int) -> None:
    """UsageError for a request that no planner can plan: the contract asserts these."""
    if not seq_lens:
        raise UsageError("seq_lens: 0 requests; an extend step has at least 1")
    for b, (seq, extend) in enumerate(zip(seq_lens, extend_lens, strict=True)):
        if not least_extend <= extend <= seq:
            raise UsageError(
                f"extend_lens[{b}]: {extend} is outside {least_extend}..{seq}, its sequence length; "
                "an extend length counts tokens that the sequence length includes"
            )
        if seq > pages * geometry.page_size:
            raise UsageError(
                f"seq_lens[{b}]: {seq} is beyond the {pages} pages of {geometry.page_size} tokens that "
                "real_page_table has; pass a table with every page"
            )
