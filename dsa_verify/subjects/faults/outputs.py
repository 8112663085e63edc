"""Faults that spoil an output after the wrapped subject wrote it, or write where nothing may be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dsa_verify.contract.finding import Diagnosis as D
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.faults.fault import AND_RAGGED, RAGGED_DRAFTS, fault, spoils
from dsa_verify.subjects.faults.wrapper import Wrapper
from dsa_verify.systems.indexer import destination_prefix

FUSED_STEPS = 3  # destinations of the fused copy
SMUGGLED = 7  # what is written where nothing may be


@fault(
    "skip_refresh",
    "one field keeps what it held before the replay",
    D.NEVER_WRITTEN,
    D.STALE,
    field="dsa_cache_seqlens_int32",
    systems=AND_RAGGED,
    anywhere=True,
)
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


@fault(
    "not_refreshed",
    "one field is refreshed by the first replay only",
    D.STALE,
    D.NEVER_WRITTEN,
    field="real_page_table",
    systems=AND_RAGGED,
    anywhere=True,
)
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


@fault(
    "stale_draft_steps",
    "the copy to three draft steps leaves their schedules and top-k plans as captured",
    D.STALE,
    D.NEVER_WRITTEN,
    D.FROZEN,
    field=f"step{FUSED_STEPS - 1}_paged_mqa_schedule_metadata",
    systems=("mtp",),
    needs="an indexer (--preset tiny_pool) and draft_steps of 4 or more",
)
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


@spoils("off_by_one_page", "every page of a table is the next one", D.BOUNDARY, field="real_page_table")
def off_by_one(wrapped: Wrapper) -> None:
    wrapped.target.add_(1)


@spoils(
    "wrong_draft_offset",
    "lengths count the draft position from 0 instead of 1",
    D.DRAFT_OFFSET,
    field="dsa_seqlens_expanded",
    systems=RAGGED_DRAFTS,
)
def wrong_draft_offset(wrapped: Wrapper) -> None:
    wrapped.target.sub_(1)


@spoils("rows_rolled", "each batch row gets its neighbour's length", D.REQUEST_MAP, field="cache_seqlens_int32")
def rows_rolled(wrapped: Wrapper) -> None:
    wrapped.target.copy_(wrapped.target.roll(1, 0))


@spoils(
    "table_of_first_page",
    "requests that share their first page are given one table (as a cache keyed by it would)",
    D.REQUEST_MAP,
    field="real_page_table",
    systems=("decode",),
)
def table_of_first_page(wrapped: Wrapper) -> None:
    """Tables are remembered by their first page, so that requests which share it are given the longest one's."""
    first = wrapped.target[:, 0]
    alike = first[:, None] == first
    # Of two batch rows of one request the longer has every page of the shorter: that alone spoils nothing.
    longest = torch.where(alike, wrapped.inputs.seq_lens, -1).argmax(1)
    wrapped.target.copy_(wrapped.target[longest])


@fault(
    "pad_rows_untouched",
    "rows of pad requests are not written",
    D.NEVER_WRITTEN,
    D.STALE,
    field="cache_seqlens_int32",
    systems=AND_RAGGED,
)
class PadRowsUntouched(Wrapper):
    def in_graph(self) -> None:
        kept = self.target.clone()
        self.inner.in_graph()
        pad = self.inputs.req_pool_indices == 0
        self.target.copy_(torch.where(pad, kept, self.target))


@fault(
    "unclamped_length",
    "a pad row shorter than the draft gets negative lengths",
    D.OUT_OF_RANGE,
    field="dsa_seqlens_expanded",
    systems=("draft_extend",),
)
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


@spoils(
    "unclamped_window",
    "a row shorter than the draft gets a negative window length (padded_mode draft_extend)",
    D.OUT_OF_RANGE,
    field="swa_topk_lengths",
    systems=("padded",),
)
def unclamped_window(wrapped: Wrapper) -> None:
    """Only draft extend has rows of negative length (contract 7.1): nothing is spoiled in the other modes."""
    lengths = wrapped.outputs()["seq_lens_casual"]
    wrapped.target.copy_(torch.where(lengths < 0, lengths, wrapped.target))


@fault(
    "int32_offset",
    "row offsets of a table wrap around (scaled down to half of the table)",
    D.REQUEST_MAP,
    D.NEVER_WRITTEN,
    D.STALE,
    field="page_table_1",
)
class WrappedOffset(Wrapper):
    def in_graph(self) -> None:
        flat = self.target.view(-1)
        half = flat.numel() // 2
        kept = flat[half:].clone()
        self.inner.in_graph()
        far = flat[half:].clone()
        flat[: far.numel()].copy_(far)
        flat[half:].copy_(kept)


@spoils(
    "past_the_end",
    "one element is written past the end of a buffer",
    D.PAST_THE_END,
    field="dsa_cu_seqlens_k",
    anywhere=True,
)
def past_the_end(wrapped: Wrapper) -> None:
    _word_at(wrapped.target, wrapped.target.numel()).fill_(SMUGGLED)


@spoils(
    "before_the_start",
    "one element is written before the start of a buffer",
    D.BEFORE_THE_START,
    field="dsa_cu_seqlens_k",
    anywhere=True,
)
def before_the_start(wrapped: Wrapper) -> None:
    _word_at(wrapped.target, -1).fill_(SMUGGLED)


@spoils(
    "wider_bucket_rows", "a row of a shared table beyond the bucket is written", D.OTHER_BUCKET, field="page_table_1"
)
def wider_bucket_rows(wrapped: Wrapper) -> None:
    """Has an effect in every bucket but the widest, whose next row is a guard."""
    if len(wrapped.target) < max(len(sibling.target) for sibling in wrapped.siblings):
        _word_at(wrapped.target, wrapped.target.numel()).fill_(SMUGGLED)


@spoils(
    "other_bucket",
    "a replay of one bucket writes a buffer that belongs to another",
    D.OTHER_BUCKET,
    field="dsa_cache_seqlens_int32",
    anywhere=True,
)
def other_bucket(wrapped: Wrapper) -> None:
    """The buckets captured after the first one write into the first one's buffer."""
    first = wrapped.siblings[0]
    if first is not wrapped:
        first.target[:1].fill_(-SMUGGLED)


@fault(
    "output_replaced",
    "an output is rebound to another tensor after capture",
    D.BUFFER_REPLACED,
    field="real_page_table",
    anywhere=True,
)
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


@fault(
    "second_replay",
    "a sum grows when the same inputs are replayed twice",
    D.NOT_IDEMPOTENT,
    D.WRONG_VALUE,
    field="cu_seqlens_k",
)
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


@fault(
    "advances_twice",
    "lengths are advanced by each warm-up, and set back once (warm_ups together)",
    D.BOUNDARY,
    field="cache_seqlens_int32",
)
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
