"""Padded replays by the route that contract 7.4 has for them, and the findings when a subject takes another."""

from __future__ import annotations

import pytest
from support import backend

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.glue_route import Route
from dsa_verify.contract.padded import PADDED_MODES
from dsa_verify.contract.round import Round
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.pipelines.padded_glue import Glued
from dsa_verify.systems.catalogue import SYSTEMS

PADDED = SYSTEMS["padded"]
ROUNDS = [
    Round(bucket=3, seq_lens=(9, 30, 17), requests=(3, 4, 5)),
    Round(bucket=3, seq_lens=(12,), requests=(7,), poison="stale"),
    Round(bucket=3, seq_lens=(), requests=(), poison="plausible"),
    Round(bucket=3, seq_lens=(9, 31, 18), requests=(5, 4, 3), twice=True),
]


def setup_of(mode: str, subject: object = "glue", fault: str | None = None) -> ReplaySetup:
    geometry = SYSTEMS["padded"].geometry("tiny_v4", {"padded_mode": mode, "draft_tokens": 3, "request_rows": 9})
    return ReplaySetup.make(PADDED, geometry, (3,), 0, subject, fault, backend())  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", PADDED_MODES)
def test_both_routes_give_the_same_bits(mode: str) -> None:
    taken: list[Route] = []

    class Watched(Glued):
        def route(self, raw_batch: int) -> Route:
            taken.append(super().route(raw_batch))
            return taken[-1]

    setup = setup_of(mode, Watched)
    assert verify_rounds(setup, [setup.table(ROUNDS)], Counts(), folder=None) == []
    padded = Route.EAGER if mode == "decode" else Route.GLUE
    assert taken == [Route.GLUE, padded, Route.EAGER, Route.GLUE, Route.GLUE]  # the last round is replayed twice


def test_an_idle_batch_in_the_graph_is_a_finding() -> None:
    setup = setup_of("verify", fault="glues_idle")
    (finding,) = verify_rounds(setup, [setup.table(ROUNDS)], Counts(), folder=None)
    assert finding.diagnosis is Diagnosis.WRONG_ROUTE
    assert "raw batch 0 of bucket 3 was prepared by the captured graph, it must be by eager work" in finding.sentence


class GluesPadded(Glued):
    """What the generic glue does not do."""

    def route(self, raw_batch: int) -> Route:
        return Route.GLUE if raw_batch else Route.EAGER


def test_a_padded_batch_in_the_generic_glue_is_a_finding() -> None:
    setup = setup_of("decode", GluesPadded)
    (finding,) = verify_rounds(setup, [setup.table(ROUNDS)], Counts(), folder=None)
    assert finding.diagnosis is Diagnosis.WRONG_ROUTE
    assert "raw batch 1 of bucket 3" in finding.sentence


def test_the_fault_is_refused_for_a_subject_without_a_route() -> None:
    setup = setup_of("verify", "triton", fault="glues_idle")
    with pytest.raises(UsageError, match="has no effect on subject 'triton', which has no route"):
        verify_rounds(setup, [setup.table(ROUNDS)], Counts(), folder=None)
