"""Strategies: where round specs come from, a counter or whatever else chooses (a Hypothesis draw, in tests).

Only scalars are chosen, and each evenly; `expansion.expand` makes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

import numpy as np

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.system import System
from fuzz.engine.expansion import RoundSpec, Stream, below, bits, regimes, word
from fuzz.engine.limits import most_requests

T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]


def spec_at(seed: int, round_: int, system: System, geometry: Geometry, buckets: Sequence[int]) -> RoundSpec:
    """Return the spec number `round_` of `seed`."""
    element = count()

    def choose(values: Sequence[T]) -> T:
        return values[below(word(seed, round_, Stream.SPEC, next(element)), len(values))]

    return chosen_spec(choose, system, geometry, buckets, range(seed, seed + 1), round_)


def specs_at(seed: int, numbers: range, system: System, geometry: Geometry, buckets: Sequence[int]) -> list[RoundSpec]:
    """Return `spec_at` of all `numbers`, in a few array operations instead of thousands of Python ones."""
    round_ = np.array(numbers, np.int64)[:, None]
    # Bucket, raw batch, regime and hot entries, in the order in which `chosen_spec` chooses them.
    words = bits(np.array([[seed]], np.int64), round_, np.array([[Stream.SPEC]], np.int64), np.arange(4)[None, :])
    bucket = np.array(buckets, np.int64)[below(words[:, 0], len(buckets))]
    most = {each: most_requests(system, geometry, each) for each in buckets}
    raw = below(words[:, 1], np.array([most[each] for each in bucket.tolist()], np.int64) + 1)
    names = regimes(system, geometry)
    columns = (bucket, raw, below(words[:, 2], len(names)), below(words[:, 3], raw + 1), np.array(numbers))
    return [
        RoundSpec(regime=names[which], bucket=size, raw=live, hot=hot, seed=seed, round=number)
        for size, live, which, hot, number in zip(*(column.tolist() for column in columns), strict=True)
    ]


def chosen_spec(
    choose: Choose[Any], system: System, geometry: Geometry, buckets: Sequence[int], seeds: range, round_: int
) -> RoundSpec:
    """Return the spec that `choose` makes, which returns one of the values it is given."""
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
