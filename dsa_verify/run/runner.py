"""The runner does what the command line and the pytest plugin both need: it runs the matrix or cases to a result."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from dsa_verify.base.device import environment
from dsa_verify.base.errors import STATUS_EQUAL, STATUS_FLAKY, STATUS_MISMATCH, STATUS_NOTHING_VERIFIED
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.round import Scenario
from dsa_verify.contract.round_table import RoundTable
from dsa_verify.contract.subject import SubjectFactory, provenance
from dsa_verify.graphs import Backend
from dsa_verify.replay.setup import ReplaySetup, remap_slots_of
from dsa_verify.rounds.matrix import Config
from dsa_verify.run.verify import FINDINGS_FOLDER, Counts, verify_rounds
from dsa_verify.systems.catalogue import get_system
from dsa_verify.systems.engines import check_device
from dsa_verify.waivers.waivers import NO_WAIVERS, Ledger, WaiverUse

RESULT_SCHEMA: Final = 1
Subject = str | SubjectFactory | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One configuration or case ended like this."""

    name: str
    findings: tuple[Finding, ...]
    wall_s: float


@dataclasses.dataclass(slots=True, kw_only=True)
class RunResult:
    """The result of one subject in one system; filled while it runs, so an interrupt leaves what was done.

    `provenance`: which code the subject is of, where that is not the project's own or the user's. `not_covered`: by
    field that the subject does not give, why. `not_run`: the edges that this machine cannot run. `other_versions`: of
    each waiver of this subject that is for other versions of it, why it does not apply. `may_compile`: why kernels may
    be compiled after the warm-up; empty if that is a finding.
    """

    system: str
    subject: str
    device: str
    graph: str
    counts: Counts = dataclasses.field(default_factory=Counts)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    wall_s: float = 0.0
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    interrupted: bool = False
    stopped_early: bool = False
    provenance: dict[str, str] = dataclasses.field(default_factory=dict)
    not_covered: dict[str, str] = dataclasses.field(default_factory=dict)
    not_run: list[str] = dataclasses.field(default_factory=list)
    other_versions: list[str] = dataclasses.field(default_factory=list)
    may_compile: str = ""

    @property
    def gone(self) -> list[WaiverUse]:
        """Return the waivers whose difference is gone, once all that was asked for has run."""
        if self.interrupted or self.stopped_early:
            return []
        return [use for use in self.counts.waivers.values() if use.gone]

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON, with the counts flat beside the rest."""
        rate = self.counts.rounds_checked / self.wall_s if self.wall_s else 0.0
        return {
            "schema": RESULT_SCHEMA,
            "system": self.system,
            "subject": self.subject,
            "device": self.device,
            "graph": self.graph,
            **self.counts.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
            "wall_s": round(self.wall_s, 3),
            "rounds_per_s": round(rate, 1),
            "interrupted": self.interrupted,
            "environment": self.environment,
            "provenance": self.provenance,
            "not_covered": self.not_covered,
            "not_run": self.not_run,
            "waivers_of_other_versions": self.other_versions,
            "compilations_allowed": self.may_compile,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs configurations or cases on `backend`.

    `folder`: where cases of findings go (None: nowhere). `keep_going`: go on to the next configuration after a
    finding. `on_rounds(n)`: called after n more rounds; `on_outcome()`: after each configuration or case;
    `on_finding(finding)`: as soon as one is known. `ledger`: the differences that are known. A case need not show
    them: it is what was left of many rounds.
    """

    backend: Backend
    folder: Path | None = FINDINGS_FOLDER
    keep_going: bool = False
    on_rounds: Callable[[int], None] = lambda count: None
    on_outcome: Callable[[], None] = lambda: None
    on_finding: Callable[[Finding], None] = lambda finding: None
    ledger: Ledger = NO_WAIVERS

    def matrix(self, configs: Sequence[Config], subject: Subject, run: RunResult, *, fault: str | None = None) -> None:
        """Run `configs` of one system, adding to `run`."""
        for i, config in enumerate(configs):
            setup = ReplaySetup.of_config(config, subject, fault, self.backend, self.ledger)
            self._run(setup, setup.with_foreign_work(config.chunks()), config.name, run, waivers_due=True)
            if run.findings and not self.keep_going:
                run.stopped_early = i + 1 < len(configs)
                return

    def case(self, scenario: Scenario, subject: Subject, run: RunResult, *, fault: str | None = None) -> None:
        """Run one case, adding to `run`; `subject` and `fault` override those it names. What it names is imported: of a
        case that somebody else wrote, ask `check_trust` first."""
        setup = ReplaySetup.of_case(scenario, self.backend, self.ledger, subject=subject, fault=fault)
        table = setup.table(scenario.rounds, remap_slots_of(scenario.rounds))
        self._run(setup, [table] if len(table) else [], scenario.name or "case", run, waivers_due=False)

    def _run(
        self, setup: ReplaySetup, chunks: Iterable[RoundTable], name: str, run: RunResult, *, waivers_due: bool
    ) -> None:
        start = time.perf_counter()
        found: list[Finding] = []
        run.not_covered.update(setup.not_covered)
        try:
            found = verify_rounds(
                setup,
                chunks,
                run.counts,
                folder=self.folder,
                on_rounds=self.on_rounds,
                waivers_due=waivers_due,
            )
        except KeyboardInterrupt:
            run.interrupted = True
            raise
        finally:
            wall_s = time.perf_counter() - start
            run.wall_s += wall_s
        run.findings += found
        run.outcomes.append(Outcome(name=name, findings=tuple(found), wall_s=wall_s))
        self.on_outcome()
        for finding in found:
            self.on_finding(finding)


def new_result(system: str, subject: Subject, backend: Backend, ledger: Ledger = NO_WAIVERS) -> RunResult:
    """Return an empty result; UsageError without the subject or its code, NothingVerified for want of its device."""
    label, factory = ReplaySetup.factory_of(get_system(system), subject)
    check_device(label, backend.device)
    return RunResult(
        system=system,
        subject=label,
        device=str(backend.device),
        graph=backend.name,
        environment=environment(backend.device),
        provenance=provenance(factory),
        other_versions=ledger.outside(system, label, factory),
        may_compile=ledger.may_compile(label),
    )


def total(runs: Sequence[RunResult]) -> Counts:
    """The counts of all `runs`."""
    counts = Counts()
    for run in runs:
        counts.add(run.counts)
    return counts


def status_of(runs: Sequence[RunResult]) -> int:
    """Return the exit status that the results of `runs` have earned."""
    findings = [finding for result in runs for finding in result.findings]
    if any(finding.diagnosis is not Diagnosis.FLAKY for finding in findings) or any(run.gone for run in runs):
        return STATUS_MISMATCH
    if findings:
        return STATUS_FLAKY
    # A system or case that checked nothing, or not what must occur, is not a pass, even beside others that did.
    if not runs or any(result.counts.rounds_checked == 0 or result.counts.missing for result in runs):
        return STATUS_NOTHING_VERIFIED
    return STATUS_EQUAL
