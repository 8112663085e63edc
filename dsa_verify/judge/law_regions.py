"""LawWatch: the schedule laws as regions for the judge, so that they are looked at while rounds run (contract 3.5).

A law needs no oracle's schedule: it holds the subject's rows against the tiles of this round's lengths. What a check
writes down is -1 where a law holds, and that is what the judge expects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from dsa_verify.buffers.region import Kind, Region, as_words
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.schedule_variants import VARIANTS, ScheduleVariant
from dsa_verify.judge.schedule_laws import LawBreak, ScheduleLaw
from dsa_verify.systems.indexer import scheduled_lengths


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Watched:
    law: ScheduleLaw
    schedule: torch.Tensor
    lengths: torch.Tensor
    clamped: bool
    result: torch.Tensor

    def update(self) -> None:
        self.law.check(self.schedule, scheduled(self.law.variant, self.lengths, self.clamped), self.result)


class LawWatch:
    """The laws of every schedule of `layout`: rows from `schedules`, each contiguous, lengths from `lengths`."""

    def __init__(
        self, layout: Layout, schedules: Mapping[str, torch.Tensor], lengths: Mapping[str, torch.Tensor]
    ) -> None:
        self._watched: dict[str, _Watched] = {}
        for field in layout:
            found = scheduled_lengths(field.name)
            if found is None:
                continue
            law = law_of(layout, lengths[found[0]])
            result = torch.full(law.result_shape, -1, dtype=torch.int32, device=schedules[field.name].device)
            self._watched[field.name] = _Watched(
                law=law, schedule=schedules[field.name], lengths=lengths[found[0]], clamped=found[1], result=result
            )

    def update(self) -> None:
        """Check all; asynchronous and capturable."""
        for watched in self._watched.values():
            watched.update()

    def regions(self) -> list[Region]:
        """One a schedule: word r tells where law r is first broken, -1 nowhere."""
        return [
            Region(kind=Kind.LAW, name=name, got=as_words(watched.result[1:, :1]), constant=-1)
            for name, watched in self._watched.items()
        ]

    def broken(self, name: str) -> list[LawBreak]:
        """Return what the last `update` says of the schedule `name`; reads the device."""
        watched = self._watched[name]
        return watched.law.broken(watched.result)


def law_of(layout: Layout, lengths: torch.Tensor) -> ScheduleLaw:
    """Return the law for a schedule over `lengths`, in the form that the geometry's variant takes."""
    geometry = layout.geometry
    variant = VARIANTS[geometry.schedule]
    form = scheduled(variant, lengths, clamped=False)
    next_n = form.shape[1] if form.dim() == 2 else 1
    return ScheduleLaw(variant, geometry.multiprocessors, rows=form.shape[0], next_n=next_n)


def scheduled(variant: ScheduleVariant, lengths: torch.Tensor, clamped: bool) -> torch.Tensor:
    """Return `lengths` as the builder of `variant` is given them: at least 1 each if `clamped`, in its dimensions."""
    lengths = lengths.clamp(min=1) if clamped else lengths
    if lengths.dim() not in variant.context_dims:
        lengths = lengths[:, -1] if lengths.dim() == 2 else lengths.unsqueeze(1)
    return lengths
