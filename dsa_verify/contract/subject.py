"""Subject is the protocol of a pipeline under test. Oracles implement the same protocol.

One instance serves one captured bucket. Its life: `allocate` once, outside capture; `before_replay` and `in_graph` as
a warm-up, and again, or `in_graph` alone (`warm_ups` of the geometry); `in_graph` once under capture; then, for every
round, `before_replay` and a replay of the captured graph.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final, Protocol, runtime_checkable

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract import progress
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.glue_route import GlueConditions, Release, Route
from dsa_verify.contract.layout import Layout

SHARED_INPUTS: Final = ("seq_lens", "req_pool_indices", "req_to_token")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The static input buffers of one bucket; a subject must never write them.

    `seq_lens`, `req_pool_indices`: [bucket], int64 or int32, possibly strided. `req_to_token`: int32 [request rows,
    token columns], possibly strided by rows (contract 0.1). `own`: those that the system has beside them, by name; each
    is an attribute, too (`inputs.out_cache_loc`). What they are, the system says: `System.own_inputs`, `constants`.

    No two inputs that are strided have a stride in common. Those with `columns_apart` may have their columns apart, the
    others the rows of their last dimension.
    """

    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    req_to_token: torch.Tensor
    own: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict, hash=False)

    def __getattr__(self, name: str) -> torch.Tensor:
        """An input of the system's own."""
        own: Mapping[str, torch.Tensor] = object.__getattribute__(self, "own")
        if name not in own:
            has = ", ".join(own) or "none"
            raise AttributeError(f"these inputs have no {name!r}; the system's own inputs in this geometry are: {has}")
        return own[name]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Inputs:
        """Return the inputs with these names."""
        own = {name: tensor for name, tensor in tensors.items() if name not in SHARED_INPUTS}
        return cls(**{name: tensors[name] for name in SHARED_INPUTS}, own=own)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all of them by name."""
        return {name: getattr(self, name) for name in SHARED_INPUTS} | dict(self.own)

    def replace(self, **changes: torch.Tensor) -> Inputs:
        """Return inputs with some of the tensors exchanged."""
        return Inputs.of(self.tensors() | changes)


class Buffers(MutableMapping[str, torch.Tensor]):
    """The output tensors of one bucket by field name, each guarded on both sides and at a stable address.

    Assigning a name replaces what the verifier takes for that output, which after capture is a finding.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, torch.Tensor]):
        self.layout = layout
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor

    def __delitem__(self, name: str) -> None:
        del self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@runtime_checkable
class Subject(Protocol):
    """A metadata pipeline at one bucket.

    `allocate` may keep the tensors of `buffers` as its outputs (they are guarded), or fix buffers of its own and
    return them from an optional method `outputs() -> Mapping[str, Tensor]`; it also writes the fields that are only
    written at capture. `before_replay` is the eager work before each replay; `in_graph` is what is recorded. What a
    subject itself can say of a wrong element it returns from an optional method `explain(field, row, column, got, want)
    -> str | None`: it ends the sentence of the finding. With an optional method `foreign_work() -> None` it declares
    what else runs between its replays (`has_foreign_work`), which is called before some rounds.
    """

    name: str

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None: ...

    def before_replay(self) -> None: ...

    def in_graph(self) -> None: ...


@runtime_checkable
class Routed(Subject, Protocol):
    """A subject that does not always replay its graph has these as well.

    The verifier asks `route` before each replay, runs `in_graph` eagerly where that says so, and holds the answer
    against contract 7.4 under `glue_conditions`.
    """

    release: Release

    def route(self, raw_batch: int) -> Route: ...

    def glue_conditions(self, raw_batch: int) -> GlueConditions: ...


SubjectFactory = Callable[[], Subject]


def not_covered(factory: SubjectFactory, layout: Layout, device: torch.device) -> dict[str, str]:
    """Return why the subjects of `factory` do not give a field of `layout`, by field; empty for most.

    A factory may have a static method `not_covered(layout, device) -> Mapping[str, str]`. What it names is left out of
    the comparison and listed in every result; UsageError for a name that is not a field of `layout`.
    """
    ask = getattr(factory, "not_covered", None)
    found = dict(ask(layout, device)) if ask is not None else {}
    unknown = [name for name in found if name not in layout]
    if unknown:
        raise UsageError(
            f"not_covered of {factory!r}: {', '.join(unknown)} are not fields of {layout.system}; its fields are "
            f"{', '.join(field.name for field in layout)}"
        )
    return found


def has_foreign_work(factory: object) -> bool:
    """Return whether the subjects of `factory` declare foreign work, which runs between rounds.

    They do so by a method `foreign_work()` of the class, or an attribute of that name of any other factory. It is eager
    work of the same process that does not prepare a replay, such as a prefill or an idle step; it must leave the static
    inputs alone.
    """
    return getattr(factory, "foreign_work", None) is not None


def provenance(factory: SubjectFactory) -> dict[str, str]:
    """Return what `factory` says about the code of its subjects, such as versions and digests of files.

    A factory says so by a static method `provenance() -> Mapping[str, str]`; most have none, and the result is empty.
    It is part of every result of a run.
    """
    ask = getattr(factory, "provenance", None)
    return dict(ask()) if ask is not None else {}


def current_outputs(subject: Subject, buffers: Buffers) -> Mapping[str, torch.Tensor]:
    """Return what a consumer would read now: the subject's own `outputs()`, or the buffers it was given."""
    own = getattr(subject, "outputs", None)
    return buffers if own is None else own()


_NEEDED: Final = ("allocate", "in_graph")


def check_factory(label: str, factory: object) -> None:
    """Raise UsageError unless `factory`, which `label` names, is a class of subjects or a function that may make them.

    It is called without arguments, so anything that a name happens to lead to must not pass: no builtin, no instance.
    """
    maker = factory
    while isinstance(maker, functools.partial):
        maker = maker.func
    if isinstance(maker, type):
        if missing := _missing(maker):
            raise UsageError(
                f"subject {label!r} is a class without {missing}; name one that has allocate, before_replay and "
                "in_graph, or a function that makes such a subject"
            )
    elif not (inspect.isfunction(maker) or inspect.ismethod(maker)):
        raise UsageError(
            f"subject {label!r} is a {type(factory).__name__}, not a class or function; "
            "name something that returns a new subject when called without arguments"
        )


def make_subject(factory: SubjectFactory) -> Subject:
    """Return a new subject. Raises UsageError if `factory` made something else."""
    subject = factory()
    if missing := _missing(subject):
        raise UsageError(
            f"{getattr(factory, '__qualname__', repr(factory))} made a {type(subject).__name__}, which has no "
            f"{missing}; return a new subject, which has allocate, before_replay and in_graph"
        )
    return subject


def _missing(subject: object) -> str:
    return " and no ".join(name for name in _NEEDED if not callable(getattr(subject, name, None)))


def load_attribute(reference: str) -> Any:
    """Return the object at `module:attribute`. UsageError says which half is wrong."""
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"subject {reference!r}: not of the form module:attribute; for example my_pipeline:MySubject")
    slots = progress.current().slots
    slots[progress.STAGE], stage = progress.IMPORT, slots[progress.STAGE]
    try:
        value: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may do anything while it is imported
        raise UsageError(
            f"subject {reference!r}: importing {module_name!r} raised {type(error).__name__}: {error}"
            f"{_import_remedy(error, module_name)}"
        ) from error
    finally:
        slots[progress.STAGE] = stage
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise UsageError(f"subject {reference!r}: {module_name!r} has no attribute {part!r}; check the spelling")
        value = getattr(value, part)
    return value


def _import_remedy(error: BaseException, module_name: str) -> str:
    if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
        return "; run from the folder that holds it, or install it"
    last = traceback.extract_tb(error.__traceback__)[-1]
    # Where the text is no Python, the last frame is the import's own, and the error says the line.
    where = "" if last.filename.startswith("<frozen") else f" at {last.filename}:{last.lineno}"
    exits = ", and a module that is imported must not exit" if isinstance(error, SystemExit) else ""
    return f"{where}; mend the module{exits}"
