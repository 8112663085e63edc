"""What docs/overlay.md shows is what happens: its code runs as it stands, and its lines are those of that run."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import backend

from dsa_verify.rounds.case_file import read_case
from dsa_verify.subjects import faults
from dsa_verify.systems.catalogue import get_system

DOC = Path(__file__).parents[2] / "docs/overlay.md"
ATTACH, HOOK, END, RING = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
(SHOWN,) = re.findall(r"```json\n(.*?)```", DOC.read_text(), re.DOTALL)


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOC.parents[1] / "examples"))
    return importlib.import_module("serving_loop")


def test_the_code_of_the_document_runs(
    serving: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len([line for line in ATTACH.splitlines() if line.strip()]) <= 14
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    geometry = get_system("padded").geometry(
        "deepseek_v4", {"context": 4096, "padded_mode": "verify", "draft_tokens": 4}
    )
    loop = serving.ServingLoop(
        faults.plant("not_refreshed:page_table", serving.CorePreparation),
        system="padded",
        geometry=geometry,
        bucket=14,
        backend=backend(),
        graph=False,
    )
    world: dict[str, Any] = {
        "rank": 0,
        "bucket": 14,
        "inputs": loop.inputs,
        "metadata": loop.outputs,
        "device": loop.device,
        "folder": tmp_path,
    }
    exec(ATTACH, world)
    assert world["geometry"] == geometry
    for raw in (2, 3, 4):
        loop.step(raw, lambda raw: exec(HOOK, world | {"raw_batch": raw}))
    exec(END, world)
    exec(RING, world | {"raw_batch": 4})
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "overlay of padded, rank 0: 2 mismatches: 3 checked of 3 replays, 2 mismatches" in out
    assert f"{tmp_path}/captured-padded-" in out
    lines = [json.loads(line) for line in Path("overlay/overlay-padded-rank0.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["kind"] == "difference" and line["diagnosis"]]
    shown = json.loads(SHOWN)
    assert list(shown) == list(line)
    for key in shown:
        if key != "case":
            assert line[key] == shown[key], key
    assert len(read_case(Path(line["case"])).rounds) == 2
    text = DOC.read_text()
    kinds = {line["kind"] for line in lines} - {"attached"}
    assert kinds == {"difference", "case", "summary"}
    for kind in (*kinds, "input", "no case", "buffer replaced", "could not run"):
        assert f"`{kind}`" in text
