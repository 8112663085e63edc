"""Subjects that run vLLM's own published code. This table names them; importing it imports none of that code."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from dsa_verify.systems.engines import EngineSubject

_PACKAGE: Final = "dsa_verify.subjects.adapters.vllm"
_COMPILES: Final = "kernels of its preparation are made anew for values of a batch, 2 to 4 in 272 replays on an H200"


def _subject(name: str, system: str, place: str, summary: str) -> EngineSubject:
    """`place`: module of this package and attribute, "basic:Decode"."""
    return EngineSubject(
        name=f"vllm:{name}", system=system, reference=f"{_PACKAGE}.{place}", summary=summary, compiles=_COMPILES
    )


# By the name after the colon.
SUBJECTS: Final[Mapping[str, EngineSubject]] = MappingProxyType(
    {
        subject.name.partition(":")[2]: subject
        for subject in (
            _subject(
                "decode",
                "decode",
                "basic:Decode",
                "a decode step: the runner's preparation, then the indexer's builder",
            ),
            _subject(
                "draft_decode",
                "decode",
                "draft_decode:DraftDecode",
                "a draft model's decode step, updated in place inside the graph",
            ),
            _subject(
                "target_verify",
                "target_verify",
                "basic:TargetVerify",
                "a verify step, laid out as vLLM decides on this machine",
            ),
            _subject(
                "target_verify_flat", "target_verify", "basic:TargetVerifyFlat", "a verify step, a row a query token"
            ),
            _subject(
                "target_verify_varlen",
                "target_verify",
                "basic:TargetVerifyVarlen",
                "a verify step whose queries the device knows",
            ),
            _subject(
                "draft_extend", "draft_extend", "basic:DraftExtend", "the draft model's first step, a row a query token"
            ),
            _subject(
                "draft_extend_varlen",
                "draft_extend",
                "basic:DraftExtendVarlen",
                "that step where the device knows the queries",
            ),
            _subject(
                "draft_extend_adaptive",
                "draft_extend",
                "basic:DraftExtendAdaptive",
                "that step where the host knows only the sum of the queries",
            ),
        )
    }
)
