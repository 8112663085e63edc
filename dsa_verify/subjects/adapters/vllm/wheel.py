"""vLLM's own code comes from an installation of it, or from files of its wheel on PYTHONPATH, beside stand-ins for what
they ask of the rest (standins.py) where it is not installed or there is no GPU.

Nothing of it is imported at start-up but when a subject needs it; what is missing is said, what was imported recorded.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.base.version import package_version
from dsa_verify.subjects.adapters.traced import digest, toolchain
from dsa_verify.subjects.adapters.vllm import standins

PACKAGE: Final = "vllm"
INSTALL: Final = "pip install vllm, or put files of its wheel on PYTHONPATH (docs/engines-vllm.md)"
_VERSION: Final = re.compile(r"^__version__ =.*?'([^']+)'", re.MULTILINE)


def require(module: str) -> ModuleType:
    """The module `module` of vLLM, imported now; UsageError that says what is missing and how to get it."""
    _install_stand_ins()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(_what_is_missing(module, error)) from error
    except UsageError:
        raise
    except Exception as error:  # vLLM asks for drivers, toolkits and versions while it is imported
        raise UsageError(
            f"importing {module} raised {type(error).__name__}: {error}; this is {PACKAGE} {version()} with "
            f"torch {torch.__version__}"
        ) from error


def attribute(module: str, name: str) -> Any:
    """`name` of `module`; UsageError if this release of vLLM has no such thing."""
    found = require(module)
    if not hasattr(found, name):
        raise UsageError(f"{module} of this {PACKAGE} ({version()}) has no {name}; use a release that has it")
    return getattr(found, name)


def version() -> str:
    """The version of the vLLM that is importable; of a laid-out tree, from the tree."""
    recorded = package_version(PACKAGE)
    if recorded is not None:
        return recorded
    folder = _folder()
    if folder is None:
        return "not installed"
    path = folder / "_version.py"
    found = _VERSION.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return f"{found[1] if found else 'unknown'} (laid out)"


def provenance(*modules: str) -> dict[str, str]:
    """Return what a result must say about the vLLM it judged.

    Keys: "vllm" (version), each of `modules` with the first digits of the sha256 of its file, "stand_ins" (which parts
    of vLLM were not vLLM's own, or "none"), "torch", "triton", "capability".
    """
    found = {PACKAGE: version()}
    for module in modules:
        found[module] = _digest(require(module))
    stand_ins = ", ".join(standins.answering()) if standins.installed() else "none"
    return found | {"stand_ins": stand_ins} | toolchain()


def _install_stand_ins() -> None:
    """Put the stand-ins in place unless vLLM is installed and there is a GPU for it."""
    folder = _folder()
    if folder is not None and not (standins.on_cuda() and package_version(PACKAGE) is not None):
        standins.install(folder)


def _folder() -> Path | None:
    """The folder of the package, laid out or installed; not found by importing it, which would import all of it."""
    folders = (Path(entry) / PACKAGE for entry in sys.path)
    return next((folder for folder in folders if (folder / "v1").is_dir()), None)


def _what_is_missing(module: str, error: ModuleNotFoundError) -> str:
    missing = error.name or "a module that it does not name"
    if missing.partition(".")[0] == PACKAGE and _folder() is None:
        return f"{module} cannot be imported: {PACKAGE} is not installed; {INSTALL}"
    if missing.partition(".")[0] == PACKAGE:
        return (
            f"{module} cannot be imported: this {PACKAGE} ({version()}) has no module {missing}; use a release that "
            "has it, or lay out that file too"
        )
    return (
        f"{module} cannot be imported: it needs the module {missing}, which is not installed; pip install vllm brings "
        f"everything that it needs, or install what {missing} belongs to"
    )


def _digest(module: ModuleType) -> str:
    path = module.__spec__.origin if module.__spec__ is not None else None
    if path is None or not Path(path).is_file():
        raise UsageError(f"{module.__name__} has no source file, so a result cannot say which one it judged; {INSTALL}")
    return digest(Path(path))
