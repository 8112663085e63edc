"""Draws: how each input of a declaration gets its values, round after round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from dsa_verify.declare.sizes import Expression


@dataclasses.dataclass(frozen=True)
class Draw:
    """One way to draw an input."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Length(Draw):
    """The length of each request: [B], int64 or int32, 0 to `L` tokens.

    The simulated engine grows it as requests accept drafts, and leads it past page boundaries, the top-k and `edges`
    (sizes whose multiples a formula turns at). `before_draft`: whether it leaves out the draft's tokens, which are live
    beyond it then. `pad`: what pad rows hold.
    """

    edges: tuple[Expression, ...] = ()
    before_draft: bool = False
    pad: Expression = 1


@dataclasses.dataclass(frozen=True)
class RequestRow(Draw):
    """The row of the request table that each request has: [B], int64 or int32, 1 to `R` - 1; 0 of pad rows."""


@dataclasses.dataclass(frozen=True)
class PageTable(Draw):
    """The request table: int32 [R, C], the slot of each token of each request row. Slots of one page are consecutive,
    requests move to other pages between rounds, some share their first pages, and row 0 is all 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Count(Draw):
    """A count of each request, `low` to `N`, drawn by the engine: [B], int32; `N` of pad rows."""

    low: Expression = 1


@dataclasses.dataclass(frozen=True)
class Uniform(Draw):
    """Any integers, `low` <= v < `high`: int32 or int64, the first dimension a multiple of B. The draw is of the
    round's seed, so that a case holds no more than that."""

    low: Expression
    high: Expression
    pad: Expression = 0


@dataclasses.dataclass(frozen=True)
class Permutation(Draw):
    """Each row is a permutation of 0 to its number of columns - 1: int32 or int64 [rows, columns], the first dimension
    a multiple of B. Pad rows hold 0."""


@dataclasses.dataclass(frozen=True)
class Derived(Draw):
    """What `function(sizes, inputs)` makes, on the device, of the inputs that are declared above it; it is captured, so
    that it reads nothing on the host. Pad rows hold `pad`."""

    function: Callable[[Any, Any], Any]
    pad: Expression = 0


@dataclasses.dataclass(frozen=True)
class Constant(Draw):
    """What `function(sizes, device)` makes once: a tensor of any shape that no round changes."""

    function: Callable[[Any, Any], Any]
