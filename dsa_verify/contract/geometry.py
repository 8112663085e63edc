"""Geometry: everything that stays fixed for a run, and the presets that name real models (contract 0.1, 0.3).

A geometry says how large things are, never what a round holds. `Geometry.resolve` is the only way one is made from
a preset and overrides, so that a wrong combination is refused in one place. What one system alone needs is a size of
that system (size.py), and `System.geometry` the way to a geometry that has it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.schedule_variants import VARIANTS, Indices
from dsa_verify.contract.size import Limits, Size, owners, values_of
from dsa_verify.contract.topk_plan import PLAN_RULES

MAX_CONTEXT_TOKENS: Final = 1 << 21
MAX_BATCH: Final = 16_384
MAX_DRAFT_TOKENS: Final = 16
MAX_SLOTS: Final = 1 << 31
INDEX_DTYPES: Final = ("int64", "int32")
INPUT_VIEWS: Final = ("plain", "offset", "strided")
# A request table whose last row begins at element 2**31: 17 GiB, so of edges only.
FAR: Final = "far"
TABLE_VIEWS: Final = ("plain", "strided")
WARM_UPS: Final = ("refreshed", "together")
TABLE_GAP: Final = 64  # elements behind each row of a strided table
# Page ids of a request row change with its generation; so many generations of all rows are pairwise disjoint.
DISJOINT_GENERATIONS: Final = 4
# Pools (contract 0.3).
POOLED_PAGE_SIZE: Final = 64
GROUP_TOPK: Final = (128, 160, 192, 224, 256, 512, 2048)
MAX_TOPK: Final = 2048
SCALED_DOWN_PRESETS: Final = ("tiny", "tiny_indexer", "tiny_pool")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes and forms of one run. Lengths and widths are in tokens unless the name says otherwise.

    `context`: largest sequence length. `page_size`: physical page P. `topk`: K. `pool_size`: K-pool size kp.
    `draft_tokens`: N (1 in decode). `request_rows`: rows of `req_to_token`, row 0 being the pad request.
    `table_width`: columns of `page_table_1` (0: `context`); a length beyond it is legal and must not be written.
    `token_table_width`: columns of `req_to_token` (0: `context + draft_tokens` rounded up to 64 and one page more).
    `first_page`: the lowest page id that a request may hold, page 0 being the pad request's; a large pool's ids cost
    no memory but in the pools of dcp.
    `architecture`: 90 or 100, which decides the form of `paged_mqa_ctx_lens_2d` (contract 1.2).
    `index_dtype`: dtype of `seq_lens` and `req_pool_indices`. `input_view`: how the input tensors lie in memory;
    "far" takes 17 GiB, for a request table whose last row begins at element 2**31.
    `table_view`: how the page tables that a subject is given lie: rows adjacent, or "strided" with a guarded gap
    behind each; engines have them adjacent, and a copy may ask for it (contract 2.2).
    `wide_table`: whether `page_table_1` exists (contract 1.5).
    `warm_ups`: whether each of the two runs of a graph's body before its capture has eager work of its own before it
    ("refreshed"), or both have the first one's ("together"); engines do either.
    `indexer`: whether the indexer's metadata (schedule, top-k plan; with pooling its views and write plan) is part of
    the layout. Then `multiprocessors` is S, `schedule` a variant of contract 3.2, `plan_rules` a table of contract 5.
    (V4c is told from others by lengths of N columns, which `architecture` 100 alone lays out, though 90 builds it.)
    `sizes`: those of the system that it is for, whose values `own` holds; each is an attribute, too.
    """

    preset: str
    context: int
    page_size: int
    topk: int
    pool_size: int = 1
    draft_tokens: int = 1
    request_rows: int = 97
    table_width: int = 0
    token_table_width: int = 0
    first_page: int = 1
    architecture: int = 90
    index_dtype: str = "int64"
    input_view: str = "plain"
    table_view: str = "plain"
    wide_table: bool = True
    warm_ups: str = "refreshed"
    indexer: bool = False
    multiprocessors: int = 132
    schedule: str = "V4b"
    plan_rules: str = "H200"
    sizes: tuple[Size, ...] = dataclasses.field(default=(), repr=False)
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __getattr__(self, name: str) -> Any:
        """The value of a size of its system."""
        own: Mapping[str, Any] = object.__getattribute__(self, "own")
        if name in own:
            return own[name]
        has = ", ".join(owners(name))
        known = (
            f"it is a size of {has}, which get_system(...).geometry(...) makes geometries of"
            if has
            else "nothing is called so"
        )
        raise AttributeError(f"this geometry has no {name!r}: {known}")

    @property
    def columns(self) -> int:
        """Columns of `page_table_1`."""
        return self.table_width or self.context

    @property
    def pages(self) -> int:
        """Columns of `real_page_table`."""
        return -(-self.columns // self.page_size)

    @property
    def table_gap(self) -> int:
        """Elements behind each row of a page table that nobody may write."""
        return TABLE_GAP if self.table_view == "strided" else 0

    @property
    def allocator_page(self) -> int:
        """Return A: tokens whose slots are consecutive and aligned (contract 0.1)."""
        ranks: int = math.prod(self.own[size.name] for size in self.sizes if size.ranks)
        return self.page_size * self.pool_size * ranks

    @property
    def token_columns(self) -> int:
        """Columns of `req_to_token`, over-allocated as engines do and never less than a table needs."""
        needed = max(self.context + self.draft_tokens, self.columns)
        return self.token_table_width or -(-needed // 64) * 64 + self.allocator_page

    @property
    def pages_per_row(self) -> int:
        """Return how many allocator pages one row of `req_to_token` spans."""
        return -(-self.token_columns // self.allocator_page)

    @property
    def page_id_space(self) -> int:
        """Return the power of two that page ids are drawn below, before `first_page` is added."""
        return 1 << (DISJOINT_GENERATIONS * self.request_rows * self.pages_per_row - 1).bit_length()

    @property
    def slots(self) -> int:
        """Return the number of token slots of the pool; every entry of `req_to_token` is below it."""
        return (self.page_id_space + self.first_page) * self.allocator_page

    @classmethod
    def resolve(
        cls, preset: str, overrides: Mapping[str, Any] | None = None, sizes: tuple[Size, ...] = (), *, where: str = ""
    ) -> Geometry:
        """Return the geometry of `preset` with `overrides`, and with the `sizes` of a system; UsageError names the
        field, its value and the limit."""
        if preset not in PRESETS:
            raise UsageError(f"preset: {preset!r} is unknown; known presets: {', '.join(PRESETS)}")
        shared, own = dict(PRESETS[preset]), values_of(sizes, preset)
        for key, value in (overrides or {}).items():
            expected = type(own[key]) if key in own else SHARED_FIELDS.get(key)
            if expected is None:
                raise UsageError(f"{where}{_unknown(key, sizes)}")
            if type(value) is not expected:
                got = type(value).__name__
                raise UsageError(f"{where}{key}: {value!r} is {got}; it must be {expected.__name__}")
            (own if key in own else shared)[key] = value
        geometry = cls(preset=preset, sizes=sizes, own=own, **shared)
        geometry._check_each(where)
        geometry._check_together(where)
        return geometry

    def values(self) -> dict[str, Any]:
        """Return all fields but the preset, and the system's own sizes, by name in the order of a case."""
        names = list(SHARED_FIELDS)
        for size in self.sizes:
            names.insert(names.index(size.before) if size.before else len(names), size.name)
        return {name: getattr(self, name) for name in names}

    def of_preset(self) -> Geometry:
        """Return the preset itself, with the same sizes."""
        return Geometry(
            preset=self.preset, sizes=self.sizes, own=values_of(self.sizes, self.preset), **PRESETS[self.preset]
        )

    def overrides(self) -> dict[str, Any]:
        """Return the fields in which this geometry differs from its preset: what a case file stores."""
        usual = self.of_preset().values()
        return {name: value for name, value in self.values().items() if value != usual[name]}

    def replace(self, **changes: Any) -> Geometry:
        """A checked copy with `changes`."""
        return Geometry.resolve(self.preset, {**self.overrides(), **changes}, self.sizes)

    def _check_each(self, where: str) -> None:
        """Raise UsageError for a value that no other makes legal."""
        for name, limits in _LIMITS.items():
            limits.check(name, getattr(self, name), where=where)
        for size in self.sizes:
            size.check(size.name, self.own[size.name], where=where)
        if self.architecture not in (90, 100):
            raise UsageError(f"{where}architecture: {self.architecture} is not 90 or 100")

    def _check_together(self, where: str) -> None:
        """Raise UsageError for values that do not fit one another."""
        if self.indexer:
            if VARIANTS[self.schedule].indices is Indices.MANDATORY:
                raise UsageError(f"{where}schedule: {self.schedule} needs indices, which no system passes; use another")
            if self.multiprocessors < 2 and VARIANTS[self.schedule].paired_at:
                raise UsageError(
                    f"{where}multiprocessors: {self.multiprocessors} makes no pair, and {self.schedule} takes them in "
                    "pairs; use 2 or more"
                )
            check_pool_geometry(self, where=where)
        needed = max(self.context + self.draft_tokens, self.columns)
        if self.token_columns < needed:
            raise UsageError(
                f"{where}token_table_width: {self.token_columns} is below {needed}, what the context needs"
            )
        if not self.wide_table and (self.page_size == 1 or self.draft_tokens > 1 or self.pool_size > 1):
            raise UsageError(
                f"{where}wide_table: false needs page_size > 1, draft_tokens 1 and pool_size 1 (contract 1.5)"
            )
        if self.pool_size > 1 and self.context < self.draft_tokens + self.pool_size:
            raise UsageError(
                f"{where}context: {self.context} is below draft_tokens + pool_size, the length of a pad row; raise it"
            )
        if self.slots > MAX_SLOTS:
            raise UsageError(
                f"{where}request_rows: {self.request_rows} rows of {self.token_columns} tokens from page "
                f"{self.first_page} on need {self.slots} slots, more than int32 holds ({MAX_SLOTS}); lower "
                "request_rows, context or first_page"
            )


def check_pool_geometry(geometry: Geometry, *, where: str = "") -> None:
    """Raise UsageError, with the remedy, if `geometry` is one that pooling does not support (contract 0.3)."""
    for name, low, high in (("draft_tokens", 1, MAX_DRAFT_TOKENS), ("topk", 1, MAX_TOPK)):
        value = getattr(geometry, name)
        if not low <= value <= high:
            raise UsageError(f"{where}{name}: {value} is outside {low}..{high}; choose a value inside")
    pool, page, topk = geometry.pool_size, geometry.page_size, geometry.topk
    if pool == 1:
        return
    scaled_down = geometry.preset in SCALED_DOWN_PRESETS
    if page != POOLED_PAGE_SIZE and not scaled_down:
        raise UsageError(
            f"{where}page_size: {page} with pool_size {pool}; pooling exists for page_size {POOLED_PAGE_SIZE} only, "
            f"use it, or pool_size 1, or preset {' or '.join(SCALED_DOWN_PRESETS)}"
        )
    for name, value in (("page_size", page), ("topk", topk)):
        if value % pool:
            raise UsageError(f"{where}pool_size: {pool} does not divide {name} {value}; use a pool_size that does")
    if not scaled_down and topk // pool not in GROUP_TOPK:
        allowed = ", ".join(str(groups * pool) for groups in GROUP_TOPK if groups * pool <= MAX_TOPK)
        raise UsageError(
            f"{where}topk: {topk} is {topk // pool} pools of {pool} tokens, for which there is no top-k kernel; "
            f"with this pool_size use a topk of {allowed}"
        )


_TINY: Final = {"context": 203, "page_size": 4, "topk": 32}
_TINY_INDEXER: Final = {"indexer": True, "multiprocessors": 5, "schedule": "tiny"}

PRESETS: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v32": {"context": 131_072, "page_size": 64, "topk": 2048},
    "deepseek_v32_indexer": {"context": 131_072, "page_size": 64, "topk": 2048, "indexer": True},
    "glm53_flash": {"context": 131_072, "page_size": 64, "topk": 2048, "pool_size": 4, "indexer": True},
    "deepseek_v4": {"context": 131_072, "page_size": 256, "topk": 512},
    # Every boundary within reach of small numbers; the width is a multiple of neither the page nor a table block.
    "tiny": _TINY,
    "tiny_indexer": {**_TINY, **_TINY_INDEXER, "plan_rules": "tiny_low"},
    "tiny_pool": {
        "context": 603,
        "page_size": 4,
        "topk": 32,
        "pool_size": 4,
        **_TINY_INDEXER,
        "plan_rules": "tiny",
    },
    "tiny_v4": {"context": 203, "page_size": 16, "topk": 16},
    # The pages, ratios and alignment of the model, which its own kernels have built in, over a short context.
    "small_v4": {"context": 1203, "page_size": 256, "topk": 64},
}

# By name, the type of each field that all systems share and that overrides may change.
SHARED_FIELDS: Final = {
    field.name: {"int": int, "str": str, "bool": bool}[str(field.type)]
    for field in dataclasses.fields(Geometry)
    if field.name not in ("preset", "sizes", "own")
}

_LIMITS: Final[Mapping[str, Limits]] = {
    "context": Limits(low=1, high=MAX_CONTEXT_TOKENS),
    "page_size": Limits(low=1, high=1024, power_of_two=True),
    "topk": Limits(low=1, high=2048),
    "pool_size": Limits(low=1, high=16, power_of_two=True),
    "draft_tokens": Limits(low=1, high=MAX_DRAFT_TOKENS),
    "request_rows": Limits(low=2, high=2 * MAX_BATCH + 1),
    "table_width": Limits(high=MAX_CONTEXT_TOKENS),
    "token_table_width": Limits(high=2 * MAX_CONTEXT_TOKENS),
    "first_page": Limits(low=1, high=MAX_SLOTS),
    "multiprocessors": Limits(low=1, high=1024),
    "index_dtype": Limits(choices=INDEX_DTYPES),
    "input_view": Limits(choices=(*INPUT_VIEWS, FAR)),
    "table_view": Limits(choices=TABLE_VIEWS),
    "warm_ups": Limits(choices=WARM_UPS),
    "schedule": Limits(choices=tuple(VARIANTS)),
    "plan_rules": Limits(choices=tuple(PLAN_RULES)),
}


def _unknown(key: str, sizes: tuple[Size, ...]) -> str:
    """Say why no field is called `key`."""
    if has := owners(key):
        return f"{key}: is a size of {', '.join(has)} alone; leave it out, or choose that system"
    return (
        f"{key[:40]!r}: unknown geometry field; known fields: {', '.join([*SHARED_FIELDS, *(s.name for s in sizes)])}"
    )


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Overrides of a geometry from KEY=VALUE texts; UsageError for another form. `resolve` checks keys and values."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text!r}: not KEY=VALUE; for example --set page_size=1")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return settings
