"""Capture and replay with `torch.cuda.CUDAGraph`.

What this adds to torch: failures become `CaptureError` with the name of the operation, a failed capture
leaves the process able to capture again, and a sticky device error becomes `DeviceLost` and nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from dsa_verify.base.errors import CaptureError, DeviceLost, ReplayError, UsageError
from dsa_verify.graphs.capturing import CAPTURE_ERROR_MODE, no_collection
from dsa_verify.graphs.forbidden import AtenWatch, Watch, failing_as_capture_error, forbidding


class CudaPool:
    """A private pool of the caching allocator; replaced by a fresh one when a capture spoils it."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


class CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        self._graph = graph
        self._device = device

    def replay(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("a graph was replayed inside a capture; replay it outside", "Graph.replay")
        try:
            self._graph.replay()
        except RuntimeError as error:
            _raise_if_lost(self._device)
            raise ReplayError(f"the CUDA graph could not be launched: {error}") from error


class CudaBackend:
    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        # One stream for all captures: the allocator reuses a pool's blocks only on the stream they came from.
        self._stream = torch.cuda.Stream(self.device)
        self._spoilt: list[torch.cuda.CUDAGraph] = []

    def new_pool(self) -> CudaPool:
        return CudaPool()

    def capture(self, body: Callable[[], None], *, pool: object | None = None) -> CudaGraph:
        pool = self.new_pool() if pool is None else pool
        if not isinstance(pool, CudaPool):
            raise UsageError(f"pool is a {type(pool).__name__}; it must come from this backend's new_pool()")
        if torch.cuda.is_current_stream_capturing():
            message = "a capture was started inside another capture; captures cannot be nested"
            raise CaptureError(message, "Backend.capture")
        _raise_if_lost(self.device)
        watch = Watch("cuda")
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream), torch.no_grad(), no_collection():
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool.handle, capture_error_mode=CAPTURE_ERROR_MODE)
            with failing_as_capture_error(watch):
                try:
                    with forbidding(watch), watch, AtenWatch(watch):
                        body()
                finally:
                    invalid = self._end(graph, pool)
                if invalid is not None:
                    raise invalid
        return CudaGraph(graph, self.device)

    def _end(self, graph: torch.cuda.CUDAGraph, pool: CudaPool) -> RuntimeError | None:
        """End the capture. If it was invalidated, put the process in order again and return the error."""
        invalid = None
        try:
            with warnings.catch_warnings():
                # A subject that does all its work before the replay has an empty graph: no mistake.
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                graph.capture_end()
        except RuntimeError as error:
            invalid = error
        _raise_if_lost(self.device)
        if invalid is not None:
            self._recover(graph, pool)
        return invalid

    def _recover(self, graph: torch.cuda.CUDAGraph, pool: CudaPool) -> None:
        # `capture_end` stops half-way when the capture is invalid: the allocators still ask the graph object
        # whether an allocation belongs to the pool, and the random generator still believes in a capture.
        # Hence: end the pool, keep the object, never use the pool again, complete one capture.
        self._spoilt.append(graph)
        torch._C._cuda_endAllocateToPool(self.device.index, pool.handle)
        pool.handle = torch.cuda.graph_pool_handle()
        whole = torch.cuda.CUDAGraph()
        whole.capture_begin(capture_error_mode=CAPTURE_ERROR_MODE)
        torch.zeros(1, device=self.device)
        whole.capture_end()


def _raise_if_lost(device: torch.device) -> None:
    """Raise `DeviceLost` if the device does not answer any more; ordinary capture errors leave it sound."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(f"{device} reports a sticky error, end this process: {error}") from error
