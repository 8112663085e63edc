"""EdgeKind: what lies at the edge of what a copy or a kernel may be asked for (contract 1.7, 2.2, 3.6, 10)."""

from __future__ import annotations

import enum
from typing import Final


class EdgeKind(enum.Enum):
    """The kinds of edges, in the order in which they are run."""

    GAP = "tables with a gap behind each row"
    BATCH = "the largest batch"
    LONG = "requests of a million tokens"
    FAR = "request rows up to 2**31 elements apart"
    WIDE = "tables of more than 2**31 elements"
    POOLS = "pools of more than 2**31 words a rank"
    EMPTY = "every length 0"  # a known defect may end the process here, so that nothing can run after it


TABLES: Final = frozenset(EdgeKind) - {EdgeKind.POOLS}
