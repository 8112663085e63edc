"""A capture does not import dynamo, and what torch keeps from dynamo is kept from it where there is one."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import _compile

from dsa_verify.graphs.emulated import EmulatedBackend
from dsa_verify.graphs.known_results import known_results
from dsa_verify.graphs.without_dynamo import DYNAMO, _mend


@pytest.fixture
def no_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has imported dynamo, and whoever tries fails."""

    class Refuses:
        def find_spec(self, name: str, *_: object) -> None:
            assert name != DYNAMO, "dynamo is imported"

    monkeypatch.delitem(sys.modules, DYNAMO, raising=False)
    monkeypatch.delitem(vars(torch), "_dynamo", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])


def marked() -> Any:
    return _compile._disable_dynamo(lambda value: value + 1)


def test_a_capture_imports_none(no_dynamo: None) -> None:
    known_results.clear()
    source = torch.arange(8)
    out = torch.zeros(8, dtype=torch.int64)

    def body() -> None:
        sums = torch.cumsum(source, 0).clamp(max=20)
        out.copy_(torch.where(sums <= 6, torch.cat([sums[:4], -sums[4:]]), sums // 2 + source))

    EmulatedBackend(torch.device("cpu")).capture(body).replay()
    assert out.tolist() == [0, 1, 3, 6, 9, 12, 16, 17]


def test_what_is_marked_imports_it_unless_mended(no_dynamo: None) -> None:
    with pytest.raises(AssertionError, match="dynamo is imported"):
        marked()(1)
    function = marked()
    _mend([function])
    assert [function(1), function(2)] == [2, 3]


def test_where_there_is_one_it_is_kept_out(no_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    function, kept_out = marked(), []
    _mend([function])
    assert function(1) == 2

    def disable(wrapped: Any, *_: object, **__: object) -> Any:
        kept_out.append(wrapped)
        return lambda value: -wrapped(value)

    dynamo = ModuleType(DYNAMO)
    vars(dynamo)["disable"] = disable
    monkeypatch.setitem(sys.modules, DYNAMO, dynamo)
    monkeypatch.setitem(vars(torch), "_dynamo", dynamo)
    assert [function(1), function(2)] == [-2, -3]
    assert len(kept_out) == 1
