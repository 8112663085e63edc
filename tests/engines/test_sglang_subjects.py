"""SGLang's subjects by name: which system they belong to, what a result says of them, and, over a tree that only looks
like SGLang, that its functions are called as they want to be."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fake_sglang import TREE, importable, lay_out
from support import DEVICE, EagerDecode, backend, decode_round, setup_of

from dsa_verify.base.errors import STATUS_NOTHING_VERIFIED, STATUS_USAGE, NothingVerified, UsageError
from dsa_verify.cli.campaign import main as campaign
from dsa_verify.cli.subjects import engine_lines
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.round import Scenario
from dsa_verify.contract.subject import load_attribute
from dsa_verify.contract.system import OWN_TABLES
from dsa_verify.run.runner import Runner, RunResult, new_result
from dsa_verify.subjects.adapters.sglang import SUBJECTS
from dsa_verify.systems.catalogue import (
    OF_OTHERS,
    OF_THE_SUBJECT,
    SYSTEMS,
    get_system,
    resolve_geometry,
    subject_factory,
    systems_to_run,
)
from dsa_verify.systems.engines import ENGINES, EngineSubject, engine_subject
from fuzz.campaign.plan import Plan

on_cpu = pytest.mark.skipif(DEVICE.type == "cuda", reason="about what a CPU cannot run")
OWN = ("decode", "target_verify", "draft_extend", "mtp", "mtp_sibling", "mtp_copy")
SMALL = {"context": 37, "request_rows": 9, "topk": 8}
Cli = Callable[..., tuple[int, str]]


@pytest.fixture
def absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang is not installed, whatever this machine has."""
    with importable(tmp_path, monkeypatch):
        yield


@pytest.fixture
def lookalike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    lay_out(tmp_path / "tree", TREE)
    with importable(tmp_path / "tree", monkeypatch):
        yield


# Names and systems ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_subject_is_found_without_sglang(absent: None, name: str) -> None:
    subject = SUBJECTS[name]
    assert subject.name == f"sglang:{name}"
    label, factory = subject_factory(get_system(subject.system), subject.name)
    assert (label, factory) == (subject.name, load_attribute(subject.reference))
    geometry, fixed = resolve_geometry(get_system(subject.system), subject.name, "cuda")
    assert fixed == {*subject.settings, OWN_TABLES, *OF_THE_SUBJECT, OF_OTHERS}
    assert all(getattr(geometry, key) == value for key, value in subject.settings.items())


def test_the_system_follows_from_the_subject() -> None:
    assert systems_to_run([], "sglang:target_verify") == ["target_verify"]
    assert systems_to_run(["target_verify"], "sglang:target_verify") == ["target_verify"]
    assert systems_to_run([], None) == systems_to_run([], "module:Mine") == ["decode", "target_verify", "draft_extend"]
    assert engine_subject("module:Mine") is engine_subject("triton") is engine_subject(None) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: systems_to_run(["decode"], "sglang:mtp"),
        lambda: subject_factory(get_system("decode"), "sglang:mtp"),
        lambda: Plan(systems=("decode",), subject="sglang:mtp").check(),
    ],
    ids=["command", "case", "campaign"],
)
def test_another_system_than_the_subjects_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert str(caught.value) == "subject 'sglang:mtp' is one of mtp, not of decode; leave the system out, or name mtp"


def test_an_unknown_subject_lists_what_there_is() -> None:
    with pytest.raises(
        UsageError, match=r"'sglang:verify' is unknown; sglang has decode, decode_backend, target_verify"
    ):
        systems_to_run([], "sglang:verify")


def test_a_second_engine_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    table = EngineSubject(name="other:one", system="dcp", reference="json:loads", summary="")
    monkeypatch.setitem(ENGINES, "other", "other_adapter")
    monkeypatch.setitem(sys.modules, "other_adapter", type("Table", (), {"SUBJECTS": {"one": table}}))
    assert systems_to_run([], "other:one") == ["dcp"]
    assert subject_factory(get_system("dcp"), "other:one") == ("other:one", json.loads)


def test_a_campaign_takes_the_system_from_the_subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Plan] = []

    def load(root: Path, given: Mapping[str, Any], default: Mapping[str, Any]) -> Plan:
        seen.append(Plan(**{**default, **given}))
        raise UsageError("enough")

    monkeypatch.setattr("dsa_verify.cli.campaign.load_or_create_plan", load)
    result = CliRunner().invoke(campaign, ["run", str(tmp_path / "c"), "--subject", "sglang:draft_extend"])
    assert str(result.exception) == "enough"
    assert (seen[0].systems, seen[0].subject) == (("draft_extend",), "sglang:draft_extend")


# What is missing ------------------------------------------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize(
    "arguments, status, text",
    [
        (("--subject", "sglang:decode"), STATUS_USAGE, "sglang is not installed; pip install sglang"),
        (("--subject", "sglang:mtp"), STATUS_NOTHING_VERIFIED, "'sglang:mtp' needs a CUDA GPU and this run is on cpu"),
        (("--subject", "sglang:mtp", "--system", "decode"), STATUS_USAGE, "is one of mtp, not of decode"),
        (("--subject", "sglang:nope"), STATUS_USAGE, "'sglang:nope' is unknown"),
    ],
)
@pytest.mark.parametrize("command", [("replay",), ("fuzz", "--rounds", "4")], ids=["replay", "fuzz"])
def test_the_command_says_what_is_missing(
    absent: None, dsa_verify: Cli, command: tuple[str, ...], arguments: tuple[str, ...], status: int, text: str
) -> None:
    ended, printed = dsa_verify(*command, *arguments)
    assert (ended, text in printed) == (status, True), printed


@on_cpu
def test_a_case_of_a_subject_that_needs_a_gpu_verifies_nothing(dsa_verify: Cli, tmp_path: Path) -> None:
    setup = setup_of(system="mtp")
    case = Scenario(
        system="mtp",
        geometry=setup.geometry,
        buckets=(2,),
        rounds=(decode_round(2, 3),),
        seed=0,
        subject="sglang:mtp_copy",
    )
    (tmp_path / "case.json").write_text(case.to_json())
    ended, printed = dsa_verify("replay", "case.json")
    assert (ended, "needs a CUDA GPU" in printed) == (STATUS_NOTHING_VERIFIED, True), printed


@on_cpu
def test_a_subject_that_finds_out_late_verifies_nothing_either() -> None:
    class Late(EagerDecode):
        def allocate(self, geometry: Any, inputs: Any, buffers: Any) -> None:
            raise NothingVerified("needs a GPU for this geometry")

    with pytest.raises(NothingVerified, match="for this geometry"):
        setup_of(Late).open(1)


def test_what_can_run_here_is_listed(absent: None) -> None:
    lines = engine_lines("sglang", list(SUBJECTS.values()), DEVICE)
    assert lines[0] == (
        f"sglang: 0 of {len(SUBJECTS)} subjects can run on {DEVICE}: sglang is not installed "
        "(docs/engines.md says how to point at it)"
    )
    assert len(lines) == 1 + len(SUBJECTS)
    assert lines[1].split() == ["sglang:decode", "decode", *SUBJECTS["decode"].summary.split()]


@on_cpu
def test_what_cannot_run_here_says_why(lookalike: None) -> None:
    lines = engine_lines("sglang", [SUBJECTS[name] for name in ("decode", "mtp")], DEVICE)
    assert lines[0] == "sglang: 1 of 2 subjects can run on cpu"
    assert lines[3].split(maxsplit=2)[2].startswith("subject 'sglang:mtp' needs a CUDA GPU")


def test_listing_needs_no_sglang(absent: None, dsa_verify: Cli) -> None:
    status, text = dsa_verify("subjects")
    assert status == 0
    assert all(name in text for name in ("decode         triton", "sglang:decode ", "sglang:mtp_copy"))


# What a result says ---------------------------------------------------------------------------------------------------


class Partly(EagerDecode):
    """Leaves a field wrong, and says that it does not give it."""

    @staticmethod
    def provenance() -> Mapping[str, str]:
        return {"engine": "1.2.3", "its.module": "abc"}

    @staticmethod
    def not_covered(layout: Layout, device: torch.device) -> Mapping[str, str]:
        return {"real_page_table": "nobody builds it here"}

    def in_graph(self) -> None:
        super().in_graph()
        self.out["real_page_table"].fill_(-5)


def run_of(subject: Any, folder: Path | None = None) -> RunResult:
    setup = setup_of(subject)
    case = Scenario(
        system="decode", geometry=setup.geometry, buckets=(2,), rounds=(decode_round(2, 9, 30),) * 2, seed=0, name="c"
    )
    run = new_result("decode", subject, backend())
    Runner(backend=backend(), folder=folder).case(case, subject, run)
    return run


def test_a_field_that_is_not_covered_is_listed_and_not_judged() -> None:
    run = run_of(Partly)
    assert run.findings == []
    assert run.to_dict()["not_covered"] == {"real_page_table": "nobody builds it here"}
    assert run.to_dict()["provenance"] == {"engine": "1.2.3", "its.module": "abc"}
    whole = run_of(EagerDecode)
    assert (whole.not_covered, whole.provenance) == ({}, {})
    assert run.counts.fields_checked == whole.counts.fields_checked - run.counts.rounds_checked
    assert 0 < run.counts.elements_compared < whole.counts.elements_compared


def test_the_other_fields_are_judged_all_the_same() -> None:
    class Wrong(Partly):
        def in_graph(self) -> None:
            super().in_graph()
            self.out["cache_seqlens_int32"].fill_(-5)

    assert [finding.field for finding in run_of(Wrong).findings] == ["cache_seqlens_int32"]


def test_a_view_of_what_is_not_covered_is_judged_as_itself() -> None:
    class OwnerLeftOut(EagerDecode):
        extra = 0

        @staticmethod
        def not_covered(layout: Layout, device: torch.device) -> Mapping[str, str]:
            assert layout["dsa_seqlens_expanded"].alias == "cache_seqlens_int32"
            return {"cache_seqlens_int32": "this subject does not give it"}

        def in_graph(self) -> None:
            super().in_graph()
            self.out["cache_seqlens_int32"].add_(self.extra)

    class Wrong(OwnerLeftOut):
        extra = 1

    assert run_of(OwnerLeftOut).findings == []
    views = ["dsa_seqlens_expanded", "paged_mqa_ctx_lens_2d"]
    assert [finding.field for finding in run_of(Wrong).findings] == views


def test_reports_name_the_code_and_what_is_not_covered(dsa_verify: Cli, tmp_path: Path) -> None:
    subject = f"{Partly.__module__}:Partly"
    small = ("--set", "context=37", "--set", "request_rows=9", "--batch", "2", "--rounds", "2")
    status, text = dsa_verify(
        "replay", "--system", "decode", "--subject", subject, *small, "--json", "r.json", "--junit", "r.xml"
    )
    assert status == 0, text
    assert "  of engine 1.2.3, its.module abc\n" in text
    assert "  not covered: real_page_table: nobody builds it here\n" in text
    assert json.loads((tmp_path / "r.json").read_text())["provenance"]["engine"] == "1.2.3"
    found = ElementTree.parse(tmp_path / "r.xml").getroot().iter("property")
    assert {each.get("name"): each.get("value") for each in found} == {
        "engine": "1.2.3",
        "its.module": "abc",
        "not covered: real_page_table": "nobody builds it here",
    }


def test_a_field_that_does_not_exist_cannot_be_left_out() -> None:
    class Misspelt(EagerDecode):
        @staticmethod
        def not_covered(layout: Layout, device: torch.device) -> Mapping[str, str]:
            return {"page_tabel": "a slip"}

    with pytest.raises(UsageError, match="page_tabel are not fields of decode; its fields are cache_seqlens_int32"):
        setup_of(Misspelt)


def test_nothing_covered_is_nothing_verified() -> None:
    class Nothing(EagerDecode):
        @staticmethod
        def not_covered(layout: Layout, device: torch.device) -> Mapping[str, str]:
            return {field.name: "no kernel here" for field in layout}

    with pytest.raises(NothingVerified, match="covers no field of decode: no kernel here"):
        setup_of(Nothing)


# Calls ----------------------------------------------------------------------------------------------------------------


def replay(name: str, preset: str, rounds: int, **settings: Any) -> RunResult:
    """The first `rounds` scripted rounds of one configuration, none of them in the interpreter."""
    from dsa_verify.rounds.matrix import diagnostic_matrix

    system = SYSTEMS[SUBJECTS[name].system]
    geometry = system.geometry(preset, settings)
    drafts = [3] if system.drafts else None
    configs = diagnostic_matrix(
        system,
        geometry,
        rounds=rounds,
        batches=[4],
        drafts=drafts,
        fixed=frozenset(settings) | {"input_view", OF_OTHERS},
    )
    run = new_result(system.name, f"sglang:{name}", backend())
    Runner(backend=backend(), folder=None).matrix(configs, f"sglang:{name}", run)
    return run


@on_cpu
@pytest.mark.parametrize(
    "name, settings",
    [
        ("decode", {}),
        ("target_verify", {}),
        ("draft_extend", {}),
        ("decode", {"page_size": 1}),
        ("draft_extend", {"page_size": 1}),
        ("target_verify", {"architecture": 100}),
    ],
)
def test_functions_of_one_pool_are_called_rightly(lookalike: None, name: str, settings: dict[str, Any]) -> None:
    run = replay(name, "tiny", 4, **SMALL, **settings)
    assert [finding.sentence for finding in run.findings] == []
    assert (run.counts.rounds_checked, run.not_covered) == (4, {})
    assert run.provenance["sglang"] == "0.5.23"


@on_cpu
@pytest.mark.parametrize("name", ["decode", "target_verify", "draft_extend"])
def test_functions_of_pools_are_called_rightly(lookalike: None, name: str) -> None:
    run = replay(name, "tiny_pool", 3, context=83, request_rows=9)
    assert [finding.sentence for finding in run.findings] == []
    assert run.counts.rounds_checked == 3
    assert {"paged_mqa_schedule_metadata", "topk_v2_plan"} <= set(run.not_covered)
    assert not {"write_plan_write_loc", "page_table_1"} & set(run.not_covered)


@on_cpu
def test_the_wide_table_may_be_missing(lookalike: None) -> None:
    run = replay("decode", "tiny", 4, **SMALL, wide_table=False)
    assert ([finding.sentence for finding in run.findings], run.counts.rounds_checked) == ([], 4)


@on_cpu
def test_ragged_extend_lengths_take_the_ragged_form(lookalike: None) -> None:
    setup = setup_of("sglang:draft_extend", system="draft_extend")
    n = setup.geometry.draft_tokens
    setup = setup_of("sglang:draft_extend", system="draft_extend", geometry=setup.geometry.replace(draft_tokens=3))
    assert n == 1
    lens = ((3, 3, 3, 3), (0, 2, 1, 3), (0, 0, 0, 0))
    rounds = tuple(decode_round(4, 9, 30, 5, 17, lens={"extend_lens": each}) for each in lens)
    case = Scenario(
        system="draft_extend",
        geometry=setup.geometry,
        buckets=(4,),
        rounds=rounds,
        seed=0,
        name="c",
        subject=setup.subject,
    )
    run = new_result("draft_extend", setup.subject, backend())
    Runner(backend=backend(), folder=None).case(case, None, run)
    assert ([finding.sentence for finding in run.findings], run.counts.rounds_checked) == ([], 3)


@on_cpu
def test_a_wrong_kernel_is_found(lookalike: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsa_verify.subjects.adapters.sglang import basic, wheel

    module = wheel.on_device(basic.KERNELS, DEVICE)
    right = module._dsa
    monkeypatch.setattr(module, "_dsa", lambda lengths, topk, pool: right(lengths, topk + 1, pool))
    run = replay("decode", "tiny", 4, **SMALL)
    assert {finding.field for finding in run.findings} == {"dsa_cache_seqlens_int32", "dsa_cu_seqlens_k"}
