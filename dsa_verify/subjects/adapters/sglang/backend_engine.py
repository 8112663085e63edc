"""An attention backend of SGLang needs this around it while it is made and while one of its hooks runs: the server's
settings, stand-ins for what is not there, inputs as an engine holds them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.subjects.adapters.sglang import backend_stubs, wheel
from dsa_verify.subjects.adapters.sglang.backend_stubs import CONTEXT


class StaticInput:
    """An input as an engine holds it, int64 and contiguous: `tensor` is `source`, or a buffer that `update` fills."""

    def __init__(self, source: torch.Tensor):
        self._source = source
        as_is = source.dtype == torch.int64 and source.is_contiguous()
        self.tensor = source if as_is else source.to(torch.int64).contiguous()

    def update(self) -> None:
        if self.tensor is not self._source:
            self.tensor.copy_(self._source)


class Engine:
    """A backend, and what has to be around it while one of its hooks runs.

    `make()` gives the backend, once `modules` are imported, while the server's `settings` are in force. `batch` and
    `rows`: the widest batch that it will serve, and its token rows. `changes()`: what `backend_stubs.replaced` sets
    around each hook. `platform`: facts about the machine that SGLang is told.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        cpu: bool,
        batch: int,
        rows: int,
        modules: Sequence[str],
        settings: Mapping[str, object],
        changes: Callable[[], list[tuple[Any, str, Any]]],
        platform: Mapping[str, object],
    ):
        self._cpu, self._most, self._platform = cpu, batch, platform
        self._captured: set[int] = set()
        with importable(cpu=cpu):
            for module in modules:
                wheel.require(module)
            self._changes = changes()
            with self._around(), _server(settings):
                self.backend = make()
                self.backend.init_cuda_graph_state(batch, rows)

    def takes(self, bucket: int) -> bool:
        """Return whether this batch size can be captured in it yet."""
        return bucket <= self._most and bucket not in self._captured

    def refresh(self, batch: Any, *, in_capture: bool) -> None:
        """The hook that runs outside the graph, before a capture or a replay."""
        with self._around():
            if not in_capture:
                self.backend.init_forward_metadata_out_graph(batch)
                return
            with importable(cpu=self._cpu):
                self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self._captured.add(batch.batch_size)

    def record_in_graph(self, batch: Any) -> None:
        """The hook that runs inside the graph."""
        with self._around():
            self.backend.init_forward_metadata_in_graph(batch)

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        machine = wheel.require(CONTEXT).override_platform(**self._platform)
        with backend_stubs.replaced(self._changes), machine:
            yield


def leaves(backend: Any) -> list[Any]:
    """The backends of single steps; one that has no steps is its own."""
    steps: list[Any] = getattr(backend, "attn_backends", [backend])
    return steps


def captured_record(leaf: Any, bucket: int) -> Any:
    """Return what `leaf` leaves for its layers. UsageError if that is not what a graph of `bucket` captured."""
    record = leaf.forward_metadata
    if record is not leaf.decode_cuda_graph_metadata.get(bucket):
        raise UsageError(
            f"forward_metadata is not the record that was captured for batch {bucket}; this release of SGLang keeps "
            "its graph metadata in another way than the adapter knows"
        )
    return record


@contextlib.contextmanager
def importable(*, cpu: bool) -> Iterator[None]:
    if torch.cuda.is_available():
        torch.cuda.init()  # else SGLang asks the driver's library which device this is, by way of another package
    with backend_stubs.absent_packages(cpu=cpu):
        yield


@contextlib.contextmanager
def _server(settings: Mapping[str, object]) -> Iterator[None]:
    """The process-wide settings of a server of one GPU, while a backend is made; it reads none later."""
    context = wheel.require(CONTEXT)
    with (
        context.get_context().override_server_args(**settings),
        context.get_parallel().override(attn_dcp_rank=0),
    ):
        yield
