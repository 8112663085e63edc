"""Arguments: the inputs of a callable by name, and what the caller says of them: the batch, the pads, who writes them.

Paths begin with the name of a parameter: `x`, `tables[2].lens`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.nested.parts import tensors_in

LAST: Final = "last"
ROLES: Final = ("writes", "updates", "scratch")


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """How `fn` is called: with `values` by name, the first `positional` of them by position."""

    fn: Callable[..., Any]
    values: dict[str, Any]
    positional: int

    @classmethod
    def of(cls, fn: Callable[..., Any], inputs: Any) -> Call:
        """`inputs`: a tuple or list of positional arguments, a mapping of keyword arguments, or a single tensor."""
        if isinstance(inputs, Mapping):
            return cls(fn, dict(inputs), 0)
        given = list(inputs) if isinstance(inputs, tuple | list) else [inputs]
        names = _names(fn, len(given))
        return cls(fn, dict(zip(names, given, strict=True)), len(given))

    def run(self, values: Mapping[str, Any]) -> Any:
        """Call `fn` with `values` in the place of the inputs."""
        ordered = list(values.values())
        return self.fn(*ordered[: self.positional], **dict(list(values.items())[self.positional :]))


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return plain[:count] if len(plain) >= count else [f"arg{i}" for i in range(count)]


def tensors_by_path(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of the arguments by path."""
    return {f"{name}{path}": tensor for name, value in values.items() for path, tensor in tensors_in(value).items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """The dimension of an input that grows with the batch: it has `batch * each + extra` rows. `pad`: what rows beyond
    them hold, "last": what the last of them holds, or None: anything that was drawn."""

    dimension: int
    each: int
    extra: int
    pad: int | float | str | None

    def live(self, batch: int) -> int:
        """Return how many rows are live."""
        return batch * self.each + self.extra

    def reset_pads(self, tensor: torch.Tensor, batch: int) -> None:
        """Write what rows beyond the live ones hold."""
        live, size = self.live(batch), tensor.size(self.dimension)
        if self.pad is None or live == size:
            return
        beyond = tensor.narrow(self.dimension, live, size - live)
        if self.pad == LAST:
            beyond.copy_(tensor.narrow(self.dimension, live - 1, 1).expand_as(beyond))
        else:
            beyond.fill_(self.pad)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """What the caller says of the inputs, by path. `batch`: the captured one; None if no input has such a dimension."""

    rows: dict[str, Rows]
    batch: int | None
    roles: dict[str, str]

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        batch: Mapping[str, int] | Iterable[str] | None,
        pads: Mapping[str, int | float | str] | None,
        given_roles: Mapping[str, Iterable[str]],
    ) -> Declared:
        """Raises UsageError for a path that is none, and for sizes that do not fit each other."""
        dimensions = dict(batch) if isinstance(batch, Mapping) else dict.fromkeys(_as_paths("batch", batch or ()), 0)
        pads = dict(pads or {})
        roles = {role: _as_paths(role, paths) for role, paths in given_roles.items()}
        by_path = {path: role for role, paths in roles.items() for path in paths}
        for option, named in (("batch", dimensions), ("pads", pads), *((role, roles[role]) for role in roles)):
            for path in named:
                if path not in tensors:
                    raise UsageError(f"{option}: {path!r} is no tensor of the inputs; they are {', '.join(tensors)}")
        strange = [path for path in pads if path not in dimensions]
        if strange:
            raise UsageError(f"pads: {strange[0]!r} has no effect; name its batch dimension with batch=")
        if not dimensions:
            return cls({}, None, by_path)
        first = next(iter(dimensions))
        captured = _size(first, tensors[first], dimensions[first])
        rows = {
            path: _rows(path, _size(path, tensors[path], dimension), captured, dimension, pads.get(path))
            for path, dimension in dimensions.items()
        }
        return cls(rows, captured, by_path)

    def role(self, path: str) -> str | None:
        """Return which of ROLES the input has; None if nobody may write it."""
        return self.roles.get(path)


def _as_paths(option: str, paths: Iterable[str]) -> list[str]:
    if isinstance(paths, str):
        raise UsageError(f"{option}: {paths!r} is a text; give a sequence of paths, such as ({paths!r},)")
    return list(paths)


def _size(path: str, tensor: torch.Tensor, dimension: int) -> int:
    if not -tensor.dim() <= dimension < tensor.dim():
        raise UsageError(f"batch: {path} has {tensor.dim()} dimensions, so {dimension} is none of them")
    if not tensor.size(dimension):
        raise UsageError(f"batch: {path} has no row in dimension {dimension}; capture a batch of 1 or more")
    return tensor.size(dimension)


def _rows(path: str, size: int, batch: int, dimension: int, pad: int | float | str | None) -> Rows:
    if isinstance(pad, str) and pad != LAST:
        raise UsageError(f"pads: {path}: {pad!r} is no pad; give a number or 'last'")
    if size % batch == 0:
        return Rows(dimension, size // batch, 0, pad)
    if size % batch == 1:
        return Rows(dimension, size // batch, 1, pad)  # a prefix sum has one more
    raise UsageError(
        f"batch: {path} has {size} rows, which is no multiple of the batch ({batch}, the rows of the first path), "
        "nor one more"
    )
