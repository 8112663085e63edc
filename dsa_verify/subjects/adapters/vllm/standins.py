"""Stand-ins: what vLLM's own metadata code asks of the rest of vLLM, where that is not installed or has no GPU.

The modules of OWN_CODE prepare the metadata and are always vLLM's own files. They import the configuration, the
platform, the model zoo and a logger, which need a hundred other packages and a GPU, and of which they use a few
answers: how many multiprocessors, whether memory is pinned, whether DeepGEMM is there. Where vLLM is installed on a
machine with a GPU those are its own; elsewhere they come from here, and a result says so. Anything else asked of a
stand-in raises UsageError when it is used.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from dsa_verify.base.device import INTERPRET
from dsa_verify.base.errors import UsageError

PACKAGE: Final = "vllm"
# vLLM's own code: what is judged, and the small modules it is built on.
OWN_CODE: Final = (
    "vllm.envs",
    "vllm.model_executor.warmup.jit_warmup",
    "vllm.model_executor.warmup.jit_warmup_triton_helper",
    "vllm.transformers_utils.deepseek_v4_utils",
    "vllm.utils",
    "vllm.utils.deep_gemm",
    "vllm.utils.math_utils",
    "vllm.v1.attention.backend",
    "vllm.v1.attention.backends.mla.compressor_utils",
    "vllm.v1.attention.backends.mla.indexer",
    "vllm.v1.attention.backends.mla.sparse_utils",
    "vllm.v1.attention.backends.utils",
    "vllm.v1.attention.ops.metadata",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.worker.block_table",
    "vllm.v1.worker.gpu.block_table",
    "vllm.v1.worker.gpu.buffer_utils",
    "vllm.v1.worker.gpu.input_batch",
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator",
)


_FOLDERS: Final = ("vllm.utils",)  # of OWN_CODE, those whose file is the __init__ of a folder
_VERSION_FILE: Final = "vllm/_version.py"


def files() -> list[str]:
    """The files of OWN_CODE and the one that says the release, as paths inside vLLM's wheel."""
    paths = [name.replace(".", "/") + ("/__init__.py" if name in _FOLDERS else ".py") for name in OWN_CODE]
    return [*paths, _VERSION_FILE]


def install(folder: Path) -> None:
    """Serve `vllm` from `folder`, that of the package: OWN_CODE from its files, all else as stand-ins.

    Of no effect once `vllm` is imported.
    """
    if PACKAGE not in sys.modules and not installed():
        sys.meta_path.insert(0, _Finder(folder))


def on_cuda() -> bool:
    """Return whether kernels of this process run on a CUDA device."""
    return torch.cuda.is_available() and os.environ.get(INTERPRET, "0") in ("", "0")


def installed() -> bool:
    """Return whether this process has stand-ins in place."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def answering() -> list[str]:
    """The modules of vLLM whose answers in this process were not vLLM's own."""
    return sorted(name for name in _ANSWERS if isinstance(sys.modules.get(name), _StandIn))


class _Finder(MetaPathFinder, Loader):
    def __init__(self, folder: Path):
        self._folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != PACKAGE:
            return None
        folder = self._folder.joinpath(*name.split(".")[1:])
        if name in OWN_CODE:
            found: ModuleSpec | None = PathFinder.find_spec(name, [str(folder.parent)])
            return found
        spec = ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        module.__dict__.update(_ANSWERS.get(spec.name, dict)())
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandIn(ModuleType):
    """A module of which every attribute exists, but may only be imported, subclassed or subscripted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = _absent(self.__name__, name)
        setattr(self, name, value)
        return value


class _Refusing(type):
    """Classes that stand for something are no more than names."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        value = _absent(f"{cls.__module__}.{cls.__name__}", name)
        setattr(cls, name, value)
        return value


def _absent(module: str, name: str) -> type:
    """A class that stands for `name` of `module`: a base class or an annotation, but nothing to make or to call."""

    def refuse(cls: type, *args: object, **kwargs: object) -> object:
        if cls is absent:
            raise UsageError(f"{module}.{name}: {_REASON}")
        return object.__new__(cls)

    members = {"__new__": refuse, "__module__": module, "__class_getitem__": classmethod(lambda cls, item: cls)}
    absent = _Refusing(name, (), members)
    return absent


_REASON: Final = "a stand-in, since vLLM is not installed or there is no GPU; the metadata code should not need it"


# What the stand-ins answer -------------------------------------------------------------------------------------------


class _Logger(logging.Logger):
    def info_once(self, *args: Any, **kwargs: Any) -> None:
        self.debug(*args)

    debug_once = warning_once = info_once


class Platform:
    """The answers that vLLM's metadata code asks of a platform, for the device of this process."""

    def __init__(self) -> None:
        self._cuda = on_cuda()
        self.device_type = self.device_name = "cuda" if self._cuda else "cpu"
        self.simple_compile_backend = "eager"  # of a function that is never called

    def is_cuda(self) -> bool:
        return self._cuda

    is_cuda_alike = is_cuda

    def is_rocm(self) -> bool:
        return False

    is_xpu = is_rocm

    def is_cpu(self) -> bool:
        return not self._cuda

    def is_device_capability_family(self, capability: int) -> bool:
        return self._cuda and torch.cuda.get_device_capability()[0] == capability // 10

    def is_arch_support_pdl(self) -> bool:
        return self._cuda and torch.cuda.get_device_capability()[0] >= 9

    support_deep_gemm = is_arch_support_pdl

    def num_compute_units(self, device: int | None = None) -> int:
        return torch.cuda.get_device_properties(device or 0).multi_processor_count if self._cuda else 132


def _triton_utils() -> dict[str, Any]:
    import triton
    import triton.language as tl

    return {"HAS_TRITON": True, "triton": triton, "tl": tl}


def _platform_utils() -> dict[str, Any]:
    platform = sys.modules[f"{PACKAGE}.platforms"].current_platform
    return {"num_compute_units": platform.num_compute_units, "is_uva_available": lambda: False}


def _torch_utils() -> dict[str, Any]:
    def async_tensor_h2d(data: Any, device: Any = None, dtype: Any = None, out: torch.Tensor | None = None) -> Any:
        host = data if isinstance(data, torch.Tensor) else torch.as_tensor(data, dtype=dtype)
        return host.to(device=device, dtype=dtype) if out is None else out.copy_(host)

    return {"PIN_MEMORY": False, "async_tensor_h2d": async_tensor_h2d}


_ANSWERS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "vllm.logger": lambda: {"init_logger": _Logger, "logger": _Logger(PACKAGE)},
    "vllm.platforms": lambda: {"current_platform": Platform()},
    "vllm.triton_utils": _triton_utils,
    "vllm.utils.platform_utils": _platform_utils,
    "vllm.utils.torch_utils": _torch_utils,
    "vllm.utils.import_utils": lambda: {"has_deep_gemm": lambda: importlib.util.find_spec("deep_gemm") is not None},
}
