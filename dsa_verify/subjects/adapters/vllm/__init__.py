"""Subjects that run vLLM's own published code. This table names them; importing it imports none of that code."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from dsa_verify.systems.engines import EngineSubject

_PACKAGE: Final = "dsa_verify.subjects.adapters.vllm"
_COMPILES: Final = "kernels of its preparation are made anew for values of a batch, 2 to 4 in 272 replays on an H200"


def _subjects(system: str, **rows: tuple[str, str]) -> dict[str, EngineSubject]:
    """Return the subjects of `system` by name: the place (module of this package and attribute) and the summary."""
    return {
        name: EngineSubject(
            name=f"vllm:{name}", system=system, reference=f"{_PACKAGE}.{place}", summary=summary, compiles=_COMPILES
        )
        for name, (place, summary) in rows.items()
    }


# By the name after the colon.
SUBJECTS: Final[Mapping[str, EngineSubject]] = MappingProxyType(
    _subjects(
        "decode",
        decode=("basic:Decode", "a decode step: the runner's preparation, then the indexer's builder"),
        draft_decode=("draft_decode:DraftDecode", "a draft model's decode step, updated in place inside the graph"),
    )
    | _subjects(
        "target_verify",
        target_verify=("basic:TargetVerify", "a verify step, laid out as vLLM decides on this machine"),
        target_verify_flat=("basic:TargetVerifyFlat", "a verify step, a row a query token"),
        target_verify_varlen=("basic:TargetVerifyVarlen", "a verify step whose queries the device knows"),
    )
    | _subjects(
        "draft_extend",
        draft_extend=("basic:DraftExtend", "the draft model's first step, a row a query token"),
        draft_extend_varlen=("basic:DraftExtendVarlen", "that step where the device knows the queries"),
        draft_extend_adaptive=(
            "basic:DraftExtendAdaptive",
            "that step where the host knows only the sum of the queries",
        ),
    )
)
