"""Rules of ragged verify that hold for subject and oracle alike: refusals, and which token rows a round has
(contract 9). Whoever captures or replays calls them on the host; on the device nothing is checked."""

from __future__ import annotations

from collections.abc import Sequence

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry


def graph_tokens(geometry: Geometry, bucket: int) -> int:
    """Return G: token rows of the graph that is captured for `bucket` request slots."""
    full = bucket * geometry.draft_tokens
    return min(full, geometry.graph_tokens) if geometry.graph_tokens else full


def capture_lens(tokens: int, slots: int, draft_tokens: int) -> tuple[int, ...]:
    """Verify lengths that a graph of `tokens` token rows and `slots` request slots is captured with, the first of them
    getting one more; UsageError unless slots <= tokens <= slots * draft_tokens."""
    if slots < 1 or not slots <= tokens <= slots * draft_tokens:
        raise UsageError(
            f"graph_tokens: {tokens} token rows for {slots} request slots are outside {slots}..{slots * draft_tokens}, "
            f"1 to draft_tokens {draft_tokens} each; choose inside"
        )
    base, more = divmod(tokens, slots)
    return tuple(base + (slot < more) for slot in range(slots))


def check_verify_lens(geometry: Geometry, bucket: int, verify_lens: Sequence[int] | None, *, where: str = "") -> None:
    """UsageError unless each of `verify_lens` is 1 to N and their sum fits the graph of `bucket` slots."""
    if verify_lens is None:
        raise UsageError(f"{where}verify_lens: missing; give the tokens to verify of each request")
    for b, length in enumerate(verify_lens):
        if not 1 <= length <= geometry.draft_tokens:
            raise UsageError(
                f"{where}verify_lens[{b}]: {length} is outside 1..draft_tokens {geometry.draft_tokens}; choose inside"
            )
    total, limit = sum(verify_lens), graph_tokens(geometry, bucket)
    if total > limit:
        raise UsageError(
            f"{where}verify_lens: {total} tokens exceed the {limit} of a graph of {bucket} requests; verify fewer, or "
            "raise graph_tokens"
        )


def padded_to_bucket(
    verify_lens: Sequence[int], slots: int, tokens: int, cap: int | None = None
) -> tuple[tuple[int, ...], int | None]:
    """Return token rows of each of `slots` request slots of a graph of `tokens` token rows, and their total.

    Leftover tokens go to the pad requests, the first of them getting one more, some getting none if there are too few;
    without pad requests to the last one. `cap` cuts every row; the total is None where that leaves tokens to nobody.
    UsageError for a length below 1, more requests than slots or more tokens than the graph has.
    """
    if len(verify_lens) > slots:
        raise UsageError(f"verify_lens: {len(verify_lens)} requests exceed {slots} request slots; use a larger graph")
    if any(length < 1 for length in verify_lens):
        raise UsageError(f"verify_lens: {min(verify_lens)} is below 1; every request verifies a token")
    leftover, pads = tokens - sum(verify_lens), slots - len(verify_lens)
    if leftover < 0:
        raise UsageError(f"verify_lens: {sum(verify_lens)} tokens exceed the {tokens} of the graph; verify fewer")
    padded = list(verify_lens)
    if pads:
        base, more = divmod(leftover, pads)
        padded += [base + (pad < more) for pad in range(pads)]
    else:
        padded[-1] += leftover
    if cap is not None:
        padded = [min(length, cap) for length in padded]
    return tuple(padded), tokens if sum(padded) == tokens else None
