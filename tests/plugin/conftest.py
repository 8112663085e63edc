"""Subjects and sessions that the plugin tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import forked
import pytest

# Module text: a right subject (the shipped one) and a wrong one, both of which a replay can load by name.
SUBJECTS: Final = """
import pytest
from dsa_verify.subjects.faults import plant

def Right():
    from dsa_verify.subjects.pipelines.basic import Decode
    return Decode()

def Wrong():
    return plant("skip_refresh", Right)()
"""

Session = Callable[..., pytest.RunResult]


@pytest.fixture(autouse=True)
def without_hypothesis(pytester: pytest.Pytester) -> None:
    # Its plugin imports all of it anew at the end of every session, which takes longer than all the rest.
    pytester.makeini("[pytest]\naddopts = -p no:hypothesispytest")


@pytest.fixture(scope="session")
def imported() -> None:
    """pytester forgets what a session within this process imported, but torch cannot be imported twice. So all
    is imported before the first session."""
    import dsa_verify.pytest_plugin.fixture  # noqa: F401

    forked.import_all()


@pytest.fixture
def session(imported: None, pytester: pytest.Pytester) -> Session:
    """Runs a session within this process, on a module of SUBJECTS and the given text."""

    def run(text: str, *options: str, preset: str = "tiny") -> pytest.RunResult:
        pytester.makepyfile(test_mine=SUBJECTS + text)
        given = [f"--dsa-preset={preset}"] if preset else []
        return pytester.runpytest_inprocess(*given, *options)

    return run
