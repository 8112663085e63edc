"""The shipped cases cannot rot: with its fault planted again, each still finds what it says it once caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from corpus import caught

from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.round import Scenario
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.graphs import open_backend
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.case_file import read_case
from dsa_verify.run.runner import Runner, new_result
from dsa_verify.subjects.faults.conduct import WrongOnce
from dsa_verify.systems.catalogue import get_system
from fuzz.cases import paths

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
PATHS = paths()
# A confirmation from nothing cannot show what does not show again.
CONFIRMED = [path for path in PATHS if "flaky" not in path.stem]


@pytest.fixture(autouse=True)
def strikes_again() -> Iterator[None]:
    """The flaky fault strikes once a process."""
    WrongOnce.struck = False
    yield
    WrongOnce.struck = False


def with_its_fault(path: Path) -> Scenario:
    case = read_case(path)
    return dataclasses.replace(case, fault=caught(case)[0])


def confirmed(case: Scenario) -> list[Finding]:
    system, backend = get_system(case.system), open_backend(DEVICE)
    setup = ReplaySetup.make(system, case.geometry, case.buckets, case.seed, case.subject, case.fault, backend)
    return confirm(setup, case.rounds)


def replayed(case: Scenario) -> list[Finding]:
    """As an item of pytest and `dsa-verify replay` do it: first fast, then from nothing."""
    backend = open_backend(DEVICE)
    run = new_result(case.system, case.subject, backend)
    Runner(backend=backend, folder=None).case(case, None, run)
    return run.findings


def check(findings: list[Finding], case: Scenario) -> None:
    """One of `findings` is of the kind and about the field that the case names."""
    _, sentence = caught(case)
    alike = [each for each in findings if sentence.startswith(each.diagnosis.value) and _field_of(each) in sentence]
    assert alike, f"found {[each.sentence for each in findings]} instead of {sentence!r}"


def _field_of(finding: Finding) -> str:
    of_a_guard = finding.diagnosis in (Diagnosis.PAST_THE_END, Diagnosis.BEFORE_THE_START)
    # A guard is between two fields, and called by the one before it.
    return "" if of_a_guard else finding.field or ""


@pytest.mark.parametrize("path", CONFIRMED, ids=lambda path: path.stem)
def test_its_fault_is_found(path: Path):
    case = with_its_fault(path)
    check(confirmed(case), case)


def test_the_flaky_fault_is_found():
    [path] = set(PATHS) - set(CONFIRMED)
    case = with_its_fault(path)
    check(replayed(case), case)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_its_fault_is_found_by_a_replay(path: Path):
    case = with_its_fault(path)
    check(replayed(case), case)
