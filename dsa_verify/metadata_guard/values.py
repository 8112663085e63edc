"""Values: what a guard compares on the device. Nothing here waits until `Pending.read` is called.

Three comparisons end in the same four integers a tensor (`nested/bits.py`): a checksum with that of capture, pad rows
with what was declared, and a field with what eager work computes from a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.metadata_guard.place import describe
from dsa_verify.nested.bits import Differing, checksum, differing, shown, unravel
from dsa_verify.nested.parts import tensors_in

LAST: Final = "last"
PadValue = int | float | Literal["last"]


@dataclasses.dataclass(frozen=True, slots=True)
class PadRule:
    """Rows from `batch * rows_per_request` on hold `value`; "last": what the row at that place holds."""

    value: PadValue
    rows_per_request: int

    @classmethod
    def of(cls, given: object, path: str) -> PadRule:
        """Return the rule for a value, or for a pair (value, rows per request). UsageError for anything else."""
        value, rows = given if isinstance(given, tuple) and len(given) == 2 else (given, 1)
        if (not isinstance(value, int | float) and value != LAST) or type(rows) is not int or rows < 1:
            raise UsageError(
                f"pads: {path}: {given!r} is no rule; give the value of pad rows (a number or 'last'), or a pair of it "
                "and the rows of each request"
            )
        return cls(cast(PadValue, value), rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """What one comparison is of. `shape`: of what was compared, which begins at `first_row` of the field."""

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    first_row: int = 0
    at_once: str = ""  # the sentence, where the form alone says it

    def sentence(self, found: Differing) -> str | None:
        """Return what is wrong, the subject of the sentence being the field; None if nothing is."""
        if self.at_once or not found.differ:
            return self.at_once or None
        if self.kind == "constant":
            return "has other content than when it was captured, and was declared constant"
        total = 1
        for size in self.shape:
            total *= size
        index = unravel(found.first, self.shape)
        if index:
            index[0] += self.first_row
        got, want = shown(found, self.dtype)
        at = f"at {index} it holds {got}, {'pad rows must hold' if self.kind == 'pad' else 'eagerly it is'} {want}"
        if self.kind == "pad":
            return f"was not reset beyond the batch: {at}; {found.differ} of {total} pad elements differ"
        return f"is not what eager work computes: {at}; {found.differ} of {total} elements differ"


class Pending:
    """Results that are on their way to the host. `about`: the batch and replay for the sentence."""

    def __init__(self, judged: Sequence[Judged], results: Sequence[torch.Tensor], about: str, replay: int) -> None:
        self.judged, self.about, self.replay = tuple(judged), about, replay
        self._event: torch.cuda.Event | None = None
        device = next((each.device for each in results if each.device.type != "cpu"), torch.device("cpu"))
        here = [each.to(device, non_blocking=True) for each in results]
        table = torch.stack(here) if here else torch.zeros(0, 4, dtype=torch.int64)
        if table.device.type == "cuda":
            self._table = torch.empty(table.shape, dtype=torch.int64, pin_memory=True)
            self._table.copy_(table, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(table.device))
        else:
            self._table = table

    @property
    def is_there(self) -> bool:
        """Return whether `read` would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> list[tuple[Judged, str]]:
        """Wait for the results; return each comparison that failed, with its sentence."""
        if self._event is not None:
            self._event.synchronize()
        rows = [Differing(*(int(number) for number in row)) for row in self._table.tolist()]
        found = ((judged, judged.sentence(row)) for judged, row in zip(self.judged, rows, strict=True))
        return [(judged, text) for judged, text in found if text is not None]


Comparison = tuple[Judged, torch.Tensor]


def compare_constant(path: str, tensor: torch.Tensor, before: torch.Tensor) -> Comparison:
    """`before`: the checksum of capture, int64 [1]."""
    return Judged(path, "constant", (1,), torch.int64), differing(checksum(tensor), before)


def compare_pads(path: str, tensor: torch.Tensor, rule: PadRule, batch: int) -> Comparison | None:
    """Return None if the batch fills `tensor`."""
    start = batch * rule.rows_per_request
    if rule.value == LAST:
        wanted = tensor[start : start + 1]
        start += 1
    if start >= tensor.shape[0]:
        return None
    rows = tensor[start:]
    if rule.value != LAST:
        wanted = torch.full((1,), rule.value, dtype=tensor.dtype, device=tensor.device)
    judged = Judged(path, "pad", tuple(rows.shape), rows.dtype, first_row=start)
    return judged, differing(rows, wanted.expand(rows.shape))


def compare_eager(got: torch.Tensor, want: torch.Tensor, path: str) -> Comparison:
    """Compare a field after the replay with what eager work has for it."""
    if got.dtype != want.dtype or got.shape != want.shape or got.device != want.device:
        text = f"is {describe(got)} on {got.device}, and eager work computes {describe(want)} on {want.device}"
        return Judged(path, "value", (), got.dtype, at_once=text), torch.zeros(4, dtype=torch.int64, device=got.device)
    return Judged(path, "value", tuple(got.shape), got.dtype), differing(got, want)


def wanted_by_path(returned: Any, paths: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return what eager work returned, by the path of the field that it is for.

    `returned` is an object like the metadata, or a mapping from paths below the metadata to tensors. UsageError for a
    tensor that is no field.
    """
    found = tensors_in(returned)
    if isinstance(returned, Mapping):
        by_name = {path.removeprefix("."): path for path in paths}
        named = {key: value for key, value in returned.items() if isinstance(value, torch.Tensor)}
        if named and all(key in by_name for key in named):
            return {by_name[str(key)]: value for key, value in named.items()}
    strange = [path for path in found if path not in paths]
    if strange or not found:
        what = f"metadata{strange[0]}" if strange else "no tensor"
        has = ", ".join(path.removeprefix(".") for path in paths)
        raise UsageError(f"eager: it returned {what}; return None, or tensors for some of: {has}")
    return found
