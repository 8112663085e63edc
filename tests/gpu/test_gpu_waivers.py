"""On a GPU: what a waiver covers is found inside the harness's own CUDA graphs, and all else is judged there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsa_verify.contract.finding import Finding
from dsa_verify.graphs import open_backend
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.waivers.waivers import NO_WAIVERS, Ledger, parse_ledger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
STALE = [f"step{step}_{name}" for step in range(3) for name in ("paged_mqa_schedule_metadata", "topk_v2_plan")]


def ledger_of(**entry: Any) -> Ledger:
    known = {"id": "known", "subject": "triton", "versions": {"dsa-verify": ">=0.0.1"}, "reason": "as it was published"}
    return parse_ledger([{**known, **entry}], "test")


def verify(
    system: str, preset: str, fault: str | None, ledger: Ledger, **settings: Any
) -> tuple[list[Finding], Counts]:
    geometry = SYSTEMS[system].geometry(preset, {"context": 4096, **settings})
    (config,) = diagnostic_matrix(SYSTEMS[system], geometry, batches=[48], fixed=frozenset({"context", *settings}))
    backend = open_backend(torch.device("cuda", torch.cuda.current_device()), "cuda")
    setup = ReplaySetup.make(SYSTEMS[system], config.geometry, config.buckets, 0, None, fault, backend, ledger)
    counts = Counts()
    return verify_rounds(setup, config.chunks(), counts, folder=None), counts


def test_the_published_gap_of_three_draft_steps_is_waived() -> None:
    """Every poison is among the rounds, and rounds that are replayed twice (contract 2.3)."""
    gap = {"system": "mtp", "field": STALE, "diagnosis": "never written", "when": {"draft_steps": ">=4"}}
    findings, counts = verify("mtp", "glm53_flash", "stale_draft_steps", ledger_of(**gap))
    assert [finding.sentence for finding in findings] == []
    assert (counts.mismatches, counts.guard_hits, counts.rounds_checked) == (0, 0, 17)
    assert counts.compilations_after_warmup == 0
    assert {use.field for use in counts.waivers.values() if use.rounds > 10} == set(STALE)
    findings, counts = verify("mtp", "glm53_flash", None, ledger_of(**gap))
    assert findings == []
    assert {use.field for use in counts.waivers.values() if use.gone} == set(STALE)
    assert verify("mtp", "glm53_flash", "stale_draft_steps", NO_WAIVERS)[0]


def test_a_field_that_is_not_waived_is_found_beside_those_that_are() -> None:
    some = {"system": "mtp", "field": STALE[1:], "diagnosis": "never written"}
    findings, counts = verify("mtp", "glm53_flash", "stale_draft_steps", ledger_of(**some))
    assert [finding.field for finding in findings] == STALE[:1]
    assert counts.waived > 0


def test_what_must_be_explained_is_explained_once_and_counted() -> None:
    rolled = {"system": "decode", "field": "cache_seqlens_int32"}
    ledger = ledger_of(**rolled, diagnosis=["request map", "stale", "frozen at capture"])
    findings, counts = verify("decode", "deepseek_v32", "rows_rolled", ledger)
    assert [finding.sentence for finding in findings] == []
    assert counts.waivers["known cache_seqlens_int32"].rounds > 10
    findings, _ = verify("decode", "deepseek_v32", "rows_rolled", ledger_of(**rolled, diagnosis="draft offset"))
    assert findings[0].sentence.endswith("; waiver known covers only what is draft offset")
