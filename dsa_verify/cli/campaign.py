"""`dsa-verify campaign`: runs, resumes, reports on, merges and rechecks fuzzing campaigns.

It only parses options and prints; a campaign itself is in fuzz/campaign. Nothing here imports torch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click

from dsa_verify.base.errors import (
    STATUS_DEVICE_LOST,
    STATUS_EQUAL,
    STATUS_FLAKY,
    STATUS_MISMATCH,
    UsageError,
)
from dsa_verify.contract.geometry import parse_settings
from dsa_verify.systems.catalogue import get_system
from dsa_verify.systems.engines import engine_subject
from dsa_verify.waivers.waivers import choose_ledger, read_entries
from fuzz.campaign.campaign import Limits, run_campaign, writable_folder
from fuzz.campaign.display import Display
from fuzz.campaign.executors import open_pool
from fuzz.campaign.locks import held
from fuzz.campaign.merge import merge
from fuzz.campaign.plan import PLAN_FILE, Plan, load_or_create_plan, read_plan
from fuzz.campaign.report import damaged_lines, report_lines, status_lines, summary
from fuzz.campaign.shard_folder import CAMPAIGN_LOCK
from fuzz.campaign.state import CampaignState
from fuzz.campaign.supervisor import REPEATS, TIMEOUT_S
from fuzz.campaign.verdicts import note_recheck, waive

Command = Callable[..., Any]
DEFAULT_BUDGET: Final = "1h"
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# What a plan is where nothing else is said; the systems are those that a run which names none includes.
DEFAULTS: Final[dict[str, Any]] = {"systems": ("decode", "target_verify", "draft_extend")}


class _DefaultRun(click.Group):
    """A group of commands whose first word may be a folder, which means `run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


_FOLDER: Final = click.Path(path_type=Path, file_okay=False)


def _timeout_option(text: str) -> Callable[[Command], Command]:
    return click.option(
        "--timeout", "timeout_s", type=float, default=TIMEOUT_S, show_default=True, metavar="SECONDS", help=text
    )


@click.group(cls=_DefaultRun, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Run a long fuzzing campaign in supervised worker processes.

    `campaign DIR` begins a campaign or resumes the one in DIR, as `campaign run DIR` does.

    \b
    Exit status:
      0  there is no finding
      1  there are findings
      2  the command was used wrongly
      3  the harness failed, or a planted fault was not reported
      4  nothing was verified
      6  all findings are flaky
      7  a worker process found the disk full; the campaign itself then ends with 3
      130  the campaign was interrupted; resume it with the same command
    """


@main.command()
@click.argument("root", metavar="DIR", type=_FOLDER)
@click.option(
    "--budget", help=f"Stop this run after 90s, 30m, 8h or 2d. The default without --max-rounds is {DEFAULT_BUDGET}."
)
@click.option(
    "--max-rounds",
    type=click.IntRange(min=1),
    help="Stop when the campaign has this many rounds, rounded up to whole shards.",
)
@click.option(
    "--system",
    "named",
    multiple=True,
    help="Fuzz this system (repeatable). The default is decode, target_verify and draft_extend.",
)
@click.option("--systems", hidden=True)  # comma-separated: what --system was called
@click.option("--subject", help="Verify this pipeline: a name of `dsa-verify subjects`, or module:attribute.")
@click.option("--fault", help="Plant a fault in the subject: NAME or NAME:FIELD of `dsa-verify faults`.")
@click.option("--seed", type=click.IntRange(min=0), help="Draw the rounds from this seed. The default is 0.")
@click.option(
    "--rounds-per-shard",
    "rounds_a_shard",
    type=click.IntRange(min=1),
    help="Run this many rounds in each shard. The default is 16384.",
)
@click.option("--preset", help="Use this geometry. The default is the system's own for the device.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a field of the geometry (repeatable).")
@click.option(
    "--batch", "batches", type=int, multiple=True, help="Capture a bucket of this many requests (repeatable)."
)
@click.option(
    "--draft-tokens",
    "drafts",
    type=int,
    multiple=True,
    help="Give each request this many draft tokens, N (repeatable).",
)
@click.option("--device", help="Run on this device: auto, cpu or cuda. The default is auto.")
@click.option(
    "--waivers",
    "ledger",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Use this ledger of waivers instead of the shipped one.",
)
@click.option("--no-waivers", is_flag=True, help="Use no waivers, so that known differences are findings.")
@click.option("--allow-compilations", is_flag=True, default=None, help="Allow kernels to be compiled while rounds run.")
@click.option(
    "--resident", is_flag=True, default=None, help="Generate rounds on the device without coverage guidance (faster)."
)
@click.option(
    "--executor",
    default="local",
    show_default=True,
    help="Run the shards here (local) or on a Dask cluster (dask://HOST:PORT).",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Run this many shards at once. The default is one for each GPU, or for each core.",
)
@_timeout_option("Seconds without a heartbeat after which a worker counts as hung.")
def run(
    root: Path,
    budget: str | None,
    max_rounds: int | None,
    executor: str,
    workers: int | None,
    timeout_s: float,
    ledger: Path | None,
    no_waivers: bool,
    named: tuple[str, ...],
    systems: str | None,
    **given: Any,
) -> None:
    """Begin the campaign in DIR, or resume it where it ended."""
    chosen = {name: value for name, value in given.items() if value not in (None, ())}
    if named or systems is not None:
        chosen["systems"] = _systems(named, systems)
    engine = engine_subject(chosen.get("subject"))
    if engine is not None:
        chosen.setdefault("systems", (engine.system,))
    if "settings" in chosen:
        chosen["settings"] = _settings(chosen["settings"])
    if ledger is not None and no_waivers:
        raise UsageError("--waivers: has no effect with --no-waivers; give one of them")
    if ledger is not None or no_waivers:
        chosen["waivers"] = () if ledger is None else _entries(ledger)
    _check_timeout(timeout_s)
    budget_s = parse_time(budget or DEFAULT_BUDGET) if budget or max_rounds is None else None
    if not (root / PLAN_FILE).exists():
        Plan(**{**DEFAULTS, **chosen}).check()  # a wrong one leaves no folder behind
    with writable_folder(root), held(root / CAMPAIGN_LOCK):  # two that are begun at once must not both write it
        plan = load_or_create_plan(root, chosen, DEFAULTS)
    for name in plan.systems:
        get_system(name)  # one that is somebody's own is imported here, and by each shard
    limits = Limits(budget_s=budget_s, max_rounds=max_rounds, timeout_s=timeout_s)
    with open_pool(executor, plan.device, workers) as pool:
        display = Display()
        display.say(f"campaign in {root}: {', '.join(plan.systems)}, seed {plan.seed}, on {', '.join(pool.devices)}")
        status = run_campaign(root, plan, limits, pool, display)
    sys.exit(status)


def _settings(texts: tuple[str, ...]) -> dict[str, Any]:
    keys = [text.partition("=")[0] for text in texts]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise UsageError(f"--set: {twice} is given twice; give it once")
    return parse_settings(texts)


def _systems(named: tuple[str, ...], listed: str | None) -> tuple[str, ...]:
    """Return the systems of --system, or of --systems, as the option was once called."""
    if listed is None:
        return tuple(dict.fromkeys(named))
    if named:
        raise UsageError("--systems: has no effect with --system; give each system with --system")
    return tuple(name.strip() for name in listed.split(","))


def _check_timeout(timeout_s: float) -> None:
    if not timeout_s > 0:
        raise UsageError(f"--timeout: {timeout_s:g} is not above 0; a shard is silent while it captures and compiles")


def _entries(path: Path) -> tuple[dict[str, Any], ...]:
    choose_ledger(path, False)  # which names the file in what it refuses, where the plan would name its copy
    return tuple(read_entries(path))


@main.command()
@click.argument("root", metavar="DIR", type=_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def status(root: Path, as_json: bool) -> None:
    """Show how far the campaign in DIR has come."""
    facts = _facts(root)
    click.echo(json.dumps(facts, indent=2) if as_json else "\n".join(status_lines(facts) + damaged_lines(facts)))


@main.command()
@click.argument("root", metavar="DIR", type=_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def report(root: Path, as_json: bool) -> None:
    """Report everything that the campaign in DIR found and lost. The exit status is that of the campaign."""
    facts = _facts(root)
    click.echo(json.dumps(facts, indent=2) if as_json else "\n".join(report_lines(facts, root)))
    sys.exit(int(facts["status"]))


@main.command("merge")
@click.argument("sources", metavar="DIR...", nargs=-1, required=True, type=_FOLDER)
@click.option("--into", required=True, type=_FOLDER, help="Put the shards into this campaign, which may be new.")
def merge_command(sources: tuple[Path, ...], into: Path) -> None:
    """Merge campaigns of one plan that ran in several folders."""
    with writable_folder(into):
        click.echo(f"{merge(sources, into)} shard(s) taken into {into}")


@main.command("waive")
@click.argument("root", metavar="DIR", type=_FOLDER)
@click.argument("key", metavar="FINDING")
@click.option("--issue", required=True, help="Name where the defect is tracked.")
def waive_command(root: Path, key: str, issue: str) -> None:
    """Waive a finding. The campaign fails again if the finding stops reproducing and the waiver is still there."""
    read_plan(root)
    with writable_folder(root):
        waive(root, key, issue)


@main.command()
@click.argument("root", metavar="DIR", type=_FOLDER)
@_timeout_option("Seconds after which a replay counts as hung.")
def recheck(root: Path, timeout_s: float) -> None:
    """Replay every finding's case and mark those that no longer reproduce as fixed."""
    _check_timeout(timeout_s)
    read_plan(root)
    with writable_folder(root):
        for key, shown, repeats, sightings in _rechecked(root, timeout_s):
            note_recheck(root, key, shown, repeats, sightings)
            click.echo(f"{key}: shown {shown} of {repeats} times{'' if shown else '; gone'}")


def _rechecked(root: Path, timeout_s: float) -> Iterator[tuple[str, int, int, int]]:
    """Yield (key, shown, repeats, sightings) of each finding.

    Each replay has a process of its own, as a case may end the process that replays it, or keep it for ever.
    """
    plan = read_plan(root)
    for finding in _facts(root)["findings"]:
        if finding["path"] is None or finding["shown"] < finding["repeats"]:
            continue  # a flaky one that does not show is not gone
        case = root / finding["path"]
        command = [sys.executable, "-m", "dsa_verify", "replay", str(case), "--device", plan.device]
        command += plan.replay_options(root)
        repeats = next((n for kind, n in REPEATS.items() if kind.value == finding["diagnosis"]), 3)
        shown = sum(_shows(command, timeout_s, case) for _ in range(repeats))
        yield finding["key"], shown, repeats, finding["sightings"]


def _shows(command: list[str], timeout_s: float, case: Path) -> bool:
    """Say whether the replay shows a finding, or is ended by one. UsageError if it could not be made."""
    try:
        end = subprocess.run(command, capture_output=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return True
    if end.returncode in (STATUS_EQUAL, STATUS_MISMATCH, STATUS_DEVICE_LOST, STATUS_FLAKY) or end.returncode < 0:
        return end.returncode != STATUS_EQUAL
    said = (end.stderr or end.stdout).decode(errors="replace").strip()
    raise UsageError(f"{case}: cannot be replayed (status {end.returncode}): {said}")


def _facts(root: Path) -> dict[str, Any]:
    read_plan(root)
    return summary(CampaignState.read(root))


def parse_time(text: str) -> float:
    """Return the seconds that 90s, 30m, 8h or 2d stand for. UsageError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None or not float(match[1]):
        raise UsageError(f"--budget: {text!r} is not a time above 0; write 90s, 30m, 8h or 2d")
    return float(match[1]) * _UNITS[match[2]]
