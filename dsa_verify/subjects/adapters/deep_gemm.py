"""The real DeepGEMM schedule builder, from the optional package `sgl-deep-gemm` (contract 3.2, 3.4)."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.base.version import package_version
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.schedule_variants import VARIANTS, ScheduleVariant, shape

DISTRIBUTION: Final = "sgl-deep-gemm"
# SGLang always passes 64, whatever the page size; the split is four of these.
BLOCK_KV: Final = 64
_INSTALL: Final = "pip install dsa-verify[deepgemm]"


def variant_of(version: str, architecture: int) -> ScheduleVariant:
    """The variant that this release of sgl-deep-gemm builds on `architecture` (90, 100, 120); UsageError if unknown."""
    releases = {release for variant in VARIANTS.values() for release in variant.wheels}
    for variant in VARIANTS.values():
        if version in variant.wheels and architecture in variant.architectures:
            return variant
    raise UsageError(
        f"{DISTRIBUTION} {version} on architecture {architecture}: its schedule variant is not known; "
        f"known releases: {', '.join(sorted(releases))}"
    )


def installed_variant(architecture: int) -> ScheduleVariant:
    """The variant that the installed sgl-deep-gemm builds; UsageError if there is none, or it is not known."""
    version = package_version(DISTRIBUTION)
    if version is None:
        raise UsageError(f"{DISTRIBUTION} is not installed; {_INSTALL}")
    return variant_of(version, architecture)


def check_variant(geometry: Geometry, device: torch.device, subject: str = "") -> None:
    """Raise UsageError if the installed sgl-deep-gemm builds another variant on `device` than `geometry.schedule`."""
    variant = installed_variant(torch.cuda.get_device_capability(device)[0] * 10)
    if variant.name != geometry.schedule:
        raise UsageError(
            f"{subject}schedule: the installed DeepGEMM builds {variant.name} schedules, the geometry says "
            f"{geometry.schedule}; give --set schedule={variant.name}"
        )


def refresh(context_lens: torch.Tensor, out: torch.Tensor, *, indices: torch.Tensor | None = None) -> None:
    """Builds the schedule of int32 `context_lens` [rows, next_n] and copies it into int32 `out` [S + 1, 2].

    The way SGLang refreshes a captured schedule: the builder returns a new tensor, the address of `out` stays. May be
    captured in a CUDA graph after one call outside of it, which compiles. On architecture 90 lengths must not all be 0
    if rows are a multiple of 32: the kernel then reads past its memory and the process is lost. UsageError if the
    package is missing or cannot be imported, or for tensors of another form.
    """
    if context_lens.dtype != torch.int32 or context_lens.dim() != 2 or not context_lens.is_contiguous():
        raise UsageError(
            f"context_lens: {context_lens.dtype} {tuple(context_lens.shape)} is not contiguous torch.int32 "
            "[rows, next_n]; a column of lengths is context_lens.unsqueeze(1)"
        )
    multiprocessors = out.shape[0] - 1
    if out.dtype != torch.int32 or tuple(out.shape) != shape(multiprocessors):
        raise UsageError(f"out: {out.dtype} {tuple(out.shape)} is not torch.int32 [S + 1, 2]; allocate it so")
    arguments = () if indices is None else (indices,)
    out.copy_(_builder()(context_lens, BLOCK_KV, multiprocessors, *arguments))


def check_importable() -> None:
    """UsageError if the builder cannot be imported, with what is missing."""
    _builder()


@functools.cache
def _builder() -> Callable[..., torch.Tensor]:
    try:
        module = importlib.import_module("deep_gemm")
    except ImportError as error:
        raise UsageError(f"{DISTRIBUTION} cannot be imported ({error}); {_INSTALL}") from error
    except Exception as error:  # it looks for a CUDA toolkit and loads a library built for one release of torch
        raise UsageError(
            f"importing deep_gemm raised {type(error).__name__}: {error}; {DISTRIBUTION} needs a CUDA toolkit and the "
            f"release of torch that it was built for (this is torch {torch.__version__})"
        ) from error
    builder: Callable[..., torch.Tensor] | None = getattr(module, "get_paged_mqa_logits_metadata", None)
    if builder is None:
        raise UsageError(f"deep_gemm has no get_paged_mqa_logits_metadata; it is not {DISTRIBUTION}; {_INSTALL}")
    return builder
