"""Twenty callables, ten of which replay like eager work and ten of which do not. None of them is about attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor


# Right ----------------------------------------------------------------------------------------------------------------


def elementwise(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x > 0, x * 2 + y, y)


def product_into(x: Tensor, w: Tensor, out: Tensor) -> None:
    torch.mm(x, w, out=out)


def prefix_sums(lens: Tensor, out: Tensor) -> Tensor:
    out[:1].zero_()
    torch.cumsum(lens, 0, dtype=torch.int32, out=out[1:])
    return out[1:] - lens


def gathered(table: Tensor, order: Tensor) -> dict[str, Tensor]:
    return {"rows": table[order], "sorted": torch.sort(order).values}


def updated(state: Tensor, x: Tensor) -> Tensor:
    """Reads and writes its first input."""
    state.mul_(0.5).add_(x)
    return state.amax(dim=1)


def with_scratch(x: Tensor, workspace: Tensor) -> Tensor:
    part = workspace[: x.numel()]
    part.copy_(x.flatten())
    return part.view_as(x).cumsum(0)


class KeepsItsOutput:
    """Allocates its result once, as modules with static buffers do."""

    def __init__(self) -> None:
        self.out: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.out is None or self.out.shape != x.shape:
            self.out = torch.empty_like(x)
        torch.mul(x, 3, out=self.out)
        return self.out, x[::2]


def masked(lens: Tensor, x: Tensor) -> Tensor:
    """Its rows do not depend on each other, so pads do no harm."""
    column = torch.arange(x.shape[1], device=x.device)
    return x.masked_fill(column >= lens[:, None], float("nan"))


@dataclasses.dataclass
class Nested:
    lens: Tensor
    tables: list[Tensor]
    out: Tensor


def nested(md: Nested) -> None:
    md.out.copy_(md.lens + md.tables[0] + md.tables[1])


@triton.jit
def _scale_kernel(x, out, count, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count) * factor, mask=at < count)


def by_kernel(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _scale_kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), 5, BLOCK=16)
    return out


# Wrong ----------------------------------------------------------------------------------------------------------------


def baked_scalar(x: Tensor, shift: int) -> Tensor:
    """The caller changes `shift`; the graph has the one of its capture."""
    return x + shift


class StaleTemporary:
    """Computes a temporary anew when its input is another tensor, not when the input has other content."""

    def __init__(self) -> None:
        self.source, self.doubled = 0, torch.zeros(0)

    def __call__(self, x: Tensor) -> Tensor:
        if x.data_ptr() != self.source:
            self.source, self.doubled = x.data_ptr(), x * 2
        return self.doubled + 1


def output_rebound(md: Nested) -> None:
    md.out = md.lens + 1


class Accumulates:
    """Adds to what it holds, and never sets it back."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def __call__(self, x: Tensor) -> Tensor:
        self.total.add_(x)
        return self.total + 0


def reads_pads(slots: Tensor, x: Tensor, table: Tensor) -> Tensor:
    """Pad rows are written to slot 0, which a request may have."""
    return table.scatter(0, slots, x)


class Race:
    """Work on another stream, which nobody waits for before its result is read."""

    def __init__(self, like: Tensor) -> None:
        self.side, self.shared = torch.cuda.Stream(), torch.zeros_like(like)

    def __call__(self, x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(2_000_000)
            torch.mul(x, 2, out=self.shared)
        out = self.shared + 1
        main.wait_stream(self.side)
        return out


def host_read(lens: Tensor, x: Tensor) -> Tensor:
    return x[: int(lens.max())].clone()


class GridOfTheFirstBatch:
    """Covers as many rows as the first call had."""

    def __init__(self) -> None:
        self.programs = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.programs = self.programs or x.shape[0]
        out = torch.empty_like(x)
        columns = x.shape[1]
        _scale_kernel[(self.programs,)](x, out, x.numel(), 5, BLOCK=columns)
        return out


def small_workspace(x: Tensor, workspace: Tensor) -> Tensor:
    """Writes one element more than the workspace has."""
    part = workspace.as_strided((x.numel() + 1,), (1,))
    part[:-1].copy_(x.flatten())
    part[-1:].fill_(7)
    return part[:-1].view_as(x) + 1


def other_dtype(x: Tensor) -> Tensor:
    """A single row goes another way."""
    return x.double() if x.shape[0] == 1 else x * 1


Case = tuple[Any, Any, dict[str, Any]]  # callable, inputs, options


def right(device: torch.device) -> dict[str, Case]:
    """Callables that replay like eager work, by name."""

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def floats(*shape: int) -> Tensor:
        return torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(device)

    wide = floats(4, 20)
    base = ints(3, 1, 4, 1)
    return {
        "elementwise": (elementwise, (floats(4, 8) - 0.5, wide[:, 2:10]), {"batch": ("x", "y")}),
        "product into": (product_into, (floats(4, 8), floats(8, 3), floats(4, 3)), {"writes": ("out",)}),
        "prefix sums": (
            prefix_sums,
            {"lens": base, "out": ints(0, 0, 0, 0, 0)},
            {"batch": ("lens", "out"), "writes": ("out",), "pads": {"lens": 0}},
        ),
        "gathered": (gathered, (floats(6, 2), torch.tensor([2, 0, 5, 1], device=device)), {}),
        "updated": (updated, (floats(4, 8), floats(4, 8)), {"updates": ("state",), "batch": ("state", "x")}),
        "with scratch": (with_scratch, (base, ints(*[0] * 6)), {"scratch": ("workspace",)}),
        "keeps its output": (KeepsItsOutput(), floats(4, 8), {}),
        "masked": (masked, (base, floats(4, 8)), {"batch": {"lens": 0, "x": 0}, "change": {"lens": (0, 8)}}),
        "nested": (nested, {"md": Nested(base, [ints(1, 2, 3, 4), base + 1], base * 0)}, {"writes": ("md.out",)}),
        "by kernel": (by_kernel, (ints(*range(1, 40)),), {}),
    }


def wrong(device: torch.device) -> dict[str, Case]:
    """Callables that do not, by name."""

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    lens, x = ints(3, 1, 4, 1), ints(*range(1, 33)).view(4, 8)
    cases: dict[str, Case] = {
        "baked scalar": (baked_scalar, {"x": lens, "shift": 3}, {"change": {"shift": (1, 9)}}),
        "stale temporary": (StaleTemporary(), (lens,), {}),
        "output rebound": (output_rebound, (Nested(lens, [], lens * 0),), {"writes": ("md.out",)}),
        "accumulation": (Accumulates(torch.zeros_like(lens)), (lens,), {}),
        "pads": (
            reads_pads,
            (torch.tensor([3, 0, 2, 1], device=device), lens, ints(0, 0, 0, 0)),
            {"batch": ("slots", "x"), "pads": {"slots": 0, "x": -1}, "change": {"slots": "permute"}},
        ),
        "host read": (host_read, (lens, x), {}),
        "grid of the first batch": (GridOfTheFirstBatch(), (x,), {"batch": ("x",)}),
        "workspace too small": (small_workspace, (lens, ints(0, 0, 0, 0)), {"scratch": ("workspace",)}),
        "other dtype": (other_dtype, (x,), {"batch": ("x",)}),
    }
    if device.type == "cuda":
        cases["race"] = (Race(lens), (lens,), {})
    return cases
