"""One rank of decode context parallelism on a device of its own, with real collectives: its share of a step, the prefix
of every request gathered from all ranks, and the merge of gathered partial results (contract 8.2 to 8.4, 8.7).

Collectives gather and never add, so that sums are made in the order of the ranks and every rank gets the same bits.
Everything has fixed sizes and may be captured, collectives included, in one CUDA graph.
"""

from __future__ import annotations

import torch
import torch.distributed

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.static_inputs import KV_WORDS
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.pipelines.dcp import Dcp, PrefixRanges, pack_prefix, reorder, select_slots


def prefix_ranges(seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(starts, lengths), int64 [bs]: which positions of each request are gathered. Any rule would do that gives ragged
    ranges with starts and ends of every remainder."""
    seq_lens = seq_lens.to(torch.int64)
    starts = seq_lens // 3
    return starts, seq_lens - starts


class DcpRank(Dcp):
    """The fields of rank `rank` and the merge; `prefix`, int32 [bs * context, 4]: the gathered prefix in token order.

    The default process group has one process a rank, and each is given the inputs of the whole step, of which it uses
    its own partial results alone.
    """

    def __init__(self, rank: int):
        self._rank = rank

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        size, batch, device = geometry.dcp_size, inputs.seq_lens.shape[0], inputs.seq_lens.device
        # One row more than a share of the context: a range may begin and end within a turn of the ranks.
        rows = batch * (geometry.context // size + 2)
        self._send = torch.zeros((rows, KV_WORDS), dtype=torch.int32, device=device)
        self._received = torch.zeros((size, rows, KV_WORDS), dtype=torch.int32, device=device)
        self.prefix = torch.zeros((batch * geometry.context, KV_WORDS), dtype=torch.int32, device=device)
        self._own = [each[self._rank] for each in (inputs.partial_out, inputs.partial_lse)]
        dense = torch.contiguous_format
        gathered = [torch.zeros_like(each, memory_format=dense) for each in (inputs.partial_out, inputs.partial_lse)]
        self._inputs = inputs.replace(partial_out=gathered[0], partial_lse=gathered[1])
        self._gathered = gathered

    def in_graph(self) -> None:
        self._share(self._places[self._rank])
        select_slots(self._inputs, self._buffers["selected_slots"])
        self._gather_prefix()
        for everyone, own in zip(self._gathered, self._own, strict=True):
            _all_gather(everyone, own.contiguous())
        self._merge()

    def _gather_prefix(self) -> None:
        place, inputs = self._places[self._rank], self._inputs
        ranges = PrefixRanges.of(*prefix_ranges(inputs.seq_lens), place.size)
        pool = self._of(place, "kv_pool")
        pack_prefix(ranges, inputs.req_pool_indices, inputs.req_to_token, pool, self._send, place)
        _all_gather(self._received, self._send)
        reorder(ranges, self._received, self.prefix)


def _all_gather(everyone: torch.Tensor, own: torch.Tensor) -> None:
    """`everyone[r]` = `own` of rank r; dense."""
    # torch 2.13 renames the collective.
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    gather(everyone.flatten(0, 1), own)
