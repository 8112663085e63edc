"""This module imports SGLang's own code when a subject needs it, says what is missing, and records what was imported,
so that a result can be traced to the very files that gave it.

Nothing of SGLang is imported at start-up: an installation of it, or a laid-out tree of its wheel on PYTHONPATH, is
looked for when a subject is made.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import linecache
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from dsa_verify.base.errors import NothingVerified, UsageError
from dsa_verify.base.version import package_version
from dsa_verify.subjects.adapters.traced import digest, toolchain

PACKAGE: Final = "sglang"
INSTALL: Final = "pip install sglang, or put a laid-out tree of its wheel on PYTHONPATH"
UNKNOWN: Final = "unknown (no package metadata)"
# Where 0.5.22 has what later releases have elsewhere; its pooled functions are not called ..._kpool.
_OPS: Final = "sglang.kernels.ops.attention"
_FORMER_PLACES: Final = {
    f"{_OPS}.dsa.metadata": f"{_OPS}.dsa_metadata",
    f"{_OPS}.dsa.kpool_metadata": f"{_OPS}.dsa_kpool_metadata",
    f"{_OPS}.dsa.fused_metadata_copy": f"{_OPS}.fused_metadata_copy",
    f"{_OPS}.dsv4.attn_metadata_kernels": f"{_OPS}.dsv4_attn_metadata_kernels",
}
_POOLED: Final = "_kpool"
_PLACEHOLDER: Final = "0.0.0"  # what SGLang's version module falls back on; it must not pass for a release


def require(module: str) -> ModuleType:
    """The module `module` of SGLang, imported now, from its former place in a release that has it there.

    UsageError where that fails: it names the package, the module or the dependency that is missing and how to get it.
    """
    try:
        with _triton_left_as_it_is():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        former = _former_place(module, error.name or "")
        if former is not None:
            return require(former)
        raise UsageError(_what_is_missing(module, error)) from error
    except Exception as error:  # SGLang asks for drivers, toolkits and versions while it is imported
        raise UsageError(
            f"importing {module} raised {type(error).__name__}: {error}; this is {PACKAGE} {version()} with "
            f"torch {torch.__version__}"
        ) from error


def _former_place(module: str, missing: str) -> str | None:
    """Return where this release has `module`, of which it lacks `missing`; None if nowhere."""
    for now, before in _FORMER_PLACES.items():
        if module.startswith(now) and (missing.startswith(now) or now.startswith(missing)):
            former = before + module.removeprefix(now)
            with contextlib.suppress(ModuleNotFoundError):
                return former if importlib.util.find_spec(former) is not None else None
    return None


@contextlib.contextmanager
def _triton_left_as_it_is() -> Iterator[None]:
    """SGLang's utilities put a function of their own in the place of `triton.next_power_of_2`, which then cannot be
    called in a kernel any more: the kernels of another subject in this process would not compile."""
    import triton

    own = triton.next_power_of_2
    try:
        yield
    finally:
        triton.next_power_of_2 = own


def _what_is_missing(module: str, error: ModuleNotFoundError) -> str:
    missing = error.name or "a module that it does not name"
    if missing == PACKAGE:
        return f"{module} cannot be imported: {PACKAGE} is not installed; {INSTALL}"
    if missing.partition(".")[0] == PACKAGE:
        return (
            f"{module} cannot be imported: this {PACKAGE} ({version()}, in {_folder()}) has no module {missing}; "
            "use a release that has it"
        )
    return (
        f"{module} cannot be imported: it needs the module {missing}, which is not installed; pip install sglang "
        f"brings all that it needs, or install what {missing} belongs to beside the tree on PYTHONPATH"
    )


def on_device(module: str, device: torch.device) -> ModuleType:
    """`require(module)` for a CUDA device; for a CPU a second copy of it, whose functions take CPU tensors.

    The copy is the same file with those `assert` statements left out that ask whether a tensor `is_cuda`: they are all
    that keeps its Triton kernels out of the interpreter.
    """
    return require(module) if device.type == "cuda" else _without_cuda_assertions(module)


@functools.cache
def _without_cuda_assertions(module: str) -> ModuleType:
    original = require(module)
    path = inspect.getsourcefile(original)
    if path is None:
        raise UsageError(f"{module} has no source file, which the interpreter needs; {INSTALL}")
    source = Path(path).read_text(encoding="utf-8")
    tree = _NoCudaAssertions().visit(ast.parse(source, filename=path))
    copy = ModuleType(module, original.__doc__)
    copy.__dict__.update({"__file__": path, "__package__": original.__package__, "__spec__": original.__spec__})
    linecache.checkcache(path)  # the interpreter reads the source of each kernel from here
    exec(compile(tree, path, "exec", dont_inherit=True), copy.__dict__)
    return copy


class _NoCudaAssertions(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        asks = any(isinstance(part, ast.Attribute) and part.attr == "is_cuda" for part in ast.walk(node.test))
        return ast.copy_location(ast.Pass(), node) if asks else node


def attribute(module: str, name: str, device: torch.device | None = None) -> Any:
    """`name` of `module` (for `device`, see `on_device`); UsageError if this release of SGLang has no such thing."""
    found = require(module) if device is None else on_device(module, device)
    if not hasattr(found, name) and require(module).__name__ != module:
        name = name.removesuffix(_POOLED)
    if not hasattr(found, name):
        raise UsageError(
            f"{module} of this {PACKAGE} ({version()}, in {_folder()}) has no {name}; use a release that has it"
        )
    return getattr(found, name)


def need_gpu(what: str, device: torch.device, why: str) -> None:
    """NothingVerified (exit status 4) unless `device` is a CUDA device; `why` ends the sentence "it ...".

    Call it in `allocate`, before anything is imported that only a GPU has a use for.
    """
    if device.type != "cuda":
        raise NothingVerified(
            f"{what} needs a CUDA GPU and this run is on {device.type}: it {why}; give --device cuda where there is one"
        )


def version() -> str:
    """The version of the SGLang that is importable, from its package metadata or else its own version module; UNKNOWN
    where a tree has neither, as an unpacked wheel without its .dist-info folder."""
    recorded = package_version(PACKAGE)
    if recorded is not None:
        return recorded
    try:
        own = getattr(importlib.import_module(f"{PACKAGE}.version"), "__version__", None)
    except ImportError:
        own = None
    return UNKNOWN if own is None or own.startswith(_PLACEHOLDER) else str(own)


def provenance(*modules: str, files: Iterable[str] = ()) -> dict[str, str]:
    """Return what a result must say about the SGLang it judged.

    Keys: "sglang" (version), each of `modules` and of `files` (paths below SGLang's folder, "/" between parts) with the
    first digits of the sha256 of the file, "torch", "triton", and "capability": "sm90", or "interpreted" where kernels
    run on a CPU. UsageError if a module or file is not there.
    """
    found = {PACKAGE: version()}
    for module in modules:
        found[require(module).__name__] = digest(_file_of(module))
    for name in files:
        path = _folder() / name
        if not path.is_file():
            raise UsageError(f"{path} does not exist; this {PACKAGE} is not complete; {INSTALL}")
        found[name] = digest(path)
    return found | toolchain()


def _file_of(module: str) -> Path:
    path = inspect.getsourcefile(require(module))
    if path is None:
        raise UsageError(f"{module} has no source file, so a result cannot say which one it judged; {INSTALL}")
    return Path(path)


def _folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not locations:
        raise UsageError(f"{PACKAGE} is not installed; {INSTALL}")
    return Path(locations[0])
