"""Cases as tests: what `--dsa-cases DIR` adds to a pytest session, an item for each case file of a folder.

A case that once caught something is kept by putting its file there. pytest collects the folder as if it had been named
on the command line, so an item is selected, distributed and reported like any other test. A case is read when its item
runs, not before: collecting imports neither torch nor the library.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from dsa_verify.base.errors import UsageError
from dsa_verify.base.small_file import check_case

if TYPE_CHECKING:
    from dsa_verify.pytest_plugin.fixture import DsaFixture

OPTION: Final = "--dsa-cases"
SUFFIX: Final = ".json"
FixtureOf = Callable[[pytest.Session], "DsaFixture"]


def parse_folder(text: str) -> str:
    """Return the value of the option; a variable that is not set must not stand for the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; give a folder of case files")
    return text


class CaseFolder:
    """A plugin of the session that collects the cases directly in `folder`; `dsa_fixture(session)` replays them."""

    def __init__(self, folder: Path, dsa_fixture: FixtureOf):
        self.folder, self._dsa_fixture = folder, dsa_fixture

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> CaseFile | None:
        if file_path.parent != self.folder or file_path.suffix != SUFFIX:
            return None
        return CaseFile.from_parent(parent, path=file_path, dsa_fixture=self._dsa_fixture)


def collect_folder(config: pytest.Config, dsa_fixture: FixtureOf) -> None:
    """Add the folder of the option to what the session collects; pytest.UsageError if it holds no case.

    Where an argument of the command line is already in the folder, that is meant and not all of it.
    """
    given: str = config.option.dsa_cases
    start = config.invocation_params.dir
    folder = _absolute(start / given)
    if not folder.is_dir():
        raise pytest.UsageError(f"{OPTION}: {given} is not a folder; create it and put case files (*{SUFFIX}) there")
    for path in folder.glob(f"*{SUFFIX}"):
        if not path.is_dir() and not path.is_file():  # which pytest would pass over without a word
            try:
                check_case(path)
            except UsageError as error:
                raise pytest.UsageError(f"{OPTION}: {error}") from None
    if not any(folder.glob(f"*{SUFFIX}")):
        raise pytest.UsageError(f"{OPTION}: {given} holds no *{SUFFIX}, so nothing would be replayed; put a case there")
    # Where `dsa-verify replay` finds the subjects that cases name; last, so that it hides nothing from the tests.
    sys.path.append(str(start))
    config.pluginmanager.register(CaseFolder(folder, dsa_fixture), "dsa_verify_cases")
    named = [_absolute(start / argument.partition("::")[0]) for argument in config.args]
    if not any(path.is_relative_to(folder) for path in named):
        config.args.append(str(folder))


def _absolute(path: Path) -> Path:
    """Return `path` absolute without following links, as pytest names what it collects."""
    return Path(os.path.abspath(path))


class CaseFile(pytest.File):
    """One case file; its item is named by it, too."""

    def __init__(self, *, dsa_fixture: FixtureOf, **rest: Any):
        super().__init__(**rest)
        self._dsa_fixture = dsa_fixture

    def collect(self) -> Iterator[CaseItem]:
        yield CaseItem.from_parent(self, name=self.path.stem, dsa_fixture=self._dsa_fixture)


class CaseItem(pytest.Item):
    """Replays its case with the subject that it names; fails as `dsa.case` does, and if the case cannot be read or
    names code that nobody has said may run."""

    def __init__(self, *, dsa_fixture: FixtureOf, **rest: Any):
        super().__init__(**rest)
        self._dsa_fixture = dsa_fixture

    def runtest(self) -> None:
        __tracebackhide__ = True
        try:
            check_case(self.path)  # before what verifies it imports torch
            self._dsa_fixture(self.session).case(self.path)
        except (UsageError, pytest.UsageError) as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None  # not said twice

    def reportinfo(self) -> tuple[Path, int, str]:
        # A skip is reported with a line, so there has to be one.
        return self.path, 0, f"case {self.name}"
