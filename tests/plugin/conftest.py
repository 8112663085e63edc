"""Subjects and sessions that the plugin tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# pytester forgets the modules that a session within this process imported; torch and Triton do not survive being
# imported twice.
import dsa_verify.verification  # noqa: F401

# Module text: a right subject (the shipped one) and a wrong one, both of which a replay can load by name.
SUBJECTS = """
import pytest
from dsa_verify.faults import plant

def Right():
    from dsa_verify.pipelines.basic import Decode
    return Decode()

def Wrong():
    return plant("skip_refresh", Right)()
"""

Session = Callable[..., pytest.RunResult]


@pytest.fixture
def session(pytester: pytest.Pytester) -> Session:
    """Runs a session within this process, on a module of SUBJECTS and the given text."""

    def run(text: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_mine=SUBJECTS + text)
        return pytester.runpytest_inprocess("--dsa-preset=tiny", *options)

    return run
