"""Draft-extend: up to N accepted tokens a request, extended by the draft model (contract 1.3)."""

from __future__ import annotations

from typing import Any, Final

from dsa_verify.contract.batch import Batch
from dsa_verify.contract.edge_kind import TABLES
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.kpool import pooled_indexer
from dsa_verify.contract.static_inputs import StaticInput
from dsa_verify.contract.system import System, draft_rows
from dsa_verify.systems import basic


def _pad_length(geometry: Geometry) -> int:
    # Keeps the first pool write of a pad row, seq - N, at or above a whole pool.
    return max(1, geometry.draft_tokens + geometry.pool_size) if geometry.pool_size > 1 else 1


def _owns(xp: Any, batch: Batch) -> Any:
    """Return how many rows each request owns: as many as it extends by (contract 1.3)."""
    return batch.lens["extend_lens"]


def _inputs(geometry: Geometry) -> tuple[StaticInput, ...]:
    n = geometry.draft_tokens
    given: dict[str, Any] = {"dtype": "int32", "pad": n, "high": n + 1, "limit": "draft_tokens"}
    # The schedule of an indexer covers all token rows, so every request extends by N.
    extend = StaticInput(name="extend_lens", said=not geometry.indexer, **given)
    return (extend, StaticInput(name="accept_lens", low=1, **given)) if pooled_indexer(geometry) else (extend,)


SYSTEM: Final = System(
    name="draft_extend",
    summary="up to N accepted tokens a request, extended by the draft model (contract 1.3)",
    layout=basic.draft_extend,
    oracle="oracles.draft_extend:DraftExtendOracle",
    subjects={"triton": "dsa_verify.subjects.pipelines.basic:DraftExtend"},
    drafts=True,
    by_default=True,
    written_back=draft_rows,
    pad_length=_pad_length,
    owns=_owns,
    refusals={
        "extend_lens": "the indexer's schedule covers all token rows, so every request extends by N; remove it",
        "accept_lens": "has an effect only in draft_extend with a pooled indexer; remove it",
    },
    own_inputs=_inputs,
    indexer=True,
    pools=True,
    empty_rows=True,
    edges=TABLES,
)
