"""Subjects and sessions that the plugin tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Final

import pytest

# Module text: a right subject (the shipped one) and a wrong one, both of which a replay can load by name.
SUBJECTS: Final = """
import pytest
from dsa_verify.faults import plant

def Right():
    from dsa_verify.pipelines.basic import Decode
    return Decode()

def Wrong():
    return plant("skip_refresh", Right)()
"""
KEPT: Final = ("dsa_verify", "numpy", "oracles", "torch", "triton")

Session = Callable[..., pytest.RunResult]


class KeptImports:
    """pytester forgets what a session within this process imported, but torch cannot be imported twice."""

    def pytest_unconfigure(self) -> None:
        self.modules: dict[str, ModuleType] = dict(sys.modules)

    def restore(self) -> None:
        for name, module in self.modules.items():
            if name.partition(".")[0] in KEPT:
                sys.modules.setdefault(name, module)


@pytest.fixture
def session(pytester: pytest.Pytester) -> Session:
    """Runs a session within this process, on a module of SUBJECTS and the given text."""

    def run(text: str, *options: str, preset: str = "tiny") -> pytest.RunResult:
        pytester.makepyfile(test_mine=SUBJECTS + text)
        imports = KeptImports()
        given = [f"--dsa-preset={preset}"] if preset else []
        result = pytester.runpytest_inprocess(*given, *options, plugins=[imports])
        imports.restore()
        return result

    return run
