"""The JSON document of a run: flat for one system, a list under `runs` with totals at the top for several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsa_verify.run.runner import RESULT_SCHEMA, RunResult, total


def of(runs: Sequence[RunResult], status: int) -> dict[str, Any]:
    """The document of `runs` that ended with exit `status`."""
    if len(runs) == 1:
        return {**runs[0].to_dict(), "status": status}
    return {
        "schema": RESULT_SCHEMA,
        "status": status,
        **total(runs).to_dict(),
        "wall_s": round(sum(run.wall_s for run in runs), 3),
        "runs": [run.to_dict() for run in runs],
    }
