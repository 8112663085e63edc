"""Rows of pad requests that hold an engine's own value, as the judge is shown them.

In a copy of the field, rows of pad requests that hold exactly what the engine's form says have become what the contract
has; any other value stays as it is and is a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.buffers.region import Control
from dsa_verify.contract.engine_form import EngineForm, PadRows
from dsa_verify.contract.layout import Field, Layout, Row
from dsa_verify.contract.static_inputs import PAD_REQUEST
from dsa_verify.contract.subject import Inputs

_PADDED_ROWS: Final = (Row.REQUEST, Row.TOKEN)


def normalised_pad_rows(
    form: EngineForm,
    layout: Layout,
    got: Mapping[str, torch.Tensor],
    want: Mapping[str, torch.Tensor],
    inputs: Inputs,
    control: Control,
) -> dict[str, NormalisedPadRows]:
    """Return what the judge is shown instead of each field of `layout` whose pad rows hold a value of the engine's own.

    UsageError for a field whose rows stand for no request.
    """
    for name in form.pads:
        if name in layout and layout[name].row not in _PADDED_ROWS:
            raise UsageError(f"engine_form: pads: the rows of {name} stand for no request; leave it out")
    return {
        field.name: NormalisedPadRows(field, rule, got[field.name], want[field.name], inputs, control, form.outside)
        for field in layout
        if (rule := form.pads.get(field.name)) is not None and field.alias is None
    }


class NormalisedPadRows:
    """Holds in `copy`, like `got`, what is compared: what is right of pad requests and of requests outside become what
    `want` has."""

    def __init__(
        self,
        field: Field,
        rule: PadRows,
        got: torch.Tensor,
        want: torch.Tensor,
        inputs: Inputs,
        control: Control,
        outside: Callable[[Inputs], torch.Tensor] | None,
    ):
        self._got, self._want = got, want
        self._inputs, self._control, self._outside = inputs, control, outside
        self._by_token, self._want_per_request = field.row is Row.TOKEN, field.one_row_per_request
        self._value = rule.value
        columns = torch.arange(field.columns, device=got.device)
        self._free = columns >= (rule.columns or field.columns)
        self._shape = (field.rows, field.columns)
        self.copy = torch.empty_like(got, memory_format=torch.contiguous_format)

    def judged(self) -> list[bool]:
        """Return for each batch row whether its rows are compared with the oracle as they are; reads the device."""
        unjudged = self._inputs.req_pool_indices == PAD_REQUEST
        if self._outside is not None:
            unjudged = unjudged | self._outside(self._inputs)
        return [not each for each in unjudged.tolist()]

    def update(self) -> None:
        """Reads `got` and `want`; asynchronous and capturable."""
        is_pad = self._inputs.req_pool_indices == PAD_REQUEST
        none = is_pad if self._outside is None else is_pad | self._outside(self._inputs)
        unjudged = (none & ~is_pad) | none.all()
        owner = self._control.row_request[: self._shape[0]].long() if self._by_token else slice(None)
        got, want = self._got.reshape(self._shape), self._want.reshape(self._want.shape[0], -1)
        want = want[owner] if self._want_per_request else want
        right = (is_pad[owner].unsqueeze(1) & ((got == self._value) | self._free)) | unjudged[owner].unsqueeze(1)
        self.copy.copy_(torch.where(right, want, got).view(self.copy.shape))
