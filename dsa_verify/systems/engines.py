"""Engine: a serving engine whose own published code can be the pipeline under test, named `engine:subject`.

Each engine has an adapter package with a table `SUBJECTS`. The table says what there is; the engine's code is imported
when a subject of it is made, never to list or to look one up.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from dsa_verify.base.errors import NothingVerified, UsageError

if TYPE_CHECKING:
    import torch

# By the name before the colon, the adapter package that holds the table.
ENGINES: Final = {
    "sglang": "dsa_verify.subjects.adapters.sglang",
    "vllm": "dsa_verify.subjects.adapters.vllm",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSubject:
    """`name`: as `--subject` takes it, engine and all. `system`: the one system that it is a subject of. `reference`:
    `module:attribute` of its factory, which has a static method `provenance() -> Mapping[str, str]` that imports all
    the code of the engine it needs. `needs_gpu`: whether it cannot run in an emulated graph, whatever the geometry.
    `presets`: as those of a System, instead of its own. `settings`: fields of the geometry that the code asks for. A
    run that names a preset or sets such a field itself has the last word. `compiles`: why kernels of it are known to be
    compiled after the warm-up, which is no finding then; empty for most."""

    name: str
    system: str
    reference: str
    summary: str
    needs_gpu: bool = False
    presets: tuple[str, str] | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compiles: str = ""


def engine_subject(reference: str | None) -> EngineSubject | None:
    """Return the engine's subject that `reference` names; None if it names no engine. UsageError if the engine has none
    such.

    Imports nothing of the engine.
    """
    engine, colon, name = (reference or "").partition(":")
    if not colon or engine not in ENGINES:
        return None
    table = _table(engine)
    if name not in table:
        raise UsageError(f"subject {reference!r} is unknown; {engine} has {', '.join(table)}")
    return table[name]


def engine_subjects() -> Iterator[EngineSubject]:
    """Yield all of all engines."""
    for engine in ENGINES:
        yield from _table(engine).values()


def check_system(reference: str | None, system: str) -> None:
    """Raise UsageError if `reference` is an engine's subject of another system than `system`."""
    subject = engine_subject(reference)
    if subject is not None and subject.system != system:
        raise UsageError(
            f"subject {subject.name!r} is one of {subject.system}, not of {system}; leave the system out, or name "
            f"{subject.system}"
        )


def check_device(reference: str | None, device: torch.device) -> None:
    """Raise NothingVerified (exit status 4) if `reference` is an engine's subject that needs a GPU, and `device` is
    none."""
    subject = engine_subject(reference)
    if subject is not None and subject.needs_gpu and device.type != "cuda":
        raise NothingVerified(
            f"subject {subject.name!r} needs a CUDA GPU and this run is on {device.type}; give --device cuda where "
            "there is one"
        )


def _table(engine: str) -> Mapping[str, EngineSubject]:
    table: Mapping[str, EngineSubject] = importlib.import_module(ENGINES[engine]).SUBJECTS
    return table
