"""Operands of interpreted operations that are made ready without asking again what was asked before.

Before each operation Triton works out in which type to compute and which shape the result has, and casts and broadcasts
both operands. In a kernel over metadata nearly all are integers of one type, and the same few shapes and constants
return in every operation of every launch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from dsa_verify.graphs.interpreter_types import Known

ROOM = 8192  # constants that are kept
ELEMENTS_OF_A_CONSTANT = 4096  # at most; to fill a larger one takes longer than to look for it
SIGNED = {"int32": 31, "int64": 63}  # bits beside the sign
ONE_TYPE = {"int1", *SIGNED}  # two operands of one of these are computed in it
# By operator of a tensor: what the interpreter computes it with, where both operands are signed integers of one type.
ARITHMETIC = {"__add__": "create_add", "__sub__": "create_sub", "__mul__": "create_mul"}
COMPARISONS = {
    "__lt__": "create_icmpSLT",
    "__le__": "create_icmpSLE",
    "__gt__": "create_icmpSGT",
    "__ge__": "create_icmpSGE",
}

Operator = Callable[..., Any]


def remember_operands(interpreter: ModuleType, known: Known) -> Operands:
    """Change the installed Triton in this process; `known` from `remember_types`."""
    semantic = interpreter.interpreter_semantic
    semantic.broadcast_impl_value = _broadcasting(interpreter, known)
    operands = Operands(interpreter, known)
    semantic.binary_op_type_checking_impl = operands.prepare
    return operands


def _broadcasting(interpreter: ModuleType, known: Known) -> Callable[[Any, Any], Any]:
    """Return a cheaper way to broadcast: the type of the result is worked out once for each two shapes."""
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    original, make_tensor = semantic.broadcast_impl_value, interpreter.tl.tensor
    results: dict[tuple[int, int], Any] = {}

    def spread(value: Any, to: Any) -> Any:
        """A scalar, or a tensor of other sizes, in the shape of the block type `to`."""
        block = to.with_element_ty(value.dtype)
        if value.type.is_block():
            return make_tensor(builder.create_broadcast(value.handle, tuple(to.shape)), block)
        return make_tensor(builder.create_splat(block, value.handle), block)

    def broadcast(left: Any, right: Any) -> Any:
        of_left, of_right = getattr(left.type, "shape", None), getattr(right.type, "shape", None)
        if of_left is of_right:
            return left, right
        if of_left is None or of_right is None:
            to = left.type if of_right is None else right.type
            return (spread(left, to), right) if of_left is None else (left, spread(right, to))
        result = results.get((id(of_left), id(of_right)))
        if result is None:
            both = original(left, right)  # refuses what does not fit
            if id(of_left) in known and id(of_right) in known:
                results[id(of_left), id(of_right)] = both[0].type
            return both
        return (
            left if of_left is result.shape else spread(left, result),
            right if of_right is result.shape else spread(right, result),
        )

    return broadcast


class Operands:
    """Makes two operands ready where there is nothing to decide: two integers of one type, a pointer and an offset, or
    a signed integer and a Python integer that it can hold. All others are left to Triton."""

    def __init__(self, interpreter: ModuleType, known: Known) -> None:
        core = interpreter.tl.core
        self._semantic, self._known = interpreter.interpreter_semantic, known
        self._builder, self._constexpr, self._condition = interpreter.interpreter_builder, core.constexpr, core.int1
        self._original = self._semantic.binary_op_type_checking_impl
        self._tensor, self._pointer = core.tensor, core.pointer_type
        self._constants: dict[tuple[int, str, int], Any] = {}

    def prepare(self, left: Any, right: Any, *options: Any, **named: Any) -> Any:
        """Stands in for `binary_op_type_checking_impl`. `options`: whether the left and the right operand may be a
        pointer, whether types are adapted at all (the default), whether the operation is a division."""
        tensor = self._tensor
        if not named and type(left) is tensor and type(right) is tensor:
            if self._are_ready(left.dtype, right.dtype, options):
                return self._semantic.broadcast_impl_value(left, right)
        elif not named and len(options) < 3:
            if type(left) is tensor and _holds(left.dtype, right):
                return left, self._constant(right, left)
            if type(right) is tensor and _holds(right.dtype, left):
                return self._constant(left, right), right
        return self._original(left, right, *options, **named)

    def shorten(self, name: str, original: Operator) -> Operator:
        """Return a shorter way to compute what `original` does, the operator `name` of a tensor; `original` itself if
        there is none."""
        method = ARITHMETIC.get(name) or COMPARISONS.get(name)
        compute = getattr(self._builder, method, None) if method is not None else None
        if compute is None:
            return original
        compares, builder, condition = name in COMPARISONS, self._builder, self._condition
        make_tensor = self._tensor

        def operate(left: Any, right: Any, **named: Any) -> Any:
            of = left.dtype
            pair = None
            if of.name in SIGNED and not named and not builder.options.sanitize_overflow:
                pair = self._pair(left, right)
            if pair is None:
                return original(left, right, **named)
            type_ = pair[0].type
            if compares:
                type_ = type_.with_element_ty(condition) if type_.is_block() else condition
            return make_tensor(compute(pair[0].handle, pair[1].handle), type_)

        return operate

    def _pair(self, left: Any, right: Any) -> tuple[Any, Any] | None:
        """Return the operands as signed integers of the type of `left`; None for an operand that is something else."""
        if type(right) is self._tensor:
            if right.dtype is not left.dtype:
                return None
            ready: tuple[Any, Any] = self._semantic.broadcast_impl_value(left, right)
            return ready
        if type(right) is self._constexpr:
            right = right.value
        return (left, self._constant(right, left)) if _holds(left.dtype, right) else None

    def _are_ready(self, left: Any, right: Any, options: tuple[Any, ...]) -> bool:
        if left is right:
            return left.name in ONE_TYPE
        return options[:1] == (True,) and type(left) is self._pointer and right.name in SIGNED

    def _constant(self, value: int, like: Any) -> Any:
        """Return `value` as a tensor of the type and shape of `like`."""
        shape = like.type.shape if like.type.is_block() else None
        key = value, like.dtype.name, id(shape)
        found = self._constants.get(key)
        if found is None:
            found = self._semantic.broadcast_impl_value(like, self._semantic.scalar_constant(value, like.dtype))[1]
            if shape is None or (id(shape) in self._known and like.type.numel <= ELEMENTS_OF_A_CONSTANT):
                if len(self._constants) >= ROOM:
                    self._constants.clear()
                self._constants[key] = found
        return found


def _holds(of: Any, value: Any) -> bool:
    """Return whether `value` is a Python integer that takes on the type `of` of the tensor beside it."""
    bits = SIGNED.get(of.name) if type(value) is int else None
    return bits is not None and -(2**bits) <= value < 2**bits
