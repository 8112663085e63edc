"""Layout of the multi-token-prediction draft steps: n - 1 destinations, each with the whole decode metadata of its own
(contract 2). The record they are refreshed from belongs to the subject and is no field."""

from __future__ import annotations

import dataclasses

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Field, Layout
from dsa_verify.contract.subject import Buffers
from dsa_verify.systems import basic
from dsa_verify.systems.indexer import destination_prefix


def mtp(geometry: Geometry, bucket: int) -> Layout:
    """The decode fields once a destination; no memory is shared between destinations or buckets."""
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
    """n speculative steps have n - 1 draft backends (contract 2)."""
    return geometry.draft_steps - 1


def destination_buffers(buffers: Buffers, step: int) -> Buffers:
    """The tensors of one destination under the names, and with the layout, of decode."""
    prefix = destination_prefix(step)
    fields = tuple(_as_decode(field, prefix) for field in buffers.layout if field.name.startswith(prefix))
    layout = dataclasses.replace(buffers.layout, system="decode", fields=fields)
    return Buffers(layout, {field.name: buffers[prefix + field.name] for field in fields})


def _as_decode(field: Field, prefix: str) -> Field:
    alias = None if field.alias is None else field.alias.removeprefix(prefix)
    return dataclasses.replace(field, name=field.name.removeprefix(prefix), alias=alias)
