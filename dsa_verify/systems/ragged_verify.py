"""Layout of ragged verify: G token rows over the request slots of a bucket, each request owning as many as it verifies
(contract 9, rows as in 1.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.batch import Batch
from dsa_verify.contract.consumers import memory_of
from dsa_verify.contract.edge_kind import TABLES, EdgeKind
from dsa_verify.contract.geometry import MAX_BATCH, MAX_DRAFT_TOKENS, Geometry
from dsa_verify.contract.layout import Field, Layout, Lifetime, Row
from dsa_verify.contract.ragged import capture_lens, check_verify_lens, graph_tokens
from dsa_verify.contract.size import Size
from dsa_verify.contract.static_inputs import StaticInput
from dsa_verify.contract.system import Shapes, System
from dsa_verify.systems import indexer
from dsa_verify.systems.shapes import draft_pairs

INT32_LIMIT: Final = 1 << 31
MOST_ROWS: Final = 512  # of the matrix, whose second graph has a request slot for each


def ragged_verify(geometry: Geometry, bucket: int) -> Layout:
    """Return the fields of target-verify, and which token rows each slot owns once the round is padded to the graph.

    `padded_verify_lens` [bucket] covers all G token rows, so none is dead; `extend_start_loc` and `qo_indptr` are its
    sums. A pad slot, or the last one where all are live, may own more than N rows. UsageError for G that does not fit
    the slots and for a pooled indexer.
    """
    tokens = graph_tokens(geometry, bucket)
    capture_lens(tokens, bucket, geometry.draft_tokens)
    if geometry.indexer and geometry.pool_size > 1:
        raise UsageError(
            f"indexer: ragged_verify has no write plan for pools of {geometry.pool_size}, whose requests all write N "
            "tokens (contract 4.2); set indexer=false, or pool_size 1"
        )
    # The last slot may take all that the others leave.
    limit = geometry.context + tokens + 1
    fields = (*_lengths(geometry, bucket, tokens, limit), *_tables(geometry, tokens))
    fields += (
        # Whatever the architecture: slots own different numbers of rows, which no [bucket, N] can hold.
        _field("paged_mqa_ctx_lens_2d", (tokens, 1), Row.TOKEN, limit, alias="dsa_seqlens_expanded"),
        *indexer.fields("ragged_verify", geometry, bucket, tokens, limit),
    )
    return Layout(system="ragged_verify", geometry=geometry, bucket=bucket, tokens=tokens, fields=fields)


def _lengths(geometry: Geometry, bucket: int, tokens: int, limit: int) -> list[Field]:
    capture, sums = Lifetime.CAPTURE, (tokens + 1,)
    return [
        _field("padded_verify_lens", (bucket,), Row.REQUEST, tokens + 1, section="9"),
        _field("extend_start_loc", (bucket,), Row.REQUEST, tokens + 1, section="9"),
        _field("qo_indptr", (bucket + 1,), Row.REQUEST_PREFIX, tokens + 1, section="9"),
        _field("cache_seqlens_int32", (bucket,), Row.REQUEST, limit, section="9", shared=True),
        _field("cu_seqlens_q", sums, Row.TOKEN_PREFIX, tokens + 1, lifetime=capture),
        _field("cu_seqlens_k", (bucket + 1,), Row.REQUEST_PREFIX, INT32_LIMIT, shared=True),
        _field("dsa_seqlens_expanded", (tokens,), Row.TOKEN, limit, section="9"),
        _field("dsa_cache_seqlens_int32", (tokens,), Row.TOKEN, geometry.topk + geometry.pool_size),
        _field("dsa_cu_seqlens_q", sums, Row.TOKEN_PREFIX, tokens + 1, lifetime=capture),
        _field("dsa_cu_seqlens_k", sums, Row.TOKEN_PREFIX, INT32_LIMIT),
    ]


def _tables(geometry: Geometry, tokens: int) -> list[Field]:
    page, wide = geometry.page_size, (tokens, geometry.columns)
    alias = "page_table_1" if page == 1 else None
    found = []
    if geometry.wide_table:
        found.append(_field("page_table_1", wide, Row.TOKEN, geometry.slots, column_step=1, shared=True))
    shape, entries = (tokens, geometry.pages), -(-geometry.slots // page)
    found.append(_field("real_page_table", shape, Row.TOKEN, entries, column_step=page, alias=alias))
    return found


def _field(name: str, shape: tuple[int, ...], row: Row, high: int, *, section: str = "1.2", **rest: Any) -> Field:
    # A prefix sum passes int32 at 2**31 tokens (contract 1.7), so its lower bound is int32's too.
    low = -INT32_LIMIT if high == INT32_LIMIT else 0
    return Field(name=name, shape=shape, row=row, section=section, low=low, high=high, memory=memory_of(name), **rest)


def _owns(xp: Any, batch: Batch) -> Any:
    """Return how many rows each slot owns: leftover tokens go to the pad requests, the first of them one more, or else
    to the last request (contract 9)."""
    pad, pads = batch.row >= batch.raw, batch.bucket - batch.raw
    lens = xp.where(pad, batch.lens["verify_lens"] * 0, batch.lens["verify_lens"])
    leftover = batch.tokens - lens.sum(1)[:, None]
    among = xp.where(pads > 0, pads, pads * 0 + 1)
    share = leftover // among + (batch.row - batch.raw < leftover % among)
    last = (batch.row == batch.bucket - 1) & (pads == 0)
    owned = xp.where(pad, share, lens + leftover * last)
    return xp.where((owned > 0) & (batch.row < batch.bucket), owned, owned * 0)


def _starts_at_the_length(geometry: Geometry) -> int:
    return 0


def _inputs(geometry: Geometry) -> tuple[StaticInput, ...]:
    high, limit = geometry.draft_tokens + 1, "draft_tokens"
    return (StaticInput(name="verify_lens", dtype="int32", low=1, high=high, limit=limit, needed=True),)


def _check_round(geometry: Geometry, bucket: int, lens: Mapping[str, Sequence[int]], where: str) -> None:
    check_verify_lens(geometry, bucket, lens.get("verify_lens"), where=where)


def _shapes(
    geometry: Geometry, batches: Sequence[int] | None, drafts: Sequence[int] | None, fixed: frozenset[str]
) -> Shapes:
    """Return as many token rows in both graphs, so that only the request slots tell them apart (contract 9)."""
    pairs = draft_pairs(batches, drafts)
    if not (batches or drafts):
        pairs = [(batch, min(n, MOST_ROWS // batch)) for batch, n in pairs]
    for batch, n in pairs:
        if batch * n > MAX_BATCH:
            raise UsageError(
                f"batch: {batch} requests of draft length {n} have a second graph beside them, of one token each, "
                f"which would be {batch * n} requests, and {MAX_BATCH} is the most; use {MAX_BATCH // n} or fewer"
            )
    return [
        (tuple(dict.fromkeys((batch, batch * n))), {"draft_tokens": n, "graph_tokens": batch * n}) for batch, n in pairs
    ]


SYSTEM: Final = System(
    name="ragged_verify",
    summary="1 to N draft tokens a request, verified by the target model, padded to G token rows (contract 9)",
    layout=ragged_verify,
    oracle="oracles.ragged_verify:RaggedVerifyOracle",
    subjects={"triton": "dsa_verify.subjects.pipelines.ragged_verify:RaggedVerify"},
    # G, the most token rows of a graph; 0: all buckets hold N a request.
    sizes=(Size(name="graph_tokens", default=0, high=MAX_BATCH * MAX_DRAFT_TOKENS),),
    drafts=True,
    graph_tokens=graph_tokens,
    written_back=_starts_at_the_length,
    adds_draft=True,
    owns=_owns,
    own_inputs=_inputs,
    check_round=_check_round,
    indexer=True,
    shapes=_shapes,
    edges=TABLES - {EdgeKind.GAP},
)
