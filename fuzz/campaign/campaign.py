"""Campaign: runs shards until its time or its rounds are over, and can be resumed after whatever ended it.

The plan is written once; a shard is a pure function of it. This process hands shards to an executor, indexes what they
leave in their folders, and never touches a device. Killed at any moment, it loses at most the shards in flight, and the
next run says so. `python -m fuzz.campaign.campaign DIR`, and `status`, `report`, `merge`, `waive`, `recheck`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from pathlib import Path
from typing import Any, Final

import click

from dsa_verify.base.atomic_write import write_whole
from dsa_verify.base.errors import (
    STATUS_DEVICE_LOST,
    STATUS_EQUAL,
    STATUS_FLAKY,
    STATUS_HARNESS,
    STATUS_INTERRUPTED,
    STATUS_MISMATCH,
    STATUS_USAGE,
    DsaVerifyError,
    HarnessError,
    UsageError,
)
from dsa_verify.base.writable import check_folder
from dsa_verify.contract.geometry import parse_settings
from dsa_verify.systems.engines import engine_subject
from dsa_verify.waivers.waivers import choose_ledger, read_entries
from fuzz.campaign.display import Display, Flight, Health, Moment
from fuzz.campaign.executors import Pool, open_pool
from fuzz.campaign.index import Store, StoreLocked, note_recheck, waive
from fuzz.campaign.locks import FolderInUse, held
from fuzz.campaign.merge import merge
from fuzz.campaign.plan import PLAN_FILE, Plan, read_plan, settle_plan
from fuzz.campaign.report import damaged_lines, finding_lines, report_lines, status_lines, summary, verdict_lines
from fuzz.campaign.shard_folder import (
    CAMPAIGN_LOCK,
    PROGRESS_FILE,
    STOP_FILE,
    ShardResult,
    attempts_in,
    findings_in,
    read_progress,
    shard_folder,
    shard_numbers,
)
from fuzz.campaign.supervisor import KILL_WAIT_S, REPEATS, STOP_GRACE_S, TIMEOUT_S, give_up, supervise_in_slot
from fuzz.campaign.worker_main import NO_ROOM

TICK_S: Final = 0.5
SEE_WAIT_S: Final = 60.0  # in which a network file system shows to one machine what another has written
# For a campaign's shards, once it is over: to see that, to come to their end, to be killed.
END_WAIT_S: Final = SEE_WAIT_S + STOP_GRACE_S + KILL_WAIT_S
DEFAULT_BUDGET: Final = "1h"
_NOT_WRITABLE: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# What a plan is where nothing else is said; the systems are those that a run which names none includes.
DEFAULTS: Final[dict[str, Any]] = {"systems": ("decode", "target_verify", "draft_extend")}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one run of a campaign; others may follow with other limits. `max_rounds`: of the whole campaign, rounded up to
    whole shards. None: no limit."""

    budget_s: float | None
    max_rounds: int | None
    timeout_s: float = TIMEOUT_S

    def shards(self, plan: Plan) -> int | None:
        return None if self.max_rounds is None else -(-self.max_rounds // plan.rounds_a_shard)


class Campaign:
    """One run of the campaign in `root`, by `pool`, within `limits`."""

    def __init__(self, root: Path, plan: Plan, limits: Limits, pool: Pool, display: Display) -> None:
        self.root, self.plan, self.limits, self.pool, self.display = root, plan, limits, pool, display
        self._flights: dict[Future[ShardResult], int] = {}
        self._unindexed: set[int] = set()
        self._start = time.monotonic()
        self._stopping = False
        self._health = Health()
        self._interrupted = False
        self._ends_at, self._abandoned = math.inf, False
        self._unseen: set[int] = set()
        self._facts: dict[str, Any] = {}
        self._executed_before = 0

    def run(self) -> int:
        """The exit status. Raises what no shard could be run for."""
        stop = self.root / STOP_FILE
        stop.unlink(missing_ok=True)
        with Store(self.root) as store, self.display.open():
            self._store = store
            store.rebuild()
            facts = summary(store)
            self._facts, self._executed_before = facts, facts["rounds_executed"]
            known = {finding["key"] for finding in facts["findings"]}
            waiting = self._numbers()
            try:
                self._fill(waiting)
                while self._flights:
                    known = self._tick(known)
                    self._fill(waiting)
            except BaseException:
                # Shards in other processes must not go on for a campaign that is over.
                self._end()
                self._abandoned = bool(wait(self._flights, END_WAIT_S).not_done)
                raise
            finally:
                if not self._abandoned:
                    stop.unlink(missing_ok=True)
            self._see()
            store.rebuild()
            facts = summary(store) | ({"status": STATUS_INTERRUPTED} if self._interrupted else {})
        for text in verdict_lines(facts):
            self.display.say(text)
        return int(facts["status"])

    def _numbers(self) -> Iterator[int]:
        """Of the shards that are still to be run: those begun and not ended first."""
        done = {number for number in shard_numbers(self.root) if self._done(number)}
        last = self.limits.shards(self.plan)
        return (number for number in (itertools.count() if last is None else range(last)) if number not in done)

    def _done(self, number: int) -> bool:
        result = ShardResult.read(shard_folder(self.root, number))
        return result is not None and result.final

    def _fill(self, waiting: Iterator[int]) -> None:
        while not self._over() and len(self._flights) < self.pool.width:
            number = next(waiting, None)
            if number is None:
                return
            folder = shard_folder(self.root.resolve(), number)
            future = self.pool.executor.submit(
                supervise_in_slot, self.plan.shard(number), folder, self.limits.timeout_s
            )
            self._flights[future] = number

    def _over(self) -> bool:
        if not self._stopping and self.limits.budget_s is not None:
            self._stopping = time.monotonic() - self._start >= self.limits.budget_s
            if self._stopping:
                self.display.say("the budget is spent; shards are ending")
                self._end()
        return self._stopping

    def _end(self) -> None:
        """Ask all shards to end; they see it within a heartbeat, or are killed."""
        # Their futures are not cancelled: an executor of other machines would take that for the end of what still runs.
        self._stopping = True
        self._ends_at = min(self._ends_at, time.monotonic() + END_WAIT_S)
        with contextlib.suppress(OSError):
            write_whole(self.root / STOP_FILE, "")

    def _abandon(self) -> None:
        """Wait no longer for shards that should have ended. The stop file stays, for those that still run."""
        self._abandoned = True
        for future, number in self._flights.items():
            future.cancel()
            self._unindexed.add(number)
            self.display.say(
                f"shard {number}: did not end within {END_WAIT_S:g} s and is left to its worker; resuming takes what "
                "came of it, or does it anew"
            )
        self._flights.clear()

    def _see(self) -> None:
        """Wait for the results of shards that have ended elsewhere: a network file system shows them late."""
        patience = time.monotonic() + SEE_WAIT_S
        while self._unseen and time.monotonic() < patience:
            self._unseen = {number for number in self._unseen if not self._done(number)}
            time.sleep(TICK_S)
        for number in sorted(self._unseen):
            self.display.say(f"shard {number}: its results are on another disk; unite the folders with `merge`")

    def _tick(self, known: set[str]) -> set[str]:
        """Wait a little, take in what has ended, show what there is; the keys of all findings."""
        try:
            done, _ = wait(self._flights, timeout=TICK_S, return_when=FIRST_COMPLETED)
        except KeyboardInterrupt:
            if self._interrupted:
                os._exit(STATUS_INTERRUPTED)  # shards end with their supervisor, or see the stop file that is left
            self._interrupted = True
            self.display.say("interrupted; shards are ending (again to end at once: what is in flight is then lost)")
            self._end()
            return known
        for future in [each for each in self._flights if each in done]:
            number = self._flights.pop(future)
            self._unindexed.add(number)
            self._settle(number, future)
        if time.monotonic() > self._ends_at:
            self._abandon()
        facts = summary(self._store) if self._index() else self._facts
        self._facts = facts
        for finding in facts["findings"]:
            if finding["key"] not in known:
                for text in finding_lines(finding, self.root, facts["replay_options"]):
                    self.display.say(text)
        self._over()
        self.display.show(self._moment(facts))
        return known | {finding["key"] for finding in facts["findings"]}

    def _settle(self, number: int, future: Future[ShardResult]) -> None:
        """Take what came of the shard. Raises what it raised; HarnessError if the executor has failed."""
        if future.cancelled():
            if self._stopping:
                return
            raise HarnessError(
                f"shard {number}: the executor dropped it, which it does when its scheduler is gone; resume with the "
                "same command when that is back"
            )
        try:
            self._take(number, future.result())
        except self.pool.lost as error:
            self._give_up(number, error)
        except BrokenExecutor as error:
            raise HarnessError(f"shard {number}: the executor broke ({error}); resume with the same command") from error

    def _give_up(self, number: int, error: Exception) -> None:
        folder = shard_folder(self.root, number)
        try:
            give_up(folder, f"{type(error).__name__}: {error}")
            self._say_attempts(number)
        except FolderInUse as in_use:
            self.display.say(f"shard {number}: {type(error).__name__}: {error}; and yet {in_use}")

    def _take(self, number: int, result: ShardResult) -> None:
        folder = shard_folder(self.root, number)
        if result.final and ShardResult.read(folder) is None:
            self._unseen.add(number)
        self._say_attempts(number)
        self.display.say(
            f"shard {number}: {result.system}, {result.executed} of {result.requested} rounds, {result.ended}"
        )

    def _say_attempts(self, number: int) -> None:
        folder = shard_folder(self.root, number)
        for attempt in attempts_in(folder):
            self.display.say(
                f"shard {number}: {attempt['ended']}: {attempt['text']} "
                f"({attempt['rounds_lost']} rounds in flight lost)"
            )

    def _index(self) -> bool:
        """Take into the store what has ended; whether there was any."""
        waiting = sorted(self._unindexed)
        for number in waiting:
            try:
                self._store.index(number)
            except StoreLocked as error:
                self.display.say(f"{error}; it is tried again with the next shard")
                break
            self._unindexed.discard(number)
        return bool(waiting)

    def _moment(self, facts: dict[str, Any]) -> Moment:
        flights = [self._flight(number) for number in sorted(self._flights.values())]
        elapsed = time.monotonic() - self._start
        rounds = facts["rounds_executed"] - self._executed_before + sum(flight.rounds for flight in flights)
        budget, most = self.limits.budget_s, self.limits.max_rounds
        return Moment(
            facts=facts,
            flights=flights,
            rounds_per_s=rounds / elapsed if elapsed else 0.0,
            left_s=None if budget is None else budget - elapsed,
            rounds_left=None if most is None else max(most - facts["rounds_executed"], 0),
            health=self._health.lines(),
        )

    def _flight(self, number: int) -> Flight:
        folder = shard_folder(self.root, number)
        progress, silent_s = read_progress(folder), None
        with contextlib.suppress(FileNotFoundError):
            silent_s = time.time() - (folder / PROGRESS_FILE).stat().st_mtime
        return Flight(
            number=number,
            system=self.plan.shard(number).system,
            rounds=progress["rounds"],
            silent_s=silent_s,
            attempts=len(attempts_in(folder)),
        )


def run_campaign(root: Path, plan: Plan, limits: Limits, pool: Pool, display: Display) -> int:
    """Run or resume the campaign in `root`; the exit status. FolderInUse while another process does."""
    with _writing(root), held(root / CAMPAIGN_LOCK):
        try:
            return Campaign(root, plan, limits, pool, display).run()
        except UsageError:
            if not any(_has_begun(shard_folder(root, number)) for number in shard_numbers(root)):
                (root / PLAN_FILE).unlink()  # a plan that no shard can follow was never begun
            raise


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    """UsageError if nothing can be put into `root`, before anything is done; HarnessError in words if the disk gets
    full."""
    check_folder(str(root))
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise HarnessError(f"{root}: {error}; make room, then resume: what is there is whole") from error


def _has_begun(folder: Path) -> bool:
    """Whether the shard has left anything that only its own plan explains."""
    return ShardResult.read(folder) is not None or bool(findings_in(folder) or attempts_in(folder))


# The command line ----------------------------------------------------------------------------------------------------


class _DefaultRun(click.Group):
    """A group whose first word may be a folder: then it is `run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


_FOLDER: Final = click.Path(path_type=Path, file_okay=False)


@click.group(cls=_DefaultRun, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Fuzz for as long as you let it: `campaign DIR` begins one or resumes the one in DIR (the same as `run DIR`).

    \b
    Exit status:
      0  no finding
      1  findings
      2  wrong usage
      3  the harness failed, or a planted fault was not reported
      4  nothing was verified
      6  only flaky findings
      130  interrupted; resume with the same command
    """


@main.command()
@click.argument("root", metavar="DIR", type=_FOLDER)
@click.option("--budget", help=f"Time for this run: 90s, 30m, 8h, 2d. Default without --max-rounds: {DEFAULT_BUDGET}.")
@click.option("--max-rounds", type=click.IntRange(min=1), help="Rounds of the whole campaign, in whole shards.")
@click.option(
    "--system", "named", multiple=True, help="System to fuzz; repeatable. Default: decode, target_verify, draft_extend."
)
@click.option("--systems", hidden=True)  # comma-separated: what --system was called
@click.option("--subject", help="Pipeline under test: a name of `dsa-verify subjects`, or module:attribute.")
@click.option("--fault", help="Plant a fault in the subject: NAME or NAME:FIELD (see `dsa-verify faults`).")
@click.option("--seed", type=click.IntRange(min=0), help="Default: 0.")
@click.option("--rounds-per-shard", "rounds_a_shard", type=click.IntRange(min=1), help="Default: 16384.")
@click.option("--preset", help="Model geometry. Default: what each system has for the device.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a field of the geometry.")
@click.option("--batch", "batches", type=int, multiple=True, help="Batch bucket; repeatable.")
@click.option("--draft-tokens", "drafts", type=int, multiple=True, help="Draft length N; repeatable.")
@click.option("--device", help="auto, cpu or cuda. Default: auto.")
@click.option(
    "--waivers", "ledger", metavar="FILE", type=click.Path(path_type=Path), help="Ledger of known differences."
)
@click.option("--no-waivers", is_flag=True, help="Judge known differences, too.")
@click.option("--allow-compilations", is_flag=True, default=None, help="Kernels may be compiled while rounds run.")
@click.option("--resident", is_flag=True, default=None, help="Unsteered rounds, drawn in bulk on the device.")
@click.option("--executor", default="local", show_default=True, help="local, or dask://HOST:PORT.")
@click.option("--workers", type=click.IntRange(min=1), help="Shards at once. Default: one for each GPU, or core.")
@click.option(
    "--timeout", "timeout_s", type=float, default=TIMEOUT_S, show_default=True, help="Silence in s that is a hang."
)
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
    """Begin the campaign in DIR, or resume it."""
    settled = {name: value for name, value in given.items() if value not in (None, ())}
    if named or systems is not None:
        settled["systems"] = _systems(named, systems)
    engine = engine_subject(settled.get("subject"))
    if engine is not None:
        settled.setdefault("systems", (engine.system,))
    if "settings" in settled:
        settled["settings"] = _settings(settled["settings"])
    if ledger is not None and no_waivers:
        raise UsageError("--waivers: has no effect with --no-waivers; give one of them")
    if ledger is not None or no_waivers:
        settled["waivers"] = () if ledger is None else _entries(ledger)
    _check_timeout(timeout_s)
    budget_s = parse_time(budget or DEFAULT_BUDGET) if budget or max_rounds is None else None
    if not (root / PLAN_FILE).exists():
        Plan(**{**DEFAULTS, **settled}).check()  # a wrong one leaves no folder behind
    with _writing(root), held(root / CAMPAIGN_LOCK):  # two that are begun at once must not both write it
        plan = settle_plan(root, settled, DEFAULTS)
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
    """The systems of --system, or of the one option that it once was."""
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
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def status(root: Path, as_json: bool) -> None:
    """Say where the campaign in DIR stands."""
    facts = _facts(root)
    click.echo(json.dumps(facts, indent=2) if as_json else "\n".join(status_lines(facts) + damaged_lines(facts)))


@main.command()
@click.argument("root", metavar="DIR", type=_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def report(root: Path, as_json: bool) -> None:
    """Report everything that the campaign in DIR found and lost; ends with the status of the campaign."""
    facts = _facts(root)
    click.echo(json.dumps(facts, indent=2) if as_json else "\n".join(report_lines(facts, root)))
    sys.exit(int(facts["status"]))


@main.command("merge")
@click.argument("sources", metavar="DIR...", nargs=-1, required=True, type=_FOLDER)
@click.option("--into", required=True, type=_FOLDER, help="The campaign that gets the shards; may be new.")
def merge_command(sources: tuple[Path, ...], into: Path) -> None:
    """Unite campaigns of one plan that were run in several folders."""
    with _writing(into):
        click.echo(f"{merge(sources, into)} shard(s) taken into {into}")


@main.command("waive")
@click.argument("root", metavar="DIR", type=_FOLDER)
@click.argument("key", metavar="FINDING")
@click.option("--issue", required=True, help="Where the defect is tracked.")
def waive_command(root: Path, key: str, issue: str) -> None:
    """Let one finding of the campaign in DIR not count, until it is gone."""
    read_plan(root)
    with _writing(root):
        waive(root, key, issue)


@main.command()
@click.argument("root", metavar="DIR", type=_FOLDER)
@click.option(
    "--timeout", "timeout_s", type=float, default=TIMEOUT_S, show_default=True, help="Time in s of a replay: a hang."
)
def recheck(root: Path, timeout_s: float) -> None:
    """Replay the case of every finding: one that does not show any more is gone."""
    _check_timeout(timeout_s)
    read_plan(root)
    with _writing(root):
        for key, shown, repeats, sightings in _rechecked(root, timeout_s):
            note_recheck(root, key, shown, repeats, sightings)
            click.echo(f"{key}: shown {shown} of {repeats} times{'' if shown else '; gone'}")


def _rechecked(root: Path, timeout_s: float) -> Iterator[tuple[str, int, int, int]]:
    """(key, shown, repeats, sightings), each replay in a process of its own: a case may end the one that replays it, or
    keep it for ever."""
    plan = read_plan(root)
    for finding in _facts(root)["findings"]:
        if finding["path"] is None or finding["shown"] < finding["repeats"]:
            continue  # a flaky one that does not show is not gone
        case = root / finding["path"]
        command = [sys.executable, "-m", "dsa_verify.cli.main", "replay", str(case), "--device", plan.device]
        command += plan.replay_options(root)
        repeats = REPEATS.get(finding["diagnosis"], 3)
        shown = sum(_shows(command, timeout_s, case) for _ in range(repeats))
        yield finding["key"], shown, repeats, finding["sightings"]


def _shows(command: list[str], timeout_s: float, case: Path) -> bool:
    """Whether the replay shows a finding, or is ended by one; UsageError if it could not be made."""
    import subprocess

    try:
        end = subprocess.run(command, capture_output=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return True
    if end.returncode in (STATUS_EQUAL, STATUS_MISMATCH, STATUS_DEVICE_LOST, STATUS_FLAKY) or end.returncode < 0:
        return end.returncode != STATUS_EQUAL
    said = (end.stderr or end.stdout).decode(errors="replace").strip()
    raise UsageError(f"{case}: cannot be replayed (status {end.returncode}): {said}")


def _facts(root: Path) -> dict[str, Any]:
    """Of the folders as they are, unless a campaign is running, which writes the store itself."""
    read_plan(root)
    with contextlib.ExitStack() as stack:
        running = in_memory = False
        try:
            stack.enter_context(held(root / CAMPAIGN_LOCK))
        except FolderInUse:
            running = True
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
            in_memory = True
        store = stack.enter_context(Store(root, in_memory=in_memory))
        if not running:
            store.rebuild()
        return summary(store)


def parse_time(text: str) -> float:
    """Seconds of 90s, 30m, 8h, 2d; UsageError otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None or not float(match[1]):
        raise UsageError(f"--budget: {text!r} is not a time above 0; write 90s, 30m, 8h or 2d")
    return float(match[1]) * _UNITS[match[2]]


def _guarded(work: Callable[[], object]) -> int:
    """`python -m fuzz.campaign.campaign`, with the statuses that `dsa-verify campaign` has."""
    try:
        work()
        return STATUS_EQUAL
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return STATUS_USAGE
    except click.Abort:
        return STATUS_INTERRUPTED
    except DsaVerifyError as error:
        click.echo(f"dsa-verify: {error}", err=True)
        return error.status
    except OSError as error:
        click.echo(f"dsa-verify: {error}; what is there is whole", err=True)
        return STATUS_HARNESS


if __name__ == "__main__":
    sys.exit(_guarded(lambda: main(standalone_mode=False)))
