"""Configurations: what `fuzz` captures, drawn from the seed.

What stays fixed while rounds are replayed (batch, draft length, ranks, widths, dtypes, views) is as much a place for
defects as what rounds hold, and a run can capture only a few. So each dimension is a deck of its own: the runs of
successive seeds are dealt its values in turn, each value once before any comes again, in an order that differs from
deck to deck. Every value is met within few seeds, and every pair before long. What a run fixes is not drawn.

A run has one *wide* configuration, whose captured rows are at a multiple of 32 or beside it, *small* ones, and, on a
GPU, one *huge* one of more rows than some kernels were compiled for. That one gets few of the rounds.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.edge_kind import EdgeKind
from dsa_verify.contract.geometry import (
    DISJOINT_GENERATIONS,
    INDEX_DTYPES,
    INPUT_VIEWS,
    MAX_SLOTS,
    SCALED_DOWN_PRESETS,
    TABLE_VIEWS,
    WARM_UPS,
    Geometry,
)
from dsa_verify.contract.schedule_variants import VARIANTS, Indices
from dsa_verify.contract.system import OWN_TABLES, System
from dsa_verify.rounds.matrix import Config
from dsa_verify.systems.catalogue import is_ours
from dsa_verify.systems.engines import engine_subject
from dsa_verify.systems.shapes import companion
from fuzz.engine.expansion import Stream, word

SMALL: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24)
WIDE: Final = {
    "cpu": (31, 32, 33, 63, 64, 65, *range(95, 130)),
    "cuda": tuple(32 * k + step for k in range(1, 17) for step in (-1, 0, 1)),
}
HUGE: Final = {"cpu": (), "cuda": (4095, 4096, 4097, 4128, 5121)}
DRAFTS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 16)
ENGINE_DRAFTS: Final = (2, 3, 4, 6, 8)  # what engines are started with
ARCHITECTURES: Final = (90, 100)
SMALL_CONFIGS: Final = 3  # of a run: capturing costs as much as a thousand rounds on a GPU
# So that tables of many rows take neither the memory nor the time of the others.
_CONTEXTS: Final = {"wide": 8192, "huge": 4096}
HUGE_SHARE: Final = 50  # an ordinary configuration has so many times the rounds of a huge one
# An indexer within reach of the lengths of a scaled-down geometry.
_SCALED_DOWN: Final[dict[str, object]] = {"multiprocessors": 5, "schedule": "tiny", "plan_rules": "tiny"}
# What a scaled-down geometry of our own may have instead: pages of which each token or two are one, a top-k that fills
# no block of lanes, and thresholds within reach of a short context.
_OTHER_SCALES: Final[dict[str, tuple[object, ...]]] = {
    "page_size": (1, 2),
    "topk": (33,),
    "plan_rules": ("tiny_low",),
}
_POOL: Final = 4

T = TypeVar("T")


def configurations(
    system: System,
    geometry: Geometry,
    *,
    seed: int,
    rounds: int,
    device_type: str,
    subject: str | None = None,
    batches: Sequence[int] = (),
    drafts: Sequence[int] = (),
    fixed: frozenset[str] = frozenset(),
) -> list[Config]:
    """Return what a run of `seed` captures; `rounds` are shared out among all. `fixed` fields of `geometry`, and the
    `batches` and `drafts` (draft lengths) that are given, are kept to.

    Of an engine's subject only what the diagnostic matrix turns over is drawn, and of anybody's but our own no gap
    behind the rows of tables, as a copy may ask for none (contract 2.2). UsageError for what contradicts itself.
    """
    _refuse(system, geometry, batches, fixed)
    kinds = ["wide", *("small",) * SMALL_CONFIGS, "huge"]
    if batches:
        kinds = ["given"] * (1 + SMALL_CONFIGS)
    elif not _takes_huge(system, subject, device_type, fixed):
        kinds.remove("huge")
    found = []
    shares = share_out(rounds, [1 if kind == "huge" else HUGE_SHARE for kind in kinds])
    for i, (kind, share) in enumerate(zip(kinds, shares, strict=True)):
        drawn, buckets = _Draw(
            system=system,
            base=geometry,
            subject=subject,
            device_type=device_type,
            batches=tuple(batches),
            given=tuple(drafts),
            fixed=fixed,
            seed=seed,
            index=i,
            kind=kind,
        ).config()
        note = "" if kind == "given" else kind
        found.append(Config(system=system, geometry=drawn, buckets=buckets, rounds=share, seed=seed, note=note))
    return found


def describe(geometry: Geometry, buckets: Sequence[int]) -> str:
    """Return all that sets a configuration apart, in words."""
    changes = [f"{key} {value}" for key, value in geometry.overrides().items()]
    return ", ".join([geometry.preset, f"buckets {list(buckets)}", *changes])


def _refuse(system: System, geometry: Geometry, batches: Sequence[int], fixed: frozenset[str]) -> None:
    if "draft_tokens" in fixed:
        remedy = "give the draft lengths with --draft-tokens" if system.drafts else "it has no draft, so leave it out"
        raise UsageError(f"draft_tokens: is chosen for each configuration of {system.name}; {remedy}")
    if batches and "request_rows" in fixed and geometry.request_rows <= max(batches):
        raise UsageError(
            f"request_rows: {geometry.request_rows} rows are too few for a batch of {max(batches)} requests and the "
            f"pad request; use {max(batches) + 1} or more"
        )


def _takes_huge(system: System, subject: str | None, device_type: str, fixed: frozenset[str]) -> bool:
    """Return whether more rows than 4,096 are asked of it: the pools of dcp would be too large for that, an engine may
    say no, and a context or request rows that are fixed may leave no room."""
    bound = fixed & {"context", "request_rows"}
    return bool(HUGE[device_type]) and system.indexer and engine_subject(subject) is None and not bound


def share_out(rounds: int, weights: Sequence[int]) -> list[int]:
    """Return `rounds` by `weights`, all above 0: in all exactly `rounds`, the first served first where they are few."""
    ends = [-(-rounds * done // sum(weights)) for done in itertools.accumulate(weights)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def deal(values: Sequence[T], position: int, deck: str) -> T:
    """Return the card at `position` of a deck of `values` that is shuffled anew each time it has been dealt."""
    turn, place = divmod(position, len(values))
    name = zlib.crc32(deck.encode())
    order = sorted(range(len(values)), key=lambda i: word(turn, name, Stream.CONFIGURATION, i))
    return values[order[place]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """One configuration: number `index` of the run of `seed`, of some `kind`, over `base`."""

    system: System
    base: Geometry
    subject: str | None
    device_type: str
    batches: tuple[int, ...]
    given: tuple[int, ...]
    fixed: frozenset[str]
    seed: int
    index: int
    kind: str

    def config(self) -> tuple[Geometry, tuple[int, ...]]:
        """Return (geometry, buckets)."""
        geometry = self._apply(self.base, self._context() | self._indexer())
        geometry = self._apply(geometry, self._scale(geometry))
        geometry = self._apply(geometry, dict(self.system.deal(self, geometry)) | self._schedule(geometry))
        card = deal(self._deck, self._turn, f"{self._name} {self.kind}")
        geometry = geometry.replace(draft_tokens=self._draft_length(geometry, card))
        buckets = self._buckets(geometry, card)
        if self._ragged:
            geometry = self._apply(geometry, {"graph_tokens": self._graph_tokens(geometry, buckets, card)})
        geometry = self._with_request_rows(geometry, max(buckets))
        return self._apply(geometry, self._forms(geometry)), buckets

    @property
    def _name(self) -> str:
        return self.system.name

    @property
    def _ragged(self) -> bool:
        """Return whether rounds say how many tokens each request verifies, within the token rows of a graph (contract
        9)."""
        return "verify_lens" in self.system.lens(self.base)

    @property
    def engine(self) -> bool:
        """Return whether the subject is an engine's."""
        return engine_subject(self.subject) is not None

    @property
    def ours(self) -> bool:
        """Return whether the subject is a pipeline of this project."""
        return is_ours(self.system, self.subject)

    @property
    def _position(self) -> int:
        return self.seed * (1 + SMALL_CONFIGS) + self.index

    @property
    def _turn(self) -> int:
        """Return the turn of the decks of sizes: wide and huge ones are one a run, the others go on from run to run."""
        if self.kind == "small":
            return self.seed * SMALL_CONFIGS + self.index - 1
        return self._position if self.kind == "given" else self.seed

    @property
    def _deck(self) -> Sequence[int]:
        """Return the sizes: captured rows of wide and huge ones, requests of others."""
        if self.kind == "given":
            return self.batches
        return {"wide": WIDE[self.device_type], "huge": HUGE[self.device_type]}.get(self.kind, SMALL)

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.given or (ENGINE_DRAFTS if self.engine else DRAFTS)

    @property
    def _counts_rows(self) -> bool:
        return self.kind in ("wide", "huge")

    def _apply(self, geometry: Geometry, changes: Mapping[str, object]) -> Geometry:
        return geometry.replace(**{name: value for name, value in changes.items() if name not in self.fixed})

    def is_legal(self, geometry: Geometry, changes: Mapping[str, object]) -> bool:
        """Return whether `geometry` takes `changes` beside what is fixed."""
        try:
            self._apply(geometry, changes)
        except UsageError:
            return False
        return True

    def deal(self, deck: str, values: Sequence[T]) -> T:
        return deal(values, self._position, f"{self._name} {deck}")

    # What is captured ------------------------------------------------------------------------------------------------

    def _draft_length(self, geometry: Geometry, card: int) -> int:
        """Return one that divides the rows that are wanted, where there is one."""
        if not self.system.drafts:
            return 1
        usable = [n for n in self.drafts if self._usable(n, geometry)] or [min(self.drafts)]
        if not self._counts_rows or self._ragged:
            return self.deal("draft_tokens", usable)
        whole = [n for n in usable if not card % self._per_request(n, geometry)]
        return deal(whole or usable, self._turn, f"{self._name} {self.kind} draft_tokens")

    def _per_request(self, n: int, geometry: Geometry) -> int:
        """Return token rows of a request."""
        return self.system.token_rows(dataclasses.replace(geometry, draft_tokens=n))

    def _usable(self, n: int, geometry: Geometry) -> bool:
        """Return whether requests with drafts of `n` tokens fit the context, and the mode has such drafts."""
        fits = 2 * n + geometry.pool_size <= geometry.context and self._per_request(n, geometry) > 0
        return fits and self.is_legal(geometry, {"draft_tokens": n})

    def _buckets(self, geometry: Geometry, card: int) -> tuple[int, ...]:
        """Return the one whose turn it is, and one that it is interleaved with."""
        n, most = geometry.draft_tokens, self._most(geometry)
        main, ragged = card, self._ragged
        if self._counts_rows:
            main = -(-card // n) if ragged else max(card // self._per_request(n, geometry), 1)
        if self.kind == "given":
            most = max(most, main)
        main = min(main, most)
        other = companion(main)
        if ragged:
            # With as many token rows in both graphs, only the request slots tell them apart (contract 9).
            slots = card if self._counts_rows else main * n
            other = self.deal("slots", [slots] if self.engine else [slots, companion(main)])
        return tuple(dict.fromkeys((main, min(other, most))))

    def _most(self, geometry: Geometry) -> int:
        """Requests of one batch at most, all with rows of their own: what the pool's slots leave room for."""
        if "request_rows" in self.fixed:
            return geometry.request_rows - 1
        page = geometry.allocator_page
        space = 1 << (MAX_SLOTS // page - geometry.first_page).bit_length() - 1
        return max(space // (DISJOINT_GENERATIONS * geometry.pages_per_row) - 1, 1)

    def _graph_tokens(self, geometry: Geometry, buckets: Sequence[int], card: int) -> int:
        """Return what all requests of the first bucket could verify, or the slots, or between, or 0: as each bucket."""
        full, least = buckets[0] * geometry.draft_tokens, max(buckets)
        if self._counts_rows:
            return max(min(card, full), least)
        if self.engine:
            return max(full, least)
        return self.deal("graph_tokens", (max(full, least), least, max((full + least) // 2, least), 0))

    def _with_request_rows(self, geometry: Geometry, widest: int) -> Geometry:
        """Return the geometry with as few request rows as a full batch needs, or with many."""
        if "request_rows" in self.fixed:
            return geometry
        few, many = widest + 1, max(self.base.request_rows, 2 * widest + 1)
        wanted = self.deal("request_rows", (few, many))
        return geometry.replace(request_rows=max(few, min(wanted, self._most(geometry) + 1)))

    # What it looks like ----------------------------------------------------------------------------------------------

    def _context(self) -> dict[str, object]:
        if self.engine or self.kind not in _CONTEXTS:
            return {}
        return {"context": min(_CONTEXTS[self.kind], self.base.context)}

    def _indexer(self) -> dict[str, object]:
        """Return no indexer, one, or one over pools, where the run has not said which; huge batches always have one."""
        base, fixed = self.base, self.fixed
        if not self.ours or base.indexer or fixed & {"indexer", "pool_size"} or not self.system.indexer:
            return {}
        flat = {"indexer": True, **(_SCALED_DOWN if base.preset in SCALED_DOWN_PRESETS else {})}
        pooled = {**flat, "pool_size": _POOL} if self.system.pools else flat
        kinds = [kind for kind in (flat, pooled) if self.is_legal(base, kind)]
        return self.deal("indexer", kinds if self.kind == "huge" else [{}, *kinds])

    def _scale(self, geometry: Geometry) -> dict[str, object]:
        """Return other pages, top-k and thresholds of a scaled-down geometry, each where the layout has them beside the
        others; and of a decode the narrow table alone."""
        found: dict[str, object] = {}
        scaled = self.ours and self.base.preset in SCALED_DOWN_PRESETS
        for name, others in _OTHER_SCALES.items() if scaled else ():
            value = self.deal(name, (getattr(geometry, name), *others))
            if self._has_layout(geometry, {**found, name: value}):
                found[name] = value
        if self.ours and self.system.narrow:
            value = self.deal("wide_table", (True, False))
            if self._has_layout(geometry, {**found, "wide_table": value}):
                found["wide_table"] = value
        return found

    def _has_layout(self, geometry: Geometry, changes: Mapping[str, object]) -> bool:
        try:
            self.system.layout(self._apply(geometry, changes), 1)
        except UsageError:
            return False
        return True

    def _schedule(self, geometry: Geometry) -> dict[str, object]:
        """Return the architecture where fields turn at it, and a schedule variant that it has."""
        if not self.ours or "architecture" in self.fixed:
            return {}
        if not geometry.indexer:
            has = self.system.by_architecture
            return {"architecture": self.deal("architecture", ARCHITECTURES)} if has else {}
        if "schedule" in self.fixed:
            known = [each for each in ARCHITECTURES if each in VARIANTS[geometry.schedule].architectures]
            return {"architecture": self.deal("architecture", known)} if known else {}
        architecture = self.deal("architecture", ARCHITECTURES)
        split = VARIANTS[geometry.schedule].split
        variants = [
            each.name
            for each in VARIANTS.values()
            if architecture in each.architectures and each.split == split and each.max_next_n is None
            if 2 in each.context_dims and each.indices is not Indices.MANDATORY
        ]
        return {"architecture": architecture, "schedule": self.deal(f"schedule of {architecture}", variants)}

    def _forms(self, geometry: Geometry) -> dict[str, object]:
        found: dict[str, object] = {
            "index_dtype": self.deal("index_dtype", INDEX_DTYPES),
            "input_view": self.deal("input_view", INPUT_VIEWS),
            "warm_ups": self.deal("warm_ups", WARM_UPS),
        }
        if OWN_TABLES not in self.fixed:
            found["table_width"] = self.deal("table_width", _widths(geometry))
        if self.ours and EdgeKind.GAP in self.system.edges:
            found["table_view"] = self.deal("table_view", TABLE_VIEWS)
        return found


def _widths(geometry: Geometry) -> tuple[int, ...]:
    """Return the context; narrower ones (contract 1.6), odd so that no page or block divides it, and of whole pages."""
    whole = max(geometry.context // 2 // geometry.page_size, 1) * geometry.page_size
    return 0, geometry.context * 2 // 3 | 1, min(whole, geometry.context)


def visited(config: Config) -> dict[str, Any]:
    """Return for JSON preset, buckets, and the fields of the geometry that are not as in the preset."""
    geometry = config.geometry
    return {"preset": geometry.preset, "buckets": list(config.buckets), "geometry": geometry.overrides()}
