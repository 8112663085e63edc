"""Schedule variants: how each DeepGEMM version deals paged-MQA tiles out to SMs, as data (contract 3.2).

A schedule is int32 [S + 1, 2] for S multiprocessors (SMs). Row i, (q unit, split), is where SM i starts; it ends
where row i + 1 starts, and the last row is the sentinel. A tile is one q unit and one split of its keys. A variant may
let two SMs work as one for some N; then pairs take the place of SMs, and a schedule is [S // 2 + 1, 2]. Nothing is
computed here: builders, oracle, referee and laws each derive the rows from these facts on their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import Enum
from typing import Final

from dsa_verify.base.errors import UsageError

ARCHITECTURES: Final = (90, 100, 120)


class Placement(Enum):
    """One end of the SMs gets the `total % S` tiles left over; empty SMs are at the other end."""

    LEAD = "leading"
    TAIL = "trailing"


class Unit(Enum):
    """The first column of a row counts one of these."""

    REQUEST = "request"
    ATOM = "atom"
    TOKEN_RUN = "token run"


class Indices(Enum):
    """A builder takes `indices`, which say to what request each token belongs, or it does not."""

    REFUSED = "refused"
    OPTIONAL = "optional"
    MANDATORY = "mandatory"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleVariant:
    """One way to build a schedule.

    `split`: tokens of a kv split. `context_dims`: ranks that `context_lens` may have. `pairs_odd`: whether an odd
    N >= 3 makes pairs and one single, ceil(N / 2) atoms, or N atoms. `cost_block`: 0 if a tile of an n-token run
    costs n, else b in the cost `2 * b * ceil(n / b) + n`. `paired_at`: N at which two SMs work as one. `sentinel`: how
    the last row gets its value, which is always (row count times `units_per_request`, 0). `undefined_when_empty`:
    whether the shipped builder names another row than the sentinel where there is no tile at all. `upstream`, `wheels`:
    the DeepGEMM commit, and the `sgl-deep-gemm` releases, that have it on `architectures`. `disassembled`: no source
    was seen, the facts are from machine code.
    """

    name: str
    placement: Placement
    unit: Unit
    split: int = 256
    context_dims: tuple[int, ...] = (1, 2)
    indices: Indices = Indices.REFUSED
    architectures: tuple[int, ...] = (90, 100)
    pairs_odd: bool = True
    cost_block: int = 0
    paired_at: tuple[int, ...] = ()
    undefined_when_empty: bool = False
    max_next_n: int | None = None
    max_multiprocessors: int | None = None
    sentinel: str
    upstream: str = ""
    wheels: tuple[str, ...] = ()
    disassembled: bool = False

    def validate(self, context_shape: Sequence[int], multiprocessors: int, *, indexed: bool) -> None:
        """UsageError unless this variant takes such a call; `indexed`: whether `indices` are given."""
        if len(context_shape) not in self.context_dims:
            allowed = " or ".join(f"{dims}-D" for dims in self.context_dims)
            raise UsageError(
                f"context_lens: shape {tuple(context_shape)} is {len(context_shape)}-D; schedule variant {self.name} "
                f"takes {allowed}; reshape it, or use another variant"
            )
        if min(context_shape) < 1:
            raise UsageError(f"context_lens: shape {tuple(context_shape)} holds no request; at least 1 is needed")
        next_n = context_shape[1] if len(context_shape) == 2 else 1
        if self.max_next_n is not None and next_n > self.max_next_n:
            raise UsageError(
                f"context_lens: {next_n} tokens a request; schedule variant {self.name} takes at most "
                f"{self.max_next_n}; give each token a row of its own"
            )
        if multiprocessors < 1 or multiprocessors > (self.max_multiprocessors or multiprocessors):
            raise UsageError(
                f"multiprocessors: {multiprocessors} is outside 1..{self.max_multiprocessors or 'any'} of schedule "
                f"variant {self.name}; choose a value inside"
            )
        if multiprocessors < sms_per_slot(self, next_n):
            raise UsageError(
                f"multiprocessors: {multiprocessors} makes no pair, and schedule variant {self.name} takes them in "
                f"pairs at {next_n} tokens a request; use 2 or more"
            )
        if indexed and self.indices is Indices.REFUSED:
            raise UsageError(f"indices: given, but schedule variant {self.name} refuses them; leave them out")
        if not indexed and self.indices is Indices.MANDATORY:
            raise UsageError(f"indices: missing; schedule variant {self.name} needs int32 [rows]; pass them")
        if indexed and next_n != 1:
            raise UsageError(
                f"context_lens: {next_n} tokens a request together with indices, which need 1; "
                "give each token a row of its own"
            )


VARIANTS: Final[dict[str, ScheduleVariant]] = {
    variant.name: variant
    for variant in (
        ScheduleVariant(
            name="V1",
            placement=Placement.LEAD,
            unit=Unit.REQUEST,
            context_dims=(1,),
            sentinel="falls out",
            upstream="80ceeb2, 59f2c07 (2025-09)",
        ),
        ScheduleVariant(
            name="V2",
            placement=Placement.LEAD,
            unit=Unit.REQUEST,
            sentinel="falls out",
            upstream="38f8ef7 (2025-11)",
        ),
        ScheduleVariant(
            name="V3",
            placement=Placement.LEAD,
            unit=Unit.ATOM,
            context_dims=(2,),
            pairs_odd=False,
            sentinel="falls out",
            upstream="7f2a703 (2026-04-17)",
        ),
        ScheduleVariant(
            name="V4",
            placement=Placement.LEAD,
            unit=Unit.ATOM,
            indices=Indices.OPTIONAL,
            sentinel="falls out",
            upstream="891d57b (2026-04-24)",
            wheels=("0.1.0", "0.1.3"),
        ),
        # Not devices: V4b and V5 with a split within reach of the lengths of the `tiny` geometries.
        ScheduleVariant(
            name="tiny",
            placement=Placement.TAIL,
            unit=Unit.ATOM,
            split=16,
            sentinel="explicit",
        ),
        ScheduleVariant(
            name="tiny_runs",
            placement=Placement.LEAD,
            unit=Unit.TOKEN_RUN,
            split=16,
            architectures=(100,),
            sentinel="written for every start past the end",
        ),
        ScheduleVariant(
            name="V4b",
            placement=Placement.TAIL,
            unit=Unit.ATOM,
            indices=Indices.OPTIONAL,
            architectures=(90,),
            sentinel="written; falls out with indices",
            upstream="88965b0 (2026-06-01)",
            wheels=("0.1.4.post1", "0.1.5", "0.1.5.post1", "0.1.7", "0.2.3.post2", "0.2.5"),
        ),
        ScheduleVariant(
            name="V4c",
            placement=Placement.TAIL,
            unit=Unit.REQUEST,
            architectures=(90,),
            paired_at=(4,),
            sentinel="explicit",
            undefined_when_empty=True,
            upstream="a6b593d (nv_dev); the fork that vLLM 0.33.0 pins",
        ),
        ScheduleVariant(
            name="V5",
            placement=Placement.LEAD,
            unit=Unit.TOKEN_RUN,
            indices=Indices.OPTIONAL,
            architectures=(100,),
            sentinel="written for every start past the end",
            upstream="54e2261 (2026-06-23)",
            wheels=("0.1.4.post1", "0.1.5", "0.1.5.post1", "0.1.7"),
        ),
        ScheduleVariant(
            name="V5p",
            placement=Placement.LEAD,
            unit=Unit.TOKEN_RUN,
            indices=Indices.OPTIONAL,
            architectures=(100,),
            sentinel="written for every start past the end",
            wheels=("0.2.3.post2",),
        ),
        ScheduleVariant(
            name="V6",
            placement=Placement.LEAD,
            unit=Unit.TOKEN_RUN,
            split=384,
            context_dims=(1,),
            indices=Indices.MANDATORY,
            architectures=(100,),
            cost_block=4,
            max_next_n=1,
            sentinel="written for every start past the end",
            wheels=("0.2.5",),
            disassembled=True,
        ),
        ScheduleVariant(
            name="V120",
            placement=Placement.TAIL,
            unit=Unit.ATOM,
            split=128,
            indices=Indices.OPTIONAL,
            architectures=(120,),
            sentinel="written; every row if there are no tiles",
            wheels=("0.2.3.post2", "0.2.5"),
        ),
        ScheduleVariant(
            name="JIT",
            placement=Placement.TAIL,
            unit=Unit.REQUEST,
            architectures=ARCHITECTURES,
            max_next_n=1,
            max_multiprocessors=1024,
            sentinel="written for every start past the end",
            upstream="SGLang's own dsv4 metadata kernel",
        ),
    )
}


def variant_named(name: str) -> ScheduleVariant:
    """Return the variant of that name; UsageError lists the known ones."""
    if name not in VARIANTS:
        raise UsageError(f"schedule variant {name!r} is unknown; known variants: {', '.join(VARIANTS)}")
    return VARIANTS[name]


def units_per_request(variant: ScheduleVariant, next_n: int) -> int:
    """Return how far the first column advances from one request of `next_n` tokens to the next; 1 with indices."""
    if variant.unit is Unit.REQUEST:
        return 1
    if variant.unit is Unit.TOKEN_RUN:
        return next_n
    if next_n % 2 and not variant.pairs_odd:
        return next_n
    return -(-next_n // 2)


def sms_per_slot(variant: ScheduleVariant, next_n: int) -> int:
    """Return how many SMs one row of a schedule is for: 2 where they work in pairs, else 1."""
    return 2 if next_n in variant.paired_at else 1


def shape(slots: int) -> tuple[int, int]:
    """Return the shape of the schedule tensor for so many SMs or pairs of them; all variants have the same."""
    return slots + 1, 2
