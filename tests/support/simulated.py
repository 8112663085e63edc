"""What tests ask of the simulated engine beyond what a run does: specs from Hypothesis, whether its state is sound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.system import System
from dsa_verify.rounds.matrix import REMAPS_PER_ROUND
from fuzz.engine.expansion import RoundSpec
from fuzz.engine.simulator import EngineSimulator
from fuzz.engine.strategies import chosen_spec

SEEDS: Final = 1 << 16  # enough to differ, few enough to read


def specs(system: System, geometry: Geometry, buckets: Sequence[int]) -> SearchStrategy[RoundSpec]:
    """Specs drawn by Hypothesis; they shrink towards an idle round of the first bucket.

    Only scalars are drawn, and each evenly: Hypothesis's buffer is small, so bulk data would end an example early, and
    its default sizes are small too, so a large round before a small one would be rare.
    """

    @st.composite
    def drawn(draw: Any) -> RoundSpec:
        return chosen_spec(lambda values: draw(st.sampled_from(values)), system, geometry, buckets, range(SEEDS), 0)

    return drawn()


def jump(simulator: EngineSimulator, at: int, length: int) -> None:
    """Batch row `at` has another length from now on, longer or shorter."""
    request = simulator.live[at]
    shortest = max(simulator.shortest, simulator._least_length(request.row))
    request.length = min(max(length, shortest), simulator.longest)


def check(simulator: EngineSimulator) -> None:
    """Raise AssertionError if the simulator is in a state that no engine can be in."""
    live, free = simulator.live, simulator.free
    owned = [request.row for request in live if not request.shares]
    assert len(set(owned)) == len(owned), f"two requests own one row: {owned}"
    rows = {request.row for request in live}
    assert rows == set(owned), f"nobody owns what is shared: {rows - set(owned)}"
    assert rows.isdisjoint(free), f"a live request is on a free row: {rows & set(free)}"
    assert rows | set(free) == set(range(1, simulator.geometry.request_rows)), "a request row is lost"
    readers = Counter(request.row for request in live)
    assert readers == +simulator._readers, f"readers of rows are counted wrongly: {readers} and {simulator._readers}"
    assert len(live) <= simulator.most, f"{len(live)} requests are live, at most {simulator.most} fit"
    for request in live:
        assert simulator.shortest <= request.length <= simulator.geometry.context, f"length {request.length}"
        assert 1 <= request.accepted <= simulator.geometry.draft_tokens, f"{request.accepted} accepted"
        written = simulator._whole_pages(request.length)
        shared = simulator._shared_pages(request.row)
        assert shared <= written, f"row {request.row} shares {shared} pages, and writes behind {written}"
    assert len(simulator._moved) <= REMAPS_PER_ROUND, f"{len(simulator._moved)} rows move in one round"
