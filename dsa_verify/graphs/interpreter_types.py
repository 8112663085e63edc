"""Types of Triton's interpreter that are made once instead of in every operation.

An interpreted operation makes its block type, the shape in it and the shape of its result from nothing, mostly to
find that they are those of its operands. That took more time than the arithmetic. None of them is ever changed, so
equal ones may be one object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

OF_A_TYPE = {"element_ty", "shape", "numel", "name"}
OF_A_TENSOR = {"handle", "shape", "numel", "type", "dtype"}


@dataclass(frozen=True, slots=True)
class _Shape:
    """The constants that a block type and a tensor of one shape share."""

    of_type: Any
    elements_of_type: Any
    text: str
    of_tensor: Any
    elements_of_tensor: Any


def remember_types(interpreter: ModuleType) -> None:
    """Change the installed Triton in this process. One whose types hold other attributes is left as it is."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    block = core.block_type(core.int32, [8])
    if (set(vars(block)), set(vars(core.tensor(None, block)))) != (OF_A_TYPE, OF_A_TENSOR):
        return
    vars(core)["_unwrap_if_constexpr"] = _unwrapping(core)
    vars(interpreter)["_get_np_dtype"] = _naming(interpreter._get_np_dtype, core)
    semantic.broadcast_impl_value = _broadcasting(semantic.broadcast_impl_value)
    shapes: dict[tuple[int, ...], _Shape] = {}
    core.block_type.__init__ = _block_type_init(core, shapes)
    core.tensor.__init__ = _tensor_init(core, shapes)


def _unwrapping(core: ModuleType) -> Callable[[Any], Any]:
    """Return a cheaper way to unwrap, since almost nothing that is unwrapped is a constant or holds one."""
    original: Callable[[Any], Any] = core._unwrap_if_constexpr
    wrapping = (core.constexpr, list, tuple, core.tuple)

    def unwrap_if_constexpr(value: Any) -> Any:
        return original(value) if isinstance(value, wrapping) else value

    return unwrap_if_constexpr


def _naming(original: Callable[[Any], Any], core: ModuleType) -> Callable[[Any], Any]:
    """The table from Triton's types to NumPy's was written out in every call."""
    known: dict[str, Any] = {}

    def get_np_dtype(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, core.block_type) else of
        if scalar.name not in known:
            known[scalar.name] = original(scalar)
        return known[scalar.name]

    return get_np_dtype


def _broadcasting(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Two operands of one shape, or two scalars, are broadcast already."""

    def broadcast_impl_value(left: Any, right: Any) -> Any:
        if getattr(left.type, "shape", None) is getattr(right.type, "shape", None):
            return left, right
        return original(left, right)

    return broadcast_impl_value


def _block_type_init(core: ModuleType, shapes: dict[tuple[int, ...], _Shape]) -> Callable[[Any, Any, Any], None]:
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        found = shapes.get(sizes) if {int}.issuperset(map(type, sizes)) else None  # 8.0 is refused, though it is 8
        if found is None:
            make_type(self, element_ty, shape)  # refuses what cannot be a shape
            tensor = core.tensor.__new__(core.tensor)
            make_tensor(tensor, None, self)
            shapes[sizes] = _Shape(self.shape, self.numel, str(self.shape), tensor.shape, tensor.numel)
        else:
            self.element_ty = element_ty
            self.shape, self.numel = found.of_type, found.elements_of_type
            self.name = f"<{found.text}, {element_ty}>"

    return init


def _tensor_init(core: ModuleType, shapes: dict[tuple[int, ...], _Shape]) -> Callable[[Any, Any, Any], None]:
    original = core.tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        found = shapes.get(tuple(type.shape)) if type.is_block() else None
        if found is None:
            original(self, handle, type)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found.of_tensor, found.elements_of_tensor

    return init
