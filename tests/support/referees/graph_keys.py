"""GraphKey: what a captured ragged-verify graph is good for, so that no replay meets a graph of another shape.

Token rows alone do not say it: 192 slots of 1 token and 32 slots of 6 have as many, and what the capture baked of the
one is wrong for the other (contract 9).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.ragged import capture_lens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """`tokens` token rows over `slots` request slots, captured with `capture_lens` tokens in each slot."""

    tokens: int
    slots: int
    capture_lens: tuple[int, ...]


def key_of(tokens: int, slots: int, draft_tokens: int) -> GraphKey:
    """The key of a graph that is captured so; UsageError unless slots <= tokens <= slots * draft_tokens."""
    return GraphKey(tokens=tokens, slots=slots, capture_lens=capture_lens(tokens, slots, draft_tokens))


def accepts(key: GraphKey, verify_lens: Sequence[int]) -> str | None:
    """Say why the graph of `key` may not replay live requests of `verify_lens` tokens; None if it may.

    Capacity counts slot by slot, because live requests take the first ones in order.
    """
    if len(verify_lens) > key.slots:
        return f"{len(verify_lens)} requests exceed the {key.slots} request slots captured"
    for slot, (length, capacity) in enumerate(zip(verify_lens, key.capture_lens, strict=False)):
        if length > capacity:
            return f"request {slot} verifies {length} tokens, its slot was captured with {capacity}"
    return None


def next_graph_tokens(grid: Sequence[int], total: int) -> int:
    """The smallest of the captured token counts `grid` that holds `total` tokens; UsageError if none does."""
    holding = [tokens for tokens in grid if tokens >= total]
    if not holding:
        raise UsageError(
            f"verify_lens: {total} tokens exceed the largest graph of {max(grid, default=0)}; verify fewer"
        )
    return min(holding)
