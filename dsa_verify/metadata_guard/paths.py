"""Paths: which tensors and numbers of the metadata an argument of the guard names.

A pattern is a path below the metadata (`page_table`, `layers[3].lens`, `['decode'].lens`), in which `*` stands for any
text. It names what lies below what it matches, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class Patterns:
    """Says of paths whether one of `patterns` names them."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        self._compiled = [(pattern, _compile(pattern)) for pattern in self.patterns]

    def match(self, path: str) -> str | None:
        """Return the first pattern that names `path`, as `parts_of` writes it; None if none does."""
        relative = path.removeprefix(".")
        return next((pattern for pattern, compiled in self._compiled if compiled.match(relative)), None)


def _compile(pattern: str) -> re.Pattern[str]:
    literal = ".*".join(re.escape(each) for each in pattern.split("*"))
    return re.compile(rf"{literal}(?=$|[.\[])")
