"""`dsa-verify replay` runs cases or the diagnostic matrix and reports on the terminal, as JSON and as JUnit XML."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from dsa_verify.base.device import environment
from dsa_verify.base.errors import UsageError
from dsa_verify.cli.options import RunOptions
from dsa_verify.contract import progress
from dsa_verify.contract.geometry import parse_settings
from dsa_verify.contract.round import Scenario
from dsa_verify.graphs import Backend, open_backend
from dsa_verify.report import document
from dsa_verify.report.terminal import Terminal
from dsa_verify.rounds.case_file import read_case
from dsa_verify.rounds.edge_configs import edges, why_not_here
from dsa_verify.rounds.matrix import Config, diagnostic_matrix
from dsa_verify.run.runner import Runner, RunResult, new_result, status_of
from dsa_verify.subjects.faults import systems_of
from dsa_verify.systems.catalogue import default_subject, get_system, resolve_geometry, systems_to_run
from dsa_verify.systems.trust import check_trust

# Options that shape the matrix, by attribute of Options, with the value of each that is not given.
MATRIX_FLAGS: Final[dict[str, tuple[str, object]]] = {
    "systems": ("--system", ()),
    "preset": ("--preset", None),
    "rounds": ("--rounds", None),
    "seed": ("--seed", 0),
    "batches": ("--batch", ()),
    "drafts": ("--draft-tokens", ()),
    "settings": ("--set", ()),
    "edges": ("--edges", False),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options(RunOptions):
    """The options of the command, as parsed."""

    cases: tuple[Path, ...]
    junit_path: Path | None
    edges: bool = False
    trust: bool = False


def run(options: Options, device: torch.device) -> int:
    """Run the command and return the exit status. Raises UsageError before anything has run."""
    backend = open_backend(device)
    outputs = [path for path in (options.json_path, options.junit_path) if path is not None]
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise UsageError(f"--junit {options.junit_path}: is the file of --json, too; name another one")
    for name in options.systems if options.cases else ():
        get_system(name)  # which a case may name then
    scenarios = [read_case(path, trusts=lambda name: options.trust) for path in options.cases]
    plan = _cases_plan(options, scenarios) if scenarios else _matrix_plan(options, backend)
    if options.trust and (not scenarios or options.subject is not None):
        raise UsageError("--trust: has no effect without a CASE, or where --subject names what runs; leave it out")
    ledger = options.ledger()
    ledger.refuse_if_idle(
        [(item.system, item.subject(options) or default_subject(get_system(item.system))) for item in plan]
    )
    runs: list[RunResult] = []
    with Terminal(sum(item.rounds for item in plan)) as terminal:
        terminal.heading(environment(device), backend)
        runner = Runner(
            backend=backend,
            folder=options.folder,
            keep_going=options.keep_going,
            on_rounds=terminal.advance,
            on_outcome=lambda: progress.current().results(runs),
            on_finding=terminal.finding,
            ledger=ledger,
        )

        def work() -> None:
            for item in plan:
                terminal.begin(item.label)
                result = new_result(item.system, item.subject(options), backend, ledger)
                runs.append(result)
                progress.current().results(runs)
                item.start(runner, options, result)
                terminal.end(result)

        status = terminal.guard(work) or status_of(runs)
        terminal.verdict(runs, status)
    return document.save(runs, status, options.json_path, options.junit_path)


# What is to be run ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    system: str
    configs: list[Config]
    not_run: list[str]

    @property
    def label(self) -> str:
        return self.system

    @property
    def rounds(self) -> int:
        return sum(config.rounds for config in self.configs)

    def subject(self, options: Options) -> str | None:
        return options.subject

    def start(self, runner: Runner, options: Options, result: RunResult) -> None:
        result.not_run += self.not_run
        runner.matrix(self.configs, options.subject, result, fault=options.fault)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    scenario: Scenario

    @property
    def system(self) -> str:
        return get_system(self.scenario.system).name

    @property
    def label(self) -> str:
        return self.scenario.name

    @property
    def rounds(self) -> int:
        return len(self.scenario.rounds)

    def subject(self, options: Options) -> str | None:
        return self.scenario.subject if options.subject is None else options.subject

    def start(self, runner: Runner, options: Options, result: RunResult) -> None:
        runner.case(self.scenario, options.subject, result, fault=options.fault)


def _cases_plan(options: Options, scenarios: Sequence[Scenario]) -> list[_Case]:
    for name, (flag, absent) in MATRIX_FLAGS.items():
        if name == "systems" and all(":" in each for each in options.systems):
            continue  # they only let cases name code
        if getattr(options, name) != absent:
            raise UsageError(f"{flag}: has no effect with a CASE, which says it itself; edit the case, or leave it out")
    for scenario in scenarios if options.subject is None and not options.trust else ():
        try:
            check_trust(get_system(scenario.system), scenario.subject)
        except UsageError as error:
            raise UsageError(f"{scenario.name}: {error}") from None
    return [_Case(scenario=scenario) for scenario in scenarios]


def _matrix_plan(options: Options, backend: Backend) -> list[_Matrix]:
    settings = parse_settings(options.settings)
    plan = []
    names = systems_to_run(options.systems, options.subject, systems_of(options.fault))
    for name in names:
        system = get_system(name)
        if options.drafts and not system.drafts:
            if options.systems:
                raise UsageError(f"--draft-tokens: has no effect in {name}, which has no draft; leave it out")
            continue
        geometry, fixed = resolve_geometry(
            system, options.subject, backend.device.type, options.preset, settings, names
        )
        configs = diagnostic_matrix(
            system,
            geometry,
            rounds=options.rounds,
            seed=options.seed,
            batches=options.batches or None,
            drafts=options.drafts or None,
            fixed=fixed,
        )
        beside = edges(system, geometry, seed=options.seed, fixed=fixed) if options.edges else []
        reasons = [why_not_here(edge, backend.device) for edge in beside]
        configs += [edge.config for edge, why in zip(beside, reasons, strict=True) if why is None]
        plan.append(_Matrix(system=system.name, configs=configs, not_run=[why for why in reasons if why is not None]))
    if not plan:
        raise UsageError("--draft-tokens: has no effect in any system that this run covers; leave it out")
    return plan
