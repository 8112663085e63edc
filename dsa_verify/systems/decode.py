"""Decode: one token a request (contract 1.1)."""

from __future__ import annotations

from typing import Final

from dsa_verify.contract.edge_kind import TABLES
from dsa_verify.contract.system import System
from dsa_verify.systems import basic

SYSTEM: Final = System(
    name="decode",
    summary="one token a request (contract 1.1)",
    layout=basic.decode,
    oracle="oracles.decode:DecodeOracle",
    subjects={"triton": "dsa_verify.subjects.pipelines.basic:Decode"},
    by_default=True,
    indexer=True,
    pools=True,
    empty_rows=True,
    narrow=True,
    edges=TABLES,
)
