"""EngineForm declares where an engine's layout may differ from the contract, so that those fields are still compared.

An engine may serve all buckets from one buffer, keep lengths that the contract has as one tensor in two, and
give the rows of pad requests values of its own. How the judge takes that into account: judge/pad_rows.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

import torch

from dsa_verify.contract.layout import Layout
from dsa_verify.contract.subject import Inputs, SubjectFactory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PadRows:
    """Rows of a pad request hold `value` in their first `columns` elements (0: in all) and anything beyond."""

    value: int
    columns: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineForm:
    """The differences of an engine's layout from the contract. `pads`: by field, what rows of pad requests hold; in a
    round without a request that the engine can be given they are not judged. `aliases`: by field, which field it is a
    view of (None: of none). `shared`: every buffer serves all captured batches. `outside(inputs)`: bool [bucket] on the
    device, requests that the engine cannot be given, whose rows are not judged; of pad requests it may say anything."""

    pads: Mapping[str, PadRows] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    shared: bool = False
    outside: Callable[[Inputs], torch.Tensor] | None = None

    def layout(self, layout: Layout) -> Layout:
        """Return `layout` as the engine has it."""
        fields = tuple(
            dataclasses.replace(
                field, alias=self.aliases.get(field.name, field.alias), shared=self.shared or field.shared
            )
            for field in layout
        )
        return dataclasses.replace(layout, fields=fields)


NO_DIFFERENCES: Final = EngineForm()


def engine_form(factory: SubjectFactory) -> EngineForm:
    """Return what the static method `engine_form()` of `factory` declares, or `own_form()`, as it was called before; no
    differences if it has neither."""
    ask = getattr(factory, "engine_form", None) or getattr(factory, "own_form", None)
    form: EngineForm = NO_DIFFERENCES if ask is None else ask()
    return form
