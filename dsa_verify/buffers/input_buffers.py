"""InputBuffers: the static input buffers, and the step that writes one round into them on the device.

A chunk of rounds is uploaded at once as rows of packed int32; `step` picks the next row by a device counter, copies
lengths and requests into the subject's and the oracle's own input buffers, and moves remapped requests to other
pages. No host value is read, so the step can be captured in a graph and replayed thousands of times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import torch

from dsa_verify.buffers.arena import TORCH_DTYPES
from dsa_verify.buffers.input_memory import InputMemory
from dsa_verify.buffers.region import Control
from dsa_verify.buffers.tail_reset import PaddedInputFiller
from dsa_verify.contract.geometry import FAR, Geometry
from dsa_verify.contract.round_table import PAGE_ID_MULTIPLIER, Array, RoundTable, page_ordinals
from dsa_verify.contract.static_inputs import PAD_REQUEST
from dsa_verify.contract.subject import Inputs
from dsa_verify.contract.system import System

_MOVE_WORDS: Final = 4  # row, ordinal of its first page, origin, pages taken from there


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Each piece of a round lies here in its packed row: drawn inputs first, then what judge and poison read."""

    inputs: dict[str, slice]
    live_tokens: slice
    live_candidates: slice
    token_rows: slice
    row_request: slice
    moves: slice
    raw: slice
    seed: slice
    poison: slice
    width: int

    @classmethod
    def of(cls, drawn: Sequence[str], batch: int, tokens: int, remaps: int) -> _Columns:
        sizes = dict.fromkeys(drawn, batch) | {
            "live_tokens": batch,
            "live_candidates": batch,
            "token_rows": 1,
            "row_request": tokens,
            "moves": _MOVE_WORDS * remaps,
            "raw": 1,
            "seed": 1,
            "poison": 1,
        }
        ends: list[int] = np.cumsum(list(sizes.values())).tolist()
        pieces = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
        inputs = {name: pieces.pop(name) for name in drawn}
        return cls(inputs=inputs, width=ends[-1], **pieces)


class InputBuffers:
    """Inputs for buckets up to `widest` on `device`, the subject's in the form that `geometry` asks for, the oracle's
    plain. `guards`: around the subject's, and in their gaps.

    `capacity`: rounds of one upload; `remap_slots`: remapped requests of one round at most; `skip_tail_reset`: inputs
    of the subject whose pad tails are never reset, a defect to be found.
    """

    def __init__(
        self,
        system: System,
        geometry: Geometry,
        widest: int,
        device: torch.device,
        *,
        capacity: int,
        remap_slots: int,
        skip_tail_reset: Collection[str] = (),
    ):
        self.geometry, self.widest, self._device = geometry, widest, device
        self._specs = system.inputs(geometry)
        self._derive = system.derive
        self._drawn = [spec.name for spec in self._specs if spec.drawn]
        tokens = system.capacity(geometry, widest)
        self._columns = _Columns.of(self._drawn, widest, tokens, remap_slots)
        self._packed = torch.zeros((capacity, self._columns.width), dtype=torch.int32, device=device)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.round_index = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._pages = torch.arange(geometry.pages_per_row, device=device)
        self._offsets = torch.arange(geometry.allocator_page, device=device)
        self._memory = InputMemory(device)
        self._subject = self._inputs(system, self._memory, geometry.input_view)
        self.guards = self._memory.guards
        self._oracle = self._inputs(system, InputMemory(device), "plain")
        self._filler = PaddedInputFiller(self._specs, self._subject.tensors(), skip_tail_reset=skip_tail_reset)
        self._oracle_filler = PaddedInputFiller(self._specs, self._oracle.tensors())
        self._current: dict[int, torch.Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Put the inputs into the state in which engines capture: all pad rows (contract 0.2), no round begun."""
        self._cursor.fill_(-1)
        self.round_index.fill_(-1)
        for inputs in (self._subject, self._oracle):
            tensors = inputs.tensors()
            for spec in self._specs:
                tensors[spec.name].fill_(spec.pad)

    def inputs(self, bucket: int) -> tuple[Inputs, Inputs]:
        """Return (subject's, oracle's) views of `bucket`."""
        return self._view(self._subject, bucket), self._view(self._oracle, bucket)

    def control(self, bucket: int) -> tuple[Control, torch.Tensor]:
        """Return what the judge reads of the last round of `bucket`, and the poison (int32 [1]) of that round."""
        row, columns = self._row(bucket), self._columns
        control = {field.name: row[getattr(columns, field.name)] for field in dataclasses.fields(Control)}
        return Control(**control), row[columns.poison]

    def upload(self, table: RoundTable) -> None:
        """Make row 0 of `table` the next round."""
        packed = np.concatenate(
            [
                *(table.drawn(name) for name in self._drawn),
                table.live_tokens,
                table.live_candidates,
                table.token_rows[:, None],
                table.row_request,
                *_moves(self.geometry, table),
                table.raw[:, None],
                table.seed[:, None],
                table.poison[:, None],
            ],
            axis=1,
        ).astype(np.int32)
        self._packed[: len(table)].copy_(torch.from_numpy(packed))
        self._cursor.fill_(-1)

    def step(self, bucket: int) -> None:
        """Write the next round into the inputs of `bucket`; asynchronous and capturable.

        The subject's inputs go through what an engine does: the tails that a smaller batch leaves stale are poisoned,
        then reset.
        """
        columns = self._columns
        self._memory.reset_gaps()
        self._cursor.add_(1)
        self.round_index.add_(1)
        row = self._row(bucket)
        torch.index_select(self._packed, 0, self._cursor, out=row.view(1, -1))
        if columns.moves.stop > columns.moves.start:
            self._move(*row[columns.moves].long().view(_MOVE_WORDS, -1))
        sources = {name: row[piece][:bucket] for name, piece in columns.inputs.items()}
        if self._derive is not None:
            table = self._view(self._oracle, bucket).req_to_token
            sources |= self._derive(self.geometry, sources, table, row[columns.seed].long())
        raw = row[columns.raw]
        self._filler.fill_from(sources, raw, bucket, poison=True)
        if self._derive is not None:
            self._oracle_filler.fill_from(sources, raw, bucket)
            return
        for spec, tensor in zip(self._specs, self._views(self._oracle, bucket).values(), strict=True):
            tensor.copy_(sources[spec.name])  # whose pad rows a table has filled already

    def _row(self, bucket: int) -> torch.Tensor:
        if bucket not in self._current:
            self._current[bucket] = torch.zeros(self._columns.width, dtype=torch.int32, device=self._device)
        return self._current[bucket]

    def _move(self, rows: torch.Tensor, ordinals: torch.Tensor, origins: torch.Tensor, shared: torch.Tensor) -> None:
        """Give new pages to `rows`, the first `shared` of which are those that `origins` still have."""
        starts = self._page_starts(ordinals)
        taken = self._oracle.req_to_token[:, :: self.geometry.allocator_page].index_select(0, origins)
        slots = self._slots(rows, torch.where(self._pages < shared[:, None], taken, starts))
        for inputs in (self._subject, self._oracle):
            inputs.req_to_token.index_copy_(0, rows, slots)

    def _page_starts(self, ordinals: torch.Tensor) -> torch.Tensor:
        """Return the first slot of each page of rows of their own, int64 [rows, pages], as rounds.token_slots does."""
        geometry = self.geometry
        ids = geometry.first_page + (ordinals[:, None] + self._pages) * PAGE_ID_MULTIPLIER % geometry.page_id_space
        return ids * geometry.allocator_page

    def _slots(self, rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return int32 [rows, token columns]; 0 of the pad request."""
        slots = (starts[:, :, None] + self._offsets).flatten(1)[:, : self.geometry.token_columns]
        return slots.to(torch.int32) * (rows != PAD_REQUEST)[:, None]

    def _inputs(self, system: System, memory: InputMemory, form: str) -> Inputs:
        geometry = self.geometry
        of_batch = "plain" if form == FAR else form
        tensors = {
            spec.name: memory.tensor(
                spec.name,
                spec.shape(self.widest),
                TORCH_DTYPES[spec.dtype],
                of_batch,
                spec.high - 1,
                columns_apart=spec.columns_apart,
            )
            # Those with columns apart first: the smallest strides are theirs, whose memory grows with them most.
            for spec in sorted(self._specs, key=lambda spec: not spec.columns_apart)
        }
        for name, make in system.constants.items():
            made = make(geometry, self._device)
            tensors[name] = memory.tensor(name, tuple(made.shape), made.dtype, "plain", 0).copy_(made)
        shape = (geometry.request_rows, geometry.token_columns)
        table = memory.tensor("req_to_token", shape, torch.int32, form, geometry.slots - 1)
        order = (*(spec.name for spec in self._specs), *system.constants)
        inputs = Inputs.of({"req_to_token": table} | {name: tensors[name] for name in order})
        rows = torch.arange(geometry.request_rows, device=self._device)
        for part in rows.split(256):  # the intermediate is int64 and several times the table
            starts = self._page_starts(part * geometry.pages_per_row)
            inputs.req_to_token[part[0] : part[-1] + 1] = self._slots(part, starts)
        return inputs

    def _view(self, inputs: Inputs, bucket: int) -> Inputs:
        return inputs.replace(**self._views(inputs, bucket))

    def _views(self, inputs: Inputs, bucket: int) -> dict[str, torch.Tensor]:
        """Return the rows of `bucket` of each input that has rows of the batch, in the specifications' order."""
        tensors = inputs.tensors()
        return {spec.name: tensors[spec.name].narrow(spec.axis, 0, bucket * spec.rows) for spec in self._specs}


def _moves(geometry: Geometry, table: RoundTable) -> tuple[Array, Array, Array, Array]:
    """Return what `_move` needs of each remap, [M, R] each. Where there is none the pad request stays where it is."""
    rows = np.maximum(table.remap_rows, PAD_REQUEST)
    return rows, page_ordinals(geometry, rows, table.remap_generations), table.remap_origins, table.remap_pages
