"""Geometry: presets resolve, overrides survive the round trip, and each wrong size is refused with its limit."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import MAX_BATCH, MAX_CONTEXT_TOKENS, MAX_SLOTS, PRESETS, Geometry
from dsa_verify.contract.size import Size
from dsa_verify.contract.system import System
from dsa_verify.systems.catalogue import SYSTEMS

geometries = st.builds(
    lambda preset, overrides: Geometry.resolve(preset, overrides),
    st.sampled_from(sorted(PRESETS)),
    st.fixed_dictionaries(
        {"indexer": st.just(False)},  # what it refuses has tests of its own
        optional={
            "context": st.integers(64, 4096),
            "page_size": st.sampled_from([1, 2, 16, 64, 128]),
            "topk": st.integers(1, 2048),
            "pool_size": st.sampled_from([1, 2, 4, 8, 16]),
            "draft_tokens": st.integers(1, 16),
            "request_rows": st.integers(2, 40),
            "table_width": st.integers(0, 200),
            "architecture": st.sampled_from([90, 100]),
            "index_dtype": st.sampled_from(["int32", "int64"]),
            "input_view": st.sampled_from(["plain", "offset", "strided"]),
        },
    ),
)


@given(geometries)
def test_overrides_give_back_the_same_geometry(geometry: Geometry):
    overrides = geometry.overrides()
    assert Geometry.resolve(geometry.preset, overrides) == geometry
    assert all(value != PRESETS[geometry.preset].get(key) for key, value in overrides.items())


@given(geometries)
def test_derived_sizes_fit_together(geometry: Geometry):
    assert geometry.columns >= 1
    assert (geometry.pages - 1) * geometry.page_size < geometry.columns <= geometry.pages * geometry.page_size
    assert geometry.token_columns >= max(geometry.columns, geometry.context + geometry.draft_tokens)
    assert geometry.pages_per_row * geometry.allocator_page >= geometry.token_columns
    space = geometry.page_id_space
    assert space & (space - 1) == 0, "a power of two, so that an odd multiplier permutes it"
    assert space >= 4 * geometry.request_rows * geometry.pages_per_row
    assert (space + 1) * geometry.allocator_page == geometry.slots <= MAX_SLOTS


@pytest.mark.parametrize("system", [name for name in SYSTEMS if name != "dcp"])
def test_a_size_of_another_system_is_refused_by_name(system: str):
    with pytest.raises(UsageError) as caught:
        SYSTEMS[system].geometry("tiny", {"dcp_size": 2}, where="geometry.")
    assert str(caught.value) == "geometry.dcp_size: is a size of dcp alone; leave it out, or choose that system"
    with pytest.raises(AttributeError, match=r"this geometry has no 'dcp_size': it is a size of dcp"):
        SYSTEMS[system].geometry("tiny").dcp_size  # noqa: B018


def test_a_geometry_of_another_system_is_refused_with_the_way_to_one():
    with pytest.raises(UsageError) as caught:
        SYSTEMS["mtp"].check_geometry(Geometry.resolve("tiny"))
    assert str(caught.value) == (
        "geometry: it has not the sizes of mtp, which are draft_steps; make it by "
        "get_system('mtp').geometry('tiny', ...)"
    )


SIZES = [(system, size) for system in SYSTEMS.values() for size in system.sizes]


@pytest.mark.parametrize("system, size", SIZES, ids=[size.name for _, size in SIZES])
def test_a_system_keeps_to_the_limits_of_its_sizes(system: System, size: Size):
    """And each is an attribute, survives the round trip of a case, and a copy in another process."""
    usual = system.geometry(system.preset("cpu"))
    assert getattr(usual, size.name) == size.presets.get(usual.preset, size.default)
    others = {bool: [not size.default], int: [size.low, size.high], str: [*size.choices]}[type(size.default)]
    for value in others:
        geometry = usual.replace(**{size.name: value})
        assert getattr(geometry, size.name) == value
        assert geometry.overrides() == ({} if geometry == usual else {size.name: value})
        assert system.geometry(geometry.preset, geometry.overrides()) == geometry
        copy = pickle.loads(pickle.dumps(geometry))
        assert (copy, hash(copy)) == (geometry, hash(geometry))
    wrong = {bool: [1], int: [size.low - 1, size.high + 1, "2"], str: ["?", 1]}[type(size.default)]
    for value in wrong:
        with pytest.raises(UsageError, match=rf"^here\.{size.name}: .*{value}"):
            system.geometry(usual.preset, {size.name: value}, where="here.")


def test_sizes_of_a_system_are_declared_once_and_within_their_limits():
    def declared(*sizes: Size) -> None:
        dataclasses.replace(SYSTEMS["decode"], name="mine", sizes=sizes)

    with pytest.raises(UsageError, match="system 'mine': size 'topk' is there already; give it another name"):
        declared(Size(name="topk", default=1, low=1, high=2))
    with pytest.raises(UsageError, match="size 'pages' is there already"):
        declared(Size(name="pages", default=1, low=1, high=2))
    with pytest.raises(UsageError, match="system 'mine': depth: 'tinny' is no preset; remove it"):
        declared(Size(name="depth", default=1, low=1, high=2, presets={"tinny": 2}))
    with pytest.raises(UsageError, match="size 'depth' is there already"):
        declared(Size(name="depth", default=1, low=1, high=2), Size(name="depth", default=2, low=1, high=2))
    with pytest.raises(UsageError, match=r"system 'mine': depth: 3 is outside 1\.\.2"):
        declared(Size(name="depth", default=1, low=1, high=2, presets={"tiny": 3}))


def test_a_size_stands_in_a_case_where_it_stood_before_systems_declared_theirs():
    changes = {"plan_rules": "tiny", "draft_steps": 3, "indexer": True, "warm_ups": "together"}
    found = SYSTEMS["mtp"].geometry("tiny", changes).overrides()
    assert list(found) == ["warm_ups", "draft_steps", "indexer", "plan_rules"]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_has_no_overrides(preset: str):
    geometry = Geometry.resolve(preset)
    assert geometry.overrides() == {}
    assert geometry.columns == geometry.context
    assert geometry.replace(context=geometry.context - 1).overrides() == {"context": geometry.context - 1}


def test_the_models_are_those_of_the_contract():
    deepseek, glm = Geometry.resolve("deepseek_v32"), Geometry.resolve("glm53_flash")
    assert (deepseek.page_size, deepseek.allocator_page, deepseek.topk, deepseek.pool_size) == (64, 64, 2048, 1)
    assert (glm.page_size, glm.allocator_page, glm.topk, glm.pool_size) == (64, 256, 2048, 4)


WRONG = [
    ({"context": 0}, f"context: 0 is outside 1..{MAX_CONTEXT_TOKENS}; choose a value inside"),
    ({"context": MAX_CONTEXT_TOKENS + 1}, f"is outside 1..{MAX_CONTEXT_TOKENS}"),
    ({"page_size": 2048}, "page_size: 2048 is outside 1..1024"),
    ({"page_size": 3}, "page_size: 3 is not a power of two; use 1, 2, 4, ..."),
    ({"pool_size": 6}, "pool_size: 6 is not a power of two"),
    ({"pool_size": 32}, "pool_size: 32 is outside 1..16"),
    ({"topk": 0}, "topk: 0 is outside 1..2048"),
    ({"draft_tokens": 17}, "draft_tokens: 17 is outside 1..16"),
    ({"draft_tokens": -1}, "draft_tokens: -1 is outside 1..16"),
    ({"request_rows": 1}, f"request_rows: 1 is outside 2..{2 * MAX_BATCH + 1}"),
    ({"table_width": -1}, "table_width: -1 is outside"),
    ({"token_table_width": 100}, "token_table_width: 100 is below 204, what the context needs"),
    ({"index_dtype": "int16"}, "index_dtype: 'int16' is not one of int64, int32"),
    ({"input_view": "turned"}, "input_view: 'turned' is not one of plain, offset, strided"),
    ({"architecture": 80}, "architecture: 80 is not 90 or 100"),
    ({"wide_table": False, "page_size": 1}, "wide_table: false needs page_size > 1"),
    ({"wide_table": False, "draft_tokens": 2}, "draft_tokens 1"),
    ({"wide_table": False, "pool_size": 2}, "pool_size 1"),
    ({"pool_size": 4, "draft_tokens": 4, "context": 7}, "context: 7 is below draft_tokens + pool_size"),
    ({"context": 1 << 21, "request_rows": 2000}, "more than int32 holds"),
    ({"contxt": 5}, "'contxt': unknown geometry field; known fields: context, page_size"),
    ({"preset": "tiny"}, "'preset': unknown geometry field"),
    ({"context": "200"}, "context: '200' is str; it must be int"),
    ({"context": True}, "context: True is bool; it must be int"),
    ({"wide_table": 1}, "wide_table: 1 is int; it must be bool"),
]


@pytest.mark.parametrize("overrides, text", WRONG, ids=[str(overrides) for overrides, _ in WRONG])
def test_a_wrong_size_is_refused(overrides: dict[str, object], text: str):
    with pytest.raises(UsageError) as caught:
        Geometry.resolve("tiny", overrides, where="geometry.")
    assert text in str(caught.value)
    assert str(caught.value).startswith("geometry.")
    assert "\n" not in str(caught.value)


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(UsageError, match="'huge' is unknown; known presets: deepseek_v32"):
        Geometry.resolve("huge")


def test_replace_checks_too():
    with pytest.raises(UsageError, match="topk"):
        Geometry.resolve("tiny").replace(topk=0)


def test_limits_themselves_are_legal():
    geometry = Geometry.resolve("tiny", {"context": MAX_CONTEXT_TOKENS, "request_rows": 2, "draft_tokens": 16})
    assert geometry.slots <= MAX_SLOTS
    assert dataclasses.replace(geometry) == geometry
