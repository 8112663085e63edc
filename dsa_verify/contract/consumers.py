"""Consumers of a field ask something of its memory; this table says what, as the contract or their own code states it.

All of them step through the elements of a row without a stride, and through the rows of a table with one: DeepGEMM
(`block_table.stride(1) == 1`), FlashAttention and FlashMLA (`stride(-1) == 1`). The table has those that ask for more.
"""

from __future__ import annotations

from typing import Final

from dsa_verify.contract.layout import Memory

_SCHEDULE: Final = Memory(consumer="DeepGEMM", source="rows of 8 bytes, contiguous: contract 3.1 and 3.5", alignment=8)
_CONTEXT: Final = Memory(consumer="DeepGEMM", source="is_contiguous in its csrc/apis/attention.hpp")
_LENGTHS: Final = Memory(
    consumer="FlashAttention", source="CHECK_CONTIGUOUS in its hopper/flash_api.cpp, and so in FlashMLA"
)
_BY_NAME: Final = {
    "cache_seqlens_int32": _LENGTHS,
    "cu_seqlens_q": _LENGTHS,
    "cu_seqlens_k": _LENGTHS,
    "dsa_cache_seqlens_int32": _LENGTHS,
    "dsa_cu_seqlens_q": _LENGTHS,
    "dsa_cu_seqlens_k": _LENGTHS,
    "paged_mqa_ctx_lens_2d": _CONTEXT,
    "paged_mqa_schedule_metadata": _SCHEDULE,
    "pooled_cache_seqlens_int32": _CONTEXT,
    "pooled_paged_mqa_schedule_metadata": _SCHEDULE,
    "write_plan_pool_seqlens_per_q": _CONTEXT,
    "write_plan_pool_schedule_metadata": _SCHEDULE,
}


def memory_of(name: str) -> Memory | None:
    """Return what is asked of the field `name`; None where adjacent elements of a row are enough."""
    return _BY_NAME.get(name)
