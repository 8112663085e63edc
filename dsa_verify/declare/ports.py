"""In and Out: the inputs and outputs of a declaration, each one line of the class."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.layout import DTYPE_BYTES, Row
from dsa_verify.declare.draws import Draw
from dsa_verify.declare.sizes import Expression, evaluate, is_always

_FORM: Final = re.compile(r"\s*(\w+)\s*\[(.*)\]\s*", re.DOTALL)
# What row r of an output stands for, by its first dimension.
_ROWS: Final = (
    ("B", Row.REQUEST),
    ("T", Row.TOKEN),
    ("B + 1", Row.REQUEST_PREFIX),
    ("T + 1", Row.TOKEN_PREFIX),
)


@dataclasses.dataclass(frozen=True)
class Form:
    """A dtype and an expression for each dimension, from a text such as "int32[B * N, W // P]"."""

    dtype: str
    dimensions: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, where: str) -> Form:
        """Return the form that `text` says. UsageError, which begins with `where`, for one that says none."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise UsageError(f"{where}: {text!r} is no form; write a dtype and the sizes, such as int32[B, W // P]")
        dtype, inside = found.groups()
        if dtype not in DTYPE_BYTES:
            raise UsageError(f"{where}: dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        dimensions = tuple(_split(inside))
        if not all(dimensions):
            raise UsageError(f"{where}: {text!r} has a dimension without a size; write one, such as int32[B]")
        return cls(dtype, dimensions)

    def shape(self, sizes: Mapping[str, int], where: str) -> tuple[int, ...]:
        """Return the shape over `sizes`."""
        return tuple(evaluate(each, sizes, where) for each in self.dimensions)


def _split(text: str) -> list[str]:
    """Return what lies between the commas of `text` that are in no parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


@dataclasses.dataclass(frozen=True)
class In:
    """An input: its form, and how it is drawn.

    `form`: dtype and shape in named sizes, such as "int64[B]". `contiguous`: whether the kernel takes its elements for
    adjacent; else rounds also come with strides, as engines have them. Inputs must not be written.
    """

    form: str
    draw: Draw
    contiguous: bool = False


@dataclasses.dataclass(frozen=True)
class Out:
    """An output: its form, and which elements of it a consumer reads.

    `form`: dtype (int32, int64, float32) and shape, one or two dimensions, in named sizes. What a row stands for
    follows from its first dimension: B requests, T (or B * N) token rows, B + 1 or T + 1 a sum over those before; any
    other needs `row`. `step`: tokens of a column; column c is read below the length of the request divided by it (a
    table of pages has P). `live(sizes, inputs)`, in place of it: int [rows] (or [B], for all token rows of each) on the
    device, how many first columns of each row are read; the others are never compared. Without either all are, pad rows
    included. `low`, `high`: the legal values, low <= v < high, of which a plausible poison is made. `once`: whether it
    is written before the graph, and constant. `bound`: of a float32 output, |got - want| <= bound * max(|want|, floor);
    0 is bit by bit. `aligned` (bytes), `contiguous`: what its consumer asks of the memory, all rows adjacent.
    `view_of`: the output whose memory it is. `shared`: whether one buffer serves all batches.
    """

    form: str
    _: dataclasses.KW_ONLY
    low: Expression = -(1 << 31)
    high: Expression = (1 << 31) - 1
    step: Expression = 0
    live: Callable[[Any, Any], Any] | None = None
    row: Row | None = None
    once: bool = False
    bound: float = 0.0
    floor: float = 1.0
    aligned: int = 1
    contiguous: bool = False
    view_of: str | None = None
    shared: bool = False

    def kind_of_row(self, form: Form, own: Mapping[str, int], where: str) -> Row:
        """Return what a row stands for. UsageError where that does not follow, and `row` is not given."""
        if self.row is not None:
            return self.row
        for expression, row in _ROWS:
            if is_always(form.dimensions[0], expression, own):
                return row
        raise UsageError(
            f"{where}: what a row stands for does not follow from {form.dimensions[0]!r}; make the first dimension B, "
            "T (or B * N), B + 1 or T + 1, or give row= (Row.ITEM for the entries of a list)"
        )
