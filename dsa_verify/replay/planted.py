"""Planted: differences that the judges must report where a configuration has shown none, or nothing they passed counts.

The judge is made of torch, and the subject runs in the same process: it may have changed what torch's functions do. So
one word of every field, guard and input is made wrong, the very judges of the run look again (on a GPU their captured
graphs), and exactly these words must be in their rings. What is planted is chosen with Python's own arithmetic and
written by address, on a GPU by methods of the C class of tensors, whose attributes nobody can assign to.

Lifetime: the words are put back before the next bucket's are changed; the counters of the judges are left at zero.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch

from dsa_verify.base.device_lost import raise_if_lost
from dsa_verify.base.errors import DsaVerifyError, HarnessError
from dsa_verify.base.out_of_memory import find_out_of_memory
from dsa_verify.base.torch_functions import replaced_functions
from dsa_verify.buffers.region import Kind, Region
from dsa_verify.contract.layout import Compare
from dsa_verify.judge.judge import RING_ENTRIES, Phase
from dsa_verify.judge.pad_rows import NormalisedPadRows
from dsa_verify.replay.bucket import CapturedBucket
from dsa_verify.replay.replayer import Replayer

_FLIP: Final = 1 << 30  # makes an integer impossible
# Makes a float 2**64 times larger or smaller, and no NaN, whose bits an operation may change.
_FLOAT_FLIP: Final = 1 << 29
_Tensor: Final[Any] = torch._C.TensorBase


@dataclasses.dataclass(frozen=True, slots=True)
class _Word:
    """One word of the memory of `region`, what it holds, and which bit of it is made wrong."""

    region: Region
    row: int
    word: int
    was: int
    flip: int

    @classmethod
    def of(cls, region: Region, row: int, word: int, flip: int = _FLIP) -> _Word:
        return cls(region, row, word, _read(region.got, row, word), flip)

    @property
    def address(self) -> int:
        return _address(self.region.got, self.row, self.word)

    @property
    def made(self) -> int:
        return self.was ^ self.flip


# Ring entries by judge and region, each by its number.
Seen = Mapping[tuple[int, int], list[list[int]]]


def require_sight(replayer: Replayer) -> None:
    """Raise HarnessError unless the judges of every bucket that has run see what is made wrong before their eyes."""
    for captured in replayer.buckets.values():
        if not captured.rounds:
            continue
        try:
            # What another bucket has written since this one's last round stays out of it.
            untouched = _look(captured)
            for words in (_fields(captured), _surroundings(captured)):
                _hold(captured, words, untouched, _planted(captured, words))
        except DsaVerifyError:
            raise
        except Exception as error:
            raise_if_lost(error)
            if find_out_of_memory(error) is not None:
                raise
            raise HarnessError(
                f"the judge of bucket {captured.bucket} could not be tried on planted differences, it raised "
                f"{type(error).__name__}: {error}; {_suspects()}"
            ) from error


def _planted(captured: CapturedBucket, words: Collection[_Word]) -> Seen:
    """Return what the judges see while `words` are wrong."""
    try:
        for word in words:
            _write(word.region.got, word.row, word.word, word.made)
        return _look(captured)
    finally:
        for word in words:
            _write(word.region.got, word.row, word.word, word.was)


def _look(captured: CapturedBucket) -> Seen:
    captured.judges.reset()
    captured.judge_replay(Phase.REPLAY)
    for look in (captured.judge_private, captured.judge_constants, captured.judge_ready, captured.judge_laws):
        look()
    seen: dict[tuple[int, int], list[list[int]]] = {}
    for number, judge in enumerate(captured.judges):
        differing, _, ring = judge.counters
        counts = _Tensor.tolist(differing)
        entries = _Tensor.tolist(ring) if any(counts) else []
        seen |= {
            (number, index): entries[index][: min(count, RING_ENTRIES)] for index, count in enumerate(counts) if count
        }
        judge.reset()
    return seen


def _hold(captured: CapturedBucket, words: Collection[_Word], untouched: Seen, planted: Seen) -> None:
    """Raise HarnessError unless each judge that looks at `words` has seen them, and no other."""
    memory = {_key(word.region): word.region for word in words}
    expected: dict[object, list[_Word]] = defaultdict(list)
    for word in words:
        expected[_key(word.region)].append(word)
    made = {word.address: word.made for word in words}
    for number, judge in enumerate(captured.judges):
        for index, region in enumerate(judge.regions):
            if (number, index) in untouched or judge is captured.judges.filled:
                continue
            entries = planted.get((number, index), [])
            if region.kind is Kind.LAW:
                if region.name in memory and not entries:
                    raise HarnessError(_unseen(captured, f"a broken law of {region.name}"))
                continue
            lies_in = memory.get(_key(region), region).got
            found = {_address(lies_in, row, word): (got, want) for _, _, row, word, got, want in entries}
            _check_seen(captured, region, found, made, expected.get(_key(region), ()))


def _check_seen(
    captured: CapturedBucket,
    region: Region,
    found: Mapping[int, tuple[int, int]],
    made: Mapping[int, int],
    expected: Collection[_Word],
) -> None:
    """Raise HarnessError unless `found`, the (got, want) that the judge reports by address, is what was planted."""
    for address, (got, want) in found.items():
        if made.get(address) != got:
            raise HarnessError(
                f"the judge of bucket {captured.bucket} reports {region.kind.value} {region.name}, {got} for "
                f"{want}, where nothing was planted, so that nothing it says counts; {_suspects()}"
            )
    for word in expected:
        if word.address not in found:
            raise HarnessError(_unseen(captured, _description(word)))


def _key(region: Region) -> object:
    """Return what the regions of one memory have in common: of a field the judge may be shown a copy."""
    return region.name if region.kind is Kind.FIELD else id(region)


def _unseen(captured: CapturedBucket, what: str) -> str:
    return (
        f"the judge of bucket {captured.bucket} does not see a planted difference, {what}, so that nothing it has "
        f"passed counts; {_suspects()}"
    )


def _description(word: _Word) -> str:
    region = word.region
    return f"{word.made} for {word.was} in {region.kind.value} {region.name}[{word.row}, word {word.word}]"


def _suspects() -> str:
    """Return what is known of a cause, and what is not."""
    return f"no verdict can be drawn; the subject may have changed functions of torch{replaced_functions(': ')}"


# Which words ---------------------------------------------------------------------------------------------------------


def _fields(captured: CapturedBucket) -> list[_Word]:
    """Return one live word of every field that has one, each where no other is."""
    words: dict[int, _Word] = {}
    for name, region in captured.fields.items():
        compare = captured.layout[name].compare
        place = _place(region, compare, captured.shown.forms.get(name))
        if place is not None:
            word = _Word.of(region, *place, _FLOAT_FLIP if compare is Compare.CLOSE else _FLIP)
            words.setdefault(word.address, word)
    return list(words.values())


def _surroundings(captured: CapturedBucket) -> list[_Word]:
    """Return a word of a guard, of an input, and of a constant input if there is one."""
    first: dict[tuple[int, Kind], Region] = {}
    for number, judge in enumerate(captured.judges):
        for region in judge.regions:
            if region.kind in (Kind.GUARD, Kind.INPUT) and judge is not captured.judges.filled and region.got.numel():
                first.setdefault((number, region.kind), region)
    return [_Word.of(region, 0, 0) for region in first.values()]


def _place(region: Region, compare: Compare, shown: object) -> tuple[int, int] | None:
    """Return (row, word) of the last live element; None if there is none that is judged."""
    rows, words = region.got.shape
    if compare is Compare.ITEMS:
        return (0, 0)  # what stands below the head is in no order
    if region.live_rows is not None:
        rows = min(rows, _all(region.live_rows)[0] + region.live_rows_extra)
    requests = range(rows) if region.row_request is None else _all(region.row_request)
    bounds = None if region.live_bound is None else _all(region.live_bound)
    judged = shown.judged() if isinstance(shown, NormalisedPadRows) else None
    for row in reversed(range(rows)):
        live, request = words, requests[row]
        if bounds is not None:
            elements = -(-(bounds[request] - region.column_start) // region.column_step)
            live = min(words, elements * region.words_per_element)
        if live > 0 and (judged is None or judged[request]):
            return row, live - 1
    return None


# Memory --------------------------------------------------------------------------------------------------------------


def _address(words: torch.Tensor, row: int, word: int) -> int:
    address: int = _Tensor.data_ptr(words) + 4 * (row * _Tensor.stride(words)[0] + word)
    return address


def _all(words: torch.Tensor) -> Sequence[int]:
    """Return what a vector of int32 holds."""
    if words.is_cuda:
        listed: list[int] = _Tensor.tolist(words)
        return listed
    return (ctypes.c_int32 * len(words)).from_address(_Tensor.data_ptr(words))[:]


def _read(words: torch.Tensor, row: int, word: int) -> int:
    if words.is_cuda:
        return int(_Tensor.item(_Tensor.__getitem__(words, (row, word))))
    return ctypes.c_int32.from_address(_address(words, row, word)).value


def _write(words: torch.Tensor, row: int, word: int, value: int) -> None:
    if words.is_cuda:
        _Tensor.fill_(_Tensor.__getitem__(words, (row, word)), value)
    else:
        ctypes.c_int32.from_address(_address(words, row, word)).value = value
