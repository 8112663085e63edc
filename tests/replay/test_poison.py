"""Poison: torch and Triton write the same words, guards are always reset, and stale leaves the fields alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DEVICE

from dsa_verify.buffers import poison as poison_module
from dsa_verify.buffers.arena import GUARD_WORD
from dsa_verify.buffers.poison import LOUD, PLAUSIBLE, STALE, Poison, plausible_words
from dsa_verify.buffers.region import LOUD_WORD, Kind, Region
from dsa_verify.buffers.region_kernels import RegionTable

BEFORE = 123_456


def words(rows: int, columns: int, slack: int = 0) -> torch.Tensor:
    return torch.full((rows, columns + slack), BEFORE, dtype=torch.int32, device=DEVICE)[:, :columns]


def make_regions(rows: int, columns: int, slack: int, low: int, high: int) -> dict[str, Region]:
    field = {"kind": Kind.FIELD, "poisonable": True, "low": low, "high": high}
    return {
        "narrow": Region(name="narrow", got=words(rows, columns, slack), **field),
        "wide": Region(name="wide", got=words(rows, columns * 2, slack), words_per_element=2, **field),
        "guard": Region(kind=Kind.GUARD, name="guard", got=words(1, 300), constant=GUARD_WORD, poisonable=True),
        "beyond": Region(
            kind=Kind.WIDER_BUCKET, name="beyond", got=words(rows, columns), constant=LOUD_WORD, poisonable=True
        ),
        "constant": Region(kind=Kind.FIELD, name="constant", got=words(rows, columns), low=low, high=high),
        "input": Region(kind=Kind.INPUT, name="input", got=words(rows, columns)),
    }


def spread(regions: dict[str, Region], side: str, kind: int, round_: int) -> dict[str, torch.Tensor]:
    def number(value: int) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.int64, device=DEVICE)

    poison = Poison(list(regions.values()), DEVICE, number(round_), number(kind))
    poison._table = RegionTable(poison._regions, DEVICE) if side == "triton" else None
    poison.launch()
    return {name: region.got.clone() for name, region in regions.items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([LOUD, PLAUSIBLE, STALE]),
    st.integers(0, 2**31 - 1),
    st.tuples(st.integers(1, 70), st.integers(1, 70), st.sampled_from([0, 2])),
    st.integers(0, 1000),
    st.sampled_from([1, 7, 2048, 2**31 - 1001]),
)
def test_torch_and_triton_write_the_same(
    kind: int, round_: int, shape: tuple[int, int, int], low: int, span: int
) -> None:
    by_torch = spread(make_regions(*shape, low, low + span), "torch", kind, round_)
    assert same(by_torch, spread(make_regions(*shape, low, low + span), "triton", kind, round_))


def test_the_comparison_sees_another_hash(monkeypatch: pytest.MonkeyPatch):
    by_triton = spread(make_regions(5, 6, 0, 0, 100), "triton", PLAUSIBLE, 3)
    monkeypatch.setattr(poison_module, "HASH_ROW", poison_module.HASH_ROW + 2)
    assert not same(spread(make_regions(5, 6, 0, 0, 100), "torch", PLAUSIBLE, 3), by_triton)


@pytest.mark.parametrize("side", ["torch", "triton"])
@pytest.mark.parametrize("kind", [LOUD, PLAUSIBLE, STALE])
def test_what_each_poison_leaves(side: str, kind: int):
    low, high = 10, 60
    regions = make_regions(70, 40, 2, low, high)
    left = spread(regions, side, kind, round_=5)
    assert (left["guard"] == GUARD_WORD).all()
    assert (left["beyond"] == LOUD_WORD).all()
    assert (left["constant"] == BEFORE).all(), "a field that is written at capture only is not poisoned"
    assert (left["input"] == BEFORE).all()
    if kind == STALE:
        assert (left["narrow"] == BEFORE).all()
        assert (left["wide"] == BEFORE).all()
    elif kind == LOUD:
        assert (left["narrow"] == LOUD_WORD).all()
        assert (left["wide"] == LOUD_WORD).all()
    else:
        values = left["wide"].contiguous().view(torch.int64)
        for plausible in (left["narrow"], values):
            assert plausible.min() >= low
            assert plausible.max() < high
            assert plausible.unique().numel() > 20
    if side == "torch":
        assert LOUD_WORD < 0, "loud is a word that no valid value equals"


@pytest.mark.parametrize("side", ["torch", "triton"])
def test_rows_keep_the_gaps_between_them(side: str):
    memory = torch.full((4, 9), BEFORE, dtype=torch.int32, device=DEVICE)
    region = Region(kind=Kind.FIELD, name="field", got=memory[:, :6], poisonable=True, low=0, high=5)
    spread({"field": region}, side, LOUD, 0)
    assert (memory[:, 6:] == BEFORE).all()
    assert (memory[:, :6] == LOUD_WORD).all()


def test_plausible_words_change_with_the_round():
    region = make_regions(9, 9, 0, 0, 1 << 20)["narrow"]
    assert (plausible_words(region, 1) != plausible_words(region, 2)).float().mean() > 0.9


def test_the_poisons_are_those_of_a_case():
    assert (LOUD, PLAUSIBLE, STALE) == (0, 1, 2), "the numbers that the kernel knows"
