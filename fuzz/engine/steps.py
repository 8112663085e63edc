"""Regimes: what the world does in one round, by name. Those of ENGINE are what serving engines do; the others step
outside of that. Each can follow any other, so that all pairs of them can be visited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.system import System
from fuzz.engine.expansion import Lane
from fuzz.engine.expansion import regimes as outside_regimes
from fuzz.engine.limits import most_requests

AIMED: Final = "aimed"
ON_DEMAND: Final = "on demand"
_OF_SEVERAL: Final = ("shared prefix", "shuffle")  # need two requests


class World(Protocol):
    """What a step asks of the simulated engine (world.py), which plays the steps."""

    live: list[Any]
    most: int
    buckets: tuple[int, ...]

    def draw(self, lane: int, span: int) -> int: ...
    def accept(self) -> None: ...
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
    """The regimes of a world, in a fixed order; each can follow any other."""
    most = max(most_requests(system, geometry, bucket) for bucket in buckets)
    names = [name for name in ENGINE if most > 1 or name not in _OF_SEVERAL]
    if len(buckets) == 1:
        names.remove("wider bucket")
    if outside:
        names += [*outside_regimes(system, geometry), ON_DEMAND]
        names += [AIMED] if steered else []
    return tuple(names)


def _steady(world: World) -> None:
    world.accept()


def _admit(world: World) -> None:
    world.accept()
    for _ in range(1 + world.draw(Lane.COUNT, max(world.most // 2, 1))):
        world.admit()


def _finish(world: World) -> None:
    world.accept()
    if world.live:
        world.finish(world.draw(Lane.WHICH, len(world.live)), swap=bool(world.draw(Lane.ORDER, 2)))


def _preempt(world: World) -> None:
    world.accept()
    if world.live:
        world.preempt()


def _resume(world: World) -> None:
    world.accept()
    world.resume()


def _one(change: Callable[[World, int], None]) -> Callable[[World], None]:
    def regime(world: World) -> None:
        world.accept()
        if world.live:
            change(world, world.draw(Lane.WHICH, len(world.live)))

    return regime


def _idle(world: World) -> Round:
    """An idle rank replays with the others, though it has nothing to do (contract 7)."""
    waiting, world.live = world.live, []
    round_ = world.emit(world.buckets[world.draw(Lane.BUCKET, len(world.buckets))])
    world.live = waiting
    return round_


def _wider_bucket(world: World) -> Round:
    """Another rank of the data-parallel group has more requests, so this one pads its batch further."""
    world.accept()
    least = world.smallest_bucket(len(world.live))
    wider = [bucket for bucket in world.buckets if bucket > least] or [least]
    return world.emit(wider[world.draw(Lane.BUCKET, len(wider))])


def _shuffle(world: World) -> None:
    world.accept()
    world.shuffle()


def _fill(world: World) -> None:
    world.fill()


def _drain(world: World) -> None:
    world.accept()
    world.shrink(1)


ENGINE: Final[dict[str, Callable[[World], Round | None]]] = {
    "steady": _steady,
    "admit": _admit,
    "finish": _finish,
    "preempt": _preempt,
    "resume": _resume,
    "other row": _one(lambda world, at: world.move_row(at)),
    "other pages": _one(lambda world, at: world.move_pages(at)),
    "shared prefix": _one(lambda world, at: world.share(at)),
    "idle": _idle,
    "wider bucket": _wider_bucket,
    "shuffle": _shuffle,
    "fill": _fill,
    "drain": _drain,
}
