"""Sources: where a server's own tensors are, found once by name and looked at again in every check.

Looking again costs an attribute or key and an address each, so that a buffer which was replaced is noticed at once;
everything else about a tensor is checked only when it is bound or has moved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.buffers.arena import TORCH_DTYPES, Identity
from dsa_verify.buffers.region import rows_are_whole
from dsa_verify.contract.layout import Layout
from dsa_verify.overlay.inputs import input_specs, token_columns
from dsa_verify.systems.catalogue import get_system

Check = Callable[[torch.Tensor], str | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """One tensor: the `path` to it, what is `wrong` with a candidate (None: nothing), and the part that is used."""

    name: str
    path: tuple[str, ...]
    wrong: Check
    rows: int | None = None  # how many of its first entries are used; None: all of it


class Sources:
    """The tensors `wanted` of whatever `source` is given: a mapping, or an object with attributes."""

    def __init__(self, what: str, wanted: list[_Wanted], source: Any):
        self._what, self._wanted = what, wanted
        self.names = [each.name for each in wanted]
        paths = [each.path for each in wanted]
        self._keys = [path[0] for path in paths] if all(len(path) == 1 for path in paths) else None
        found = self.tensors(source)
        self._refuse_missing(found)
        self.bound = self.checked(found)
        self._pointers = [tensor.data_ptr() for tensor in found]
        self._identities = {each.name: Identity.of(tensor) for each, tensor in zip(wanted, found, strict=True)}

    @classmethod
    def of_inputs(cls, layout: Layout, source: Any, paths: Mapping[str, str] | None = None) -> Sources:
        """Return the inputs of `layout`, each in its first rows for this bucket. UsageError lists all that is wrong."""
        system = get_system(layout.system)
        wanted = [
            _Wanted(
                name=spec.name,
                path=_path(paths, spec.name),
                wrong=_wrong_vector(layout.bucket * spec.rows),
                rows=layout.bucket * spec.rows,
            )
            for spec in input_specs(system, layout.geometry)
        ]
        columns = token_columns(layout.geometry)
        wanted.append(_Wanted(name="req_to_token", path=_path(paths, "req_to_token"), wrong=_wrong_map(columns)))
        for name in system.constants:
            wanted.append(_Wanted(name=name, path=_path(paths, name), wrong=_wrong_constant))
        return cls(f"inputs of {layout.system}, bucket {layout.bucket}", wanted, source)

    @classmethod
    def of_outputs(cls, layout: Layout, source: Any, paths: Mapping[str, str] | None = None) -> Sources:
        """Return the fields of `layout`. UsageError lists all that is missing or of another shape or dtype."""
        wanted = [
            _Wanted(name=field.name, path=_path(paths, field.name), wrong=_wrong_field(field.shape, field.dtype))
            for field in layout
        ]
        return cls(f"outputs of {layout.system}, bucket {layout.bucket}", wanted, source)

    @property
    def device(self) -> torch.device:
        return next(iter(self.bound.values())).device

    def tensors(self, source: Any) -> list[Any]:
        """Return what is there now, in the order of `names`; `moved` refuses what is not a tensor."""
        if self._keys is not None:
            if type(source) is dict:
                return [source.get(key) for key in self._keys]
            if not isinstance(source, Mapping):
                return [getattr(source, key, None) for key in self._keys]
        return [_at(source, each.path) for each in self._wanted]

    def moved(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether any tensor is not where it was bound. UsageError if one is missing or is not a tensor."""
        try:
            return [tensor.data_ptr() for tensor in tensors] != self._pointers
        except AttributeError:
            self._refuse_missing(tensors)
            raise

    def _refuse_missing(self, found: Sequence[Any]) -> None:
        missing = [
            f"{each.name} ({'.'.join(each.path)}) is {'missing' if value is None else 'a ' + type(value).__name__}"
            for each, value in zip(self._wanted, found, strict=True)
            if not isinstance(value, torch.Tensor)
        ]
        if missing:
            raise UsageError(
                f"{self._what}: {'; '.join(missing)}; say where they are with names={{field: path}}, or which fields "
                "are to be compared with fields=(...)"
            )

    def changes(self, tensors: list[torch.Tensor]) -> dict[str, str]:
        """Say in words, by name, how a tensor is not what was bound."""
        pairs = zip(self.names, tensors, strict=True)
        found = {name: self._identities[name].change_to(Identity.of(tensor)) for name, tensor in pairs}
        return {name: change for name, change in found.items() if change}

    def checked(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the part of each tensor that is used, by name. UsageError lists every tensor that cannot be it."""
        pairs = list(zip(self._wanted, tensors, strict=True))
        wrong = [f"{each.name} {reason}" for each, tensor in pairs if (reason := each.wrong(tensor)) is not None]
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            wrong.append(f"they are on {', '.join(sorted(map(str, devices)))}, and must be on one device")
        if wrong:
            raise UsageError(f"{self._what}: {'; '.join(wrong)}")
        return {
            each.name: tensor if each.rows is None or len(tensor) == each.rows else tensor[: each.rows]
            for each, tensor in pairs
        }


def _path(paths: Mapping[str, str] | None, name: str) -> tuple[str, ...]:
    return tuple((paths or {}).get(name, name).split("."))


def _at(source: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        # A dict first: asking whether something is a Mapping costs more than all the rest.
        keyed = type(source) is dict or isinstance(source, Mapping)
        source = source.get(part) if keyed else getattr(source, part, None)
    return source


def _described(tensor: torch.Tensor) -> str:
    return f"is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _wrong_vector(rows: int) -> Check:
    def wrong(tensor: torch.Tensor) -> str | None:
        if tensor.dim() != 1 or len(tensor) < rows or tensor.dtype not in (torch.int32, torch.int64):
            return f"{_described(tensor)}, it must be int32 or int64 [{rows}] or longer"
        return None

    return wrong


def _wrong_map(columns: int) -> Check:
    def wrong(tensor: torch.Tensor) -> str | None:
        if tensor.dim() != 2 or tensor.dtype is not torch.int32 or tensor.shape[1] < columns or not len(tensor):
            return (
                f"{_described(tensor)}, it must be int32 [request rows, {columns} or more], which the geometry's "
                "context and draft_tokens need"
            )
        return None if rows_are_whole(tensor) else f"has strides {list(tensor.stride())}; rows must be whole"

    return wrong


def _wrong_constant(tensor: torch.Tensor) -> str | None:
    if tensor.dim() != 1 or tensor.dtype is not torch.int32 or len(tensor) < 2 or not tensor.is_contiguous():
        return f"{_described(tensor)}, it must be int32 [slots + 1] and contiguous (contract 7.1)"
    return None


def _wrong_field(shape: tuple[int, ...], dtype: str) -> Check:
    def wrong(tensor: torch.Tensor) -> str | None:
        if tuple(tensor.shape) != shape or tensor.dtype is not TORCH_DTYPES[dtype]:
            return f"{_described(tensor)}, it must be {dtype} {list(shape)}"
        return None if rows_are_whole(tensor) else f"has strides {list(tensor.stride())}; rows must be whole"

    return wrong
