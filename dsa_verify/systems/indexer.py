"""The indexer's own metadata, which joins the layouts of decode, target-verify and draft-extend when the geometry has
it: the DeepGEMM schedule, the top-k plan and, with pooling, the pooled views and the write plan (contract 3 to 5)."""

from __future__ import annotations

import re
from typing import Final

from dsa_verify.contract.consumers import memory_of
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.kpool import candidates, pooled_pages
from dsa_verify.contract.layout import Compare, Field, Live, Row
from dsa_verify.contract.schedule_variants import VARIANTS, shape, sms_per_slot
from dsa_verify.contract.topk_plan import PLAN_RULES, is_written

INT32_LIMIT: Final = 1 << 31
WRITE_PLAN: Final = "write_plan_"

# By schedule field, the lengths it deals out: (field of the layout, whether they are clamped to at least 1).
SCHEDULED_LENGTHS: Final = {
    "paged_mqa_schedule_metadata": ("paged_mqa_ctx_lens_2d", False),
    "pooled_paged_mqa_schedule_metadata": ("pooled_cache_seqlens_int32", True),
    WRITE_PLAN + "pool_schedule_metadata": (WRITE_PLAN + "pool_seqlens_per_q", True),
}
# By plan field, the lengths it lists.
PLANNED_LENGTHS: Final = {
    "topk_v2_plan": "dsa_seqlens_expanded",
    "pooled_topk_v2_plan": "pooled_cache_seqlens_int32",
    WRITE_PLAN + "pool_topk_v2_plan": WRITE_PLAN + "pool_seqlens_per_q",
}
_DESTINATION: Final = re.compile(r"(?:step\d+_)?")


def destination_prefix(step: int) -> str:
    """Return what the fields of one draft step are called by, where a layout has several (systems/mtp.py)."""
    return f"step{step}_"


def scheduled_lengths(name: str) -> tuple[str, bool] | None:
    """Return SCHEDULED_LENGTHS of a field, of a draft step or of none; None if it is no schedule."""
    prefix = _DESTINATION.match(name)
    assert prefix is not None
    found = SCHEDULED_LENGTHS.get(name[prefix.end() :])
    return None if found is None else (prefix[0] + found[0], found[1])


def schedule_slots(geometry: Geometry, columns: int) -> int:
    """Return how many SMs, or pairs of them, a schedule over lengths of so many `columns` is for (contract 3.2)."""
    variant = VARIANTS[geometry.schedule]
    return geometry.multiprocessors // sms_per_slot(variant, columns if 2 in variant.context_dims else 1)


def fields(
    system: str, geometry: Geometry, bucket: int, tokens: int, length_limit: int, *, columns: int = 1
) -> list[Field]:
    """Return the fields of `system` at a bucket of `bucket` requests and `tokens` token rows; none without the indexer.
    `columns`: those of `paged_mqa_ctx_lens_2d`."""
    if not geometry.indexer:
        return []
    found = [
        _schedule("paged_mqa_schedule_metadata", geometry, "3", columns),
        *_plan("topk_v2_plan", geometry, tokens, "5"),
    ]
    if geometry.pool_size == 1:
        return found
    if system == "decode":
        found += _pooled_table(geometry, bucket, Row.REQUEST)
        found.append(_lengths("pooled_cache_seqlens_int32", (bucket,), Row.REQUEST, length_limit, "4.1"))
        found.append(_schedule("pooled_paged_mqa_schedule_metadata", geometry, "4.1"))
        found += _plan("pooled_topk_v2_plan", geometry, tokens, "4.1")
    elif system == "target_verify":
        found += _pooled_table(geometry, tokens, Row.TOKEN)
    return found + _write_plan(system, geometry, bucket, tokens, length_limit)


def _write_plan(system: str, geometry: Geometry, bucket: int, tokens: int, length_limit: int) -> list[Field]:
    """Return the fields of contract 4.2; which of them exist differs between the modes."""
    count = candidates(1 if system == "decode" else geometry.draft_tokens, geometry)
    found = [
        _wide("req", (bucket,), geometry.request_rows),
        _lengths(WRITE_PLAN + "write_start", (bucket,), Row.REQUEST, length_limit, "4.2"),
        _lengths(WRITE_PLAN + "tail_logical_start", (bucket,), Row.REQUEST, length_limit, "4.2"),
        _wide("write_loc", (bucket, count), geometry.slots, column_step=1, live=Live.CANDIDATES),
    ]
    if system != "decode":
        found += [
            _lengths(WRITE_PLAN + "seqlens_per_q", (tokens,), Row.TOKEN, length_limit, "4.2"),
            _lengths(WRITE_PLAN + "pool_seqlens_per_q", (tokens,), Row.TOKEN, length_limit, "4.2"),
            _schedule(WRITE_PLAN + "pool_schedule_metadata", geometry, "4.2"),
            *_plan(WRITE_PLAN + "pool_topk_v2_plan", geometry, tokens, "4.2"),
        ]
    if system == "draft_extend":
        high = geometry.draft_tokens + 1
        found.append(_lengths(WRITE_PLAN + "effective_n_per_batch", (bucket,), Row.REQUEST, high, "4.2"))
    return found


def _schedule(name: str, geometry: Geometry, section: str, columns: int = 1) -> Field:
    form = shape(schedule_slots(geometry, columns))
    return Field(
        name=name,
        shape=form,
        row=Row.MULTIPROCESSOR,
        section=section,
        low=0,
        high=INT32_LIMIT,
        memory=memory_of(name),
    )


def _plan(name: str, geometry: Geometry, rows: int, section: str) -> list[Field]:
    """Return the plan, or nothing for a batch in which none is written and its buffer means nothing (contract 5)."""
    if not is_written(rows, PLAN_RULES[geometry.plan_rules].max_clusters):
        return []
    shape = (rows + 1, 2)
    return [
        Field(name=name, shape=shape, row=Row.ITEM, section=section, low=0, high=INT32_LIMIT, compare=Compare.ITEMS)
    ]


def _pooled_table(geometry: Geometry, rows: int, row: Row) -> list[Field]:
    return [
        Field(
            name="pooled_real_page_table",
            shape=(rows, pooled_pages(geometry)),
            row=row,
            section="4.1",
            low=0,
            high=-(-geometry.slots // geometry.allocator_page),
            column_step=geometry.allocator_page,
            row_gap=geometry.table_gap,
        )
    ]


def _lengths(name: str, shape: tuple[int, ...], row: Row, high: int, section: str) -> Field:
    return Field(name=name, shape=shape, row=row, section=section, low=0, high=high, memory=memory_of(name))


def _wide(name: str, shape: tuple[int, ...], high: int, *, column_step: int = 0, live: Live = Live.TOKENS) -> Field:
    return Field(
        name=WRITE_PLAN + name,
        shape=shape,
        row=Row.REQUEST,
        section="4.2",
        low=0,
        high=high,
        dtype="int64",
        column_step=column_step,
        live=live,
    )
