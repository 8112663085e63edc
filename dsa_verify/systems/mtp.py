"""Layout of the multi-token-prediction draft steps: n - 1 destinations, each with the whole decode metadata of its own
(contract 2). The record they are refreshed from belongs to the subject and is no field."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from dsa_verify.contract.edge_kind import TABLES, EdgeKind
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Field, Layout
from dsa_verify.contract.size import Size
from dsa_verify.contract.system import OF_OTHERS, Dealer, Fields, System
from dsa_verify.systems import basic
from dsa_verify.systems.indexer import destination_prefix

if TYPE_CHECKING:
    from dsa_verify.contract.subject import Buffers

MAX_DRAFT_STEPS: Final = 8
TURNS: Final = (4, 2, 3, 5)  # draft steps of the matrix
STEPS: Final = (2, 3, 4, 5)  # of fuzzing


def mtp(geometry: Geometry, bucket: int) -> Layout:
    """Return the decode fields once for each destination; no memory is shared between destinations or buckets."""
    decode = basic.decode(geometry, bucket)
    fields = tuple(
        dataclasses.replace(
            field,
            name=destination_prefix(step) + field.name,
            alias=None if field.alias is None else destination_prefix(step) + field.alias,
            shared=False,
        )
        for step in range(destinations(geometry))
        for field in decode
    )
    return dataclasses.replace(decode, system="mtp", fields=fields)


def destinations(geometry: Geometry) -> int:
    """Return the number of draft backends: n speculative steps have n - 1 (contract 2)."""
    steps: int = geometry.draft_steps
    return steps - 1


def destination_buffers(buffers: Buffers, step: int) -> Buffers:
    """The tensors of one destination under the names, and with the layout, of decode."""
    from dsa_verify.contract.subject import Buffers  # imports torch

    prefix = destination_prefix(step)
    fields = tuple(_as_decode(field, prefix) for field in buffers.layout if field.name.startswith(prefix))
    layout = dataclasses.replace(buffers.layout, system="decode", fields=fields)
    return Buffers(layout, {field.name: buffers[prefix + field.name] for field in fields})


def _as_decode(field: Field, prefix: str) -> Field:
    alias = None if field.alias is None else field.alias.removeprefix(prefix)
    return dataclasses.replace(field, name=field.name.removeprefix(prefix), alias=alias)


def _turn(geometry: Geometry, i: int, fixed: frozenset[str]) -> Fields:
    return {} if OF_OTHERS in fixed else {"draft_steps": TURNS[(i + i // 4) % 4]}


def _deal(dealer: Dealer, geometry: Geometry) -> Fields:
    return {} if dealer.engine else {"draft_steps": dealer.deal("draft_steps", STEPS)}


def _note(geometry: Geometry) -> str:
    return f"{destinations(geometry)} draft step(s)"


SYSTEM: Final = System(
    name="mtp",
    summary="n - 1 draft steps, each with decode metadata of its own, refreshed from one record (contract 2)",
    layout=mtp,
    oracle="oracles.mtp:MtpOracle",
    subjects={
        "triton": "dsa_verify.subjects.pipelines.mtp:Mtp",
        "sibling": "dsa_verify.subjects.pipelines.mtp:Sibling",
    },
    # n speculative steps, whose n - 1 draft backends are the destinations (contract 2).
    sizes=(Size(name="draft_steps", default=4, low=2, high=MAX_DRAFT_STEPS, shrinks=True, before="indexer"),),
    by_default=False,  # n - 1 times the work of decode
    indexer=True,
    pools=True,
    empty_rows=True,
    turn=_turn,
    deal=_deal,
    edges=TABLES,
    # So few that each is copied to alone, and so many that three are copied to at once (contract 2.3).
    edge_fields={EdgeKind.WIDE: ({"draft_steps": 2}, {"draft_steps": 4})},
    all_fields={"draft_steps": MAX_DRAFT_STEPS},
    note=_note,
)
