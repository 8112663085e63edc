"""A snapshot is judged as a live server is: by one check of an overlay, over tensors of the file instead of live ones.

So legal inputs, the oracle, the comparison of live elements and the words for a difference are those of the overlay.
What needs other rounds cannot be said: whether a value is stale, and since when.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from typing import Any

from dsa_verify.base.errors import UsageError
from dsa_verify.overlay.overlay import Overlay
from dsa_verify.overlay.snapshot_file import Snapshot
from dsa_verify.overlay.summary import Summary


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is wrong with one field or input. `kind`: difference or input. `differing`: words that differ. `elements`:
    the first of them as (row, column, got, want). `section`: where the contract states the rule."""

    kind: str
    field: str
    sentence: str
    diagnosis: str | None
    differing: int
    elements: tuple[tuple[int, int, int, int], ...]
    section: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """`found`: what is wrong, inputs first, since outputs follow from them. `summary`: of the check."""

    found: tuple[Found, ...]
    summary: Summary


def judge(snapshot: Snapshot) -> Judged:
    """Judge one step. UsageError for a system of which no single step can be judged, or if it cannot be checked."""
    lines: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dsa-verify-judge-") as folder:
        overlay = Overlay.attach(
            system=snapshot.system.name,
            geometry=snapshot.geometry,
            directory=folder,
            fields=tuple(snapshot.outputs),
            keep_rounds=0,
            on_line=lines.append,
        )
        overlay.prepare(snapshot.bucket, snapshot.inputs, snapshot.outputs)
        overlay.check(
            raw_batch=snapshot.raw_batch, bucket=snapshot.bucket, inputs=snapshot.inputs, outputs=snapshot.outputs
        )
        summary = overlay.close()
    if summary.could_not_run:
        raise UsageError(f"the snapshot could not be checked: {'; '.join(summary.could_not_run)}")
    names = [field.name for field in dataclasses.fields(Found)]
    found = [Found(**{name: line[name] for name in names}) for line in lines if line["kind"] in ("input", "difference")]
    return Judged(found=tuple(found), summary=summary)
