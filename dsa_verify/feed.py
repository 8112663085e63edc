"""Feed: the static input buffers, and the step that writes one round into them on the device.

A chunk of rounds is uploaded at once as rows of packed int32; `step` picks the next row by a device counter, copies
lengths and requests into the subject's and the oracle's own input buffers, and moves remapped requests to other
pages. No host value is read, so the step can be captured in a graph and replayed thousands of times.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
import torch

from dsa_verify.geometry import DISJOINT_GENERATIONS, Geometry
from dsa_verify.regions import Control
from dsa_verify.rounds import PAD_REQUEST, PAGE_ID_MULTIPLIER, RoundTable, seq_len_fill
from dsa_verify.scenario import pooled_indexer
from dsa_verify.subject import Inputs

_INDEX_DTYPES: Final = {"int64": torch.int64, "int32": torch.int32}
_STRIDE: Final = 2  # of a strided input view
_OFFSET: Final = 1  # elements before an offset view: less than the 16 bytes that compilers hope for
_ROW_SLACK: Final = 64  # columns that a strided req_to_token row has beyond its width


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Where each piece of a round lies in its packed row."""

    seq_lens: slice
    requests: slice
    extend_lens: slice
    accept_lens: slice
    live_tokens: slice
    live_candidates: slice
    token_rows: slice
    row_request: slice
    remap_rows: slice
    remap_generations: slice
    poison: slice
    width: int

    @classmethod
    def of(cls, batch: int, tokens: int, remaps: int) -> _Columns:
        sizes = (batch, batch, batch, batch, batch, batch, 1, tokens, remaps, remaps, 1)
        ends: list[int] = np.cumsum(sizes).tolist()
        names = (field.name for field in dataclasses.fields(cls) if field.name != "width")
        pieces: dict[str, Any] = {
            name: slice(end - size, end) for name, size, end in zip(names, sizes, ends, strict=True)
        }
        return cls(**pieces, width=ends[-1])


class Feed:
    """Inputs for `buckets` on `device`, the subject's in the form that `geometry` asks for, the oracle's plain.

    `capacity`: rounds of one upload; `remap_slots`: remapped requests of one round at most.
    """

    def __init__(
        self, system: str, geometry: Geometry, widest: int, device: torch.device, *, capacity: int, remap_slots: int
    ):
        self.geometry, self._widest, self._device = geometry, widest, device
        self._extends = system == "draft_extend"
        self._accepts = self._extends and pooled_indexer(geometry)
        self._fill = seq_len_fill(system, geometry)
        self._columns = _Columns.of(widest, widest * geometry.draft_tokens, remap_slots)
        self._packed = torch.zeros((capacity, self._columns.width), dtype=torch.int32, device=device)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.round_index = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._pages = torch.arange(geometry.pages_per_row, device=device)
        self._offsets = torch.arange(geometry.allocator_page, device=device)
        self._subject = self._inputs(geometry.input_view)
        self._oracle = self._inputs("plain")
        self._current: dict[int, torch.Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """The state in which engines capture: every row a pad row (contract 0.2), no round begun."""
        self._cursor.fill_(-1)
        self.round_index.fill_(-1)
        for inputs in (self._subject, self._oracle):
            inputs.seq_lens.fill_(self._fill)
            inputs.req_pool_indices.fill_(PAD_REQUEST)
            for lens in (inputs.extend_lens, inputs.accept_lens):
                if lens is not None:
                    lens.fill_(self.geometry.draft_tokens)

    def inputs(self, bucket: int) -> tuple[Inputs, Inputs]:
        """(subject's, oracle's) views of `bucket`."""
        return self._view(self._subject, bucket), self._view(self._oracle, bucket)

    def control(self, bucket: int) -> tuple[Control, torch.Tensor]:
        """What the judge reads of the last round of `bucket`, and the poison (int32 [1]) of that round."""
        row, columns = self._row(bucket), self._columns
        control = Control(
            live_tokens=row[columns.live_tokens],
            live_candidates=row[columns.live_candidates],
            token_rows=row[columns.token_rows],
            row_request=row[columns.row_request],
        )
        return control, row[columns.poison]

    def upload(self, table: RoundTable) -> None:
        """Make row 0 of `table` the next round."""
        packed = np.concatenate(
            [
                table.seq_lens,
                table.requests,
                table.extend_lens,
                table.accept_lens,
                table.live_tokens,
                table.live_candidates,
                table.token_rows[:, None],
                table.row_request,
                table.remap_rows,
                table.remap_generations,
                table.poison[:, None],
            ],
            axis=1,
        ).astype(np.int32)
        self._packed[: len(table)].copy_(torch.from_numpy(packed))
        self._cursor.fill_(-1)

    def step(self, bucket: int) -> None:
        """Write the next round into the inputs of `bucket`; asynchronous and capturable."""
        columns = self._columns
        self._cursor.add_(1)
        self.round_index.add_(1)
        row = self._row(bucket)
        torch.index_select(self._packed, 0, self._cursor, out=row.view(1, -1))
        for inputs in (self._subject, self._oracle):
            inputs.seq_lens[:bucket].copy_(row[columns.seq_lens][:bucket])
            inputs.req_pool_indices[:bucket].copy_(row[columns.requests][:bucket])
            if inputs.extend_lens is not None:
                inputs.extend_lens[:bucket].copy_(row[columns.extend_lens][:bucket])
            if inputs.accept_lens is not None:
                inputs.accept_lens[:bucket].copy_(row[columns.accept_lens][:bucket])
        if columns.remap_rows.stop > columns.remap_rows.start:
            self._remap(row[columns.remap_rows].long(), row[columns.remap_generations].long())

    def _row(self, bucket: int) -> torch.Tensor:
        if bucket not in self._current:
            self._current[bucket] = torch.zeros(self._columns.width, dtype=torch.int32, device=self._device)
        return self._current[bucket]

    def _remap(self, rows: torch.Tensor, generations: torch.Tensor) -> None:
        slots = self._token_slots(rows, generations)
        # Row -1 stands for no remap: it goes to the row past the last, which no request can name.
        target = torch.where(rows < 0, self.geometry.request_rows, rows)
        for inputs in (self._subject, self._oracle):
            inputs.req_to_token.index_copy_(0, target, slots)

    def _token_slots(self, rows: torch.Tensor, generations: torch.Tensor) -> torch.Tensor:
        """rounds.token_slots on the device, int32."""
        geometry = self.geometry
        base = (generations % DISJOINT_GENERATIONS) * geometry.request_rows + rows
        ordinal = base[:, None] * geometry.pages_per_row + self._pages
        page_id = 1 + (ordinal * PAGE_ID_MULTIPLIER) % geometry.page_id_space
        slots = (page_id[:, :, None] * geometry.allocator_page + self._offsets).flatten(1)
        slots = slots[:, : geometry.token_columns].to(torch.int32)
        return torch.where(rows[:, None] == PAD_REQUEST, torch.zeros_like(slots), slots)

    def _inputs(self, form: str) -> Inputs:
        geometry, dtype = self.geometry, _INDEX_DTYPES[self.geometry.index_dtype]
        extend = self._vector(torch.int32, form) if self._extends else None
        inputs = Inputs(
            seq_lens=self._vector(dtype, form),
            req_pool_indices=self._vector(dtype, form),
            req_to_token=self._token_table(form),
            extend_lens=extend,
            accept_lens=self._vector(torch.int32, form) if self._accepts else None,
        )
        rows = torch.arange(geometry.request_rows, device=self._device)
        for part in rows.split(256):  # the intermediate is int64 and several times the table
            inputs.req_to_token[part[0] : part[-1] + 1] = self._token_slots(part, torch.zeros_like(part))
        return inputs

    def _vector(self, dtype: torch.dtype, form: str) -> torch.Tensor:
        size = self._widest
        if form == "strided":
            return torch.zeros(size * _STRIDE, dtype=dtype, device=self._device)[::_STRIDE]
        if form == "offset":
            return torch.zeros(size + _OFFSET, dtype=dtype, device=self._device)[_OFFSET:]
        return torch.zeros(size, dtype=dtype, device=self._device)

    def _token_table(self, form: str) -> torch.Tensor:
        rows, columns = self.geometry.request_rows + 1, self.geometry.token_columns
        if form == "strided":
            wide = torch.zeros((rows, columns + _ROW_SLACK), dtype=torch.int32, device=self._device)
            return wide[:, :columns]
        if form == "offset":
            flat = torch.zeros(rows * columns + _OFFSET, dtype=torch.int32, device=self._device)
            return flat[_OFFSET:].view(rows, columns)
        return torch.zeros((rows, columns), dtype=torch.int32, device=self._device)

    def _view(self, inputs: Inputs, bucket: int) -> Inputs:
        extend, accept = inputs.extend_lens, inputs.accept_lens
        return Inputs(
            seq_lens=inputs.seq_lens[:bucket],
            req_pool_indices=inputs.req_pool_indices[:bucket],
            req_to_token=inputs.req_to_token[: self.geometry.request_rows],
            extend_lens=None if extend is None else extend[:bucket],
            accept_lens=None if accept is None else accept[:bucket],
        )
