"""A serving loop in miniature: requests come, grow and go, pages are handed out at random, padded static buffers are
filled, metadata is prepared in a captured graph, and a hook is called where it has just been prepared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch

from dsa_verify import (
    Arena,
    Backend,
    Buffers,
    Geometry,
    Inputs,
    PaddedInputFiller,
    Subject,
    current_outputs,
    get_system,
)

FIELDS = ("page_table", "raw_out_loc", "seq_lens_casual", "positions_casual", "swa_page_indices", "swa_topk_lengths")
MOST_PAGES = 4096  # of the pool


class ServingLoop:
    """One bucket of `system` (padded in mode decode or verify, decode, target_verify) on the device of `backend`."""

    def __init__(
        self,
        factory: Callable[[], Subject],
        *,
        system: str,
        geometry: Geometry,
        bucket: int,
        backend: Backend,
        seed: int = 0,
        graph: bool = True,
    ):
        self.geometry, self.bucket, self.system = geometry, bucket, system
        self.device, self._rng = backend.device, np.random.default_rng(seed)
        self.verifies = geometry.draft_tokens > 1
        page = geometry.allocator_page
        needed = 1 + bucket * geometry.pages_per_row
        self._free = (1 + self._rng.permutation(max(needed, min(4 * needed, MOST_PAGES)))).tolist()
        self._rows = list(range(1, geometry.request_rows))
        self.live: list[tuple[int, int]] = []  # (request row, tokens)
        self._pages: dict[int, list[int]] = {}
        self.request_map = torch.zeros((geometry.request_rows, geometry.token_columns), dtype=torch.int32)
        slots = (len(self._free) + 1) * page
        window = torch.randint(0, slots, (slots + 1,), generator=torch.Generator().manual_seed(seed)).int()
        window[-1] = -1
        specs = get_system(system).inputs(geometry)
        named = {
            spec.name: torch.full(spec.shape(bucket), spec.pad, dtype=getattr(torch, spec.dtype)).to(self.device)
            for spec in specs
        }
        if system == "padded":
            named["full_to_swa"] = window.to(self.device)
        self.inputs = Inputs.of({"req_to_token": self.request_map.clone().to(self.device), **named})
        self.filler = PaddedInputFiller(specs, self.inputs.tensors())
        layout = get_system(system).layout(geometry, bucket)
        self.rows_per_request = layout.tokens // bucket
        buffers = Arena([layout], self.device, fill=0).at(bucket)
        self.subject = factory()
        self.subject.allocate(geometry, self.inputs, buffers)
        self.outputs = dict(current_outputs(self.subject, buffers))
        for _ in range(2):
            self.subject.before_replay()
            self.subject.in_graph()
        self._replay = backend.capture(self.subject.in_graph).replay if graph else self.subject.in_graph

    def step(self, raw: int, hook: Callable[[int], None] = lambda raw: None) -> None:
        """One replay with `raw` live requests; `hook(raw)` is called when its metadata has been prepared."""
        self._schedule(raw)
        self._fill(raw)
        self.replay()
        hook(raw)

    def replay(self) -> None:
        """Prepare the metadata of the inputs as they are."""
        self.subject.before_replay()
        self._replay()

    def digest(self) -> str:
        """Of every byte of inputs and metadata; waits for the device."""
        digest = hashlib.sha256()
        for tensor in (*self.inputs.tensors().values(), *self.outputs.values()):
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _schedule(self, raw: int) -> None:
        """Every request grows; some leave, others come, until `raw` are left."""
        most = self.geometry.context - self.geometry.draft_tokens
        grown = [(row, length + self._accepted()) for row, length in self.live]
        kept = [(row, length) for row, length in grown if length <= most and self._rng.random() > 0.1][:raw]
        for row, _ in self.live:
            if row not in [other for other, _ in kept]:
                self._free += self._pages.pop(row)
                self._rows.append(row)
        while len(kept) < raw:
            kept.append((self._rows.pop(int(self._rng.integers(len(self._rows)))), int(self._rng.integers(1, most))))
        self._rng.shuffle(kept)
        self.live = [(int(row), int(length)) for row, length in kept]
        for row, length in self.live:
            self._give_pages(row, length + (self.geometry.draft_tokens if self.verifies else 0))

    def _accepted(self) -> int:
        return int(self._rng.integers(1, self.geometry.draft_tokens + 1))

    def _give_pages(self, row: int, tokens: int) -> None:
        page, held = self.geometry.allocator_page, self._pages.setdefault(row, [])
        first = len(held)
        while len(held) * page < tokens:
            held.append(self._free.pop(int(self._rng.integers(len(self._free)))))
        new = torch.tensor(held[first:], dtype=torch.int32)
        if len(new):
            slots = (new[:, None] * page + torch.arange(page, dtype=torch.int32)).flatten()
            slots = slots[: self.geometry.token_columns - first * page]
            for there in (self.request_map, self.inputs.req_to_token):
                there[row, first * page : first * page + len(slots)].copy_(slots)

    def _fill(self, raw: int) -> None:
        n = self.rows_per_request
        rows = torch.tensor([row for row, _ in self.live], dtype=torch.int64)
        lens = torch.tensor([length for _, length in self.live], dtype=torch.int64)
        first = lens if self.verifies else lens - 1
        slots = self.request_map[rows[:, None], first[:, None] + torch.arange(n)]
        drawn = {"seq_lens": lens, "req_pool_indices": rows, "out_cache_loc": slots.flatten().long()}
        sources = {}
        for name, values in drawn.items():
            if name in self.inputs.tensors():
                padded = torch.zeros(self.bucket * (n if name == "out_cache_loc" else 1), dtype=torch.int64)
                padded[: len(values)] = values
                sources[name] = padded.to(self.device)
        self.filler.fill_from(sources, torch.tensor([raw]).to(self.device), self.bucket)


class CorePreparation:
    """FIELDS in plain torch, in mode decode or verify: what a server may have where it does not fuse (contract 7.1)."""

    name = "core"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        self.geometry, self.inputs, self.out = geometry, inputs, buffers
        self.locations, self.to_window = inputs.out_cache_loc, inputs.full_to_swa
        n, device = buffers.layout.tokens // buffers.layout.bucket, inputs.seq_lens.device
        row = torch.arange(buffers.layout.tokens, device=device)
        self.owner, self.ahead = row // n, row % n + 1 if geometry.padded_mode == "verify" else row * 0
        self.back = torch.arange(geometry.window, device=device)

    def before_replay(self) -> None:
        pass

    def in_graph(self) -> None:
        geometry, out = self.geometry, self.out
        request = self.inputs.req_pool_indices.long()[self.owner]
        casual = self.inputs.seq_lens.long()[self.owner] + self.ahead
        out["seq_lens_casual"].copy_(casual)
        out["positions_casual"].copy_(casual - 1)
        out["raw_out_loc"].copy_(self.locations)
        width = out["page_table"].shape[1] * geometry.page_size
        slots = self.inputs.req_to_token.index_select(0, request)
        out["page_table"].copy_(slots[:, : width : geometry.page_size] // geometry.page_size)
        position = casual[:, None] - 1 - self.back
        window = self.to_window[slots.gather(1, position.clamp(min=0)).long()]
        out["swa_page_indices"].fill_(-1)
        out["swa_page_indices"][:, : geometry.window].copy_(torch.where(position >= 0, window, -1))
        out["swa_topk_lengths"].copy_(casual.clamp(max=geometry.window))
