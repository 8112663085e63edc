"""Outputs: whether the tensors that a subject gives are those of its layout, before any bit of them is compared."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dsa_verify.buffers.arena import TORCH_DTYPES
from dsa_verify.buffers.region import rows_are_whole
from dsa_verify.contract.layout import Field, Layout, Memory


def wrong_outputs(layout: Layout, outputs: Mapping[str, torch.Tensor]) -> list[str]:
    """Say in words which outputs are wrong; empty if all are right.

    A field of `layout` is wrong if it is missing, has another shape or dtype, or does not lie in memory as its
    consumers ask. An alias is wrong if it is not a view of its owner.
    """
    reasons = ((field, _why_wrong(field, outputs)) for field in layout)
    return [f"{field.name} {why}" for field, why in reasons if why]


def _why_wrong(field: Field, outputs: Mapping[str, torch.Tensor]) -> str:
    """Say what is wrong with the output of `field`; empty if nothing is."""
    tensor, cited = outputs.get(field.name), f" (contract {field.section})" if field.section else ""
    if tensor is None:
        return f"is missing ({field.form})"
    if tuple(tensor.shape) != field.shape or tensor.dtype != TORCH_DTYPES[field.dtype]:
        has = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        return f"is {has}, it must be {field.dtype} {list(field.shape)}{cited}"
    if not rows_are_whole(tensor):
        return f"has strides {list(tensor.stride())}; the elements of a row must be adjacent{cited}"
    if field.alias is not None and (text := no_view(field, tensor, outputs.get(field.alias))):
        return f"{text}{cited}"
    if field.memory is not None and (text := unfit_memory(field, field.memory, tensor)):
        return (
            f"{text} (contract {field.section}; {field.memory.source})" if cited else f"{text} ({field.memory.source})"
        )
    return ""


def unfit_memory(field: Field, memory: Memory, tensor: torch.Tensor) -> str:
    """Say why the consumer of `field` cannot read `tensor`, which has its shape; empty if it can."""
    if not tensor.is_contiguous():
        wanted = list(torch.empty(field.shape, device="meta").stride())
        return f"has strides {list(tensor.stride())}; {memory.consumer} needs it contiguous, with strides {wanted}"
    beyond = tensor.data_ptr() % memory.alignment
    if beyond:
        return (
            f"begins {beyond} bytes beyond a multiple of {memory.alignment}; {memory.consumer} reads "
            f"{memory.alignment} bytes at once and needs an address that is one"
        )
    return ""


def no_view(field: Field, tensor: torch.Tensor, owner: torch.Tensor | None) -> str:
    """Say why `tensor`, which has the shape of `field`, is not a view of `owner` in that shape.

    The text is empty if it is one, or if `owner` has other elements.
    """
    if owner is None or owner.numel() != tensor.numel():
        return ""
    if tensor.data_ptr() != owner.data_ptr():
        return f"must share its memory with {field.alias}"
    try:
        view = owner.view(field.shape)
    except RuntimeError:
        return f"must be a view of {field.alias}, whose strides {list(owner.stride())} allow none of this shape"
    # Nobody steps along a dimension of one element.
    steps = [i for i, size in enumerate(field.shape) if size > 1]
    if all(tensor.stride(i) == view.stride(i) for i in steps):
        return ""
    return f"has strides {list(tensor.stride())}, as a view of {field.alias} it must have {list(view.stride())}"
