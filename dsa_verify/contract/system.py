"""System: all that is known of one kind of metadata, as a value. Whoever needs to know something of a system asks it.

A file of `dsa_verify/systems/` makes one. Nothing here imports torch or NumPy: the reader of cases needs no more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.batch import Fewer
from dsa_verify.contract.edge_kind import EdgeKind
from dsa_verify.contract.geometry import PRESETS, Geometry
from dsa_verify.contract.kpool import pooled_indexer
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.size import Size, declare
from dsa_verify.contract.static_inputs import PAD_REQUEST, StaticInput

if TYPE_CHECKING:
    import torch

    from dsa_verify.contract.subject import Subject

    Tensors = Mapping[str, torch.Tensor]

# Among the fixed fields of an engine's subject: its tables are as wide as its own code makes them. Not `table_width`
# itself, which edges set.
OWN_TABLES: Final = "tables of the engine's width"
# Among the fixed fields of a subject that is not ours: the matrix leaves it the draft steps, blocks and ratios it was
# asked for.
OF_OTHERS: Final = "a subject that is not ours"

Fields = Mapping[str, object]  # of a geometry, by name

Shapes = list[tuple[tuple[int, ...], dict[str, object]]]  # (buckets, fields of the geometry) of each configuration


class Dealer(Protocol):
    """A dealer draws the configurations of a fuzz run, as far as a system's own fields need it: `deal` gives a value
    its turn. `engine`, `ours`: whether the subject is an engine's, or a pipeline of this project."""

    @property
    def engine(self) -> bool: ...
    @property
    def ours(self) -> bool: ...
    @property
    def drafts(self) -> tuple[int, ...]: ...
    def deal(self, deck: str, values: Sequence[Any]) -> Any: ...
    def is_legal(self, geometry: Geometry, changes: Fields) -> bool: ...


def draft_rows(geometry: Geometry) -> int:
    return geometry.draft_tokens


def one(geometry: Geometry) -> int:
    return 1


def no_inputs(geometry: Geometry) -> tuple[StaticInput, ...]:
    return ()


def no_lengths(geometry: Geometry) -> tuple[int, ...]:
    return ()


def no_turn(geometry: Geometry, i: int, fixed: frozenset[str]) -> Fields:
    return {}


def no_deal(dealer: Dealer, geometry: Geometry) -> Fields:
    return {}


def no_note(geometry: Geometry) -> str:
    return ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class System:
    """One kind of metadata. `layout(geometry, bucket)`: its fields. `oracle` and `subjects` are `module:attribute`
    references to Subject factories.

    `drafts`: whether requests have drafts, so that N is a matter of it. `by_default`: whether a run that names no
    system includes it. `presets`: the geometry that a run which names none uses, on a CUDA device and on a CPU.
    `asks`: fields of the geometry that are so unless a run says otherwise, and that nothing turns over.
    `sizes`: what its geometries have beside the fields that all share (size.py).

    Rows and lengths. `token_rows(geometry)`: token rows of one request where all have as many.
    `graph_tokens(geometry, bucket)`: token rows of a graph, where they are not those of each request times the
    bucket. `written_back(geometry)`: how far before the end of its length a request writes its first token in a step
    (contract 4.2, 7.1, 8.2). `pad_length(geometry)`: what a pad row's `seq_lens` holds (contract 0.2). `adds_draft`:
    whether `seq_lens` is the prefix before the draft, so that the draft's tokens are live beyond it (contract 1.2,
    9). `owns`: how many token rows each request owns, where requests differ (live.py).

    What a round says. `seeded`: whether values that a round does not list are hashed from its seed. `refusals`: by key
    of a round that only some geometries of the system have, why the others have not, and the remedy.
    `check_round(geometry, bucket, lens, where)`: UsageError for counts, by name, that do not fit.

    Inputs. `own_inputs(geometry)`: those beside lengths and requests, of which the drawn ones are counts that a round
    says of each request. `constants`: by name, those without rows of the batch. `derive(geometry, drawn, req_to_token,
    seed)`: those that are not drawn. `told`: those whose values explain a difference. `unknowable`: why a check of a
    live server cannot know what the outputs must be.

    The indexer. `indexer`, `pools`: whether the layout has it, and has it over pools. `empty_rows`: whether a request
    of length 0 is a token row of length 0. `context_columns(geometry)`: columns of `paged_mqa_ctx_lens_2d`.
    `by_architecture`: whether fields without the indexer turn at the architecture. `narrow`: whether the wide table may
    be missing (contract 1.5).

    What is tried. `turn(geometry, i, fixed)`: fields of configuration `i` of the matrix; `shapes(geometry, batches,
    drafts, fixed)`: its buckets, and `script(buckets)`: (bucket, raw batch) of its scripted rounds, both where they are
    not those of all systems. `units(geometry)`: lengths whose multiples a formula turns at. `deal(dealer, geometry)`:
    fields of a fuzz configuration. `edges`: which it has; by edge `edge_fields`, which are left out where they are
    fixed, and `widest`, without which there is no widest table. `all_fields`: fields of the geometry with which the
    layout has everything. `note(geometry)`: words that set a configuration apart.
    """

    name: str
    summary: str
    layout: Callable[[Geometry, int], Layout]
    oracle: str
    subjects: Mapping[str, str]
    drafts: bool = False
    by_default: bool = False
    presets: tuple[str, str] = ("deepseek_v32", "tiny")
    asks: Fields = dataclasses.field(default_factory=dict)
    sizes: tuple[Size, ...] = ()

    token_rows: Callable[[Geometry], int] = draft_rows
    graph_tokens: Callable[[Geometry, int], int] | None = None
    written_back: Callable[[Geometry], int] = one
    pad_length: Callable[[Geometry], int] = one
    adds_draft: bool = False
    owns: Fewer | None = None

    seeded: bool = False
    refusals: Mapping[str, str] = dataclasses.field(default_factory=dict)
    check_round: Callable[[Geometry, int, Mapping[str, Sequence[int]], str], None] | None = None

    own_inputs: Callable[[Geometry], tuple[StaticInput, ...]] = no_inputs
    constants: Mapping[str, Callable[[Geometry, torch.device], torch.Tensor]] = dataclasses.field(default_factory=dict)
    derive: Callable[[Geometry, Tensors, torch.Tensor, torch.Tensor], Tensors] | None = None
    told: tuple[str, ...] = ()
    unknowable: str = ""

    indexer: bool = False
    pools: bool = False
    empty_rows: bool = False
    context_columns: Callable[[Geometry], int] = one
    by_architecture: bool = False
    narrow: bool = False

    turn: Callable[[Geometry, int, frozenset[str]], Fields] = no_turn
    shapes: Callable[[Geometry, Sequence[int] | None, Sequence[int] | None, frozenset[str]], Shapes] | None = None
    script: Callable[[tuple[int, ...]], list[tuple[int, int]]] | None = None
    units: Callable[[Geometry], tuple[int, ...]] = no_lengths
    deal: Callable[[Dealer, Geometry], Fields] = no_deal
    edges: frozenset[EdgeKind] = frozenset()
    edge_fields: Mapping[EdgeKind, tuple[Fields, ...]] = dataclasses.field(default_factory=dict)
    widest: Fields = dataclasses.field(default_factory=dict)
    all_fields: Fields = dataclasses.field(default_factory=dict)
    note: Callable[[Geometry], str] = no_note

    def __post_init__(self) -> None:
        names = [size.name for size in self.sizes]
        for size in self.sizes:
            if hasattr(Geometry, size.name) or names.count(size.name) > 1:
                raise UsageError(f"system {self.name!r}: size {size.name!r} is there already; give it another name")
            if unknown := sorted(size.presets.keys() - PRESETS.keys()):
                raise UsageError(f"system {self.name!r}: {size.name}: {unknown[0]!r} is no preset; remove it")
            declare(self.name, size)

    def geometry(self, preset: str, overrides: Mapping[str, Any] | None = None, *, where: str = "") -> Geometry:
        """Return the geometry of `preset` with `overrides` of its fields, which include the system's own sizes;
        UsageError names the field, its value and the limit, and begins with `where`."""
        return Geometry.resolve(preset, overrides, self.sizes, where=where)

    def check_geometry(self, geometry: Geometry) -> None:
        """Raise UsageError for a geometry that has not this system's sizes."""
        if geometry.sizes != self.sizes:
            raise UsageError(
                f"geometry: it has not the sizes of {self.name}, which are "
                f"{', '.join(size.name for size in self.sizes) or 'none'}; make it by "
                f"get_system({self.name!r}).geometry({geometry.preset!r}, ...)"
            )

    def preset(self, device_type: str) -> str:
        """The name of the preset for a device of this type."""
        return of_device(self.presets, device_type)

    def make_oracle(self) -> Subject:
        from dsa_verify.contract.subject import load_attribute  # imports torch

        oracle: Subject = load_attribute(self.oracle)()
        return oracle

    def capacity(self, geometry: Geometry, bucket: int) -> int:
        """Return how many token rows a graph of `bucket` requests is captured with."""
        if self.graph_tokens is not None:
            return self.graph_tokens(geometry, bucket)
        return bucket * self.token_rows(geometry)

    def drafted(self, geometry: Geometry) -> int:
        """Tokens that are live beyond `seq_lens`, which some systems have before the draft (contract 0.1)."""
        return self.token_rows(geometry) - self.written_back(geometry)

    def shortest_length(self, geometry: Geometry) -> int:
        """The smallest legal `seq_lens`: 0, but with a write plan one whose first write is not before position 0, which
        contract 4.2 leaves undefined."""
        return self.plan_start(geometry) if pooled_indexer(geometry) else 0

    def plan_start(self, geometry: Geometry) -> int:
        """Return how far before the end of its length a request's write plan starts, where there is one (contract
        4.2)."""
        return self.written_back(geometry) if self.pools else 0

    def check_lengths(self, geometry: Geometry, seq_lens: Iterable[int], *, where: str = "") -> None:
        """Raise UsageError for the first length that would start its writes below position 0 (contract 4.2)."""
        shortest = self.shortest_length(geometry)
        for b, length in enumerate(seq_lens):
            if length < shortest:
                raise UsageError(
                    f"{where}seq_lens[{b}]: {length} is below {shortest}, so that {self.name} with pool_size "
                    f"{geometry.pool_size} would write before position 0; use {shortest} or more"
                )

    def pages_before_writes(self, geometry: Geometry, lengths: Any) -> Any:
        """Return whole allocator pages before the first token that a request of each length writes in a step: those
        that it may share with another. `lengths`: an integer, or any array or tensor of them."""
        back = self.written_back(geometry)
        return (lengths - back) * (lengths > back) // geometry.allocator_page

    def inputs(self, geometry: Geometry) -> tuple[StaticInput, ...]:
        """Return the inputs that have rows of the batch; `req_to_token` and constants are not among them."""
        index, rows = geometry.index_dtype, geometry.request_rows
        pad = self.pad_length(geometry)
        return (
            StaticInput(name="seq_lens", dtype=index, pad=pad, low=1, high=geometry.context + 1),
            StaticInput(name="req_pool_indices", dtype=index, pad=PAD_REQUEST, low=1, high=rows),
            *self.own_inputs(geometry),
        )

    def drawn(self, geometry: Geometry) -> tuple[StaticInput, ...]:
        """Return the inputs of its own that a table of rounds has a column for."""
        return tuple(spec for spec in self.own_inputs(geometry) if spec.drawn)

    def lens(self, geometry: Geometry) -> dict[str, StaticInput]:
        """Return the counts that rounds say of each request, by name."""
        return {spec.name: spec for spec in self.drawn(geometry) if spec.said}

    def takes(self, geometry: Geometry, name: str) -> bool:
        """Return whether `name` is one of its inputs that have rows of the batch."""
        return any(spec.name == name for spec in self.inputs(geometry))

    def why_not(self, key: str) -> str:
        """Why no round of a geometry without it may say `key`, and the remedy."""
        return self.refusals.get(key, f"has no effect in {self.name}; remove it")


def as_system(found: object, name: str) -> System:
    """Return the System that `found` is, or that a declaration (declare/metadata.py) makes. UsageError if neither;
    `name`: what led to it."""
    system = getattr(found, "system", found)
    if not isinstance(system, System):
        raise UsageError(f"system {name!r}: that is a {type(found).__name__}, not a System or a Metadata; name one")
    return system


def of_device(presets: tuple[str, str], device_type: str) -> str:
    """Return of (on a CUDA device, on a CPU) the one for `device_type`."""
    return presets[0] if device_type == "cuda" else presets[1]
