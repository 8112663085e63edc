"""The pytest plugin: the `dsa` fixture, the `--dsa-*` options, the `gpu` marker and a section of the summary.

Every pytest session of an environment that has dsa-verify loads it, so it imports neither torch nor the library
until a test asks for the fixture or is marked `gpu`. A session that collected `dsa` tests but checked no round fails:
a tool that checked nothing ends loudly.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from dsa_verify.base.gpu_pinning import pin_gpu
from dsa_verify.contract import progress
from dsa_verify.pytest_plugin import cases as pytest_cases
from dsa_verify.pytest_plugin import guard as pytest_guard
from dsa_verify.run.delivered import TIMEOUT_S

if TYPE_CHECKING:
    from dsa_verify.contract.finding import Finding
    from dsa_verify.pytest_plugin.fixture import DsaFixture
    from dsa_verify.run.runner import RunResult

pin_gpu()

MAX_SEED: Final = (1 << 63) - 1  # what a case file holds
MAX_LISTED_FINDINGS: Final = 20
LONGER_ROUNDS: Final = 1000
OUTPUT_KEY: Final = "dsa_verify"  # in what an xdist worker hands to the controller
GPU_MARKER: Final = "gpu: needs a CUDA GPU; skipped by name elsewhere"


@dataclasses.dataclass(slots=True)
class Seen:
    """The session has seen this. `tests`: collected ones that use `dsa`, `cases` of them case files. `findings`:
    (sentence, command that shows it). `waived`: rounds, by waiver. In an xdist controller these are the sums over its
    workers, which all collect the same tests."""

    tests: int = 0
    cases: int = 0
    rounds: int = 0
    findings: list[list[str]] = dataclasses.field(default_factory=list)
    waived: dict[str, int] = dataclasses.field(default_factory=dict)

    def add_findings(self, found: Iterable[list[str]]) -> None:
        """Add each finding once, however many tests and workers have come upon it."""
        for each in found:
            if each not in self.findings:
                self.findings.append(each)

    def add_waived(self, rounds: Mapping[str, int]) -> None:
        for name, count in rounds.items():
            self.waived[name] = self.waived.get(name, 0) + count

    @property
    def nothing_checked(self) -> bool:
        return bool(self.tests) and not self.rounds and not self.findings


SEEN: Final = pytest.StashKey[Seen]()
DSA_FIXTURE: Final = pytest.StashKey["DsaFixture"]()
NAMED_SKIP: Final = pytest.StashKey[bool]()


# Options -------------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dsa-verify", "verification of attention metadata (the dsa fixture)")
    group.addoption(
        "--dsa-device",
        type=_device,
        default="auto",
        metavar="DEVICE",
        help="Run on this device: auto (the default), cpu, cuda or cuda:INDEX.",
    )
    group.addoption(
        "--dsa-preset",
        type=_preset,
        metavar="NAME",
        help="Use this geometry. The default is the system's own: mostly tiny on a CPU and deepseek_v32 on CUDA.",
    )
    group.addoption(
        "--dsa-rounds",
        type=_rounds,
        metavar="N",
        help="Replay this many rounds of each configuration. The default is the script: 17, in padded 68.",
    )
    group.addoption(
        "--dsa-seed",
        type=_seed,
        default=0,
        metavar="SEED",
        help="Draw the rounds from this seed. The default is 0.",
    )
    group.addoption(
        "--dsa-findings",
        type=_findings,
        default=Path("dsa-findings"),  # no text, which would be checked in sessions that do not use it, too
        metavar="DIR",
        help="Save the case of each finding in this folder. The default is dsa-findings.",
    )
    group.addoption(
        pytest_cases.OPTION,
        type=pytest_cases.parse_folder,
        metavar="DIR",
        help="Make each *.json in DIR a test that replays the case with the subject that it names.",
    )
    group.addoption(
        "--dsa-waivers", type=Path, metavar="FILE", help="Use this ledger of waivers instead of the shipped one."
    )
    group.addoption(
        "--dsa-no-waivers", action="store_true", help="Use no waivers, so that known differences are findings."
    )
    group.addoption(
        "--dsa-timeout",
        type=_seconds,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="End the session if a subject or a device makes no progress for this long, and report that it hangs. "
        f"The default is {TIMEOUT_S:g}; 0 waits for ever. The option has no effect with -n, --pdb or --dsa-no-guard.",
    )
    group.addoption(
        "--dsa-no-guard",
        action="store_true",
        help="Run the tests without a guarding process. A subject that ends the session may then make it look green.",
    )
    group.addoption(
        "--dsa-trust",
        action="store_true",
        help="Run the code that cases name even if it is neither shipped nor installed. The ini option dsa_trust names "
        "single subjects instead.",
    )
    parser.addini("dsa_trust", "Cases may name these subjects (module:attribute), one a line.", type="linelist")
    group.addoption(
        "--dsa-allow-compilations", action="store_true", help="Allow kernels to be compiled while rounds run."
    )


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is unknown; use auto, cpu, cuda or cuda:INDEX")
    return text


def _preset(text: str) -> str:
    from dsa_verify.contract.geometry import PRESETS

    if text not in PRESETS:
        raise argparse.ArgumentTypeError(f"{text!r} is unknown; known presets: {', '.join(PRESETS)}")
    return text


def _findings(text: str) -> Path:
    from dsa_verify.base.errors import UsageError
    from dsa_verify.base.writable import check_folder

    try:
        return check_folder(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rounds(text: str) -> int:
    return _integer(text, 1, MAX_SEED)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return float(text)


def _seed(text: str) -> int:
    return _integer(text, 0, MAX_SEED)


def _integer(text: str, low: int, high: int) -> int:
    if not re.fullmatch(r"\d{1,19}", text) or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer in {low}..{high}")
    return int(text)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest captures output
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    # Kernels in a conftest or test module are decorated, and so bound to compiler or interpreter, while pytest
    # collects, which is long before the fixture chooses the device.
    if early_config.known_args_namespace.dsa_device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    pytest_guard.guard(early_config)
    return (yield)


# The fixture ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def dsa(request: pytest.FixtureRequest) -> DsaFixture:
    """Verifies a metadata pipeline beside an eager oracle: dsa.verify("target_verify", MySubject)."""
    return dsa_fixture(request.session)


def dsa_fixture(session: pytest.Session) -> DsaFixture:
    """Return what the `dsa` fixture hands out in this process. The first test that needs it chooses the device."""
    stash = session.config.stash
    if DSA_FIXTURE not in stash:
        stash[DSA_FIXTURE] = _open_fixture(session)
    return stash[DSA_FIXTURE]


def _open_fixture(session: pytest.Session) -> DsaFixture:
    from dsa_verify.base.device import choose_device
    from dsa_verify.base.errors import UsageError

    config, option = session.config, session.config.option
    pytest_guard.begin_to_verify()
    try:
        device = choose_device(option.dsa_device)
    except UsageError as error:
        raise pytest.fail.Exception(f"--dsa-device: {error}", pytrace=False) from None
    from dsa_verify.pytest_plugin.fixture import DsaFixture, Session
    from dsa_verify.waivers.waivers import choose_ledger, rounds_by_waiver

    try:
        ledger = choose_ledger(option.dsa_waivers, option.dsa_no_waivers, prefix="dsa-")
        ledger = ledger.allowing_compilations(option.dsa_allow_compilations)
    except UsageError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None

    def on_run(run: RunResult) -> None:
        seen = config.stash[SEEN]
        seen.rounds += run.counts.rounds_checked
        seen.add_findings([[_sentence(finding), finding.reproduce or ""] for finding in run.findings])
        seen.add_findings([[use.sentence, _rerun(config)] for use in run.gone])
        seen.add_waived(rounds_by_waiver(run.counts.waivers.values()))
        progress.current().results(seen.findings)

    def on_checked(rounds: int, found: list[list[str]]) -> None:
        seen = config.stash[SEEN]
        seen.rounds += rounds
        seen.add_findings(found)
        progress.current().results(seen.findings)

    def stop(reason: str) -> None:
        session.shouldfail = reason

    return DsaFixture(
        device=device,
        preset=option.dsa_preset,
        rounds=option.dsa_rounds,
        seed=option.dsa_seed,
        folder=option.dsa_findings,
        session=Session(
            directory=config.invocation_params.dir,
            on_run=on_run,
            on_checked=on_checked,
            rerun=lambda: _rerun(config),
            stop=stop,
        ),
        ledger=ledger,
        trusts=lambda name: option.dsa_trust or name in config.getini("dsa_trust"),
    )


def _sentence(finding: Finding) -> str:
    return f"{finding.sentence}\n  {finding.loss}" if finding.loss else finding.sentence


def _rerun(config: pytest.Config) -> str:
    """Return the command that runs the current test again with the options that decide what it sees."""
    file, colons, test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].partition("::")
    file = os.path.relpath(config.rootpath / file, config.invocation_params.dir)
    options = {
        "device": config.option.dsa_device if config.option.dsa_device != "auto" else None,
        "preset": config.option.dsa_preset,
        "rounds": config.option.dsa_rounds,
        "seed": config.option.dsa_seed or None,
        "waivers": config.option.dsa_waivers,
        "cases": config.option.dsa_cases if file.endswith(pytest_cases.SUFFIX) else None,
    }
    given = [f"--dsa-{name}={value}" for name, value in options.items() if value is not None]
    given += ["--dsa-no-waivers"] if config.option.dsa_no_waivers else []
    given += ["--dsa-trust"] if config.option.dsa_trust else []
    given += ["--dsa-allow-compilations"] if config.option.dsa_allow_compilations else []
    return shlex.join(["pytest", file + colons + test, *given])


# Collected tests -----------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SEEN] = Seen()
    config.addinivalue_line("markers", GPU_MARKER)
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        _check_gpu(config.option.dsa_device)
    if config.option.dsa_cases is not None:
        pytest_cases.collect_folder(config, dsa_fixture)


@pytest.hookimpl(trylast=True)  # after deselection, so that `-m "not gpu"` costs no import of torch
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    missing = _missing(config) if marked and not config.option.collectonly else None
    if missing:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=missing))
            # Who asks for a GPU by option must not get a pass for its absence.
            item.stash[NAMED_SKIP] = not config.option.dsa_device.startswith("cuda")


def _missing(config: pytest.Config) -> str | None:
    """Say what a test marked `gpu` lacks; None if nothing."""
    if config.option.dsa_device == "cpu":
        return "needs a CUDA GPU; --dsa-device is cpu"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA GPU; none is visible"


def pytest_collection_finish(session: pytest.Session) -> None:
    tests = [item for item in session.items if _uses_dsa(item) and not item.stash.get(NAMED_SKIP, False)]
    seen = session.config.stash[SEEN]
    seen.tests, seen.cases = len(tests), sum(isinstance(item, pytest_cases.CaseItem) for item in tests)
    # A worker of pytest-xdist cannot end the session; its controller has looked before.
    if tests and not session.config.option.collectonly and not hasattr(session.config, "workerinput"):
        _check_gpu(session.config.option.dsa_device)


def _check_gpu(device: str) -> None:
    """Raise pytest.UsageError if the GPU that was asked for by name is not there: said once, and not by each test."""
    if not device.startswith("cuda"):
        return
    from dsa_verify.base.device import check_there
    from dsa_verify.base.errors import UsageError

    try:
        check_there(device)
    except UsageError as error:
        raise pytest.UsageError(f"--dsa-device: {error}") from None


def _uses_dsa(item: pytest.Item) -> bool:
    """Return whether this item is a case or uses the `dsa` above, if only below an override, and not a stranger's."""
    if isinstance(item, pytest_cases.CaseItem):
        return True
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {}).get("dsa", ())
    for definition in reversed(definitions):
        if definition.func.__module__ == __name__:
            return True
        if "dsa" not in definition.argnames:
            return False
    return False


# The end of the session ----------------------------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of pytest-xdist is done; one that crashed has left no output."""
    output = getattr(node, "workeroutput", {}).get(OUTPUT_KEY)
    if output is not None:
        seen = node.config.stash[SEEN]
        seen.tests, seen.cases = (max(getattr(seen, name), output[name]) for name in ("tests", "cases"))
        seen.rounds += output["rounds"]
        seen.add_findings(output["findings"])
        seen.add_waived(output["waived"])


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """A worker of pytest-xdist died in test `crashitem`, which fails for it. What it ran is said if it is known."""
    for case in pytest_guard.left_cases(report.node.config.option.dsa_findings):
        report.longrepr = f"{report.longrepr}\na process ended while it ran this case: {case}"


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[pytest_guard.SESSION] = session


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    pytest_guard.hand_over(config)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    seen = config.stash[SEEN]
    if hasattr(config, "workeroutput"):
        config.workeroutput[OUTPUT_KEY] = dataclasses.asdict(seen)
    elif seen.nothing_checked and not config.option.collectonly and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    seen = config.stash[SEEN]
    if config.option.collectonly or exitstatus == pytest.ExitCode.USAGE_ERROR:
        return
    if not (seen.tests or seen.rounds or seen.findings):
        return
    wrong = seen.nothing_checked or bool(seen.findings)
    terminalreporter.section("dsa-verify", sep="=", red=wrong, green=not wrong)
    *lines, last = _summary(seen)
    for line in lines:
        terminalreporter.write_line(line)
    terminalreporter.write_line(last, bold=True)


def _named_waivers(seen: Seen) -> str:
    if not seen.waived:
        return ""
    from dsa_verify.waivers.waivers import named_waivers

    return named_waivers(seen.waived)


def _summary(seen: Seen) -> Iterator[str]:
    """Yield the lines of the section; the last one says what to type next."""
    yield f"{seen.rounds} round(s) checked, {len(seen.findings)} finding(s){_named_waivers(seen)}"
    for sentence, reproduce in seen.findings[:MAX_LISTED_FINDINGS]:
        yield sentence
        yield f"  reproduce: {reproduce}"
    if len(seen.findings) > MAX_LISTED_FINDINGS:
        yield f"and {len(seen.findings) - MAX_LISTED_FINDINGS} more"
    if seen.findings:
        yield f"next: {seen.findings[0][1]}"
    elif seen.nothing_checked:
        replay = " or replay a case" if seen.cases else ""
        yield f"FAILED: {seen.tests} test(s) use the dsa fixture{replay}, but no round was checked: nothing is verified"
        yield "next: pytest -ra  (why they were skipped or failed), or call dsa.verify(...) in them"
    elif seen.cases and seen.cases == seen.tests:
        yield "next: dsa-verify fuzz --help  (finds what no case holds yet)"
    else:
        yield f"next: pytest --dsa-rounds={LONGER_ROUNDS}  (the same configurations for longer)"
