"""Trial: one mutant shown to `replay` and `fuzz` with default options, in a process of its own.

The process is forked from one that has imported all that is not judged, and takes the mutated file in place of the
real one. It sends a beat after each few rounds, so that a hang is told from much work, and its verdict at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.abc
import importlib.util
import itertools
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from dsa_verify.base import errors
from dsa_verify.base.device import choose_device
from dsa_verify.cli import main as cli
from dsa_verify.rounds.matrix import Config, diagnostic_matrix
from tests.mutants.catalogue import Mutant
from tests.mutants.reach import ROOT, Door

KILLED, SURVIVED, INVALID, NO_MEMORY = "killed", "survived", "invalid", "no memory"
# An interpreted mutant that asks for more than this would take the machine with it.
MEMORY_BYTES: Final = 12 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`by`: the door and the part of it that saw the defect, `how`: what was seen; empty for a survivor."""

    outcome: str
    by: str = ""
    how: str = ""


def is_equal(mutant: Mutant) -> bool:
    """Whether Python makes the same of the mutant as of the file: then there is no defect."""
    original = (ROOT / mutant.file).read_text(encoding="utf-8")
    codes = [_bare(compile(text, mutant.file, "exec")) for text in (original, mutant.source())]
    return codes[0] == codes[1]


def _bare(code: CodeType) -> tuple[object, ...]:
    """What a code object does, without the places of its lines."""
    constants = tuple(_bare(each) if isinstance(each, CodeType) else (type(each), each) for each in code.co_consts)
    return code.co_code, constants, code.co_names, code.co_varnames


def prepare(device: str) -> None:
    """Imports all that trials have in common, and nothing that they judge. Leaves CUDA alone: it does not survive a
    fork."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated
    sys.dont_write_bytecode = True
    for name in ("torch", "triton", "numpy", "dsa_verify.cli.replay", "dsa_verify.cli.fuzz"):
        importlib.import_module(name)


def run(mutant: Mutant | None, doors: Sequence[Door], device: str, quick: int | None, send: Connection) -> None:
    """The whole life of a forked process. `mutant` None: the code as it is. `quick`: configurations of each door's
    `replay`, and no `fuzz`; None: all."""
    verdict = Verdict(outcome=KILLED, how="the process of the trial ended early")
    with tempfile.TemporaryDirectory(prefix="dsa-verify-mutant-") as folder, _silenced():
        os.chdir(folder)
        try:
            verdict = _tried(mutant, doors, device, quick, Path(folder), lambda: send.send(None))
        except BaseException as error:
            traceback.print_exc()
            verdict = dataclasses.replace(verdict, how=f"{type(error).__name__}: {error}")
    send.send(verdict)
    send.close()
    os._exit(0)  # a device that was lost is not asked again


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """What a run prints goes nowhere."""
    with open(os.devnull, "r+b") as nowhere:
        for stream in (0, 1, 2):
            os.dup2(nowhere.fileno(), stream)
    yield


def _tried(
    mutant: Mutant | None,
    doors: Sequence[Door],
    device: str,
    quick: int | None,
    folder: Path,
    beat: Callable[[], None],
) -> Verdict:
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    if mutant is not None:
        if is_equal(mutant):
            return Verdict(outcome=INVALID, how="equal bytecode")
        path = folder / Path(mutant.file).name
        path.write_text(mutant.source(), encoding="utf-8")
        assert mutant.module not in sys.modules, f"{mutant.module} was imported before its mutant"
        sys.meta_path.insert(0, _Instead(mutant.module, path))
    verdict = _through(doors, device, quick, folder, beat)
    if mutant is not None and mutant.module not in sys.modules and verdict.outcome == SURVIVED:
        raise AssertionError(f"{', '.join(map(str, doors))}: {mutant.module} was never imported")
    return verdict


class _Instead(importlib.abc.MetaPathFinder):
    """Finds module `name` at `path`, which is a real file: Triton reads the source of its kernels."""

    def __init__(self, name: str, path: Path):
        self._name, self._path = name, path

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(fullname, self._path) if fullname == self._name else None


# Through the doors ---------------------------------------------------------------------------------------------------


def _through(doors: Sequence[Door], device: str, quick: int | None, folder: Path, beat: Callable[[], None]) -> Verdict:
    """`replay` of all doors, a configuration of each in turn, then `fuzz` of each."""
    chosen = choose_device(device)
    steps = _replays(doors, chosen, quick, beat)
    for by, step in steps if quick else itertools.chain(steps, _fuzzes(doors, chosen, folder, beat)):
        try:
            status, how = step()
        except errors.OutOfMemory as lack:
            return Verdict(outcome=NO_MEMORY, by=by, how=str(lack))
        except errors.DsaVerifyError as error:
            return Verdict(outcome=KILLED, by=by, how=f"{type(error).__name__}: {error}")
        except Exception as error:
            return Verdict(outcome=KILLED, by=by, how=f"{type(error).__name__}: {error}")
        if status == errors.STATUS_OUT_OF_MEMORY:
            return Verdict(outcome=NO_MEMORY, by=by, how=how)
        if status != errors.STATUS_EQUAL:
            return Verdict(outcome=KILLED, by=by, how=how)
        beat()
    return Verdict(outcome=SURVIVED)


Step = Callable[[], tuple[int, str]]


def _replays(
    doors: Sequence[Door], device: Any, configs: int | None, beat: Callable[[], None]
) -> Iterator[tuple[str, Step]]:
    """What `dsa-verify replay --system S --subject X` runs, in another order."""
    # Here, as these bring Triton, which must know by then whether to compile or to interpret.
    from dsa_verify.graphs import open_backend
    from dsa_verify.run.runner import Runner, new_result, status_of
    from dsa_verify.systems.catalogue import get_system, resolve_geometry
    from dsa_verify.waivers.waivers import choose_ledger

    backend, ledger = open_backend(device), choose_ledger(None, False)
    runner = Runner(backend=backend, folder=None, ledger=ledger, on_rounds=lambda count: beat())

    def step(door: Door, config: Config) -> tuple[int, str]:
        result = new_result(door.system, door.subject, backend, ledger)
        runner.matrix([config], door.subject, result)
        return status_of([result]), f"{config.name}: {' '.join(found.sentence for found in result.findings[:1])}"

    matrices: dict[Door, list[Config]] = {}
    for door in doors:
        system = get_system(door.system)
        geometry, fixed = resolve_geometry(system, door.subject, device.type, door.preset or None)
        matrices[door] = _shuffled(diagnostic_matrix(system, geometry, fixed=fixed))[:configs]
    for row in itertools.zip_longest(*matrices.values()):
        for door, config in zip(matrices, row, strict=True):
            if config is not None:
                yield f"replay {door}", lambda door=door, config=config: step(door, config)  # type: ignore[misc]


def _shuffled(configs: list[Config]) -> list[Config]:
    """In an order in which neighbours are unlike each other: an early one then kills what an earlier one does not."""
    return [configs[i] for i in sorted(range(len(configs)), key=lambda i: (13 * i + 2) % 16)]


def _fuzzes(doors: Sequence[Door], device: Any, folder: Path, beat: Callable[[], None]) -> Iterator[tuple[str, Step]]:
    """What `dsa-verify fuzz --system S --subject X` runs, but that no case is made small."""
    from dsa_verify.cli.fuzz import Options
    from dsa_verify.cli.fuzz import run as fuzz
    from dsa_verify.report.terminal import Terminal

    advance, told = Terminal.advance, Terminal.finding
    said: list[str] = []

    def advance_and_beat(self: Terminal, rounds: int) -> None:
        beat()
        advance(self, rounds)

    def tell(self: Terminal, finding: Any) -> None:
        said.append(finding.sentence)
        told(self, finding)

    Terminal.advance, Terminal.finding = advance_and_beat, tell  # type: ignore[method-assign]

    def step(door: Door) -> tuple[int, str]:
        words = ["--system", door.system, "--subject", door.subject, "--shrink-seconds", "0"]
        words += ["--preset", door.preset] if door.preset else []
        options = cli.fuzz.make_context("fuzz", [*words, "--findings", str(folder / "findings")]).params
        names = {field.name for field in dataclasses.fields(Options)}
        options = {name: value for name, value in options.items() if name in names}
        return fuzz(Options(**options), device), " ".join(said[:1])

    for door in doors:
        yield f"fuzz {door}", lambda door=door: step(door)  # type: ignore[misc]
