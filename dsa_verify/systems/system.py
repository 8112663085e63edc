"""System: a layout, its oracle and its shipped subjects, by reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.subject import Subject, load_attribute


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """`layout(geometry, bucket)`; `oracle` and `subjects` are `module:attribute` references to Subject factories.

    `by_default`: whether a run that names no system includes it. `presets`: the geometry that a run which names none
    uses, on a CUDA device and on a CPU.
    """

    name: str
    summary: str
    layout: Callable[[Geometry, int], Layout]
    oracle: str
    subjects: Mapping[str, str]
    drafts: bool
    by_default: bool = True
    presets: tuple[str, str] = ("deepseek_v32", "tiny")

    def preset(self, device_type: str) -> str:
        """The name of the preset for a device of this type."""
        return of_device(self.presets, device_type)

    def make_oracle(self) -> Subject:
        oracle: Subject = load_attribute(self.oracle)()
        return oracle


def of_device(presets: tuple[str, str], device_type: str) -> str:
    """Of (on a CUDA device, on a CPU) the one for `device_type`."""
    return presets[0] if device_type == "cuda" else presets[1]
