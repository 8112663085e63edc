"""OwnForm: where the metadata of an engine is right in another form than the contract's, as data, so that it is still
judged there and not left out.

An engine may serve all captured batches from one buffer, keep lengths that the contract has as one tensor in two, and
give the rows of pad requests values of its own. The judge is shown a copy in which rows of pad requests that hold
exactly the engine's own value have become what the contract has; any other value stays as it is and is a finding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

import torch

from dsa_verify.contract import Field, Layout, Row
from dsa_verify.errors import UsageError
from dsa_verify.regions import Control
from dsa_verify.rounds import PAD_REQUEST
from dsa_verify.subject import Inputs, SubjectFactory

_PADDED_ROWS: Final = (Row.REQUEST, Row.TOKEN)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PadRows:
    """What the rows of a pad request hold: `value` in the first `columns` of them (0: in all), anything beyond."""

    value: int
    columns: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnForm:
    """`pads`: by field, what rows of pad requests hold; in a round without a request that the engine can be given they
    are not judged. `aliases`: by field, which field it is a view of (None: of none). `shared`: every buffer serves all
    captured batches. `outside(inputs)`: bool [bucket] on the device, requests that the engine cannot be given, whose
    rows are not judged; of pad requests it may say anything.
    """

    pads: Mapping[str, PadRows] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    shared: bool = False
    outside: Callable[[Inputs], torch.Tensor] | None = None

    def layout(self, layout: Layout) -> Layout:
        """`layout` as the engine has it."""
        fields = tuple(
            dataclasses.replace(
                field, alias=self.aliases.get(field.name, field.alias), shared=self.shared or field.shared
            )
            for field in layout
        )
        return dataclasses.replace(layout, fields=fields)

    def rows(
        self,
        layout: Layout,
        got: Mapping[str, torch.Tensor],
        want: Mapping[str, torch.Tensor],
        inputs: Inputs,
        control: Control,
    ) -> dict[str, OwnRows]:
        """By field of `layout` that has rows of its own value, what the judge is shown instead.

        UsageError for a field whose rows stand for no request.
        """
        for name in self.pads:
            if name in layout and layout[name].row not in _PADDED_ROWS:
                raise UsageError(f"own_form: pads: the rows of {name} stand for no request; leave it out")
        return {
            field.name: OwnRows(field, rule, got[field.name], want[field.name], inputs, control, self.outside)
            for field in layout
            if (rule := self.pads.get(field.name)) is not None and field.alias is None
        }


CONTRACT_FORM: Final = OwnForm()


def own_form(factory: SubjectFactory) -> OwnForm:
    """The form of the subjects of `factory`: of its static method `own_form() -> OwnForm`, if it has one."""
    ask = getattr(factory, "own_form", None)
    form: OwnForm = CONTRACT_FORM if ask is None else ask()
    return form


class OwnRows:
    """`copy`: like `got`, with what is right of pad requests and of requests outside become what `want` has."""

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
        """By batch row, whether its rows are held against the oracle as they are; reads the device."""
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
