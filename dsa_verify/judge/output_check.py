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
    wrong = []
    for field in layout:
        tensor = outputs.get(field.name)
        if tensor is None:
            wrong.append(f"{field.name} is missing ({field.dtype} {list(field.shape)}, contract {field.section})")
        elif tuple(tensor.shape) != field.shape or tensor.dtype != TORCH_DTYPES[field.dtype]:
            wrong.append(
                f"{field.name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, "
                f"it must be {field.dtype} {list(field.shape)} (contract {field.section})"
            )
        elif not rows_are_whole(tensor):
            wrong.append(
                f"{field.name} has strides {list(tensor.stride())}; the elements of a row must be adjacent "
                f"(contract {field.section})"
            )
        elif field.alias is not None and (text := no_view(field, tensor, outputs.get(field.alias))):
            wrong.append(f"{field.name} {text} (contract {field.section})")
        elif field.memory is not None and (text := unfit_memory(field, field.memory, tensor)):
            wrong.append(f"{field.name} {text} (contract {field.section}; {field.memory.source})")
    return wrong


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
