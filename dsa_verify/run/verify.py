"""Verify: runs a configuration fast, and where anything differs runs it again slowly to say what and why.

The fast run polls once a chunk and keeps nothing. When it has seen a difference, the failing round and a few before
it become a case that is replayed from nothing (confirm.py). What shows again is written to disk with its diagnosis
and the command that shows it; what does not is called flaky.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click

from dsa_verify.base.atomic_write import reason_of, write_atomically
from dsa_verify.base.errors import DeviceLost
from dsa_verify.base.out_of_memory import translate_out_of_memory
from dsa_verify.buffers.region import Kind
from dsa_verify.contract.finding import Finding
from dsa_verify.contract.round import Round, Scenario
from dsa_verify.contract.round_table import RoundTable
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.diagnosis.not_waived import Covered
from dsa_verify.diagnosis.other_findings import fault_finding, flaky_finding, flaky_waived, late_compilations
from dsa_verify.replay.observation import BucketSeen, Observation
from dsa_verify.replay.planted import require_sight
from dsa_verify.replay.replayer import Replayer
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.replay.subject_stages import SubjectError
from dsa_verify.rounds.matrix import CHUNK_ROUNDS, is_undefined
from dsa_verify.systems.catalogue import reference_of
from dsa_verify.systems.trust import code_options
from dsa_verify.waivers.waivers import Ledger, WaiverUse

# How many of the last rounds a case keeps: the fewest that show the finding again.
CASE_WINDOWS: Final = (1, 2, 3, 6, 17, 64, 2 * CHUNK_ROUNDS)
FINDINGS_FOLDER: Final = Path("dsa-findings")
# Chunks up to this long are written to disk before they are launched and reported round by round.
JOURNAL_ROUNDS: Final = 64


@dataclasses.dataclass(slots=True, kw_only=True)
class Counts:
    """The sums of what was done and seen, taken over configurations. `mismatches` counts words of fields, inputs and
    rows of other buckets; `rounds_checked` those whose judge was polled; `waived` words that a waiver covers, which are
    no mismatches. `waivers`: what came of each waiver that applied, by its key. `occurred`: by what a declaration
    says must occur for the run to count, whether it has. `eager_oracle`: what kept the oracle from being captured, so
    that it ran eagerly beside the graph."""

    configs: int = 0
    replays: int = 0
    rounds_checked: int = 0
    fields_checked: int = 0
    elements_compared: int = 0
    mismatches: int = 0
    address_changes: int = 0
    guard_hits: int = 0
    compilations_after_warmup: int = 0
    waived: int = 0
    waivers: dict[str, WaiverUse] = dataclasses.field(default_factory=dict)
    occurred: dict[str, bool] = dataclasses.field(default_factory=dict)
    eager_oracle: str = ""

    def add(self, other: Counts) -> None:
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), int):
                setattr(self, field.name, value + getattr(other, field.name))
        self.eager_oracle = self.eager_oracle or other.eager_oracle
        for name, has in other.occurred.items():
            self.occurred[name] = has or self.occurred.get(name, False)
        for key, use in other.waivers.items():
            self.waivers[key] = self.waivers[key].plus(use) if key in self.waivers else dataclasses.replace(use)

    @property
    def missing(self) -> list[str]:
        """Return what must occur for the run to count, and has not."""
        return [name for name, has in self.occurred.items() if not has]

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**dataclasses.asdict(self), "waivers": [use.to_dict() for use in self.waivers.values()]}


def verify_rounds(
    setup: ReplaySetup,
    chunks: Iterable[RoundTable],
    counts: Counts,
    *,
    folder: Path | None = FINDINGS_FOLDER,
    on_rounds: Callable[[int], None] = lambda count: None,
    waivers_due: bool = True,
) -> list[Finding]:
    """Run `chunks` of rounds under `setup`; the findings of the first wrong round, their cases written to `folder`.

    `counts` is added to even if the run is interrupted; `on_rounds(n)` is called after n more rounds. `waivers_due`:
    whether these rounds have to show what is waived, if they come to their end. Raises DeviceLost (the rounds are saved
    first), OutOfMemory and HarnessError, also where nothing was found and the judges do not see what is then planted.
    """
    counts.configs += 1
    ended = False
    replayer: Replayer | None = None
    recent = _Recent()
    try:
        with translate_out_of_memory():
            for table in chunks:
                recent.append(table)
                with _journal(setup, table, folder):
                    if replayer is None:
                        replayer = setup.open(max(len(table), CHUNK_ROUNDS), table.remap_rows.shape[1], first=table)
                    # A long chunk is replayed without a call back into the host for each of its rounds.
                    seen = replayer.run(table, on_rounds, one_by_one=len(table) <= JOURNAL_ROUNDS)
                wrong = seen.first_wrong_round
                if wrong is not None:
                    return _seen_in(wrong, _explain(setup, recent.up_to(wrong), seen, folder))
                beyond = _explain_waived(setup, recent, seen, folder)
                if beyond:
                    return beyond
                late = [] if setup.may_compile else late_compilations(setup, seen.compilations)
                if late:
                    return [
                        _with_case(each, setup, recent.up_to(each.round)[-JOURNAL_ROUNDS:], folder) for each in late
                    ]
        ended = True
    except SubjectError as error:
        return [_failed(setup, error, recent, folder)]
    except DeviceLost as lost:
        rounds = recent.up_to(None)
        lost_in = f"{lost}{_undefined_schedule(setup, rounds)}"
        raise DeviceLost(f"{lost_in}{_rounds_kept(setup.scenario(rounds, found=lost_in), folder)}") from lost
    finally:
        if replayer is not None:
            _count(replayer, counts, waivers_due=waivers_due and ended, must_occur=waivers_due)
    if replayer is not None:
        with translate_out_of_memory():
            require_sight(replayer)
    return []


def _rounds_kept(scenario: Scenario, folder: Path | None) -> str:
    """Return what to append to a DeviceLost error: where its rounds are, or why they could not be written."""
    try:
        path = _save(scenario, "device-lost", folder)
    except OSError as error:
        return f"; the rounds up to then could not be saved: {reason_of(error)}"
    return "" if path is None else f"; the rounds up to then are in {path}"


def _failed(setup: ReplaySetup, error: SubjectError, recent: _Recent, folder: Path | None) -> Finding:
    rounds, finding, seen = recent.up_to(error.round or 0), fault_finding(setup, error), error.round
    if error.stage == "rounds":
        # Seen after many rounds: one at a time they say which.
        exact = next((each for each in confirm(setup, rounds) if each.diagnosis is finding.diagnosis), None)
        if exact is not None:
            kept = rounds[: (exact.round or 0) + 1]
            rounds, finding, seen = kept, exact, (error.round or 0) - (len(rounds) - len(kept))
    return dataclasses.replace(_with_case(finding, setup, rounds, folder), seen_in_round=seen)


def _undefined_schedule(setup: ReplaySetup, rounds: Sequence[Round]) -> str:
    """Return what to append to a DeviceLost error if one of `rounds` requested an undefined schedule (contract 3.6)."""
    for i, each in enumerate(rounds):
        if is_undefined(setup.system, setup.geometry, each):
            return (
                f"; round {i} is {each.bucket} requests of length 0: a {setup.geometry.schedule} schedule over a "
                "multiple of 32 rows which are all empty is undefined, the shipped builder reads past its memory "
                "(contract 3.6)"
            )
    return ""


class _Recent:
    """The last two chunks as tables; turned into rounds only when there is something to explain."""

    def __init__(self) -> None:
        self._tables: deque[RoundTable] = deque(maxlen=2)
        self._ended = 0  # rounds in all tables ever appended

    def append(self, table: RoundTable) -> None:
        self._tables.append(table)
        self._ended += len(table)

    def up_to(self, number: int | None) -> list[Round]:
        """Return the rounds that are still here, up to and with round `number` (None: all)."""
        rounds = [round_ for table in self._tables for round_ in table.rounds()]
        first = self._ended - len(rounds)
        return rounds if number is None else rounds[: max(number - first, 0) + 1]


def _explain(setup: ReplaySetup, rounds: Sequence[Round], seen: Observation, folder: Path | None) -> list[Finding]:
    """Return the findings of the last of `rounds`, with the shortest case that shows them again."""
    findings, case, attempts = _shown_again(setup, rounds)
    findings = findings or [flaky_finding(setup, seen.tallies, attempts)]
    return [_with_case(finding, setup, case, folder) for finding in findings]


def _shown_again(
    setup: ReplaySetup, rounds: Sequence[Round], waived: set[Covered] | None = None, until: Covered | None = None
) -> tuple[list[Finding], Sequence[Round], int]:
    """Return the findings of the shortest end of `rounds` that has any, that end or else the longest one, and how many
    were tried. None is tried any more once `until` is among the `waived`."""
    attempts = 0
    for window in CASE_WINDOWS:
        case = rounds[-window:]
        findings = confirm(setup, case, waived=waived)
        attempts += 1
        if findings or window >= len(rounds) or (waived and until in waived):
            break
    return findings, case, attempts


def _explain_waived(setup: ReplaySetup, recent: _Recent, seen: Observation, folder: Path | None) -> list[Finding]:
    """Return the findings of the first round in which a waiver covers words, if they are not what it is for; empty if
    they are. Of what the device can say itself there is nothing to explain."""
    waived: set[Covered] = set()
    for first, bucket, words in seen.to_explain:
        covered = (bucket, words.waiver.key)
        if covered not in waived:
            findings, case, attempts = _shown_again(setup, recent.up_to(first), waived, covered)
            if not findings and covered not in waived:
                findings = [flaky_waived(setup, words.waiver, first, bucket, attempts)]
            if findings:
                return _seen_in(first, [_with_case(finding, setup, case, folder) for finding in findings])
        words.explained = True
    return []


def _seen_in(round_: int | None, findings: Sequence[Finding]) -> list[Finding]:
    """`findings` of round `round_` of the run; a subject that failed in capture failed in none."""
    return [dataclasses.replace(finding, seen_in_round=round_) for finding in findings]


def _count(replayer: Replayer, counts: Counts, *, waivers_due: bool, must_occur: bool) -> None:
    counts.replays += replayer.rounds_run
    counts.address_changes += len(replayer.address_changes)
    counts.compilations_after_warmup += len(replayer.compilations)
    with contextlib.suppress(DeviceLost):  # nothing can be read any more; the error is already on its way
        for bucket, seen in replayer.observe().buckets.items():
            counts.rounds_checked += seen.rounds
            counts.fields_checked += seen.rounds * seen.fields
            counts.elements_compared += seen.tally.compared
            counts.mismatches += seen.tally.count(Kind.FIELD, Kind.WIDER_BUCKET, Kind.INPUT)
            counts.guard_hits += seen.tally.count(Kind.GUARD)
            _count_waived(replayer, bucket, seen, counts, waivers_due)
            occurred = dict(seen.occurred) if must_occur else {}
            counts.add(Counts(occurred=occurred, eager_oracle=seen.eager_oracle))


def _count_waived(replayer: Replayer, bucket: int, seen: BucketSeen, counts: Counts, waivers_due: bool) -> None:
    for words, covered in seen.waived:
        waiver = words.waiver
        due = waivers_due and waiver.must_show(replayer.geometry, bucket, replayer.rounds_run)
        use = counts.waivers.setdefault(waiver.key, WaiverUse(id=waiver.id, field=waiver.field, reason=waiver.reason))
        use.rounds += covered.rounds
        use.words += covered.words
        use.checked += seen.rounds
        use.due += seen.rounds if due else 0
        counts.waived += covered.words


# Cases ---------------------------------------------------------------------------------------------------------------


def _with_case(finding: Finding, setup: ReplaySetup, rounds: Sequence[Round], folder: Path | None) -> Finding:
    try:
        path = _save(setup.scenario(rounds, found=finding.sentence), _stem(finding), folder)
    except OSError as error:
        # The finding outlives its case: a full disk is no reason to say nothing.
        return dataclasses.replace(finding, not_saved=reason_of(error))
    if path is None:
        return finding
    command = replay_command(path, reference_of(setup.system), setup.subject, setup.ledger)
    return dataclasses.replace(finding, case=str(path), reproduce=command)


def replay_command(case: Path, system: str, subject: str | None, ledger: Ledger) -> str:
    """Return what to type to replay `case`, which names `system` and `subject`, with the waivers of `ledger`."""
    return shlex.join(["dsa-verify", "replay", str(case), *code_options(system, subject), *ledger.options])


def _stem(finding: Finding) -> str:
    parts = (finding.system, finding.field or finding.diagnosis.value, finding.diagnosis.value)
    return "-".join(dict.fromkeys(part.replace(" ", "-").replace("'", "") for part in parts))


def _save(scenario: Scenario, stem: str, folder: Path | None) -> Path | None:
    """Write the case, with a digest of its text in the name so that none overwrites another. OSError if it cannot."""
    if folder is None:
        return None
    text = scenario.to_json()
    path = folder / f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    write_atomically(path, text)
    return path


@contextlib.contextmanager
def _journal(setup: ReplaySetup, table: RoundTable, folder: Path | None) -> Iterator[None]:
    """Write the case to disk before it is launched; what is left there after a crash is what crashed. Where it cannot
    be written, that is said once and the run goes on."""
    if folder is None or len(table) > JOURNAL_ROUNDS:
        yield
        return
    ours = not os.path.exists(folder)
    path = folder / f"running-{os.getpid()}.json"
    # A GPU may take its machine down; what an emulated graph can take down is this process.
    try:
        write_atomically(path, setup.scenario(table.rounds()).to_json(), durable=setup.backend.device.type == "cuda")
    except OSError as error:
        _say_once(f"{folder}: nothing can be saved there ({reason_of(error)}), so a crash would leave no case")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            if ours:
                folder.rmdir()  # only if nothing was found


@functools.cache
def _say_once(text: str) -> None:
    click.echo(f"dsa-verify: {text}", err=True)
