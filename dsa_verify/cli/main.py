"""The command line: `replay`, `judge`, `fuzz`, `campaign`, `new`, `doctor`, `subjects` and `faults`.

This module imports nothing heavy, so that `--help` answers at once; each command imports what it needs. Results are
written even when a run is cut short, and every way to end has an exit status of its own (errors.py).
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsa_verify.base import errors
from dsa_verify.base.exit_status import exit_status, in_a_line, is_expected
from dsa_verify.base.small_file import check_case, holds_rounds
from dsa_verify.base.version import own_version
from dsa_verify.base.writable import check_file, check_folder
from dsa_verify.report.streams import lasting_streams
from dsa_verify.run.delivered import LINGER_S, TIMEOUT_S, can_supervise, deliver, left_threads, supervise

Command = Callable[..., Any]

STATUSES = "\b\nExit status:\n" + "\n".join(f"  {status}  {text}" for status, text in errors.MEANINGS.items())


def _say_version(context: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"dsa-verify, version {own_version()}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=STATUSES)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_say_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Replay attention-metadata pipelines in live CUDA graphs beside an eager oracle, and name the first wrong byte."""


if TYPE_CHECKING:
    _PathType = click.ParamType[Path]
else:
    _PathType = click.ParamType  # older releases of click take no type argument here


class _Checked(_PathType):
    """A path that `check` tries before anything runs, and before anything heavy is imported.

    A default is a Path and is not checked: a user who named no folder still wants to see the findings.
    """

    def __init__(self, name: str, check: Callable[[str], Path]):
        self.name, self._check = name, check

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Path:
        if isinstance(value, Path):
            return value
        try:
            return self._check(str(value))
        except errors.UsageError as error:
            self.fail(str(error), param, context)


_FILE = _Checked("file", check_file)
_FOLDER = _Checked("folder", check_folder)
_CASE = _Checked("case", check_case)


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return one decorator for several options, which `--help` shows in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _once(context: click.Context, param: click.Parameter, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse a value that is given twice: it would be counted twice, or the last one would win."""
    keys = [str(value).partition("=")[0] for value in values]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise click.BadParameter(f"{twice} is given twice; give it once")
    return values


# `replay` and `fuzz` share these.
_subject_options = _options(
    click.option("--preset", help="Use this geometry. The default is the system's own, such as deepseek_v32 on a GPU."),
    click.option("--subject", help="Verify this pipeline: a name of `dsa-verify subjects`, or module:attribute."),
    click.option("--fault", help="Plant a fault in the subject: NAME or NAME:FIELD of `dsa-verify faults`."),
    click.option(
        "--device", default="auto", show_default=True, help="Run on this device: auto, cpu, cuda or cuda:INDEX."
    ),
    click.option(
        "--waivers",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Use this ledger of waivers instead of the shipped one.",
    ),
    click.option("--no-waivers", is_flag=True, help="Use no waivers, so that known differences are findings."),
    click.option("--allow-compilations", is_flag=True, help="Allow kernels to be compiled while rounds run."),
)
_shape_options = _options(
    click.option(
        "--seed",
        type=click.IntRange(0, (1 << 63) - 1),  # as a case file
        default=0,
        show_default=True,
        help="Draw the rounds from this seed.",
    ),
    click.option(
        "--batch",
        "batches",
        type=click.IntRange(1, 16384),
        multiple=True,
        callback=_once,
        help="Capture a bucket of this many requests (repeatable).",
    ),
    click.option(
        "--draft-tokens",
        "drafts",
        type=click.IntRange(1, 16),
        multiple=True,
        callback=_once,
        help="Give each request this many draft tokens, N (repeatable).",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        callback=_once,
        metavar="KEY=VALUE",
        help="Set a field of the geometry (repeatable).",
    ),
)
_json_option = click.option("--json", "json_path", type=_FILE, help="Write the results to this file as JSON.")
_output_options = _options(
    _json_option,
    click.option(
        "--findings",
        "folder",
        type=_FOLDER,
        default=Path("dsa-findings"),
        show_default=True,
        help="Save the case of each finding in this folder.",
    ),
)


_timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="Kill a subject or a device that makes no progress for this long, and report that it hangs. 0 waits for ever, "
    "as a debugger needs.",
)


@cli.command(epilog=STATUSES)
@click.argument("cases", nargs=-1, metavar="[CASE]...", type=_CASE)
@click.option(
    "--system",
    "systems",
    multiple=True,
    help="Run this system (repeatable). The default is decode, target_verify and draft_extend; the others are mtp, "
    "padded, ragged_verify and dcp.",
)
@_subject_options
@click.option(
    "--rounds",
    type=click.IntRange(min=0),
    help="Replay this many rounds of each configuration. The default is the script: 17, in padded 68.",
)
@_shape_options
@click.option(
    "--edges",
    is_flag=True,
    help="Run extreme configurations, too: page tables with a gap behind each row, 16,384 requests, a million tokens, "
    "request rows 2**31 elements apart, tables of more than 2**31 elements, 32 empty requests, and for dcp pools of "
    "more than 2**31 words.",
)
@click.option("--keep-going", is_flag=True, help="Go on to the next configuration after a finding.")
@click.option(
    "--trust",
    is_flag=True,
    help="Run the code that a CASE names even if it is neither shipped nor installed. To run other code than the "
    "CASE names, give --subject.",
)
@click.option("--junit", "junit_path", type=_FILE, help="Write the results to this file as JUnit XML.")
@_output_options
@_timeout_option
def replay(timeout_s: float, **options: Any) -> None:
    """Replay CASE files or, without any, the diagnostic matrix.

    The matrix has 16 configurations for each system, each of 17 rounds (padded: 68).
    """
    _run("replay", timeout_s, options)


@cli.command(epilog=STATUSES)
@click.argument("snapshot", type=_CASE)
@_json_option
@click.pass_context
def judge(context: click.Context, snapshot: Path, json_path: Path | None) -> None:
    """Say what is wrong with SNAPSHOT, the metadata and inputs of one step of a server.

    SNAPSHOT is JSON or safetensors (docs/judge.md). It is judged on the CPU, and nothing is replayed. A case, such as a
    capture ring dumps, is replayed instead, as `replay` does.
    """
    if holds_rounds(snapshot):
        context.invoke(replay, cases=(snapshot,), json_path=json_path)
        return
    _choose_device("cpu")
    from dsa_verify.cli.judge import Options, run

    _end(run(Options(snapshot=snapshot, json_path=json_path)))


@cli.command(epilog=STATUSES)
@click.option("--system", "systems", multiple=True, help="Fuzz this system (repeatable). The default is as in replay.")
@_subject_options
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help="Replay this many rounds of each system. The default is 20000 on a GPU and 1000 on a CPU.",
)
@_shape_options
@click.option(
    "--resident",
    is_flag=True,
    help="Draw rounds in bulk on the device, without coverage to steer them. This replays many more rounds a second.",
)
@click.option("--keep-going", is_flag=True, help="Go on after a finding.")
@click.option(
    "--shrink-seconds",
    "shrink_s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Spend at most this long on shrinking the case of a finding. 0 leaves the case as it is.",
)
@_output_options
@_timeout_option
def fuzz(timeout_s: float, **options: Any) -> None:
    """Search for findings with rounds of a simulated serving engine.

    Coverage steers the rounds to what was not visited yet. The first finding ends the search, and its case is shrunk.
    """
    _run("fuzz", timeout_s, options)


@cli.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def campaign(arguments: tuple[str, ...]) -> None:
    """Run a long fuzzing campaign in supervised worker processes."""
    from dsa_verify.cli.campaign import main

    main.main(args=list(arguments), prog_name="dsa-verify campaign", standalone_mode=False)


@cli.command()
@click.argument("name")
def new(name: str) -> None:
    """Write a decode pipeline that works, NAME.py, and its test."""
    from dsa_verify.cli.new import run

    run(name, Path())


@cli.command()
@click.option("--device", default="auto", show_default=True, help="Try this device: auto, cpu, cuda or cuda:INDEX.")
def doctor(device: str) -> None:
    """Try this machine and say what it can verify."""
    chosen = _choose_device(device)
    from dsa_verify.cli.doctor import run

    sys.exit(run(chosen))


@cli.command()
@click.option("--device", default="auto", show_default=True, help="Ask for this device: auto, cpu, cuda or cuda:INDEX.")
def subjects(device: str) -> None:
    """List the known subjects and why some cannot run here."""
    chosen = _choose_device(device)
    from dsa_verify.cli.subjects import run

    run(chosen)


@cli.command()
@click.option("--system", help="List only the faults that apply to this system.")
def faults(system: str | None) -> None:
    """List the faults that can be planted with `replay --fault`."""
    from dsa_verify.cli.faults import run

    run(system)


def _run(name: str, timeout_s: float, options: dict[str, Any]) -> None:
    """Run the command `name` with its options in a child, and end as it does."""

    def work() -> int:
        device = _choose_device(options.pop("device"))
        command = importlib.import_module(f"dsa_verify.cli.{name}")
        return int(command.run(command.Options(**options), device))

    _end(_delivered(work, timeout_s, options))


def _delivered(work: Callable[[], int], timeout_s: float, options: dict[str, Any]) -> int:
    """Return the status that `work` hands back from a child, or report how the child ended without one."""
    if not can_supervise():  # this process is not the command's own: its torch may hold a device and threads already
        return work()
    end = supervise(timeout_s, lambda record: LINGER_S, stack_on_signals=True)
    if end is not None:
        from dsa_verify.report.ends import report

        return report(end, options)
    pid = os.getpid()
    try:
        status = _status_of(work)
    except SystemExit as error:  # a subject's: the commands end by returning
        click.echo(f"dsa-verify: the harness was left by SystemExit({error.code!r}), no verdict", err=True)
        status = errors.STATUS_HARNESS
    if threads := left_threads():
        click.echo(
            f"dsa-verify: {len(threads)} thread(s) still run and are ended: {', '.join(threads)}; the verdict stands",
            err=True,
        )
    deliver(status, pid)
    raise AssertionError  # deliver ends the process


def _end(status: int) -> None:
    if status == errors.STATUS_DEVICE_LOST:
        # Nothing may be asked of a lost device again, not even by the interpreter's own clearing up.
        if sys.stdout is not None:
            sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def _choose_device(device: str) -> Any:
    """Choose the device before any kernel is imported, because Triton then decides to compile or to interpret."""
    from dsa_verify.base.device import choose_device

    return choose_device(device)


def main() -> None:
    """Run the `dsa-verify` command. Every round that it replays makes seven stops (docs/architecture.md):

    1. draw: rounds are scripted, drawn, or read from a case. `dsa_verify/rounds/matrix.py`,
       `fuzz/engine/simulator.py`, `dsa_verify/rounds/case_file.py`
    2. tabulate: a chunk of rounds becomes one table. `dsa_verify/contract/round_table.py`
    3. fill: inputs are written and outputs poisoned. `dsa_verify/buffers/input_buffers.py`,
       `dsa_verify/buffers/poison.py`
    4. replay: oracle and subject replay their graphs. `dsa_verify/replay/replayer.py`,
       `dsa_verify/graphs/cuda.py`, `dsa_verify/graphs/emulated.py`
    5. judge: one launch compares everything on the device. `dsa_verify/judge/judge.py`,
       `dsa_verify/judge/law_regions.py`
    6. explain: a difference is replayed from nothing and put into words. `dsa_verify/diagnosis/confirm.py`,
       `dsa_verify/diagnosis/diagnose.py`, `dsa_verify/diagnosis/sentences.py`
    7. verdict: findings, counts and the exit status are reported. `dsa_verify/run/verify.py`,
       `dsa_verify/run/runner.py`, `dsa_verify/report/terminal.py`
    """
    # A subject may lie in the folder that the command is run from. Last, so that no json.py there hides another module.
    sys.path.append("")
    with lasting_streams():
        sys.exit(_status_of(_main))


def _main() -> int:
    cli(standalone_mode=False)
    return errors.STATUS_EQUAL


def _status_of(work: Callable[[], int]) -> int:
    """Do `work`, print the error that ends it, if any, and return the exit status."""
    try:
        return work()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return errors.STATUS_USAGE
    except (click.Abort, KeyboardInterrupt):
        return errors.STATUS_INTERRUPTED
    except Exception as error:  # Python's own status for it, 1, says that the subject is wrong
        if is_expected(error):
            click.echo(f"dsa-verify: {in_a_line(error)}", err=True)
        else:
            traceback.print_exc()
            click.echo(f"dsa-verify: the harness failed, no verdict: {in_a_line(error)}", err=True)
        return exit_status(error)


if __name__ == "__main__":
    main()
