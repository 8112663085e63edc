"""The diagnostic matrix: 16 configurations of 17 rounds a system, and the endless stream of rounds that follows it.

The rounds are scripted so that each length boundary of contract 10 is crossed in both directions, requests move between
batch rows and to other pages, some of which take their first pages from another request or keep them, buckets
interleave, raw batches go large, small, idle, large, and every poison is used. `padded` has 68 rounds instead, with
every raw batch of both its buckets. A longer run goes on with random rounds drawn from the same boundaries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import WARM_UPS, Geometry
from dsa_verify.contract.round import POISONS, SEED_LIMIT, Round, one_each
from dsa_verify.contract.round_table import Array, RoundTable, complete_table, tabulate
from dsa_verify.contract.schedule_variants import VARIANTS, Placement
from dsa_verify.contract.static_inputs import PAD_REQUEST
from dsa_verify.contract.system import OWN_TABLES, Shapes, System
from dsa_verify.contract.topk_plan import PLAN_RULES
from dsa_verify.rounds.indexer_turns import architecture_turn, indexer_turn
from dsa_verify.systems.shapes import swing, with_drafts, without_drafts

SCRIPTED_ROUNDS: Final = 17
CHUNK_ROUNDS: Final = 512  # rounds between two polls of the judge
REMAPS_PER_ROUND: Final = 4
LONG_LENGTH: Final = 100_001  # the length the published 272-replay diagnostic goes up to

_UNDEFINED_ROWS: Final = 32  # a schedule over so many rows, or a multiple, must not be of lengths 0 alone
_RAGGED: Final = (1, 7, 13)  # rounds of full batches
_NONE_EXTENDS: Final = 10
_FORMS: Final = ("plain", "offset", "strided")
_INDEX_DTYPES: Final = ("int64", "int32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One configuration: what is captured, and how many rounds to replay from which seed. `note`: what is special.
    `script`: the first rounds, instead of those of the matrix."""

    system: System
    geometry: Geometry
    buckets: tuple[int, ...]
    rounds: int
    seed: int
    note: str = ""
    script: tuple[Round, ...] | None = None

    @property
    def name(self) -> str:
        """Return batch, draft length, the form of the inputs, and what is special."""
        geometry = self.geometry
        draft = f", N {geometry.draft_tokens}" if self.system.drafts else ""
        note = f", {self.note}" if self.note else ""
        return f"batch {self.buckets[0]}{draft}, {geometry.index_dtype}, {geometry.input_view}{note}"

    def chunks(self) -> Iterator[RoundTable]:
        """Yield the rounds, in tables of at most CHUNK_ROUNDS."""
        generations = np.zeros(self.geometry.request_rows, np.int64)
        rng = np.random.default_rng([self.seed, self.buckets[0], self.geometry.draft_tokens])
        scripted = _scripted(self, rng, self.rounds) if self.script is None else list(self.script)
        if scripted:
            yield tabulate(
                self.system,
                self.geometry,
                scripted,
                generations,
                widest_bucket=max(self.buckets),
                remap_slots=REMAPS_PER_ROUND,
            )
        left = self.rounds - len(scripted)
        while left > 0:
            count = min(left, CHUNK_ROUNDS)
            yield _random(self, rng, count, generations)
            left -= count


def diagnostic_matrix(
    system: System,
    geometry: Geometry,
    *,
    rounds: int | None = None,
    seed: int = 0,
    batches: Sequence[int] | None = None,
    drafts: Sequence[int] | None = None,
    fixed: frozenset[str] = frozenset(),
) -> list[Config]:
    """Return DRAFT_SHAPES, or batches x draft lengths where either is given (without drafts: batches alone; padded:
    modes x draft lengths, with all batches captured). `rounds`: of each configuration, all scripted ones by default.

    Dtype and view of the inputs and the warm-ups turn over the configurations, so that offset, strided and int32 inputs
    are part of every matrix, unless they are among the `fixed` fields of `geometry`. In every fourth, page tables are
    narrower than requests may be, which no more than fill them (contract 1.6), unless OWN_TABLES is `fixed`. In every
    fourth other the indexer is on, and where it is, the architecture turns (indexer_turns.py). The draft steps of mtp,
    the blocks of dcp and the ratios of padded turn, too, unless `fixed` has OF_OTHERS.
    """
    if "draft_tokens" in fixed:
        if not system.drafts:
            raise UsageError(
                f"draft_tokens: has no effect in {system.name}, which has no draft; leave it out, or give it to "
                "systems that have one (--draft-tokens)"
            )
        raise UsageError("draft_tokens: the matrix chooses it; give the draft lengths as drafts (--draft-tokens)")
    configs = []
    for i, (buckets, changes) in enumerate(_shapes(system, geometry, batches, drafts, fixed)):
        base = indexer_turn(system, geometry, i, fixed)
        turning: dict[str, object] = {"input_view": _FORMS[i % 3], "index_dtype": _INDEX_DTYPES[i % 2]}
        if (i - i // 4) % 4 == 1 and OWN_TABLES not in fixed:
            turning["table_width"] = base.context * 2 // 3 | 1  # odd, so that no page and no block divides it
        turning |= system.turn(base, i, fixed)
        turning |= architecture_turn(base, i, fixed)
        turning["warm_ups"] = WARM_UPS[i // 3 % 2]
        turning["request_rows"] = max(geometry.request_rows, max(buckets) + 2)
        turning |= changes
        if geometry.request_rows <= max(buckets) and "request_rows" in fixed:
            raise UsageError(
                f"request_rows: {geometry.request_rows} rows are too few for a batch of {max(buckets)} requests and "
                f"the pad request; use {max(buckets) + 1} or more"
            )
        config_geometry = base.replace(**{key: value for key, value in turning.items() if key not in fixed})
        count = rounds if rounds is not None else len(_script_shapes(system, buckets))
        note = ", ".join(_what_is_special(geometry, config_geometry))
        configs.append(
            Config(system=system, geometry=config_geometry, buckets=buckets, rounds=count, seed=seed, note=note)
        )
    return configs


def _what_is_special(geometry: Geometry, config_geometry: Geometry) -> Iterator[str]:
    """Yield what is special in a configuration of `geometry`, beyond what all turn over."""
    if config_geometry.preset != geometry.preset:
        yield config_geometry.preset
    if config_geometry.architecture != geometry.architecture:
        yield f"architecture {config_geometry.architecture}"
    for size in config_geometry.sizes:
        if size.note and config_geometry.own[size.name] != geometry.own[size.name]:
            yield size.note


def _shapes(
    system: System,
    geometry: Geometry,
    batches: Sequence[int] | None,
    drafts: Sequence[int] | None,
    fixed: frozenset[str],
) -> Shapes:
    if system.shapes is not None:
        return system.shapes(geometry, batches, drafts, fixed)
    return with_drafts(batches, drafts) if system.drafts else without_drafts(batches)


def boundaries(geometry: Geometry) -> Array:
    """Lengths on, just below and just above everything a formula of contract 1 turns at; sorted, within context."""
    n, page, pool, topk = geometry.draft_tokens, geometry.page_size, geometry.pool_size, geometry.topk
    width = geometry.columns
    centres = [page, 2 * page, page * pool, 2 * page * pool, 128, 256, 384, 512, topk, topk + pool, width, width - n]
    centres += [LONG_LENGTH, geometry.context]
    if geometry.indexer:
        thresholds = [threshold for threshold, _ in PLAN_RULES[geometry.plan_rules].thresholds]
        centres += [*thresholds, *((threshold + 1) * pool for threshold in thresholds)]
    around = {centre + step for centre in centres for step in (-2, -1, 0, 1, 2)} | {0, 1, 2, 3, n, pool - 1, pool}
    return np.array(sorted(value for value in around if 0 <= value <= geometry.context), np.int64)


def _scripted(config: Config, rng: np.random.Generator, count: int) -> list[Round]:
    """The first `count` scripted rounds, fewer if there are not so many."""
    geometry, system = config.geometry, config.system
    values = boundaries(geometry)
    rows = rng.permutation(np.arange(1, geometry.request_rows))
    rounds = []
    for i, (bucket, wanted) in enumerate(_script_shapes(system, config.buckets)[:count]):
        raw = min(wanted, len(rows))
        lengths = np.maximum(_script_lengths(i, raw, values, geometry.context), system.shortest_length(geometry))
        if raw == bucket and not lengths.any() and undefined_when_empty(system, geometry, bucket):
            lengths[0] = 1
        if i % 2:
            rows = np.roll(rows, 1)  # every request moves to another batch row
        if i % 7 == 6:
            rows = rng.permutation(rows)
        requests = rows[:raw].copy()
        if i % 8 == 5 and raw > 1:
            requests[1] = requests[0]  # two batch rows of one request
        remap = rng.choice(requests, size=min(raw, i % (REMAPS_PER_ROUND + 1)), replace=False) if raw else requests
        spare = _spare_pages(config, lengths, requests)
        if len(remap) and not any(spare[row] for row in remap.tolist()):
            remap[0] = max(spare, key=spare.__getitem__)  # one that can take a prefix
        rounds.append(
            Round(
                bucket=bucket,
                seq_lens=tuple(lengths.tolist()),
                requests=tuple(requests.tolist()),
                lens=_script_lens(config, i, bucket, lengths, requests),
                remap=tuple(dict.fromkeys(remap.tolist())),
                prefixes=_script_prefixes(i, spare, remap.tolist(), rows),
                poison=POISONS[i % len(POISONS)],
                twice=i in (4, 11),
                seed=int(rng.integers(SEED_LIMIT)) if system.seeded else 0,
            )
        )
    return rounds


def _script_shapes(system: System, buckets: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (bucket, raw batch) of each scripted round."""
    if system.script is not None:
        return system.script(buckets)
    main, other = buckets[0], buckets[-1]
    shapes, last = [], swing(main)
    for i in range(SCRIPTED_ROUNDS - len(last)):
        bucket = other if i % 3 == 2 else main
        shapes.append((bucket, (bucket, bucket, bucket, max(bucket - 1, 0), bucket // 2)[i % 5]))
    return shapes + last


def _script_lengths(i: int, raw: int, values: Array, context: int) -> Array:
    """Return round i's lengths: a walk up the boundaries from 1, then down, with the extremes between them."""
    row = np.arange(raw)
    if i == 3:
        return np.ones(raw, np.int64)
    if i == 7:
        return np.full(raw, context, np.int64)
    if i == 8:
        return np.where(row == 0, context, 1).astype(np.int64)  # one huge request among tiny ones
    if i == 12:
        return np.zeros(raw, np.int64)
    step = i if i < 9 else abs(SCRIPTED_ROUNDS - i)
    apart = next(stride for stride in (7, 11, 13) if len(values) % stride)  # else a batch walks past most of them
    return np.where(row == _in_turn((1, 6, 10), i, raw), 0, values[(1 + step * 5 + row * apart) % len(values)])


def _in_turn(rounds: tuple[int, int, int], i: int, raw: int) -> int:
    """Return the first, one between and the last of `raw` requests in `rounds`; else, and of fewer than three, -1."""
    return dict(zip(rounds, (0, raw // 2, raw - 1), strict=True)).get(i, -1) if raw > 2 else -1


def _script_lens(config: Config, i: int, bucket: int, lengths: Array, requests: Array) -> dict[str, tuple[int, ...]]:
    """Return what round `i` says of each request beside its length."""
    found: dict[str, tuple[int, ...]] = {}
    row = np.arange(len(lengths))
    for name, spec in config.system.lens(config.geometry).items():
        match name:
            case "extend_lens":
                if i not in (*_RAGGED, _NONE_EXTENDS):
                    continue  # all N
                values = _script_extends(config, i, row)
            case "verify_lens":
                values = _script_verify_lens(config, i, bucket, row)
            case "replay_floors":
                values = _script_floors(config, i, lengths)
            case _:  # from the least to the greatest in turn
                values = spec.low + (i + row) % (spec.high - spec.low)
        found[name] = one_each(requests.tolist(), values.tolist()) if spec.of_row else tuple(values.tolist())
    return found


def _script_extends(config: Config, i: int, row: Array) -> Array:
    """Return lengths that are ragged with a zero, or nothing at all."""
    ragged = np.where(row == _in_turn(_RAGGED, i, len(row)), 0, 1 + (i // 2 + row) % config.geometry.draft_tokens)
    return ragged * (i != _NONE_EXTENDS)


def _script_floors(config: Config, i: int, lengths: Array) -> Array:
    """Floors in the window of each request, at both its ends and beyond, and none, in turn (contract 7.1)."""
    geometry = config.geometry
    before = np.array([0, geometry.window // 2, 1, geometry.window - 1, geometry.window, -1])
    turn = (i + np.arange(len(lengths))) % (len(before) + 1)
    floors: Array = np.where(turn == 0, 0, np.clip(lengths - before[turn - 1], 0, geometry.context))
    return floors


def _spare_pages(config: Config, lengths: Array, requests: Array) -> dict[int, int]:
    """Return by request row, how many of its first pages no batch row of it writes."""
    spare: dict[int, int] = {}
    pages = config.system.pages_before_writes(config.geometry, lengths)
    for row, count in zip(requests.tolist(), pages.tolist(), strict=True):
        spare[row] = min(count, spare.get(row, count))
    return spare


def _script_prefixes(
    i: int, spare: dict[int, int], remap: Sequence[int], rows: Array
) -> tuple[tuple[int, int, int], ...]:
    """Return a round's prefixes: of the rows that move, the one with the longest request takes all the pages it may.

    In two rounds of three it takes those of the longest of the others, or of a row that is not replayed, in the third
    its own.
    """
    if not remap:
        return ()
    row = max(remap, key=spare.__getitem__)
    others = [other for other in spare if other != row]
    origin = max(others, key=spare.__getitem__) if others else int(rows[-1])
    if i % 3 == 2:
        origin = row
    pages = min(spare[row], spare.get(origin, spare[row]))
    return ((row, origin, pages),) if pages else ()


def _script_verify_lens(config: Config, i: int, bucket: int, row: Array) -> Array:
    """Return 1 to N tokens in turn, as far as the graph has room."""
    wanted = 1 + (i + row * 3) % config.geometry.draft_tokens
    room = np.array([config.system.capacity(config.geometry, bucket)])
    cut: Array = _within(wanted[None, :], room)[0]
    return cut


def _within(wanted: Array, room: Array) -> Array:
    """Return `wanted` [M, B] lengths, 0: no request, cut to at least 1 so that each row's sum fits into `room` [M]."""
    extra = np.maximum(wanted - 1, 0)
    spare = room - (wanted > 0).sum(1)
    before = np.cumsum(extra, axis=1) - extra
    return np.where(wanted > 0, 1 + np.clip(spare[:, None] - before, 0, extra), 0)


def undefined_when_empty(system: System, geometry: Geometry, bucket: int) -> bool:
    """Return whether a full batch of lengths 0 has no defined schedule (contract 3.6)."""
    if not geometry.indexer or not system.empty_rows:
        return False
    rows, variant = system.capacity(geometry, bucket), VARIANTS[geometry.schedule]
    return variant.undefined_when_empty or (variant.placement is Placement.TAIL and rows % _UNDEFINED_ROWS == 0)


def is_undefined(system: System, geometry: Geometry, round_: Round) -> bool:
    """Return whether `round_` asks for a schedule that the contract leaves undefined (3.6)."""
    full = round_.raw_batch == round_.bucket and not any(round_.seq_lens)
    return full and undefined_when_empty(system, geometry, round_.bucket)


def _random(config: Config, rng: np.random.Generator, count: int, generations: Array) -> RoundTable:
    """`count` random rounds, drawn column by column."""
    geometry, widest = config.geometry, max(config.buckets)
    values = boundaries(geometry)
    bucket = rng.choice(np.array(config.buckets), size=count, p=_mostly_first(len(config.buckets)))
    raw = np.where(rng.random(count) < 0.75, bucket, rng.integers(0, bucket + 1))
    shape = (count, widest)
    uniform = np.exp(rng.random(shape) * np.log(geometry.context)).astype(np.int64)
    lengths = np.where(rng.random(shape) < 0.5, rng.choice(values, size=shape), np.clip(uniform, 0, geometry.context))
    lengths = np.maximum(lengths, config.system.shortest_length(geometry))
    live = np.arange(widest)[None, :] < raw[:, None]
    empty = (raw == bucket) & ~(lengths * live).any(1)
    empty &= np.isin(bucket, [b for b in config.buckets if undefined_when_empty(config.system, geometry, b)])
    lengths[empty, 0] = 1
    requests = rng.integers(1, geometry.request_rows, size=shape)
    remap_rows = np.where(
        rng.random((count, REMAPS_PER_ROUND)) < 0.25, requests[:, :1] + np.arange(REMAPS_PER_ROUND), -1
    )
    remap_rows = np.where(remap_rows < geometry.request_rows, remap_rows, -1)
    remap_generations = np.zeros_like(remap_rows)
    for i, slot in zip(*np.nonzero(remap_rows >= 0), strict=True):
        generations[remap_rows[i, slot]] += 1
        remap_generations[i, slot] = generations[remap_rows[i, slot]]
    remap_origins, remap_pages = _prefixes(config, rng, lengths, np.where(live, requests, PAD_REQUEST), remap_rows)
    poison = rng.integers(0, len(POISONS), size=count)
    twice = (rng.random(count) < 0.02).astype(np.int64)
    lens, seed = _lens(config, rng, bucket, lengths, requests, live)
    return complete_table(
        config.system,
        geometry,
        bucket=bucket,
        raw=raw,
        poison=poison,
        twice=twice,
        seq_lens=np.where(live, lengths, config.system.pad_length(geometry)),
        requests=np.where(live, requests, PAD_REQUEST),
        lens=lens,
        seed=seed,
        remap_rows=remap_rows,
        remap_generations=remap_generations,
        remap_origins=remap_origins,
        remap_pages=remap_pages,
    )


def _prefixes(
    config: Config, rng: np.random.Generator, lengths: Array, requests: Array, remap_rows: Array
) -> tuple[Array, Array]:
    """Return (origins, pages) [M, R]: in half of the rounds in which the first request of the batch moves, it takes
    some of the pages that another, or itself, does not write in this round."""
    batch = np.maximum((requests != PAD_REQUEST).sum(1), 1)
    at = (rng.random(len(batch)) * batch).astype(np.int64)
    row, origin = requests[:, :1], np.take_along_axis(requests, at[:, None], axis=1)
    spare = config.system.pages_before_writes(config.geometry, lengths)
    involved = ((requests == row) | (requests == origin)) & (requests != PAD_REQUEST)
    most = np.where(involved, spare, config.geometry.pages_per_row).min(1)
    chosen = (remap_rows[:, 0] >= 0) & (remap_rows[:, 0] == row[:, 0]) & (most > 0) & (rng.random(len(batch)) < 0.5)
    origins, pages = np.full_like(remap_rows, PAD_REQUEST), np.zeros_like(remap_rows)
    pages[:, 0] = np.where(chosen, 1 + rng.integers(0, np.maximum(most, 1)), 0)
    origins[:, 0] = np.where(chosen, origin[:, 0], PAD_REQUEST)
    return origins, pages


def _lens(
    config: Config,
    rng: np.random.Generator,
    bucket: Array,
    lengths: Array,
    requests: Array,
    live: npt.NDArray[np.bool_],
) -> tuple[dict[str, Array], Array]:
    """Return [M, B] of each of the system's drawn inputs, and the seeds [M]. The same draws are made for all shipped
    systems, in this order, whichever are used: rounds of a seed stay what they were."""
    system, geometry = config.system, config.geometry
    said, n = system.lens(geometry), geometry.draft_tokens
    drawn = {"extend_lens": _extend_lens(config, rng, live)}
    if "verify_lens" in said:
        drawn["verify_lens"] = _verify_lens(config, rng, bucket, live)
    if "replay_floors" in said:
        drawn["replay_floors"] = _floors(config, rng, lengths, requests)
    seed = rng.integers(0, SEED_LIMIT, size=len(bucket)) if system.seeded else np.zeros_like(bucket)
    drawn["accept_lens"] = rng.integers(1, n + 1, size=live.shape)
    for name, spec in said.items():
        if name not in drawn:
            width = geometry.request_rows if spec.of_row else live.shape[1]
            values = rng.integers(spec.low, spec.high, size=(len(bucket), width))
            drawn[name] = np.take_along_axis(values, requests, axis=1) if spec.of_row else values
    columns = {
        spec.name: np.where(live, drawn[spec.name], spec.pad) if spec.said else np.full(live.shape, spec.pad, np.int64)
        for spec in system.drawn(geometry)
    }
    return columns, seed


def _extend_lens(config: Config, rng: np.random.Generator, live: npt.NDArray[np.bool_]) -> Array:
    """Return all N in three rounds of four; otherwise ragged, zeros included (contract 1.3)."""
    n = config.geometry.draft_tokens
    ragged = (rng.random((live.shape[0], 1)) < 0.25) & (not config.geometry.indexer)
    return np.where(ragged & live, rng.integers(0, n + 1, size=live.shape), n)


def _verify_lens(config: Config, rng: np.random.Generator, bucket: Array, live: npt.NDArray[np.bool_]) -> Array:
    wanted = np.where(live, rng.integers(1, config.geometry.draft_tokens + 1, size=live.shape), 0)
    return _within(wanted, np.array([config.system.capacity(config.geometry, int(each)) for each in bucket]))


def _floors(config: Config, rng: np.random.Generator, lengths: Array, requests: Array) -> Array:
    """Return 0 of half of the request rows; else around the window of one of the row's lengths in this round."""
    geometry = config.geometry
    shape = (len(lengths), geometry.request_rows)
    of_row = np.zeros(shape, np.int64)
    np.put_along_axis(of_row, requests, lengths, axis=1)
    of_row = np.clip(of_row - rng.integers(-2, geometry.window + 3, size=shape), 0, geometry.context)
    of_row = np.where(rng.random(shape) < 0.5, of_row, 0)
    return np.take_along_axis(of_row, requests, axis=1)


def _mostly_first(count: int) -> npt.NDArray[np.float64]:
    weights = np.array([0.7] + [0.3 / max(count - 1, 1)] * (count - 1))
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares
