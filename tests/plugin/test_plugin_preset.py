"""--dsa-preset."""

from __future__ import annotations

import pytest
import torch


def test_default_follows_the_device(session) -> None:
    preset = "deepseek_v32" if torch.cuda.is_available() else "tiny"
    text = (
        "def test(dsa):\n"
        "    configs = dsa._configs('decode', None, (1,), None, None, 1, {})\n"
        f"    assert {{config.geometry.preset for config in configs}} == {{{preset!r}}}\n"
        "    dsa.verify('decode', batches=(1,), rounds=1)\n"
    )
    session(text, preset="").assert_outcomes(passed=1)


@pytest.mark.parametrize("argument, preset", [("", "glm53_flash"), (", preset='tiny'", "tiny")])
def test_given(session, pytester: pytest.Pytester, argument: str, preset: str) -> None:
    session(
        f"def test(dsa): dsa.verify('decode', Wrong, batches=(1,), rounds=1, context=203{argument})",
        preset="glm53_flash",
    )
    [case] = pytester.path.glob("dsa-findings/*.json")
    assert f'"preset": "{preset}"' in case.read_text()


def test_bad_value(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--dsa-preset=huge")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*error: argument --dsa-preset: 'huge' is unknown; known presets: *tiny*"])
