"""PaddedOracle: DSV4-style metadata at its full width, pad rows included, in plain torch (contract 7.1, 7.2).

Three readings of the contract. Lengths that a consumer reads as unsigned (`swa_topk_lengths`, `c*_len_*`) are clamped
below at 0, which shows only in rows of draft-extend that are shorter than the draft (published code lets them pass);
`seq_lens_casual` and `positions_casual` are not, as the contract says. Indices made from `page_table` end where that
table does, which matters where a length passes the captured width or the table is a placeholder. The replay floor of a
request is also the valid_from of its draft block: no context lies before it.
"""

from __future__ import annotations

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.padded import LOW_RATIOS
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.systems.padded import token_rows


class PaddedOracle:
    """Contract 7.1 in every `padded_mode`, all of it in the graph."""

    name = "oracle"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        """Keeps `buffers`; writes down which request each token row belongs to and how far it is from its length."""
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        self._write_locations, self._full_to_swa = inputs.out_cache_loc, inputs.full_to_swa
        device, per_request = inputs.seq_lens.device, token_rows(geometry)
        row = torch.arange(buffers.layout.tokens, device=device)
        self._owner = row // per_request
        ahead = row % per_request + 1
        if geometry.padded_mode == "decode":
            ahead = torch.zeros_like(row)
        elif geometry.padded_mode == "draft_extend":
            ahead -= geometry.draft_tokens
        self._ahead = ahead
        self._window = torch.arange(geometry.window, device=device)
        self._topk = torch.arange(geometry.topk, device=device)

    def before_replay(self) -> None:
        """Do nothing: everything is in the graph."""

    def in_graph(self) -> None:
        """All values are int64 until they are stored."""
        geometry, inputs, out = self._geometry, self._inputs, self._buffers
        prefix = inputs.seq_lens.long()[self._owner]
        request = inputs.req_pool_indices.long()[self._owner]
        casual = prefix + self._ahead
        out["seq_lens_casual"].copy_(casual)
        out["positions_casual"].copy_(casual - 1)
        out["raw_out_loc"].copy_(self._write_locations)
        width = out["page_table"].shape[1]
        first_slots = inputs.req_to_token[:, : width * geometry.page_size : geometry.page_size]
        pages = first_slots.index_select(0, request).long() // geometry.page_size
        out["page_table"].copy_(pages)
        floor = torch.full_like(prefix, geometry.replay_floor)
        if "replay_floors" in inputs.own:
            floor = inputs.replay_floors.long()[self._owner]
        if geometry.padded_mode == "draft_block":
            self._write_block(prefix, request, floor)
        else:
            self._write_window(casual - 1, request, floor)
        lengths = casual.clamp(min=0)
        self._write_sparse("c4", casual, lengths // geometry.sparse_ratio, geometry.sparse_ratio, unfinished=0)
        self._write_dense(casual, lengths // geometry.dense_ratio, pages)
        if geometry.low_ratios:
            for ratio in LOW_RATIOS:
                self._write_sparse(f"c{ratio}", casual, lengths // ratio, ratio, unfinished=-1)
                self._write_full_positions(f"c{ratio}", pages, ratio)

    def _write_window(self, position: torch.Tensor, request: torch.Tensor, floor: torch.Tensor) -> None:
        """The window that ends at each row's own position, the newest token first."""
        geometry, out = self._geometry, self._buffers
        seen = position[:, None] - self._window
        slots = self._inputs.req_to_token[request[:, None], seen.clamp(min=0)].long()
        kept = torch.where(seen >= floor[:, None], self._full_to_swa[slots], -1)
        self._store_padded("swa_page_indices", kept)
        above_floor = (position + 1 - floor).clamp(min=0)
        out["swa_topk_lengths"].copy_(torch.minimum((position + 1).clamp(0, geometry.window), above_floor))

    def _write_block(self, prefix: torch.Tensor, request: torch.Tensor, floor: torch.Tensor) -> None:
        """The end of the prefix, the oldest token first, then the whole block; the same in each row of a request."""
        geometry, out = self._geometry, self._buffers
        block = token_rows(geometry)
        context = torch.minimum(prefix.clamp(max=geometry.window), (prefix - floor).clamp(min=0))
        index = torch.arange(geometry.window + block, device=prefix.device)
        seen = (prefix - context)[:, None] + index
        drafted = index - context[:, None]
        last_column = self._inputs.req_to_token.shape[1] - 1
        from_prefix = self._inputs.req_to_token[request[:, None], seen.clamp(max=last_column)].long()
        from_block = self._write_locations[self._owner[:, None] * block + drafted.clamp(0, block - 1)]
        translated = self._full_to_swa[torch.where(drafted < 0, from_prefix, from_block)]
        self._store_padded("swa_page_indices", torch.where(drafted < block, translated, -1))
        out["swa_topk_lengths"].copy_(context + block)

    def _write_sparse(
        self, name: str, casual: torch.Tensor, groups: torch.Tensor, ratio: int, *, unfinished: int
    ) -> None:
        out = self._buffers
        self._write_groups(name, casual, groups, ratio, unfinished)
        out[f"{name}_sparse_lengths"].copy_(groups.clamp(1, self._geometry.topk))
        out[f"{name}_sparse_indices"].fill_(-1)

    def _write_dense(self, casual: torch.Tensor, groups: torch.Tensor, pages: torch.Tensor) -> None:
        """Every finished group of the table's pages, in order."""
        ratio = self._geometry.dense_ratio
        self._write_groups("c128", casual, groups, ratio, unfinished=0)
        entries = self._entries(pages, ratio)
        index = torch.arange(entries.shape[1], device=entries.device)
        self._store_padded("c128_page_indices", torch.where(index < groups[:, None], entries, -1))

    def _write_full_positions(self, name: str, pages: torch.Tensor, ratio: int) -> None:
        """Write what stands in for an indexer that is skipped: the first positions of all."""
        lengths = self._buffers[f"{name}_sparse_lengths"]
        entries = self._entries(pages, ratio)[:, : self._geometry.topk]
        index = self._topk[: entries.shape[1]]
        kept = index < lengths[:, None]
        self._store_padded(f"{name}_full_indices", torch.where(kept, entries, -1))
        self._store_padded(f"{name}_full_raw_indices", torch.where(kept, index, -1))

    def _write_groups(self, name: str, casual: torch.Tensor, groups: torch.Tensor, ratio: int, unfinished: int) -> None:
        out = self._buffers
        if f"{name}_len_raw" in out:
            out[f"{name}_len_raw"].copy_(groups)
        out[f"{name}_len_clamped"].copy_(groups.clamp(min=1))
        finished = torch.remainder(casual, ratio) == 0
        out[f"{name}_out_loc"].copy_(torch.where(finished, self._write_locations // ratio, unfinished))

    def _entries(self, pages: torch.Tensor, ratio: int) -> torch.Tensor:
        """int64 [T, pages * n]: the compressed entries of each page of [T, pages], n = page_size / ratio of them."""
        count = self._geometry.page_size // ratio
        within = torch.arange(count, device=pages.device)
        return (pages[:, :, None] * count + within).flatten(1)

    def _store_padded(self, name: str, values: torch.Tensor) -> None:
        """`values`, and -1 in the columns that the field has beyond them."""
        field = self._buffers[name]
        field[:, : values.shape[1]].copy_(values)
        field[:, values.shape[1] :].fill_(-1)
