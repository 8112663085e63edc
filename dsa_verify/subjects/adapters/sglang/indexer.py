"""Schedules and top-k plans as SGLang refreshes them: built afresh before each replay, then copied into what the graph
captured (contract 3.3, 3.4, 5). DeepGEMM builds the first, a CUDA kernel of SGLang the second, so both need a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.subjects.adapters import deep_gemm
from dsa_verify.subjects.adapters.sglang import wheel
from dsa_verify.systems.indexer import scheduled_lengths

PLANNER: Final = "sglang.kernels.ops.attention.dsv4.topk"
PLAN_SOURCE: Final = "kernels/jit/csrc/deepseek_v4/topk_v2.cuh"
_PLAN: Final = "topk_v2_plan"


def is_schedule(field: str) -> bool:
    return scheduled_lengths(field) is not None


def is_plan(field: str) -> bool:
    return field.endswith(_PLAN)


def not_covered(layout: Layout, device: torch.device) -> dict[str, str]:
    """Say for each schedule and plan of `layout` why it cannot be built on `device` by whom SGLang has it built."""
    reasons: dict[str, str] = {}
    for field in layout:
        why = why_no_schedule(device) if is_schedule(field.name) else None
        why = why_no_plan(device) if is_plan(field.name) else why
        if why is not None:
            reasons[field.name] = why
    return reasons


@functools.cache
def why_no_schedule(device: torch.device) -> str | None:
    """Say why DeepGEMM cannot be asked for schedules; None if it can."""
    if device.type != "cuda":
        return f"DeepGEMM builds schedules on a CUDA device only, and this run is on {device.type}"
    try:
        deep_gemm.installed_variant(torch.cuda.get_device_capability(device)[0] * 10)
        deep_gemm.check_importable()
    except UsageError as error:
        return str(error)
    return None


@functools.cache
def why_no_plan(device: torch.device) -> str | None:
    """Say why SGLang's planner cannot be called; None if it can."""
    if device.type != "cuda":
        return f"SGLang plans the top-k on a CUDA device only, and this run is on {device.type}"
    try:
        wheel.attribute(PLANNER, "plan_topk_v2")
    except UsageError as error:
        return str(error)
    return None


class Indexer:
    """Refreshes the schedules and plans of one captured record, `buffers` by the names of one draft step or of none.

    UsageError if the installed DeepGEMM builds another variant than `geometry.schedule`. What cannot be built here is
    left alone; `not_covered` says so.
    """

    def __init__(self, geometry: Geometry, buffers: Mapping[str, torch.Tensor], device: torch.device):
        self._buffers = buffers
        self._schedules = why_no_schedule(device) is None and any(map(is_schedule, buffers))
        self._plans = why_no_plan(device) is None and any(map(is_plan, buffers))
        if self._schedules:
            deep_gemm.check_variant(geometry, device)

    def builds(self, name: str) -> bool:
        """Return whether the field `name` is there and refreshed."""
        wanted = (is_schedule(name) and self._schedules) or (is_plan(name) and self._plans)
        return wanted and name in self._buffers

    def schedule(self, name: str, lengths: torch.Tensor) -> None:
        """int32 `lengths` [rows] or [rows, N] into the schedule `name`, if it is covered."""
        if is_schedule(name) and self.builds(name):
            rows = lengths if lengths.dim() == 2 else lengths.contiguous().view(-1, 1)
            deep_gemm.refresh(rows, self._buffers[name])

    def plan(self, name: str, lengths: torch.Tensor, *, in_place: bool) -> None:
        """int32 `lengths` [rows] into the plan `name`, if covered. `in_place`: not copied, as pooled plans are not."""
        if not is_plan(name) or not self.builds(name):
            return
        plan_topk_v2 = wheel.attribute(PLANNER, "plan_topk_v2")
        if in_place:
            plan_topk_v2(lengths.to(torch.int32), out=self._buffers[name])
        else:
            self._buffers[name].copy_(plan_topk_v2(lengths))
