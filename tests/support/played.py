"""Campaigns whose shards are played by campaign_double/sitecustomize.py, so that what is tested is all that surrounds a
shard. The subject of such a plan says how its shards behave."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from dsa_verify.base.atomic_write import write_atomically
from fuzz.campaign.campaign import Limits, run_campaign
from fuzz.campaign.display import Display
from fuzz.campaign.executors import Pool, open_pool
from fuzz.campaign.plan import Plan, load_or_create_plan
from fuzz.campaign.report import summary
from fuzz.campaign.shard_folder import read_progress, shard_folder
from fuzz.campaign.state import CampaignState

ROUNDS = 48  # of a played shard
SHARDS = 4  # of the campaign that the fixtures `undisturbed` and `ended` give
HELD_AT = 16  # the round at which it waits while it is held
PATIENCE_S = 150.0
PYTHONPATH = os.pathsep.join(map(str, (Path(__file__).parent / "campaign_double", Path(__file__).parents[2])))


def plan_of(behaviour: str, **rest: Any) -> Plan:
    return Plan(systems=("decode",), subject=behaviour, rounds_a_shard=ROUNDS, device="cpu", **rest)


def values_of(plan: Plan) -> dict[str, Any]:
    """As load_or_create_plan takes them."""
    return {name: getattr(plan, name) for name in ("systems", "subject", "rounds_a_shard", "device")}


def run(
    root: Path,
    behaviour: str,
    shards: int = 1,
    *,
    timeout_s: float = 20.0,
    budget_s: float | None = None,
    pool: Pool | None = None,
    said: io.StringIO | None = None,
) -> int:
    """Run or resume a campaign in `root`, by `pool` or else two threads; what it says goes to `said`."""
    plan = load_or_create_plan(root, values_of(plan_of(behaviour)), {})
    limits = Limits(budget_s=budget_s, max_rounds=shards * ROUNDS, timeout_s=timeout_s)
    display = Display(Console(file=said or io.StringIO(), width=1000))
    if pool is not None:
        return run_campaign(root, plan, limits, pool, display)
    with open_pool("local", "cpu", 2) as local:
        return run_campaign(root, plan, limits, local, display)


def facts_of(root: Path) -> dict[str, Any]:
    return summary(CampaignState.read(root))


def shown(facts: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What two campaigns that found the same have in common: each finding once, its shards counted, its case."""
    return [(f["key"], f["state"], f["sightings"], f["shard"], f["path"]) for f in facts["findings"]]


def hold(root: Path) -> None:
    """Let the shards of the campaign in `root` wait at round HELD_AT."""
    write_atomically(root / "hold", "")


def let_go(root: Path) -> None:
    (root / "hold").unlink()


def wait_until(condition: Callable[[], bool]) -> None:
    """AssertionError if it does not come true within PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s"
        time.sleep(0.02)


def is_held(root: Path, number: int = 0) -> bool:
    """Whether the shard has come to where it waits."""
    return read_progress(shard_folder(root, number))["rounds"] == HELD_AT
