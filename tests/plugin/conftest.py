"""Subjects and sessions that the plugin tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

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
    """pytester forgets what a session within this process imported, but torch cannot be imported twice. So whatever
    a verification imports, some of it late, is imported before the first session."""
    from dsa_verify.base.device import choose_device

    device = choose_device("auto")
    import dsa_verify.pytest_plugin.fixture  # noqa: F401
    from dsa_verify.contract.geometry import Geometry
    from dsa_verify.graphs import open_backend
    from dsa_verify.rounds.matrix import diagnostic_matrix
    from dsa_verify.run.runner import Runner, new_result
    from dsa_verify.systems.catalogue import get_system

    backend = open_backend(device)
    configs = diagnostic_matrix(get_system("decode"), Geometry.resolve("tiny"), rounds=1, batches=(1,))
    run = new_result("decode", None, backend)
    Runner(backend=backend, folder=None).matrix(configs, None, run, fault="skip_refresh")
    assert run.findings


@pytest.fixture
def session(imported: None, pytester: pytest.Pytester) -> Session:
    """Runs a session within this process, on a module of SUBJECTS and the given text."""

    def run(text: str, *options: str, preset: str = "tiny") -> pytest.RunResult:
        pytester.makepyfile(test_mine=SUBJECTS + text)
        given = [f"--dsa-preset={preset}"] if preset else []
        return pytester.runpytest_inprocess(*given, *options)

    return run
