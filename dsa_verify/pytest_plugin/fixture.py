"""DsaFixture is what the `dsa` fixture hands to a test. It runs the matrix or a case and fails the test in words.

Importing this module imports the kernels, so the plugin chooses the device first (device.py).
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from dsa_verify.base.errors import DeviceLost, NothingVerified, OutOfMemory, UsageError
from dsa_verify.changed_inputs.like_eager import FEWEST_ROUNDS, replays_like_eager
from dsa_verify.changed_inputs.result import LikeEager, NotLikeEager
from dsa_verify.contract import progress
from dsa_verify.contract.finding import Finding
from dsa_verify.contract.system import System
from dsa_verify.graphs import open_backend
from dsa_verify.rounds.case_file import read_case
from dsa_verify.rounds.matrix import Config, diagnostic_matrix
from dsa_verify.run.runner import Runner, RunResult, Subject, new_result
from dsa_verify.systems.catalogue import get_system, known_as, resolve_geometry
from dsa_verify.systems.trust import check_trust
from dsa_verify.waivers.waivers import NO_WAIVERS, Ledger, named_waivers, rounds_by_waiver

# A small part of the matrix: a test of one's own pipeline should end within seconds.
TEST_BATCHES: Final = (1, 4)
TEST_DRAFTS: Final = (2, 4)
# Of the inputs: each is part of every verification, however few configurations it has.
HARD_FORMS: Final[dict[str, str]] = {"input_view": "strided", "index_dtype": "int32"}
TRUST_REMEDY: Final = "list it under dsa_trust in the ini file, give --dsa-trust, or give dsa.case a subject"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The `dsa` fixture needs this of the pytest session it runs in."""

    directory: Path  # where pytest was started, and so where the commands in its report are typed
    on_run: Callable[[RunResult], None]  # called once for each run, also for one that was interrupted
    on_checked: Callable[[int, list[list[str]]], None]  # rounds of a callable, and (sentence, command) of a finding
    rerun: Callable[[], str]  # the command that runs the current test again
    stop: Callable[[str], None]  # ends the session after the current test


class DsaFixture:
    """Verifies subjects on `device`.

    `preset`, `rounds` (a configuration) and `seed` are what `verify` uses where it is not told otherwise (None: what
    the system has); cases of findings go to `folder`, relative to the session's directory. `ledger`: the known
    differences. `trusts(name)`: whether a case may name code that is neither shipped nor installed. `rounds_checked`
    counts those of this process.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        preset: str | None,
        rounds: int | None,
        seed: int,
        folder: Path,
        session: Session,
        ledger: Ledger = NO_WAIVERS,
        trusts: Callable[[str], bool] = lambda name: False,
    ):
        self.device = device
        self.preset, self.rounds = preset, rounds
        self.seed = seed
        self.rounds_checked = 0
        self._folder, self._ledger, self._trusts = folder, ledger, trusts
        self._session = session
        self._backend = open_backend(device)

    def verify(
        self,
        system: str | System | type,
        subject: Subject = None,
        *,
        batches: Sequence[int] | None = None,
        drafts: Sequence[int] | None = None,
        preset: str | None = None,
        rounds: int | None = None,
        **geometry: Any,
    ) -> RunResult:
        """Replay `subject` beside the oracle of `system`; the test fails if a byte differs or no round was checked.

        `system`: the name of one, "module:attribute", a System, or a class derived from `dsa_verify.Metadata`.
        `subject`: a class or function that returns a new Subject, the name of an installed one, or
        "module:attribute"; the shipped one by default. `batches` x `drafts` (none in decode) are the captured
        configurations, TEST_BATCHES x TEST_DRAFTS by default; each replays `rounds` rounds. Strided inputs and int32
        ones are always part of them: of a single one there is a second, which has both. `geometry` overrides fields of
        the preset. Raises pytest.UsageError for arguments that are wrong or have no effect.
        """
        __tracebackhide__ = True
        try:
            system = known_as(system)
            configs = self._configs(system, subject, batches, drafts, preset, rounds, geometry)
            run = self._open(system, subject)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        return self._finish(run, lambda runner: runner.matrix(configs, subject, run))

    def case(self, path: str | Path, subject: Subject = None) -> RunResult:
        """Replay the case file `path`, with `subject` instead of the one it names; fails and raises as `verify`.

        Also pytest.UsageError if the case names code that nobody has said may run (docs/pytest-plugin.md).
        """
        __tracebackhide__ = True
        try:
            scenario = read_case(Path(path), trusts=self._trusts)
            if subject is None and not (scenario.subject and self._trusts(scenario.subject)):
                check_trust(get_system(scenario.system), scenario.subject, TRUST_REMEDY)
            run = self._open(scenario.system, subject if subject is not None else scenario.subject)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        return self._finish(run, lambda runner: runner.case(scenario, subject, run))

    def replays_like_eager(self, fn: Callable[..., Any], inputs: Any, **options: Any) -> LikeEager:
        """Capture `fn(*inputs)`, replay it over changed inputs, and fail the test unless it replays like eager work.

        `options`: as `dsa_verify.replays_like_eager` has them; `rounds` and `seed` are the session's by default. Inputs
        on a GPU are captured in a CUDA graph, others in an emulated one. Raises pytest.UsageError for arguments that
        are wrong or have no effect.
        """
        __tracebackhide__ = True
        session = self._session
        options.setdefault("seed", self.seed)
        if self.rounds is not None:
            options.setdefault("rounds", max(self.rounds, FEWEST_ROUNDS))
        progress.current().test(session.rerun())
        try:
            result = replays_like_eager(fn, inputs, **options | {"raises": False})
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        except DeviceLost as lost:
            session.stop("the device is lost: nothing this process says about it from here on may be believed")
            raise pytest.fail.Exception(str(lost), pytrace=False) from None
        except (NothingVerified, OutOfMemory) as lack:
            raise pytest.fail.Exception(str(lack), pytrace=False) from None
        self.rounds_checked += result.rounds
        text = str(NotLikeEager(result))
        session.on_checked(result.rounds, [] if result.equal else [[text, session.rerun()]])
        if not result.equal:
            pytest.fail(f"{text}\n  reproduce: {session.rerun()}", pytrace=False)
        return result

    def _configs(
        self,
        system: str,
        subject: Subject,
        batches: Sequence[int] | None,
        drafts: Sequence[int] | None,
        preset: str | None,
        rounds: int | None,
        geometry: dict[str, Any],
    ) -> list[Config]:
        known = get_system(system)
        if drafts is not None and not known.drafts:
            raise UsageError(f"drafts: {drafts} has no effect in {system}; remove it")
        if "draft_tokens" in geometry:
            raise UsageError("draft_tokens: set by the matrix; give drafts=(...) instead")
        for name, value in (("batches", batches), ("drafts", drafts)):
            if value is not None:
                _check_numbers(name, value)
        if rounds is not None and (type(rounds) is not int or rounds < 1):
            raise UsageError(f"rounds: {rounds!r} must be an integer of 1 or more, or nothing is verified")
        preset = self.preset if preset is None else preset
        resolved, fixed = resolve_geometry(known, subject, self.device.type, preset, geometry)
        configs = diagnostic_matrix(
            known,
            resolved,
            rounds=rounds or self.rounds,
            seed=self.seed,
            batches=batches or TEST_BATCHES,
            drafts=drafts or TEST_DRAFTS,
            fixed=fixed,
        )
        return with_hard_forms(configs, fixed)

    def _open(self, system: str, subject: Subject) -> RunResult:
        if not (subject is None or isinstance(subject, str) or callable(subject)):
            kind = type(subject).__name__
            raise UsageError(f"subject: {subject!r} is a {kind} already; give its class, as each bucket makes its own")
        return new_result(system, subject, self._backend, self._ledger)

    def _finish(self, run: RunResult, work: Callable[[Runner], None]) -> RunResult:
        __tracebackhide__ = True
        session = self._session
        # Left relative where it can be, for short commands in the report; a test may have changed the directory.
        folder = self._folder if Path.cwd() == session.directory else session.directory / self._folder
        progress.current().test(session.rerun())
        try:
            work(Runner(backend=self._backend, folder=folder, ledger=self._ledger))
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        except OutOfMemory as lack:
            raise pytest.fail.Exception(str(lack), pytrace=False) from None
        except DeviceLost as lost:
            session.stop("the device is lost: nothing this process says about it from here on may be believed")
            raise pytest.fail.Exception(str(lost), pytrace=False) from None
        finally:
            rerun = session.rerun()
            run.findings = [
                dataclasses.replace(finding, reproduce=reproduce_line(finding, rerun, session.directory))
                for finding in run.findings
            ]
            self.rounds_checked += run.counts.rounds_checked
            session.on_run(run)
        if run.findings or run.gone or run.counts.missing or not run.counts.rounds_checked:
            pytest.fail(failure_text(run), pytrace=False)
        return run


def with_hard_forms(configs: Sequence[Config], fixed: frozenset[str]) -> list[Config]:
    """Return `configs`, so few of which may not go through all forms of the inputs that a stride or a dtype which is
    ignored stays unseen: then the last of them, or a second one, has HARD_FORMS, but for those that are `fixed`."""
    forms = {name: form for name, form in HARD_FORMS.items() if name not in fixed}
    if all(any(getattr(config.geometry, name) == form for config in configs) for name, form in forms.items()):
        return list(configs)
    last = configs[-1]
    return [*(configs[:-1] or configs), dataclasses.replace(last, geometry=last.geometry.replace(**forms))]


def _check_numbers(name: str, value: object) -> None:
    """Raise UsageError unless `value` is a sequence of different integers, each 1 or more."""
    if not isinstance(value, Sequence) or not value or not all(type(each) is int and each > 0 for each in value):
        raise UsageError(f"{name}: {value!r} must name at least one number, each an integer of 1 or more")
    if len(set(value)) < len(value):
        raise UsageError(f"{name}: {value!r} names a number twice; name each once")


def failure_text(run: RunResult) -> str:
    """Return what a failing test prints: a head line, each waiver that is gone, each finding with case and command."""
    head = f"{run.system}, subject {run.subject}, on {run.device}"
    rounds = run.counts.rounds_checked
    if run.counts.missing and not run.findings and not run.gone:
        never = ", ".join(run.counts.missing)
        return f"{head}: what must occur has not: {never}; give it other batches or more rounds"
    if not run.findings and not run.gone:
        return f"{head}: no round was checked, so nothing is verified; give it a case that has rounds"
    stopped = "; the configurations after it were not run" if run.stopped_early else ""
    waived = named_waivers(rounds_by_waiver(run.counts.waivers.values()))
    lines = [f"{head}: {len(run.findings)} finding(s) in {rounds} round(s) checked{stopped}{waived}"]
    for use in run.gone:
        lines += ["", use.sentence]
    for finding in run.findings:
        lines += ["", finding.sentence]
        lines += [f"  law:       {finding.law} (contract 3.5)"] if finding.law else []
        lines += [f"  rule:      {finding.links}"] if finding.links else []
        lines += [f"  {finding.loss}"] if finding.loss else [f"  case:      {finding.case}"]
        lines += [f"  reproduce: {finding.reproduce}"]
    return "\n".join(lines)


def reproduce_line(finding: Finding, rerun: str, directory: Path) -> str:
    """Return the command that, typed in `directory`, shows `finding` again: the replay of its case, or `rerun` where no
    other process can make the subject (a local class has no name to be loaded by)."""
    if finding.reproduce is None or "<" in finding.subject:
        return rerun
    module = finding.subject.partition(":")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return finding.reproduce
    # A test run finds modules of the project that an installed command does not.
    path = Path(file).parent if Path(file).name == "__init__.py" else Path(file)
    folder = path.parents[module.count(".")]
    if not folder.is_relative_to(directory) or "site-packages" in folder.parts:
        return finding.reproduce
    return f"PYTHONPATH={shlex.quote(str(folder.relative_to(directory)))} {finding.reproduce}"
