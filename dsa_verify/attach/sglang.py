"""SGLang: hooks of its own registry around its sparse attention backends and its CUDA graphs.

The guard records what a backend has prepared when a graph is captured, and compares right before each replay. Overlay
and capture come where a backend has just prepared a replay (`init_forward_metadata_out_graph`), which is when all of
DSA's metadata is there. DeepSeek V4 makes most of its metadata inside the graph, in memory that another graph may use:
of it the guard sees what the graph reads, and no overlay is attached.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final
from weakref import ref

from dsa_verify.attach.graph_guards import GraphGuards
from dsa_verify.attach.part import Report
from dsa_verify.attach.sglang_dsa import DsaCapture, DsaOverlays, Replays
from dsa_verify.attach.start_line import StartLine

RUNNER: Final = "sglang.srt.model_executor.model_runner"
GRAPHS: Final = ("sglang.srt.model_executor.runner_backend.full_cuda_graph_backend", "FullCudaGraphBackend")
PREPARE: Final = "init_forward_metadata_out_graph"
DSA: Final = ("sglang.srt.layers.attention.dsa_backend", "DeepseekSparseAttnBackend")
DSA_STEPS: Final = ("sglang.srt.layers.attention.dsa_backend", "DeepseekSparseAttnMultiStepBackend")
V4: Final = ("sglang.srt.layers.attention.deepseek_v4_backend", "DeepseekV4AttnBackend")
Hook = Callable[..., Any]


def attach(report: Report, line: StartLine) -> SGLang | None:
    """Register hooks, which SGLang's loader applies when all plugins have been run. None in a process that has no
    model: importing the backends there would cost it seconds and memory for nothing."""
    if RUNNER not in sys.modules:
        return None
    return SGLang(report, line)


class SGLang:
    """The hooks of one process."""

    def __init__(self, report: Report, line: StartLine):
        self._report, self._line = report, line
        asked = report.settings.parts
        self._guard = GraphGuards(report) if "guard" in asked else None
        makers: dict[str, Callable[[Report], Replays]] = {"overlay": DsaOverlays, "capture": DsaCapture}
        self._replayed = [make(report) for name, make in makers.items() if name in asked]
        self._prepared: Callable[[], Any] | None = None  # the backend that has prepared a graph that is captured next
        self._register_all()

    def _register_all(self) -> None:
        registered = [self._register(*DSA, PREPARE, self._around_dsa, self._parts())]
        if self._guard is not None:
            for backend in (DSA_STEPS, V4):
                self._register(*backend, PREPARE, self._around_prepare, [])
            self._register(*GRAPHS, "capture_one", self._around_capture, [])
            self._register(*GRAPHS, "replay", self._around_replay, ["guard"])
        if self._replayed:
            names = " and ".join(part.name for part in self._replayed)
            self._line.cannot(f"{names} at {V4[1]}", "it makes its metadata inside the graph")
            self._line.cannot(f"{names} at {DSA_STEPS[1]}", "its steps are prepared at once")
        if not any(registered) or not self._register(RUNNER, "ModelRunner", "__init__", self._around_init, []):
            self._report.begin()

    def _parts(self) -> list[str]:
        return [part.name for part in self._replayed]

    def _register(self, module: str, owner: str, method: str, hook: Hook, parts: list[str]) -> bool:
        """Register `hook` around a method, for `parts`, if there is such a method."""
        if self._line.find(module, f"{owner}.{method}") is None:
            return False
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(f"{module}.{owner}.{method}", hook, HookType.AROUND)
        for part in parts:
            self._line.attached(part, f"{owner}.{method}")
        return True

    # Hooks: whatever is ours runs inside `Part.call` -----------------------------------------------------------------

    def _around_init(self, original: Hook, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._report.begin()
        return result

    def _around_prepare(self, original: Hook, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._guard is not None:
            self._guard.call(self._note_prepared, *args, **kwargs)
        return result

    def _around_dsa(self, original: Hook, *args: Any, **kwargs: Any) -> Any:
        result = self._around_prepare(original, *args, **kwargs)
        for part in self._replayed:
            part.call(part.prepared, *args, **kwargs)
        return result

    def _around_capture(self, original: Hook, *args: Any, **kwargs: Any) -> Any:
        assert self._guard is not None
        self._guard.call(self._captured, *args, **kwargs)
        return original(*args, **kwargs)

    def _around_replay(self, original: Hook, *args: Any, **kwargs: Any) -> Any:
        assert self._guard is not None
        self._guard.call(self._before_replay, *args, **kwargs)
        return original(*args, **kwargs)

    # The guard -------------------------------------------------------------------------------------------------------

    def _note_prepared(self, backend: Any, batch: Any, in_capture: bool = False) -> None:
        """Called last for the outermost backend, which is the one whose metadata the graph reads."""
        if in_capture:
            self._prepared = ref(backend)

    def _captured(self, graphs: Any, shape_key: Any, *args: Any, **kwargs: Any) -> None:
        backend, self._prepared = self._prepared, None
        if backend is not None and (there := backend()) is not None:
            assert self._guard is not None
            self._guard.captured(graphs, shape_key, type(there).__name__, functools.partial(_metadata, backend))

    def _before_replay(self, graphs: Any, shape_key: Any, *args: Any, **kwargs: Any) -> None:
        assert self._guard is not None
        self._guard.before_replay(graphs, shape_key)


def _metadata(backend: Callable[[], Any]) -> Any:
    """Return what the layers read, of each step if there are several; None if the backend is gone."""
    there = backend()
    if there is None:
        return None
    steps = getattr(there, "attn_backends", None)
    return there.forward_metadata if steps is None else [step.forward_metadata for step in steps]
