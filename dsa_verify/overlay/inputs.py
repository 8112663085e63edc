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
from dsa_verify.contract.batch import Batch
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.live import live_candidates, live_tokens, owned_rows, owners
from dsa_verify.contract.static_inputs import StaticInput
from dsa_verify.contract.subject import Inputs
from dsa_verify.contract.system import System
from dsa_verify.systems.catalogue import get_system

SLOTS_REGION: Final = "req_to_token"


def input_specs(system: System, geometry: Geometry) -> tuple[StaticInput, ...]:
    """Return the inputs with rows of the batch that a server has; UsageError if outputs depend on more than these."""
    if system.unknowable:
        raise UsageError(f"system {system.name!r}: {system.unknowable}; use dsa-verify replay")
    return system.inputs(geometry)


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
    judge. `specs`, `limits`: of each input, by name, and its legal values, both included. `pool_slots`: of the pool
    that `full_to_swa` maps; None where nothing says how many there are. `beyond_pool` int32 [1, 1]: live slots that the
    pool does not have. `regions`: the inputs against what they must be. `request_rows`: rows of the server's
    `req_to_token`; `check_pad_rows`: whether pad rows must hold their pad values.
    """

    def __init__(self, layout: Layout, taken: Taken, *, request_rows: int, raw: torch.Tensor, check_pad_rows: bool):
        self._layout, self._geometry, self._taken, self._raw = layout, layout.geometry, taken, raw
        self._system = get_system(layout.system)
        self.specs = {spec.name: spec for spec in input_specs(self._system, layout.geometry)}
        device, bucket = taken.rows.device, layout.bucket
        self._row = torch.arange(bucket, device=device)
        self._token = torch.arange(layout.tokens, device=device)
        self._bucket = torch.full((1, 1), bucket, device=device)
        self._tokens = torch.full((1, 1), layout.tokens, device=device)
        self._rows_of = {
            spec.rows: self._row if spec.rows == 1 else torch.arange(bucket * spec.rows, device=device)
            for spec in self.specs.values()
        }
        self.limits = {name: self._limits_of(name, request_rows) for name in self.specs}
        self._legal = {name: torch.zeros_like(value) for name, value in taken.values.items()}
        self._must_be = {name: torch.zeros_like(value) for name, value in taken.values.items()}
        self._check_pad_rows = check_pad_rows
        self.pool_slots = None if taken.full_to_swa is None else taken.full_to_swa.numel() - 1
        self._column = torch.arange(taken.rows.shape[1], device=device)
        self.beyond_pool = torch.zeros((1, 1), dtype=torch.int32, device=device)
        for_oracle = {
            name: torch.zeros(spec.shape(bucket), dtype=TORCH_DTYPES[spec.dtype], device=device)
            for name, spec in self.specs.items()
        }
        for_oracle["req_pool_indices"].copy_(self._row)
        self.requests = self._legal["req_pool_indices"]
        mapped = {} if taken.full_to_swa is None else {"full_to_swa": taken.full_to_swa}
        self.inputs = Inputs.of({"req_to_token": taken.rows, **for_oracle, **mapped})
        self.control = self._new_control()

    def update(self) -> None:
        """Asynchronous and capturable; reads what was taken and `raw`."""
        for name, value in self._taken.values.items():
            legal = self._legal[name]
            torch.clamp(value, *self.limits[name], out=legal)
            if name != "req_pool_indices":
                getattr(self.inputs, name).copy_(legal)
            self._must_be[name].copy_(legal)
            if self._check_pad_rows:
                spec = self.specs[name]
                self._must_be[name].masked_fill_(self._rows_of[spec.rows] >= self._raw * spec.rows, spec.pad)
        self._update_control()
        if self.pool_slots is not None:
            self._keep_slots_in_the_pool(self.pool_slots)

    def regions(self) -> list[Region]:
        """Return one an input, and one for slots that no pool has."""
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
        if self.pool_slots is not None:
            found.append(Region(kind=Kind.LAW, name=SLOTS_REGION, got=self.beyond_pool, constant=0))
        return found

    def _limits_of(self, name: str, request_rows: int) -> tuple[int, int]:
        geometry = self._geometry
        if name == "seq_lens":
            return self._system.shortest_length(geometry), geometry.context
        if name == "req_pool_indices":
            return 0, request_rows - 1
        if name == "out_cache_loc":
            assert self._taken.full_to_swa is not None, "padded has a map into the window's pool (contract 7.1)"
            return 0, self._taken.full_to_swa.numel() - 2  # the last entry stands for none
        spec = self.specs[name]
        return min(spec.low, spec.pad), spec.high - 1

    def _keep_slots_in_the_pool(self, pool: int) -> None:
        """Keep the slots in the pool, since the oracle translates the slots of live positions. The first is read even
        of a request without tokens."""
        rows = self._taken.rows
        live = self._column < self.live_ends()[:, None]
        outside = live & ((rows < 0) | (rows >= pool))
        torch.sum(outside, (0, 1), keepdim=True, dtype=torch.int32, out=self.beyond_pool)
        rows.masked_fill_(outside, 0)

    def live_ends(self) -> torch.Tensor:
        """Return int64 [bucket]: positions below are read, at least the first one."""
        return (self._legal["seq_lens"].long() + self._geometry.draft_tokens).clamp(1, self._taken.rows.shape[1])

    # Which elements are live: the rules of contract/live.py, on the device --------------------------------------------

    def _new_control(self) -> Control:
        device, bucket = self._row.device, self._layout.bucket
        return Control(
            live_tokens=torch.zeros(bucket, dtype=torch.int32, device=device),
            live_candidates=torch.zeros(bucket, dtype=torch.int32, device=device),
            token_rows=torch.full((1,), self._layout.tokens, dtype=torch.int32, device=device),
            row_request=torch.zeros(self._layout.tokens, dtype=torch.int32, device=device),
        )

    def _update_control(self) -> None:
        system, geometry, control = self._system, self._geometry, self.control
        batch = Batch(
            row=self._row,
            bucket=self._bucket,
            raw=self._raw.view(1, 1),
            tokens=self._tokens,
            seq_lens=self._legal["seq_lens"].long().unsqueeze(0),
            lens={name: value.long().unsqueeze(0) for name, value in self._legal.items() if self.specs[name].rows == 1},
        )
        owned = owned_rows(torch, system, geometry, batch)
        row_request, token_rows = owners(torch, batch, owned, self._token)
        control.row_request.copy_(row_request[0])
        control.token_rows.copy_(token_rows[0])
        control.live_tokens.copy_(live_tokens(system, batch, owned)[0])
        control.live_candidates.copy_(live_candidates(torch, system, geometry, batch)[0])
