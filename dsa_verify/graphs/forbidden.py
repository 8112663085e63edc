"""This module finds what may not happen during a capture, and names what was called.

A capture must not wait for the device, read it on the host, or copy host data to it. On a CPU most of these
calls dispatch no operation at all (`cpu()`, `tolist()`), so they are watched where they are called: `Watch`
is a torch function mode that both backends keep active while a body runs. `why_synchronising` judges the ATen
operations. CUDA would refuse those itself, but only by spoiling the capture: `AtenWatch` is there first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dsa_verify.base.errors import CaptureError, DeviceLost
from dsa_verify.graphs.without_dynamo import import_no_dynamo

READS_ON_THE_HOST = "it reads device memory on the host, which waits for the device"
COPIES_HOST_DATA = "it copies host data to the device, which waits for the device"
PINS_MEMORY = "it allocates pinned memory"
WAITS = "it waits for the device"
DATA_DEPENDENT = "the host needs its result, or the shape of it, and would wait for the device"
BOOLEAN_INDEX = "a boolean mask as an index is turned into positions by nonzero, which waits for the device"

HOST_READS = frozenset({"item", "tolist", "numpy", "cpu", "is_nonzero"}) | {
    f"__{name}__" for name in ("array", "contains", "repr", "format", "bool", "int", "float", "complex", "index")
}
HOST_DATA = frozenset({"tensor", "as_tensor", "asarray", "new_tensor"})


class Watch(TorchFunctionMode):
    """Refuses forbidden calls on one kind of device, and remembers which torch function failed.

    `failure` keeps the first refusal, because a body that swallows the exception has still spoilt the
    capture; `culprit` is the name of the innermost torch function that an exception came out of.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.failure: CaptureError | None = None
        self.culprit: str | None = None

    def refuse(self, operation: str, reason: str) -> CaptureError:
        error = CaptureError(
            f"{operation} cannot be captured: {reason}. Do it before the capture, or keep it on the device",
            operation,
        )
        self.failure = self.failure or error
        return error

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reason = self._why_forbidden(func, args, kwargs)
        if reason:
            raise self.refuse(_name_of(func), reason)
        try:
            return func(*args, **kwargs)
        except Exception:
            self.culprit = self.culprit or _name_of(func)
            raise

    def _why_forbidden(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        name = getattr(func, "__name__", "")
        if name == "pin_memory" or kwargs.get("pin_memory"):
            return PINS_MEMORY
        if name in HOST_DATA:
            return COPIES_HOST_DATA if self._takes_host_data(args, kwargs) else None
        if name in HOST_READS or (name == "to" and _asks_for_the_host(args, kwargs)):
            return READS_ON_THE_HOST if self._is_ours(args, kwargs) else None
        return None

    def _is_ours(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        return any(isinstance(leaf, torch.Tensor) and leaf.device.type == self.device_type for leaf in leaves)

    def _takes_host_data(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        is_method = len(args) > 1 and isinstance(args[0], torch.Tensor)  # x.new_tensor(data)
        data = args[1] if is_method else next(iter(args), kwargs.get("data", kwargs.get("obj")))
        default = args[0].device if is_method else torch.get_default_device()
        device = torch.device(kwargs.get("device") or default)
        return device.type == self.device_type and not isinstance(data, torch.Tensor)


@import_no_dynamo
class AtenWatch(TorchDispatchMode):
    """Refuses through `watch` the ATen operations that would make the host wait."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reason = why_synchronising(func, args, kwargs or {})
        if reason and not _fills_by_mask(func, args):
            raise self._watch.refuse(str(func), reason)
        return func(*args, **(kwargs or {}))


def _fills_by_mask(func: Any, args: tuple[Any, ...]) -> bool:
    # `x[mask] = 3` is a masked fill and waits for nothing; the 3 arrives as a scalar on the host.
    if func is not torch.ops.aten.index_put_.default or len(args[1]) != 1:
        return False
    return bool(args[2].dim() == 0 and args[2].device.type == "cpu")


def _asks_for_the_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # Only the literal: where the device under test is the CPU, a `torch.device` says "to our device".
    return any(isinstance(value, str) and value == "cpu" for value in (*args[1:], kwargs.get("device")))


def _name_of(func: Any) -> str:
    qualified = getattr(func, "__qualname__", "")
    name = getattr(func, "__name__", str(func))
    return f"Tensor.{name}" if qualified.startswith("Tensor") else f"torch.{name}"


def why_synchronising(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Say why the ATen operation `func` would make the host wait for the device, or None if it would not."""
    packet = func.overloadpacket
    if packet in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
        return BOOLEAN_INDEX if has_boolean_index(args[1]) else None
    if packet is torch.ops.aten.repeat_interleave and kwargs.get("output_size") is not None:
        return None
    if kwargs.get("pin_memory"):
        return PINS_MEMORY
    tags = func.tags
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return DATA_DEPENDENT
    return None


def has_boolean_index(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


@contextmanager
def forbidding(watch: Watch) -> Iterator[None]:
    """While active, refuse through `watch` what a torch function mode does not see."""
    targets: list[tuple[Any, str, str]] = [
        (torch.cuda, "synchronize", WAITS),
        (torch.cuda.Stream, "synchronize", WAITS),
        (torch.cuda.Event, "synchronize", WAITS),
        (torch.accelerator, "synchronize", WAITS),
    ]
    if watch.device_type == "cpu":
        targets += [(torch, "from_numpy", COPIES_HOST_DATA), (torch, "frombuffer", COPIES_HOST_DATA)]
    with ExitStack() as stack:
        for owner, name, reason in targets:
            operation = f"{owner.__module__ if isinstance(owner, type) else owner.__name__}.{name}"
            stack.enter_context(mock.patch.object(owner, name, _refuser(watch, operation, reason)))
        yield


def _refuser(watch: Watch, operation: str, reason: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise watch.refuse(operation, reason)

    return refuse


@contextmanager
def failing_as_capture_error(watch: Watch) -> Iterator[None]:
    """Turn whatever the body raises, and a refusal that it swallowed, into a `CaptureError`."""
    try:
        yield
    except (CaptureError, DeviceLost):
        raise
    except Exception as error:
        if watch.failure is not None:
            raise watch.failure from error
        where = f"{watch.culprit} " if watch.culprit else ""
        message = f"the body of the graph raised during capture: {where}{type(error).__name__}: {error}"
        raise CaptureError(message, watch.culprit) from error
    if watch.failure is not None:
        raise watch.failure
