"""System: a layout, its oracle and its shipped subjects, by name.

Oracles and subjects are named by `module:attribute` strings and imported when asked for, so that neither side can
reach the other through this table, and so that listing the systems imports no kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import SubjectFactory, check_factory, load_attribute
from dsa_verify.systems import basic, dcp, mtp, padded, ragged_verify
from dsa_verify.systems.engines import check_system, engine_subject
from dsa_verify.systems.system import System, of_device
from dsa_verify.systems.trust import installed_subjects

DEFAULT_SUBJECT: Final = "triton"
# Among the settled fields of an engine's subject: its tables are as wide as its own code makes them. Not `table_width`
# itself, which edges set.
OWN_TABLES: Final = "tables of the engine's width"
# What only pipelines of our own take in every form, on every device: others have the indexer that they were asked for
# with, or none, and its metadata for the device that they run on.
OWN_PIPELINES: Final = "dsa_verify.subjects.pipelines."
OF_THE_SUBJECT: Final = frozenset({"indexer", "architecture", "schedule"})
# Among the settled fields of such a subject: the matrix leaves it the draft steps, blocks and ratios it was asked for.
OF_OTHERS: Final = "a subject that is not ours"


SYSTEMS: Final[dict[str, System]] = {
    "decode": System(
        name="decode",
        summary="one token a request (contract 1.1)",
        layout=basic.decode,
        oracle="oracles.decode:DecodeOracle",
        subjects={"triton": "dsa_verify.subjects.pipelines.basic:Decode"},
        drafts=False,
    ),
    "target_verify": System(
        name="target_verify",
        summary="N draft tokens a request, verified by the target model (contract 1.2)",
        layout=basic.target_verify,
        oracle="oracles.target_verify:TargetVerifyOracle",
        subjects={
            "triton": "dsa_verify.subjects.pipelines.basic:TargetVerify",
            "out_of_graph": "dsa_verify.subjects.pipelines.schedule_life:OutOfGraph",
            "cached": "dsa_verify.subjects.pipelines.schedule_life:Cached",
            "residual": "dsa_verify.subjects.pipelines.schedule_life:Residual",
            "in_graph": "dsa_verify.subjects.pipelines.in_graph_verify:InGraphSubject",
            "in_graph_residual": "dsa_verify.subjects.pipelines.in_graph_verify:InGraphResidualSubject",
            "deep_gemm": "dsa_verify.subjects.adapters.deep_gemm_verify:DeepGemmVerify",
        },
        drafts=True,
    ),
    "draft_extend": System(
        name="draft_extend",
        summary="up to N accepted tokens a request, extended by the draft model (contract 1.3)",
        layout=basic.draft_extend,
        oracle="oracles.draft_extend:DraftExtendOracle",
        subjects={"triton": "dsa_verify.subjects.pipelines.basic:DraftExtend"},
        drafts=True,
    ),
    "ragged_verify": System(
        name="ragged_verify",
        summary="1 to N draft tokens a request, verified by the target model, padded to G token rows (contract 9)",
        layout=ragged_verify.ragged_verify,
        oracle="oracles.ragged_verify:RaggedVerifyOracle",
        subjects={"triton": "dsa_verify.subjects.pipelines.ragged_verify:RaggedVerify"},
        drafts=True,
        by_default=False,
    ),
    "padded": System(
        name="padded",
        summary="DSV4-style metadata, full width, at every raw batch (contract 7)",
        layout=padded.padded,
        oracle="oracles.padded:PaddedOracle",
        subjects={
            "triton": "dsa_verify.subjects.pipelines.padded:Padded",
            "glue": "dsa_verify.subjects.pipelines.padded_glue:Glued",
        },
        drafts=True,
        by_default=False,
        presets=("deepseek_v4", "tiny_v4"),
    ),
    "dcp": System(
        name="dcp",
        summary="decode context parallelism, all ranks on one device (contract 8)",
        layout=dcp.dcp,
        oracle="oracles.dcp:DcpOracle",
        subjects={"triton": "dsa_verify.subjects.pipelines.dcp:Dcp"},
        drafts=False,
        by_default=False,
    ),
    "mtp": System(
        name="mtp",
        summary="n - 1 draft steps, each with decode metadata of its own, refreshed from one record (contract 2)",
        layout=mtp.mtp,
        oracle="oracles.mtp:MtpOracle",
        subjects={
            "triton": "dsa_verify.subjects.pipelines.mtp:Mtp",
            "sibling": "dsa_verify.subjects.pipelines.mtp:Sibling",
        },
        drafts=False,
        by_default=False,  # n - 1 times the work of decode
    ),
}


def get_system(name: str) -> System:
    if name not in SYSTEMS:
        raise UsageError(f"system {name!r} is unknown; known systems: {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def systems_to_run(names: Sequence[str], subject: str | None, of_fault: Sequence[str] | None = None) -> list[str]:
    """Which systems a run covers: those named, else the one that an engine's subject belongs to, else the default.
    Of the default only those `of_fault`, to which a fault that is planted belongs; all of these, if none is a default.

    UsageError for an unknown system, or one that `subject` does not belong to.
    """
    for name in names:
        check_system(subject, get_system(name).name)
    engine = engine_subject(subject)
    default = [name for name, system in SYSTEMS.items() if system.by_default]
    if of_fault is not None:
        default = [name for name in default if name in of_fault] or list(of_fault)
    return list(dict.fromkeys(names or ([engine.system] if engine is not None else default)))


def settled_geometry(
    system: System,
    subject: object,
    device_type: str,
    preset: str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Geometry, frozenset[str]]:
    """The geometry that a run of `subject` (a reference, a factory or None) starts from, and the fields of it that are
    settled, so that no matrix turns them over: `settings`, and what an engine's subject asks for beside them, with
    OWN_TABLES. Whether there is an indexer is settled where a preset is named, and of a subject that is not ours, which
    also has OF_OTHERS.

    `preset` (None: that of the subject, else of the system) and `settings` are what the run says itself. UsageError
    for a wrong one.
    """
    engine = engine_subject(subject) if isinstance(subject, str) else None
    wanted = dict(settings) if engine is None else {**engine.settings, **settings}
    presets = system.presets if engine is None or engine.presets is None else engine.presets
    fixed = set(wanted) if preset is None else {*wanted, "indexer"}
    if preset is None:
        preset = of_device(presets, device_type)
    if engine is not None:
        fixed.add(OWN_TABLES)
    if not is_ours(system, subject):
        fixed |= OF_THE_SUBJECT | {OF_OTHERS}
    return Geometry.resolve(preset, wanted), frozenset(fixed)


def is_ours(system: System, subject: object) -> bool:
    """Whether `subject` (a reference, a factory or None) is a pipeline of this project."""
    name = DEFAULT_SUBJECT if subject is None else subject
    return isinstance(name, str) and system.subjects.get(name, "").startswith(OWN_PIPELINES)


def subject_factory(system: System, reference: str | None) -> tuple[str, SubjectFactory]:
    """(label, factory) of a shipped name, an engine's subject, an installed entry point or `module:attribute`.

    UsageError for a name of nothing, or of something that makes no subjects. What is named is imported, so a name that
    comes out of a case is checked first (trust.py).
    """
    label = DEFAULT_SUBJECT if reference is None else reference
    engine = engine_subject(label)
    if engine is not None:
        check_system(label, system.name)
        factory = load_attribute(engine.reference)
    elif label in system.subjects:
        factory = load_attribute(system.subjects[label])
    elif ":" in label:
        factory = load_attribute(label)
    else:
        installed = installed_subjects()
        if label not in installed:
            known = ", ".join([*system.subjects, *installed])
            raise UsageError(
                f"subject {label!r} is unknown for {system.name}; known: {known}; or give module:attribute"
            )
        point = installed[label]
        factory = load_attribute(f"{point.module}:{point.attr}")
    check_factory(label, factory)
    return label, factory
