"""docs/attach.md: the settings that it lists are those that there are, and its lines are those that are printed."""

from __future__ import annotations

import re

import pytest
from servers import ROOT

from dsa_verify.attach import settings
from dsa_verify.attach.part import MAX_SAID, Report
from dsa_verify.attach.settings import Settings
from dsa_verify.attach.sglang_dsa import ASK, POLL_EVERY, RING_ROUNDS
from dsa_verify.attach.start_line import StartLine
from dsa_verify.base.errors import UsageError

PAGE = (ROOT / "docs" / "attach.md").read_text()


def test_every_setting_is_listed() -> None:
    rows = re.findall(r"^\| `(DSA_VERIFY\w*)` \|", PAGE, re.MULTILINE)
    assert set(rows) == {settings.SWITCH, settings.FOLDER, settings.EVERY, settings.STRICT}


def test_the_two_lines_are_settings() -> None:
    said = dict(re.findall(r"^export (\w+)=(\S+)$", PAGE, re.MULTILINE))
    found = Settings.of(said)
    assert (found.parts, str(found.folder), found.every, found.strict) == (
        ("guard", "overlay"),
        "/tmp/dsa-verify",
        1,
        False,
    )


def test_the_start_line_is_as_it_is_printed() -> None:
    (shown,) = re.findall(r"^dsa-verify 0\.1\.0 is attached.*$", PAGE, re.MULTILINE)
    line = StartLine("sglang", "0.5.23", Settings.of({"DSA_VERIFY": "guard", "DSA_VERIFY_DIR": "/tmp/dsa-verify"}))
    line.attached("overlay", "DeepseekSparseAttnBackend.init_forward_metadata_out_graph")
    line.attached("guard", "FullCudaGraphBackend.replay")
    line.cannot("overlay at DeepseekV4AttnBackend", "it makes its metadata inside the graph")
    line.cannot("overlay at DeepseekSparseAttnMultiStepBackend", "its steps are prepared at once")
    assert re.sub(r"dsa-verify \S+", "dsa-verify 0.1.0", line.text(0), count=1) == shown


def test_its_numbers_are_those_of_the_code() -> None:
    assert (MAX_SAID, RING_ROUNDS, POLL_EVERY, ASK) == (20, 64, 32, "dump")
    for said in ("first twenty findings", "at most 64", "next 32 replays", "touch $DSA_VERIFY_DIR/dump"):
        assert said in PAGE


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"DSA_VERIFY": "guard", "DSA_VERIFY_STRICT": "yes"}, "DSA_VERIFY_STRICT: 'yes' is neither 0 nor 1"),
        ({"DSA_VERIFY": "guard", "DSA_VERIFY_EVERY": "0"}, "DSA_VERIFY_EVERY: '0' is no integer from 1 to"),
        ({"DSA_VERIFY": "guard", "DSA_VERIFY_EVERY": "often"}, "DSA_VERIFY_EVERY: 'often' is no integer"),
    ],
)
def test_a_wrong_setting_is_refused(wrong: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Settings.of(wrong)


def test_the_start_line_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(Settings.of({"DSA_VERIFY": "guard"}), lambda rank: f"start of rank {rank}")
    report.say("a")
    report.begin()
    report.say("b")
    assert capsys.readouterr().err.splitlines() == [
        "start of rank 0",
        "dsa-verify, rank 0: a",
        "dsa-verify, rank 0: b",
    ]
