"""Expansion: from the few scalars of a round spec to the lengths, requests and page moves of the whole round.

Every value is a hash of (seed, round, stream, element) rather than the next output of a generator, so it depends on
nothing that was drawn before it: Python, NumPy and torch on any device give the same bits, and a failing round can be
rebuilt from its spec without having been stored. All mixing is integer arithmetic modulo 2**64.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from enum import IntEnum, unique
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt
import torch

from dsa_verify.contract.geometry import MAX_BATCH, Geometry
from dsa_verify.contract.round import POISONS, Round
from dsa_verify.contract.static_inputs import PAD_REQUEST, StaticInput
from dsa_verify.contract.system import System
from dsa_verify.rounds.matrix import REMAPS_PER_ROUND, undefined_when_empty
from fuzz.engine.boundaries import boundary_lengths

# The finaliser of splitmix64: odd multipliers and shifts after which every input bit reaches every output bit.
_MULTIPLIERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS: Final = (30, 27, 31)
_STRIDES: Final = (0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB)  # odd, one a counter
_MASK: Final = (1 << 64) - 1
_SEED_LIMIT: Final = 1 << 31  # of Round.seed
_TWICE_ONE_IN: Final = 32
_REMAP_ONE_IN: Final = 4
_CLOSE: Final = 8  # how far below the context a huge length is at most
_UNITS: Final = 64  # permutations of the request rows to choose from

Array = npt.NDArray[np.int64]


@unique
class Stream(IntEnum):
    """A value is drawn from one of these independent streams of a round."""

    ROTATION = 0
    BOUNDARY = 1
    EXPONENT = 2
    MANTISSA = 3
    NARROW = 4
    CENTRE = 5
    UNIT = 6
    OFFSET = 7
    EXTEND = 8
    ACCEPT = 9
    VERIFY = 10
    REMAP = 11
    REMAP_ROW = 12
    POISON = 13
    TWICE = 14
    SEED = 15
    SPEC = 16  # strategies.py
    # Of the requests that move; drawn beside the others, which end with SPEC.
    PREFIX_ROW = 17
    PREFIX_PAGES = 18
    FLOOR = 19
    OWN = 20  # counts that a system has by a name that no rule here knows
    # simulator.py and steps.py
    REUSE = 32
    REGIME = 33
    STEER = 34
    COUNT = 35
    WHICH = 36
    ORDER = 37
    ROW = 38
    FRESH = 39
    LENGTH_POWER = 40
    LENGTH = 41
    ACCEPTED = 42
    VERIFIED = 43
    BUCKET = 44
    OUTPUT_POISON = 45
    REPEAT = 46
    ROUND_SEED = 47
    TENANT = 48
    TIE = 49
    SHARING = 50
    SHARED_PAGES = 51
    REPLAY_FLOOR = 52
    CONFIGURATION = 53  # configurations.py


def word(seed: int, round_: int, stream: int, element: int) -> int:
    """Return a word, 0 <= word < 2**63, in plain Python; `bits` gives the same."""
    value = _mix_int(_round_key(seed, round_) + stream * _STRIDES[2] & _MASK)
    return _mix_int(value + element * _STRIDES[3] & _MASK) >> 1


@functools.lru_cache(maxsize=16)
def _round_key(seed: int, round_: int) -> int:
    return _mix_int(_mix_int(seed * _STRIDES[0] & _MASK) + round_ * _STRIDES[1] & _MASK)


def bits(seed: Any, round_: Any, stream: Any, element: Any) -> Any:
    """Return int64 in [0, 2**63); all arguments are int64 arrays or tensors that broadcast together."""
    value = _mix(seed * _signed(_STRIDES[0]))
    for counter, stride in zip((round_, stream, element), _STRIDES[1:], strict=True):
        value = _mix(value + counter * _signed(stride))
    return _shifted(value, 1)


@overload
def below(words: int, span: int) -> int: ...


@overload
def below(words: Any, span: Any) -> Any: ...


def below(words: Any, span: Any) -> Any:
    """Return 0 <= value < span for `words` of `word` or `bits`; 1 <= span < 2**31. Multiplies instead of dividing, so
    that each value is as likely as any other to one part in 2**32 / span."""
    return (words >> 31) * span >> 32


def _mix_int(value: int) -> int:
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        value = (value ^ value >> shift) * multiplier & _MASK
    return value


def _mix(value: Any) -> Any:
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        value = (value ^ _shifted(value, shift)) * _signed(multiplier)
    return value


def _shifted(value: Any, by: int) -> Any:
    """A logical shift: `>>` copies the sign, and torch has next to no unsigned arithmetic."""
    return value >> by & (1 << 64 - by) - 1


def _signed(value: int) -> int:
    """Return the int64 with the bits of `value` modulo 2**64."""
    return (value + (1 << 63) & _MASK) - (1 << 63)


# Specs --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundSpec:
    """A round outside of what an engine would do, but within the contract.

    `regime`: a name of REGIMES. `raw`: live requests of `bucket`. `hot`: how many of them get the regime's special
    value. `seed`, `round`: what everything else is hashed from.
    """

    regime: str
    bucket: int
    raw: int
    hot: int
    seed: int
    round: int = 0


class Length(IntEnum):
    """A length is drawn in one of these ways."""

    ANY = 0  # log-uniform
    BOUNDARY = 1  # one of boundary_lengths
    EDGE = 2  # one boundary for the whole round, and one below and above it
    SHORT = 3  # the shortest, and one more
    LONG = 4  # the context, and a few less
    SHORTEST = 5


# regime -> (length of an ordinary request, length of a hot one)
REGIMES: Final[dict[str, tuple[Length, Length]]] = {
    "scattered": (Length.ANY, Length.BOUNDARY),
    "boundary": (Length.BOUNDARY, Length.ANY),
    "edge": (Length.EDGE, Length.ANY),
    "short": (Length.SHORT, Length.BOUNDARY),
    "long": (Length.LONG, Length.BOUNDARY),
    "skewed": (Length.SHORT, Length.LONG),
    "empty": (Length.BOUNDARY, Length.SHORTEST),
    "one_request": (Length.BOUNDARY, Length.ANY),  # hot batch rows all name the same request
    "ragged": (Length.BOUNDARY, Length.BOUNDARY),  # hot batch rows extend by nothing
}


def regimes(system: System, geometry: Geometry) -> tuple[str, ...]:
    """Return the regimes that differ from the others in `system`."""
    return tuple(name for name in REGIMES if name != "ragged" or "extend_lens" in system.lens(geometry))


def expand(spec: RoundSpec, system: System, geometry: Geometry) -> Round:
    """Return the round that `spec` stands for."""
    columns = expand_columns([spec], system, geometry)

    def of_requests(name: str) -> tuple[int, ...]:
        return tuple(columns[name][0, : spec.raw].tolist())

    lens = {name: of_requests(name) for name in system.lens(geometry)}
    moves = moves_of(columns, 0)
    return Round(
        bucket=spec.bucket,
        seq_lens=of_requests("seq_lens"),
        requests=of_requests("requests"),
        remap=tuple(row for row, _, _ in moves),
        prefixes=tuple(move for move in moves if move[2]),
        poison=POISONS[int(columns["poison"][0])],
        twice=bool(columns["twice"][0]),
        lens=lens,
        seed=int(columns["seed"][0]) if system.seeded else 0,
    )


def moves_of(columns: dict[str, Any], i: int) -> list[tuple[int, int, int]]:
    """Return (row, origin, pages) of the request rows that move in row `i`, each once; 0 pages: no prefix."""
    names = ("remap", "remap_origins", "remap_pages")
    found: dict[int, tuple[int, int, int]] = {}
    for row, origin, pages in zip(*(columns[name][i].tolist() for name in names), strict=True):
        if row >= 0:
            found.setdefault(row, (row, origin, pages))
    return list(found.values())


def expand_columns(
    specs: Sequence[RoundSpec], system: System, geometry: Geometry, device: torch.device | None = None
) -> dict[str, Any]:
    """Return all rounds of `specs` as int64 columns, NumPy arrays or (given a `device`) tensors, equal bit for bit.

    `bucket`, `raw`, `poison`, `twice`, `seed`: [M]. `seq_lens`, `requests` and each drawn input of the system's own:
    [M, widest bucket], of which the first `raw` mean something. `remap`: [M, REMAPS_PER_ROUND], -1 for none;
    `remap_origins`, `remap_pages`: as in RoundTable.
    """
    return _Columns(specs, system, geometry, device).columns()


class _Columns:
    """The arithmetic of `expand_columns`; [M, 1] and [1, B] arrays broadcast to [M, B]."""

    def __init__(
        self, specs: Sequence[RoundSpec], system: System, geometry: Geometry, device: torch.device | None
    ) -> None:
        self.specs, self.system, self.geometry = specs, system, geometry
        self._array: Any = np.asarray if device is None else functools.partial(torch.tensor, device=device)
        where: Any = np.where if device is None else torch.where
        self._where = where
        names = list(REGIMES)
        rows = [(names.index(s.regime), s.bucket, s.raw, s.hot, _signed(s.seed), _signed(s.round)) for s in specs]
        table = self._array(np.array(rows, np.int64).reshape(len(rows), 6))
        self.regime, self.bucket, self.raw, self.hot, self.seed, self.round = (table[:, i : i + 1] for i in range(6))
        self.batch_row = self._array(np.arange(max((s.bucket for s in specs), default=0), dtype=np.int64))[None, :]
        # All streams at once: [M, streams, B], B being at least the slots of a remap.
        streams = self._array(np.arange(Stream.SPEC, dtype=np.int64))[None, :, None]
        element = self._array(np.arange(max(self.batch_row.shape[1], REMAPS_PER_ROUND), dtype=np.int64))
        self.words = bits(self.seed[:, None], self.round[:, None], streams, element[None, None, :])
        self.live = self.batch_row < self.raw
        self.some = self._where(self.raw > 0, self.raw, 1)
        # Hot rows are neighbours, starting anywhere: first, last and in the middle.
        self.rotation = self._once(Stream.ROTATION, self.some)
        self.is_hot = self.live & ((self.batch_row + self.rotation) % self.some < self.hot)

    def columns(self) -> dict[str, Any]:
        requests, lengths = self._requests(), self._seq_lens()
        return {
            "bucket": self.bucket[:, 0],
            "raw": self.raw[:, 0],
            "seq_lens": lengths,
            "requests": requests,
            **{spec.name: self._lens(spec, i, lengths) for i, spec in enumerate(self.system.drawn(self.geometry))},
            **self._moves(requests, lengths),
            "poison": self._once(Stream.POISON, len(POISONS))[:, 0],
            "twice": self._where(self._once(Stream.TWICE, _TWICE_ONE_IN) == 0, 1, 0)[:, 0],
            "seed": self._once(Stream.SEED, _SEED_LIMIT - 1)[:, 0],
        }

    def _below(self, stream: Stream, span: Any) -> Any:
        """Return [M, B]"""
        return below(self.words[:, stream, : self.batch_row.shape[1]], span)

    def _once(self, stream: Stream, span: Any) -> Any:
        """Return [M, 1]"""
        return below(self.words[:, stream, :1], span)

    def _seq_lens(self) -> Any:
        shortest = self.system.shortest_length(self.geometry)
        kinds = self._array(np.array(list(REGIMES.values()), np.int64))
        kind = self._where(self.is_hot, kinds[self.regime, 1], kinds[self.regime, 0])
        lengths = self._any_length()
        for which, values in (
            (Length.BOUNDARY, self._boundary_lengths()),
            (Length.EDGE, self._edge_lengths()),
            (Length.SHORT, shortest + self._below(Stream.NARROW, 2)),
            (Length.LONG, self.geometry.context - self._below(Stream.NARROW, _CLOSE)),
            (Length.SHORTEST, shortest),
        ):
            # Of an enumeration NumPy asks for attributes in Python, and loses an interrupt that arrives meanwhile.
            lengths = self._where(kind == int(which), values, lengths)
        lengths = self._clipped(lengths, shortest)
        return self._where(self._undefined(lengths) & (self.batch_row == 0), 1, lengths)

    def _any_length(self) -> Any:
        exponent = self._below(Stream.EXPONENT, self.geometry.context.bit_length())
        power = (exponent * 0 + 1) << exponent
        return power + self._below(Stream.MANTISSA, power)

    def _boundary_lengths(self) -> Any:
        values = self._array(_lengths(self.system, self.geometry))
        return values[self._below(Stream.BOUNDARY, len(values))]

    def _edge_lengths(self) -> Any:
        values = self._array(_lengths(self.system, self.geometry))
        return values[self._once(Stream.CENTRE, len(values))] + self._below(Stream.NARROW, 3) - 1

    def _clipped(self, lengths: Any, shortest: int) -> Any:
        lengths = self._where(lengths < shortest, shortest, lengths)
        return self._where(lengths > self.geometry.context, self.geometry.context, lengths)

    def _undefined(self, lengths: Any) -> Any:
        """Return [M, 1]: rounds whose schedule the contract leaves undefined (3.6)."""
        nothing = self._where(self.live, lengths, 0).sum(1)[:, None] == 0
        undefined = [undefined_when_empty(self.system, self.geometry, spec.bucket) for spec in self.specs]
        return nothing & (self.raw == self.bucket) & self._array(np.array(undefined, np.bool_))[:, None]

    def _requests(self) -> Any:
        """Return distinct request rows, by an affine permutation; those of hot batch rows may be one."""
        rows = self.geometry.request_rows - 1
        units = self._array(_units(rows))
        unit = units[self._once(Stream.UNIT, len(units))]
        one = (self.regime == list(REGIMES).index("one_request")) & self.is_hot
        batch_row = self._where(one, (self.some - self.rotation) % self.some, self.batch_row)
        requests = 1 + (batch_row * unit + self._once(Stream.OFFSET, rows)) % rows
        return self._where(self.live, requests, PAD_REQUEST)

    def _lens(self, spec: StaticInput, i: int, lengths: Any) -> Any:
        """Return the values of an input of the system's own, number `i` of those that are drawn."""
        match spec.name:
            case "extend_lens":
                return self._extend_lens()
            case "accept_lens":
                return 1 + self._below(Stream.ACCEPT, self.geometry.draft_tokens)
            case "verify_lens":
                return self._verify_lens()
            case "replay_floors":
                return self._floors(lengths)
        stream = self._array(np.array([[Stream.OWN]], np.int64))
        drawn = spec.low + below(
            bits(self.seed, self.round, stream, self.batch_row + i * MAX_BATCH), spec.high - spec.low
        )
        one = self.regime == list(REGIMES).index("one_request")
        return self._where(one, spec.low, drawn) if spec.of_row else drawn

    def _extend_lens(self) -> Any:
        n = self.geometry.draft_tokens
        ragged = self.regime == list(REGIMES).index("ragged")
        lens = self._where(self.is_hot, 0, self._below(Stream.EXTEND, n + 1))
        return self._where(ragged & self.live, lens, n)

    def _verify_lens(self) -> Any:
        """Return 1 to N each, scaled down where their sum would exceed the token rows of the graph (contract 9)."""
        extra = self._where(self.live, self._below(Stream.VERIFY, self.geometry.draft_tokens), 0)
        room = self._array(
            np.array([self.system.capacity(self.geometry, spec.bucket) for spec in self.specs], np.int64)
        )
        total, spare = extra.sum(1)[:, None], room[:, None] - self.raw
        return 1 + self._where(total > spare, extra * spare // self._where(total > 0, total, 1), extra)

    def _floors(self, lengths: Any) -> Any:
        """Return 0 of half of the requests, else around the window; 0 where several batch rows name a request."""
        stream = self._array(np.array([[Stream.FLOOR]], np.int64))
        steps = self.geometry.window + 5
        drawn = below(bits(self.seed, self.round, stream, self.batch_row), 2 * steps)
        floors = lengths - drawn + 2
        one = self.regime == list(REGIMES).index("one_request")
        floors = self._where((drawn >= steps) | (floors < 0) | one, 0, floors)
        return self._where(floors > self.geometry.context, self.geometry.context, floors)

    def _moves(self, requests: Any, lengths: Any) -> dict[str, Any]:
        """Requests of the batch that move, and what they take of others, or keep, which neither writes."""
        words = self.words[:, :, :REMAPS_PER_ROUND]
        moves = (below(words[:, Stream.REMAP], _REMAP_ONE_IN) == 0) & (self.raw > 0)
        batch_row = below(words[:, Stream.REMAP_ROW], self.some)
        round_ = self._array(np.arange(len(self.raw), dtype=np.int64))[:, None]
        element = self._array(np.arange(REMAPS_PER_ROUND, dtype=np.int64))[None, :]
        streams = self._array(np.array([[Stream.PREFIX_ROW], [Stream.PREFIX_PAGES]], np.int64))
        drawn, size = (bits(self.seed, self.round, stream[None], element) for stream in streams)
        other_row = below(drawn, self.some)
        spare = self.system.pages_before_writes(self.geometry, lengths)
        mine, others = spare[round_, batch_row], spare[round_, other_row]
        # Of a request that several batch rows name, one writes before another.
        one = self.regime == list(REGIMES).index("one_request")
        most = self._where(moves & ~one, self._where(mine < others, mine, others), 0)
        pages = below(size, most + 1)
        return {
            "remap": self._where(moves, requests[round_, batch_row], -1),
            "remap_origins": self._where(pages > 0, requests[round_, other_row], PAD_REQUEST),
            "remap_pages": pages,
        }


@functools.lru_cache(maxsize=64)
def _lengths(system: System, geometry: Geometry) -> Array:
    return np.array(boundary_lengths(system, geometry), np.int64)


@functools.lru_cache(maxsize=64)
def _units(rows: int) -> Array:
    """Multipliers that permute 0..rows-1, spread over all there are."""
    units = [unit for unit in range(1, rows + 1) if math.gcd(unit, rows) == 1]
    return np.array(units[:: -(-len(units) // _UNITS)], np.int64)
