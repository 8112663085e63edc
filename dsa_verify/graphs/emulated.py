"""A CUDA graph without CUDA: ATen operations and Triton launches are recorded, then replayed.

During a capture a `TorchDispatchMode` sees every ATen operation and `run` of Triton's kernels is replaced, so
that nothing executes; views alone are made, since a view only names memory. Output shapes come from the meta
device. Work that reaches the device past both (an extension called directly) is not seen: it executes at
capture and is missing from the replay.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from dsa_verify.base.errors import CaptureError, ReplayError, UsageError
from dsa_verify.graphs.forbidden import (
    COPIES_HOST_DATA,
    READS_ON_THE_HOST,
    Watch,
    failing_as_capture_error,
    forbidding,
    has_boolean_index,
    why_synchronising,
)
from dsa_verify.graphs.interpreter import prepare_interpreter
from dsa_verify.graphs.known_results import PLAIN, key_of, known_results, remember
from dsa_verify.graphs.memory import Pool, TensorTable
from dsa_verify.graphs.without_dynamo import import_no_dynamo, mend_references

aten = torch.ops.aten
ALLOCATIONS = frozenset(
    [
        aten.empty,
        aten.empty_strided,
        aten.empty_like,
        aten.empty_permuted,
        aten.new_empty,
        aten.new_empty_strided,
    ]
)
STORAGE_CHANGES = frozenset([aten.set_, aten.resize_, aten.resize_as_])
MOVES_A_TENSOR = "it changes the storage of a tensor, which a graph does not follow"

_capture_in_progress = False


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor in the arguments of a node."""

    index: int


@dataclass(frozen=True, slots=True)
class Node:
    """One recorded call. `outputs` are the addresses that its fresh results are copied to."""

    label: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor | None, ...] = ()

    def run(self, tensors: list[torch.Tensor | None]) -> None:
        result = self.call(*_thaw(self.args, tensors), **_thaw(self.kwargs, tensors))
        if self.outputs:
            for output, fresh in zip(self.outputs, pytree.tree_leaves(result), strict=True):
                if output is not None:
                    output.copy_(fresh)


def _thaw(value: Any, tensors: list[torch.Tensor | None]) -> Any:
    kind = type(value)
    if kind is Slot:
        return tensors[value.index]
    if kind is tuple or kind is list:
        return kind([_thaw(item, tensors) for item in value])
    if kind is dict:
        return {name: _thaw(item, tensors) for name, item in value.items()}
    return value


class EmulatedGraph:
    def __init__(self, nodes: list[Node], table: TensorTable) -> None:
        self._nodes = nodes
        self._table = table

    @torch.inference_mode()  # temporaries of a body that used inference mode may be written in that mode only
    def replay(self) -> None:
        if _capture_in_progress:
            raise CaptureError("a graph was replayed inside a capture; replay it outside", "Graph.replay")
        tensors = self._table.open()
        for node in self._nodes:
            try:
                node.run(tensors)
            except Exception as error:
                message = f"{node.label} failed at replay: {type(error).__name__}: {error}"
                raise ReplayError(message) from error


class EmulatedBackend:
    name = "emulated"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        mend_references()
        if device.type == "cpu":
            prepare_interpreter()

    def new_pool(self) -> Pool:
        return Pool(self.device)

    def capture(self, body: Callable[[], None], *, pool: object | None = None) -> EmulatedGraph:
        pool = self.new_pool() if pool is None else pool
        if not isinstance(pool, Pool):
            raise UsageError(f"pool is a {type(pool).__name__}; it must come from this backend's new_pool()")
        watch = Watch(self.device.type)
        recorder = Recorder(self.device, TensorTable(pool), watch)
        with (
            _only_capture(),
            failing_as_capture_error(watch),
            torch.no_grad(),
            forbidding(watch),
            _launches_recorded_by(recorder),
            watch,
            recorder,
        ):
            body()
        return EmulatedGraph(recorder.nodes, recorder.table)


@contextmanager
def _only_capture() -> Iterator[None]:
    global _capture_in_progress
    if _capture_in_progress:
        message = "a capture was started inside another capture; captures cannot be nested"
        raise CaptureError(message, "Backend.capture")
    _capture_in_progress = True
    try:
        yield
    finally:
        _capture_in_progress = False


@import_no_dynamo
class Recorder(TorchDispatchMode):
    """Turns the operations of a body into nodes."""

    def __init__(self, device: torch.device, table: TensorTable, watch: Watch) -> None:
        super().__init__()
        self.device_type = device.type
        self.table = table
        self.watch = watch
        self.nodes: list[Node] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, torch.Tensor)]
        if func is aten.lift_fresh.default:
            return self._lift(func, args[0])
        if not self._is_device_work(tensors, kwargs):
            return func(*args, **kwargs)
        self._check(func, args, kwargs, tensors)
        if torch.is_inference_mode_enabled():
            # In inference mode composite operations arrive whole; elsewhere torch has taken them apart.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._record(func, args, kwargs)

    def record_launch(self, run: Callable[..., Any], kernel: Any, grid: Any, args: Any, kwargs: Any) -> None:
        """Record a launch of a Triton kernel with its grid as it is now.

        A wrapper around a tensor (a TMA descriptor) is kept as it is, and the tensor in it alive.
        """
        label = f"Triton kernel {kernel.fn.__name__}"
        if callable(grid):
            signature = inspect.signature(kernel.fn)
            named = {name: value for name, value in kwargs.items() if name in signature.parameters}
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            grid = grid(dict(bound.arguments))
        launch = {**kwargs, "grid": tuple(grid), "warmup": False}
        with no_dispatch():  # the table's own work is not to be recorded
            frozen = self._freeze((kernel, *args), label), self._freeze(launch, label)
        self.nodes.append(Node(label, run, *frozen))

    def _is_device_work(self, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
        devices = [tensor.device for tensor in tensors]
        if kwargs.get("device") is not None or not devices:
            devices.append(torch.device(kwargs.get("device") or "cpu"))
        return any(device.type == self.device_type for device in devices)

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        reason = why_synchronising(func, args, kwargs)
        if reason and not self._is_masked_fill(func, args):
            raise self.watch.refuse(str(func), reason)
        if func.overloadpacket in STORAGE_CHANGES:
            raise self.watch.refuse(str(func), MOVES_A_TENSOR)
        target = kwargs.get("device")
        if target is not None and torch.device(target).type != self.device_type:
            raise self.watch.refuse(str(func), READS_ON_THE_HOST)
        for tensor in tensors:
            if tensor.device.type != self.device_type:
                if tensor.dim() or func.overloadpacket in (aten.copy_, aten._to_copy):
                    raise self.watch.refuse(str(func), COPIES_HOST_DATA)
                self.table.freeze(tensor)  # a scalar on the host is passed by value

    def _is_masked_fill(self, func: Any, args: tuple[Any, ...]) -> bool:
        # `x[mask] = 3` is a masked fill on CUDA and waits for nothing; the 3 arrives as a host constant.
        if func is not aten.index_put_.default or len(args[1]) != 1 or not has_boolean_index(args[1]):
            return False
        on_host = args[2].device.type != self.device_type or self.table.is_frozen(args[2])
        return bool(args[2].dim() == 0 and on_host)

    def _lift(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        # Torch lifts what it has just made from host data. A Python scalar (`x[2:4] = 7`) is passed by value.
        if tensor.device.type == self.device_type and tensor.dim():
            raise self.watch.refuse(str(func), COPIES_HOST_DATA)
        self.table.freeze(tensor)
        lifted: torch.Tensor = func(tensor)
        return lifted

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts = _facts_of(func)
        given = dict(zip(facts.arguments, args, strict=False)) | kwargs
        written = {alias: given[name] for name, alias in facts.written if name in given}
        if facts.only_reads and not written:
            return func(*args, **kwargs)  # a view, or a question about metadata
        key = key_of(func, args, kwargs, self.device_type)
        expected = None if key is None else known_results.get(key)
        if expected is None:
            expected = self._on_meta(func, args, kwargs, written)
            remember(key, expected)
        results: list[Any] = []
        outputs: list[torch.Tensor | None] = []
        for index, alias in enumerate(facts.results):
            if alias is not None:
                results.append(written[alias])
                outputs.append(None)
            else:
                fresh = pytree.tree_map_only(torch.Tensor, self.table.allocate, expected[index])
                results.append(fresh)
                leaves = pytree.tree_leaves(fresh)
                outputs += [self.table.own(x) if isinstance(x, torch.Tensor) else None for x in leaves]
        if func.overloadpacket not in ALLOCATIONS:
            label = str(func)
            keep = tuple(outputs) if any(output is not None for output in outputs) else ()
            self.nodes.append(Node(label, func, self._freeze(args, label), self._freeze(kwargs, label), keep))
        if not results:
            return None
        return results[0] if len(results) == 1 else tuple(results)

    def _on_meta(self, func: Any, args: Any, kwargs: Any, written: dict[str, Any]) -> tuple[Any, ...]:
        """Run `func` on the meta device: it checks the arguments and gives the shapes of the results."""
        twins: dict[int, torch.Tensor] = {}

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != self.device_type:
                return tensor
            like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            return twins.setdefault(id(tensor), like)

        meta_args, meta_kwargs = pytree.tree_map_only(torch.Tensor, twin, (args, dict(kwargs)))
        if meta_kwargs.get("device") is not None:
            meta_kwargs["device"] = torch.device("meta")
        try:
            result = func(*meta_args, **meta_kwargs)
        except NotImplementedError:
            if len(written) < len(func._schema.returns):
                raise
            return ()  # no meta implementation, but all results are arguments
        for tensor in filter(torch.is_tensor, pytree.tree_leaves(list(written.values()))):
            size = twins[id(tensor)].size() if id(tensor) in twins else tensor.size()
            if size != tensor.size():
                needs = f"out= has shape {tuple(tensor.size())}, needs {tuple(size)}"
                raise self.watch.refuse(str(func), f"{needs}, and resizing it would move it")
        return (result,) if len(func._schema.returns) == 1 else tuple(result or ())

    def _freeze(self, value: Any, label: str) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return Slot(self.table.slot(value, label))
        if kind is tuple or kind is list:
            return kind([self._freeze(item, label) for item in value])
        if kind is dict:
            return {name: self._freeze(item, label) for name, item in value.items()}
        if kind in PLAIN:
            return value
        return pytree.tree_map_only(torch.Tensor, lambda tensor: Slot(self.table.slot(tensor, label)), value)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the schema of an operation says. `written`: (argument, alias) of each that is written; `results`: the alias
    of each result that is an argument, None for a fresh one; `only_reads`: unless an argument is written, the operation
    makes views or answers a question."""

    arguments: tuple[str, ...]
    written: tuple[tuple[str, str], ...]
    results: tuple[str | None, ...]
    only_reads: bool


@functools.cache
def _facts_of(func: Any) -> _Facts:
    schema = func._schema
    results = tuple(
        next(iter(result.alias_info.before_set), "*") if result.alias_info else None for result in schema.returns
    )
    makes_tensors = any("Tensor" in str(result.type) for result in schema.returns)
    return _Facts(
        arguments=tuple(argument.name for argument in schema.arguments),
        written=tuple(
            (argument.name, alias)
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for alias in argument.alias_info.before_set
        ),
        results=results,
        only_reads=bool(results) and (any(alias is not None for alias in results) or not makes_tensors),
    )


@contextmanager
def _launches_recorded_by(recorder: Recorder) -> Iterator[None]:
    with ExitStack() as stack:
        for launcher in _launchers():
            replacement = _recording_run(recorder, launcher.run)
            stack.enter_context(mock.patch.object(launcher, "run", replacement))
        yield


def _launchers() -> list[Any]:
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        return []
    return [JITFunction, InterpretedFunction]


def _recording_run(recorder: Recorder, run: Callable[..., Any]) -> Callable[..., Any]:
    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        recorder.record_launch(run, kernel, grid, args, kwargs)
        return None

    return record
