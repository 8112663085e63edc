"""Start: what an entry point does when the environment asks for something."""

from __future__ import annotations

import os
from typing import Any, Final

from dsa_verify.attach import sglang, vllm
from dsa_verify.attach.part import Report
from dsa_verify.attach.settings import Settings
from dsa_verify.attach.start_line import StartLine
from dsa_verify.base.version import package_version

ENGINES: Final = {"sglang": sglang.attach, "vllm": vllm.attach}
_started: dict[str, Any] = {}  # by engine; a loader may come by twice, for two distributions of the same name


def start(engine: str) -> None:
    """Attach to `engine`, once in a process. UsageError for settings that are wrong."""
    if engine in _started:
        return
    settings = Settings.of(os.environ)
    line = StartLine(engine, package_version(engine), settings)
    _started[engine] = ENGINES[engine](Report(settings, line.text), line)
