"""Waivers through every door: reports of a replay, the fuzzer and the shrinker, campaigns."""

from __future__ import annotations

import dataclasses
import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from support import DEVICE, backend, decode_round, small
from waiver_support import (
    DSA,
    LENGTHS,
    WAIVED,
    UnwrittenLengths,
    entry_of,
    label_of,
    ledger_of,
    toml_of,
)

from dsa_verify.base.errors import STATUS_EQUAL, STATUS_MISMATCH, UsageError
from dsa_verify.cli import campaign
from dsa_verify.cli import fuzz as fuzz_command
from dsa_verify.cli import replay as replay_command
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.waivers.waivers import parse_ledger, read_ledger
from fuzz.campaign import worker as shard_work
from fuzz.campaign.plan import Plan, ShardSpec, load_or_create_plan, parse_plan
from fuzz.campaign.report import report_lines, summary
from fuzz.campaign.shard_folder import shard_folder
from fuzz.campaign.state import CampaignState
from fuzz.reduce.sensitivity import explain
from fuzz.reduce.shrink import shrink
from fuzz.reduce.trials import Signature


def replay(folder: Path, subject: str, **changes: Any) -> tuple[int, dict[str, Any], ElementTree.Element]:
    options = replay_command.Options(
        cases=(),
        systems=("decode",),
        preset="tiny",
        subject=subject,
        fault=None,
        rounds=4,
        seed=0,
        batches=(4,),
        drafts=(),
        settings=("context=37", "request_rows=9", "topk=8"),
        keep_going=False,
        json_path=folder / "r.json",
        junit_path=folder / "r.xml",
        folder=folder / "findings",
    )
    status = replay_command.run(dataclasses.replace(options, **changes), DEVICE)
    return status, json.loads((folder / "r.json").read_text()), ElementTree.parse(folder / "r.xml").getroot()[0]


def test_reports_name_what_was_waived(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = toml_of(tmp_path, entry_of(UnwrittenLengths))
    status, result, suite = replay(tmp_path, label_of(UnwrittenLengths), waivers=path)
    said = capsys.readouterr().out
    assert status == STATUS_EQUAL, said
    assert "  0 mismatches beyond 1 named waiver: known (4 rounds)\n" in said
    assert "4 replays checked, all equal beyond 1 named waiver; exit status 0" in said
    (use,) = result["waivers"]
    assert (use["id"], use["field"], use["rounds"], use["gone"]) == ("known", DSA, 4, False)
    assert result["waived"] == use["words"] > 0 == result["mismatches"]
    (fact,) = [each for each in suite.iter("property") if each.get("name") == f"waiver known: {DSA}"]
    assert str(fact.get("value")).startswith("4 of 4 rounds, ")
    status, result, _ = replay(tmp_path, label_of(UnwrittenLengths), no_waivers=True)
    assert (status, result["findings"][0]["reproduce"].endswith("Lengths --no-waivers")) == (STATUS_MISMATCH, True)


def test_reports_name_what_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = toml_of(tmp_path, entry_of("support:EagerDecode"))
    status, result, suite = replay(tmp_path, "support:EagerDecode", waivers=path)
    sentence = f"waiver known: the difference in {DSA} was not seen in 4 rounds; remove it"
    said = capsys.readouterr().out
    assert (status, result["findings"], result["waivers"][0]["gone"]) == (STATUS_MISMATCH, [], True)
    assert f"GONE: {sentence}" in said
    assert "0 finding(s), 1 waived difference(s) gone; exit status 1" in said
    (failure,) = suite.iter("failure")
    assert (failure.get("type"), failure.get("message")) == ("gone", sentence)
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")


def test_a_ledger_without_effect_is_refused(tmp_path: Path) -> None:
    path = toml_of(tmp_path, entry_of(UnwrittenLengths))
    with pytest.raises(UsageError, match=r"no waiver for support:EagerDecode of decode; leave it out"):
        replay(tmp_path, "support:EagerDecode", waivers=path)
    with pytest.raises(UsageError, match=r"--waivers: has no effect with --no-waivers"):
        replay(tmp_path, "support:EagerDecode", waivers=path, no_waivers=True)


def test_what_is_fuzzed_is_found_beside_a_waiver(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = fuzz_command.Options(
        systems=("decode",),
        preset="tiny",
        subject=label_of(AlsoShorter),
        fault=None,
        rounds=60,
        seed=3,
        batches=(4,),
        drafts=(),
        settings=("context=37", "request_rows=9", "topk=8"),
        resident=False,
        keep_going=False,
        shrink_s=0.0,
        json_path=tmp_path / "r.json",
        folder=tmp_path,
        waivers=toml_of(tmp_path, entry_of(AlsoShorter)),
    )
    assert fuzz_command.run(options, DEVICE) == STATUS_MISMATCH
    result = json.loads((tmp_path / "r.json").read_text())
    assert [finding["field"] for finding in result["findings"]] == [LENGTHS]
    assert result["waivers"][0]["rounds"] > 0
    options = f"--subject {label_of(AlsoShorter)} --waivers {tmp_path / 'mine.toml'}"
    assert f".json {options}\n" in capsys.readouterr().out


def test_a_finding_is_shrunk_and_explained_beside_a_waiver() -> None:
    """The waived difference is in every round: only a trial that waives it gets past the first to the second."""
    ledger = ledger_of(AlsoShorter)
    setup = ReplaySetup.make(SYSTEMS["decode"], small(), (4,), 0, AlsoShorter, None, backend(), ledger)
    rounds = [decode_round(4, 21, 30, poison="plausible"), decode_round(4, 9, 30)]
    (finding,) = verify_rounds(setup, [setup.table(rounds)], Counts(), folder=None)
    signature, case = Signature.of(finding), setup.scenario(rounds)
    steps = {"budget_s": 9, "subject": AlsoShorter, "ledger": ledger}
    small_case = shrink(case, signature, backend(), clock=itertools.count().__next__, **steps)  # type: ignore[arg-type]
    assert (small_case.finding.field, len(small_case.scenario.rounds)) == (LENGTHS, 2)
    assert small_case.accepted > 0
    said = explain(small_case.scenario, signature, backend(), clock=itertools.count().__next__, **steps)  # type: ignore[arg-type]
    assert said.confirmed > 0


class AlsoShorter(UnwrittenLengths):
    """A request that is shorter than what was in its row before is taken for one more."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.before = torch.zeros_like(inputs.seq_lens)

    def spoil(self) -> None:
        self.out[LENGTHS].add_((self.inputs.seq_lens < self.before).int())
        self.before.copy_(self.inputs.seq_lens)


def shard_facts(root: Path, entries: list[dict[str, Any]], number: int, subject: str) -> dict[str, Any]:
    plan = Plan(
        systems=("decode",),
        subject=subject,
        device=DEVICE.type,
        rounds_a_shard=16,
        preset="tiny",
        settings={"context": 37, "request_rows": 9, "topk": 8},
        batches=(4,),
        waivers=tuple(entries),
    )
    loaded = load_or_create_plan(root, dataclasses.asdict(plan), {})
    assert loaded == load_or_create_plan(root, {}, {}) == plan, "the ledger is part of the plan"
    shard_work.work_shard(ShardSpec(plan=plan, number=number), shard_folder(root, number), DEVICE)
    return summary(CampaignState.read(root))


@pytest.fixture
def without_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = {"fault": None, "verdict": "reported", "finding": None, "why": None}
    monkeypatch.setattr(shard_work, "_canary", lambda *arguments: verdict)


@pytest.mark.usefixtures("without_canary")
def test_a_campaign_lists_what_its_shards_waived(tmp_path: Path) -> None:
    entries = [entry_of(UnwrittenLengths)]
    facts = shard_facts(tmp_path, entries, 0, label_of(UnwrittenLengths))
    (finding,) = facts["findings"]
    assert (finding["state"], finding["issue"], finding["field"]) == ("waived", "known", DSA)
    assert finding["diagnosis"] == "never written"
    assert f"WAIVED for known {finding['key']} (in 1 shard(s))" in report_lines(facts, tmp_path)
    named, ledger = facts["replay_options"][:2], facts["replay_options"][3]
    assert named == ["--subject", label_of(UnwrittenLengths)]
    assert read_ledger(Path(ledger)).waivers == parse_ledger(entries, "x").waivers


@pytest.mark.usefixtures("without_canary")
def test_a_campaign_fails_for_what_is_gone_from_all_its_shards(tmp_path: Path) -> None:
    facts = shard_facts(tmp_path, [entry_of("support:EagerDecode")], 0, "support:EagerDecode")
    (finding,) = facts["findings"]
    assert (finding["state"], finding["issue"]) == ("gone", "known")
    assert f"{finding['key']} is waived for known and gone: remove the waiver" in report_lines(facts, tmp_path)


def test_what_one_shard_has_seen_is_not_gone(tmp_path: Path) -> None:
    from fuzz.campaign.shard_folder import FindingKey, FindingRecord

    load_or_create_plan(tmp_path, {}, {"systems": ("decode",)})
    key = FindingKey(system="decode", subject="x", field=DSA, diagnosis="never written", law=None)
    for number, state in enumerate(("gone", "waived", "gone")):
        record = FindingRecord(key=key, state=state, finding={"sentence": state}, waiver="known")
        record.write(shard_folder(tmp_path, number))
    (finding,) = summary(CampaignState.read(tmp_path))["findings"]
    assert (finding["state"], finding["issue"], finding["sightings"]) == ("waived", "known", 3)


def test_what_was_written_before_there_were_waivers_is_read(tmp_path: Path) -> None:
    plan = {key: value for key, value in Plan(systems=("decode",)).to_dict().items() if key != "waivers"}
    assert parse_plan(plan).waivers is None
    load_or_create_plan(tmp_path, {}, {"systems": ("decode",)})
    assert summary(CampaignState.read(tmp_path))["findings"] == []


def test_a_campaign_is_given_a_ledger_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr(campaign, "run_campaign", lambda root, plan, *rest: plans.append(plan) or STATUS_EQUAL)
    entry = entry_of(UnwrittenLengths)
    path = str(toml_of(tmp_path, entry))

    def begin(folder: str, *options: str) -> Result:
        return CliRunner().invoke(campaign.main, [str(tmp_path / folder), "--device", "cpu", *options])

    assert begin("mine", "--waivers", path).exit_code == STATUS_EQUAL
    assert begin("mine").exit_code == STATUS_EQUAL
    assert begin("none", "--no-waivers").exit_code == STATUS_EQUAL
    assert [plan.waivers for plan in plans] == [(entry,), (entry,), ()]
    assert plans[2].replay_options(tmp_path) == ["--no-waivers"]
    assert "differs from" in str(begin("mine", "--no-waivers").exception)
    assert "--waivers: has no effect with --no-waivers" in str(begin("x", "--waivers", path, "--no-waivers").exception)
    toml_of(tmp_path, entry | {"note": "x"})
    assert f"{path}: waiver[0].note: unknown" in str(begin("x", "--waivers", path).exception)


def test_no_fault_is_planted_where_a_waiver_would_cover_it(tmp_path: Path) -> None:
    plan = Plan(systems=("decode",), subject=label_of(UnwrittenLengths), device=DEVICE.type, preset="tiny")
    spec = plan.shard(0)
    setup = ReplaySetup.make(SYSTEMS["decode"], small(), (4,), 0, UnwrittenLengths, None, backend(), WAIVED)
    applicable = [name for name in shard_work.CANARIES if shard_work._plantable(name, spec, setup)]  # type: ignore[arg-type]
    assert "skip_refresh" not in applicable
    assert "not_refreshed" in applicable
