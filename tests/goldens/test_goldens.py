"""This folder keeps what is printed, and these tests compare it word by word, so that a review sees changed words.

To write the files anew, run `DSA_VERIFY_GOLDENS=write pytest tests/goldens`, read the difference and commit it.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import click.formatting
import pytest

from dsa_verify.cli.main import cli
from dsa_verify.pytest_plugin import plugin

HERE = Path(__file__).parent
WIDTH = 100
Cli = Callable[..., tuple[int, str]]


def check(name: str, text: str) -> None:
    """Compare `text` with the file `name`, or write it there if that is asked for."""
    path = HERE / f"{name}.txt"
    if os.environ.get("DSA_VERIFY_GOLDENS") == "write":
        path.write_text(text)
    assert path.exists(), f"{path} does not exist; DSA_VERIFY_GOLDENS=write pytest tests/goldens writes it"
    assert text == path.read_text()


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command of `group`, the group's own first."""
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


COMMANDS = sorted(commands(cli))


@pytest.fixture
def printed_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def printed(command: click.Command, program: str, *path: str) -> str:
        monkeypatch.setattr(click.formatting, "FORCED_WIDTH", WIDTH)
        assert not command.main([*path, "--help"], prog_name=program, standalone_mode=False)
        return capsys.readouterr().out

    return printed


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_help_of_a_command(path: tuple[str, ...], printed_help: Callable[..., str]) -> None:
    check("-".join(("help", *path)), printed_help(cli, "dsa-verify", *path))


def test_the_help_of_torchrun_on_real_ranks(printed_help: Callable[..., str]) -> None:
    from dsa_verify.cli.dcp_ranks import main

    check("help-dcp_ranks", printed_help(main, "python -m dsa_verify.cli.dcp_ranks"))


class Options:
    """It stands for pytest's parser and keeps what the plugin adds, since argparse lays help out by its version."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def getgroup(self, name: str, description: str) -> Options:
        self.lines.append(f"{name}: {description}")
        return self

    def addoption(self, name: str, *, help: str, metavar: str = "", **rest: Any) -> None:
        self.lines += [f"  {name}={metavar}" if metavar else f"  {name}", *self._wrapped(help)]

    def addini(self, name: str, help: str, **rest: Any) -> None:
        self.lines += [f"  {name} (ini)", *self._wrapped(help)]

    def _wrapped(self, help: str) -> list[str]:
        return textwrap.wrap(help, WIDTH, break_on_hyphens=False, initial_indent=" " * 6, subsequent_indent=" " * 6)


def test_the_help_of_the_pytest_options() -> None:
    options = Options()
    plugin.pytest_addoption(options)  # type: ignore[arg-type]
    check("help-pytest", "\n".join(options.lines) + "\n")


def without_times(text: str) -> str:
    """`text` without what differs between machines and runs: versions, the device and seconds."""
    text = re.sub(r"^dsa-verify .*, torch .* graphs$", "dsa-verify VERSIONS, DEVICE, GRAPHS", text, flags=re.MULTILINE)
    return re.sub(r"\d+\.\d s\b", "TIME s", text)


@pytest.mark.parametrize(
    ("name", "arguments", "status"),
    [("replay-right", (), 0), ("replay-wrong", ("--fault", "off_by_one_page"), 1)],
    ids=["right", "wrong"],
)
def test_what_replay_prints(dsa_verify: Cli, name: str, arguments: tuple[str, ...], status: int) -> None:
    shape = ("--system", "target_verify", "--preset", "tiny", "--batch", "4", "--draft-tokens", "4", "--device", "cpu")
    ended, text = dsa_verify("replay", *shape, *arguments)
    assert ended == status
    check(name, without_times(text))


def test_every_file_here_belongs_to_a_test() -> None:
    printed = {"-".join(("help", *path)) for path in COMMANDS}
    printed |= {"help-dcp_ranks", "help-pytest", "replay-right", "replay-wrong"}
    assert {path.stem for path in HERE.glob("*.txt")} == printed
