"""The Triton launch of `list_pages`: one program a batch row and group of pages, which reads live slots only."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

GROUP_SLOTS: Final = 2048  # slots that one program looks at


def launch(
    request_map: torch.Tensor,
    index: torch.Tensor,
    ends: torch.Tensor,
    page: int,
    pages: torch.Tensor,
    broken: torch.Tensor,
) -> None:
    """Do as `list_pages`, which has set `broken` to 0."""
    batch, columns = pages.shape
    width = triton.next_power_of_2(page)
    group = min(max(1, GROUP_SLOTS // width), triton.next_power_of_2(columns))
    _pages_kernel[(batch, triton.cdiv(columns, group))](
        request_map,
        index,
        ends,
        pages,
        broken,
        request_map.stride(0),
        index.stride(0),
        ends.stride(0),
        pages.stride(0),
        columns,
        PAGE=page,
        WIDTH=width,
        GROUP=group,
    )


@triton.jit
def _pages_kernel(
    request_map,
    index,
    ends,
    pages,
    broken,
    map_stride,
    index_stride,
    ends_stride,
    pages_stride,
    columns,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    page = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    offset = tl.arange(0, WIDTH)
    end = tl.load(ends + batch * ends_stride)
    listed = (page * PAGE < end) & (page < columns)
    row = request_map + tl.load(index + batch * index_stride).to(tl.int64) * map_stride
    first = tl.load(row + page * PAGE, mask=listed, other=0)
    tl.store(pages + batch * pages_stride + page, tl.where(listed, first // PAGE, -1), mask=page < columns)
    position = page[:, None] * PAGE + offset[None, :]
    live = (position < end) & listed[:, None] & (offset < PAGE)[None, :]
    slot = tl.load(row + position, mask=live, other=0)
    wrong = live & (slot != first[:, None] + offset[None, :])
    misaligned = listed & (first % PAGE != 0)
    count = tl.sum(tl.sum(wrong.to(tl.int32), axis=1), axis=0) + tl.sum(misaligned.to(tl.int32), axis=0)
    if count > 0:
        tl.atomic_add(broken, count)


KERNELS: tuple[Any, ...] = (_pages_kernel,)
