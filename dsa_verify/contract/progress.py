"""Progress: what a run is doing now, in memory that outlives the process that does it.

A process that a subject has ended can say nothing any more. So whoever runs subjects notes each stage here before it
enters it, and the rounds before it replays them. Under supervision (delivered.py) the memory is shared with the parent,
which reads it after the end. Elsewhere it is shared with nobody but copies of the process, and rounds are not kept.

A note of a stage is one integer stored into mapped memory, some 50 ns. Nothing here imports torch.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
from collections.abc import Sequence
from typing import Any, Final, NoReturn

RoundTable = Any  # which rounds are tabulated in is nothing that notes of them depend on

# Stages, by number; what is said of them is in STAGES.
OURS, IMPORT, CONSTRUCT, ALLOCATE, WARM_UP, CAPTURE, BEFORE_REPLAY, REPLAY, OUTPUTS, DEVICE, FOREIGN = range(11)
STAGES: Final = (
    "code that is not the subject's",
    "import",
    "construct",
    "allocate",
    "warm-up",
    "capture",
    "before_replay",
    "replay",
    "outputs",
    "waiting for the device",
    "foreign_work",
)
# In these, code of the subject runs.
OF_THE_SUBJECT: Final = frozenset({CONSTRUCT, ALLOCATE, WARM_UP, CAPTURE, BEFORE_REPLAY, REPLAY, OUTPUTS, FOREIGN})

# Slots, each an int64.
(
    STAGE,
    BUCKET,
    ROUND,  # in the run of this replayer; -1 before the first
    BEATS,  # grows with every round of every replayer
    CHUNKS,  # tables of rounds that this replayer was given
    CHUNK_START,  # number of the first round of the last one
    COPIES,  # of the process, made by the subject, that came back from it
    COPY_STAGE,
    COPY_BUCKET,
    COPY_ROUND,
    VERDICT,
    JUDGED,  # whether a verdict may be expected: the process has begun to verify
) = range(12)
_SHAPE: Final = 16  # the first of three slots for each of two chunks: rounds, widest bucket, remaps
_LENGTH: Final = 32  # the first slot of the lengths of texts
SLOTS: Final = 64

# What came is told from what was never written, and from a stray write of the subject.
_MADV_WIPEONFORK: Final = 18  # Linux 4.14
_ARRIVED: Final = 0x5EA1ED0000

_HEAD, _TEST, _THREADS, _RESULTS = 0, 1, 2, 3
_TEXT_BYTES: Final = (1 << 20, 1 << 16, 1 << 14, 16 << 20, 16 << 20)  # results twice: the old ones stand until the end
_CHUNK_BYTES: Final = 32 << 20
_COLUMNS: Final = ("bucket", "raw", "poison", "twice", "foreign", "seed")
_REMAPS: Final = ("remap_rows", "remap_generations", "remap_origins", "remap_pages")


class Progress:
    """The record of one process. `slots`: int64 [SLOTS], written where a stage begins."""

    kept = False  # whether rounds and texts are

    def __init__(self, size: int = SLOTS * 8):
        self._memory = mmap.mmap(-1, size)
        self.slots = memoryview(self._memory)[: SLOTS * 8].cast("q")
        self.slots[ROUND] = -1

    def open(self, case: str, options: Sequence[str], first: RoundTable | None) -> None:
        """A replayer is about to be opened: `case` is the text of one without rounds, `options` what its replay takes
        beside it, `first` the rounds that come first."""

    def chunk(self, table: RoundTable, start: int) -> None:
        """`table` is about to be replayed, its first round being number `start`."""

    def test(self, command: str) -> None:
        """`command` runs again the test that is about to run."""

    def results(self, value: object) -> None:
        """Note what is known so far; whoever reports the end adds it."""

    def end_copy(self, stage: int, bucket: int, round_: int) -> NoReturn:
        """This process is a copy that the subject made and let come back: it must not go on verifying."""
        if not self.slots[COPIES]:  # the first is the one that is told of
            self.slots[COPY_STAGE], self.slots[COPY_BUCKET], self.slots[COPY_ROUND] = stage, bucket, round_
        self.slots[COPIES] += 1
        os._exit(1)

    def deliver(self, verdict: int) -> None:
        self.slots[VERDICT] = _ARRIVED | verdict

    @property
    def verdict(self) -> int | None:
        value = self.slots[VERDICT]
        return value & 0xFF if value & ~0xFF == _ARRIVED else None


class SharedProgress(Progress):
    """A Progress that a parent reads, too; pages of it that nothing was written to take no memory."""

    kept = True

    def __init__(self) -> None:
        self._chunks_at = SLOTS * 8 + sum(_TEXT_BYTES)
        super().__init__(self._chunks_at + 2 * _CHUNK_BYTES)
        self._last: RoundTable | None = None

    def open(self, case: str, options: Sequence[str], first: RoundTable | None) -> None:
        self.slots[CHUNKS], self.slots[ROUND] = 0, -1
        self._last = None
        self._write(_HEAD, json.dumps([case, *options]).encode())
        if first is not None:
            self.chunk(first, 0)

    def chunk(self, table: RoundTable, start: int) -> None:
        self.slots[CHUNK_START] = start
        if table is self._last:
            return
        self._last = table
        import numpy as np

        count, widest, remaps = len(table), table.seq_lens.shape[1], table.remap_rows.shape[1]
        which = self.slots[CHUNKS] % 2
        shape = _SHAPE + 3 * which
        self.slots[shape] = 0
        columns = [getattr(table, name) for name in _COLUMNS]
        columns += [table.seq_lens, table.requests, *table.lens.values()]
        columns += [getattr(table, name) for name in _REMAPS]
        words = sum(column.size for column in columns)
        if 4 * words <= _CHUNK_BYTES:
            place = np.frombuffer(self._memory, np.int32, words, self._chunks_at + which * _CHUNK_BYTES)
            at = 0
            for column in columns:
                place[at : at + column.size] = column.reshape(-1)
                at += column.size
            self.slots[shape + 2], self.slots[shape + 1], self.slots[shape] = remaps, widest, count
        self.slots[CHUNKS] += 1

    def test(self, command: str) -> None:
        self._write(_TEST, command.encode())

    def threads(self, names: Sequence[str]) -> None:
        self._write(_THREADS, json.dumps(list(names)).encode())

    def results(self, value: object) -> None:
        # Between two halves of one program, and never in a file.
        now = self.slots[_LENGTH + 5] ^ 1
        self._write(_RESULTS + now, pickle.dumps(value))
        self.slots[_LENGTH + 5] = now

    # Read by the parent, after the end -----------------------------------------------------------------------------

    @property
    def opened(self) -> tuple[str, list[str]] | None:
        """Return the case without rounds, and its options, that was open last; None if nothing was."""
        text = self._read(_HEAD)
        if not text:
            return None
        case, *options = json.loads(text)
        return case, options

    @property
    def last_test(self) -> str:
        return self._read(_TEST).decode()

    @property
    def last_threads(self) -> list[str]:
        threads: list[str] = json.loads(self._read(_THREADS) or "[]")
        return threads

    @property
    def last_results(self) -> Any:
        """Return the last results; None if there are none. Unpickling imports what they are made of."""
        data = self._read(_RESULTS + self.slots[_LENGTH + 5])
        return pickle.loads(data) if data else None

    def chunks(self, lens: Sequence[str]) -> list[dict[str, Any]]:
        """Return the columns of the last tables, two at most, the one that was being replayed last; none that was too
        large to be kept, nor what came before it. `lens`: the names of the tables' own columns."""
        import numpy as np

        found: list[dict[str, Any]] = []
        count = self.slots[CHUNKS]
        for number in range(max(count - 2, 0), count):
            shape = _SHAPE + 3 * (number % 2)
            rows, widest, remaps = self.slots[shape : shape + 3]
            if not rows:
                found = []
                continue
            at = self._chunks_at + number % 2 * _CHUNK_BYTES
            columns: dict[str, Any] = {}
            wide = dict.fromkeys(("seq_lens", "requests", *lens), widest)
            for name, width in (dict.fromkeys(_COLUMNS) | wide | dict.fromkeys(_REMAPS, remaps)).items():
                size = rows * (1 if width is None else width)
                flat = np.frombuffer(self._memory, np.int32, size, at).astype(np.int64)
                columns[name] = flat if width is None else flat.reshape(rows, width)
                at += 4 * size
            columns["lens"] = {name: columns.pop(name) for name in lens}
            found.append(columns)
        return found

    def _write(self, which: int, data: bytes) -> None:
        self.slots[_LENGTH + which] = 0
        if len(data) <= _TEXT_BYTES[which]:
            at = SLOTS * 8 + sum(_TEXT_BYTES[:which])
            self._memory[at : at + len(data)] = data
            self.slots[_LENGTH + which] = len(data)

    def _read(self, which: int) -> bytes:
        at = SLOTS * 8 + sum(_TEXT_BYTES[:which])
        return self._memory[at : at + self.slots[_LENGTH + which]]


def where(stage: int, round_: int) -> str:
    """Words for a stage and, where it is part of a round, that."""
    name = STAGES[stage] if 0 <= stage < len(STAGES) else "a stage unknown"
    if round_ < 0:
        return f"in {name}"
    in_round = stage in (BEFORE_REPLAY, REPLAY, OUTPUTS)
    return f"in {name} of round {round_}" if in_round else f"in {name}, the last round being {round_}"


def copy_sentence(stage: int, round_: int) -> str:
    """Return the sentence about a copy of the process that came back from `stage`."""
    return (
        f"a copy of the process came back from the subject {where(stage, round_)} and was ended; a process that the "
        "subject forks must end by os._exit, or start another program"
    )


class _ByPid:
    """Slower, for systems that cannot wipe memory on a fork."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __getitem__(self, place: int) -> int:
        return int(os.getpid() == self._pid)


def mark_process() -> memoryview | _ByPid:
    """Return something whose item 0 is 1 in this process, and 0 in each copy of it, however that was made. To look
    costs less than a call of the system, which a round would have to make after each step of the subject."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        page.madvise(_MADV_WIPEONFORK)
    except (AttributeError, OSError):
        return _ByPid()
    mark = memoryview(page)
    mark[0] = 1
    return mark


_current = Progress()


def current() -> Progress:
    """The record of this process."""
    return _current


def share() -> SharedProgress:
    """Make the record one that a process forked from here on shares with this one."""
    global _current
    shared = SharedProgress()
    _current = shared
    return shared


def unshare() -> None:
    """Stop sharing, in a process that supervises nothing any more."""
    global _current
    _current = Progress()
