"""Selection: what the indexer would select, and what vLLM's converter makes of it, inside the graph.

vLLM keeps no wide table: a layer's attention is given slots by a kernel that looks up the selected positions in the
block table. Asked for every position of a request in order, that kernel gives the row of `page_table_1`; asked for a
top-k selection, it counts `dsa_cache_seqlens_int32`. The selections are made here, since vLLM's come from scores.
"""

from __future__ import annotations

from typing import Final

import torch
import triton

from dsa_verify.contract.geometry import Geometry
from dsa_verify.subjects.adapters.vllm import wheel

CONVERTER: Final = "vllm.v1.attention.backends.mla.sparse_utils"
TILES: Final = (128, 4096)  # fewest and most columns of a program


class Selection:
    """A selection is for `tokens` token rows. `request_of_token` int32 [tokens] and `block_table` int32 [requests,
    blocks] are vLLM's own.

    `every`: int32 [tokens, columns], the slot of each position of the row's request, -1 beyond its length. `counts`:
    int32 [tokens], how many of the row's selected positions are valid.
    """

    def __init__(self, geometry: Geometry, tokens: int, device: torch.device):
        self._convert = wheel.attribute(CONVERTER, "triton_convert_req_index_to_global_index")
        self._page, self._topk = geometry.page_size, geometry.topk
        self._tile = min(max(triton.next_power_of_2(geometry.columns), TILES[0]), TILES[1])
        width = -(-geometry.columns // self._tile) * self._tile

        def int32(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._columns = torch.arange(width, dtype=torch.int32, device=device)
        self._ranks = torch.arange(geometry.topk, dtype=torch.int32, device=device)
        self._positions, self._slots = int32(tokens, width), int32(tokens, width)
        self._chosen, self._chosen_slots = int32(tokens, geometry.topk), int32(tokens, geometry.topk)
        self.every = self._slots[:, : geometry.columns]
        self.counts = int32(tokens)

    def convert(
        self,
        request_of_token: torch.Tensor,
        block_table: torch.Tensor,
        request_lens: torch.Tensor,
        token_lens: torch.Tensor,
    ) -> None:
        """int32 [requests] and [tokens] lengths; may be captured."""
        bound = request_lens[request_of_token.long()].clamp(max=len(self._columns))
        # Rows of no request see no token, whosever table they are given.
        bound = torch.where(token_lens > 0, bound, 0).unsqueeze(1)
        self._positions.copy_(torch.where(self._columns < bound, self._columns, -1))
        self._convert(
            request_of_token,
            block_table,
            self._positions,
            BLOCK_SIZE=self._page,
            NUM_TOPK_TOKENS=self._positions.shape[1],
            BLOCK_N=self._tile,
            out=self._slots,
        )
        # The last K tokens that the row sees: with them every boundary of a page is crossed in time.
        last = token_lens.unsqueeze(1) - 1 - self._ranks
        self._chosen.copy_(last.clamp(min=-1))
        self._convert(
            request_of_token,
            block_table,
            self._chosen,
            BLOCK_SIZE=self._page,
            NUM_TOPK_TOKENS=self._topk,
            BLOCK_N=self._topk,
            return_valid_counts=True,
            out=self._chosen_slots,
            valid_counts_out=self.counts,
        )
