"""Piece: one tensor that is copied to another, seen as rows of int32 words."""

from __future__ import annotations

import dataclasses

import torch

from dsa_verify.buffers.region import as_words


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """`source` is copied to `to`, both int32 [rows, words] with unit column stride; with `index` (int64 or int32
    [rows]) row r of `to` is row index[r] of `source`."""

    to: torch.Tensor
    source: torch.Tensor
    index: torch.Tensor | None = None

    @classmethod
    def of(cls, to: torch.Tensor, source: torch.Tensor, index: torch.Tensor | None = None) -> Piece:
        """Make a piece of tensors of equal dtype whose rows are whole, and of equal shape where there is no `index`."""
        return cls(to=as_words(to), source=as_words(source), index=index)
