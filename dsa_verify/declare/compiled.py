"""Compiled: a declaration as the rest of the project knows it: a layout, inputs, and a System."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Compare, Field, Layout, Lifetime, Live, Memory, Row
from dsa_verify.contract.size import Size
from dsa_verify.contract.static_inputs import StaticInput
from dsa_verify.contract.system import System, draft_rows, one
from dsa_verify.declare.declared import SHARED, Declared, Port
from dsa_verify.declare.draws import Constant, Count, Derived, Length, Permutation, RequestRow, Uniform
from dsa_verify.declare.ports import Out
from dsa_verify.declare.sizes import Sizes, evaluate

if TYPE_CHECKING:
    import torch

_SEEDED: Final = (Uniform, Permutation)
_ENDS: Final = {"int32": 1 << 31, "int64": 1 << 62, "float32": 1 << 31}


def system_of(
    declared: Declared, *, summary: str, oracle: str, subjects: Mapping[str, str], presets: tuple[str, str]
) -> System:
    """Return the System that a declaration is; `oracle` and `subjects` as System has them."""
    draws = {port.name: port.declared.draw for port in declared.ins}
    length = next((draw for draw in draws.values() if isinstance(draw, Length)), Length())
    made = any(isinstance(draw, (*_SEEDED, Derived)) for draw in draws.values())

    def pad_length(geometry: Geometry) -> int:
        return evaluate(length.pad, declared.sizes(geometry, 1), f"{declared.where}: pad")

    def units(geometry: Geometry) -> tuple[int, ...]:
        sizes = declared.sizes(geometry, 1)
        return tuple(evaluate(each, sizes, f"{declared.where}: edges") for each in length.edges)

    return System(
        name=declared.name,
        summary=summary,
        layout=functools.partial(_layout, declared),
        oracle=oracle,
        subjects=dict(subjects),
        drafts=declared.has_drafts,
        presets=presets,
        asks=_asks(declared),
        sizes=tuple(Size(name=name, default=value, low=1, high=_ENDS["int32"]) for name, value in declared.own.items()),
        token_rows=draft_rows if declared.has_drafts else one,
        adds_draft=length.before_draft,
        pad_length=pad_length,
        seeded=any(isinstance(draw, _SEEDED) for draw in draws.values()),
        own_inputs=functools.partial(_static_inputs, declared),
        constants={port.name: _constant(declared, port) for port in declared.ins if _is_constant(port)},
        derive=functools.partial(_derive, declared) if made else None,
        units=units,
    )


def _is_constant(port: Port) -> bool:
    return isinstance(port.declared.draw, Constant)


def _asks(declared: Declared) -> dict[str, object]:
    """Return the fields of the geometry that the forms of the inputs leave no choice of."""
    asks: dict[str, object] = {}
    for port in declared.ins:
        is_index = isinstance(port.declared.draw, (Length, RequestRow))
        if is_index and asks.setdefault("index_dtype", port.form.dtype) != port.form.dtype:
            raise UsageError(f"{declared.where}.{port.name}: lengths and request rows have one dtype; use the same")
        if port.declared.contiguous:
            asks["input_view"] = "plain"
    return asks


# Outputs -------------------------------------------------------------------------------------------------------------


def _layout(declared: Declared, geometry: Geometry, bucket: int) -> Layout:
    sizes = declared.sizes(geometry, bucket)
    fields = tuple(_field(declared, port, sizes) for port in declared.outs)
    fields += tuple(
        Field(name=name, shape=(1,), row=Row.LAW, low=0, high=2, says=says) for name, says in declared.laws.items()
    )
    return Layout(system=declared.name, geometry=geometry, bucket=bucket, tokens=sizes.T, fields=fields)


def _field(declared: Declared, port: Port, sizes: Sizes) -> Field:
    out: Out = port.declared
    where, dtype = f"{declared.where}.{port.name}", port.form.dtype
    shape = port.form.shape(sizes, where)
    if min(shape) < 1:
        raise UsageError(f"{where}: {out.form!r} is {list(shape)} at B {sizes.B}; make every dimension 1 or more")
    return Field(
        name=port.name,
        shape=shape,
        row=out.kind_of_row(port.form, declared.own, where),
        low=evaluate(out.low, sizes, where),
        high=min(evaluate(out.high, sizes, where), _ENDS[dtype]),
        dtype=dtype,
        column_step=1 if out.live is not None else evaluate(out.step, sizes, where),
        live=Live.TOKENS if out.live is None else Live.ROWS,
        rows_differ=True,
        compare=Compare.CLOSE if out.bound else Compare.EXACT,
        bound=out.bound,
        floor=out.floor,
        lifetime=Lifetime.CAPTURE if out.once else Lifetime.REPLAY,
        alias=out.view_of,
        shared=out.shared,
        memory=_memory(out),
    )


def _memory(out: Out) -> Memory | None:
    if not out.contiguous and out.aligned == 1:
        return None
    return Memory(consumer="its consumer", source="as declared", alignment=out.aligned)


# Inputs --------------------------------------------------------------------------------------------------------------


def _static_inputs(declared: Declared, geometry: Geometry) -> tuple[StaticInput, ...]:
    """Return the inputs beside lengths and request rows that have rows of the batch."""
    sizes = declared.sizes(geometry, 1)
    ports = (port for port in declared.ins if type(port.declared.draw) not in SHARED and not _is_constant(port))
    return tuple(_static_input(declared, port, sizes) for port in ports)


def _static_input(declared: Declared, port: Port, sizes: Sizes) -> StaticInput:
    draw, where = port.declared.draw, f"{declared.where}.{port.name}"
    low, high = 0, _ENDS[port.form.dtype] - 1
    if isinstance(draw, Uniform):
        low, high = evaluate(draw.low, sizes, where), evaluate(draw.high, sizes, where)
        if low >= high:
            raise UsageError(f"{where}: Uniform({draw.low!r}, {draw.high!r}) is empty, {low} to {high - 1}; raise high")
    if isinstance(draw, Count):
        low, high = evaluate(draw.low, sizes, where), sizes.N + 1
    return StaticInput(
        name=port.name,
        dtype=port.form.dtype,
        pad=sizes.N if isinstance(draw, Count) else evaluate(getattr(draw, "pad", 0), sizes, where),
        low=low,
        high=high,
        rows=declared.rows_of(port, sizes),
        item=port.form.shape(sizes, where)[1:],
        drawn=isinstance(draw, Count),
        limit="draft_tokens",
    )


def _constant(declared: Declared, port: Port) -> Callable[[Geometry, torch.device], torch.Tensor]:
    def make(geometry: Geometry, device: torch.device) -> torch.Tensor:
        made: torch.Tensor = port.declared.draw.function(declared.sizes(geometry, 1), device)
        return made

    return make


def _derive(
    declared: Declared,
    geometry: Geometry,
    drawn: Mapping[str, torch.Tensor],
    req_to_token: torch.Tensor,
    seed: torch.Tensor,
) -> Mapping[str, torch.Tensor]:
    from dsa_verify.declare.derived import derive  # imports torch

    return derive(declared, geometry, drawn, req_to_token, seed)
