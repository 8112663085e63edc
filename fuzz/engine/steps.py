"""Steps are what the simulator does in one round, by name. Those of ENGINE are what serving engines do; the others,
the regimes of expansion.py among them, lie outside of that. Each can follow any other, so that all pairs are visited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.system import System
from fuzz.engine.expansion import Stream
from fuzz.engine.expansion import regimes as outside_regimes
from fuzz.engine.limits import most_requests

AIMED: Final = "aimed"
ON_DEMAND: Final = "on demand"
_OF_SEVERAL: Final = ("shared prefix", "shuffle")  # need two requests


class SimulatedEngine(Protocol):
    """A step asks this of the simulated engine (simulator.py)."""

    live: list[Any]
    most: int
    buckets: tuple[int, ...]

    def draw(self, stream: int, span: int) -> int: ...
    def admit(self) -> None: ...
    def finish(self, at: int, *, swap: bool = False) -> None: ...
    def preempt(self) -> None: ...
    def resume(self) -> None: ...
    def move_row(self, at: int) -> None: ...
    def move_pages(self, at: int) -> None: ...
    def share(self, at: int) -> None: ...
    def shuffle(self) -> None: ...
    def fill(self) -> None: ...
    def shrink(self, count: int) -> None: ...
    def smallest_bucket(self, requests: int) -> int: ...
    def emit(self, bucket: int | None = None) -> Round: ...


def names_of(
    system: System, geometry: Geometry, buckets: Sequence[int], *, outside: bool = True, steered: bool = True
) -> tuple[str, ...]:
    """Return the steps of a simulator, in a fixed order; each can follow any other."""
    most = max(most_requests(system, geometry, bucket) for bucket in buckets)
    names = [name for name in ENGINE if most > 1 or name not in _OF_SEVERAL]
    if len(buckets) == 1:
        names.remove("wider bucket")
    if outside:
        names += [*outside_regimes(system, geometry), ON_DEMAND]
        names += [AIMED] if steered else []
    return tuple(names)


def _admit(simulator: SimulatedEngine) -> None:
    for _ in range(1 + simulator.draw(Stream.COUNT, max(simulator.most // 2, 1))):
        simulator.admit()


def _finish(simulator: SimulatedEngine) -> None:
    if simulator.live:
        simulator.finish(simulator.draw(Stream.WHICH, len(simulator.live)), swap=bool(simulator.draw(Stream.ORDER, 2)))


def _preempt(simulator: SimulatedEngine) -> None:
    if simulator.live:
        simulator.preempt()


def _one(change: Callable[[SimulatedEngine, int], None]) -> Callable[[SimulatedEngine], None]:
    def step(simulator: SimulatedEngine) -> None:
        if simulator.live:
            change(simulator, simulator.draw(Stream.WHICH, len(simulator.live)))

    return step


def _idle(simulator: SimulatedEngine) -> Round:
    """An idle rank replays with the others, though it has nothing to do (contract 7)."""
    waiting, simulator.live = simulator.live, []
    round_ = simulator.emit(simulator.buckets[simulator.draw(Stream.BUCKET, len(simulator.buckets))])
    simulator.live = waiting
    return round_


def _wider_bucket(simulator: SimulatedEngine) -> Round:
    """Another rank of the data-parallel group has more requests, so this one pads its batch further."""
    least = simulator.smallest_bucket(len(simulator.live))
    wider = [bucket for bucket in simulator.buckets if bucket > least] or [least]
    return simulator.emit(wider[simulator.draw(Stream.BUCKET, len(wider))])


ENGINE: Final[dict[str, Callable[[SimulatedEngine], Round | None]]] = {
    "steady": lambda simulator: None,
    "admit": _admit,
    "finish": _finish,
    "preempt": _preempt,
    "resume": lambda simulator: simulator.resume(),
    "other row": _one(lambda simulator, at: simulator.move_row(at)),
    "other pages": _one(lambda simulator, at: simulator.move_pages(at)),
    "shared prefix": _one(lambda simulator, at: simulator.share(at)),
    "idle": _idle,
    "wider bucket": _wider_bucket,
    "shuffle": lambda simulator: simulator.shuffle(),
    "fill": lambda simulator: simulator.fill(),
    "drain": lambda simulator: simulator.shrink(1),
}
# Of all others the requests first grow by the tokens that were accepted.
WITHOUT_GROWTH: Final = ("idle", "fill")
