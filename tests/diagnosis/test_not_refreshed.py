"""Every derived buffer that one replay refreshed and the next did not is caught, and called stale since that round."""

from __future__ import annotations

import pytest
import torch

from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Lifetime
from dsa_verify.contract.round import Round
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.graphs import open_backend
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.systems.catalogue import SYSTEMS

DEVICE = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
MODES = [
    ("decode", "triton"),
    ("target_verify", "triton"),
    ("target_verify", "out_of_graph"),
    ("target_verify", "residual"),
    ("draft_extend", "triton"),
]
# In the residual life, fields are refreshed on both sides of the graph: that one stands for the other two where Triton
# is interpreted.
SLOW = {("target_verify", "triton"), ("target_verify", "out_of_graph")} if DEVICE.type == "cpu" else set()
# Everything that is derived changes from one to the other, even whether a pool is closed.
ROUNDS = [
    Round(bucket=4, seq_lens=(9, 600, 18, 36), requests=(3, 4, 5, 6), poison="stale"),
    Round(bucket=4, seq_lens=(515, 6, 67, 200), requests=(7, 8, 9, 3), poison="stale"),
]


def geometry_of(system: str) -> Geometry:
    return SYSTEMS[system].geometry("tiny_pool", {"draft_tokens": 3 if SYSTEMS[system].drafts else 1})


def rounds_of(system: str) -> list[Round]:
    if system != "draft_extend":
        return ROUNDS
    return [
        Round(bucket=4, seq_lens=r.seq_lens, requests=r.requests, lens={"accept_lens": accepts}, poison="stale")
        for r, accepts in zip(ROUNDS, ((1, 3, 3, 1), (3, 2, 1, 2)), strict=True)
    ]


CASES = [
    pytest.param(system, subject, field.name, marks=[pytest.mark.slow] * ((system, subject) in SLOW))
    for system, subject in MODES
    for field in SYSTEMS[system].layout(geometry_of(system), 4)
    if field.lifetime is Lifetime.REPLAY and field.alias is None
]


@pytest.mark.parametrize(("system", "subject", "field"), CASES)
def test_a_buffer_that_is_not_refreshed_is_stale(system: str, subject: str, field: str) -> None:
    backend = open_backend(DEVICE)
    setup = ReplaySetup.make(SYSTEMS[system], geometry_of(system), (4,), 0, subject, f"not_refreshed:{field}", backend)
    findings = {finding.field: finding for finding in confirm(setup, rounds_of(system))}
    assert findings[field].diagnosis is Diagnosis.STALE, findings[field].sentence
    assert "stale since round 0" in findings[field].sentence


def test_all_derived_buffers_are_among_the_cases() -> None:
    named = {case.values[2] for case in CASES if pytest.mark.slow not in case.marks}
    assert {"paged_mqa_schedule_metadata", "topk_v2_plan", "pooled_real_page_table"} <= named
    assert sum(field.startswith("write_plan_") for field in named) == 9
