"""StaticInput describes an input buffer that a system captures: its shape, pad value, and where live rows come from.

Engines keep one set of such buffers for all buckets and reset the tail of each before a padded replay
(contract 0.2, 7.5). `buffers/input_buffers.py` allocates and fills them, `buffers/tail_reset.py` resets them.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import has_floors, pooled_indexer
from dsa_verify.contract.round_table import PAD_REQUEST, rows_per_request, seq_len_fill

KV_WORDS: Final = 4  # int32 words of one token in the pools of dcp: 16 bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StaticInput:
    """One field of `Inputs`. `name` is that of the field, and of a column of RoundTable if it is `drawn`, else it is
    computed on the device (expand.py). Batch rows own `rows` consecutive entries along dimension `axis`, each of shape
    `item`; the rest of a padded replay holds `pad`. `low` <= v < `high`: the legal live values, of which a poisoned
    tail is made. `columns_apart`: whether a strided view has gaps between the elements of a row, too, which no contract
    promises to be adjacent.
    """

    name: str
    dtype: str
    pad: int = 0
    low: int = 0
    high: int = 1
    rows: int = 1
    leading: tuple[int, ...] = ()
    item: tuple[int, ...] = ()
    drawn: bool = True
    columns_apart: bool = False

    def shape(self, batch: int) -> tuple[int, ...]:
        """The shape for a batch of `batch` requests."""
        return (*self.leading, batch * self.rows, *self.item)

    @property
    def axis(self) -> int:
        """The dimension that batch rows lie along."""
        return len(self.leading)


def static_inputs(system: str, geometry: Geometry) -> tuple[StaticInput, ...]:
    """The inputs of `system` that have rows of the batch; `req_to_token` and constants are not among them."""
    n, rows = geometry.draft_tokens, geometry.request_rows
    found = [
        StaticInput(
            name="seq_lens",
            dtype=geometry.index_dtype,
            pad=seq_len_fill(system, geometry),
            low=1,
            high=geometry.context + 1,
        ),
        StaticInput(name="req_pool_indices", dtype=geometry.index_dtype, pad=PAD_REQUEST, low=1, high=rows),
    ]
    if system == "draft_extend":
        found.append(StaticInput(name="extend_lens", dtype="int32", pad=n, high=n + 1))
        if pooled_indexer(geometry):
            found.append(StaticInput(name="accept_lens", dtype="int32", pad=n, low=1, high=n + 1))
    if system == "ragged_verify":
        found.append(StaticInput(name="verify_lens", dtype="int32", low=1, high=n + 1))
    if has_floors(system, geometry):
        found.append(
            StaticInput(name="replay_floors", dtype="int32", pad=geometry.replay_floor, high=geometry.context + 1)
        )
    if system in ("padded", "dcp"):
        # A token that is not to be stored has slot 0, of which the contract speaks in 0.1, 7.1 and 8.2. Other engines'
        # -1 is no location there: the owner of -1 would be the last rank, and it would store at row -1 (8.1, 8.2).
        per_request = rows_per_request(system, geometry)
        slots = geometry.slots
        found.append(StaticInput(name="out_cache_loc", dtype="int64", low=1, high=slots, rows=per_request, drawn=False))
    if system == "dcp":
        size, heads, dim = geometry.dcp_size, geometry.heads, geometry.head_dim
        found += [
            StaticInput(name="kv_rows", dtype="int32", high=1 << 30, item=(KV_WORDS,), drawn=False),
            StaticInput(
                name="selected_positions",
                dtype="int32",
                pad=-1,
                high=geometry.context,
                item=(geometry.topk,),
                drawn=False,
                columns_apart=True,
            ),
            # No count comes with it: what is not -1 is selected, wherever in its row it stands (contract 8.3).
            StaticInput(
                name="selection",
                dtype="int32",
                pad=-1,
                low=1,
                high=geometry.slots,
                item=(geometry.topk,),
                drawn=False,
                columns_apart=True,
            ),
            StaticInput(
                name="partial_out",
                dtype="float32",
                low=1,
                high=1 << 20,
                leading=(size,),
                item=(heads, dim),
                drawn=False,
            ),
            StaticInput(
                name="partial_lse",
                dtype="float32",
                low=1,
                high=1 << 20,
                leading=(size,),
                item=(heads,),
                drawn=False,
                columns_apart=True,
            ),
        ]
    return tuple(found)
