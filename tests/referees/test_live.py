"""What is live, stated a second time in plain loops: both sides of every comparison of outputs depend on that rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa_verify.contract.batch import Batch
from dsa_verify.contract.live import live_candidates, live_tokens, owned_rows, owners
from dsa_verify.contract.padded import PADDED_MODES
from dsa_verify.systems.catalogue import SYSTEMS

WIDEST, N, POOL = 6, 3, 4
COUNTS = ("extend_lens", "accept_lens", "verify_lens")


def says(system: str, raw: int, bucket: int, lens: dict[str, list[int]]) -> list[int]:
    """Token rows of each batch row of the bucket (contract 1.1 to 1.3, 7.1, 9)."""
    if system == "draft_extend":
        return [lens["extend_lens"][b] for b in range(bucket)]
    if system == "padded draft_block":
        return [N - 1] * bucket
    if system != "ragged_verify":
        return [1 if system in ("decode", "mtp", "dcp", "padded decode") else N] * bucket
    rows, left = [0] * bucket, bucket * N
    for b in range(raw):
        rows[b] = lens["verify_lens"][b]
        left -= rows[b]
    while left:
        for b in range(raw, bucket) if raw < bucket else [bucket - 1]:
            if left:
                rows[b] += 1
                left -= 1
    return rows


def closes(system: str, length: int, accepted: int) -> int:
    """Pools of which a request of `length` writes the last token (contract 4.2)."""
    if system == "target_verify":
        first, count = length, N
    elif system == "draft_extend":
        first, count = length - N, accepted
    else:
        first, count = length - 1, 1
    return sum((position + 1) % POOL == 0 for position in range(first, first + count))


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int, list[int], dict[str, list[int]]]]:
    """(bucket, raw batch, lengths, what rounds say), all rows to the widest."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        bucket = draw(st.integers(1, WIDEST))
        row = st.lists(st.integers(N, 60), min_size=WIDEST, max_size=WIDEST)
        said = st.lists(st.integers(1, N), min_size=WIDEST, max_size=WIDEST)
        lens = {name: draw(said) for name in COUNTS}
        found.append((bucket, draw(st.integers(0, bucket)), draw(row), lens))
    return found


@pytest.mark.parametrize("system", [*sorted(set(SYSTEMS) - {"padded"}), *(f"padded {mode}" for mode in PADDED_MODES)])
@given(rounds=batches())
def test_the_rule_is_that_of_the_loops(system: str, rounds) -> None:
    """`system`: a name, and of padded its mode."""
    for xp in (np, torch):
        check(xp, system, rounds)


def check(xp: Any, system: str, rounds: list[tuple[int, int, list[int], dict[str, list[int]]]]) -> None:
    def column(values: object) -> object:
        array = np.array(values, np.int64)
        return array if xp is np else torch.from_numpy(array)

    name, _, mode = system.partition(" ")
    known = SYSTEMS[name]
    pooled = known.pools
    changes = {"pool_size": POOL, "indexer": True, "multiprocessors": 5, "schedule": "tiny"} if pooled else {}
    changes |= {"padded_mode": mode} if mode else {}
    geometry = known.geometry("tiny_v4" if mode else "tiny", {"draft_tokens": N if known.drafts else 1, **changes})
    batch = Batch(
        row=column(range(WIDEST)),
        bucket=column([[bucket] for bucket, *_ in rounds]),
        raw=column([[raw] for _, raw, *_ in rounds]),
        tokens=column([[known.capacity(geometry, bucket)] for bucket, *_ in rounds]),
        seq_lens=column([lengths for _, _, lengths, _ in rounds]),
        lens={name: column([lens[name] for *_, lens in rounds]) for name in COUNTS},
    )
    owned = owned_rows(xp, known, geometry, batch)
    owner, total = owners(xp, batch, owned, column(range(WIDEST * N)))
    live = live_tokens(known, batch, owned)
    closed = live_candidates(xp, known, geometry, batch)
    for i, (bucket, raw, lengths, lens) in enumerate(rounds):
        rows = says(system, raw, bucket, lens)
        assert owned[i, :bucket].tolist() == rows
        assert int(total[i, 0]) == sum(rows)
        listed = [b for b in range(bucket) for _ in range(rows[b])]
        assert owner[i].tolist() == listed + [0] * (WIDEST * N - len(listed))
        added = rows if system in ("target_verify", "ragged_verify") else [0] * bucket
        assert live[i, :bucket].tolist() == [lengths[b] + added[b] for b in range(bucket)]
        if pooled:
            accepted = [lens["accept_lens"][b] for b in range(raw)]
            wanted = [closes(system, lengths[b], accepted[b]) for b in range(raw)]
            assert closed[i].tolist() == wanted + [0] * (WIDEST - raw)
