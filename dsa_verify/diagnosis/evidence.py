"""What a diagnosis may look at: this round, earlier ones and the capture as they must be, and what differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from dsa_verify.buffers.region import Region
from dsa_verify.contract.layout import Field, Layout, Live, Row, live_rows_name
from dsa_verify.contract.owners import Owner, OwnerOf, drawn_for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What was right in one round of one bucket. `want`: the oracle's outputs on the CPU, floats as the int32
    of their bits, one row a request for tables. `raw`: live requests. `seq_lens`, `requests`: padded to the bucket.
    `row_request`: the batch row of each token row."""

    round: int
    bucket: int
    raw: int
    seq_lens: tuple[int, ...]
    requests: tuple[int, ...]
    row_request: tuple[int, ...]
    live_tokens: tuple[int, ...]
    live_candidates: tuple[int, ...]
    token_rows: int
    poison: str
    want: dict[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def batch_row(self, field: Field, row: int) -> int | None:
        """The batch row that `row` of `field` stands for; None if it stands for none in this round."""
        if field.row is Row.TOKEN:
            return self.row_request[row] if row < self.token_rows else None
        return row if row < self.bucket else None

    def value(self, field: Field, row: int, column: int) -> int | None:
        """The right value of a live element in this round; None if it was dead or did not exist."""
        batch_row = self.batch_row(field, row) if field.row in (Row.REQUEST, Row.TOKEN) else row
        table = self.want.get(field.name)
        if batch_row is None or table is None:
            return None
        if field.column_step and field.column_start + column * field.column_step >= self._bound(field, row, batch_row):
            return None
        if field.live_token_rows and row >= self.token_rows + (1 if field.row is Row.TOKEN_PREFIX else 0):
            return None
        at = batch_row if field.one_row_per_request else row
        flat = table.reshape(table.shape[0], -1)
        if at >= flat.shape[0] or column >= flat.shape[1]:
            return None
        return int(flat[at, column])

    def _bound(self, field: Field, row: int, batch_row: int) -> int:
        """Return what the columns of `row` are live below."""
        if field.live is Live.ROWS:
            return int(self.want[live_rows_name(field.name)][row])
        return (self.live_tokens if field.live is Live.TOKENS else self.live_candidates)[batch_row]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything the diagnosis may look at: the layout, this round, earlier ones (latest last) and the capture.

    `owner_of`: whose token a slot is; by default that of the row for which this harness drew it.
    """

    layout: Layout
    now: Moment
    earlier: Sequence[Moment]
    capture: Moment
    owner_of: OwnerOf | None = None

    def owner(self, slot: int) -> Owner | None:
        """Whose token `slot` is; None if nobody's."""
        return (self.owner_of or drawn_for(self.layout.geometry))(slot)


@dataclasses.dataclass(frozen=True, slots=True)
class Element:
    """One differing element, for the explanations: what a word of it is, and what it must be."""

    field: Field
    region: Region
    row: int
    column: int
    word: int
    got: int
    want: int
