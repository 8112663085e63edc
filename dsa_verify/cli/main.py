"""The command line: `replay`, `fuzz`, `campaign`, `new`, `doctor`, `subjects` and `faults`.

This module imports nothing heavy, so that `--help` answers at once; each command imports what it needs. Results are
written even when a run is cut short, and every way to end has an exit status of its own (errors.py).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dsa_verify.base import errors
from dsa_verify.base.small_file import check_case
from dsa_verify.base.version import own_version
from dsa_verify.base.writable import check_file, check_folder
from dsa_verify.report.streams import lasting_streams
from dsa_verify.run.delivered import LINGER_S, TIMEOUT_S, can_supervise, deliver, left_threads, supervise

Command = Callable[..., Any]

STATUSES = """
\b
Exit status:
  0  every round was checked and is equal
  1  a mismatch, or a subject that fails, hangs, forks, or ends the process
  2  wrong usage, or a bad case file
  3  the harness or an oracle is broken, or no verdict arrived
  4  nothing was verified
  5  the device was lost
  6  flaky: a difference that did not show again
  8  memory did not suffice: no verdict
  130  interrupted; results so far are saved
"""


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


class _Checked(click.ParamType):
    """A path that `check` finds usable before anything runs, and before anything heavy is imported. A default, which
    is a Path, is not checked: who named no folder wants to know what is found, wherever that can be written."""

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
    """Several options as one decorator, in the order in which `--help` shows them."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _once(context: click.Context, param: click.Parameter, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse what is given twice: it would be counted twice, or the last would win."""
    keys = [str(value).partition("=")[0] for value in values]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise click.BadParameter(f"{twice} is given twice; give it once")
    return values


# What `replay` and `fuzz` have in common.
_subject_options = _options(
    click.option("--preset", help="Model geometry. Default: the system's own, such as deepseek_v32 on a GPU."),
    click.option("--subject", help="Pipeline under test: a name of `dsa-verify subjects`, or module:attribute."),
    click.option("--fault", help="Plant a fault in the subject: NAME or NAME:FIELD (see `dsa-verify faults`)."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:INDEX."),
    click.option(
        "--waivers",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Ledger of known differences, instead of the shipped one.",
    ),
    click.option("--no-waivers", is_flag=True, help="Judge known differences, too."),
    click.option("--allow-compilations", is_flag=True, help="Kernels may be compiled while rounds run."),
)
_shape_options = _options(
    click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, show_default=True),  # as a case file
    click.option(
        "--batch",
        "batches",
        type=click.IntRange(1, 16384),
        multiple=True,
        callback=_once,
        help="Batch bucket; repeatable.",
    ),
    click.option(
        "--draft-tokens",
        "drafts",
        type=click.IntRange(1, 16),
        multiple=True,
        callback=_once,
        help="Draft length N; repeatable.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        callback=_once,
        metavar="KEY=VALUE",
        help="Override a field of the geometry.",
    ),
)
_output_options = _options(
    click.option("--json", "json_path", type=_FILE, help="Write the results there."),
    click.option(
        "--findings",
        "folder",
        type=_FOLDER,
        default=Path("dsa-findings"),
        show_default=True,
        help="Folder for the case of each finding.",
    ),
)


_timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="A subject, or a device, that makes no progress for so long hangs, and is killed; 0: wait for ever, as for a "
    "debugger.",
)


@cli.command(epilog=STATUSES)
@click.argument("cases", nargs=-1, metavar="[CASE]...", type=_CASE)
@click.option(
    "--system",
    "systems",
    multiple=True,
    help="System to run; repeatable. Default: decode, target_verify, draft_extend. Others: mtp, padded, ragged_verify, "
    "dcp.",
)
@_subject_options
@click.option(
    "--rounds", type=click.IntRange(min=0), help="Rounds of each configuration. Default: as scripted, 17 (padded: 68)."
)
@_shape_options
@click.option(
    "--edges",
    is_flag=True,
    help="Beside the matrix: tables with a gap behind each row, 16,384 requests, a million tokens, request rows 2**31 "
    "elements apart, tables of more than 2**31 elements, 32 empty requests; of dcp pools of more than 2**31 words.",
)
@click.option("--keep-going", is_flag=True, help="Go on to the next configuration after a finding.")
@click.option(
    "--trust",
    is_flag=True,
    help="Run the code that a CASE names, though it is neither shipped nor installed; --subject names it instead.",
)
@click.option("--junit", "junit_path", type=_FILE, help="Write JUnit XML there.")
@_output_options
@_timeout_option
def replay(timeout_s: float, **options: Any) -> None:
    """Replay CASE files, or without any the diagnostic matrix: 16 configurations x 17 rounds a system (padded: 68)."""

    def work() -> int:
        device = _settle(options.pop("device"))
        from dsa_verify.cli.replay import Options, run

        return run(Options(**options), device)

    _end(_delivered(work, timeout_s, options))


@cli.command(epilog=STATUSES)
@click.option("--system", "systems", multiple=True, help="System to fuzz; repeatable. Default as in replay.")
@_subject_options
@click.option(
    "--rounds", type=click.IntRange(min=1), help="Rounds of each system. Default: 20000 on a GPU, 1000 on a CPU."
)
@_shape_options
@click.option("--resident", is_flag=True, help="Unsteered rounds, drawn in bulk on the device: many more a second.")
@click.option("--keep-going", is_flag=True, help="Go on after a finding.")
@click.option(
    "--shrink-seconds",
    "shrink_s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Time to make the case of a finding small; 0: leave it as it is.",
)
@_output_options
@_timeout_option
def fuzz(timeout_s: float, **options: Any) -> None:
    """Replay rounds of a serving engine in miniature, steered to what was never visited, until something is wrong."""

    def work() -> int:
        device = _settle(options.pop("device"))
        from dsa_verify.cli.fuzz import Options, run

        return run(Options(**options), device)

    _end(_delivered(work, timeout_s, options))


@cli.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def campaign(arguments: tuple[str, ...]) -> None:
    """Fuzz for as long as you let it, in processes that may die: DIR, or status, report, merge, waive, recheck."""
    from fuzz.campaign.campaign import main

    main.main(args=list(arguments), prog_name="dsa-verify campaign", standalone_mode=False)


@cli.command()
@click.argument("name")
def new(name: str) -> None:
    """Write NAME.py, a decode pipeline that works, and test_NAME.py, which verifies it."""
    from dsa_verify.cli.new import run

    run(name, Path())


@cli.command()
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:INDEX.")
def doctor(device: str) -> None:
    """Say what this machine can verify: versions, device, kernels, graph capture, optional packages."""
    settled = _settle(device)
    from dsa_verify.cli.doctor import run

    sys.exit(run(settled))


@cli.command()
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:INDEX.")
def subjects(device: str) -> None:
    """List the pipelines that `--subject` knows by name, those of serving engines included, and which can run here."""
    settled = _settle(device)
    from dsa_verify.cli.subjects import run

    run(settled)


@cli.command()
@click.option("--system", help="Only the faults that apply to this system.")
def faults(system: str | None) -> None:
    """List the faults that can be planted with `replay --fault`."""
    from dsa_verify.cli.faults import run

    run(system)


def _delivered(work: Callable[[], int], timeout_s: float, options: dict[str, Any]) -> int:
    """The status that `work` hands back from a child; what is known and said if it does not."""
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


def _settle(device: str) -> Any:
    """Before anything that has kernels is imported: Triton then decides whether to compile or to interpret."""
    from dsa_verify.base.device import settle_device

    return settle_device(device)


def main() -> None:
    """Entry point of the `dsa-verify` command."""
    # A subject may lie in the folder that the command is run from. Last, so that no json.py there hides another module.
    sys.path.append("")
    with lasting_streams():
        sys.exit(_status_of(_main))


def _main() -> int:
    cli(standalone_mode=False)
    return errors.STATUS_EQUAL


def _status_of(work: Callable[[], int]) -> int:
    """Do `work`; the exit status, what ended it being said."""
    try:
        return work()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return errors.STATUS_USAGE
    except (click.Abort, KeyboardInterrupt):
        return errors.STATUS_INTERRUPTED
    except errors.DsaVerifyError as error:
        click.echo(f"dsa-verify: {error}", err=True)
        return error.status
    except Exception as error:  # Python's own status for it, 1, says that the subject is wrong
        traceback.print_exc()
        click.echo(f"dsa-verify: the harness failed, no verdict: {type(error).__name__}: {error}", err=True)
        return errors.STATUS_HARNESS


if __name__ == "__main__":
    main()
