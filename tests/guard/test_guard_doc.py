"""What docs/guard.md shows is what happens."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest
import torch

from dsa_verify import GuardError
from dsa_verify.metadata_guard.finding import KINDS

DOC = (Path(__file__).parents[2] / "docs/guard.md").read_text()
LINES, REBOUND, CONTENTS = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
(SENTENCE,) = re.findall(r"```\n(metadata.*?)\n```", DOC, re.DOTALL)


def test_the_code_of_the_document_runs() -> None:
    space = types.SimpleNamespace
    lens = torch.tensor([3, 4, 0, 0], dtype=torch.int32)
    layer = space(lens=lens)
    cu_lens = torch.tensor([0, 3, 7, 7, 7], dtype=torch.int32)
    metadata = space(layers={"layer.0": layer}, cu_lens=cu_lens, scale=torch.ones(1))
    world = {"metadata": metadata, "batch_size": 4, "graph": space(replay=lambda: None)}
    calls = [line for line in LINES.splitlines() if line.startswith("guard")]
    assert len(calls) == 3
    exec(LINES, world)
    with pytest.raises(GuardError) as caught:
        exec(REBOUND, world)
    assert str(caught.value) == SENTENCE
    layer.lens = lens
    exec(CONTENTS, world)
    cu_lens[1] = 5
    world["guard"].check(batch=2)
    with pytest.raises(GuardError, match=r"metadata\.cu_lens is not what eager work computes: at \[1\] it holds 5"):
        world["guard"].verdict()


def test_every_kind_is_in_the_table() -> None:
    table = DOC.split("## What it sees")[1].split("## What it cannot")[0]
    told = [kind for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for kind in re.findall(r"`(.*?)`", row)]
    assert sorted(told) == sorted(KINDS)
