"""Target-verify: N draft tokens a request, verified by the target model (contract 1.2)."""

from __future__ import annotations

from typing import Final

from dsa_verify.contract.edge_kind import TABLES
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.system import System
from dsa_verify.systems import basic


def _starts_at_the_length(geometry: Geometry) -> int:
    return 0


SYSTEM: Final = System(
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
    by_default=True,
    written_back=_starts_at_the_length,
    adds_draft=True,
    indexer=True,
    pools=True,
    context_columns=basic.verify_columns,
    by_architecture=True,
    edges=TABLES,
)
