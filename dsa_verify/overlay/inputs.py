"""A check derives three things from the inputs it has taken from a server: legal ones for the oracle, what they must
have been, and which elements of the outputs are live. It does so on the device, so that it can be captured.

A server that is being diagnosed may hold anything. The oracle indexes with lengths, requests and slots, so it is given
values clamped to what is legal; that they had to be is a difference of its own. Pad rows must hold their pad values
(contract 0.2, 7.5), which no comparison of outputs can see: both sides are made from the same tail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.buffers.arena import TORCH_DTYPES
from dsa_verify.buffers.region import Control, Kind, Region, as_words
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.kpool import shortest_length
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.ragged import graph_tokens
from dsa_verify.contract.round import pooled_indexer
from dsa_verify.contract.round_table import rows_per_request
from dsa_verify.contract.static_inputs import StaticInput, static_inputs
from dsa_verify.contract.subject import Inputs

SLOTS_REGION: Final = "req_to_token"
# Their lengths are those before the draft, so that N more tokens are live (contract 1.2, 9).
ADDS_DRAFT: Final = ("target_verify", "ragged_verify")


def input_specs(system: str, geometry: Geometry) -> tuple[StaticInput, ...]:
    """The inputs with rows of the batch that a server has; UsageError for a system whose outputs depend on more."""
    if system == "dcp":
        raise UsageError(
            "system 'dcp': its outputs hold what earlier replays wrote into the pools, which a check cannot know; "
            "use dsa-verify replay"
        )
    return static_inputs(system, geometry)


def token_columns(geometry: Geometry) -> int:
    """Columns of `req_to_token` that metadata may depend on."""
    return max(geometry.context + geometry.draft_tokens, geometry.columns)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Copies of the inputs of one bucket. `values`: by name, [bucket x rows] in the server's dtype; `rows`: int32
    [bucket, columns], the row of `req_to_token` of each batch row; `full_to_swa` is the server's own, None where there
    is none."""

    values: Mapping[str, torch.Tensor]
    rows: torch.Tensor
    full_to_swa: torch.Tensor | None


class LegalInputs:
    """Derives everything from `taken` after each `update(raw)`.

    `inputs`: for the oracle, requests being numbered by batch row. `requests`: the real ones. `control`: for the
    judge. `beyond_pool` int32 [1, 1]: live slots that the pool does not have. `regions`: the inputs against what they
    must be. `request_rows`: rows of the server's `req_to_token`;
    `tails`: whether pad rows must hold their pad values.
    """

    def __init__(self, layout: Layout, taken: Taken, *, request_rows: int, raw: torch.Tensor, tails: bool):
        self._layout, self._geometry, self._taken, self._raw = layout, layout.geometry, taken, raw
        self._specs = {spec.name: spec for spec in input_specs(layout.system, layout.geometry)}
        device, bucket = taken.rows.device, layout.bucket
        self._row = torch.arange(bucket, device=device)
        self._token = torch.arange(layout.tokens, device=device)
        self._rows_of = {
            spec.rows: self._row if spec.rows == 1 else torch.arange(bucket * spec.rows, device=device)
            for spec in self._specs.values()
        }
        self._limits = {name: self._limits_of(name, request_rows) for name in self._specs}
        self._legal = {name: torch.zeros_like(value) for name, value in taken.values.items()}
        self._must_be = {name: torch.zeros_like(value) for name, value in taken.values.items()}
        self._tails = tails
        self._pool = None if taken.full_to_swa is None else taken.full_to_swa.numel() - 1
        self._column = torch.arange(taken.rows.shape[1], device=device)
        self.beyond_pool = torch.zeros((1, 1), dtype=torch.int32, device=device)
        for_oracle = {
            name: torch.zeros(spec.shape(bucket), dtype=TORCH_DTYPES[spec.dtype], device=device)
            for name, spec in self._specs.items()
        }
        for_oracle["req_pool_indices"].copy_(self._row)
        self.requests = self._legal["req_pool_indices"]
        self.inputs = Inputs(req_to_token=taken.rows, full_to_swa=taken.full_to_swa, **for_oracle)
        self.control = self._new_control()
        self._fixed_owners()

    def limits(self, name: str) -> tuple[int, int]:
        """The legal values of an input, both included."""
        return self._limits[name]

    def spec(self, name: str) -> StaticInput:
        return self._specs[name]

    @property
    def pool_slots(self) -> int | None:
        """Slots of the pool that `full_to_swa` maps; None where nothing says how many there are."""
        return self._pool

    def update(self) -> None:
        """Asynchronous and capturable; reads what was taken and `raw`."""
        for name, value in self._taken.values.items():
            legal = self._legal[name]
            torch.clamp(value, *self._limits[name], out=legal)
            if name != "req_pool_indices":
                getattr(self.inputs, name).copy_(legal)
            self._must_be[name].copy_(legal)
            if self._tails:
                spec = self._specs[name]
                self._must_be[name].masked_fill_(self._rows_of[spec.rows] >= self._raw * spec.rows, spec.pad)
        self._update_control()
        if self._pool is not None:
            self._keep_slots_in_the_pool(self._pool)

    def regions(self) -> list[Region]:
        """One an input, and one for slots that no pool has."""
        found = [
            Region(
                kind=Kind.INPUT,
                name=name,
                got=as_words(value),
                want=as_words(self._must_be[name]),
                words_per_element=value.element_size() // 4,
            )
            for name, value in self._taken.values.items()
        ]
        if self._pool is not None:
            found.append(Region(kind=Kind.LAW, name=SLOTS_REGION, got=self.beyond_pool, constant=0))
        return found

    def _limits_of(self, name: str, request_rows: int) -> tuple[int, int]:
        geometry, n = self._geometry, self._geometry.draft_tokens
        if name == "seq_lens":
            pooled = pooled_indexer(geometry)
            return (shortest_length(self._layout.system, geometry) if pooled else 0), geometry.context  # type: ignore[arg-type]
        if name == "req_pool_indices":
            return 0, request_rows - 1
        if name == "out_cache_loc":
            assert self._taken.full_to_swa is not None, "padded has a map into the window's pool (contract 7.1)"
            return 0, self._taken.full_to_swa.numel() - 2  # the last entry stands for none
        if name == "replay_floors":
            return 0, geometry.context
        return (1 if name == "accept_lens" else 0), n

    def _keep_slots_in_the_pool(self, pool: int) -> None:
        """The oracle translates the slots of live positions. The first is read even of a request without tokens."""
        rows = self._taken.rows
        live = self._column < self.live_ends()[:, None]
        outside = live & ((rows < 0) | (rows >= pool))
        torch.sum(outside, (0, 1), keepdim=True, dtype=torch.int32, out=self.beyond_pool)
        rows.masked_fill_(outside, 0)

    def live_ends(self) -> torch.Tensor:
        """int64 [bucket]: positions below are read, at least the first one."""
        return (self._legal["seq_lens"].long() + self._geometry.draft_tokens).clamp(1, self._taken.rows.shape[1])

    # Which elements are live: the rules of rounds.py, on the device -------------------------------------------------

    def _new_control(self) -> Control:
        device, bucket = self._row.device, self._layout.bucket
        return Control(
            live_tokens=torch.zeros(bucket, dtype=torch.int32, device=device),
            live_candidates=torch.zeros(bucket, dtype=torch.int32, device=device),
            token_rows=torch.full((1,), self._layout.tokens, dtype=torch.int32, device=device),
            row_request=torch.zeros(self._layout.tokens, dtype=torch.int32, device=device),
        )

    def _fixed_owners(self) -> None:
        """Note the owners of token rows that never change, as every request owns as many."""
        system, per_request = self._layout.system, rows_per_request(self._layout.system, self._geometry)
        if system not in ("decode", "ragged_verify"):
            self.control.row_request.copy_(self._token // per_request)

    def _update_control(self) -> None:
        system, control, seq_lens = self._layout.system, self.control, self._legal["seq_lens"]
        owned = self._owned_rows()
        live = seq_lens
        if system in ADDS_DRAFT:
            live = seq_lens + (self._geometry.draft_tokens if owned is None else owned)
        control.live_tokens.copy_(live)
        if owned is not None:
            ends = torch.cumsum(owned, 0, dtype=torch.int64)
            owner = torch.searchsorted(ends, self._token, right=True)
            control.row_request.copy_(owner.masked_fill_(self._token >= ends[-1:], 0))
            control.token_rows.copy_(ends[-1:])
        if pooled_indexer(self._geometry):
            control.live_candidates.copy_(self._live_candidates(seq_lens.long()))

    def _owned_rows(self) -> torch.Tensor | None:
        """int64 [bucket]: token rows of each request where they differ; None where all have as many."""
        if "extend_lens" in self._legal and self._layout.system == "draft_extend":
            return self._legal["extend_lens"].long()
        if self._layout.system != "ragged_verify":
            return None
        # Contract 9: leftover tokens go to the pad requests, the first of them one more, or else to the last request.
        lens, bucket = self._legal["verify_lens"].long(), self._layout.bucket
        pad = self._row >= self._raw
        lens = torch.where(pad, 0, lens)
        leftover, pads = graph_tokens(self._geometry, bucket) - lens.sum(), bucket - self._raw
        divisor = pads.clamp(min=1)
        share = torch.div(leftover, divisor, rounding_mode="floor") + (self._row - self._raw < leftover % divisor)
        last = (self._row == bucket - 1) & (pads == 0)
        return torch.where(pad, share, lens + torch.where(last, leftover, 0)).clamp(min=0)

    def _live_candidates(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """kpool_rules.live_candidates, none for pad rows (contract 4.2)."""
        system, pool = self._layout.system, self._geometry.pool_size
        start = seq_lens - shortest_length(system, self._geometry)  # type: ignore[arg-type]
        written: torch.Tensor | int = 1 if system in ("decode", "mtp") else self._geometry.draft_tokens
        if system == "draft_extend":
            written = self._legal["accept_lens"].long()
        closed = (start + written) // pool - start // pool
        return torch.where(self._row < self._raw, closed, 0)
