"""`dsa-verify fuzz`: what it prints and writes, its exit status, the same twice; and rounds drawn in bulk."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support import DEVICE, EagerDecode, backend, setup_of, small

from dsa_verify.base.errors import STATUS_EQUAL, STATUS_MISMATCH, UsageError
from dsa_verify.cli import fuzz as command
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.case_file import read_case
from dsa_verify.systems.catalogue import SYSTEMS
from fuzz.engine.bulk_rounds import resident_chunks
from fuzz.engine.coverage import Coverage
from fuzz.engine.expansion import expand
from fuzz.engine.strategies import spec_at
from fuzz.fuzzer import fuzz

SMALL = ("context=37", "request_rows=9", "topk=8")


class WrongUntil(EagerDecode):
    """Adds 1 to the lengths as long as `folder` has no file of `pattern`."""

    folder: Path
    pattern: str

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self._wrong = not any(self.folder.glob(self.pattern))

    def in_graph(self) -> None:
        super().in_graph()
        self.out["cache_seqlens_int32"].add_(int(self._wrong))


def options_of(folder: Path, **changes: Any) -> command.Options:
    options = command.Options(
        systems=("decode",),
        preset="tiny",
        subject="support:EagerDecode",
        fault=None,
        rounds=100,
        seed=3,
        batches=(4,),
        drafts=(),
        settings=SMALL,
        resident=False,
        keep_going=False,
        shrink_s=30.0,
        json_path=folder / "result.json",
        folder=folder,
    )
    return dataclasses.replace(options, **changes)


def run(folder: Path, **changes: Any) -> tuple[int, dict[str, Any]]:
    status = command.run(options_of(folder, **changes), DEVICE)
    return status, json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("resident", [False, True])
def test_a_right_pipeline_is_equal_and_the_same_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], resident: bool
) -> None:
    first, again = (run(tmp_path, resident=resident) for _ in range(2))
    assert first[0] == again[0] == STATUS_EQUAL
    (result,) = first[1]["fuzz"]
    assert result["coverage_digest"] == again[1]["fuzz"][0]["coverage_digest"]
    parts = result["parts"]
    assert sum(part["rounds_requested"] for part in parts) == sum(part["rounds_executed"] for part in parts) == 100
    assert run(tmp_path, resident=resident, seed=4)[1]["fuzz"][0]["coverage_digest"] != result["coverage_digest"]
    said = capsys.readouterr().out
    assert "never visited: " in said
    for part in parts:
        visited = part["configuration"]
        assert (visited["preset"], visited["buckets"][0]) == ("tiny", 4)
        settings = ", ".join(f"{key} {value}" for key, value in visited["geometry"].items())
        assert f"  {part['rounds_requested']} rounds of tiny, buckets {visited['buckets']}, {settings}\n" in said
    assert len({json.dumps(part["configuration"]) for part in parts}) == 4


def test_a_run_visits_several_configurations_where_nothing_is_fixed(tmp_path: Path) -> None:
    _, result = run(tmp_path, subject=None, batches=(), settings=(), rounds=4)
    visited = [part["configuration"] for part in result["fuzz"][0]["parts"]]
    assert len({tuple(each["buckets"]) for each in visited}) > 2
    assert {each["geometry"].get("index_dtype", "int64") for each in visited} == {"int64", "int32"}


def test_a_fault_is_found_shrunk_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = run(tmp_path, fault="off_by_one_page")
    assert status == STATUS_MISMATCH
    (finding,) = result["findings"]
    case = Path(finding["case"])
    whole, shrunk = read_case(case), read_case(case.with_suffix(".small.json"))
    assert len(shrunk.rounds) == 1 <= len(whole.rounds)
    assert sum(round_.raw_batch for round_ in shrunk.rounds) <= 1
    said = capsys.readouterr().out
    (small,) = result["fuzz"][0]["made_small"]
    assert (small["case"], small["small_case"]) == (str(case), str(case.with_suffix(".small.json")))
    assert (small["rounds"], small["finished"]) == (1, True)
    assert f": {small['depends_on']}\n" in said
    assert {"value", "what", "stays"} == set(small["verdicts"][0])
    assert "shrunk in " in said
    assert f"reproduce: dsa-verify replay {case.with_suffix('.small.json')} --subject support:EagerDecode\n" in said


@pytest.mark.parametrize("pattern, said", [("decode-*.json", "not shrunk: "), ("*.small.json", "not explained: ")])
def test_a_finding_that_does_not_show_again_stands(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pattern: str,
    said: str,
) -> None:
    """It is there in the run and in the confirmation, and gone when it is shrunk, or explained."""
    monkeypatch.setattr(WrongUntil, "folder", tmp_path, raising=False)
    monkeypatch.setattr(WrongUntil, "pattern", pattern, raising=False)
    status, result = run(tmp_path, subject="test_fuzz_command:WrongUntil")
    assert status == STATUS_MISMATCH
    assert read_case(Path(result["findings"][0]["case"])).rounds
    assert result["fuzz"][0]["parts"][0]["rounds_executed"]
    (small,) = result["fuzz"][0]["made_small"]
    assert small[said.strip(": ").replace(" ", "_")].startswith("the case does not show ")
    found, coverage = capsys.readouterr().out.split(said)
    assert "FOUND in decode" in found
    assert coverage.startswith("the case does not show ")
    assert "rounds requested 100, executed " in coverage


@pytest.mark.parametrize(
    "system, fault, preset", [("mtp", "stale_draft_steps", "tiny_pool"), ("dcp", "wrong_owner:rank2_packed", "tiny")]
)
def test_a_fault_is_planted_in_the_configurations_that_have_what_it_spoils(
    tmp_path: Path, system: str, fault: str, preset: str
) -> None:
    """Draft steps that are copied three at once, a third rank: not all that are drawn have them."""
    known = SYSTEMS[system]
    options = options_of(tmp_path, fault=fault, preset=preset, subject=None, batches=(), settings=())
    drawn = command._configs(known, [system], 60, dataclasses.replace(options, fault=None), backend())
    found = command._configs(known, [system], 60, options, backend())
    assert sum(config.rounds for config in found) == 60
    assert sum(config.rounds for config in command._configs(known, [system], 1, options, backend())) == 1
    assert [config.geometry for config in found] == [
        config.geometry
        for config in drawn
        if (config.geometry.dcp_size > 2 if system == "dcp" else config.geometry.draft_steps > 3)
    ]
    assert 0 < len(found) < len(drawn)
    without = ("dcp_size=1",) if system == "dcp" else ("draft_steps=2",)
    with pytest.raises(UsageError, match="fault"):
        command._configs(known, [system], 60, dataclasses.replace(options, settings=without), backend())


class WrongInTheEnd(EagerDecode):
    """Adds 1 to the lengths once it was captured `late` times and replayed 19 times since, and ever after."""

    captured = replayed = 0
    late = 1

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        type(self).captured += 1
        type(self).replayed = 0

    def before_replay(self) -> None:
        type(self).replayed += 1
        if self.captured >= self.late and self.replayed > 19:
            type(self).late = 0
            self.inputs.seq_lens[:1].add_(1)


def test_a_finding_says_in_which_round_of_the_run_it_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of its case, and not of the rounds since the last capture."""
    monkeypatch.setattr(WrongInTheEnd, "captured", 0)
    monkeypatch.setattr(WrongInTheEnd, "late", 3)
    setup = setup_of(WrongInTheEnd, buckets=(4,))
    result = fuzz(setup, 90, 0, folder=None, outside=False, rounds_per_capture=30)
    (seen,) = {finding.seen_in_round for finding in result.findings}
    assert seen is not None
    assert 60 <= seen < 90
    assert result.captures == 3


def test_what_has_no_effect_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--draft-tokens: has no effect in decode"):
        run(tmp_path, drafts=(3,))
    with pytest.raises(UsageError, match="not KEY=VALUE"):
        run(tmp_path, settings=("context",))


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_bulk_rounds_are_those_of_their_specs(system: str) -> None:
    """Any of them can be rebuilt from (seed, number)."""
    known = SYSTEMS[system]
    geometry = small(system, draft_tokens=3 if known.drafts else 1)
    if known.preset("cpu") != "tiny":
        geometry = known.geometry(known.preset("cpu"), {"request_rows": 9, "draft_tokens": 3})
    setup = ReplaySetup.make(known, geometry, (4, 2), 0, None, None, backend())
    coverage = Coverage(SYSTEMS[system], geometry, setup.buckets)
    tables = list(resident_chunks(setup, 7, 100, 50, 32, coverage))
    rounds = [round_ for table in tables for round_ in table.rounds()]
    specs = [spec_at(7, 100 + i, SYSTEMS[system], geometry, setup.buckets) for i in range(50)]
    expected = [expand(spec, SYSTEMS[system], geometry) for spec in specs]
    for got, want in zip(rounds, expected, strict=True):
        # A case may leave lengths out that are all N; a table says them.
        lens = {
            name: tuple(geometry.draft_tokens for _ in want.seq_lens)
            for name in ("extend_lens", "accept_lens")
            if name not in want.lens and name in got.lens
        }
        assert got == want.replace(**lens)
    again = setup.table(rounds[:32], tables[0].remap_rows.shape[1])
    assert (again.remap_generations == tables[0].remap_generations).all()


def test_bulk_fuzzing_finds_what_is_wrong() -> None:
    setup = ReplaySetup.make(SYSTEMS["decode"], small(), (4, 2), 0, "support:EagerDecode", "rows_rolled", backend())
    result = fuzz(setup, 200, 1, folder=None, resident=True, chunk_rounds=50)
    assert result.findings
    assert result.executed < result.requested
