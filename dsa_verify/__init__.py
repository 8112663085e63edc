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
    from dsa_verify.overlay.snapshot_file import write_snapshot
    from dsa_verify.pytest_plugin.fixture import DsaFixture
    from dsa_verify.rounds.case_file import read_case
    from dsa_verify.rounds.matrix import diagnostic_matrix
    from dsa_verify.run.runner import Runner, RunResult, new_result
    from dsa_verify.systems.catalogue import get_system
    from fuzz.cases import paths as case_paths

# What a user writes: a pipeline, its test, an overlay, or a program that runs them. By module, the names in it.
_NAMES: Final = {
    "dsa_verify.base.device": ["choose_device"],
    "dsa_verify.base.errors": [
        "CaptureError",
        "DeviceLost",
        "DsaVerifyError",
        "GuardError",
        "HarnessError",
        "NothingVerified",
        "OutOfMemory",
        "ReplayError",
        "UsageError",
    ],
    "dsa_verify.buffers.arena": ["Arena"],
    "dsa_verify.buffers.tail_reset": ["PaddedInputFiller"],
    "dsa_verify.changed_inputs.like_eager": ["replays_like_eager"],
    "dsa_verify.changed_inputs.result": ["LikeEager", "NotLikeEager"],
    "dsa_verify.contract.engine_form": ["EngineForm", "PadRows"],
    "dsa_verify.contract.finding": ["Diagnosis", "Finding"],
    "dsa_verify.contract.geometry": ["Geometry"],
    "dsa_verify.contract.layout": ["Compare", "Field", "Layout", "Lifetime", "Live", "Row"],
    "dsa_verify.contract.map_outputs": ["map_outputs"],
    "dsa_verify.contract.round": ["Round", "Scenario"],
    "dsa_verify.contract.size": ["Size"],
    "dsa_verify.contract.static_inputs": ["StaticInput"],
    "dsa_verify.contract.subject": ["Buffers", "Inputs", "Subject", "SubjectFactory", "current_outputs"],
    "dsa_verify.contract.system": ["System"],
    "dsa_verify.declare.draws": [
        "Constant",
        "Count",
        "Derived",
        "Length",
        "PageTable",
        "Permutation",
        "RequestRow",
        "Uniform",
    ],
    "dsa_verify.declare.metadata": ["Metadata", "law"],
    "dsa_verify.declare.ports": ["In", "Out"],
    "dsa_verify.graphs": ["Backend", "open_backend"],
    "dsa_verify.metadata_guard.finding": ["GuardFinding", "GuardWarning"],
    "dsa_verify.metadata_guard.guard": ["MetadataGuard", "guard"],
    "dsa_verify.overlay.overlay": ["NullOverlay", "Overlay"],
    "dsa_verify.overlay.ring": ["CaptureRing"],
    "dsa_verify.overlay.snapshot_file": ["write_snapshot"],
    "dsa_verify.pytest_plugin.fixture": ["DsaFixture"],
    "dsa_verify.rounds.case_file": ["read_case"],
    "dsa_verify.rounds.matrix": ["diagnostic_matrix"],
    "dsa_verify.run.runner": ["RunResult", "Runner", "new_result"],
    "dsa_verify.systems.catalogue": ["get_system"],
}
# By name: where it is.
_HOME: Final = {name: module for module, names in _NAMES.items() for name in names} | {"case_paths": "fuzz.cases:paths"}

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
    "write_snapshot",
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
