"""Whatever a geometry says, it is refused in words or the project's own pipelines agree with the oracles in it."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from support import backend

from dsa_verify.base.errors import UsageError
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.systems.catalogue import SYSTEMS, resolve_geometry

ROUNDS = 4
VALUES: dict[str, list[Any]] = {
    "context": [1, 2, 5, 37, 63, 64, 65, 129, 257],
    "page_size": [1, 2, 4, 8, 16, 64],
    "topk": [1, 2, 4, 8, 64, 100, 256],
    "table_width": [1, 3, 7, 64, 129],
    "token_table_width": [64, 129, 500],
    "request_rows": [2, 9, 33],
    "first_page": [5, 100],
    "architecture": [100],
    "input_view": ["offset", "strided"],
    "index_dtype": ["int32"],
    "table_view": ["strided"],
    "wide_table": [False],
    "indexer": [False, True],
    "multiprocessors": [1, 2, 7],
    "schedule": ["V1", "V3", "V4", "V5", "V120", "JIT"],
    "draft_steps": [2, 3, 8],
    "padded_mode": ["verify", "draft_block", "draft_extend"],
    "window": [1, 7],
    "low_ratios": [True],
    "replay_floor": [5, 40],
    "index_align": [1, 128],
    "graph_tokens": [8, 40],
    "dcp_size": [2, 3, 8],
    "dcp_block": [2, 4],
    "heads": [1, 5],
    "head_dim": [1, 8],
    "log_base": ["e"],
}
overrides = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in VALUES.items()})


@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(sorted(SYSTEMS)),
    pooled=st.booleans(),
    changes=overrides,
    batch=st.sampled_from([1, 2, 3, 5]),
    draft=st.sampled_from([2, 3, 7, 16]),
)
def test_odd_geometries(name: str, pooled: bool, changes: dict[str, Any], batch: int, draft: int) -> None:
    system, device = SYSTEMS[name], backend()
    # They would be refused, and examples be lost.
    of_others = {size.name for other in SYSTEMS.values() for size in other.sizes} - {size.name for size in system.sizes}
    changes = {field: value for field, value in changes.items() if field not in of_others}
    preset = "tiny_v4" if name == "padded" else "tiny_pool" if pooled else "tiny"
    try:
        geometry, fixed = resolve_geometry(system, None, device.device.type, preset, changes)
        config, *_ = diagnostic_matrix(
            system, geometry, rounds=ROUNDS, batches=[batch], drafts=[draft] if system.drafts else None, fixed=fixed
        )
        setup = ReplaySetup.make(system, config.geometry, config.buckets, 0, None, None, device)
        counts = Counts()
        found = verify_rounds(setup, config.chunks(), counts, folder=None)
    except UsageError:
        reject()
    assert [finding.sentence for finding in found] == []
    assert counts.rounds_checked == ROUNDS
