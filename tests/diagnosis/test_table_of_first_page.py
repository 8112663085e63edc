"""A table that is remembered by its first page is wrong only where requests share that page and then differ."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from test_faults import EagerDecode

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.graphs import open_backend
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.systems.catalogue import SYSTEMS
from fuzz.engine.simulator import EngineSimulator

DEVICE = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
TINY = Geometry.resolve("tiny")


def sentences(rounds: list[Round]) -> list[str]:
    setup = ReplaySetup.make(
        SYSTEMS["decode"], TINY, (4, 1), 0, EagerDecode, "table_of_first_page", open_backend(DEVICE)
    )
    return [finding.sentence for finding in confirm(setup, rounds)]


def scripted() -> list[Round]:
    (config,) = diagnostic_matrix(SYSTEMS["decode"], TINY, batches=[4], rounds=17)
    return [round_ for table in config.chunks() for round_ in table.rounds()]


@pytest.mark.parametrize("name", ["script", "simulator"])
def test_the_draw_of_shared_pages_finds_it_and_nothing_else_does(name: str) -> None:
    rounds = scripted() if name == "script" else EngineSimulator(SYSTEMS["decode"], TINY, (4, 1), 3).rounds(60)
    (found,) = sentences(rounds)
    assert re.search(r"that is the same place of request \d+, with the same first page as this request$", found)
    assert sentences([dataclasses.replace(round_, prefixes=()) for round_ in rounds]) == []
