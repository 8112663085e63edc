"""Faults that spoil an output after the wrapped subject wrote it, or write where nothing may be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.faults.wrapper import Wrapper
from dsa_verify.systems.indexer import destination_prefix

FUSED_STEPS = 3  # destinations of the fused copy
SMUGGLED = 7  # what is written where nothing may be


class SkipRefresh(Wrapper):
    """Whenever the subject refreshes it, before the replay or in the graph."""

    def before_replay(self) -> None:
        kept = self.target.clone()
        self.inner.before_replay()
        self.target.copy_(kept)

    def in_graph(self) -> None:
        kept = self.target.clone()
        self.inner.in_graph()
        self.target.copy_(kept)


class NotRefreshed(Wrapper):
    """The first replay refreshes the field, later ones do not."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        # Runs of the work before the replay and in the graph; the first two of each are the warm-up's.
        self._runs = torch.full((2,), -2, dtype=torch.int32, device=inputs.seq_lens.device)

    def before_replay(self) -> None:
        self._skipping(self.inner.before_replay, 0)

    def in_graph(self) -> None:
        self._skipping(self.inner.in_graph, 1)

    def _skipping(self, work: Callable[[], None], run: int) -> None:
        kept = self.target.clone()
        work()
        self._runs[run].add_(1)
        self.target.copy_(torch.where(self._runs[run] > 1, kept, self.target))


class StaleDraftSteps(Wrapper):
    """The copy to three destinations refreshes neither their schedule nor their top-k plan: both stay what capture made
    (contract 2.3)."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        names = [
            destination_prefix(step) + name
            for step in range(FUSED_STEPS)
            for name in ("paged_mqa_schedule_metadata", "topk_v2_plan")
        ]
        self._stale = [name for name in names if name in buffers.layout]
        self._runs = torch.full((1,), -2, dtype=torch.int32, device=inputs.seq_lens.device)

    def in_graph(self) -> None:
        outputs = self.outputs()
        kept = {name: outputs[name].clone() for name in self._stale}
        self.inner.in_graph()
        self._runs.add_(1)
        for name, tensor in kept.items():
            outputs[name].copy_(torch.where(self._runs > 0, tensor, outputs[name]))


class OffByOne(Wrapper):
    def in_graph(self) -> None:
        self.inner.in_graph()
        self.target.add_(1)


class WrongDraftOffset(Wrapper):
    def in_graph(self) -> None:
        self.inner.in_graph()
        self.target.sub_(1)


class RowsRolled(Wrapper):
    def in_graph(self) -> None:
        self.inner.in_graph()
        self.target.copy_(self.target.roll(1, 0))


class TableOfFirstPage(Wrapper):
    """Tables are remembered by their first page, so that requests which share it are given the longest one's."""

    def in_graph(self) -> None:
        self.inner.in_graph()
        first = self.target[:, 0]
        alike = first[:, None] == first
        # Of two batch rows of one request the longer has every page of the shorter: that alone spoils nothing.
        longest = torch.where(alike, self.inputs.seq_lens, -1).argmax(1)
        self.target.copy_(self.target[longest])


class PadRowsUntouched(Wrapper):
    def in_graph(self) -> None:
        kept = self.target.clone()
        self.inner.in_graph()
        pad = self.inputs.req_pool_indices == 0
        self.target.copy_(torch.where(pad, kept, self.target))


class UnclampedLength(Wrapper):
    """Static draft-extend only: every request owns N rows."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self._position = torch.arange(geometry.draft_tokens, dtype=torch.int32, device=inputs.seq_lens.device)

    def in_graph(self) -> None:
        self.inner.in_graph()
        n = self.geometry.draft_tokens
        lengths = self.inputs.seq_lens.to(torch.int32)[:, None] - n + self._position + 1
        self.target.copy_(lengths.reshape(-1))


class UnclampedWindow(Wrapper):
    """Only draft extend has rows of negative length (contract 7.1): nothing is spoiled in the other modes."""

    def in_graph(self) -> None:
        self.inner.in_graph()
        lengths = self.outputs()["seq_lens_casual"]
        self.target.copy_(torch.where(lengths < 0, lengths, self.target))


class WrappedOffset(Wrapper):
    def in_graph(self) -> None:
        flat = self.target.view(-1)
        half = flat.numel() // 2
        kept = flat[half:].clone()
        self.inner.in_graph()
        far = flat[half:].clone()
        flat[: far.numel()].copy_(far)
        flat[half:].copy_(kept)


class PastTheEnd(Wrapper):
    def in_graph(self) -> None:
        self.inner.in_graph()
        _word_at(self.target, self.target.numel()).fill_(SMUGGLED)


class BeforeTheStart(Wrapper):
    def in_graph(self) -> None:
        self.inner.in_graph()
        _word_at(self.target, -1).fill_(SMUGGLED)


class WiderBucketRows(Wrapper):
    """Has an effect in every bucket but the widest, whose next row is a guard."""

    def in_graph(self) -> None:
        self.inner.in_graph()
        if len(self.target) < max(len(sibling.target) for sibling in self.siblings):
            _word_at(self.target, self.target.numel()).fill_(SMUGGLED)


class OtherBucket(Wrapper):
    """The buckets captured after the first one write into the first one's buffer."""

    def in_graph(self) -> None:
        self.inner.in_graph()
        first = self.siblings[0]
        if first is not self:
            first.target[:1].fill_(-SMUGGLED)


class OutputReplaced(Wrapper):
    """The consumer is handed a copy that the graph does not write, from the second replay on."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        self._copy: torch.Tensor | None = None
        self._calls = 0
        super().allocate(geometry, inputs, buffers)
        self._copy = self.target.clone() if self.field in buffers.layout else None

    def before_replay(self) -> None:
        self.inner.before_replay()
        self._calls += 1

    def outputs(self) -> Mapping[str, torch.Tensor]:
        outputs = super().outputs()
        # The first two calls are the warm-up's, the third is the first replay's.
        if self._copy is None or self._calls <= 3:
            return outputs
        return {**outputs, self.field: self._copy}


class GrowsOnRepeat(Wrapper):
    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        # Lengths and requests of the replay before, -1 is neither; and what it left, which a new round poisons.
        self._before = torch.full((2, inputs.seq_lens.numel()), -1, dtype=torch.int64, device=inputs.seq_lens.device)
        self._left = self.target.clone()

    def in_graph(self) -> None:
        now = torch.stack([self.inputs.seq_lens.long(), self.inputs.req_pool_indices.long()])
        repeated = (now == self._before).all() & (self.target == self._left).all()
        self.inner.in_graph()
        self.target.add_(repeated.to(self.target.dtype))
        self._before.copy_(now)
        self._left.copy_(self.target)


class AdvancesTwice(Wrapper):
    """Each run of the body goes one further, the eager work before it one back: right if they come in turn."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self._ahead = torch.ones(1, dtype=self.target.dtype, device=self.target.device)

    def before_replay(self) -> None:
        self._ahead.sub_(1)
        self.inner.before_replay()

    def in_graph(self) -> None:
        self.inner.in_graph()
        self.target.add_(self._ahead)
        self._ahead.add_(1)


def _word_at(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """One element of the memory around `tensor`, counted from its start; the arena has guards there."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + index)
