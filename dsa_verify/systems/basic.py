"""Layouts of decode, target-verify and draft-extend (contract 1.1 to 1.3): the same ten fields, sized differently,
and those of the indexer where the geometry has it (indexer.py)."""

from __future__ import annotations

from typing import Any

from dsa_verify.contract.consumers import memory_of
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Field, Layout, Lifetime, Row
from dsa_verify.systems import indexer

INT32_LIMIT = 1 << 31


def decode(geometry: Geometry, bucket: int) -> Layout:
    """Return one token row per request; the expanded lengths *are* the cache lengths (contract 1.1)."""
    return _layout("decode", geometry, bucket, tokens=bucket, section="1.1", length_limit=geometry.context + 1)


def target_verify(geometry: Geometry, bucket: int) -> Layout:
    """Return N token rows per request, lengths before the draft (contract 1.2)."""
    n = geometry.draft_tokens
    limit = geometry.context + n + 1
    return _layout("target_verify", geometry, bucket, tokens=bucket * n, section="1.2", length_limit=limit)


def draft_extend(geometry: Geometry, bucket: int) -> Layout:
    """Return up to N token rows per request, lengths including the draft; rows beyond their total are dead (contract
    1.3)."""
    tokens = bucket * geometry.draft_tokens
    return _layout("draft_extend", geometry, bucket, tokens=tokens, section="1.3", length_limit=geometry.context + 1)


def verify_columns(geometry: Geometry) -> int:
    """Columns of `paged_mqa_ctx_lens_2d` of target-verify (contract 1.2)."""
    return geometry.draft_tokens if geometry.architecture == 100 else 1


def _layout(system: str, geometry: Geometry, bucket: int, *, tokens: int, section: str, length_limit: int) -> Layout:
    per_token = Row.REQUEST if system == "decode" else Row.TOKEN
    token_prefix = Row.REQUEST_PREFIX if system == "decode" else Row.TOKEN_PREFIX
    ragged = system == "draft_extend"
    # dsa_len is at most K + kp - 1 (contract 0.4); the sums are bounded by int32, where the contract lets them wrap.
    dsa_limit = geometry.topk + geometry.pool_size

    def field(name: str, shape: tuple[int, ...], row: Row, high: int, **rest: Any) -> Field:
        # A prefix sum passes int32 at 2**31 tokens (contract 1.7), so its lower bound is int32's too.
        low = -INT32_LIMIT if high == INT32_LIMIT else 0
        return Field(
            name=name, shape=shape, row=row, section=section, low=low, high=high, memory=memory_of(name), **rest
        )

    capture = Lifetime.CAPTURE
    fields = [
        field("cache_seqlens_int32", (bucket,), Row.REQUEST, length_limit, shared=True),
        field("cu_seqlens_q", (tokens + 1,), token_prefix, tokens + 1, lifetime=capture),
        field("cu_seqlens_k", (bucket + 1,), Row.REQUEST_PREFIX, INT32_LIMIT, shared=True),
        field(
            "dsa_seqlens_expanded",
            (tokens,),
            per_token,
            length_limit,
            live_token_rows=ragged,
            alias="cache_seqlens_int32" if system == "decode" else None,
        ),
        field("dsa_cache_seqlens_int32", (tokens,), per_token, dsa_limit, live_token_rows=ragged),
        field("dsa_cu_seqlens_q", (tokens + 1,), token_prefix, tokens + 1, lifetime=capture),
        field("dsa_cu_seqlens_k", (tokens + 1,), token_prefix, INT32_LIMIT, live_token_rows=ragged),
    ]
    tables = {"live_token_rows": ragged, "row_gap": geometry.table_gap}
    one_table = geometry.page_size == 1
    if geometry.wide_table:
        shape = (tokens, geometry.columns)
        fields.append(field("page_table_1", shape, per_token, geometry.slots, column_step=1, shared=True, **tables))
    fields.append(
        field(
            "real_page_table",
            (tokens, geometry.pages),
            per_token,
            -(-geometry.slots // geometry.page_size),
            column_step=geometry.page_size,
            alias="page_table_1" if one_table else None,
            **tables,
        )
    )
    if system == "target_verify" and verify_columns(geometry) > 1:
        shape = (bucket, verify_columns(geometry))
        fields.append(field("paged_mqa_ctx_lens_2d", shape, Row.REQUEST, length_limit))
    else:
        source = "cache_seqlens_int32" if system == "decode" else "dsa_seqlens_expanded"
        fields.append(
            field(
                "paged_mqa_ctx_lens_2d",
                (tokens, 1),
                per_token,
                length_limit,
                live_token_rows=ragged,
                alias=source,
            )
        )
    fields += indexer.fields(system, geometry, bucket, tokens, length_limit, columns=fields[-1].columns)
    return Layout(system=system, geometry=geometry, bucket=bucket, tokens=tokens, fields=tuple(fields))
