"""GroupedCopy: many tensors copied in one launch, rows picked by an index where a piece has one, all of them only if a
word on the device says so.

What a live server holds is copied in one go, so that a check holds the server's stream up by one small kernel. A row
that an index does not legally name becomes row 0: what the server holds may be wrong, and a diagnostic must not be
what takes the device down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dsa_verify.overlay.piece import Piece


class GroupedCopy:
    """Copies `pieces` on `device`; `when`: int32 [1] on the device, nothing is copied while it is 0.

    On a CUDA device addresses are fixed here, so that a graph that captured `launch` holds as long as this object
    does: it keeps every tensor alive.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device, when: torch.Tensor | None = None):
        self._pieces = [piece for piece in pieces if piece.to.numel()]
        self._when = when
        self._launch: Callable[[], None] | None = None
        if device.type == "cuda":
            from dsa_verify.overlay.copies_kernel import CopyTable

            self._launch = CopyTable(self._pieces, device, when).launch

    def launch(self) -> None:
        """Copy; asynchronous and capturable on a CUDA device."""
        if self._launch is not None:
            self._launch()
        elif self._when is None or int(self._when):
            copy_plainly(self._pieces)


def copy_plainly(pieces: Sequence[Piece]) -> None:
    """Copy the same in plain torch, a launch or a few for each piece, as `GroupedCopy` does on a CPU."""
    for piece in pieces:
        source = piece.source
        if piece.index is not None:
            legal = (piece.index >= 0) & (piece.index < len(source))
            source = source.index_select(0, torch.where(legal, piece.index, 0))
            source = source[:, : piece.to.shape[1]]
        piece.to.copy_(source)
