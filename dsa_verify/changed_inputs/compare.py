"""Compare: one replay against eager work, output by output. What it returns are observations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from dsa_verify.changed_inputs.poisoned import fill
from dsa_verify.nested.bits import Differing, as_bits, differing, shown, unravel

MAX_HISTORY_BYTES: Final = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What is wrong: a verdict of `LikeEager`, the words for it, and the numbers where elements differ."""

    verdict: str
    says: str
    path: str | None = None
    index: tuple[int, ...] | None = None
    got: str | None = None
    want: str | None = None
    differing: int | None = None
    compared: int | None = None


class History:
    """What eager work computed in earlier rounds, on the device, up to MAX_HISTORY_BYTES."""

    def __init__(self) -> None:
        self._rounds: list[tuple[int, dict[str, torch.Tensor]]] = []
        self._bytes = 0

    def add(self, number: int, results: Mapping[str, torch.Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in results.values())
        if self._bytes + size <= MAX_HISTORY_BYTES:
            self._bytes += size
            self._rounds.append((number, {path: tensor.clone() for path, tensor in results.items()}))

    def facts(self, path: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
        """Say what else the elements that differ hold: poison, or the results of the earlier round that most of them
        hold. What fewer than half of them hold is not said."""
        mine = as_bits(got).reshape(-1)
        wrong = mine != as_bits(want).reshape(-1)
        total = int(wrong.sum())
        poison = torch.empty_like(got)
        fill(poison, 0)
        candidates = [("the poison that lay there before the replay", poison)]
        for number, results in reversed(self._rounds):
            past = results.get(path)
            if past is not None and past.shape == got.shape and past.dtype == got.dtype:
                candidates.append((f"what eager work computed in round {number}", past))
        counts = [(int((wrong & (mine == as_bits(past).reshape(-1))).sum()), text) for text, past in candidates]
        most, text = max(counts, key=lambda each: each[0])
        return [f"{most} of these hold {text}"] if 2 * most >= total else []


def first_difference(
    got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], history: History | None, narrowed: bool
) -> Observation | None:
    """Compare all outputs. `narrowed`: eager work had fewer rows than the captured batch. Without a `history` both are
    eager work, `want` that of the run before."""
    who, other = ("the replay", "eagerly") if history is not None else ("eager work", "in the run before")
    if list(got) != list(want):
        text = f"{who} has the outputs {', '.join(got)}, {other} they are {', '.join(want)}"
        return Observation(verdict="other form", says=text)
    for path, mine in got.items():
        wanted = want[path]
        if found := other_form(path, mine, wanted, narrowed, other):
            return found
        live = narrow_like(mine, wanted)
        numbers = Differing(*differing(live, wanted).tolist())
        if numbers.differ:
            facts = history.facts(path, live, wanted) if history is not None else []
            return _differs(path, live, numbers, other, facts)
    return None


def other_form(path: str, got: torch.Tensor, want: torch.Tensor, narrowed: bool, when: str) -> Observation | None:
    """Compare dtype, device, shape and, where the shape is the same, the strides. `when`: where `want` is from."""
    fits = got.dim() == want.dim() and all(w <= g for g, w in zip(got.shape, want.shape, strict=False))
    mine: Any
    other: Any
    if got.dtype != want.dtype:
        what, mine, other = "dtype", _short(got.dtype), _short(want.dtype)
    elif got.device != want.device:
        what, mine, other = "device", got.device, want.device
    elif got.shape != want.shape and not (narrowed and fits):
        what, mine, other = "shape", list(got.shape), list(want.shape)
    elif got.shape == want.shape and _steps(got) != _steps(want):
        what, mine, other = "strides", list(got.stride()), list(want.stride())
    else:
        return None
    return Observation(verdict="other form", says=f"{path} has {what} {mine}, {when} it has {other}", path=path)


def narrow_like(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return the first rows of `got`, as many in each dimension as `want` has."""
    for dimension, size in enumerate(want.shape):
        got = got.narrow(dimension, 0, size)
    return got


def elements_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _differs(path: str, got: torch.Tensor, numbers: Differing, other: str, facts: list[str]) -> Observation:
    index = unravel(numbers.first, tuple(got.shape))
    mine, wanted = shown(numbers, got.dtype)
    place = f"{path}{index}" if index else path
    says = f"{place} is {mine}, {other} it is {wanted}; {numbers.differ} of {got.numel()} elements differ"
    return Observation(
        verdict="differs",
        says="; ".join([says, *facts]),
        path=path,
        index=tuple(index),
        got=mine,
        want=wanted,
        differing=numbers.differ,
        compared=got.numel(),
    )


def _steps(tensor: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions that anybody steps along."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
