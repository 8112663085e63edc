"""Setup: how an overlay was attached; and Shared: what all its buckets have in common on their device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.system import System

if TYPE_CHECKING:
    from dsa_verify.overlay.launch import Facts, Mailbox, OwnStream
    from dsa_verify.overlay.ring import CaptureRing

Reference = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The arguments of `Overlay.attach`, as they were checked there."""

    system: System
    geometry: Geometry
    directory: Path
    rank: int
    first: int | None
    every: int
    fields: tuple[str, ...] | None
    input_names: Mapping[str, str] | None
    output_names: Mapping[str, str] | None
    reference: Reference | None
    check_pad_rows: bool
    keep_rounds: int
    widest: int | None
    subject: str | None
    prepare_on_demand: bool
    max_bytes: int
    on_line: Callable[[Mapping[str, Any]], None] | None = None

    @property
    def path(self) -> Path:
        return self.directory / f"overlay-{self.system.name}-rank{self.rank}.jsonl"

    @property
    def reference_name(self) -> str:
        return "oracle" if self.reference is None else "own preparation"

    def to_dict(self) -> dict[str, Any]:
        return {
            "system": self.system.name,
            "rank": self.rank,
            "preset": self.geometry.preset,
            "geometry": self.geometry.overrides(),
            "reference": self.reference_name,
            "first": self.first,
            "every": self.every,
            "fields": self.fields,
        }


@dataclasses.dataclass(slots=True, kw_only=True)
class Shared:
    """All buckets of an overlay share this on its device. `kept`: the ring on its way to the host."""

    stream: OwnStream
    facts: Facts
    ring: CaptureRing | None = None
    kept: Mailbox | None = None

    @classmethod
    def of(cls, setup: Setup, bucket: int, inputs: Any) -> Shared:
        from dsa_verify.overlay.launch import Facts, Mailbox, OwnStream
        from dsa_verify.overlay.ring import CaptureRing
        from dsa_verify.overlay.sources import Sources

        layout = setup.system.layout(setup.geometry, bucket)
        device = Sources.of_inputs(layout, inputs, setup.input_names).device
        stream = OwnStream(device)
        made = cls(stream=stream, facts=Facts(device))
        if setup.keep_rounds:
            made.ring = CaptureRing(
                setup.system.name,
                setup.geometry,
                widest=setup.widest or bucket,
                device=device,
                rounds=setup.keep_rounds,
                subject=setup.subject,
            )
            made.kept = Mailbox(stream, made.ring.state)
        return made

    def ring_for(self, bucket: int) -> CaptureRing | None:
        """Return the ring, if it has room for rounds of `bucket`."""
        return self.ring if self.ring is not None and bucket <= self.ring.widest else None

    def ask_for_kept(self) -> None:
        if self.kept is not None:
            self.kept.ask()

    def kept_is_there(self, *, wait: bool) -> bool:
        """Return whether nothing of the ring is under way."""
        return self.kept is None or not self.kept.asked or self.kept.ready(wait=wait)


def compared(layout: Layout, names: Sequence[str] | None) -> Layout:
    """Return the fields of `layout` that are compared, which `names` names (None: all); a view whose owner is not among
    them is compared as itself. UsageError for a name of no field, or none at all."""
    unknown = [name for name in names or () if name not in layout]
    if unknown or (names is not None and not names):
        has = ", ".join(field.name for field in layout)
        raise UsageError(f"fields: {', '.join(unknown) or 'an empty list'}; the fields of {layout.system} are {has}")
    return layout.without([field.name for field in layout if names is not None and field.name not in names])
