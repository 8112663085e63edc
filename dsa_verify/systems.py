"""System: a layout, its oracle and its shipped subjects, by name.

Oracles and subjects are named by `module:attribute` strings and imported when asked for, so that neither side can
reach the other through this table, and so that listing the systems imports no kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Final

from dsa_verify.contract import Layout
from dsa_verify.errors import UsageError
from dsa_verify.geometry import Geometry
from dsa_verify.layouts import basic, mtp
from dsa_verify.subject import Subject, SubjectFactory, load_attribute

ENTRY_POINT_GROUP: Final = "dsa_verify.subjects"
DEFAULT_SUBJECT: Final = "triton"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """`layout(geometry, bucket)`; `oracle` and `subjects` are `module:attribute` references to Subject factories.

    `by_default`: whether a run that names no system includes it.
    """

    name: str
    summary: str
    layout: Callable[[Geometry, int], Layout]
    oracle: str
    subjects: Mapping[str, str]
    drafts: bool
    by_default: bool = True

    def make_oracle(self) -> Subject:
        oracle: Subject = load_attribute(self.oracle)()
        return oracle


SYSTEMS: Final[dict[str, System]] = {
    "decode": System(
        name="decode",
        summary="one token a request (contract 1.1)",
        layout=basic.decode,
        oracle="oracles.decode:DecodeOracle",
        subjects={"triton": "dsa_verify.pipelines.basic:Decode"},
        drafts=False,
    ),
    "target_verify": System(
        name="target_verify",
        summary="N draft tokens a request, verified by the target model (contract 1.2)",
        layout=basic.target_verify,
        oracle="oracles.target_verify:TargetVerifyOracle",
        subjects={
            "triton": "dsa_verify.pipelines.basic:TargetVerify",
            "out_of_graph": "dsa_verify.pipelines.schedule_life:OutOfGraph",
            "cached": "dsa_verify.pipelines.schedule_life:Cached",
            "residual": "dsa_verify.pipelines.schedule_life:Residual",
        },
        drafts=True,
    ),
    "draft_extend": System(
        name="draft_extend",
        summary="up to N accepted tokens a request, extended by the draft model (contract 1.3)",
        layout=basic.draft_extend,
        oracle="oracles.draft_extend:DraftExtendOracle",
        subjects={"triton": "dsa_verify.pipelines.basic:DraftExtend"},
        drafts=True,
    ),
    "mtp": System(
        name="mtp",
        summary="n - 1 draft steps, each with decode metadata of its own, refreshed from one record (contract 2)",
        layout=mtp.mtp,
        oracle="oracles.mtp:MtpOracle",
        subjects={"triton": "dsa_verify.pipelines.mtp:Mtp", "sibling": "dsa_verify.pipelines.mtp:Sibling"},
        drafts=False,
        by_default=False,  # n - 1 times the work of decode
    ),
}


def get_system(name: str) -> System:
    if name not in SYSTEMS:
        raise UsageError(f"system {name!r} is unknown; known systems: {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def subject_factory(system: System, reference: str | None) -> tuple[str, SubjectFactory]:
    """(label, factory) of a shipped name, an installed entry point or `module:attribute`."""
    label = reference or DEFAULT_SUBJECT
    if label in system.subjects:
        factory = load_attribute(system.subjects[label])
    elif ":" in label:
        factory = load_attribute(label)
    else:
        installed = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
        if label not in installed:
            known = ", ".join([*system.subjects, *installed])
            raise UsageError(
                f"subject {label!r} is unknown for {system.name}; known: {known}; or give module:attribute"
            )
        factory = installed[label].load()
    if not callable(factory):
        raise UsageError(
            f"subject {label!r} is a {type(factory).__name__}, not a class or function; "
            "name something that returns a new subject when called without arguments"
        )
    return label, factory
