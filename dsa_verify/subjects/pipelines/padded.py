"""The optimised DSV4-style metadata: every tensor over its full width, all in the graph, so that a padded replay needs
nothing of the host but the padded input slots (contract 7.1, 7.2)."""

from __future__ import annotations

from typing import Final

import torch
import triton

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.padded import LOW_RATIOS, page_columns
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.pipelines.padded_kernel import BLOCK, DECODE, EXTEND, VERIFY, low_ratio_kernel, padded_kernel
from dsa_verify.systems.padded import token_rows

COLUMN_BLOCK: Final = 512
# Programs to aim for: about four a multiprocessor of a large GPU, so that a few wide rows are spread over several.
PROGRAMS: Final = 528
# The interpreter pays by the operation, not by the element: there one program takes many rows at once.
INTERPRETED_GROUP: Final = 256

_MODES: Final = {"decode": DECODE, "verify": VERIFY, "draft_block": BLOCK, "draft_extend": EXTEND}


class Padded:
    """Contract 7.1 in every `padded_mode`.

    The contract lets lengths of draft-extend rows before a request's first token go below 0. Those that a consumer
    reads as unsigned (`swa_topk_lengths`, `c*_len_*`) stop at 0 here; `seq_lens_casual` and `positions_casual` do not.
    """

    name = "triton"
    clamp = True

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        self._write_locations, self._full_to_swa = inputs.out_cache_loc, inputs.full_to_swa
        # One for all is the same element again and again.
        floor = torch.full((1,), geometry.replay_floor, dtype=torch.int32, device=inputs.seq_lens.device)
        self._floors = inputs.own.get("replay_floors", floor.expand(buffers.layout.bucket))

    def before_replay(self) -> None:
        pass

    def in_graph(self) -> None:
        geometry, inputs, out = self._geometry, self._inputs, self._buffers
        wide = ("page_table", "swa_page_indices", "c4_sparse_indices", "c128_page_indices")
        grid, group, columns = self._division(max(out[name].shape[1] for name in wide))
        padded_kernel[grid](
            inputs.seq_lens,
            inputs.req_pool_indices,
            inputs.req_to_token,
            self._write_locations,
            self._full_to_swa,
            self._floors,
            out["page_table"],
            out["raw_out_loc"],
            out["seq_lens_casual"],
            out["positions_casual"],
            out["swa_page_indices"],
            out["swa_topk_lengths"],
            out["c4_len_raw"],
            out["c4_len_clamped"],
            out["c4_out_loc"],
            out["c4_sparse_lengths"],
            out["c4_sparse_indices"],
            out["c128_len_raw"],
            out["c128_len_clamped"],
            out["c128_out_loc"],
            out["c128_page_indices"],
            *self._sizes(),
            out["swa_page_indices"].shape[1],
            out["c4_sparse_indices"].shape[1],
            out["c128_page_indices"].shape[1],
            geometry.window,
            self._floors.stride(0),
            MODE=_MODES[geometry.padded_mode],
            CLAMP=self.clamp,
            PAGE=geometry.page_size,
            SPARSE=geometry.sparse_ratio,
            DENSE=geometry.dense_ratio,
            GROUP=group,
            COLUMNS=columns,
        )
        for ratio in LOW_RATIOS if geometry.low_ratios else ():
            self._launch_low_ratio(ratio)

    def _launch_low_ratio(self, ratio: int) -> None:
        geometry, inputs, out, name = self._geometry, self._inputs, self._buffers, f"c{ratio}"
        width = out[f"{name}_sparse_indices"].shape[1]
        grid, group, columns = self._division(width)
        low_ratio_kernel[grid](
            inputs.seq_lens,
            inputs.req_pool_indices,
            inputs.req_to_token,
            self._write_locations,
            out[f"{name}_len_clamped"],
            out[f"{name}_out_loc"],
            out[f"{name}_sparse_lengths"],
            out[f"{name}_sparse_indices"],
            out[f"{name}_full_indices"],
            out[f"{name}_full_raw_indices"],
            *self._sizes(),
            width,
            MODE=_MODES[geometry.padded_mode],
            CLAMP=self.clamp,
            PAGE=geometry.page_size,
            RATIO=ratio,
            GROUP=group,
            COLUMNS=columns,
        )

    def _sizes(self) -> tuple[int, ...]:
        """The arguments that both kernels take after their pointers."""
        geometry, inputs = self._geometry, self._inputs
        return (
            inputs.seq_lens.stride(0),
            inputs.req_pool_indices.stride(0),
            inputs.req_to_token.stride(0),
            self._write_locations.stride(0),
            self._buffers.layout.tokens,
            token_rows(geometry),
            page_columns(geometry),
            geometry.topk,
        )

    def _division(self, width: int) -> tuple[tuple[int, int], int, int]:
        """(grid, rows of a program, columns that it takes at a time) for tables of at most `width` columns."""
        rows = self._buffers.layout.tokens
        columns = min(COLUMN_BLOCK, triton.next_power_of_2(width))
        if not self._full_to_swa.is_cuda:
            group = min(INTERPRETED_GROUP, triton.next_power_of_2(rows))
            return (triton.cdiv(rows, group), 1), group, columns
        return (rows, max(1, min(triton.cdiv(width, columns), PROGRAMS // rows))), 1, columns
