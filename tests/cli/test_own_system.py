"""A system of a user's own, named by `module:attribute`: every command takes it, its cases replay in another process,
and a case of somebody else runs no code unasked."""

from __future__ import annotations

import dataclasses
import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import forked
import pytest

from dsa_verify.base.errors import UsageError
from dsa_verify.rounds.case_file import parse_case, read_case
from dsa_verify.systems import catalogue, trust

MODULE = """
import os
import torch
from dsa_verify.contract.layout import Field, Layout, Row
from dsa_verify.contract.system import System


def layout(geometry, bucket):
    given = {"shape": (bucket,), "row": Row.REQUEST, "section": "1.1", "low": 0, "high": 1 << 20}
    fields = (Field(name="half", **given),)
    return Layout(system="halves", geometry=geometry, bucket=bucket, tokens=bucket, fields=fields)


class Halves:
    name, extra = "halves", 0

    def allocate(self, geometry, inputs, buffers):
        self.inputs, self.out, self.replays = inputs, buffers, 0

    def before_replay(self):
        self.replays += 1

    def in_graph(self):
        self.out["half"].copy_(self.inputs.seq_lens // 2 + self.extra)


class Oracle(Halves): ...


class OneMore(Halves):
    extra = 1


class Exits(Halves):
    def before_replay(self):
        super().before_replay()
        if self.replays > 5:
            os._exit(0)


SYSTEM = System(
    name="halves",
    summary="half of each length",
    layout=layout,
    oracle="own_halves:Oracle",
    subjects={"triton": "own_halves:Halves"},
)
"""
OWN = "own_halves:SYSTEM"
SHARES = """
import torch
from dsa_verify import Field, Layout, Row, Size, StaticInput, System


def layout(geometry, bucket):
    given = {"shape": (bucket,), "row": Row.REQUEST, "low": 0, "high": 1 << 20}
    fields = (Field(name="shares", **given), Field(name="weighed", **given))
    return Layout(system="shares", geometry=geometry, bucket=bucket, tokens=bucket, fields=fields)


def own_inputs(geometry):
    return (
        StaticInput(name="weights", dtype="int32", pad=1, low=1, high=geometry.parts + 1, limit="parts"),
        StaticInput(name="offsets", dtype="int64", high=1 << 20, drawn=False),
    )


def derive(geometry, drawn, req_to_token, seed):
    return {"offsets": drawn["weights"].long() * 3 + drawn["seq_lens"]}


class Shares:
    name, most = "shares", 1 << 20

    def allocate(self, geometry, inputs, buffers):
        self.parts, self.inputs, self.out = geometry.parts, inputs, buffers

    def before_replay(self): ...

    def in_graph(self):
        weights = self.inputs.weights.clamp(max=self.most)
        self.out["shares"].copy_(self.inputs.seq_lens // self.parts)
        self.out["weighed"].copy_(self.inputs.offsets + weights + self.inputs.scale[0])


class Oracle(Shares): ...


class Lightest(Shares):
    most = 6


SYSTEM = System(
    name="shares",
    summary="shares of each length, and weights that a round says of each request",
    layout=layout,
    oracle="own_shares:Oracle",
    subjects={"shares": "own_shares:Shares"},
    sizes=(Size(name="parts", default=2, low=1, high=9, presets={"tiny": 8}, shrinks=True),),
    own_inputs=own_inputs,
    derive=derive,
    constants={"scale": lambda geometry, device: torch.full((1,), geometry.parts, device=device)},
)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_halves.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclasses.dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str


def command(*arguments: str) -> Done:
    with open("said.txt", "w+b") as said:
        status = forked.start(Path.cwd(), arguments, said, said).wait()
        said.seek(0)
        return Done(status, said.read().decode())


def test_a_finding_of_it_replays_as_its_line_says(folder: Path) -> None:
    found = command("replay", "--system", OWN, "--subject", "own_halves:OneMore", "--batch", "3", "--rounds", "4")
    assert found.returncode == 1, found.stdout
    assert "FOUND in halves (own_halves:OneMore, bucket 3)" in found.stdout
    (line,) = (line for line in found.stdout.splitlines() if "reproduce:" in line)
    again = command(*line.split("dsa-verify ")[1].split())
    assert again.returncode == 1, again.stdout
    assert "wrong value: half[0]" in again.stdout or "boundary: half[0]" in again.stdout


def test_one_that_ends_the_process_is_found_with_its_rounds(folder: Path) -> None:
    ended = command("replay", "--system", OWN, "--subject", "own_halves:Exits", "--batch", "3", "--rounds", "9")
    assert ended.returncode == 1, ended.stdout
    assert "FOUND in halves" in ended.stdout
    (path,) = (folder / "dsa-findings").glob("*.json")
    case = json.loads(path.read_text())
    assert (path.name.startswith("halves-crashes"), case["system"], len(case["rounds"])) == (True, OWN, 5)


def test_a_campaign_fuzzes_it(folder: Path) -> None:
    options = ["--system", OWN, "--subject", "own_halves:OneMore", "--batch", "3", "--rounds-per-shard", "32"]
    ran = command("campaign", "run", "runs", *options, "--max-rounds", "32", "--workers", "1")
    assert ran.returncode == 1, ran.stdout
    assert "reproduce: dsa-verify replay " in ran.stdout
    assert f"--system {OWN} --subject own_halves:OneMore" in ran.stdout


def test_faults_are_planted_in_it(folder: Path) -> None:
    """Those that need nothing of a system of ours; the field is the first that replays write."""
    planted = ["--system", OWN, "--batch", "3", "--rounds", "9"]
    found = command("replay", *planted, "--fault", "skip_refresh", "--json", "found.json")
    assert found.returncode == 1, found.stdout
    (finding,) = json.loads((folder / "found.json").read_text())["findings"]
    assert (finding["field"], finding["diagnosis"], finding["cause"]) == ("half", "never written", "poison left")
    refused = command("replay", *planted, "--fault", "wrong_log_base")
    assert refused.returncode == 2
    assert "fault 'wrong_log_base' has no effect in halves; it applies to dcp" in refused.stdout


@pytest.fixture
def shares(folder: Path) -> Path:
    """A system with a size, a count and inputs of its own."""
    (folder / "own_shares.py").write_text(SHARES)
    return folder


def test_sizes_counts_and_inputs_of_its_own_are_drawn_judged_and_written(shares: Path) -> None:
    options = ["--system", "own_shares:SYSTEM", "--batch", "3"]
    right = command("replay", *options, "--rounds", "40")
    assert right.returncode == 0, right.stdout
    found = command("replay", *options, "--subject", "own_shares:Lightest", "--rounds", "40", "--set", "parts=7")
    assert found.returncode == 1, found.stdout
    assert "weighed[" in found.stdout
    (path,) = (shares / "dsa-findings").glob("*.json")
    case = json.loads(path.read_text())
    assert case["geometry"]["parts"] == 7
    said = [weight for round_ in case["rounds"] for weight in round_["weights"]]
    assert 7 in said
    assert set(said) <= set(range(1, 8))
    (line,) = (line for line in found.stdout.splitlines() if "reproduce:" in line)
    assert command(*line.split("dsa-verify ")[1].split()).returncode == 1


def test_what_is_its_own_is_fuzzed_and_shrunk(shares: Path) -> None:
    wrong = ["--system", "own_shares:SYSTEM", "--subject", "own_shares:Lightest", "--batch", "3", "--seed", "1"]
    found = command("fuzz", *wrong, "--rounds", "64")
    assert found.returncode == 1, found.stdout
    assert "any length; any request row; weights[0] 7; everything else is free" in found.stdout
    (case,) = (json.loads(path.read_text()) for path in (shares / "dsa-findings").glob("*.small.json"))
    assert case["rounds"] == [{"bucket": 1, "seq_lens": [1], "requests": [1], "poison": "loud", "weights": [7]}]


def test_wrong_values_of_its_own_are_refused(shares: Path) -> None:
    for setting, said in (("parts=10", "parts: 10 is outside 1..9"), ("window=8", "window: is a size of padded alone")):
        refused = command("replay", "--system", "own_shares:SYSTEM", "--set", setting)
        assert refused.returncode == 2, refused.stdout
        assert said in refused.stdout
    rounds = [{"bucket": 2, "seq_lens": [5, 7], "requests": [1, 2], "weights": [1, 9]}]
    case = {"schema": 1, "system": "own_shares:SYSTEM", "preset": "tiny", "buckets": [2], "rounds": rounds}
    (shares / "case.json").write_text(json.dumps(case))
    refused = command("replay", "case.json", "--system", "own_shares:SYSTEM")
    assert refused.returncode == 2, refused.stdout
    assert "rounds[0].weights[1]: 9 exceeds parts 8; use 1..8" in refused.stdout


# Trust ---------------------------------------------------------------------------------------------------------------


CASE = json.dumps(
    {
        "schema": 1,
        "system": OWN,
        "preset": "tiny",
        "buckets": [2],
        "seed": 0,
        "rounds": [{"bucket": 2, "seq_lens": [5, 7], "requests": [1, 2]}],
    }
)


@pytest.fixture
def unknown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module can be imported, and nobody has named it in this process."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "own_halves", raising=False)
    monkeypatch.setattr(catalogue, "SYSTEMS", dict(catalogue.SYSTEMS))
    monkeypatch.setattr(catalogue, "_REFERENCES", {})
    return folder


def test_a_case_runs_no_system_unasked(unknown: Path) -> None:
    with pytest.raises(UsageError, match="a case runs no other code unasked; if you know it, give --system own_halves"):
        parse_case(CASE)
    assert "own_halves" not in sys.modules
    assert parse_case(CASE, trusts=lambda name: name == OWN).system == OWN


def test_a_case_may_name_a_system_that_the_run_has_named(unknown: Path) -> None:
    assert catalogue.get_system(OWN).name == "halves"
    assert parse_case(CASE).system == OWN
    assert catalogue.get_system("halves") is catalogue.get_system(OWN)


def test_the_systems_of_installed_packages_are_free(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("halves", OWN, trust.SYSTEM_GROUP)
    monkeypatch.setattr(trust, "entry_points", lambda group: [point] if group == trust.SYSTEM_GROUP else [])
    for name in ("halves", OWN):
        (unknown / "case.json").write_text(CASE.replace(OWN, name))
        assert read_case(unknown / "case.json").system == OWN
    assert catalogue.reference_of(catalogue.get_system("halves")) == OWN


def test_what_is_no_system_is_refused_by_name(unknown: Path) -> None:
    with pytest.raises(UsageError, match=r"'own_halves:Halves': that is a type, not a System or a Metadata; name one"):
        catalogue.get_system("own_halves:Halves")
    with pytest.raises(UsageError, match=r"'halves' is unknown; known systems: decode, .*; or give module:attribute"):
        catalogue.get_system("halves")
