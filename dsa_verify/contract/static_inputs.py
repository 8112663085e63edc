"""StaticInput describes an input buffer that a system captures: its shape, pad value, and where live rows come from.

Engines keep one set of such buffers for all buckets and reset the tail of each before a padded replay
(contract 0.2, 7.5). `buffers/input_buffers.py` allocates and fills them, `buffers/tail_reset.py` resets them.
"""

from __future__ import annotations

import dataclasses
from typing import Final

PAD_REQUEST: Final = 0  # the request row of every pad row
KV_WORDS: Final = 4  # int32 words of one token in the pools of dcp: 16 bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StaticInput:
    """One tensor of `Inputs`. `name` is its name there, and that of a column of RoundTable if it is `drawn`, else it is
    computed on the device (buffers/derived_inputs.py). Batch rows own `rows` consecutive entries along dimension
    `axis`, each of shape `item`; the rest of a padded replay holds `pad`. `low` <= v < `high`: the legal live values,
    of which a poisoned tail is made. `columns_apart`: whether a strided view has gaps between the elements of a row,
    too, which no contract promises to be adjacent.

    What is drawn is a count, one a request, that a round says under this name (`Round.lens`), unless it is not `said`;
    all are `pad` where it does not, and it must if the count is `needed`. `limit`: what messages call the greatest
    value. `of_row`: whether the value belongs to the request row, so that all batch rows of it have the same.
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
    said: bool = True
    needed: bool = False
    limit: str = "the limit"
    of_row: bool = False

    def shape(self, batch: int) -> tuple[int, ...]:
        """Return the shape for a batch of `batch` requests."""
        return (*self.leading, batch * self.rows, *self.item)

    @property
    def axis(self) -> int:
        """Return the dimension that batch rows lie along."""
        return len(self.leading)
