"""TorchFunctions: which functions of torch somebody has replaced, which a harness that is made of them cannot see."""

from __future__ import annotations

from typing import Final

import torch

_NAMED: Final = 3  # in one sentence


def functions() -> dict[str, object]:
    """Return the callables of torch and of its tensors, by name."""
    spaces = (("torch", vars(torch)), ("torch.Tensor", vars(torch.Tensor)))
    return {f"{space}.{name}": each for space, members in spaces for name, each in members.items() if callable(each)}


_AT_IMPORT: Final = functions()


def replaced_functions(link: str) -> str:
    """Return "since dsa-verify was imported torch.ne has been replaced", behind `link`; empty if none was."""
    # What torch itself adds later is a submodule's; a method that it inherits is replaced by adding one.
    replaced = [
        name
        for name, each in functions().items()
        if _AT_IMPORT.get(name) is not each and (name in _AT_IMPORT or name.startswith("torch.Tensor."))
    ]
    if not replaced:
        return ""
    verb = "has" if len(replaced) == 1 else "have"
    more = f" and {len(replaced) - _NAMED} more" if len(replaced) > _NAMED else ""
    return f"{link}since dsa-verify was imported {', '.join(sorted(replaced)[:_NAMED])}{more} {verb} been replaced"
