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

Known = dict[int, "Shape"]  # by the identity of the shape in a block type, which is kept


@dataclass(frozen=True, slots=True)
class Shape:
    """The constants that a block type and a tensor of one shape share."""

    of_type: Any
    elements_of_type: Any
    text: str
    of_tensor: Any
    elements_of_tensor: Any


def remember_types(interpreter: ModuleType) -> Known | None:
    """Change the installed Triton in this process, and return the shapes that are kept from now on. One whose types
    hold other attributes is left as it is: None."""
    core = interpreter.tl.core
    block = core.block_type(core.int32, [8])
    if (set(vars(block)), set(vars(core.tensor(None, block)))) != (OF_A_TYPE, OF_A_TENSOR):
        return None
    vars(core)["_unwrap_if_constexpr"] = _unwrapping(core)
    vars(interpreter)["_get_np_dtype"] = _naming(interpreter._get_np_dtype, core)
    known: Known = {}
    core.block_type.__init__ = _block_type_init(core, known)
    core.block_type.with_element_ty = _with_element_type(core, known)
    core.tensor.__init__ = _tensor_init(core, known)
    return known


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


def _block_type_init(core: ModuleType, known: Known) -> Callable[[Any, Any, Any], None]:
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    shapes: dict[tuple[int, ...], Shape] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        found = known.get(id(shape))
        if found is None:
            sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
            found = shapes.get(sizes) if {int}.issuperset(map(type, sizes)) else None  # 8.0 is refused, though it is 8
        if found is None:
            make_type(self, element_ty, shape)  # refuses what cannot be a shape
            tensor = core.tensor.__new__(core.tensor)
            make_tensor(tensor, None, self)
            found = Shape(self.shape, self.numel, str(self.shape), tensor.shape, tensor.numel)
            shapes[sizes] = known[id(self.shape)] = found
        else:
            self.element_ty = element_ty
            self.shape, self.numel = found.of_type, found.elements_of_type
            self.name = f"<{found.text}, {element_ty}>"

    return init


def _with_element_type(core: ModuleType, known: Known) -> Callable[[Any, Any], Any]:
    """Return a way to make a block type of the same shape that makes each of them once."""
    original = core.block_type.with_element_ty
    types: dict[tuple[int, str], Any] = {}

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        if type(scalar_ty) is not core.dtype or id(self.shape) not in known:  # of pointers there are ever new ones
            return original(self, scalar_ty)
        key = id(self.shape), scalar_ty.name
        if key not in types:
            types[key] = original(self, scalar_ty)
        return types[key]

    return with_element_ty


def _tensor_init(core: ModuleType, known: Known) -> Callable[[Any, Any, Any], None]:
    original = core.tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        found = known.get(id(type.shape)) if type.is_block() else None
        if found is None:
            original(self, handle, type)
            return
        self.handle, self.type, self.dtype = handle, type, type.element_ty
        self.shape, self.numel = found.of_tensor, found.elements_of_tensor

    return init
