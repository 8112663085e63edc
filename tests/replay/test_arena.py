"""Arena: every byte is a buffer's or a guard's, aliases alias, shared buffers are prefixes of one allocation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import DEVICE, small

from dsa_verify.buffers import arena as arena_module
from dsa_verify.buffers.arena import ALIGNMENT_BYTES, GUARD_WORD, Arena, Identity
from dsa_verify.buffers.region import LOUD_WORD
from dsa_verify.contract.geometry import Geometry
from dsa_verify.systems.catalogue import SYSTEMS

LEAST_GUARD_BYTES = 512
FILL = LOUD_WORD

buckets_of = st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True)
# The others ask more of a geometry than the ones drawn here.
BASIC = ("decode", "target_verify", "draft_extend", "mtp")


def make_arena(system: str, geometry: Geometry, buckets: list[int]) -> Arena:
    return Arena([SYSTEMS[system].layout(geometry, bucket) for bucket in buckets], DEVICE, FILL)


def owned(arena: Arena) -> dict[tuple[str, int], torch.Tensor]:
    """Every buffer that owns memory once, a shared one at its widest."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    for bucket in sorted(arena.layouts):  # the widest last
        for field in arena.layouts[bucket]:
            if field.alias is None:
                found[(field.name, 0 if field.shared else bucket)] = arena.at(bucket)[field.name]
    return found


def check_guards(arena: Arena) -> None:
    """Buffers and guards tile the slab, alternately, and every guard is wide enough."""
    base = arena.words.data_ptr()
    pieces = [(guard.words.data_ptr() - base, guard.words.numel() * 4, "guard") for guard in arena.guards]
    pieces += [(t.data_ptr() - base, t.numel() * t.element_size(), "buffer") for t in owned(arena).values()]
    pieces.sort()
    assert [kind for _, _, kind in pieces] == ["guard", "buffer"] * (len(pieces) // 2) + ["guard"]
    end = 0
    for start, size, kind in pieces:
        assert start == end, "no byte lies outside of the buffers and the guards"
        assert kind == "buffer" or size >= LEAST_GUARD_BYTES
        end = start + size
    assert end == arena.words.numel() * 4


@given(st.sampled_from(BASIC), buckets_of, st.sampled_from([1, 4]), st.integers(1, 3))
def test_buffers_are_guarded_aligned_and_filled(system: str, buckets: list[int], page_size: int, n: int):
    geometry = small(system, page_size=page_size, draft_tokens=n if SYSTEMS[system].drafts else 1)
    arena = make_arena(system, geometry, buckets)
    check_guards(arena)
    for tensor in owned(arena).values():
        assert (tensor.data_ptr() - arena.words.data_ptr()) % ALIGNMENT_BYTES == 0
        assert (tensor == FILL).all()
    for guard in arena.guards:
        assert (guard.words == GUARD_WORD).all()


def test_the_guard_check_sees_narrow_guards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arena_module, "GUARD_BYTES", LEAST_GUARD_BYTES - 4)
    with pytest.raises(AssertionError):
        check_guards(make_arena("decode", small(), [3]))


def test_guards_name_their_neighbours():
    arena = make_arena("decode", small(), [2])
    names = [name for name, _ in owned(arena)]
    assert [(guard.after, guard.before) for guard in arena.guards] == list(
        zip([None, *names], [*names, None], strict=True)
    )


@given(st.sampled_from(BASIC), buckets_of, st.sampled_from([1, 4]))
def test_tensors_have_the_form_of_their_fields(system: str, buckets: list[int], page_size: int):
    geometry = small(system, page_size=page_size, draft_tokens=2 if SYSTEMS[system].drafts else 1)
    arena = make_arena(system, geometry, buckets)
    for bucket, layout in arena.layouts.items():
        tensors = arena.at(bucket)
        assert list(tensors) == [field.name for field in layout]
        for field in layout:
            tensor = tensors[field.name]
            assert tuple(tensor.shape) == field.shape
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()
            if field.alias is not None:
                assert tensor.data_ptr() == tensors[field.alias].data_ptr()


def test_an_alias_of_the_same_shape_is_the_very_object():
    tensors = make_arena("decode", small(page_size=1), [3]).at(3)
    assert tensors["dsa_seqlens_expanded"] is tensors["cache_seqlens_int32"]
    assert tensors["real_page_table"] is tensors["page_table_1"]
    view = tensors["paged_mqa_ctx_lens_2d"]
    tensors["cache_seqlens_int32"].copy_(torch.arange(3))
    assert view.tolist() == [[0], [1], [2]]


@given(st.sampled_from(BASIC), buckets_of)
def test_shared_buffers_are_prefixes_and_private_ones_are_apart(system: str, buckets: list[int]):
    arena = make_arena(system, small(system), buckets)
    for field in arena.layouts[buckets[0]]:
        if field.alias is not None:
            continue
        pointers = {arena.at(bucket)[field.name].data_ptr() for bucket in buckets}
        assert len(pointers) == (1 if field.shared else len(buckets))


@given(st.sampled_from(BASIC), buckets_of)
def test_beyond_is_what_a_bucket_does_not_own(system: str, buckets: list[int]):
    arena = make_arena(system, small(system), buckets)
    widest = arena.at(max(buckets))
    assert arena.wider_bucket_rows(max(buckets)) == {}
    for bucket in buckets:
        layout, mine, wider = arena.layouts[bucket], arena.at(bucket), arena.wider_bucket_rows(bucket)
        shared = {field.name for field in layout if field.shared}
        assert set(wider) == (shared if bucket < max(buckets) else set())
        for name, rows in wider.items():
            mine[name].fill_(1)
            rows.fill_(2)
            assert (mine[name] == 1).all()
            assert (widest[name][: layout[name].rows] == 1).all()
            assert (widest[name][layout[name].rows :] == 2).all()
            assert len(mine[name]) + len(rows) == len(widest[name])


def test_at_gives_the_same_addresses_each_time():
    arena = make_arena("target_verify", small(draft_tokens=2), [3, 2])
    for bucket in (3, 2):
        first = {name: Identity.of(tensor) for name, tensor in arena.at(bucket).items()}
        assert first == {name: Identity.of(tensor) for name, tensor in arena.at(bucket).items()}


def test_identity_says_what_changed():
    tensor = torch.zeros(4, 6, dtype=torch.int32)
    identity = Identity.of(tensor)
    assert identity.change_to(Identity.of(tensor[:])) == ""
    assert identity.change_to(Identity.of(tensor.long())) == "dtype torch.int32 became torch.int64"
    assert identity.change_to(Identity.of(tensor[:3])) == "shape (4, 6) became (3, 6)"
    assert identity.change_to(Identity.of(tensor.as_strided((4, 6), (5, 1)))) == "stride (6, 1) became (5, 1)"
    moved = tensor.clone()
    text = f"pointer {tensor.data_ptr():#x} became {moved.data_ptr():#x}"
    assert identity.change_to(Identity.of(moved)) == text
    other = dataclasses.replace(identity, storage=identity.storage + 16)
    assert identity.change_to(other) == f"storage {identity.storage:#x} became {identity.storage + 16:#x}"
