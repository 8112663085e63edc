"""Drawing: how inputs change from round to round. It is done on the host, so that a seed draws the same everywhere.

What nobody says something of is inferred from the input as given: numbers stay within its least and greatest, whole
numbers that are all different are permuted, and what looks like a prefix sum or holds one number only is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from dsa_verify.base.errors import UsageError

KEEP, PERMUTE, BATCH = "keep", "permute", "batch"
WORDS: Final = (KEEP, PERMUTE, BATCH)
Redraw = Callable[[torch.Tensor, torch.Generator], torch.Tensor | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How one input changes: "keep", "permute", "batch" (a plain number: the live batch), "range" or "call"."""

    kind: str
    low: float = 0
    high: float = 0
    call: Callable[..., Any] | None = None
    told: bool = False

    @property
    def changes(self) -> bool:
        return self.kind != KEEP

    @classmethod
    def told_by(cls, path: str, given: object) -> Rule:
        """Return the rule that the caller gave. UsageError for anything that is none."""
        if callable(given):
            return cls("call", call=given, told=True)
        if isinstance(given, str) and given in WORDS:
            return cls(given, told=True)
        if isinstance(given, tuple) and len(given) == 2 and all(isinstance(each, int | float) for each in given):
            low, high = given
            if low <= high:
                return cls("range", low, high, told=True)
        raise UsageError(
            f"change: {path}: {given!r} is no rule; give (low, high), both included, 'keep', 'permute', 'batch' for a "
            "plain number, or a function of the tensor and a torch.Generator"
        )

    @classmethod
    def inferred(cls, tensor: torch.Tensor) -> Rule:
        """Return the rule for an input of which nothing was said."""
        values = tensor.detach().cpu()
        if not values.numel() or values.dtype.is_complex:
            return cls(KEEP)
        if values.dtype == torch.bool:
            return cls("range", 0, 1)
        if values.dtype.is_floating_point:
            finite = values.double()[torch.isfinite(values.double())]
            low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
            return cls("range", low, high) if low < high else cls("range", low - 1, high + 1)
        flat = values.flatten().to(torch.int64)
        low, high = int(flat.min()), int(flat.max())
        if low == high or (values.dim() == 1 and low == 0 and bool((flat.diff() >= 0).all()) and int(flat[0]) == 0):
            return cls(KEEP)
        return cls(PERMUTE) if flat.unique().numel() == flat.numel() else cls("range", low, high)

    def redraw(self, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return new content for `tensor`, which is on the host."""
        if self.call is not None:
            returned = self.call(tensor, generator)
            return tensor if returned is None else returned
        values = tensor.detach().cpu()
        if self.kind == PERMUTE:
            order = torch.randperm(values.numel(), generator=generator)
            return values.flatten()[order].view(values.shape)
        if values.dtype.is_floating_point:
            drawn = torch.rand(values.shape, generator=generator, dtype=torch.float64)
            return (self.low + (self.high - self.low) * drawn).to(values.dtype)
        low, high = int(self.low), int(self.high)
        return torch.randint(low, high + 1, values.shape, generator=generator, dtype=torch.int64).to(values.dtype)

    def number(self, value: Any, batch: int | None, generator: torch.Generator) -> Any:
        """Return a new plain number in the place of `value`."""
        if self.kind == BATCH:
            return batch
        if self.call is not None:
            return self.call(value, generator)
        if self.kind == "range" and isinstance(value, float):
            drawn = float(torch.rand(1, generator=generator, dtype=torch.float64))
            return self.low + (self.high - self.low) * drawn
        if self.kind == "range":
            return int(torch.randint(int(self.low), int(self.high) + 1, (1,), generator=generator))
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """The rules of all inputs. `whole`: the caller's function that rewrites all of them instead; it is given the
    arguments by name and a torch.Generator, and writes in place."""

    tensors: dict[str, Rule]
    numbers: dict[str, Rule]
    whole: Callable[[dict[str, Any], torch.Generator], object] | None

    @classmethod
    def of(
        cls, change: object, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], written: set[str]
    ) -> Rules:
        """`written`: paths of inputs that are not drawn, because they are outputs or scratch."""
        if callable(change):
            return cls({}, {}, change)
        if change is not None and not isinstance(change, Mapping):
            raise UsageError(f"change: {change!r} is neither a mapping from paths to rules nor a function")
        told = {str(path): Rule.told_by(str(path), given) for path, given in (change or {}).items()}
        plain = {name for name, value in values.items() if type(value) in (int, float)}
        for path, rule in told.items():
            if path not in tensors and path not in plain:
                known = ", ".join([*tensors, *plain])
                raise UsageError(f"change: {path!r} names no tensor and no number of the inputs; they are {known}")
            if path in written or (path in tensors and rule.kind == BATCH):
                raise UsageError(f"change: {path!r} has no effect, because the callable writes it, or is no number")
        inferred = {path: Rule.inferred(tensor) for path, tensor in tensors.items() if path not in written}
        rules = {path: told.get(path, rule) for path, rule in inferred.items()}
        return cls(rules, {name: told[name] for name in plain if name in told}, None)

    @property
    def changed(self) -> list[str]:
        return [path for path, rule in (self.tensors | self.numbers).items() if rule.changes]

    @property
    def kept(self) -> list[str]:
        return [path for path, rule in self.tensors.items() if not rule.changes]
