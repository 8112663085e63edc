"""Page lists: on which page the live tokens of each batch row lie, and how many slots are not where a page list says.

Inside an allocator page slots are consecutive and aligned (contract 0.1), so a list of page ids says all that
`req_to_token` does, in a page's part of the room. Where a server does not keep to that, the slots are counted.
"""

from __future__ import annotations

import torch


def list_pages(
    request_map: torch.Tensor,
    index: torch.Tensor,
    ends: torch.Tensor,
    page: int,
    pages: torch.Tensor,
    broken: torch.Tensor,
) -> None:
    """Fills `pages` int32 [bucket, P] with ids of the pages of `page` slots that tokens below `ends` lie on, -1 beyond,
    and sets `broken` int32 [1] to the number of slots that are not where those pages have them.

    `request_map`: int32 [rows, columns], whole rows. `index`: int64 or int32 [bucket], legal rows of it. `ends`: int32
    [bucket], 0 to columns. Asynchronous and capturable on a CUDA device.
    """
    broken.zero_()
    if request_map.is_cuda:
        from dsa_verify.overlay.pages_kernel import launch

        launch(request_map, index, ends, page, pages, broken)
        return
    rows = request_map.index_select(0, index)
    position = torch.arange(rows.shape[1], device=rows.device)
    live = position < ends[:, None]
    firsts = rows[:, ::page]
    listed = torch.arange(firsts.shape[1], device=rows.device) * page < ends[:, None]
    count = min(firsts.shape[1], pages.shape[1])
    pages.fill_(-1)
    pages[:, :count].copy_(torch.where(listed, firsts // page, -1)[:, :count])
    wanted = firsts.repeat_interleave(page, 1)[:, : rows.shape[1]] + position % page
    wrong = (live & (rows != wanted)).sum() + (listed & (firsts % page != 0)).sum()
    broken.copy_(wrong.view(1))
