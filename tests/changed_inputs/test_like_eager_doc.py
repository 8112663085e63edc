"""What docs/replays-like-eager.md shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dsa_verify import NotLikeEager, replays_like_eager
from dsa_verify.changed_inputs.result import VERDICTS

DOC = (Path(__file__).parents[2] / "docs/replays-like-eager.md").read_text()
CALL, TEST = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
(SENTENCE,) = re.findall(r"```\n(scaled.*?)\n```", DOC, re.DOTALL)
NUMBER = re.compile(r"0\.\d+|1\.\d+")  # which depends on the random numbers of the installed torch


def test_the_code_of_the_document_runs() -> None:
    world: dict[str, Any] = {}
    exec(CALL + TEST, world)
    assert world["result"].equal

    class Fixture:
        replays_like_eager = staticmethod(replays_like_eager)

    world["test_scaled"](Fixture)
    with pytest.raises(NotLikeEager) as caught:
        replays_like_eager(world["scaled"], world["inputs"], batch=("x", "lens"), change={"factor": (1.0, 3.0)})
    assert NUMBER.sub("N", str(caught.value)) == NUMBER.sub("N", SENTENCE)


def test_every_verdict_is_in_the_table() -> None:
    told = [name for row in re.findall(r"^\| (`.*?) \|", DOC, re.MULTILINE) for name in re.findall(r"`(.*?)`", row)]
    assert told == list(VERDICTS)
