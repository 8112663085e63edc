"""vLLM: the guard around its CUDA graphs. vLLM's loader calls a plugin and gives it nothing to hook with, so methods of
its classes are replaced by ones that call them.

The first model runner replays through `CUDAGraphWrapper`, whose forward context has the metadata of the step. The
second one has its own graphs (`CudaGraphManager`), which it replays without it: there the metadata is what the builders
of sparse attention have built last. A loader runs in every process of a server; whatever imports more is done when a
worker has a device (`WorkerWrapperBase.init_device`), so that no other process pays for it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable
from typing import Any, Final
from weakref import WeakKeyDictionary

from dsa_verify.attach.graph_guards import GraphGuards
from dsa_verify.attach.part import Report
from dsa_verify.attach.start_line import StartLine

WORKER: Final = ("vllm.v1.worker.worker_base", "WorkerWrapperBase")
WRAPPER: Final = ("vllm.compilation.cuda_graph", "CUDAGraphWrapper")
MANAGER: Final = ("vllm.v1.worker.gpu.cudagraph_utils", "CudaGraphManager")
CONTEXT: Final = ("vllm.forward_context", "get_forward_context")
_MLA: Final = "vllm.v1.attention.backends.mla"
BUILDERS: Final = (
    (f"{_MLA}.indexer", "DeepseekV32IndexerMetadataBuilder"),
    (f"{_MLA}.indexer", "KpoolTailMetadataBuilder"),
    (f"{_MLA}.sparse_indexer", "DeepseekV41SparseIndexerMetadataBuilder"),
    (f"{_MLA}.flashmla_sparse", "FlashMLASparseMetadataBuilder"),
    (f"{_MLA}.flashinfer_mla_sparse", "FlashInferMLASparseMetadataBuilder"),
    (f"{_MLA}.flashattn_mla_sparse", "FlashAttnMLASparseMetadataBuilder"),
    (f"{_MLA}.sparse_swa", "DeepseekSparseSWAMetadataBuilder"),
)
BUILDS: Final = ("build", "build_for_cudagraph_capture", "build_for_drafting")
FULL: Final = "FULL"
Method = Callable[..., Any]


def attach(report: Report, line: StartLine) -> VLLM:
    """Wait for a worker's device, in whatever process one is made."""
    return VLLM(report, line)


class VLLM:
    """The hooks of one process."""

    def __init__(self, report: Report, line: StartLine):
        self._report, self._line = report, line
        self._guard = GraphGuards(report)
        self._built: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by builder, its last metadata
        self._order: list[Any] = []
        self._hooked = False
        self._context: Any = None
        if not self._replace(*WORKER, "init_device", self._around_device):
            report.begin()

    def _replace(self, module: str, owner: str, method: str, hook: Method) -> bool:
        """Put `hook(original, ...)` around a method that `owner` has itself, if there is such a class."""
        found = self._line.find(module, owner)
        original = None if found is None else found.__dict__.get(method)
        if original is None:
            if found is not None:
                self._line.cannot(f"{owner}.{method}", f"{module} of {self._line.engine} has no {method}")
            return False

        @functools.wraps(original)
        def around(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        setattr(found, method, around)
        return True

    def _around_device(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not self._hooked:
            self._hooked = True
            self._guard.call(self._hook_all)
            self._report.begin()
        return result

    def _hook_all(self) -> None:
        for part in self._report.settings.parts:
            if part != "guard":
                self._line.cannot(part, "vLLM has block tables, and no map from requests to tokens that it could read")
        if "guard" not in self._report.settings.parts:
            return
        self._context = None if self._line.find(*CONTEXT) is None else sys.modules[CONTEXT[0]]
        if self._context is not None and self._replace(*WRAPPER, "__call__", self._around_wrapper):
            self._line.attached("guard", WRAPPER[1])
        for module, owner in BUILDERS:
            self._hook_builder(module, owner)
        if self._replace(*MANAGER, "capture", self._around_capture):
            self._replace(*MANAGER, "run_fullgraph", self._around_replay)
            self._line.attached("guard", MANAGER[1])

    def _hook_builder(self, module: str, owner: str) -> None:
        found = self._line.find(module, owner)
        for method in BUILDS if found is not None else ():
            if method in found.__dict__:  # what it inherits is hooked where it is
                self._replace(module, owner, method, self._around_build)

    # The first runner ------------------------------------------------------------------------------------------------

    def _around_wrapper(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        noted: list[Hashable] = []
        self._guard.call(self._before_wrapper, args[0], noted)
        result = original(*args, **kwargs)
        for key in noted:
            self._guard.call(self._after_wrapper, args[0], key)
        return result

    def _before_wrapper(self, wrapper: Any, noted: list[Hashable]) -> None:
        """A full graph is replayed next, or captured if it is not there yet, which is `noted`."""
        if not self._context.is_forward_context_available():
            return
        context = self._context.get_forward_context()
        mode, key = context.cudagraph_runtime_mode, context.batch_descriptor
        if mode != wrapper.runtime_mode or mode.name != FULL or not context.attn_metadata:
            return
        if _has_graph(wrapper, key):
            self._guard.before_replay(wrapper, key)
        else:
            noted.append(key)

    def _after_wrapper(self, wrapper: Any, key: Hashable) -> None:
        if _has_graph(wrapper, key):
            self._guard.captured(wrapper, key, type(wrapper).__name__, self._metadata_of_context)

    def _metadata_of_context(self) -> Any:
        return self._context.get_forward_context().attn_metadata

    # The second runner -----------------------------------------------------------------------------------------------

    def _around_build(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._guard.call(self._note_built, args[0], result)
        return result

    def _note_built(self, builder: Any, metadata: Any) -> None:
        self._built[builder] = metadata
        self._order = [other for other in self._order if other is not builder] + [builder]

    def _around_capture(self, original: Method, manager: Any, create: Method, *args: Any, **kwargs: Any) -> Any:
        """The graph of a descriptor captures what the builders build while its inputs are prepared."""

        def created(desc: Any, *rest: Any, **named: Any) -> Any:
            self._order = []
            forward = create(desc, *rest, **named)
            self._guard.call(self._captured, manager, desc)
            return forward

        return original(manager, created, *args, **kwargs)

    def _captured(self, manager: Any, desc: Any) -> None:
        if desc.cg_mode.name == FULL and self._order:
            current = functools.partial(self._last_of, tuple(self._order))
            self._guard.captured(manager, desc, "metadata", current)

    def _around_replay(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        self._guard.call(self._guard.before_replay, *args, **kwargs)
        return original(*args, **kwargs)

    def _last_of(self, builders: tuple[Any, ...]) -> dict[str, Any]:
        """Return the last metadata of each, by the name of its class, numbered where there are several."""
        found: dict[str, Any] = {}
        for builder in builders:
            name = type(builder).__name__
            same = sum(1 for other in found if other.partition(" ")[0] == name)
            found[f"{name} {same}" if same else name] = self._built.get(builder)
        return found


def _has_graph(wrapper: Any, key: Hashable) -> bool:
    entry = wrapper.concrete_cudagraph_entries.get(key)
    return entry is not None and entry.cudagraph is not None
