"""Edges: configurations beside the diagnostic matrix, at the edge of what a copy or a kernel may be asked for: page
tables with a gap behind each row, page tables of 2**31 elements, and a batch that is empty throughout, for which a
schedule may be undefined (contract 1.7, 2.2, 3.6, 10).

Engines keep within them, so the matrix does; whoever changes a table's width or a batch wants to know what happens.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from dsa_verify.errors import UsageError
from dsa_verify.geometry import Geometry
from dsa_verify.layouts.mtp import destinations
from dsa_verify.matrix import Config, shortest_seq_len, undefined_when_empty
from dsa_verify.rounds import rows_per_request
from dsa_verify.scenario import Round
from dsa_verify.systems import System

SYSTEMS_WITH_EDGES: Final = ("decode", "target_verify", "draft_extend", "mtp")
ROUNDS: Final = 3  # each with another poison
GAP_BATCH: Final = 4
EMPTY_BATCH: Final = 32
WIDE_ELEMENTS: Final = 1 << 31
WIDE_COLUMNS: Final = 1 << 20
WIDE_DRAFT: Final = 4
# Enough to tell requests apart; so many wide rows of their own would need more slots than int32 holds.
WIDE_REQUEST_ROWS: Final = 17
# Beside the buffers of both sides, twice, as a finding is confirmed on new ones: a record, and what a diagnosis makes.
_WORKING_TABLES: Final = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """`device_bytes`: what the largest tables take; 0 where that is nothing to speak of. `may_lose_device`: whether a
    known defect ends the process here, so that nothing can run after it."""

    config: Config
    device_bytes: int = 0
    may_lose_device: bool = False


def edges(system: System, geometry: Geometry, *, seed: int, fixed: frozenset[str]) -> list[Edge]:
    """The edges of `system`, those that may lose the device last; one that needs other values than `fixed` fields of
    `geometry` have is left out.

    UsageError if the system has none.
    """
    if system.name not in SYSTEMS_WITH_EDGES:
        raise UsageError(f"--edges: has no effect in {system.name}; the systems with edges are {_known()}")
    found = []
    draft = WIDE_DRAFT if system.drafts else 1
    gap = {"table_view": "strided", "draft_tokens": draft}
    if not fixed & gap.keys():
        config = _config(system, geometry.replace(**gap), GAP_BATCH, seed, "tables with a gap behind each row")
        found.append(Edge(config=config))
    wide = {
        "context": WIDE_COLUMNS,
        "table_width": 0,
        "token_table_width": 0,
        "request_rows": WIDE_REQUEST_ROWS,
        "wide_table": True,
        "draft_tokens": draft,
    }
    if not fixed & wide.keys():
        found += [_wide(system, geometry.replace(**wide, **steps), seed) for steps in _draft_steps(system, fixed)]
    return found + _empty(system, geometry, draft, seed, fixed)


def _empty(system: System, geometry: Geometry, draft: int, seed: int, fixed: frozenset[str]) -> list[Edge]:
    if shortest_seq_len(system.name, geometry):
        return []
    rows = {"draft_tokens": draft, "request_rows": max(geometry.request_rows, EMPTY_BATCH + 2)}
    geometry = geometry.replace(**{name: value for name, value in rows.items() if name not in fixed})
    if geometry.request_rows <= EMPTY_BATCH or not undefined_when_empty(system.name, geometry, EMPTY_BATCH):
        return []
    only = Round(bucket=EMPTY_BATCH, seq_lens=(0,) * EMPTY_BATCH, requests=tuple(range(1, EMPTY_BATCH + 1)))
    config = Config(
        system=system,
        geometry=geometry,
        buckets=(EMPTY_BATCH,),
        rounds=1,
        seed=seed,
        note="every length 0",
        script=(only,),
    )
    return [Edge(config=config, may_lose_device=True)]


def _draft_steps(system: System, fixed: frozenset[str]) -> list[dict[str, int]]:
    """Of mtp: so few that each is copied to alone, and so many that three are copied to at once (contract 2.3)."""
    return [{"draft_steps": 2}, {"draft_steps": 4}] if system.name == "mtp" and "draft_steps" not in fixed else [{}]


def _wide(system: System, geometry: Geometry, seed: int) -> Edge:
    rows = WIDE_ELEMENTS // geometry.columns
    per_request = rows_per_request(system.name, geometry) if system.drafts else 1
    copies = destinations(geometry) if system.name == "mtp" else 1
    note = f"tables of {rows} x {geometry.columns} = 2**31 elements"
    note += f", {copies} draft step(s)" if system.name == "mtp" else ""
    tables = 2 * 2 * copies + _WORKING_TABLES
    return Edge(
        config=_config(system, geometry, rows // per_request, seed, note), device_bytes=tables * WIDE_ELEMENTS * 4
    )


def _config(system: System, geometry: Geometry, batch: int, seed: int, note: str) -> Config:
    if geometry.request_rows != WIDE_REQUEST_ROWS:
        geometry = geometry.replace(request_rows=max(geometry.request_rows, batch + 2))
    return Config(system=system, geometry=geometry, buckets=(batch,), rounds=ROUNDS, seed=seed, note=note)


def why_not_here(edge: Edge, device: torch.device) -> str | None:
    """Why `device` cannot run `edge`; None if it can."""
    if not edge.device_bytes:
        return None
    if device.type != "cuda":
        return f"{edge.config.note}: on a CUDA device only, an interpreter would take days"
    free, _ = torch.cuda.mem_get_info(device)
    if free < edge.device_bytes:
        return f"{edge.config.note}: needs {_gib(edge.device_bytes)} of device memory, {_gib(free)} are free"
    return None


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.0f} GiB"


def _known() -> str:
    return ", ".join(SYSTEMS_WITH_EDGES)
