"""Campaign: runs shards until its time or its rounds are over, and can be resumed after whatever ended it.

The plan is written once; a shard is a pure function of it. This process hands shards to an executor, reads what they
leave in their folders, and never touches a device. Killed at any moment, it loses at most the shards in flight, and the
next run says so. Its commands are in dsa_verify/cli/campaign.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from pathlib import Path
from typing import Any, Final

from dsa_verify.base.atomic_write import write_atomically
from dsa_verify.base.errors import (
    STATUS_INTERRUPTED,
    HarnessError,
    UsageError,
)
from dsa_verify.base.exit_status import NO_ROOM
from dsa_verify.base.writable import check_folder
from fuzz.campaign.display import CampaignSnapshot, Display, Health, RunningShard
from fuzz.campaign.executors import Pool
from fuzz.campaign.locks import FolderInUse, held
from fuzz.campaign.plan import PLAN_FILE, Plan
from fuzz.campaign.report import attempt_line, finding_lines, summary, verdict_lines
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
from fuzz.campaign.state import CampaignState
from fuzz.campaign.supervisor import KILL_WAIT_S, STOP_GRACE_S, TIMEOUT_S, give_up, supervise_in_slot

TICK_S: Final = 0.5
SEE_WAIT_S: Final = 60.0  # in which a network file system shows to one machine what another has written
# For a campaign's shards, once it is over: to see that, to come to their end, to be killed.
END_WAIT_S: Final = SEE_WAIT_S + STOP_GRACE_S + KILL_WAIT_S


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one run of a campaign. `max_rounds`: of the whole campaign, in whole shards. None: no limit."""

    budget_s: float | None
    max_rounds: int | None
    timeout_s: float = TIMEOUT_S

    def shards(self, plan: Plan) -> int | None:
        return None if self.max_rounds is None else -(-self.max_rounds // plan.rounds_a_shard)


class Campaign:
    """One run of the campaign in `root`, by `pool`, within `limits`."""

    def __init__(self, root: Path, plan: Plan, limits: Limits, pool: Pool, display: Display) -> None:
        self.root, self.plan, self.limits, self.pool, self.display = root, plan, limits, pool, display
        self._running: dict[Future[ShardResult], int] = {}
        self._start = time.monotonic()
        self._stopping = False
        self._health = Health()
        self._interrupted = False
        self._ends_at, self._abandoned = math.inf, False
        self._unseen: set[int] = set()
        self._facts: dict[str, Any] = {}
        self._executed_before = 0

    def run(self) -> int:
        """Run the shards, and return the exit status. Raises what no shard could be run for."""
        stop = self.root / STOP_FILE
        stop.unlink(missing_ok=True)
        with self.display.open():
            self._state = CampaignState.read(self.root)
            self._facts = facts = summary(self._state)
            self._executed_before = facts["rounds_executed"]
            known = {finding["key"] for finding in facts["findings"]}
            waiting = self._numbers()
            try:
                self._submit_shards(waiting)
                while self._running:
                    known = self._poll_once(known)
                    self._submit_shards(waiting)
            except BaseException:
                # Shards in other processes must not go on for a campaign that is over.
                self._request_stop()
                self._abandoned = bool(wait(self._running, END_WAIT_S).not_done)
                raise
            finally:
                if not self._abandoned:
                    stop.unlink(missing_ok=True)
            self._wait_for_shared_results()
            facts = summary(CampaignState.read(self.root)) | (
                {"status": STATUS_INTERRUPTED} if self._interrupted else {}
            )
        for text in verdict_lines(facts):
            self.display.say(text)
        return int(facts["status"])

    def _numbers(self) -> Iterator[int]:
        """Yield the numbers of the shards that are still to be run: those begun and not ended first."""
        done = {number for number in shard_numbers(self.root) if self._done(number)}
        last = self.limits.shards(self.plan)
        return (number for number in (itertools.count() if last is None else range(last)) if number not in done)

    def _done(self, number: int) -> bool:
        result = ShardResult.read(shard_folder(self.root, number))
        return result is not None and result.final

    def _submit_shards(self, waiting: Iterator[int]) -> None:
        while not self._budget_spent() and len(self._running) < self.pool.width:
            number = next(waiting, None)
            if number is None:
                return
            folder = shard_folder(self.root.resolve(), number)
            future = self.pool.executor.submit(
                supervise_in_slot, self.plan.shard(number), folder, self.limits.timeout_s
            )
            self._running[future] = number

    def _budget_spent(self) -> bool:
        if not self._stopping and self.limits.budget_s is not None:
            self._stopping = time.monotonic() - self._start >= self.limits.budget_s
            if self._stopping:
                self.display.say("the budget is spent; shards are ending")
                self._request_stop()
        return self._stopping

    def _request_stop(self) -> None:
        """Ask all shards to end; they see it within a heartbeat, or are killed."""
        # Their futures are not cancelled: an executor of other machines would take that for the end of what still runs.
        self._stopping = True
        self._ends_at = min(self._ends_at, time.monotonic() + END_WAIT_S)
        with contextlib.suppress(OSError):
            write_atomically(self.root / STOP_FILE, "")

    def _abandon(self) -> None:
        """Wait no longer for shards that should have ended. The stop file stays, for those that still run."""
        self._abandoned = True
        for future, number in self._running.items():
            future.cancel()
            self.display.say(
                f"shard {number}: did not end within {END_WAIT_S:g} s and is left to its worker; resuming takes what "
                "came of it, or does it anew"
            )
        self._running.clear()

    def _wait_for_shared_results(self) -> None:
        """Wait for the results of shards that have ended elsewhere: a network file system shows them late."""
        patience = time.monotonic() + SEE_WAIT_S
        while self._unseen and time.monotonic() < patience:
            self._unseen = {number for number in self._unseen if not self._done(number)}
            time.sleep(TICK_S)
        for number in sorted(self._unseen):
            self.display.say(f"shard {number}: its results are on another disk; unite the folders with `merge`")

    def _poll_once(self, known: set[str]) -> set[str]:
        """Wait a little, take in what has ended, show what there is; the keys of all findings."""
        try:
            done, _ = wait(self._running, timeout=TICK_S, return_when=FIRST_COMPLETED)
        except KeyboardInterrupt:
            if self._interrupted:
                os._exit(STATUS_INTERRUPTED)  # shards end with their supervisor, or see the stop file that is left
            self._interrupted = True
            self.display.say("interrupted; shards are ending (again to end at once: what is in flight is then lost)")
            self._request_stop()
            return known
        ended: list[int] = []
        for future in [each for each in self._running if each in done]:
            number = self._running.pop(future)
            ended.append(number)
            self._collect_result(number, future)
        if time.monotonic() > self._ends_at:
            ended += self._running.values()
            self._abandon()
        if ended:
            self._state = self._state.with_shards(ended)
            self._facts = summary(self._state)
        facts = self._facts
        for finding in facts["findings"]:
            if finding["key"] not in known:
                for text in finding_lines(finding, self.root, facts["replay_options"]):
                    self.display.say(text)
        self._budget_spent()
        self.display.show(self._snapshot(facts))
        return known | {finding["key"] for finding in facts["findings"]}

    def _collect_result(self, number: int, future: Future[ShardResult]) -> None:
        """Take what came of the shard. Raises what it raised; HarnessError if the executor has failed."""
        if future.cancelled():
            if self._stopping:
                return
            raise HarnessError(
                f"shard {number}: the executor dropped it, which it does when its scheduler is gone; resume with the "
                "same command when that is back"
            )
        try:
            self._record_result(number, future.result())
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

    def _record_result(self, number: int, result: ShardResult) -> None:
        folder = shard_folder(self.root, number)
        if result.final and ShardResult.read(folder) is None:
            self._unseen.add(number)
        self._say_attempts(number)
        self.display.say(
            f"shard {number}: {result.system}, {result.executed} of {result.requested} rounds, {result.ended}"
        )

    def _say_attempts(self, number: int) -> None:
        for attempt in attempts_in(shard_folder(self.root, number)):
            self.display.say(attempt_line(number, attempt))

    def _snapshot(self, facts: dict[str, Any]) -> CampaignSnapshot:
        running = [self._running_shard(number) for number in sorted(self._running.values())]
        elapsed = time.monotonic() - self._start
        rounds = facts["rounds_executed"] - self._executed_before + sum(shard.rounds for shard in running)
        budget, most = self.limits.budget_s, self.limits.max_rounds
        return CampaignSnapshot(
            facts=facts,
            running=running,
            rounds_per_s=rounds / elapsed if elapsed else 0.0,
            left_s=None if budget is None else budget - elapsed,
            rounds_left=None if most is None else max(most - facts["rounds_executed"], 0),
            health=self._health.lines(),
        )

    def _running_shard(self, number: int) -> RunningShard:
        folder = shard_folder(self.root, number)
        progress, silent_s = read_progress(folder), None
        with contextlib.suppress(FileNotFoundError):
            silent_s = time.time() - (folder / PROGRESS_FILE).stat().st_mtime
        return RunningShard(
            number=number,
            system=self.plan.shard(number).system,
            rounds=progress["rounds"],
            silent_s=silent_s,
            attempts=len(attempts_in(folder)),
        )


def run_campaign(root: Path, plan: Plan, limits: Limits, pool: Pool, display: Display) -> int:
    """Run or resume the campaign in `root`; the exit status. FolderInUse while another process does."""
    with writable_folder(root), held(root / CAMPAIGN_LOCK):
        try:
            return Campaign(root, plan, limits, pool, display).run()
        except UsageError:
            if not any(_has_begun(shard_folder(root, number)) for number in shard_numbers(root)):
                (root / PLAN_FILE).unlink()  # a plan that no shard can follow was never begun
            raise


@contextlib.contextmanager
def writable_folder(root: Path) -> Iterator[None]:
    """Write into `root` inside. UsageError if nothing can be put there; HarnessError in words if the disk gets full."""
    check_folder(str(root))
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise HarnessError(
            f"{root}: {error}. Free disk space and run the same command again; files already written are intact."
        ) from error


def _has_begun(folder: Path) -> bool:
    """Return whether the shard has left anything that only its own plan explains."""
    return ShardResult.read(folder) is not None or bool(findings_in(folder) or attempts_in(folder))
