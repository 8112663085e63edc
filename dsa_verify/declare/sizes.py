"""Sizes: the named sizes of a declaration, and expressions over them, such as "B * N" or "W // P".

A declaration says shapes and limits in words, because they depend on the bucket and on the geometry of a run, neither
of which exists when the class is written.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry

# What each name of every declaration stands for.
NAMES: Final[Mapping[str, str]] = {
    "B": "requests of the captured batch (the bucket)",
    "N": "draft tokens of a request",
    "T": "token rows of the captured batch",
    "R": "rows of the request table",
    "C": "columns of the request table, in tokens",
    "W": "columns of a table of tokens",
    "P": "tokens of a page",
    "A": "tokens of an allocator page, whose slots are consecutive",
    "K": "the top-k",
    "L": "the longest length",
}
_OPERATORS: Final[Mapping[type[ast.AST], Callable[..., int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.USub: operator.neg,
}
_FUNCTIONS: Final[Mapping[str, Callable[..., int]]] = {"min": min, "max": max, "cdiv": lambda a, b: -(-a // b)}
Expression = int | str


class Sizes(Mapping[str, int]):
    """The sizes of one bucket, as attributes (`sizes.B`) or by name. The names are those of NAMES and the class's own.

    `page_size` and the like are read of `geometry` where a name does not do.
    """

    def __init__(self, values: Mapping[str, int], geometry: Geometry | None = None):
        self._values, self.geometry = dict(values), geometry

    @classmethod
    def of(cls, geometry: Geometry, bucket: int, tokens: int, own: Mapping[str, int]) -> Sizes:
        """Return the sizes of a bucket of `bucket` requests with `tokens` token rows; `own`: those of the class."""
        values = {
            "B": bucket,
            "N": geometry.draft_tokens,
            "T": tokens,
            "R": geometry.request_rows,
            "C": geometry.token_columns,
            "W": geometry.columns,
            "P": geometry.page_size,
            "A": geometry.allocator_page,
            "K": geometry.topk,
            "L": geometry.context,
        }
        return cls({**values, **own}, geometry)

    def __getattr__(self, name: str) -> int:
        values: dict[str, int] = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"there is no size {name!r}; the sizes are {', '.join(values)}")

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def evaluate(expression: Expression, sizes: Mapping[str, int], where: str) -> int:
    """Return the value of `expression` over `sizes`. UsageError, which begins with `where`, for one that is none."""
    if isinstance(expression, int):
        return expression
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, sizes)
    except (SyntaxError, ZeroDivisionError, ValueError) as error:
        raise UsageError(
            f"{where}: {expression!r} is no size ({error}); write numbers, + - * // **, min, max, cdiv(a, b) and "
            f"the names {', '.join(sizes)}"
        ) from None


def _value(node: ast.AST, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name) if name in sizes:
            return sizes[name]
        case ast.Name(id=name):
            raise ValueError(f"{name!r} is unknown")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, sizes)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(each, sizes) for each in args))
    raise ValueError(f"{ast.unparse(node)!r} is not understood")


def names_in(expression: Expression) -> set[str]:
    """Return the names that `expression` mentions."""
    if isinstance(expression, int):
        return set()
    tree = ast.parse(expression.strip(), mode="eval")
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def is_always(expression: Expression, same: Expression, own: Mapping[str, Any]) -> bool:
    """Return whether both expressions have one value, whatever the sizes: tried with sizes that share no factor."""
    for first in (3, 31):
        primes = iter((5, 7, 11, 13, 17, 19, 23, 29, 37, 41))
        values = {name: next(primes) * first for name in NAMES}
        values["T"] = values["B"] * values["N"]
        values |= own
        if evaluate(expression, values, "shape") != evaluate(same, values, "shape"):
            return False
    return True
