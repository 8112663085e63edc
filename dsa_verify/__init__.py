"""dsa-verify replays DSA attention-metadata pipelines in live CUDA graphs beside an eager oracle.

Everything that users import is here: `from dsa_verify import Geometry, map_outputs`. A name is imported from its room
when it is first used, so that importing the package imports neither torch nor Triton.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dsa_verify.base.device import choose_device
    from dsa_verify.base.errors import (
        CaptureError,
        DeviceLost,
        DsaVerifyError,
        GuardError,
        HarnessError,
        NothingVerified,
        OutOfMemory,
        ReplayError,
        UsageError,
    )
    from dsa_verify.buffers.arena import Arena
    from dsa_verify.buffers.tail_reset import PaddedInputFiller
    from dsa_verify.changed_inputs.like_eager import replays_like_eager
    from dsa_verify.changed_inputs.result import LikeEager, NotLikeEager
    from dsa_verify.contract.engine_form import EngineForm, PadRows
    from dsa_verify.contract.finding import Diagnosis, Finding
    from dsa_verify.contract.geometry import Geometry
    from dsa_verify.contract.layout import Compare, Field, Layout, Lifetime, Live, Row
    from dsa_verify.contract.map_outputs import map_outputs
    from dsa_verify.contract.round import Round, Scenario
    from dsa_verify.contract.size import Size
    from dsa_verify.contract.static_inputs import StaticInput
    from dsa_verify.contract.subject import Buffers, Inputs, Subject, SubjectFactory, current_outputs
    from dsa_verify.contract.system import System
    from dsa_verify.declare.draws import (
        Constant,
        Count,
        Derived,
        Length,
        PageTable,
        Permutation,
        RequestRow,
        Uniform,
    )
    from dsa_verify.declare.metadata import Metadata, law
    from dsa_verify.declare.ports import In, Out
    from dsa_verify.graphs import Backend, open_backend
    from dsa_verify.metadata_guard.finding import GuardFinding, GuardWarning
    from dsa_verify.metadata_guard.guard import MetadataGuard, guard
    from dsa_verify.overlay.overlay import NullOverlay, Overlay
    from dsa_verify.overlay.ring import CaptureRing
    from dsa_verify.pytest_plugin.fixture import DsaFixture
    from dsa_verify.rounds.case_file import read_case
    from dsa_verify.rounds.matrix import diagnostic_matrix
    from dsa_verify.run.runner import Runner, RunResult, new_result
    from dsa_verify.systems.catalogue import get_system
    from fuzz.cases import paths as case_paths

# What a user writes: a pipeline, its test, an overlay, or a program that runs them. By name: where it is.
_HOME: Final = {
    "Arena": "dsa_verify.buffers.arena",
    "Backend": "dsa_verify.graphs",
    "Buffers": "dsa_verify.contract.subject",
    "CaptureError": "dsa_verify.base.errors",
    "CaptureRing": "dsa_verify.overlay.ring",
    "Compare": "dsa_verify.contract.layout",
    "Constant": "dsa_verify.declare.draws",
    "Count": "dsa_verify.declare.draws",
    "Derived": "dsa_verify.declare.draws",
    "DeviceLost": "dsa_verify.base.errors",
    "Diagnosis": "dsa_verify.contract.finding",
    "DsaFixture": "dsa_verify.pytest_plugin.fixture",
    "DsaVerifyError": "dsa_verify.base.errors",
    "EngineForm": "dsa_verify.contract.engine_form",
    "Field": "dsa_verify.contract.layout",
    "Finding": "dsa_verify.contract.finding",
    "Geometry": "dsa_verify.contract.geometry",
    "GuardError": "dsa_verify.base.errors",
    "GuardFinding": "dsa_verify.metadata_guard.finding",
    "GuardWarning": "dsa_verify.metadata_guard.finding",
    "HarnessError": "dsa_verify.base.errors",
    "In": "dsa_verify.declare.ports",
    "Inputs": "dsa_verify.contract.subject",
    "Layout": "dsa_verify.contract.layout",
    "Length": "dsa_verify.declare.draws",
    "Lifetime": "dsa_verify.contract.layout",
    "LikeEager": "dsa_verify.changed_inputs.result",
    "Live": "dsa_verify.contract.layout",
    "Metadata": "dsa_verify.declare.metadata",
    "MetadataGuard": "dsa_verify.metadata_guard.guard",
    "NotLikeEager": "dsa_verify.changed_inputs.result",
    "NothingVerified": "dsa_verify.base.errors",
    "NullOverlay": "dsa_verify.overlay.overlay",
    "Out": "dsa_verify.declare.ports",
    "OutOfMemory": "dsa_verify.base.errors",
    "Overlay": "dsa_verify.overlay.overlay",
    "PadRows": "dsa_verify.contract.engine_form",
    "PaddedInputFiller": "dsa_verify.buffers.tail_reset",
    "PageTable": "dsa_verify.declare.draws",
    "Permutation": "dsa_verify.declare.draws",
    "ReplayError": "dsa_verify.base.errors",
    "RequestRow": "dsa_verify.declare.draws",
    "Round": "dsa_verify.contract.round",
    "Row": "dsa_verify.contract.layout",
    "RunResult": "dsa_verify.run.runner",
    "Runner": "dsa_verify.run.runner",
    "Scenario": "dsa_verify.contract.round",
    "Size": "dsa_verify.contract.size",
    "StaticInput": "dsa_verify.contract.static_inputs",
    "Subject": "dsa_verify.contract.subject",
    "SubjectFactory": "dsa_verify.contract.subject",
    "System": "dsa_verify.contract.system",
    "Uniform": "dsa_verify.declare.draws",
    "UsageError": "dsa_verify.base.errors",
    "case_paths": "fuzz.cases:paths",
    "choose_device": "dsa_verify.base.device",
    "current_outputs": "dsa_verify.contract.subject",
    "diagnostic_matrix": "dsa_verify.rounds.matrix",
    "get_system": "dsa_verify.systems.catalogue",
    "guard": "dsa_verify.metadata_guard.guard",
    "law": "dsa_verify.declare.metadata",
    "map_outputs": "dsa_verify.contract.map_outputs",
    "new_result": "dsa_verify.run.runner",
    "open_backend": "dsa_verify.graphs",
    "read_case": "dsa_verify.rounds.case_file",
    "replays_like_eager": "dsa_verify.changed_inputs.like_eager",
}

# Spelled out once more, because a type checker reads a list and no table.
__all__ = [
    "Arena",
    "Backend",
    "Buffers",
    "CaptureError",
    "CaptureRing",
    "Compare",
    "Constant",
    "Count",
    "Derived",
    "DeviceLost",
    "Diagnosis",
    "DsaFixture",
    "DsaVerifyError",
    "EngineForm",
    "Field",
    "Finding",
    "Geometry",
    "GuardError",
    "GuardFinding",
    "GuardWarning",
    "HarnessError",
    "In",
    "Inputs",
    "Layout",
    "Length",
    "Lifetime",
    "LikeEager",
    "Live",
    "Metadata",
    "MetadataGuard",
    "NotLikeEager",
    "NothingVerified",
    "NullOverlay",
    "Out",
    "OutOfMemory",
    "Overlay",
    "PadRows",
    "PaddedInputFiller",
    "PageTable",
    "Permutation",
    "ReplayError",
    "RequestRow",
    "Round",
    "Row",
    "RunResult",
    "Runner",
    "Scenario",
    "Size",
    "StaticInput",
    "Subject",
    "SubjectFactory",
    "System",
    "Uniform",
    "UsageError",
    "case_paths",
    "choose_device",
    "current_outputs",
    "diagnostic_matrix",
    "get_system",
    "guard",
    "law",
    "map_outputs",
    "new_result",
    "open_backend",
    "read_case",
    "replays_like_eager",
]


# What they were called before; the former names work with a DeprecationWarning.
_FORMER: Final = {
    "BufferRegistry": "PaddedInputFiller",
    "OwnForm": "EngineForm",
    "Run": "RunResult",
    "Verification": "DsaFixture",
    "open_run": "new_result",
    "settle_device": "choose_device",
}


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        text = f"dsa_verify.{name} is called {_FORMER[name]} now; import that"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        name = _FORMER[name]
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    value = getattr(importlib.import_module(module), attribute or name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
