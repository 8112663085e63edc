"""The shipped cases: a right pipeline passes each, and each says what it is there for."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpus import caught

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Scenario
from dsa_verify.rounds.case_file import read_case
from dsa_verify.subjects import faults
from dsa_verify.systems.catalogue import SYSTEMS
from fuzz.cases import paths

PATHS = paths()
MOST_ROUNDS, MOST_REQUESTS, WIDEST_BUCKET = 3, 4, 4
PRESETS = {"tiny", "tiny_pool", "tiny_v4"}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_shipped_pipeline_passes(dsa, path: Path):
    run = dsa.case(path)
    assert run.counts.rounds_checked == len(read_case(path).rounds)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_case_is_small_and_says_what_it_caught(path: Path):
    case = read_case(path)
    assert case.geometry.preset in PRESETS
    assert 1 <= len(case.rounds) <= MOST_ROUNDS
    assert max(case.buckets) <= WIDEST_BUCKET
    assert sum(round_.raw_batch for round_ in case.rounds) <= MOST_REQUESTS
    assert case.fault is None, "a case that plants a fault is wrong with every pipeline"
    reference, sentence = caught(case)
    fault, _ = faults.get_fault(reference)
    assert path.stem == f"{case.system}-{fault.name}"
    assert case.system in fault.systems
    assert reference.partition(":")[2] in sentence


def test_nothing_that_can_be_planted_and_called_by_name_is_missing():
    found = [caught(read_case(path)) for path in PATHS]
    planted = [faults.get_fault(reference)[0].name for reference, _ in found]
    assert set(planted) == set(faults.FAULTS) - {"lost_device"}
    called = {kind for kind in Diagnosis if any(sentence.startswith(kind.value) for _, sentence in found)}
    assert called >= {kind for fault in faults.FAULTS.values() for kind in fault.diagnoses}
    assert {read_case(path).system for path in PATHS} == set(SYSTEMS)


def test_the_cases_of_one_system():
    of_dcp = paths("dcp")
    assert of_dcp
    assert of_dcp == [path for path in PATHS if read_case(path).system == "dcp"]


def test_the_cases_of_a_pipeline_without_indexer():
    plain = paths("target_verify", indexer=False)
    left_out = set(paths("target_verify")) - set(plain)
    assert [path.stem for path in left_out] == ["target_verify-not_refreshed"]
    assert not any(read_case(path).geometry.indexer for path in plain)


def test_the_cases_that_some_fields_cover():
    system, plain = SYSTEMS["target_verify"], paths("target_verify", indexer=False)
    fields = {field.name for field in system.layout(read_case(plain[0]).geometry, 1)}
    assert paths("target_verify", fields=fields) == plain
    assert paths("target_verify", fields=fields - {"real_page_table"}) == []


@pytest.mark.parametrize("found", [None, "stale: it", "fault : it", "fault a:b:c: it", "fault skip_refresh"])
def test_a_case_that_names_no_fault_is_refused(found: str | None):
    geometry = Geometry.resolve("tiny")
    with pytest.raises(UsageError, match="names no fault; write 'fault NAME: ' before"):
        caught(Scenario(system="decode", geometry=geometry, buckets=(1,), rounds=(), found=found))
