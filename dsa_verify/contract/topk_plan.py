"""Rules of the top-k v2 plan that hold for subject and oracle alike: the threshold tables, and when there is a plan
at all (contract 5). Building one is left to each of them.
"""

from __future__ import annotations

import dataclasses
from typing import Final

MAX_PLAN_ROWS: Final = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """One GPU generation chooses by these rules the length above which a cluster of blocks computes a row.

    `thresholds`: pairs (T, cap), T ascending: T is accepted while at most `cap` rows are longer. `floor`: the least
    threshold ever stored. `max_clusters`: clusters that fit on the device (an occupancy probe; the values below are
    its fallbacks), 0 to disable plans. `static_threshold`: taken in place of a chosen one unless negative.
    """

    name: str
    thresholds: tuple[tuple[int, int], ...]
    max_clusters: int
    floor: int = 32_768
    static_threshold: int = -1


H200: Final = PlanRules(
    name="H200",
    thresholds=((65_536, 30), (98_304, 45), (131_072, 60), (196_608, 80), (262_144, 112), (393_216, 128)),
    max_clusters=30,
)
B200: Final = PlanRules(
    name="B200",
    thresholds=(
        (32_768, 48),
        (131_072, 66),
        (163_840, 99),
        (196_608, 132),
        (262_144, 198),
        (393_216, 231),
        (524_288, 264),
    ),
    max_clusters=33,
)
# Not devices: every branch within reach of the lengths and batches of the `tiny` geometries. The floor is above the
# smallest threshold in one, and hides it, and below all of them in the other, where a smaller one would show. The other
# has a single cluster, so that a plan is written from two rows on.
_WITHIN_REACH: Final = ((8, 1), (24, 2), (48, 3), (72, 4), (96, 5))
TINY: Final = PlanRules(name="tiny", thresholds=_WITHIN_REACH, max_clusters=2, floor=16)
TINY_LOW: Final = PlanRules(name="tiny_low", thresholds=_WITHIN_REACH, max_clusters=1, floor=4)

PLAN_RULES: Final = {rules.name: rules for rules in (H200, B200, TINY, TINY_LOW)}


def is_written(rows: int, max_clusters: int) -> bool:
    """Return whether a plan over `rows` rows is written and read at all; otherwise its buffer means nothing."""
    return 0 < max_clusters < rows <= MAX_PLAN_ROWS
