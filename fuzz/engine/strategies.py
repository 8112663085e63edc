"""Strategies: where round specs come from, a Hypothesis draw or a counter.

Only scalars are drawn, and each evenly: Hypothesis's buffer is small, so bulk data would end an example early, and its
default sizes are small too, so a large round before a small one would be rare. `expansion.expand` makes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.system import System
from fuzz.engine.expansion import Lane, RoundSpec, below, bits, regimes, word
from fuzz.engine.limits import most_requests

if TYPE_CHECKING:  # a run that only counts does not need it
    from hypothesis.strategies import SearchStrategy

T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]
SEEDS: Final = 1 << 16  # of a Hypothesis draw: enough to differ, few enough to read


def specs(system: System, geometry: Geometry, buckets: Sequence[int]) -> SearchStrategy[RoundSpec]:
    """Specs drawn by Hypothesis; they shrink towards an idle round of the first bucket."""
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: Any) -> RoundSpec:
        return _spec(lambda values: draw(st.sampled_from(values)), system, geometry, buckets, range(SEEDS), 0)

    return drawn()


def spec_at(seed: int, round_: int, system: System, geometry: Geometry, buckets: Sequence[int]) -> RoundSpec:
    """Return the spec number `round_` of `seed`."""
    element = count()

    def choose(values: Sequence[T]) -> T:
        return values[below(word(seed, round_, Lane.SPEC, next(element)), len(values))]

    return _spec(choose, system, geometry, buckets, range(seed, seed + 1), round_)


def specs_at(seed: int, numbers: range, system: System, geometry: Geometry, buckets: Sequence[int]) -> list[RoundSpec]:
    """Return `spec_at` of all `numbers`, in a few array operations instead of thousands of Python ones."""
    round_ = np.array(numbers, np.int64)[:, None]
    # Bucket, raw batch, regime and hot entries, in the order in which `_spec` chooses them.
    words = bits(np.array([[seed]], np.int64), round_, np.array([[Lane.SPEC]], np.int64), np.arange(4)[None, :])
    bucket = np.array(buckets, np.int64)[below(words[:, 0], len(buckets))]
    most = {each: most_requests(system, geometry, each) for each in buckets}
    raw = below(words[:, 1], np.array([most[each] for each in bucket.tolist()], np.int64) + 1)
    names = regimes(system, geometry)
    columns = (bucket, raw, below(words[:, 2], len(names)), below(words[:, 3], raw + 1), np.array(numbers))
    return [
        RoundSpec(regime=names[which], bucket=size, raw=live, hot=hot, seed=seed, round=number)
        for size, live, which, hot, number in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _spec(
    choose: Choose[Any], system: System, geometry: Geometry, buckets: Sequence[int], seeds: range, round_: int
) -> RoundSpec:
    bucket = choose(buckets)
    raw = choose(range(most_requests(system, geometry, bucket) + 1))
    return RoundSpec(
        regime=choose(regimes(system, geometry)),
        bucket=bucket,
        raw=raw,
        hot=choose(range(raw + 1)),
        seed=choose(seeds),
        round=round_,
    )
