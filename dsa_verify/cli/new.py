"""`dsa-verify new NAME` writes a pipeline that works and its test, which you replace piece by piece by your own."""

from __future__ import annotations

import contextlib
import importlib.util
import keyword
import sys
from importlib.resources import files
from pathlib import Path

import click

from dsa_verify.base.atomic_write import reason_of, write_atomically
from dsa_verify.base.errors import UsageError


def run(name: str, folder: Path) -> None:
    """Write NAME.py and test_NAME.py into `folder`.

    Raises UsageError for a name that is not valid or is taken, files that exist, or a folder that cannot be written;
    then it leaves neither file.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"{name!r} cannot be the name of a module; use letters, digits and underscores")
    targets = {folder / f"{name}.py": "pipeline.py.txt", folder / f"test_{name}.py": "test_pipeline.py.txt"}
    for path in targets:
        if path.exists():
            raise UsageError(f"{path}: exists already; choose another name")
    if _importable(name):
        raise UsageError(f"{name!r}: a module of that name is installed already and would be it; choose another name")
    class_name = "".join(part.capitalize() for part in name.split("_") if part) or name
    try:
        for path, template in targets.items():
            text = (files("dsa_verify") / "templates" / template).read_text(encoding="utf-8")
            write_atomically(path, text.replace("CLASS", class_name).replace("NAME", name), durable=False)
    except OSError as error:
        with contextlib.suppress(OSError):
            next(iter(targets)).unlink(missing_ok=True)
        raise UsageError(f"{path}: cannot be written ({reason_of(error)}); go to a folder that can be") from None
    click.echo(f"wrote {', '.join(map(str, targets))}")
    click.echo(f"next: pytest test_{name}.py, or dsa-verify replay --system decode --subject {name}:{class_name}")


def _importable(name: str) -> bool:
    if name in sys.modules:
        return True
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None  # a folder without __init__.py comes after a file
