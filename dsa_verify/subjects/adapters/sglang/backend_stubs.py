"""Stand-ins: what SGLang's attention backend imports or asks of a machine, and never uses while it prepares metadata.

The backend of a serving engine imports most of that engine: tokenizers, chat protocols, quantisation formats, the
attention kernels. `absent_packages` lets it be imported where those packages are not installed; a package that is
there is never replaced. On a CPU, `cpu_answers` gives besides the answers of a CUDA device and of the CUDA kernels that
fill a schedule, a plan and a copy, so that the order of its refreshes can be judged without one. Whatever stood in is
named in the provenance of each result (`used`, `CPU_ANSWERS`).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.schedule_variants import VARIANTS, shape
from dsa_verify.contract.topk_plan import PLAN_RULES
from dsa_verify.subjects.adapters.sglang import wheel
from dsa_verify.subjects.pipelines.schedule import build_schedule
from dsa_verify.subjects.pipelines.topk_plan import TopkPlanBuilder

BACKEND: Final = "sglang.srt.layers.attention.dsa_backend"
MANAGER: Final = "sglang.srt.layers.attention.dsa.dsa_metadata_manager"
KPOOL_INDEX: Final = "sglang.srt.layers.attention.dsa.kpool_fp8_index"
PLANNER: Final = "sglang.kernels.ops.attention.dsv4.topk"
PRECOMPUTE: Final = "sglang.srt.layers.attention.dsa.dsa_backend_mtp_precompute"
KPOOL_PLAN: Final = "sglang.srt.layers.attention.dsa.kpool_plan"
COPIES: Final = "sglang.kernels.ops.attention.dsa.fused_metadata_copy"
CONTEXT: Final = "sglang.srt.runtime_context"

# Needed to import the backend's module, not to prepare metadata.
PACKAGES: Final = (
    "IPython",
    "PIL",
    "annotated_types",
    "compressed_tensors",
    "dill",
    "einops",
    "flash_mla",
    "gguf",
    "loguru",
    "openai",
    "orjson",
    "partial_json_parser",
    "psutil",
    "pybase64",
    "pydantic",
    "pydantic_core",
    "requests",
    "sentencepiece",
    "sgl_kernel",
    "sglang.srt.models",
    "starlette",
    "torchvision",
    "typing_inspection",
    "zmq",
)
# Compiles the CUDA kernels of the wheel, of which none can run on a CPU.
CPU_PACKAGES: Final = ("tvm_ffi",)
CPU_ANSWERS: Final = "a CUDA device, deep_gemm's schedules, plan_topk_v2, fused_metadata_copy"

_used: set[str] = set()


def used() -> tuple[str, ...]:
    """The packages for which something stood in so far in this process."""
    return tuple(sorted(_used))


@contextlib.contextmanager
def absent_packages(*, cpu: bool) -> Iterator[None]:
    """Imports of what PACKAGES (and on a `cpu` CPU_PACKAGES) lack on this machine succeed inside.

    Afterwards nothing of it can be found by an import again, so that other code of the process sees what is installed.
    """
    finder = _Finder((*PACKAGES, *CPU_PACKAGES) if cpu else PACKAGES)
    sys.meta_path.append(finder)  # the last to be asked: only for what nobody else has
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.made:
            sys.modules.pop(name, None)


@contextlib.contextmanager
def replaced(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes (owner, name, value) that are set inside and as before afterwards."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str]):
        self._names = names
        self.made: list[str] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        for served in self._names:
            if name == served or name.startswith(served + "."):
                return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        module.__dict__.update(__path__=[], __version__="0")
        return module

    def exec_module(self, module: ModuleType) -> None:
        self.made.append(module.__name__)
        _used.add(next(name for name in self._names if f"{module.__name__}.".startswith(f"{name}.")))


class _StandIn(ModuleType):
    """A module with every attribute: a class that can be subclassed, subscripted, called, or used as a decorator."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value: Any = _anything(name)
        if name.startswith(("_is_", "_use_")):
            value = False  # the engine's own flags, such as "is this ROCm", which a class would answer with yes
        elif (self.__name__, name) == ("dill", "dumps"):
            value = _no_bytes  # the one result that is computed with at import
        setattr(self, name, value)
        return value


def _no_bytes(_: Any) -> bytes:
    return b""


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        return _anything(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # As a decorator it must give back what it decorates.
        decorates = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorates else object.__new__(cls)  # type: ignore[arg-type]


class _Nothing(metaclass=_Anything):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Answer the real pydantic, which builds a schema of a class that another stand-in gave."""
        return importlib.import_module("pydantic_core").core_schema.any_schema()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return _anything(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self

    def __getitem__(self, item: Any) -> Any:
        return self


def _anything(name: str) -> type:
    return _Anything(name, (_Nothing,), {"__module__": __name__})


# Answers of a CUDA device, on a CPU ----------------------------------------------------------------------------------


def cpu_answers(geometry: Geometry) -> list[tuple[Any, str, Any]]:
    """Return what `replaced` sets so that the backend takes its CUDA path over CPU tensors.

    That is which machine this is, and what its CUDA kernels compute. When the backend calls them, and into which
    buffers it puts the results, is its own.
    """
    backend, manager, kpool_plan = (wheel.require(name) for name in (BACKEND, MANAGER, KPOOL_PLAN))
    copies, capability = wheel.require(COPIES), (geometry.architecture // 10, 0)
    builder = SimpleNamespace(
        get_paged_mqa_logits_metadata=_Schedules(geometry).build, get_num_sms=lambda: geometry.multiprocessors
    )
    return [
        *((module, "is_cuda", lambda: True) for module in (backend, manager, kpool_plan)),
        (wheel.require(KPOOL_INDEX), "_is_cuda", True),
        (wheel.require(PRECOMPUTE), "_is_cuda", True),
        (torch.cuda, "get_device_capability", lambda *_: capability),
        (backend, "resolve_num_sms", builder.get_num_sms),
        (backend, "resolve_paged_mqa_logits_metadata_fn", lambda: builder.get_paged_mqa_logits_metadata),
        (kpool_plan, "_get_deep_gemm", lambda: builder),
        (wheel.require(PLANNER), "plan_topk_v2", _Plans(geometry).plan),
        (copies, "fused_metadata_copy_cuda", _copy),
        (copies, "fused_metadata_copy_multi_cuda", _copy_to_three),
    ]


class _Schedules:
    """This project's builder in the form of DeepGEMM's."""

    def __init__(self, geometry: Geometry):
        self._variant = VARIANTS[geometry.schedule]

    def build(self, context_lens: torch.Tensor, block_kv: int, multiprocessors: int) -> torch.Tensor:
        """int32 [S + 1, 2] over int32 `context_lens` [rows, next_n]."""
        lengths = context_lens
        if lengths.dim() not in self._variant.context_dims:
            lengths = lengths[:, -1]
        out = torch.empty(shape(multiprocessors), dtype=torch.int32, device=lengths.device)
        build_schedule(lengths, out, variant=self._variant.name)
        return out


class _Plans:
    """This project's planner in the form of SGLang's."""

    def __init__(self, geometry: Geometry):
        self._builder = TopkPlanBuilder(PLAN_RULES[geometry.plan_rules], torch.device("cpu"))

    def plan(
        self, seq_lens: torch.Tensor, static_threshold: int = -1, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """int32 [rows + 1, 2] over int32 `seq_lens` [rows]; left as it is where no plan is written (contract 5)."""
        plan = seq_lens.new_empty((seq_lens.shape[0] + 1, 2)) if out is None else out
        self._builder.update(seq_lens, plan)
        return plan


_DECODE: Final = 0
_SOURCES: Final = ("cache", "cu", "page_indices", "dsa_cache", "expanded", "dsa_cu", "real", "splits", "flashmla")


def _copy(*arguments: Any) -> None:
    """Contract 2.2: nine sources, nine destinations in the same order, mode, batch, two widths, expanded rows."""
    source = SimpleNamespace(**dict(zip(_SOURCES, arguments[:9], strict=True)))
    target = SimpleNamespace(**dict(zip(_SOURCES, arguments[9:18], strict=True)))
    mode, batch, max_len, max_seqlen_k, size = arguments[18:]
    target.cache[:batch] = source.cache[:batch]
    target.cu[1 : batch + 1] = source.cu[1 : batch + 1]
    if mode != _DECODE:
        target.expanded[:size] = source.expanded[:size]
    target.dsa_cache[:size] = source.dsa_cache[:size]
    target.dsa_cu[1 : size + 1] = source.dsa_cu[1 : size + 1]
    rows, columns = (batch, max_len) if mode == _DECODE else (source.page_indices.shape[0], max_seqlen_k)
    target.page_indices[:rows, :columns] = source.page_indices[:rows, :columns]
    if source.real is not None:
        target.real[:rows, : source.real.shape[1]] = source.real[:rows]


def _copy_to_three(*arguments: Any) -> None:
    """Contract 2.3: eight sources (there is no `expanded`), eight of each destination, batch, width, rows."""
    *tensors, batch, max_len, size = arguments
    source, *targets = (tensors[start : start + 8] for start in range(0, 32, 8))
    for target in targets:
        _copy(*source[:4], None, *source[4:], *target[:4], None, *target[4:], _DECODE, batch, max_len, max_len, size)
