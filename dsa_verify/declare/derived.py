"""Derived inputs of a declaration, computed on the device in every round; all of it may be captured in a graph."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.buffers.arena import TORCH_DTYPES
from dsa_verify.buffers.derived_inputs import hashed
from dsa_verify.contract.geometry import Geometry
from dsa_verify.declare.declared import SHARED, Declared, Port
from dsa_verify.declare.draws import Derived, Permutation, Uniform
from dsa_verify.declare.sizes import Sizes, evaluate


def derive(
    declared: Declared,
    geometry: Geometry,
    drawn: Mapping[str, torch.Tensor],
    req_to_token: torch.Tensor,
    seed: torch.Tensor,
) -> Mapping[str, torch.Tensor]:
    """Return the inputs of `declared` that are not drawn on the host, by name, pad rows included.

    `drawn`: int32 [bucket] each, what is. `seed`: int64 [1], the round's.
    """
    sizes = declared.sizes(geometry, drawn["seq_lens"].shape[0])
    known, made = SimpleNamespace(), dict[str, torch.Tensor]()
    given = {**drawn, "req_to_token": req_to_token}
    for stream, port in enumerate(declared.ins, 1):
        draw, name = port.declared.draw, port.name
        if isinstance(draw, (Uniform, Permutation, Derived)):
            made[name] = _made(declared, port, sizes, known, seed, stream)
            setattr(known, name, made[name])
        elif (source := SHARED.get(type(draw), (name,))[0]) in given:
            setattr(known, name, given[source])
    return made


def _made(
    declared: Declared, port: Port, sizes: Sizes, known: SimpleNamespace, seed: torch.Tensor, stream: int
) -> torch.Tensor:
    where, draw = f"{declared.where}.{port.name}", port.declared.draw
    shape, dtype = port.form.shape(sizes, where), TORCH_DTYPES[port.form.dtype]
    if isinstance(draw, Uniform):
        low, high = (evaluate(each, sizes, where) for each in (draw.low, draw.high))
        return (low + hashed(shape, seed, stream) % (high - low)).to(dtype)
    if isinstance(draw, Permutation):
        return hashed(shape, seed, stream).argsort(dim=-1, stable=True).to(dtype)
    found = draw.function(sizes, known)
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != shape or found.device != seed.device:
        got = f"{list(found.shape)} on {found.device}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise UsageError(f"{where}: its function gives {got}; it must be a tensor {list(shape)} on {seed.device}")
    return found.to(dtype)
