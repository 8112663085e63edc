"""map_outputs finds the fields of a layout in what a pipeline already has: a dict, a dataclass of tensors, or a backend
object with buffers somewhere inside. A subject returns the result from `outputs()`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.layout import Layout


def map_outputs(source: Any, layout: Layout, names: Mapping[str, str] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensor in `source` for each field of `layout`: under the field's own name, or where `names` says.

    `source`: a mapping, or an object with attributes. `names`: field -> path, dots going into mappings and attributes
    ("forward_metadata.page_table_1"). UsageError lists every field that is missing or is not a tensor, and
    every name that is not a field: nothing is left out of the verification in silence.
    """
    names = names or {}
    unknown = [name for name in names if name not in layout]
    if unknown:
        known = ", ".join(field.name for field in layout)
        raise UsageError(f"names: {', '.join(unknown)} are not fields of {layout.system}; its fields are {known}")
    found: dict[str, torch.Tensor] = {}
    missing = []
    for field in layout:
        path = names.get(field.name, field.name)
        value = _at(source, path)
        if isinstance(value, torch.Tensor):
            found[field.name] = value
        else:
            has = "is missing" if value is None else f"is a {type(value).__name__}"
            missing.append(f"{field.name} ({field.form}): {path} {has}")
    if missing:
        raise UsageError(
            f"{len(missing)} field(s) of {layout.system} have no tensor: {'; '.join(missing)}; say where they are with "
            "names={field: path}"
        )
    return found


def _at(source: Any, path: str) -> Any:
    for part in path.split("."):
        source = source.get(part) if isinstance(source, Mapping) else getattr(source, part, None)
    return source
