"""Capture and replay: one interface, two backends.

`cuda` is `torch.cuda.CUDAGraph`. `emulated` records ATen operations and Triton launches and replays them with
the same semantics, on a CPU or on CUDA tensors, so that the harness and most bugs can be exercised without a
GPU. Importing this package imports neither backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from dsa_verify.base.errors import UsageError


class Graph(Protocol):
    """A graph is what a capture recorded."""

    def replay(self) -> None:
        """Execute the recorded work once. Raises `ReplayError` (a captured buffer is gone), `DeviceLost`."""


class Backend(Protocol):
    """Records the device work of a callable, without executing it."""

    name: str
    device: torch.device

    def new_pool(self) -> object:
        """Return a memory pool for temporaries. Several captures may share it, as serving engines do."""

    def capture(self, body: Callable[[], None], *, pool: object | None = None) -> Graph:
        """Record `body`; without a `pool` the graph gets one of its own.

        The body runs once, under `no_grad`. Raises `CaptureError` if it raises or does what cannot be
        captured; another body can be captured afterwards.
        """


def open_backend(device: torch.device, kind: str = "auto") -> Backend:
    """Return the backend `kind`: "cuda", "emulated", or "auto" = "cuda" on a CUDA device, else "emulated"."""
    device = torch.device(device)
    if kind == "auto":
        kind = "cuda" if device.type == "cuda" else "emulated"
    if kind == "emulated":
        from dsa_verify.graphs.emulated import EmulatedBackend

        return EmulatedBackend(device)
    if kind != "cuda":
        raise UsageError(f"graph backend is {kind!r}; it must be one of 'auto', 'cuda', 'emulated'")
    if device.type != "cuda":
        raise UsageError(f"graph backend 'cuda' needs a CUDA device, not {str(device)!r}; use 'emulated'")
    from dsa_verify.graphs.cuda import CudaBackend

    return CudaBackend(device)
