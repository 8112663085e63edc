"""The JSON document of a run: flat for one system, a list under `runs` with totals at the top for several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsa_verify.base.writable import write
from dsa_verify.report import junit
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


def save(
    runs: Sequence[RunResult], status: int, json_path: Path | None, junit_path: Path | None = None, **more: object
) -> int:
    """Write the results to the files that are given, to JSON with `more`; the exit status that is earned then."""
    if json_path is not None:
        status = write(json_path, json.dumps({**of(runs, status), **more}, indent=2) + "\n", status)
    return status if junit_path is None else write(junit_path, junit.of(runs), status)
