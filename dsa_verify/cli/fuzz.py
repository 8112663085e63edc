"""`dsa-verify fuzz`: simulated rounds for one subject or several systems, to lines, JSON and an exit status. What is
found is shrunk, and what the small case depends on is said in words."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from dsa_verify.base.atomic_write import reason_of, write_atomically
from dsa_verify.base.device import environment
from dsa_verify.base.errors import UsageError
from dsa_verify.cli.options import RunOptions
from dsa_verify.contract import progress
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.geometry import parse_settings
from dsa_verify.contract.system import System
from dsa_verify.graphs import Backend, open_backend
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.report import document
from dsa_verify.report.terminal import Terminal
from dsa_verify.rounds.case_file import read_case
from dsa_verify.rounds.matrix import Config
from dsa_verify.run.runner import Outcome, RunResult, new_result, status_of
from dsa_verify.run.verify import replay_command
from dsa_verify.subjects.faults import systems_of
from dsa_verify.systems.catalogue import default_subject, get_system, resolve_geometry, systems_to_run
from dsa_verify.waivers.waivers import Ledger
from fuzz.configurations import configurations, describe, share_out, visited
from fuzz.engine.coverage import Coverage, say
from fuzz.fuzzer import FuzzResult, fuzz
from fuzz.reduce.sensitivity import explain
from fuzz.reduce.shrink import shrink
from fuzz.reduce.trials import Signature

# Rounds of a system, where the command line does not say.
ROUNDS: Final = {"cuda": 20_000, "cpu": 1_000}
NEVER_SHOWN: Final = 10  # lines of what was never visited; JSON has all
NOT_SHRUNK: Final = (Diagnosis.FLAKY, Diagnosis.RECOMPILES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options(RunOptions):
    """The options of the command, as parsed."""

    resident: bool
    shrink_s: float


def run(options: Options, device: torch.device) -> int:
    """Do it all; returns the exit status. UsageError before anything has run."""
    backend = open_backend(device)
    names = systems_to_run(options.systems, options.subject, systems_of(options.fault))
    rounds = options.rounds if options.rounds is not None else ROUNDS[device.type]
    plan = [(get_system(name), _configs(get_system(name), names, rounds, options, backend)) for name in names]
    ledger = options.ledger()
    ledger.refuse_if_idle([(system.name, options.subject or default_subject(system)) for system, _ in plan])
    runs: list[RunResult] = []
    results: list[dict[str, Any]] = []
    with Terminal(rounds * len(plan)) as terminal:
        terminal.heading(environment(device), backend)

        def work() -> None:
            for system, configs in plan:
                terminal.begin(system.name)
                result = new_result(system.name, options.subject, backend, ledger)
                runs.append(result)
                results.append(_fuzz_system(system, configs, options, runs, terminal, backend, ledger))
                if result.findings and not options.keep_going:
                    break

        status = terminal.guard(work) or status_of(runs)
        terminal.verdict(runs, status)
    return document.save(runs, status, options.json_path, fuzz=results)


def _configs(system: System, names: Sequence[str], rounds: int, options: Options, backend: Backend) -> list[Config]:
    """Return the configurations of one of the systems `names` to capture: another few with another seed, as far as the
    options leave it open."""
    device = backend.device
    settings = parse_settings(options.settings)
    if options.drafts and not system.drafts and options.systems:
        raise UsageError(f"--draft-tokens: has no effect in {system.name}, which has no draft; leave it out")
    geometry, fixed = resolve_geometry(system, options.subject, device.type, options.preset, settings, names)
    if options.preset is not None:
        fixed |= {"indexer"}  # which is what the names of presets tell apart
    found = configurations(
        system,
        geometry,
        seed=options.seed,
        rounds=rounds,
        device_type=device.type,
        subject=options.subject,
        batches=options.batches,
        drafts=options.drafts if system.drafts else (),
        fixed=fixed,
    )
    return found if options.fault is None else _with_the_fault(found, rounds, options, backend)


def _with_the_fault(configs: Sequence[Config], rounds: int, options: Options, backend: Backend) -> list[Config]:
    """Return those of `configs` in which the fault has what it spoils, for all the rounds; UsageError if it has it in
    none."""
    found, refusals = list[Config](), list[UsageError]()
    for config in configs:
        try:
            ReplaySetup.of_config(config, options.subject, options.fault, backend)
            found.append(config)
        except UsageError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    shares = share_out(rounds, [max(config.rounds, 1) for config in found])
    return [dataclasses.replace(config, rounds=share) for config, share in zip(found, shares, strict=True)]


def _fuzz_system(
    system: System,
    configs: Sequence[Config],
    options: Options,
    runs: Sequence[RunResult],
    terminal: Terminal,
    backend: Backend,
    ledger: Ledger,
) -> dict[str, Any]:
    """Fuzz `configs`, adding to the last of `runs`."""
    result = runs[-1]
    progress.current().results(runs)
    parts: list[tuple[Config, FuzzResult]] = []
    small: list[dict[str, Any]] = []
    start = time.perf_counter()
    for i, config in enumerate(configs):
        if not config.rounds:
            continue
        terminal.say(f"  {config.rounds} rounds of {describe(config.geometry, config.buckets)}")
        setup = ReplaySetup.of_config(config, options.subject, options.fault, backend, ledger)
        part = fuzz(
            setup,
            config.rounds,
            options.seed,
            Coverage(system, config.geometry, config.buckets),
            folder=options.folder,
            resident=options.resident,
            on_rounds=terminal.advance,
        )
        parts.append((config, part))
        result.not_covered.update(setup.not_covered)
        result.counts.add(part.counts)
        result.wall_s = time.perf_counter() - start
        result.findings += part.findings
        result.outcomes.append(Outcome(name=config.name, findings=part.findings, wall_s=result.wall_s))
        progress.current().results(runs)
        for finding in part.findings:
            terminal.finding(finding)
        if part.findings:
            small += _make_small(part.findings, options, terminal, backend, ledger)
            if not options.keep_going:
                result.stopped_early = i + 1 < len(configs)
                break
    terminal.end(result)
    return _report(system.name, sum(config.rounds for config in configs), parts, small, terminal)


def _make_small(
    findings: Sequence[Finding], options: Options, terminal: Terminal, backend: Backend, ledger: Ledger
) -> list[dict[str, Any]]:
    """Shrink the first finding that has a case, and say what it depends on; the others come of the same rounds. For
    JSON what came of it, an entry or none.

    A flaky subject may not show it again. The finding stands, and its case stays as it was written.
    """
    finding = next((each for each in findings if each.case and each.diagnosis not in NOT_SHRUNK), None)
    if finding is None or finding.case is None or not options.shrink_s:
        return []
    facts: dict[str, Any] = {"case": finding.case}
    signature = Signature.of(finding)
    try:
        small = shrink(read_case(Path(finding.case)), signature, backend, budget_s=options.shrink_s, ledger=ledger)
    except UsageError as error:
        terminal.say(f"  not shrunk: {error}")
        return [facts | {"not_shrunk": str(error)}]
    path = Path(finding.case).with_suffix(".small.json")
    facts |= {"rounds": len(small.scenario.rounds), "finished": small.finished}
    lost = _written(path, small.scenario.to_json())
    facts |= {"small_case": str(path)} if lost is None else {"not_saved": lost}
    try:
        explained = explain(small.scenario, signature, backend, budget_s=options.shrink_s, ledger=ledger)
        said = explained.sentence
        facts |= {"depends_on": said, "verdicts": [dataclasses.asdict(verdict) for verdict in explained.verdicts]}
    except UsageError as error:
        said = f"not explained: {error}"
        facts |= {"not_explained": str(error)}
    ended = "" if small.finished else ", the time for it being over"
    terminal.say(f"  shrunk in {small.seconds:.1f} s{ended}: {said}")
    if lost:
        terminal.say(f"  the small case could not be saved: {lost}")
        return [facts]
    terminal.say(f"  reproduce: {replay_command(path, small.scenario.system, small.scenario.subject, ledger)}")
    return [facts]


def _written(path: Path, text: str) -> str | None:
    """Write the case; why it cannot be, or None if it is there."""
    try:
        write_atomically(path, text)
    except OSError as error:
        return reason_of(error)
    return None


def _report(
    system: str,
    requested: int,
    parts: Sequence[tuple[Config, FuzzResult]],
    small: Sequence[dict[str, Any]],
    terminal: Terminal,
) -> dict[str, Any]:
    results = [part for _, part in parts]
    digest = hashlib.sha256(" ".join(part.digest for part in results).encode()).hexdigest()[:16]
    executed = sum(part.executed for part in results)
    visits = [visits for part in results for visits in part.coverage.visits().values()]
    terminal.say(
        f"  rounds requested {requested}, executed {executed}; coverage {sum(map(bool, visits))} of {len(visits)}, "
        f"digest {digest}"
    )
    never = list(dict.fromkeys(say(key) for part in results for key in part.coverage.never_visited()))
    for line in never[:NEVER_SHOWN]:
        terminal.say(f"    never visited: {line}")
    if len(never) > NEVER_SHOWN:
        terminal.say(f"    and {len(never) - NEVER_SHOWN} more; --json has all")
    return {
        "system": system,
        "coverage_digest": digest,
        "parts": [{"configuration": visited(config), **part.to_dict()} for config, part in parts],
        "made_small": list(small),
    }
