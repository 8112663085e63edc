"""PaddedInputFiller fills the static input buffers of a padded replay the way an engine does (contract 0.2, 7.5).

Tails are reset to their pad values, and live prefixes are copied. Before that the verifier poisons the tails with
plausible values, so that a tail which is not reset reads as some other request's. All of it happens on the device: how
many rows are live is not known to the host, and the whole may be captured in a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch

from dsa_verify.contract.static_inputs import StaticInput

_MIX: Final = 0x9E3779B1


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    spec: StaticInput
    buffer: torch.Tensor
    pad: torch.Tensor
    poison: torch.Tensor

    def mask(self, tails: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return tails[self.spec.rows].view(-1, *(1 for _ in self.spec.item))

    def view(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        return tensor.narrow(self.spec.axis, 0, batch * self.spec.rows)


class PaddedInputFiller:
    """Fills `buffers`, by the names of `specs` and for the widest batch, from the requests of each round.

    `skip_tail_reset`: names whose tails are never reset, which is a defect planted for the verifier to find.
    """

    def __init__(
        self,
        specs: Sequence[StaticInput],
        buffers: Mapping[str, torch.Tensor],
        *,
        skip_tail_reset: Collection[str] = (),
    ):
        self._slots = {spec.name: _bind(spec, buffers[spec.name]) for spec in specs}
        self._skip_tail_reset = frozenset(skip_tail_reset)
        widest = max(slot.buffer.shape[slot.spec.axis] for slot in self._slots.values())
        self._rows = torch.arange(widest, device=next(iter(self._slots.values())).buffer.device)

    def fill_from(
        self,
        sources: Mapping[str, torch.Tensor | None],
        raw: torch.Tensor,
        padded: int,
        *,
        skip: Collection[str] = (),
        poison: bool = False,
    ) -> None:
        """Copy rows below `raw` (int [1], on the device) from `sources` and reset rows up to `padded` to the pad value.

        A source has rows for at least `padded` requests, in the dtype of its buffer or one that converts to it; of a
        source that is None only the tail is reset. Buffers in `skip` are left alone entirely, and so is every row
        beyond `padded`. `poison`: the tails are poisoned first.
        """
        tails = self._tails(raw, padded)
        if poison:
            self._poison(tails, padded)
        for name, slot in self._slots.items():
            if name in skip:
                continue
            buffer, source = slot.view(slot.buffer, padded), sources.get(name)
            live = buffer if source is None else slot.view(source, padded).to(buffer.dtype)
            tail = buffer if name in self._skip_tail_reset else slot.view(slot.pad, padded)
            torch.where(slot.mask(tails), tail, live, out=buffer)

    def _poison(self, tails: Mapping[int, torch.Tensor], padded: int) -> None:
        for slot in self._slots.values():
            buffer, poison = slot.view(slot.buffer, padded), slot.view(slot.poison, padded)
            torch.where(slot.mask(tails), poison, buffer, out=buffer)

    def _tails(self, raw: torch.Tensor, padded: int) -> dict[int, torch.Tensor]:
        """Return which rows are pad rows, by the number of rows that a request has."""
        each = {slot.spec.rows for slot in self._slots.values()}
        return {rows: self._rows[: padded * rows] >= (raw if rows == 1 else raw * rows) for rows in each}


def _bind(spec: StaticInput, buffer: torch.Tensor) -> _Slot:
    size = buffer.shape[spec.axis]
    shape = (size, *(1 for _ in spec.item))
    mixed = (torch.arange(size, device=buffer.device) * _MIX) & 0x7FFFFFFF
    poison = spec.low + (mixed ^ (mixed >> 15)) % max(spec.high - spec.low, 1)
    # As wide as the buffer along the batch only: the rest broadcasts.
    plain = torch.full((size,), spec.pad, device=buffer.device).to(buffer.dtype).view(shape)
    leading = (*(1 for _ in spec.leading), *shape)
    return _Slot(spec, buffer, plain.view(leading), poison.to(buffer.dtype).view(leading))
