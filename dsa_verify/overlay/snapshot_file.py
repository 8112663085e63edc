"""The snapshot file: metadata and inputs of one step of a server, as JSON or safetensors (docs/judge.md).

It comes from somebody else as often as not, so it is read strictly: what is wrong is refused with one line that names
the place, the value, the limit and the remedy. It is data only, and names no code.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.base.small_file import check_case
from dsa_verify.buffers.arena import TORCH_DTYPES
from dsa_verify.contract.geometry import MAX_BATCH, PRESETS, Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.system import System
from dsa_verify.overlay.inputs import input_specs, token_columns
from dsa_verify.systems.catalogue import SYSTEMS, reference_of, system_of_case

SNAPSHOT_SCHEMA: Final = 1
MAX_ELEMENTS: Final = 1 << 28  # of one tensor, after rows that are left out have been put back
SUFFIX: Final = ".safetensors"
TABLE: Final = "req_to_token"
KEYS: Final = (
    "snapshot",
    "system",
    "preset",
    "geometry",
    "bucket",
    "raw_batch",
    "request_rows",
    "found",
    "inputs",
    "outputs",
)
_INDEX: Final = ("int32", "int64")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One step: `inputs` and `outputs` by name, on the CPU; the request map has all its rows again."""

    system: System
    geometry: Geometry
    bucket: int
    raw_batch: int
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]


def read_snapshot(path: Path) -> Snapshot:
    """Return the snapshot in `path`. UsageError with one line if it is none, or too large."""
    check_case(path)
    try:
        data = _of_safetensors(path) if path.suffix == SUFFIX else _load(path)
        return _parsed(data)
    except UsageError as error:
        text = str(error)
        raise UsageError(text if text.startswith(f"{path}: ") else f"{path}: {text}") from error


def write_snapshot(
    path: Path,
    *,
    system: str,
    geometry: Geometry,
    bucket: int,
    raw_batch: int,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    found: str | None = None,
) -> None:
    """Write one step of a server to `path` as JSON; waits for the device. Of `req_to_token` only the rows of the batch
    are written. `found`: what it is said to show."""
    rows = sorted(set(inputs["req_pool_indices"][:bucket].tolist()) & set(range(inputs[TABLE].shape[0])))
    columns = token_columns(geometry)
    written = {name: tensor for name, tensor in inputs.items() if name != TABLE}
    written[TABLE] = inputs[TABLE][torch.tensor(rows, dtype=torch.int64, device=inputs[TABLE].device), :columns]
    body = {
        "snapshot": SNAPSHOT_SCHEMA,
        "system": reference_of(SYSTEMS[system]),
        "preset": geometry.preset,
        "geometry": geometry.overrides(),
        "bucket": bucket,
        "raw_batch": raw_batch,
        "request_rows": rows,
        **({} if found is None else {"found": found}),
        "inputs": {name: _encoded(tensor) for name, tensor in written.items()},
        "outputs": {name: _encoded(tensor) for name, tensor in outputs.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body) + "\n", encoding="utf-8")


def _encoded(tensor: torch.Tensor) -> dict[str, Any]:
    array = tensor.detach().cpu().contiguous().numpy()
    text = base64.b64encode(array.tobytes()).decode()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "base64": text}


# The two containers --------------------------------------------------------------------------------------------------


def _load(path: Path) -> dict[str, Any]:
    check_case(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({error}); a snapshot is a JSON text, or a file *{SUFFIX}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path}: the snapshot is {_kind(data)}, not an object; write {{...}}")
    return data


def _of_safetensors(path: Path) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UsageError(
            f"a file *{SUFFIX} needs the package safetensors, which is not installed; pip install safetensors, or "
            "write the snapshot as JSON"
        ) from None
    try:
        with safe_open(str(path), framework="pt") as file:
            said = (file.metadata() or {}).get("snapshot")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    except (SafetensorError, OSError, RuntimeError) as error:
        raise UsageError(f"not safetensors ({error}); write it with safetensors.torch.save_file") from error
    try:
        data = json.loads(said) if said is not None else None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"metadata 'snapshot': not JSON ({error}); write the snapshot's other keys there") from error
    if not isinstance(data, dict):
        raise UsageError("metadata 'snapshot': missing; put a JSON object with the snapshot's other keys there")
    for name, tensor in tensors.items():
        side, _, rest = name.partition(".")
        if side not in ("inputs", "outputs") or not rest:
            raise UsageError(f"tensor {name!r}: is neither inputs.NAME nor outputs.NAME; call it so, or leave it out")
        data.setdefault(side, {})[rest] = tensor
    return data


# What is in them -----------------------------------------------------------------------------------------------------


def _parsed(data: Mapping[str, Any]) -> Snapshot:
    for key in data:
        if key not in KEYS:
            raise UsageError(f"{_short(key)}: is an unknown key; known keys: {', '.join(KEYS)}")
    if _get(data, "snapshot", int) != SNAPSHOT_SCHEMA:
        raise UsageError(f"snapshot: {data['snapshot']} is not {SNAPSHOT_SCHEMA}, the one this version reads")
    name = _get(data, "system", str)
    system = system_of_case(name, lambda _: False)
    if system is None:
        raise UsageError(f"system: {_short(name)} is unknown; use one of {', '.join(SYSTEMS)}")
    preset = _get(data, "preset", str)
    if preset not in PRESETS:
        raise UsageError(f"preset: {_short(preset)} is unknown; use one of {', '.join(PRESETS)}")
    geometry = system.geometry(preset, _get(data, "geometry", dict, {}), where="geometry.")
    bucket = _integer(data, "bucket", 1, MAX_BATCH)
    raw_batch = _integer(data, "raw_batch", 0, bucket)
    layout = system.layout(geometry, bucket)
    return Snapshot(
        system=system,
        geometry=geometry,
        bucket=bucket,
        raw_batch=raw_batch,
        inputs=_inputs(data, layout, system),
        outputs=_outputs(_get(data, "outputs", dict), layout),
    )


def _inputs(data: Mapping[str, Any], layout: Layout, system: System) -> dict[str, torch.Tensor]:
    given, geometry = _get(data, "inputs", dict), layout.geometry
    specs = input_specs(system, geometry)
    names = [*(spec.name for spec in specs), TABLE, *system.constants]
    _only(given, names, "inputs", "inputs")
    found = {}
    for spec in specs:
        tensor = _tensor(given, "inputs", spec.name, (spec.dtype, *_INDEX))
        if tuple(tensor.shape) != spec.shape(layout.bucket):
            raise UsageError(_misshapen(f"inputs.{spec.name}", tensor, spec.shape(layout.bucket), "bucket"))
        found[spec.name] = tensor
    for name in system.constants:
        found[name] = _tensor(given, "inputs", name, ("int32",))
    table = _tensor(given, "inputs", TABLE, ("int32",))
    if table.dim() != 2:
        raise UsageError(f"inputs.{TABLE}: has shape {list(table.shape)}; it must have rows of requests and columns")
    longest = int(found["seq_lens"].clamp(0, geometry.context).max()) + geometry.draft_tokens
    if table.shape[1] < min(longest, token_columns(geometry)):
        raise UsageError(
            f"inputs.{TABLE}: has {table.shape[1]} columns, and the longest request has {longest} tokens; give so many"
        )
    return {**found, TABLE: _whole(table, data, token_columns(geometry))}


def _whole(table: torch.Tensor, data: Mapping[str, Any], columns: int) -> torch.Tensor:
    """Return the request map with the rows and columns that the file may leave out, which hold 0."""
    rows: Any = data.get("request_rows")
    if rows is None:
        rows = range(table.shape[0])
    elif type(rows) is not list or any(type(row) is not int or row < 0 for row in rows) or len(set(rows)) != len(rows):
        raise UsageError(
            f"request_rows: {_short(rows)} is no list of different request rows; write one, or leave it out"
        )
    if len(rows) != table.shape[0] or not len(rows):
        raise UsageError(f"request_rows: {len(rows)} rows, and inputs.{TABLE} has {table.shape[0]}; give one for each")
    size = (max(rows) + 1) * max(columns, table.shape[1])
    if size > MAX_ELEMENTS:
        raise UsageError(
            f"request_rows: row {max(rows)} of {max(columns, table.shape[1])} columns makes {size} elements, more than "
            f"{MAX_ELEMENTS}; number the requests anew from 0 on"
        )
    # NumPy leaves rows that nobody touches to the system.
    whole = torch.from_numpy(np.zeros((max(rows) + 1, max(columns, table.shape[1])), np.int32))
    whole[torch.tensor(list(rows)), : table.shape[1]] = table
    return whole


def _outputs(given: Mapping[str, Any], layout: Layout) -> dict[str, torch.Tensor]:
    fields = {field.name: field for field in layout}
    _only(given, list(fields), "outputs", f"fields of {layout.system}")
    if not given:
        raise UsageError(f"outputs: is empty; give one or more of {', '.join(fields)}")
    found = {}
    for name in given:
        field = fields[name]
        tensor = _tensor(given, "outputs", name, (field.dtype,))
        if tuple(tensor.shape) != tuple(field.shape):
            raise UsageError(_misshapen(f"outputs.{name}", tensor, field.shape, "bucket or geometry"))
        found[name] = tensor
    return found


def _misshapen(where: str, tensor: torch.Tensor, shape: Sequence[int], what: str) -> str:
    return f"{where}: has shape {list(tensor.shape)}, it must be {list(shape)}; mend it, or {what}"


def _tensor(given: Mapping[str, Any], side: str, name: str, dtypes: Sequence[str]) -> torch.Tensor:
    """Return a tensor that is one, a nested list, or an object. The first of `dtypes` is that of a list."""
    where = f"{side}.{name}"
    if name not in given:
        raise UsageError(f"{where}: is missing; add it")
    value = given[name]
    if isinstance(value, torch.Tensor):
        found = value
    elif isinstance(value, dict):
        found = _of_object(value, where)
    elif isinstance(value, list):
        found = _of_list(value, dtypes[0], where)
    else:
        raise UsageError(f"{where}: is {_kind(value)}; write a nested list, or an object with dtype, shape and base64")
    if found.dtype not in [TORCH_DTYPES[dtype] for dtype in dtypes]:
        got, allowed = str(found.dtype).removeprefix("torch."), " or ".join(dict.fromkeys(dtypes))
        raise UsageError(f"{where}: is {got}, it must be {allowed}; dump it as the engine holds it")
    return found


def _of_object(value: Mapping[str, Any], where: str) -> torch.Tensor:
    _only(value, ["dtype", "shape", "base64", "data"], where, "keys here")
    dtype, shape = _get(value, "dtype", str, where=where), _get(value, "shape", list, where=where)
    if dtype not in TORCH_DTYPES:
        raise UsageError(f"{where}.dtype: {_short(dtype)} is unknown; use one of {', '.join(TORCH_DTYPES)}")
    if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise UsageError(
            f"{where}.shape: {_short(shape)} is no list of sizes whose product is {MAX_ELEMENTS} or less; mend it"
        )
    if ("base64" in value) == ("data" in value):
        raise UsageError(f"{where}: has both base64 and data, or neither; give one of them")
    if "data" in value:
        found = _of_list(_get(value, "data", list, where=where), dtype, where)
        if list(found.shape) != shape:
            raise UsageError(f"{where}: its data have shape {list(found.shape)}, and shape says {shape}; mend one")
        return found
    try:
        held = base64.b64decode(_get(value, "base64", str, where=where), validate=True)
    except binascii.Error as error:
        raise UsageError(f"{where}.base64: is not base64 ({error}); encode the bytes of the tensor") from error
    needed = math.prod(shape) * TORCH_DTYPES[dtype].itemsize
    if len(held) != needed:
        raise UsageError(f"{where}.base64: holds {len(held)} bytes, {dtype} {shape} has {needed}; mend one")
    return torch.from_numpy(np.frombuffer(held, np.dtype(dtype).newbyteorder("<")).astype(dtype).reshape(shape))


def _of_list(value: list[Any], dtype: str, where: str) -> torch.Tensor:
    """Return a nested list of numbers as a tensor; UsageError if rows differ in length, or for what is no number."""
    shape, flat = [len(value)], value
    while flat and all(isinstance(item, list) for item in flat):
        if len({len(item) for item in flat}) > 1:
            raise UsageError(
                f"{where}: its rows have {len(flat[0])} entries and other numbers of them; make them equal"
            )
        shape.append(len(flat[0]))
        flat = list(itertools.chain.from_iterable(flat))
    kinds = (int, float) if dtype.startswith("float") else (int,)
    wrong = next((item for item in flat if type(item) not in kinds), None)
    if wrong is not None:
        raise UsageError(f"{where}: {_short(wrong)} is not a number of {dtype}; write one")
    try:
        return torch.tensor(flat, dtype=TORCH_DTYPES[dtype]).reshape(shape)
    except (OverflowError, RuntimeError, ValueError) as error:
        far = max(flat, key=abs)
        raise UsageError(f"{where}: {_short(far)} does not fit into {dtype}; write what the engine holds") from error


def _get(data: Mapping[str, Any], key: str, kind: type, default: Any = None, *, where: str = "") -> Any:
    place = f"{where}.{key}" if where else key
    if key not in data:
        if default is None:
            raise UsageError(f"{place}: is missing; add {_KINDS[kind]}")
        return default
    if type(data[key]) is not kind:
        raise UsageError(f"{place}: is {_kind(data[key])}; write {_KINDS[kind]}")
    return data[key]


def _integer(data: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value: int = _get(data, key, int)
    if not low <= value <= high:
        raise UsageError(f"{key}: {value} is outside {low}..{high}; use a number inside")
    return value


def _only(given: Mapping[str, Any], names: Sequence[str], where: str, what: str) -> None:
    for name in given:
        if name not in names:
            raise UsageError(f"{where}.{name}: is unknown; {what}: {', '.join(names)}")


_KINDS: Final = {dict: "an object", list: "a list", str: "a string", int: "an integer"}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
