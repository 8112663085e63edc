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


def sums(values: list[int], wanted: bool = True) -> list[int]:
    source = torch.tensor(values, dtype=torch.int32)
    out = torch.zeros(8, dtype=torch.int32)
    _sums[(1,)](source, out, len(values), wanted, LANES=8)
    return out.tolist()


def test_device_functions_and_library_functions_are_interpreted_in_every_launch() -> None:
    for _ in range(2):
        assert sums([1, 2, 3]) == [8, 24, 48, 48, 48, 48, 48, 48]


def test_a_launch_goes_through_the_namespace_no_oftener_than_its_modules_demand() -> None:
    """Once for the kernel's own module, and once for that of `tl.cumsum`, which knows the language by two names,
    however many device functions are called."""
    with mock.patch.object(interpreter, "_patch_lang_core", wraps=interpreter._patch_lang_core) as patched:
        sums([1, 2, 3])
    assert patched.call_count == 3


def test_a_launch_leaves_the_language_as_it_was() -> None:
    sums([1])
    assert tl.core.is_builtin(tl.load)
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
