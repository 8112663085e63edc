"""PaddedInputFiller: tails, prefixes, what is left alone, and a tail that is not reset (contract 0.2, 7.5)."""

from __future__ import annotations

import pytest
import torch
from support import DEVICE, backend, small

from dsa_verify.base.errors import UsageError
from dsa_verify.buffers.tail_reset import PaddedInputFiller
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.static_inputs import StaticInput
from dsa_verify.contract.system import System
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.systems.catalogue import SYSTEMS

WIDEST = 6
SPECS = (
    StaticInput(name="lengths", dtype="int64", pad=1, low=2, high=90),
    StaticInput(name="slots", dtype="int64", pad=0, low=1, high=50, rows=2),
    StaticInput(name="blocks", dtype="int32", pad=-1, low=0, high=50, leading=(2,), item=(3,)),
)
DTYPES = {"int64": torch.int64, "int32": torch.int32}


class Bench:
    def __init__(self, **options: object):
        self.buffers = {
            spec.name: torch.full(spec.shape(WIDEST), 77, dtype=DTYPES[spec.dtype], device=DEVICE) for spec in SPECS
        }
        self.sources = {
            spec.name: torch.arange(1000, 1000 + self.buffers[spec.name].numel(), device=DEVICE).view(
                spec.shape(WIDEST)
            )
            for spec in SPECS
        }
        self.filler = PaddedInputFiller(SPECS, self.buffers, **options)  # type: ignore[arg-type]

    def rows(self, name: str) -> list[list[int]]:
        """Of each batch row, everything it owns."""
        spec = next(spec for spec in SPECS if spec.name == name)
        rows = self.buffers[name].movedim(spec.axis, 0).reshape(WIDEST, -1)
        return rows.tolist()

    def source_rows(self, name: str) -> list[list[int]]:
        spec = next(spec for spec in SPECS if spec.name == name)
        return self.sources[name].movedim(spec.axis, 0).reshape(WIDEST, -1).tolist()


def raw(count: int) -> torch.Tensor:
    return torch.tensor([count], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("live", [0, 1, 3, 4])
def test_a_fill_copies_prefixes_resets_tails_and_leaves_the_rest(live: int) -> None:
    bench, padded = Bench(skip_tail_reset=[spec.name for spec in SPECS]), 4
    bench.filler.fill_from(dict.fromkeys(bench.sources), raw(live), padded, poison=True)
    for spec in SPECS:
        rows = bench.rows(spec.name)
        assert all(spec.low <= value < spec.high for row in rows[live:padded] for value in row), spec.name
        assert all(value == 77 for row in rows[:live] + rows[padded:] for value in row), spec.name
    bench = Bench()
    bench.filler.fill_from(bench.sources, raw(live), padded)
    for spec in SPECS:
        rows, source = bench.rows(spec.name), bench.source_rows(spec.name)
        assert rows[:live] == source[:live], spec.name
        assert all(value == spec.pad for row in rows[live:padded] for value in row), spec.name
        assert all(value == 77 for row in rows[padded:] for value in row), spec.name


def test_a_missing_source_resets_the_tail_only_and_a_skipped_slot_is_left_alone() -> None:
    bench = Bench()
    bench.filler.fill_from({**bench.sources, "lengths": None}, raw(2), 4, skip=("slots",))
    assert bench.rows("lengths") == [[77], [77], [1], [1], [77], [77]]
    assert bench.rows("slots") == [[77, 77]] * WIDEST


def test_a_forgotten_tail_keeps_what_was_there() -> None:
    bench = Bench(skip_tail_reset=("lengths",))
    bench.filler.fill_from(bench.sources, raw(2), 4)
    assert bench.rows("lengths") == [[1000], [1001], *[[77]] * 4]
    assert bench.rows("slots")[2:4] == [[0, 0]] * 2


ROUNDS = [
    Round(bucket=4, seq_lens=(9, 30, 17, 33), requests=(3, 4, 5, 6)),
    Round(bucket=4, seq_lens=(12, 8, 20), requests=(7, 8, 6)),
    Round(bucket=4, seq_lens=(), requests=()),
]


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_every_input_of_every_system_is_missed_when_its_tail_is_not_reset(system: str) -> None:
    """The finding names the input, whatever else goes wrong because of it."""
    known = SYSTEMS[system]
    base = known.preset("cpu")
    geometry = small(system) if base == "tiny" else small_of(known, base)
    (config, *_) = diagnostic_matrix(known, geometry, batches=[4], drafts=[2])
    geometry = config.geometry
    for spec in SYSTEMS[system].inputs(geometry):
        setup = ReplaySetup.make(known, geometry, (4,), 0, None, f"tail_not_reset:{spec.name}", backend())
        rounds = ROUNDS if system != "ragged_verify" else with_verify_lens(ROUNDS)
        findings = verify_rounds(setup, [setup.table(rounds)], Counts(), folder=None)
        assert findings[0].diagnosis is Diagnosis.TAIL_NOT_RESET, (spec.name, findings)
        assert f"input {spec.name}[" in findings[0].sentence
        assert findings[0].field == spec.name


def small_of(system: System, preset: str) -> Geometry:
    return system.geometry(preset, {"request_rows": 9, "context": 37})


def with_verify_lens(rounds: list[Round]) -> list[Round]:
    return [round_.replace(verify_lens=(1,) * round_.raw_batch) for round_ in rounds]


def test_an_input_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="fault input 'extend_lens' is not in decode; its inputs: seq_lens, req_pool"):
        ReplaySetup.make(SYSTEMS["decode"], small(), (4,), 0, None, "tail_not_reset:extend_lens", backend())
