"""What docs/own-system.md promises: its code is the example's, it is right, and common mistakes in it are named."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support import backend

from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.systems import catalogue

ROOT = Path(__file__).parents[2]
OWN = "own_system:SYSTEM"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(catalogue, "SYSTEMS", dict(catalogue.SYSTEMS))
    monkeypatch.setattr(catalogue, "_REFERENCES", {})
    return importlib.import_module("own_system")


def mistakes(example: ModuleType) -> dict[str, type]:
    """By what is done wrong, the reference with that mistake."""

    class FloorOfPages(example.Reference):
        def in_graph(self):
            super().in_graph()
            counts = self.inputs.seq_lens.clamp(max=self.page * self.pages) // self.page
            self.out["kv_indptr"][1:].copy_(counts.cumsum(0))

    class SumsFromOne(example.Reference):
        def in_graph(self):
            super().in_graph()
            self.out["kv_indptr"][:-1].copy_(self.out["kv_indptr"][1:].clone())

    class EmptyLastPage(example.Reference):
        def in_graph(self):
            super().in_graph()
            last = self.out["kv_last_page_len"]
            last.copy_(torch.where(last == self.page, 0, last))

    class LengthsAtCapture(example.Reference):
        def allocate(self, geometry, inputs, buffers):
            super().allocate(geometry, inputs, buffers)
            self.kept = inputs.seq_lens.clone()

        def in_graph(self):
            super().in_graph()
            self.out["kv_last_page_len"].copy_((self.kept - 1) % self.page + 1)

    class RequestsOfBefore(example.Reference):
        def allocate(self, geometry, inputs, buffers):
            super().allocate(geometry, inputs, buffers)
            self.kept = inputs.req_pool_indices.clone()

        def in_graph(self):
            super().in_graph()
            slots = self.inputs.req_to_token[self.kept, :: self.page]
            self.out["kv_pages"].copy_(slots[:, : self.pages] // self.page)
            self.kept.copy_(self.inputs.req_pool_indices)

    class FirstPageAlone(example.Reference):
        def in_graph(self):
            kept = self.out["kv_pages"][:, 1:].clone()
            super().in_graph()
            self.out["kv_pages"][:, 1:].copy_(kept)

    return {each.__name__: each for each in locals().values() if isinstance(each, type)}


NAMED = {
    "FloorOfPages": ("kv_indptr", "wrong value", "sum off"),
    "SumsFromOne": ("kv_indptr", "wrong value", "sums shifted"),
    "EmptyLastPage": ("kv_last_page_len", "boundary", "one unit off"),
    "LengthsAtCapture": ("kv_last_page_len", "frozen at capture", "value at capture"),
    "RequestsOfBefore": ("kv_pages", "stale", "one replay late"),
    "FirstPageAlone": ("kv_pages", "never written", "poison left"),
}


def found(example: ModuleType, subject: type | None) -> list[tuple[str | None, str, str | None]]:
    system = catalogue.get_system(OWN)
    for config in diagnostic_matrix(system, system.geometry("tiny"), batches=[4]):
        setup = ReplaySetup.make(system, config.geometry, config.buckets, 0, subject, None, backend())
        findings = verify_rounds(setup, config.chunks(), Counts(), folder=None)
        if findings:
            return [(each.field, each.diagnosis.value, each.cause) for each in findings]
    return []


def test_the_example_is_right_short_and_what_the_document_shows(example: ModuleType) -> None:
    text = (ROOT / "examples/own_system.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) < 60
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own-system.md").read_text(), re.DOTALL)
    assert shown[0] == text
    assert found(example, None) == []


def test_every_mistake_has_a_name(example: ModuleType) -> None:
    assert set(mistakes(example)) == set(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_a_mistake_is_named(example: ModuleType, name: str) -> None:
    assert NAMED[name] in found(example, mistakes(example)[name])


def test_the_fixture_takes_it(example: ModuleType, dsa) -> None:
    dsa.verify(OWN, batches=[3], rounds=3)
