"""A result that is remembered is taken only for a call that would give the same."""

from __future__ import annotations

import pytest
import torch
from support import DEVICE

from dsa_verify.base.errors import CaptureError
from dsa_verify.graphs.emulated import EmulatedBackend
from dsa_verify.graphs.known_results import key_of

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="a graph is emulated on a CPU alone")
ADD = torch.ops.aten.add.Tensor
A, B = torch.zeros(2, 3), torch.zeros(2, 3)


def key(*args: object, **kwargs: object) -> object:
    return key_of(ADD, args, kwargs, "cpu")


def test_a_call_with_equal_metadata_is_the_same_call() -> None:
    assert key(A, B) == key(B, A)
    assert key(A, A) == key(B, B)


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((A, A), {}),
        ((A, B.to(torch.int32)), {}),
        ((A, torch.zeros(3, 2).T), {}),
        ((A, torch.zeros(1, 3)), {}),
        ((A, 1), {}),
        ((A, B), {"alpha": 1}),
        ((A, B), {"alpha": True}),
    ],
)
def test_other_metadata_is_another_call(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    others = [key(A, B), key(A, 1.0), key(A, B, alpha=1.0)]
    assert key(*args, **kwargs) not in others


def test_nothing_is_remembered_of_what_is_not_metadata() -> None:
    assert key(A, torch.Generator()) is None
    assert key_of(ADD, (A, B), {}, "cuda") is None


def test_a_refused_operation_is_refused_every_time() -> None:
    backend = EmulatedBackend(DEVICE)
    out = torch.zeros(2)
    for _ in range(2):
        with pytest.raises(CaptureError, match="out= has shape"):
            backend.capture(lambda: torch.add(A, B, out=out))
