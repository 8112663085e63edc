"""The shipped cases: one for each planted fault, as small as it gets, and what each once caught.

The cases plant nothing, so a right pipeline passes every one of them. `found` says what the rounds are there for: the
fault, as `dsa-verify replay CASE --fault` takes it, then the sentence of the finding, then, of some, a public bug of
the same kind.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from dsa_verify.contract.round import Scenario
from dsa_verify.rounds.case_file import read_case


def paths(system: str = "*", *, indexer: bool = True, fields: Collection[str] | None = None) -> list[Path]:
    """The case files, sorted by name: those of `system`, or all.

    For a pipeline that does not make every field, without those that it cannot pass: `indexer=False` leaves out the
    cases with the indexer's metadata, `fields` those with any other field than these.
    """
    found = sorted(Path(__file__).parent.glob(f"{system}-*.json"))
    return [path for path in found if (indexer and fields is None) or _covered(read_case(path), indexer, fields)]


def _covered(case: Scenario, indexer: bool, fields: Collection[str] | None) -> bool:
    if case.geometry.indexer and not indexer:
        return False
    if fields is None:
        return True
    from dsa_verify.systems.catalogue import get_system  # which imports torch

    layouts = [get_system(case.system).layout(case.geometry, bucket) for bucket in case.buckets]
    return all(field.name in fields for layout in layouts for field in layout)
