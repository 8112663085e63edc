"""What a shard does: fuzzes its rounds, makes the most of each finding, and shows with a planted fault that it could.

Every finding is written down, repeated from nothing, shrunk, and written down at each step. Then the same is done with
a fault planted, which must come out at the other end: a campaign that reports nothing has to show that it could.

Importing this imports kernels, so the device is chosen first (device.py).
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, Final

import torch

from dsa_verify.base.atomic_write import write_atomically
from dsa_verify.base.errors import HarnessError, UsageError
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.round import Scenario
from dsa_verify.contract.subject import provenance
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.graphs import Backend, open_backend
from dsa_verify.replay.setup import ReplaySetup, remap_slots_of
from dsa_verify.replay.subject_stages import SubjectError
from dsa_verify.rounds.case_file import read_case
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts
from dsa_verify.subjects.faults import get_fault
from dsa_verify.systems.catalogue import get_system, resolve_geometry
from dsa_verify.systems.trust import check_trust
from dsa_verify.waivers.waivers import Ledger, check_names, choose_ledger, parse_ledger
from fuzz.campaign.journal import Journal, JournalledSetup, Stopped
from fuzz.campaign.plan import LEDGER_FILE, Plan, ShardSpec
from fuzz.campaign.shard_folder import (
    SPEC_FILE,
    CaseNotSaved,
    FindingKey,
    FindingRecord,
    ShardResult,
    campaign_root,
    read_json,
    shard_folder,
    shard_numbers,
)
from fuzz.configurations import describe
from fuzz.engine.coverage import Coverage
from fuzz.fuzzer import fuzz
from fuzz.reduce.shrink import shrink
from fuzz.reduce.trials import Signature

REPEATS: Final = 3  # of the case of each finding, from nothing
SHRINK_S: Final = 60.0
CANARY_SHRINK_S: Final = 10.0  # that it shrinks at all is what is to be shown
# A subject that fails again and again is not made known any better by a hundred more of its failures.
MOST_FINDINGS: Final = 4
CANARY_ROUNDS: Final = 192
# Faults that the simulator's first CANARY_ROUNDS rounds show, whatever the configuration.
CANARIES: Final = (
    "skip_refresh",
    "not_refreshed",
    "rows_rolled",
    "frozen_at_capture",
    "stale_request_map",
    "past_the_end",
    "input_overwritten",
    "tail_not_reset",
)


def work_shard(spec: ShardSpec, folder: Path, device: torch.device) -> ShardResult:
    """Run the shard on `device`; what it finds is in `folder`."""
    start = time.monotonic()
    journal = Journal(folder)
    setup = JournalledSetup.of(_setup(spec, open_backend(device)), journal)
    coverage = Coverage(setup.system, setup.geometry, setup.buckets)
    canary, counts = None, Counts()
    try:
        # First, so that a shard whose time is cut short has shown all the same that it can see.
        canary = _canary(spec, setup, folder)
        ended = _fuzz(spec, setup, coverage, folder, counts)
        _note_waivers(setup, counts, folder)
    except Stopped:
        ended = "stopped"
    result = ShardResult(
        number=spec.number,
        system=spec.system,
        configuration=configuration(setup),
        ended=ended,
        requested=spec.plan.rounds_a_shard,
        executed=journal.rounds,
        wall_s=round(time.monotonic() - start, 3),
        canary=canary,
        coverage=_coverage(setup, coverage),
        provenance=provenance(setup.factory),
    )
    result.write(folder)
    return result


def configuration(setup: JournalledSetup) -> str:
    """Return the configuration in words, the same for shards that cover the same."""
    return f"{setup.system.name}, {describe(setup.geometry, setup.buckets)}"


def _setup(spec: ShardSpec, backend: Backend) -> ReplaySetup:
    """Return what the shard runs: one configuration of the diagnostic matrix of its system."""
    plan, system = spec.plan, get_system(spec.system)
    device_type = backend.device.type
    geometry, fixed = resolve_geometry(system, plan.subject, device_type, plan.preset, plan.settings, plan.systems)
    drafts = [geometry.draft_tokens] if "draft_tokens" in plan.settings else plan.drafts or None
    configs = diagnostic_matrix(
        system,
        geometry,
        batches=plan.batches or None,
        drafts=drafts if system.drafts else None,
        fixed=fixed - {"draft_tokens"},
    )
    config = configs[spec.turn % len(configs)]
    buckets = tuple(dict.fromkeys(max(bucket // spec.batch_divisor, 1) for bucket in config.buckets))
    ledger = _ledger(plan)
    return ReplaySetup.make(system, config.geometry, buckets, spec.seed, plan.subject, plan.fault, backend, ledger)


def _ledger(plan: Plan) -> Ledger:
    if plan.waivers:
        ledger = parse_ledger(plan.waivers, LEDGER_FILE)
        check_names(ledger)
    else:
        ledger = choose_ledger(None, plan.waivers is not None)
    return ledger.allowing_compilations(plan.allow_compilations)


def _fuzz(spec: ShardSpec, setup: JournalledSetup, coverage: Coverage, folder: Path, counts: Counts) -> str:
    """Fuzz the shard's rounds, anew after each finding, adding to `counts`, and return how it ended."""
    left, stretch, journal = spec.plan.rounds_a_shard, 0, setup.journal
    while left > 0:
        if stretch == MOST_FINDINGS:
            return f"after {MOST_FINDINGS} findings"
        result = fuzz(
            setup,
            left,
            spec.seed + stretch,
            coverage,
            folder=folder / "cases",
            resident=spec.plan.resident,
            on_rounds=journal.count,
        )
        counts.add(result.counts)
        for finding in result.findings:
            _found(finding, setup, folder)  # all of them, before minutes are spent on the first
        for finding in result.findings:
            take(finding, setup, folder)
        left, stretch = left - result.executed, stretch + 1
    return "complete"


def _coverage(setup: JournalledSetup, coverage: Coverage) -> dict[str, Any]:
    never = coverage.never_visited()
    return {
        "configuration": configuration(setup),
        "possible": len(coverage.visits()),
        "never": [list(key) for key in never],
        "digest": coverage.digest(),
    }


def _note_waivers(setup: JournalledSetup, counts: Counts, folder: Path) -> None:
    """Write down what came of each waiver: its difference was seen here, or it had to be and was not."""
    for waiver in setup.waivers:
        use = counts.waivers.get(waiver.key)
        if use is None or not (use.words or use.gone):
            continue
        key = FindingKey(
            system=setup.system.name,
            subject=setup.subject,
            field=waiver.field,
            diagnosis=waiver.called,
            law=waiver.law,
        )
        seen = f"waiver {use.id}: {use.field} in {use.rounds} of {use.checked} rounds, {use.words} words: {use.reason}"
        FindingRecord(
            key=key,
            state="gone" if use.gone else "waived",
            finding={**use.to_dict(), "sentence": use.sentence if use.gone else seen},
            waiver=waiver.id,
        ).write(folder)


# Findings ------------------------------------------------------------------------------------------------------------


def take(finding: Finding, setup: JournalledSetup, folder: Path) -> FindingRecord:
    """Write `finding` down, repeat its case from nothing, shrink it; written down at each step."""
    record = _found(finding, setup, folder)
    if record.is_final:
        return record
    record = _repeated(record, finding, setup, folder)
    record.write(folder)
    if record.state == "confirmed":
        record = _shrunk(record, finding, setup, folder)
        record.write(folder)
    return record


def _found(finding: Finding, setup: JournalledSetup, folder: Path) -> FindingRecord:
    """Return its record: the final one, or the one that says that it was found."""
    key = FindingKey.of(finding.to_dict(), planted=setup.planted)
    known = FindingRecord.read(folder / "findings" / f"{key.name}.json")
    if known is not None and known.is_final:
        return known
    if finding.case is None:
        raise CaseNotSaved(f"{finding.sentence}; {finding.loss or 'the finding has no case'}")
    case = Path(finding.case)
    record = FindingRecord.of(finding, case=str(case.relative_to(folder)), planted=setup.planted)
    record.write(folder)
    return record


def _repeated(record: FindingRecord, finding: Finding, setup: JournalledSetup, folder: Path) -> FindingRecord:
    """Return the record as confirmed if every repeat shows the finding, and otherwise as flaky, with its rate."""
    assert record.case is not None
    if finding.diagnosis is Diagnosis.RECOMPILES:
        # It cannot show again in this process, which has the kernel now; that it was compiled is no matter of chance.
        return dataclasses.replace(record, state="confirmed", note="not repeated: a process compiles a kernel once")
    rounds = read_case(folder / record.case).rounds
    signature, shown = Signature.of(finding), 0
    for _ in range(REPEATS):
        again = confirm(setup, rounds)
        # A flaky one that shows again is explained, and so is called otherwise.
        shown += any(finding.diagnosis is Diagnosis.FLAKY or signature.matches(each) for each in again)
    state = "confirmed" if shown == REPEATS else "flaky"
    return dataclasses.replace(record, state=state, shown=shown, repeats=REPEATS)


def _shrunk(record: FindingRecord, finding: Finding, setup: JournalledSetup, folder: Path) -> FindingRecord:
    if finding.diagnosis is Diagnosis.RECOMPILES:
        return record
    elsewhere = None if record.key.planted else _shrunk_elsewhere(record.key, folder)
    if elsewhere is not None:
        return dataclasses.replace(record, note=f"not shrunk: shard {elsewhere} has done it")
    assert record.case is not None
    case = read_case(folder / record.case)
    try:
        smaller = _shrink(case, finding, setup)
    except UsageError as error:
        return dataclasses.replace(record, note=f"not shrunk: {error}")
    path = Path("cases") / f"shrunk-{record.key.name}.json"
    write_atomically(folder / path, smaller.to_json())
    return dataclasses.replace(record, state="shrunk", shrunk=str(path))


def _shrink(case: Scenario, finding: Finding, setup: JournalledSetup) -> Scenario:
    """Shrink the case. This is the one place that knows how."""
    signature, budget_s = Signature.of(finding), CANARY_SHRINK_S if setup.planted else SHRINK_S
    journal = setup.journal

    def on_launch(candidate: Scenario) -> None:
        journal.running(dataclasses.replace(candidate, found="while it was shrunk"), durable=False)

    return shrink(
        case,
        signature,
        setup.backend,
        budget_s=budget_s,
        clock=journal.clock,
        ledger=setup.ledger,
        on_launch=on_launch,
    ).scenario


def _shrunk_elsewhere(key: FindingKey, folder: Path) -> int | None:
    """Return the shard of this campaign that has shrunk the same finding already."""
    root = campaign_root(folder)
    for number in shard_numbers(root):
        try:
            other = FindingRecord.read(shard_folder(root, number) / "findings" / f"{key.name}.json")
        except HarnessError:
            continue  # a damaged shard is named by the report; this one shrinks the finding itself
        if other is not None and other.state == "shrunk":
            return number
    return None


# The planted fault ---------------------------------------------------------------------------------------------------


def _canary(spec: ShardSpec, setup: JournalledSetup, folder: Path) -> dict[str, Any]:
    """Plant a fault, chosen by the seed, and see it through. The verdict: "reported"; "masked", if the subject has a
    finding of its own in that place; "missing"."""
    faults = [fault for name in CANARIES if (fault := _plantable(name, spec, setup)) is not None]
    if not faults:
        return {"fault": None, "verdict": "missing", "finding": None, "why": "no fault can be planted here"}
    fault = faults[spec.seed % len(faults)]
    planted = dataclasses.replace(setup, fault=fault, planted=True)
    result = fuzz(
        planted,
        CANARY_ROUNDS,
        spec.seed,
        folder=folder / "cases",
        on_rounds=setup.journal.alive,
    )
    verdict: dict[str, Any] = {"fault": fault, "verdict": "missing", "finding": None}
    if not result.findings:
        return {**verdict, "why": f"{result.executed} rounds showed nothing"}
    # What the fault should be called comes first; that it is called so every time is not what is to be shown here.
    expected = get_fault(fault)[0].diagnoses
    for finding in sorted(result.findings, key=lambda each: each.diagnosis not in expected):
        own = _without_fault(finding, setup, folder)
        record = take(own or finding, setup if own else planted, folder)
        verdict |= {
            "finding": record.key.name,
            "why": f"{record.state}; {record.note}" if record.note else record.state,
        }
        if own is not None:
            verdict["verdict"] = "masked"
        elif record.state == "shrunk":
            called = None if finding.diagnosis in expected else f"called {finding.diagnosis.value}"
            return {**verdict, "verdict": "reported", "why": called}
    return verdict


def _without_fault(finding: Finding, setup: JournalledSetup, folder: Path) -> Finding | None:
    """Return the same finding if it shows without the planted fault, too: then it is the subject's own."""
    assert finding.case is not None
    case = read_case(Path(finding.case))
    signature = Signature.of(finding)
    for again in confirm(setup, case.rounds):
        if signature.matches(again):
            path = folder / "cases" / f"own-{Path(finding.case).name}"
            write_atomically(path, setup.scenario(case.rounds, found=again.sentence).to_json())
            return dataclasses.replace(again, case=str(path))
    return None


def _plantable(name: str, spec: ShardSpec, setup: JournalledSetup) -> str | None:
    """Return the fault as it is planted in what `setup` captures; None where it has no effect, or might be waived."""
    geometry, buckets = setup.geometry, setup.buckets
    try:
        fault = ReplaySetup.make(
            setup.system, geometry, buckets, spec.seed, spec.plan.subject, name, setup.backend
        ).fault
    except UsageError:
        return None
    assert fault is not None
    return None if get_fault(fault)[1] in {waiver.field for waiver in setup.waivers} else fault


# A case that ended a process -----------------------------------------------------------------------------------------


def replay_step_by_step(case_path: Path, folder: Path, device: torch.device) -> None:
    """Replay the case one round at a time; the progress in `folder` then says in which round the process ended."""
    spec = ShardSpec.from_dict(read_json(folder.parent / SPEC_FILE) or {})
    case, journal = read_case(case_path, trusts=lambda name: name in spec.plan.systems), Journal(folder)
    if case.subject != spec.plan.subject:  # which is trusted: whoever runs the campaign has named it
        check_trust(get_system(case.system), case.subject, "name it in the plan")
    setup = ReplaySetup.of_case(case, open_backend(device))
    journal.beat(force=True)
    slots, generations = remap_slots_of(case.rounds), setup.generations()
    try:
        replayer = setup.open(1, slots)
        for round_ in case.rounds:
            replayer.replay(setup.table([round_], slots, generations))
            replayer.poll()
            journal.rounds += 1
            journal.beat(force=True)
    except SubjectError:
        return  # it fails as a subject may, and the process lives
