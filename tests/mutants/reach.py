"""Reach: which doors lead to a definition, so that a mutant is shown to the systems that can run it and to no others.

It is read off the source, by names: from the class that a door makes, to all that its text names, and on from there.
That takes in too much at times and never too little, as nothing here is looked up by a name that is put together.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsa_verify.contract.system import System
from dsa_verify.rounds.indexer_turns import INDEXED_PRESETS
from dsa_verify.systems.catalogue import DEFAULT_SUBJECT, SYSTEMS

ROOT: Final = Path(__file__).resolve().parents[2]
# What a run calls of a subject or oracle without naming it in their own text.
_PROTOCOL: Final = ("__init__", "allocate", "before_replay", "in_graph")
_PIPELINES: Final = "dsa_verify.subjects.pipelines."

# Named on the way, and run by no system: none gives a schedule the indices that two of these are for, and the harness
# captures what an engine captures by itself.
_OUTSIDE: Final = frozenset(
    {
        "oracles.schedule:_indexed",
        "oracles.schedule:_run_cost",
        "dsa_verify.subjects.pipelines.in_graph_verify:InGraphVerify.capture",
    }
)
# These subjects refuse a geometry without an indexer.
_REFUSING: Final = ("dsa_verify.subjects.pipelines.schedule_life", "dsa_verify.subjects.pipelines.in_graph_verify")
# What they share with the other systems is shown to those alone: each of their modes runs there.
_SHARING: Final = ("ragged_verify", "mtp")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Door:
    """A run of `replay` and `fuzz`: of a system, with the subject of that name and a preset, "" for the system's own;
    all else as it is by default."""

    system: str
    subject: str = DEFAULT_SUBJECT
    preset: str = ""

    def __str__(self) -> str:
        subject = "" if self.subject == DEFAULT_SUBJECT else f":{self.subject}"
        return f"{self.system}{subject}{self.preset and f' {self.preset}'}"


def presets(device: str, system: System, reference: str) -> tuple[str, ...]:
    """Those that the subject is run with: the system's own, whose configurations have an indexer in their turn, with
    and without pools; both that have one throughout where the subject refuses all others."""
    return INDEXED_PRESETS[system.preset(device)] if reference.startswith(_REFUSING) else ("",)


@functools.cache
def doors(device: str) -> dict[str, list[Door]]:
    """By definition, `module:qualified name`, the doors that lead to it, the plainest first; another subject than the
    system's own only where that one does not, or where it is a neighbour of theirs, which it calls in another way."""
    found: dict[str, list[Door]] = {}
    for name in sorted(SYSTEMS, key=lambda name: name in _SHARING):
        system = SYSTEMS[name]
        own: set[str] = set()
        for subject in sorted(system.subjects, key=lambda subject: subject != DEFAULT_SUBJECT):
            reference = system.subjects[subject]
            if not reference.startswith(_PIPELINES):
                continue  # an adapter's, of code that is not here
            whole = _reached(reference) | _reached(system.oracle)
            beside = reference.partition(":")[0]
            for definition in whole:
                if definition in own and not definition.startswith(beside):
                    continue
                known = found.setdefault(definition, [])
                if name in _SHARING and any(door.system not in _SHARING for door in known):
                    continue
                known += [Door(name, subject, preset) for preset in presets(device, system, reference)]
            own |= whole if subject == DEFAULT_SUBJECT else set()
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Module:
    definitions: dict[str, ast.AST]
    imported: dict[str, tuple[str, str]]  # local name: (module, its name there)


def path_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


@functools.cache
def _module(name: str) -> _Module:
    tree = ast.parse(path_of(name).read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and _is_ours(node.module)
        for alias in node.names
    }
    return _Module(dict(_definitions(tree.body, "")), imported)


def _is_ours(module: str) -> bool:
    return module.startswith((_PIPELINES, "oracles."))


def _definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """(qualified name, node) of classes, functions, and of names that are given a value outside functions."""
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield f"{prefix}{node.name}", node
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{prefix}{node.name}.")
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and not prefix:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        yield name.id, node


@functools.cache
def _reached(reference: str) -> frozenset[str]:
    """All that the definition leads to, but by way of what no system runs."""
    module, _, name = reference.partition(":")
    reached: set[tuple[str, str]] = set()
    attributes = set(_PROTOCOL)
    new = [(module, name)]
    while new:
        for place in new:
            reached.add(place)
            attributes |= _attributes(*place)
        named = set(_named(reached, attributes)) - reached
        new = [(module, name) for module, name in named if f"{module}:{name}" not in _OUTSIDE]
    return frozenset(f"{module}:{name}" for module, name in reached)


def _named(reached: set[tuple[str, str]], attributes: set[str]) -> Iterator[tuple[str, str]]:
    for module, name in reached:
        known = _module(module)
        node = known.definitions[name]
        for each in _names(node):
            if each in known.definitions:
                yield module, each
            elif each in known.imported and known.imported[each][1] in _module(known.imported[each][0]).definitions:
                yield known.imported[each]
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and (method.name in attributes or method.name.startswith("__")):
                    yield module, f"{name}.{method.name}"


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a definition; of a class without those of its methods, which are definitions themselves."""
    if isinstance(node, ast.ClassDef):
        for part in (*node.bases, *(each for each in node.body if not isinstance(each, ast.FunctionDef))):
            yield from ast.walk(part)
    else:
        yield from ast.walk(node)


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in _own_nodes(node) if isinstance(each, ast.Name)}


@functools.cache
def _attributes(module: str, name: str) -> frozenset[str]:
    node = _module(module).definitions[name]
    return frozenset(each.attr for each in _own_nodes(node) if isinstance(each, ast.Attribute))
