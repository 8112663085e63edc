"""What this project changes in Triton's interpreter, and that a launch leaves `triton.language` as it was."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from support import DEVICE

from dsa_verify.graphs.interpreter import prepare_interpreter

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels are interpreted on a CPU alone")


@pytest.fixture(autouse=True)
def prepared() -> None:
    prepare_interpreter()


@triton.jit
def _twice(value):
    return value + value


@triton.jit
def _sums(source, out, count, wanted, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    value = tl.load(source + lane, mask=(lane < count) & wanted, other=0)
    for _ in range(3):
        value = _twice(value)
    tl.store(out + lane, tl.cumsum(value, axis=0))


@tl.core.builtin
def _load_of_ones(pointer, mask=None, other=None, _semantic=None):
    return tl.core.full(pointer.shape, 1, tl.int32, _semantic=_semantic)


def sums(values: list[int], wanted: bool = True) -> list[int]:
    source = torch.tensor(values, dtype=torch.int32)
    out = torch.zeros(8, dtype=torch.int32)
    _sums[(1,)](source, out, len(values), wanted, LANES=8)
    return out.tolist()


def test_device_functions_and_library_functions_are_interpreted_in_every_launch() -> None:
    for _ in range(2):
        assert sums([1, 2, 3]) == [8, 24, 48, 48, 48, 48, 48, 48]


def test_a_launch_looks_up_the_functions_of_the_language_only_if_one_was_replaced() -> None:
    sums([1])
    with mock.patch.object(interpreter, "_patch_lang_core", wraps=interpreter._patch_lang_core) as looked_up:
        sums([1])
        assert looked_up.call_count == 0
        with mock.patch.object(tl, "load", _load_of_ones):
            assert sums([1, 2]) == [8, 16, 24, 32, 40, 48, 56, 64]
        assert looked_up.call_count == 2, "once for each of the names of the language"
    assert sums([1, 2]) == [8, 24, 24, 24, 24, 24, 24, 24]


def test_a_launch_leaves_the_language_as_it_was() -> None:
    sums([1])
    assert tl.core.is_builtin(tl.load)
    assert tl.core.is_builtin(tl.core.load)
    assert tl.core.is_builtin(tl.tensor.__add__)


def test_a_launch_that_raises_leaves_the_language_as_it_was() -> None:
    @triton.jit
    def fails(out):
        tl.static_assert(False, "on purpose")

    with pytest.raises(Exception, match="on purpose"):
        fails[(1,)](torch.zeros(1))
    assert tl.core.is_builtin(tl.load)
    assert sums([1, 2]) == [8, 24, 24, 24, 24, 24, 24, 24]


def test_a_scalar_condition_may_be_part_of_a_mask() -> None:
    assert sums([1, 2, 3], wanted=False) == [0] * 8


def test_a_sum_beyond_32_bits_wraps_as_it_does_on_a_gpu() -> None:
    assert sums([2**29])[0] == 0


def test_types_of_one_shape_share_it_and_what_is_no_shape_is_refused_every_time() -> None:
    first, second = tl.block_type(tl.int32, [4, 8]), tl.block_type(tl.float32, [tl.constexpr(4), 8])
    assert first.shape is second.shape
    assert (first.numel, first.name, second.name) == (32, "<['4', '8'], int32>", "<['4', '8'], fp32>")
    assert (first == tl.block_type(tl.int32, [4, 8]), first == second) == (True, False)
    for wrong in ([4.0, 8], [3, 8]):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match="Shape element 0"):
                tl.block_type(tl.int32, wrong)


@triton.jit
def _operations(source, wide, out, count, ROWS: tl.constexpr, LANES: tl.constexpr):
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    value = tl.load(source + lane)  # int32, and `wide` int64
    of_both = 0 + value + tl.load(wide + row)
    table = (of_both * 3 - row + (-(2**31))) // 7 + (5 - value) % 4
    table = tl.where((lane < count) & (row >= 1) & (lane != 2), table, -1)
    tl.store(out + (row * LANES + lane), table)
    tl.store(out + ROWS * LANES, tl.sum(tl.sum(value.to(tl.uint32) + 1, axis=1), axis=0) + count)


def test_operands_of_all_types_and_shapes_give_what_they_give_in_torch() -> None:
    for count in (3, 2, 3):
        source = torch.tensor([4, -7, 2**31 - 1, -(2**31)], dtype=torch.int32)
        wide = torch.tensor([9, -(2**40)], dtype=torch.int64)
        out = torch.zeros(9, dtype=torch.int64)
        _operations[(1,)](source, wide, out, count, ROWS=2, LANES=4)
        row, lane = torch.arange(2)[:, None], torch.arange(4)[None, :]
        sums = (source + wide[:, None]) * 3 - row - 2**31
        wrapped = (5 - source.long() + 2**31) % 2**32 - 2**31  # int32, where 5 - value does not fit
        table = torch.div(sums, 7, rounding_mode="trunc") + torch.fmod(wrapped, 4)
        table = torch.where((lane < count) & (row >= 1) & (lane != 2), table, -1)
        total = int(((source.long() % 2**32) + 1).sum()) % 2**32 + count
        assert out.tolist() == [*table.flatten().tolist(), total]


@triton.jit
def _out_of_range(out, VALUE: tl.constexpr, UNSIGNED: tl.constexpr):
    value = tl.load(out + tl.arange(0, 4))
    if UNSIGNED:
        value = value.to(tl.uint32)
    tl.store(out + tl.arange(0, 4), (value + VALUE).to(tl.int32))


@triton.jit
def _ill_matched(out):
    tl.store(out + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, 8))


def test_operands_that_do_not_fit_are_refused_every_time() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(Exception, match="2147483648 is out of range"):
            _out_of_range[(1,)](out, VALUE=2**31, UNSIGNED=False)
        with pytest.raises(Exception, match="negative scalar"):
            _out_of_range[(1,)](out, VALUE=-1, UNSIGNED=True)
        with pytest.raises(Exception, match="incompatible dimensions"):
            _ill_matched[(1,)](out)
    _out_of_range[(1,)](out, VALUE=2**31 - 1, UNSIGNED=False)
    assert out.tolist() == [2**31 - 1] * 4 + [0] * 4
