"""Trust: which code a case may name, what a name must lead to before it is called, and what a case file must be."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from support import DEVICE, EagerDecode, decode_round, setup_of

from dsa_verify.base.errors import UsageError
from dsa_verify.base.small_file import MAX_CASE_BYTES
from dsa_verify.contract.subject import check_factory, make_subject
from dsa_verify.rounds.case_file import read_case
from dsa_verify.systems import trust
from dsa_verify.systems.catalogue import SYSTEMS, get_system, subject_factory
from dsa_verify.systems.trust import check_trust, needs_trust
from fuzz.campaign.plan import Plan
from fuzz.campaign.shard_folder import SPEC_FILE, shard_folder, write_json
from fuzz.campaign.worker import replay_step_by_step

Cli = Callable[..., tuple[int, str]]
CASE = {"schema": 1, "system": "decode", "preset": "tiny", "buckets": [1]}
ROUND = {"bucket": 1, "seq_lens": [5], "requests": [3]}


def write(name: str, **changes: Any) -> None:
    Path(name).write_text(json.dumps({**CASE, "rounds": [ROUND], **changes}))


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reference, asked",
    [
        (None, False),
        ("triton", False),
        ("theirs", False),
        ("their_package:Theirs", False),
        ("sglang:mtp", False),
        ("dsa_verify.subjects.pipelines.basic:Decode", False),
        ("dsa_verify.subjects.pipelines.basic:TargetVerify", True),  # of another system
        ("dsa_verify.cli.main:main", True),
        ("os:abort", True),
        ("builtins:breakpoint", True),
        ("mine:Mine", True),
    ],
)
def test_what_a_case_may_name_by_itself(monkeypatch: pytest.MonkeyPatch, reference: str | None, asked: bool) -> None:
    point = EntryPoint("theirs", "their_package:Theirs", trust.ENTRY_POINT_GROUP)
    monkeypatch.setattr(trust, "entry_points", lambda group: [point])
    assert needs_trust(get_system("decode"), reference) is asked
    if asked:
        with pytest.raises(UsageError, match=f"if you know it, give --subject {reference}, or --trust"):
            check_trust(get_system("decode"), reference)


def test_a_case_runs_no_code_unasked(dsa_verify: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("unasked.py").write_text(
        "open('imported', 'w').close()\nfrom dsa_verify.subjects.pipelines.basic import Decode as Mine\n"
    )
    write("case.json", subject="unasked:Mine")
    status, text = dsa_verify("replay", "case.json")
    assert status == 2
    assert text == (
        "dsa-verify: case: subject: 'unasked:Mine' is neither a shipped subject nor an engine's nor an installed one, "
        "and a case runs no other code unasked; if you know it, give --subject unasked:Mine, or --trust\n"
    )
    assert not Path("imported").exists()
    for options in (("--subject", "unasked:Mine"), ("--trust",)):
        status, text = dsa_verify("replay", "case.json", *options)
        assert (status, "decode         unasked:Mine" in text) == (0, True), text
    assert Path("imported").exists()


def test_the_subject_that_is_named_runs_instead(dsa_verify: Cli) -> None:
    write("case.json", subject="no_such_module:Thing")
    assert dsa_verify("replay", "case.json", "--subject", "triton")[0] == 0


def test_trust_that_has_no_effect_is_wrong_usage(dsa_verify: Cli) -> None:
    write("case.json")
    for options in (("--trust",), ("case.json", "--trust", "--subject", "triton")):
        status, text = dsa_verify("replay", *options)
        assert (status, "--trust: has no effect without a CASE, or where --subject" in text) == (2, True)


def test_the_line_that_reproduces_a_finding_works_as_typed(dsa_verify: Cli) -> None:
    Path("wrong_one.py").write_text(
        "from support import EagerDecode\n"
        "class Mine(EagerDecode):\n    def in_graph(self):\n        super().in_graph()\n"
        "        self.out['cache_seqlens_int32'].add_(1)\n"
    )
    line = "fuzz --system decode --preset tiny --batch 1 --rounds 20 --subject wrong_one:Mine"
    status, text = dsa_verify(*line.split())
    assert status == 1
    lines = re.findall(r"reproduce: dsa-verify (.+)\n", text)
    assert ["small" in line for line in lines] == [False, True]
    for line in lines:
        status, again = dsa_verify(*shlex.split(line))
        assert (status, "FOUND in decode (wrong_one:Mine, bucket " in again) == (1, True), again
        assert "boundary: cache_seqlens_int32[0]" in again


# Campaigns -----------------------------------------------------------------------------------------------------------


def test_replays_of_a_campaign_name_the_subject_of_its_plan(tmp_path: Path) -> None:
    plan = Plan(systems=("decode",), subject="mine:Mine", waivers=())
    assert plan.replay_options(tmp_path) == ["--subject", "mine:Mine", "--no-waivers"]
    assert Plan(systems=("mtp",), subject="sglang:mtp").replay_options(tmp_path) == []
    assert Plan(systems=("decode",)).replay_options(tmp_path) == []


def test_a_repeat_runs_what_the_plan_names_and_nothing_else(tmp_path: Path) -> None:
    folder, case = shard_folder(tmp_path, 0), tmp_path / "case.json"
    scenario = setup_of("support:EagerDecode").scenario([decode_round(2, 5)])
    case.write_text(scenario.to_json())
    for subject in ("support:EagerDecode", "triton"):
        plan = Plan(systems=("decode",), subject=subject)
        write_json(folder / SPEC_FILE, plan.shard(0).to_dict())
        if subject == scenario.subject:
            replay_step_by_step(case, folder / "repeat", DEVICE)
            continue
        with pytest.raises(UsageError, match="runs no other code unasked; if you know it, name it in the plan"):
            replay_step_by_step(case, folder / "repeat", DEVICE)


# What a name leads to ------------------------------------------------------------------------------------------------


class Makes:
    @classmethod
    def one(cls) -> EagerDecode:
        return EagerDecode()

    def __call__(self) -> EagerDecode:
        return EagerDecode()


def makes_none() -> dict[str, int]:
    return {}


def test_what_makes_subjects_is_called() -> None:
    for factory in (EagerDecode, lambda: EagerDecode(), Makes.one, functools.partial(functools.partial(EagerDecode))):
        check_factory("mine:Mine", factory)
        assert isinstance(make_subject(factory), EagerDecode)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_shipped_subject_is_one(system: str) -> None:
    for name in SYSTEMS[system].subjects:
        assert subject_factory(SYSTEMS[system], name)[0] == name


@pytest.mark.parametrize(
    "factory, said",
    [
        (os.abort, "is a builtin_function_or_method, not a class or function"),
        (os, "is a module, not a class or function"),
        (Makes(), "is a Makes, not a class or function"),
        (functools.partial(os.abort), "is a partial, not a class or function"),
        (dict, "is a class without allocate and no in_graph; name one that has allocate, before_replay and in_graph"),
        (type("Half", (), {"allocate": lambda self: None}), "is a class without in_graph"),
        (type("Data", (), {"allocate": 1, "in_graph": 2}), "is a class without allocate and no in_graph"),
    ],
)
def test_what_makes_none_is_never_called(factory: object, said: str) -> None:
    with pytest.raises(UsageError, match=f"^subject 'mine:Mine' {said}"):
        check_factory("mine:Mine", factory)


@pytest.mark.parametrize("options", [(), ("--fault", "skip_refresh")])
def test_a_function_that_makes_something_else_is_wrong_usage(dsa_verify: Cli, options: tuple[str, ...]) -> None:
    line = ("replay", "--system", "decode", "--preset", "tiny", "--batch", "1", "--subject", "test_trust:makes_none")
    status, text = dsa_verify(*line, *options)
    assert (status, "makes_none made a dict, which has no allocate and no in_graph; return a new" in text) == (2, True)


@pytest.mark.parametrize("name", ["os:abort", "builtins:breakpoint"])
def test_whoever_trusts_a_case_still_runs_no_builtin(dsa_verify: Cli, name: str) -> None:
    write("case.json", subject=name)
    status, text = dsa_verify("replay", "case.json", "--trust")
    assert (status, "is a builtin_function_or_method, not a class or function" in text) == (2, True), text


# What a case file is -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_cases(tmp_path: Path) -> dict[Path, str]:
    """Paths, and what is said of each."""
    pipe, huge, folder = tmp_path / "pipe.json", tmp_path / "huge.json", tmp_path / "folder.json"
    os.mkfifo(pipe)
    huge.touch()
    os.truncate(huge, MAX_CASE_BYTES + 1)
    folder.mkdir()
    return {
        pipe: "cannot be read as a case file (it is a pipe); give the path of a JSON text",
        Path("/dev/zero"): "cannot be read as a case file (it is a device); give the path of a JSON text",
        folder: "cannot be read as a case file (Is a directory); give the path of a JSON text",
        huge: "67108865 bytes exceed 67108864, the most that a case file may have; give the path of a JSON",
    }


def test_what_is_no_case_file_is_not_opened(no_cases: dict[Path, str]) -> None:
    for path, said in no_cases.items():
        with pytest.raises(UsageError, match=re.escape(f"{path}: {said}")):
            read_case(path)


def test_what_is_no_case_file_is_refused_before_torch_is_imported(no_cases: dict[Path, str]) -> None:
    code = "import sys\nfrom dsa_verify.cli.main import main\n"
    code += "for path in sys.argv[1:]:\n    sys.argv = ['dsa-verify', 'replay', path]\n"
    code += "    try: main()\n    except SystemExit as end: assert end.code == 2, end.code\n"
    code += "assert not {'torch', 'triton', 'numpy'} & set(sys.modules), 'imported something heavy'"
    done = subprocess.run([sys.executable, "-c", code, *no_cases], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [f"{path}: {said}" in done.stderr for path, said in no_cases.items()] == [True] * len(no_cases)
