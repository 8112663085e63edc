"""The command line as its users meet it: what it prints, what it writes and how it ends."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path

import forked
import pytest

from dsa_verify.base import atomic_write, version
from dsa_verify.cli import new
from dsa_verify.report.terminal import counted
from dsa_verify.run import verify
from dsa_verify.subjects.faults import conduct, names, systems_of
from dsa_verify.systems.catalogue import systems_to_run

ROOT = Path(__file__).parents[2]
SMALL = ("--preset", "tiny", "--batch", "4", "--draft-tokens", "4")
RESULT_KEYS = {
    "schema",
    "system",
    "subject",
    "device",
    "graph",
    "configs",
    "replays",
    "rounds_checked",
    "fields_checked",
    "elements_compared",
    "mismatches",
    "address_changes",
    "guard_hits",
    "compilations_after_warmup",
    "findings",
    "wall_s",
    "environment",
}

Cli = Callable[..., tuple[int, str]]


def test_help_needs_nothing_heavy_nor_does_what_waits_for_a_command() -> None:
    """What makes it answer at once, and end with its child; how fast that is, a busy machine cannot say."""
    code = "import sys; sys.argv = ['x', '--help']\nfrom dsa_verify.cli.main import main\n"
    code += "try: main()\nexcept SystemExit: pass\nimport dsa_verify.report.ends\n"
    code += "assert not {'torch', 'triton', 'numpy', 'rich'} & set(sys.modules), 'imported something heavy'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "replay" in done.stdout


def test_a_right_pipeline_ends_with_0_and_says_what_was_checked(dsa_verify: Cli, tmp_path: Path) -> None:
    status, text = dsa_verify("replay", "--system", "target_verify", *SMALL, "--json", "r.json", "--junit", "r.xml")
    assert status == 0, text
    assert "17 replays checked, all equal; exit status 0" in text
    result = json.loads((tmp_path / "r.json").read_text())
    assert set(result) >= RESULT_KEYS
    assert (result["configs"], result["replays"], result["rounds_checked"], result["mismatches"]) == (1, 17, 17, 0)
    assert result["elements_compared"] > 1000
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("1", "0")
    assert not (tmp_path / "dsa-findings").exists()


def test_several_systems_are_a_list_with_totals(dsa_verify: Cli, tmp_path: Path) -> None:
    status, text = dsa_verify("replay", "--preset", "tiny", "--batch", "1", "--rounds", "2", "--json", "r.json")
    assert status == 0, text
    result = json.loads((tmp_path / "r.json").read_text())
    assert [run["system"] for run in result["runs"]] == ["decode", "target_verify", "draft_extend"]
    assert result["rounds_checked"] == sum(run["rounds_checked"] for run in result["runs"])


def test_a_size_is_set_in_those_of_several_systems_that_have_it(dsa_verify: Cli, tmp_path: Path) -> None:
    chosen = ("--system", "decode", "--system", "mtp", "--set", "draft_steps=2", "--json", "r.json")
    status, text = dsa_verify("replay", *chosen, "--batch", "1", "--rounds", "1")
    assert status == 0, text
    decode, mtp = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert decode["fields_checked"] == mtp["fields_checked"], "one draft step has the fields of decode"
    status, text = dsa_verify("fuzz", *chosen, "--batch", "1", "--rounds", "4", "--seed", "1")
    assert status == 0, text
    decode, mtp = json.loads((tmp_path / "r.json").read_text())["fuzz"]
    steps = [{part["configuration"]["geometry"].get("draft_steps") for part in run["parts"]} for run in (decode, mtp)]
    assert steps == [{None}, {2}]


def test_a_finding_is_printed_written_and_replayed_from_its_case(dsa_verify: Cli, tmp_path: Path) -> None:
    status, text = dsa_verify(
        "replay",
        "--system",
        "target_verify",
        *SMALL,
        "--fault",
        "off_by_one_page",
        "--json",
        "r.json",
        "--junit",
        "r.xml",
    )
    assert status == 1
    finding = json.loads((tmp_path / "r.json").read_text())["findings"][0]
    assert finding["diagnosis"] == "boundary"
    assert finding["sentence"] in text
    assert f"reproduce: {finding['reproduce']}" in text
    assert finding["contract"] == ["docs/contract/1-basic.md#1.2"]
    assert text.count("  rule: docs/contract/1-basic.md#1.2") == 1
    failure = ElementTree.parse(tmp_path / "r.xml").getroot().find(".//failure")
    assert failure is not None
    assert failure.get("message") == finding["sentence"]
    assert "rule: docs/contract/1-basic.md#1.2" in (failure.text or "")
    status, text = dsa_verify("replay", finding["case"])
    assert status == 1
    assert finding["sentence"] in text


def test_the_fault_of_a_case_can_be_the_readers_own(dsa_verify: Cli) -> None:
    """A case of a right subject is right; with --fault it is not."""
    Path("case.json").write_text(
        '{"schema": 1, "system": "decode", "preset": "tiny", "buckets": [2], '
        '"rounds": [{"bucket": 2, "seq_lens": [5, 9], "requests": [3, 4]}]}'
    )
    assert dsa_verify("replay", "case.json")[0] == 0
    status, text = dsa_verify("replay", "case.json", "--fault", "past_the_end:cu_seqlens_k")
    assert status == 1
    assert "wrote 4 bytes past field cu_seqlens_k" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--system", "nope"), "system 'nope' is unknown; known systems: decode, target_verify, draft_extend"),
        (("--preset", "nope"), "preset: 'nope' is unknown"),
        (("--preset", ""), "preset: '' is unknown"),
        (("--subject", ""), "subject '' is unknown for decode"),
        (("--subject", "nope"), "subject 'nope' is unknown for decode"),
        (("--subject", "nope:Thing"), "importing 'nope' raised ModuleNotFoundError"),
        (("--subject", "json:Thing"), "'json' has no attribute 'Thing'"),
        (("--subject", "json:__name__"), "is a str, not a class or function"),
        (("--fault", "nope"), "fault 'nope' is unknown"),
        (("--system", "decode", "--fault", "unclamped_length"), "has no effect in decode"),
        (("--set", "page_size"), "not KEY=VALUE"),
        (("--set", "page_size=3"), "page_size: 3 is not a power of two"),
        (("--set", "pages=3"), "unknown geometry field"),
        (("--set", "window=8"), "window: is a size of padded alone; leave it out, or choose that system"),
        (("--system", "mtp", "--set", "window=8"), "window: is a size of padded alone"),
        (("--system", "decode", "--system", "mtp", "--set", "draft_steps=1"), "draft_steps: 1 is outside 2..8"),
        (("--set", "draft_tokens=3"), "(--draft-tokens)"),
        (("--system", "decode", "--draft-tokens", "2"), "has no effect in decode"),
        (("--device", "tpu"), "device 'tpu' is unknown"),
        (("--json", "no/such/folder.json"), "'--json': no/such/folder.json: the folder no/such does not exist; create"),
        (("--json", ""), "'--json': the name is empty; name a file"),
        (("--json", "."), "'--json': .: is a folder; name a file"),
        (("--junit", "/proc/r.xml"), "'--junit': /proc/r.xml: cannot be written (No such file or directory); name"),
        (("--junit", "x" * 300), "cannot be written (File name too long); name another file"),
        (("--json", "r", "--junit", "./r"), "--junit r: is the file of --json, too; name another one"),
        (("--findings", ""), "'--findings': the name is empty; name a folder"),
        (("--findings", "/proc/f/g"), "'--findings': /proc/f/g: nothing can be put there (No such file or directory)"),
        (("--findings", "/dev/null"), "'--findings': /dev/null: nothing can be put there (Not a directory); name"),
        (("missing.json",), "missing.json"),
        (("--rounds", "-1"), "--rounds"),
        (("--seed", str(1 << 63)), "'--seed': 9223372036854775808 is not in the range 0<=x<=9223372036854775807"),
        (("--batch", "2", "--batch", "2"), "'--batch': 2 is given twice; give it once"),
        (("--draft-tokens", "2", "--draft-tokens", "2"), "'--draft-tokens': 2 is given twice; give it once"),
        (("--set", "context=640", "--set", "context=320"), "'--set': context is given twice; give it once"),
        (("--nonsense",), "No such option"),
    ],
)
def test_wrong_usage_is_one_clear_line_and_status_2(dsa_verify: Cli, arguments: tuple[str, ...], said: str) -> None:
    status, text = dsa_verify("replay", *arguments)
    assert status == 2, text
    assert said in text
    assert "Traceback" not in text
    assert not list(Path().iterdir())


@pytest.mark.parametrize("arguments", [("--set", "draft_tokens=3"), ("--draft-tokens", "3")], ids=lambda each: each[0])
def test_of_a_system_without_drafts_no_option_sends_to_the_other(dsa_verify: Cli, arguments: tuple[str, str]) -> None:
    status, text = dsa_verify("replay", "--system", "dcp", *arguments)
    assert (status, "has no effect in dcp, which has no draft; leave it out" in text) == (2, True), text


@pytest.mark.parametrize(
    "fault, systems",
    [
        (None, ["decode", "target_verify", "draft_extend"]),
        ("skip_refresh", ["decode", "target_verify", "draft_extend"]),
        ("wrong_draft_offset", ["target_verify", "draft_extend"]),
        ("wrong_owner", ["dcp"]),
        ("stale_draft_steps", ["mtp"]),
    ],
)
def test_a_fault_picks_its_systems(fault: str | None, systems: list[str]) -> None:
    assert systems_to_run((), None, systems_of(fault)) == systems
    assert systems_to_run(("padded",), None, systems_of(fault)) == ["padded"]  # where it is refused, if it must be


@pytest.mark.parametrize("command", ["replay", "fuzz --shrink-seconds 0"])
def test_a_fault_without_a_system_is_found_where_it_belongs(dsa_verify: Cli, command: str) -> None:
    line = f"{command} --fault unclamped_length --preset tiny --batch 1 --draft-tokens 6 --rounds 20"
    status, text = dsa_verify(*line.split())
    assert (status, "FOUND in draft_extend" in text) == (1, True), text


def test_drafts_that_no_system_of_a_fault_has_are_wrong_usage(dsa_verify: Cli) -> None:
    status, text = dsa_verify("replay", "--fault", "wrong_owner", "--draft-tokens", "2")
    assert (status, "--draft-tokens: has no effect in any system that this run covers" in text) == (2, True)


@pytest.mark.parametrize(
    "number, width, said",
    [(1, 0, "1 mismatch"), (0, 0, "0 mismatches"), (1, 3, "  1 mismatch  "), (1234, 0, "1234 mismatches")],
)
def test_counts_are_grammatical(number: int, width: int, said: str) -> None:
    assert counted(number, "mismatch", width) == said
    assert counted(12345, "config", 7) == " 12,345 configs"


def test_one_of_each_is_said_as_one(dsa_verify: Cli) -> None:
    status, text = dsa_verify(*ONE.replace("--rounds 2", "--rounds 1").split())
    assert status == 0
    assert re.search(
        r"decode +triton +1 config +1 replay +\d+ elements  0 mismatches  0 address changes  0 guard", text
    )
    assert "1 replay checked, all equal; exit status 0" in text


def test_a_source_tree_says_its_version(dsa_verify: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> str:
        raise version.PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", absent)
    of_project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert of_project is not None
    said = f"{of_project[1]} from a source tree"
    assert dsa_verify("--version") == (0, f"dsa-verify, version {said}\n")
    assert dsa_verify(*ONE.split())[1].startswith(f"dsa-verify {said}, torch ")
    monkeypatch.setattr(version, "PROJECT_FILE", tmp_path / "pyproject.toml")
    assert version.own_version() == "from a source tree"


def test_the_package_can_be_run_as_a_module(tmp_path: Path) -> None:
    done = in_shell(tmp_path, f"{sys.executable} -m dsa_verify --version")
    assert (done.returncode, done.stdout.startswith("dsa-verify, version ")) == (0, True), done.stderr


def test_a_bad_case_names_its_path_and_status_2(dsa_verify: Cli) -> None:
    Path("case.json").write_text(
        '{"schema": 1, "system": "decode", "preset": "tiny", "buckets": [2], '
        '"rounds": [{"bucket": 2, "seq_lens": [5, 999], "requests": [3, 4]}]}'
    )
    status, text = dsa_verify("replay", "case.json")
    assert status == 2
    assert "case.json: rounds[0].seq_lens[1]: 999 exceeds context 203" in text
    status, text = dsa_verify("replay", "case.json", "--rounds", "4")
    assert status == 2


def test_options_of_the_matrix_are_refused_beside_a_case(dsa_verify: Cli) -> None:
    Path("case.json").write_text(
        '{"schema": 1, "system": "decode", "preset": "tiny", "buckets": [2], '
        '"rounds": [{"bucket": 2, "seq_lens": [5], "requests": [3]}]}'
    )
    for flag, value in (("--rounds", "4"), ("--rounds", "0"), ("--seed", "1"), ("--preset", "")):
        status, text = dsa_verify("replay", "case.json", flag, value)
        assert (status, f"{flag}: has no effect with a CASE" in text) == (2, True)
    assert dsa_verify("replay", "case.json")[0] == 0


def test_the_largest_seed_is_reproduced(dsa_verify: Cli, tmp_path: Path) -> None:
    seed = str((1 << 63) - 1)
    status, text = dsa_verify(*ONE.split(), "--seed", seed, "--fault", "skip_refresh")
    assert status == 1, text
    [finding, *_] = json.loads((tmp_path / "r.json").read_text())["findings"]
    assert dsa_verify("replay", finding["case"])[0] == 1


def test_a_subject_of_no_name_is_not_the_shipped_one(dsa_verify: Cli) -> None:
    """As where a variable of a CI job is not set."""
    case = (
        '{"schema": 1, "system": "decode", "preset": "tiny", "buckets": [2], %s'
        '"rounds": [{"bucket": 2, "seq_lens": [5], "requests": [3]}]}'
    )
    Path("of_none.json").write_text(case % "")
    Path("of_empty.json").write_text(case % '"subject": "", ')
    for arguments in (("of_none.json", "--subject", ""), ("of_empty.json",)):
        status, text = dsa_verify("replay", *arguments)
        assert (status, "subject '' is unknown for decode" in text) == (2, True), text
    status, text = dsa_verify("fuzz", "--system", "decode", "--preset", "tiny", "--rounds", "1", "--subject", "")
    assert (status, "subject '' is unknown for decode" in text) == (2, True), text


def test_nothing_verified_is_status_4(dsa_verify: Cli) -> None:
    status, text = dsa_verify("replay", *SMALL, "--rounds", "0")
    assert status == 4
    assert "nothing was verified" in text


def test_a_broken_oracle_is_status_3(dsa_verify: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from oracles.decode import DecodeOracle

    def broken(self: object) -> None:
        raise ValueError("the oracle is out of order")

    monkeypatch.setattr(DecodeOracle, "in_graph", broken)
    status, text = dsa_verify("replay", "--system", "decode", "--preset", "tiny", "--batch", "1")
    assert status == 3
    assert "the oracle is out of order" in text


def test_a_flaky_finding_is_status_6(dsa_verify: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct.WrongOnce, "struck", False)
    status, text = dsa_verify("replay", "--system", "decode", "--preset", "tiny", "--batch", "4", "--fault", "flaky")
    assert status == 6, text
    assert "flaky: field cache_seqlens_int32" in text


ONE = "replay --system decode --preset tiny --batch 4 --rounds 2 --json r.json"


def test_a_lost_device_is_status_5_and_keeps_the_results(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        status = forked.start(tmp_path, (*ONE.split(), "--fault", "lost_device"), out, out).wait()
    text = (tmp_path / "out").read_text()
    assert (status, "illegal memory access" in text) == (5, True), text
    assert json.loads((tmp_path / "r.json").read_text())["status"] == 5
    assert list((tmp_path / "dsa-findings").glob("device-lost-*.json"))


def in_shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """`line`, in which `$DSA` is the command."""
    environment = os.environ | {"DSA": f"{sys.executable} -m dsa_verify.cli.main", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def piped(folder: Path, arguments: Sequence[str], *reader: str, errors_too: bool = False) -> tuple[int, str, str]:
    """The command in a pipe with `reader`: (its exit status, what the reader writes, standard error)."""
    with (folder / "read").open("w") as read, (folder / "err").open("w") as err:
        reading = subprocess.Popen(reader, stdin=subprocess.PIPE, stdout=read)
        assert reading.stdin is not None
        with reading.stdin as pipe:
            command = forked.start(folder, arguments, pipe, pipe if errors_too else err)
        status = command.wait()
        assert reading.wait() == 0
    return status, (folder / "read").read_text(), (folder / "err").read_text()


@pytest.mark.parametrize(
    "fault, errors_too, status",
    [((), False, 0), (("--fault", "skip_refresh"), True, 1), (("--fault", "lost_device"), False, 5)],
)
def test_a_reader_that_ends_early_changes_no_result(
    tmp_path: Path, fault: tuple[str, ...], errors_too: bool, status: int
) -> None:
    done = piped(tmp_path, (*ONE.split(), *fault), "head", "-1", errors_too=errors_too)
    assert (done[0], done[1].count("\n"), done[2]) == (status, 1, "")
    assert json.loads((tmp_path / "r.json").read_text())["status"] == status


@pytest.mark.parametrize(
    "fault, errors_too, status, said",
    [
        ((), False, 0, "dsa-verify: <stdout> ends here: No space left on device\n"),
        (("--fault", "skip_refresh"), True, 1, ""),
    ],
)
def test_a_full_disk_under_the_output_changes_no_result(
    tmp_path: Path, fault: tuple[str, ...], errors_too: bool, status: int, said: str
) -> None:
    with Path("/dev/full").open("w") as full, (tmp_path / "err").open("w") as err:
        done = forked.start(tmp_path, (*ONE.split(), *fault), full, full if errors_too else err).wait()
    assert (done, (tmp_path / "err").read_text()) == (status, said)
    assert json.loads((tmp_path / "r.json").read_text())["status"] == status


def test_a_command_without_output_still_gives_its_result(tmp_path: Path) -> None:
    done = in_shell(tmp_path, f"$DSA {ONE} >&- 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert json.loads((tmp_path / "r.json").read_text())["status"] == 0


def test_an_output_that_is_there_is_kept_until_it_is_written(dsa_verify: Cli, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("before")
    (tmp_path / "link.xml").symlink_to("r.xml")
    outputs = ("--json", "r.json", "--junit", "link.xml")
    assert dsa_verify("replay", "--system", "nope", *outputs)[0] == 2
    assert (tmp_path / "r.json").read_text() == "before"
    assert dsa_verify(*ONE.split(), *outputs)[0] == 0
    assert json.loads((tmp_path / "r.json").read_text())["status"] == 0
    assert ElementTree.parse(tmp_path / "r.xml").getroot().tag == "testsuites"


def test_an_output_may_be_a_pipe(tmp_path: Path) -> None:
    """Which must not be opened twice, as the reader would take the first time for all."""
    os.mkfifo(tmp_path / "f")
    with (tmp_path / "piped").open("w") as kept, subprocess.Popen(["cat", tmp_path / "f"], stdout=kept):
        arguments = (*ONE.split(), "--json", "/dev/stdout", "--junit", "f")
        status, read, error = piped(tmp_path, arguments, "sed", "1,3d")
    assert status == 0, error
    assert json.loads(read)["status"] == 0
    assert ElementTree.parse(tmp_path / "piped").getroot().tag == "testsuites"


def test_a_disk_that_is_full_at_the_end_is_status_3(dsa_verify: Cli, tmp_path: Path) -> None:
    status, text = dsa_verify(*ONE.split(), "--json", "/dev/full", "--junit", "r.xml")
    assert status == 3
    assert "dsa-verify: /dev/full: could not be written (No space left on device); make room, and run again" in text
    assert (tmp_path / "r.xml").exists()


@pytest.mark.parametrize("line", [ONE, ONE.replace("replay", "fuzz")], ids=["replay", "fuzz"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_a_finding_is_told_where_its_case_cannot_be_saved(
    dsa_verify: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, error: int
) -> None:
    def refuse(path: Path, text: str, durable: bool) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(atomic_write, "_replace", refuse)
    verify._say_once.cache_clear()
    status, text = dsa_verify(*line.split(), "--fault", "skip_refresh")
    assert status == 1, text
    result = json.loads((tmp_path / "r.json").read_text())
    for finding in result["findings"]:
        (rule,) = finding["contract"]
        lost = f"the case could not be saved: {os.strerror(error)}"
        assert f"  {finding['sentence']}\n  rule: {rule}\n  {lost}\n" in text
        assert (finding["case"], finding["reproduce"], finding["not_saved"]) == (None, None, os.strerror(error))
    assert "Traceback" not in text
    assert text.count("so a crash would leave no case") == 1


def test_a_folder_in_which_nothing_can_be_put_still_gives_a_verdict(
    dsa_verify: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it was named: then it is refused before anything runs."""
    monkeypatch.chdir("/proc/self/task")
    line = ONE.replace("r.json", str(tmp_path / "r.json")).split()
    assert dsa_verify(*line)[0] == 0
    status, text = dsa_verify(*line, "--fault", "skip_refresh")
    assert (status, "the case could not be saved: No such file or directory" in text) == (1, True), text
    assert dsa_verify(*line, "--findings", "dsa-findings")[0] == 2


def test_a_small_case_that_cannot_be_saved_is_said(dsa_verify: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = atomic_write._replace

    def refuse(path: Path, text: str, durable: bool) -> None:
        if path.name.endswith(".small.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(path, text, durable)

    monkeypatch.setattr(atomic_write, "_replace", refuse)
    status, text = dsa_verify(*ONE.replace("replay", "fuzz").split(), "--fault", "skip_refresh")
    assert status == 1
    assert "  the small case could not be saved: No space left on device\n" in text
    assert ".small.json" not in text


@pytest.mark.parametrize("path", ["/dev/full", "r.json"])
def test_a_report_that_cannot_be_written_takes_no_finding_away(dsa_verify: Cli, path: str) -> None:
    outputs = ("--json", "/dev/full", "--junit", path)[: 2 if path == "/dev/full" else 4]
    status, text = dsa_verify(*ONE.split()[:-2], "--fault", "skip_refresh", *outputs)
    assert (status, "/dev/full: could not be written" in text) == (1, True), text


def test_new_in_a_folder_that_cannot_be_written_is_status_2(dsa_verify: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = atomic_write._replace

    def refuse(path: Path, text: str, durable: bool) -> None:
        if path.name.startswith("test_"):
            raise OSError(errno.EROFS, "Read-only file system")
        replace(path, text, durable)

    monkeypatch.setattr(atomic_write, "_replace", refuse)
    status, text = dsa_verify("new", "mine")
    assert status == 2
    assert text == "dsa-verify: test_mine.py: cannot be written (Read-only file system); go to a folder that can be\n"
    assert list(Path().iterdir()) == []


def test_what_nobody_expected_is_status_3(dsa_verify: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new, "run", lambda name, folder: 1 / 0)
    status, text = dsa_verify("new", "mine")
    assert status == 3
    assert "the harness failed, no verdict: ZeroDivisionError: division by zero" in text


def test_an_interrupt_is_status_130_and_keeps_the_results(
    dsa_verify: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dsa_verify.report.terminal import Terminal

    def interrupt(self: Terminal, rounds: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Terminal, "advance", interrupt)
    status, text = dsa_verify("replay", "--system", "decode", "--preset", "tiny", "--batch", "4", "--json", "r.json")
    assert status == 130, text
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["interrupted"], result["rounds_checked"]) == (True, 1)


def test_the_users_folder_hides_no_other_module(tmp_path: Path) -> None:
    for name in ("json", "queue", "torch", "oracles"):
        (tmp_path / f"{name}.py").write_text("raise OSError('the module of the user')\n")
    (tmp_path / "mine.py").write_text("from dsa_verify.subjects.pipelines.basic import Decode as Mine\n")
    command = f'{sys.executable} -Pc "from dsa_verify.cli.main import main; main()"'
    done = in_shell(tmp_path, f"{command} {ONE} --subject mine:Mine")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_module_of_the_users_own_is_loaded(dsa_verify: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_my_own.py").write_text("from dsa_verify.subjects.pipelines.basic import Decode as Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    status, text = dsa_verify(
        "replay",
        "--system",
        "decode",
        "--preset",
        "tiny",
        "--batch",
        "1",
        "--subject",
        "of_my_own:Mine",
        "--rounds",
        "3",
    )
    assert status == 0, text
    assert "of_my_own:Mine" in text


def test_kernels_that_compile_while_rounds_run_are_a_finding_unless_they_may(
    dsa_verify: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compiles_late.py").write_text(
        "from dsa_verify.replay import compilations\nfrom dsa_verify.subjects.pipelines.basic import Decode\n"
        "class Late(Decode):\n    def before_replay(self):\n        compilations._note(None, {})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ("replay", "--system", "decode", "--preset", "tiny", "--batch", "1", "--rounds", "3")
    for command in ("replay", "fuzz"):
        options = (command, *options[1:])
        status, text = dsa_verify(*options, "--subject", "compiles_late:Late")
        assert (status, "  recompiles: bucket " in text) == (1, True), text
        status, text = dsa_verify(*options, "--subject", "compiles_late:Late", "--allow-compilations")
        allowed = "  3 kernels were compiled while rounds ran, which is allowed: --allow-compilations was given"
        assert (status, allowed in text) == (0, True), text
        assert "compiled" not in dsa_verify(*options)[1]


@pytest.mark.parametrize("call", ["allocate(self, *given)", "before_replay(self)"])
def test_a_lack_of_memory_is_no_finding(
    dsa_verify: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (tmp_path / f"greedy_{call[:4]}.py").write_text(
        "import torch\nfrom dsa_verify.subjects.pipelines.basic import Decode\n"
        f"class Greedy(Decode):\n    def {call}:\n        torch.empty(1 << 60, dtype=torch.uint8)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ("--system", "decode", "--preset", "tiny", "--batch", "1", "--subject", f"greedy_{call[:4]}:Greedy")
    for command in ("replay", "fuzz"):
        status, text = dsa_verify(command, *options)
        words = " ".join(text.split())
        assert status == 8, text
        assert re.search("about the subject: [a-z-]+ raised RuntimeError: .*can't allocate memory", words), words
        assert "FOUND" not in words
        assert "ask for smaller batches (--batch)" in words


def test_faults_are_listed(dsa_verify: Cli) -> None:
    status, text = dsa_verify("faults")
    assert status == 0
    assert all(name in text for name in names())
    assert len(names()) >= 12
    status, text = dsa_verify("faults", "--system", "decode")
    assert "unclamped_length" not in text


def test_doctor_finds_this_machine_ready(dsa_verify: Cli) -> None:
    status, text = dsa_verify("doctor")
    assert status == 0, text
    assert text.rstrip().endswith("ready: dsa-verify replay")
