"""Edges: configurations beside the diagnostic matrix, at the edge of what a copy or a kernel may be asked for (contract
1.7, 2.2, 3.6, 10); EdgeKind says which.

Engines keep within them, so the matrix does; whoever changes a table's width or a batch wants to know what happens.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import torch

from dsa_verify.buffers.input_memory import FAR_ELEMENTS
from dsa_verify.contract.dcp import local_rows
from dsa_verify.contract.edge_kind import EdgeKind
from dsa_verify.contract.geometry import FAR, MAX_BATCH, Geometry
from dsa_verify.contract.layout import DTYPE_BYTES
from dsa_verify.contract.round import POISONS, Round
from dsa_verify.contract.static_inputs import KV_WORDS
from dsa_verify.contract.system import System
from dsa_verify.rounds.matrix import SCRIPTED_ROUNDS, Config, boundaries, undefined_when_empty

ROUNDS: Final = 3  # each with another poison; where they are cheap, all that are scripted
GAP_BATCH: Final = 4
EMPTY_BATCH: Final = 32
# Of the largest batch. More rows would be too many for DeepGEMM's schedule (contract 3.6), wider ones too much memory.
BATCH_DRAFT: Final = 2
BATCH_CONTEXT: Final = 4096
FAR_BATCH: Final = 8  # all requests that there are, so that each round has the last of them
LONG_BATCH: Final = 3
LONG_DRAFT: Final = 8
WIDE_ELEMENTS: Final = 1 << 31
WIDE_DRAFT: Final = 4
POOL_WORDS: Final = 1 << 31
POOL_BATCH, POOL_RANKS = 8, 2
MILLION: Final = 1 << 20
# Enough to tell requests apart; a row of a million tokens for each request would need more slots than int32 holds.
MILLION_REQUEST_ROWS: Final = 17
# Beside the buffers of both sides, twice, as a finding is confirmed on new ones: a record, and what a diagnosis makes.
_WORKING_TABLES: Final = 4
_FAR_MEMORIES: Final = 5  # of FAR_ELEMENTS: two for each of two request tables, and what lies between their rows

_OWN_WIDTHS: Final[dict[str, object]] = {"table_width": 0, "token_table_width": 0}  # as the context has them
_A_MILLION: Final = _OWN_WIDTHS | {"context": MILLION, "request_rows": MILLION_REQUEST_ROWS}
_FAR_ROWS: Final[dict[str, object]] = {"input_view": FAR, "index_dtype": "int32", "request_rows": FAR_BATCH + 1}
_LARGEST: Final = _OWN_WIDTHS | {"context": BATCH_CONTEXT, "request_rows": MAX_BATCH + 2}


_SHAPES: Final[tuple[tuple[EdgeKind, int, int, dict[str, object]], ...]] = (
    (EdgeKind.GAP, GAP_BATCH, WIDE_DRAFT, {"table_view": "strided"}),
    (EdgeKind.BATCH, MAX_BATCH, BATCH_DRAFT, _LARGEST),
    (EdgeKind.LONG, LONG_BATCH, LONG_DRAFT, _A_MILLION),
    (EdgeKind.FAR, FAR_BATCH, WIDE_DRAFT, _FAR_ROWS),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One extreme configuration. `device_bytes`: what the largest tables take; 0 where that is nothing to speak of."""

    kind: EdgeKind
    config: Config
    device_bytes: int = 0


def edges(system: System, geometry: Geometry, *, seed: int, fixed: frozenset[str]) -> list[Edge]:
    """Return the edges of `system` in the order of EdgeKind, but those that `fixed` fields of `geometry` exclude."""
    found = []
    for kind, batch, draft, changes in _SHAPES:
        settings = changes | {"draft_tokens": draft if system.drafts else 1}
        if kind in system.edges and not fixed & settings.keys():
            for own in _changes(system, kind, fixed):
                found.append(_edge(kind, system, geometry.replace(**settings, **own), batch, seed))
    if EdgeKind.WIDE in system.edges:
        found += _widest(system, geometry, seed, fixed)
    if EdgeKind.POOLS in system.edges:
        found += _pools(system, geometry, seed, fixed)
    if EdgeKind.EMPTY in system.edges:
        found += _empty(system, geometry, WIDE_DRAFT if system.drafts else 1, seed, fixed)
    return found


def _empty(system: System, geometry: Geometry, draft: int, seed: int, fixed: frozenset[str]) -> list[Edge]:
    if system.shortest_length(geometry):
        return []
    rows = {"draft_tokens": draft, "request_rows": max(geometry.request_rows, EMPTY_BATCH + 2)}
    geometry = geometry.replace(**{name: value for name, value in rows.items() if name not in fixed})
    if geometry.request_rows <= EMPTY_BATCH or not undefined_when_empty(system, geometry, EMPTY_BATCH):
        return []
    only = Round(bucket=EMPTY_BATCH, seq_lens=(0,) * EMPTY_BATCH, requests=tuple(range(1, EMPTY_BATCH + 1)))
    config = Config(
        system=system,
        geometry=geometry,
        buckets=(EMPTY_BATCH,),
        rounds=1,
        seed=seed,
        note=EdgeKind.EMPTY.value,
        script=(only,),
    )
    return [Edge(kind=EdgeKind.EMPTY, config=config)]


def _pools(system: System, geometry: Geometry, seed: int, fixed: frozenset[str]) -> list[Edge]:
    """Every slot of a request lies in a row of its rank's pool that begins at word 2**31 or behind it, or byte 2**33;
    short requests, as each page that they may have is part of the pools."""
    beyond = POOL_WORDS // KV_WORDS // geometry.page_size
    changes = _OWN_WIDTHS | {"context": BATCH_CONTEXT, "request_rows": POOL_BATCH + 1}
    changes |= {"dcp_size": POOL_RANKS, "first_page": beyond}
    if fixed & changes.keys():
        return []
    edge = _edge(EdgeKind.POOLS, system, geometry.replace(**changes), POOL_BATCH, seed)
    config_geometry = edge.config.geometry
    pool = local_rows(config_geometry.slots, config_geometry.dcp_size, config_geometry.dcp_block) * KV_WORDS * 4
    return [dataclasses.replace(edge, device_bytes=(2 * 2 * POOL_RANKS + _WORKING_TABLES) * pool)]


def _changes(system: System, kind: EdgeKind, fixed: frozenset[str]) -> list[dict[str, object]]:
    """Return what of its own fields `system` has otherwise at this edge, but for the `fixed` ones."""
    variants = [
        {name: value for name, value in fields.items() if name not in fixed}
        for fields in system.edge_fields.get(kind, ({},))
    ]
    return [each for i, each in enumerate(variants) if each not in variants[:i]]


def _widest(system: System, geometry: Geometry, seed: int, fixed: frozenset[str]) -> list[Edge]:
    """Tables of more than 2**31 elements."""
    wide: dict[str, object] = {**_A_MILLION, "wide_table": True, "draft_tokens": WIDE_DRAFT if system.drafts else 1}
    if system.widest:
        wide = {**_A_MILLION, **system.widest}
    if fixed & wide.keys():
        return []
    return [_wide(system, geometry.replace(**wide, **own), seed) for own in _changes(system, EdgeKind.WIDE, fixed)]


def _wide(system: System, geometry: Geometry, seed: int) -> Edge:
    """The rows of the last request begin at element 2**31 of the widest table, or beyond."""
    per_request = system.token_rows(geometry) if system.drafts else 1
    columns = max(field.columns for field in system.layout(geometry, 1))
    batch = WIDE_ELEMENTS // columns // per_request + 1
    edge = _edge(EdgeKind.WIDE, system, geometry, batch, seed)
    note = f"tables of {batch * per_request} x {columns}, more than 2**31 elements"
    note += f", {system.note(geometry)}" if system.note(geometry) else ""
    script = _live_to_the_end(system, geometry, batch)
    return dataclasses.replace(edge, config=dataclasses.replace(edge.config, note=note, script=script))


def _live_to_the_end(system: System, geometry: Geometry, batch: int) -> tuple[Round, ...]:
    """Rounds without pad rows, so that what lies beyond element 2**31 is live: each request is there many times."""
    lengths, requests = np.resize(boundaries(geometry), batch), np.resize(range(1, geometry.request_rows), batch)
    # All that a request may verify, so that a graph's token rows are all theirs (contract 9).
    lens = {name: (spec.high - 1,) * batch for name, spec in system.lens(geometry).items() if spec.needed}
    rounds = []
    for i in range(ROUNDS):
        lengths, requests = np.roll(lengths, i), np.roll(requests, i)
        ends = [*lengths[:-2].tolist(), geometry.context - i, geometry.context]
        rounds.append(
            Round(
                bucket=batch,
                seq_lens=tuple(ends),
                requests=tuple(requests.tolist()),
                lens=lens,
                poison=POISONS[i],
            )
        )
    return tuple(rounds)


def _edge(kind: EdgeKind, system: System, geometry: Geometry, batch: int, seed: int) -> Edge:
    if kind is EdgeKind.GAP:
        geometry = geometry.replace(request_rows=max(geometry.request_rows, batch + 2))
    rounds = SCRIPTED_ROUNDS if kind in (EdgeKind.BATCH, EdgeKind.LONG) else ROUNDS
    config = Config(system=system, geometry=geometry, buckets=(batch,), rounds=rounds, seed=seed, note=kind.value)
    return Edge(kind=kind, config=config, device_bytes=_device_bytes(kind, system, geometry, batch))


def _device_bytes(kind: EdgeKind, system: System, geometry: Geometry, batch: int) -> int:
    if kind is EdgeKind.GAP:
        return 0
    if kind is EdgeKind.FAR:
        return _FAR_MEMORIES * FAR_ELEMENTS * 4
    sizes = [field.elements * DTYPE_BYTES[field.dtype] for field in system.layout(geometry, batch) if not field.alias]
    return 2 * 2 * sum(sizes) + _WORKING_TABLES * max(sizes)


def why_not_here(edge: Edge, device: torch.device) -> str | None:
    """Say why `device` cannot run `edge`; None if it can."""
    if not edge.device_bytes:
        return None
    if device.type != "cuda" and edge.kind is EdgeKind.POOLS:
        return f"{edge.config.note}: on a CUDA device only, for they take up to {_gib(edge.device_bytes)}"
    if device.type != "cuda":
        return f"{edge.config.note}: on a CUDA device only, an interpreter would take too long"
    free, _ = torch.cuda.mem_get_info(device)
    if free < edge.device_bytes:
        return f"{edge.config.note}: needs {_gib(edge.device_bytes)} of device memory, {_gib(free)} are free"
    return None


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.0f} GiB"
