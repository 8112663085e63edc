"""docs/judge.md: its example is a snapshot, and what it prints is what the page shows."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from dsa_verify.base.errors import STATUS_MISMATCH
from dsa_verify.cli.main import main
from dsa_verify.overlay.snapshot_file import KEYS

PAGE = (Path(__file__).parents[2] / "docs" / "judge.md").read_text()
PRINTED, EXAMPLE = re.findall(r"```(?:json)?\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.usefixtures("one_thread")
def test_the_example_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.json"
    path.write_text(EXAMPLE)
    monkeypatch.setattr(sys, "argv", ["dsa-verify", "judge", str(path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, capsys.readouterr().out) == (STATUS_MISMATCH, PRINTED)


def test_every_key_of_the_format_is_explained() -> None:
    assert set(json.loads(EXAMPLE)) <= set(KEYS)
    rows = " ".join(line.partition("|")[2].partition("|")[0] for line in PAGE.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", rows)) == set(KEYS)
