"""Decode context parallelism: the referee, the oracle and the optimised functions against each other, the merge within
its bound, the whole system through the replayer, and known wrong versions, each of which must be caught."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import forked
import pytest
import torch
from click.testing import CliRunner
from referees import dcp as referee
from support import DEVICE, backend

from dsa_verify.base.errors import STATUS_NOTHING_VERIFIED, UsageError
from dsa_verify.cli import dcp_ranks
from dsa_verify.contract.dcp import (
    MERGE_BOUND,
    check_dcp_geometry,
    local_rows,
)
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.subject import Inputs
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.pipelines import dcp as pipeline
from dsa_verify.subjects.pipelines.dcp import Dcp, Place, PrefixRanges
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.systems.dcp import dcp
from oracles import dcp as oracle

SIZES = (1, 2, 3, 4, 8)
INFINITY = math.inf
# Ids that a float32 cannot hold, and the largest that an int32 can (contract 8.3).
LARGE_IDS = ((1 << 24) - 1, 1 << 24, (1 << 24) + 1, (1 << 24) + 3, (1 << 31) - 1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def selections(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """int32 with holes, in no order, from ids small and large."""
    ids = torch.randint(0, 1 << 31, (rows, columns), generator=generator(seed))
    ids[:, ::3] %= 1000
    ids[:, 1 : 1 + len(LARGE_IDS)] = torch.tensor(LARGE_IDS)
    holes = torch.rand((rows, columns), generator=generator(seed + 1)) < 0.2
    ids[0], ids[-1] = -1, torch.arange(columns)
    return torch.where(holes, -1, ids).int().to(DEVICE)


def localized(selection: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    positional, packed = torch.full_like(selection, 77), torch.full_like(selection, 77)
    counts = torch.full((len(selection),), 77, dtype=torch.int32, device=DEVICE)
    pipeline.localize(selection, positional, packed, counts, place)
    return positional, packed, counts


# The mapping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block", [1, 2, 4])
def test_every_slot_has_one_owner_and_one_row(size: int, block: int) -> None:
    slots = torch.arange(100)
    owners, rows = oracle.owner(slots, size, block), oracle.local(slots, size, block)
    for rank, owned in enumerate(referee.dealt(100, size, block)):
        assert slots[owners == rank].tolist() == owned
        assert rows[owners == rank].tolist() == list(range(len(owned)))
        assert oracle.virtual(torch.arange(len(owned)), rank, size, block).tolist() == owned
        assert [referee.place(slot, size, block) for slot in owned] == [(rank, row) for row in range(len(owned))]
        assert len(owned) <= local_rows(100, size, block)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block", [1, 4])
def test_lengths_are_counts_of_owned_positions(size: int, block: int) -> None:
    lengths = torch.arange(70)
    for rank in range(size):
        counted = [referee.local_length(length, rank, size, block) for length in range(70)]
        assert oracle.local_lengths(lengths, rank, size, block).tolist() == counted


# Writes --------------------------------------------------------------------------------------------------------------


def written(write: Callable[..., None], locations: torch.Tensor, rows: torch.Tensor, size: int, block: int) -> list:
    pools = [torch.zeros((32, 4), dtype=torch.int32, device=DEVICE) for _ in range(size)]
    for rank, pool in enumerate(pools):
        write(pool, locations, rows, rank, size, block)
    return [pool.tolist() for pool in pools]


def optimised_write(pool: torch.Tensor, locations: torch.Tensor, rows: torch.Tensor, *place: int) -> None:
    rank, size, block = place
    pipeline.write_shard(pool, locations, rows, Place(rank=rank, size=size, block=block))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block", [1, 4])
def test_a_write_reaches_its_owner_and_nobody_else(size: int, block: int) -> None:
    """Strided inputs, slot 0 twice, the first slots, whose local row is 0 too, and -1, which no section of the contract
    gives but other engines do: nobody stores it."""
    slots = torch.tensor([0, 1, 5, 0, 31, 2, 8, 17, -1], dtype=torch.int64)
    locations = slots.repeat_interleave(2).to(DEVICE)[::2]
    rows = apart(torch.randint(-(1 << 31), (1 << 31) - 1, (9, 4), generator=generator()).int().to(DEVICE), 3, 2)
    held: list[dict[int, list[int]]] = [{} for _ in range(size)]
    referee.write(held, slots.tolist(), rows.tolist(), block)
    expected = [[pool.get(row, [0] * 4) for row in range(32)] for pool in held]
    assert written(optimised_write, locations, rows, size, block) == expected
    assert written(oracle.write_shard, locations, rows, size, block) == expected


def narrow_write(pool: torch.Tensor, locations: torch.Tensor, rows: torch.Tensor, *place: int) -> None:
    """The product of row and width in 32 bits, which wraps; torch takes a negative index from the end."""
    mine = oracle.owner(locations, place[1]) == place[0]
    start = oracle.local(locations[mine], place[1]).int() * pool.shape[1]
    pool.view(-1)[start.long()[:, None] + torch.arange(4, device=DEVICE)] = rows[mine]


@pytest.mark.parametrize("write, right", [(optimised_write, True), (oracle.write_shard, True), (narrow_write, False)])
def test_a_row_offset_passes_32_bits(tmp_path: Path, write: Callable[..., None], right: bool) -> None:
    """Row 2**29 of four words starts at word 2**31. On a CPU the pool is a sparse file, hardly any of it touched."""
    words, row = (1 << 31) + 32, (1 << 29) + 3
    if DEVICE.type == "cuda":
        pool = torch.empty(words, dtype=torch.int32, device=DEVICE).view(-1, 4)
        pool[row - 1 : row + 1] = 0
    else:
        (tmp_path / "pool").touch()
        pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=words, dtype=torch.int32).view(-1, 4)
    locations = torch.tensor([row * 2 + 1, row * 2 - 2], device=DEVICE)
    rows = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32, device=DEVICE)
    write(pool, locations, rows, 1, 2, 1)
    assert (pool[row].tolist() == [1, 2, 3, 4]) is right
    assert pool[row - 1].tolist() == [0, 0, 0, 0]


# Selections ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block", [1, 4])
def test_both_forms_of_a_selection(size: int, block: int) -> None:
    selection = selections(5, 37)
    before = selection.clone()
    for rank in range(size):
        positional, packed, counts = localized(selection, Place(rank=rank, size=size, block=block))
        rows = selection.tolist()
        assert positional.tolist() == [referee.localized(row, rank, size, block) for row in rows]
        both = [referee.packed(row, rank, size, block) for row in rows]
        assert list(zip(packed.tolist(), counts.tolist(), strict=True)) == both
        assert torch.equal(oracle.localize(selection, rank, size, block), positional)
        want, want_counts = oracle.pack(selection, rank, size, block)
        assert torch.equal(want, packed)
        assert torch.equal(want_counts, counts)
    assert torch.equal(selection, before)


@pytest.mark.parametrize("size", SIZES)
def test_the_ranks_together_hold_the_selection(size: int) -> None:
    """Each entry on exactly one rank, at its place; without the holes the same in the packed form."""
    selection = selections(5, 37, seed=3)
    union, owners, packed_union = torch.full_like(selection, -1), torch.zeros_like(selection), []
    for rank in range(size):
        positional, packed, _ = localized(selection, Place(rank=rank, size=size))
        owners += positional >= 0
        union = torch.where(positional >= 0, positional * size + rank, union)
        packed_union.append(torch.where(packed >= 0, packed * size + rank, -1))
    assert torch.equal(union, selection)
    assert torch.equal(owners, (selection >= 0).int())
    together = torch.cat(packed_union, 1).sort(1, descending=True).values[:, : selection.shape[1]]
    assert torch.equal(together, selection.sort(1, descending=True).values)


def test_the_example_of_the_contract() -> None:
    selection = torch.tensor([[800, 801, 802, 803, -1]], dtype=torch.int32, device=DEVICE)
    positional, packed, counts = localized(selection, Place(rank=2, size=4))
    assert positional.tolist() == [[-1, -1, 200, -1, -1]]
    assert packed.tolist() == [[200, -1, -1, -1, -1]]
    assert counts.tolist() == [1]


def test_ids_that_float32_cannot_hold_are_told_apart() -> None:
    """The published packed form computes owners in float32 and gives 16777217 of 2 ranks to rank 0 (contract 8.3)."""
    selection = torch.tensor([[(1 << 24) + 1, (1 << 24) + 2]], dtype=torch.int32, device=DEVICE)
    want = [[-1, (1 << 23) + 1]]
    assert localized(selection, Place(rank=0, size=2))[0].tolist() == want
    assert oracle.localize(selection, 0, 2).tolist() == want
    through_float = oracle.localize(selection.float(), 0, 2)
    assert through_float.tolist() != want


def apart(tensor: torch.Tensor, *steps: int) -> torch.Tensor:
    """`tensor`, its elements so many steps from each other along its last dimensions; 1, which is legal, between."""
    steps = (1,) * (tensor.dim() - len(steps)) + steps
    room = torch.full([size * step for size, step in zip(tensor.shape, steps, strict=True)], 1).to(tensor)
    view = room[tuple(slice(None, None, step) for step in steps)]
    return view.copy_(tensor)


def test_a_selection_may_have_strided_columns() -> None:
    """As SGLang's own tests hand it over: `storage[::2, ::2]` (contract 8.3)."""
    selection = selections(5, 37)
    strided, place = apart(selection, 2, 2), Place(rank=1, size=3)
    assert strided.stride() == (4 * 37, 2)
    for row, got in zip(selection.tolist(), zip(*localized(strided, place), strict=True), strict=True):
        positional, packed, count = (each.tolist() for each in got)
        assert positional == referee.localized(row, 1, 3, 1)
        assert (packed, count) == referee.packed(row, 1, 3, 1)
    table = torch.randint(0, 99, (4, 37), generator=generator()).int().to(DEVICE)
    positions = torch.randint(-1, 37, (3, 8), generator=generator(1)).int().to(DEVICE)
    inputs = Inputs.of(
        {
            "seq_lens": torch.zeros(3, dtype=torch.int64, device=DEVICE),
            "req_pool_indices": apart(torch.tensor([3, 1, 2], device=DEVICE), 5),
            "req_to_token": table,
            "selected_positions": apart(positions, 2, 3),
        }
    )
    selected = torch.full_like(positions, 77)
    pipeline.select_slots(inputs, selected)
    wanted = zip((3, 1, 2), positions.tolist(), strict=True)
    assert selected.tolist() == [referee.selected_slots(table[row].tolist(), each) for row, each in wanted]


def test_an_output_that_is_not_dense_is_refused() -> None:
    selection = selections(5, 37)
    out, counts = torch.zeros_like(selection), torch.zeros(5, dtype=torch.int32, device=DEVICE)
    refused = r"packed: strides \(148, 2\) of shape \(5, 37\) are not dense, .*; hand over a contiguous tensor"
    with pytest.raises(UsageError, match=refused):
        pipeline.localize(selection, out, apart(out, 2, 2), counts, Place(rank=0, size=2))
    outs, lses = random_partials(2, 3)
    with pytest.raises(UsageError, match="lse: strides"):
        pipeline.merge(outs, lses, "2", outs[0].clone(), apart(lses[0], 2))


# The merge -----------------------------------------------------------------------------------------------------------


def merged(outs: torch.Tensor, lses: torch.Tensor, log_base: str) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.full_like(outs[0], 77), torch.full_like(lses[0], 77)
    pipeline.merge(outs, lses, log_base, out, lse)
    return out, lse


def misses(got: torch.Tensor, want: torch.Tensor, floor: torch.Tensor | float) -> torch.Tensor:
    """Where `got` is not as near as dcp_rules promises; special values and zeros must be equal."""
    scale = torch.maximum(want.abs(), torch.as_tensor(floor, dtype=want.dtype, device=want.device))
    near = (got.double() - want).abs() <= MERGE_BOUND * scale
    return ~torch.where(want.isfinite() & (want != 0), near, got.double() == want)


def assert_close(merge: Callable, outs: torch.Tensor, lses: torch.Tensor, log_base: str) -> None:
    out, lse = merge(outs, lses, log_base)
    want_out, want_lse = oracle.merge(outs, lses, log_base)
    largest = outs.double().abs().amax((0, 3))[..., None]
    assert not misses(out, want_out, largest).any()
    assert not misses(lse, want_lse, 1.0).any()
    # Positive and negative space: where no rank has anything, exactly nothing comes out.
    nothing = ~lses.isfinite().any(0)
    assert (out[nothing] == 0).all()
    assert (lse[nothing] == -INFINITY).all()
    assert lse[~nothing].isfinite().all()


def random_partials(size: int, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    outs = torch.randn((size, rows, 2, 8), generator=generator(seed))
    lses = torch.randn((size, rows, 2), generator=generator(seed + 1)) * torch.tensor([3.0, 60.0])
    return outs.to(DEVICE), lses.to(DEVICE)


def special_partials(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every combination of special values over up to four ranks, the others with nothing; no weight, no output."""
    values = (INFINITY, -INFINITY, math.nan, 0.0, -0.0, 7.5, -3e38, 3e38, 1e-45, -1000.0)
    if size > 3:
        values = values[:7]
    combinations = torch.tensor(list(itertools.product(values, repeat=min(size, 4)))).T
    lses = torch.full((size, combinations.shape[1], 1), -INFINITY)
    lses[: len(combinations), :, 0] = combinations
    outs = torch.randn((*lses.shape, 8), generator=generator(5))
    return torch.where(lses.isfinite()[..., None], outs, 0.0).to(DEVICE), lses.to(DEVICE)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # between the largest log-sum-exps; the weight is 0 then
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("log_base", ["2", "e"])
def test_the_merge_is_within_its_bound(size: int, log_base: str) -> None:
    """10,000 random rows of heads over the sizes and bases together, and the special values of each."""
    assert_close(merged, *random_partials(size, 500), log_base)
    assert_close(merged, *special_partials(size), log_base)


@pytest.mark.parametrize("log_base", ["2", "e"])
def test_the_referee_of_the_merge_agrees(log_base: str) -> None:
    for outs, lses in (random_partials(3, 20), special_partials(2)):
        out, lse = oracle.merge(outs, lses, log_base)
        for row, head in itertools.product(range(outs.shape[1]), range(outs.shape[2])):
            want, want_lse = referee.merge(outs[:, row, head].tolist(), lses[:, row, head].tolist(), log_base)
            assert out[row, head].tolist() == pytest.approx(want, rel=1e-12, abs=1e-14)
            assert float(lse[row, head]) == pytest.approx(want_lse, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_merge_is_exact_where_the_contract_says_so(size: int) -> None:
    """Base 2, a power of two of ranks with one integer, small integers in the partials (contract 8.7)."""
    outs = torch.randint(-50, 50, (size, 40, 2, 8), generator=generator()).float().to(DEVICE)
    lses = torch.randint(-30, 30, (40, 2), generator=generator(1)).float().to(DEVICE).expand(size, 40, 2).contiguous()
    if size > 1:
        lses[size // 2 :, ::3] = -INFINITY
        outs[size // 2 :, ::3] = 0.0
    for got, want in zip(merged(outs, lses, "2"), oracle.merge(outs, lses, "2"), strict=True):
        assert torch.equal(got, want.float())


def test_the_merge_reads_rows_of_a_wider_batch() -> None:
    outs, lses = random_partials(3, 9)
    out, lse = merged(outs[:, :4], lses[:, :4], "2")
    assert_close(lambda *_: (out, lse), outs[:, :4], lses[:, :4], "2")


def test_the_merge_reads_a_receive_buffer() -> None:
    """Whose log-sum-exp lies behind each head's output: floats 0, 9, 18, ... and 8, 17, 26, ... (contract 8.7)."""
    outs, lses = random_partials(3, 9)
    buffer = torch.cat([outs, lses[..., None]], 3)
    out, lse = torch.full_like(outs[0], 77), torch.full_like(lses[0], 77)
    pipeline.merge(buffer[..., :8], buffer[..., 8], "2", out, lse)
    assert_close(lambda *_: (out, lse), outs, lses, "2")


def without_empty_rule(outs: torch.Tensor, lses: torch.Tensor, log_base: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Sanitised, but the largest stays -inf where no rank has anything."""
    clean = torch.where(lses.isfinite(), lses, -INFINITY)
    weights = torch.exp2(clean - clean.amax(0))
    total = weights.sum(0)
    return (weights[..., None] * outs).sum(0) / total[..., None], total.log2() + clean.amax(0)


def unsanitised(outs: torch.Tensor, lses: torch.Tensor, log_base: str) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.exp2(lses - lses.amax(0))
    total = weights.sum(0)
    return (weights[..., None] * outs).sum(0) / total.clamp(min=1)[..., None], total.log2() + lses.amax(0)


def wrong_base(outs: torch.Tensor, lses: torch.Tensor, log_base: str) -> tuple[torch.Tensor, torch.Tensor]:
    return merged(outs, lses, "e" if log_base == "2" else "2")


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("wrong", [wrong_base, without_empty_rule, unsanitised])
def test_a_wrong_merge_is_caught(wrong: Callable) -> None:
    with pytest.raises(AssertionError):
        assert_close(wrong, *special_partials(2), "2")


def test_the_two_shards_of_the_published_case() -> None:
    """Partition sums 2 and 8, outputs 0 and 10: the merge is 8, and 7.233 with the wrong base (bug N04)."""
    outs = torch.tensor([0.0, 10.0], device=DEVICE).view(2, 1, 1, 1).expand(2, 1, 1, 8).contiguous()
    lses = torch.tensor([2.0, 8.0], dtype=torch.float64).log().float().to(DEVICE).view(2, 1, 1)
    assert float(merged(outs, lses, "e")[0][0, 0, 0]) == pytest.approx(8.0, rel=1e-6)
    assert float(wrong_base(outs, lses, "e")[0][0, 0, 0]) == pytest.approx(7.233, abs=1e-3)


# The ragged prefix gather --------------------------------------------------------------------------------------------


RANGES = ((0, 5), (3, 1), (7, 0), (8, 16), (2, 11), (0, 0), (5, 6))


# No system has a field of these, so no oracle does: here they are in eager torch, for token interleave only.
def padded_lengths(starts: torch.Tensor, lengths: torch.Tensor, size: int) -> torch.Tensor:
    """Rows that each rank sends of each prefix range [start, start + length), pads included."""
    return (lengths + starts.remainder(size) + size - 1).floor_divide(size)


def pads(starts: torch.Tensor, lengths: torch.Tensor, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(left, right), 0 or 1 a request: pad rows before and after what `rank` owns of the range."""
    left = starts.remainder(size) > rank
    right = (starts + lengths - 1).remainder(size) < rank
    return left.to(torch.int64), right.to(torch.int64)


def token_order(starts: torch.Tensor, lengths: torch.Tensor, size: int, rank_rows: int) -> torch.Tensor:
    """int64 [sum of lengths]: for each token of all ranges in turn the row of the rank-major gather, `rank_rows` rows a
    rank, that holds it. Not capturable: its size depends on the lengths."""
    padded = padded_lengths(starts, lengths, size)
    request = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    position = starts[request] + torch.arange(len(request), device=lengths.device) - first[request]
    at = (torch.cumsum(padded, 0) - padded)[request] + position // size - starts[request] // size
    return position.remainder(size) * rank_rows + at


def kv_indices(prefix_lens: torch.Tensor, extend_lens: torch.Tensor) -> torch.Tensor:
    """int64 [sum of both]: for the layout [prefix; extend] of each request in turn, the row of a buffer that holds all
    prefixes first and all extends after them. Not capturable."""
    prefixes = torch.cumsum(prefix_lens, 0)
    extends = torch.cumsum(extend_lens, 0) + prefixes[-1]
    pieces = []
    for b in range(len(prefix_lens)):
        pieces.append(torch.arange(int(prefixes[b] - prefix_lens[b]), int(prefixes[b])))
        pieces.append(torch.arange(int(extends[b] - extend_lens[b]), int(extends[b])))
    return torch.cat(pieces).to(prefix_lens.device)


@pytest.mark.parametrize("size", SIZES)
def test_the_ragged_prefix_gather(size: int) -> None:
    """Every rank packs its rows, they are gathered rank by rank, and come out in token order without the pads."""
    starts, lengths = (torch.tensor(column, device=DEVICE) for column in zip(*RANGES, strict=True))
    sent = referee.gather(starts.tolist(), lengths.tolist(), size)
    rows = len(sent[0])
    assert [len(each) for each in sent] == [rows] * size
    assert int(padded_lengths(starts, lengths, size).sum()) == rows
    for rank in range(size):
        left, right = pads(starts, lengths, rank, size)
        assert int((left + right).sum()) == sum(row is referee.PAD for row in sent[rank])

    table = torch.arange(24, device=DEVICE, dtype=torch.int32) + 24 * torch.arange(
        1, len(RANGES) + 1, device=DEVICE, dtype=torch.int32
    ).view(-1, 1)
    requests = apart(torch.arange(len(RANGES), device=DEVICE), 3)
    starts, lengths = apart(starts, 2), apart(lengths, 5)
    ranges = PrefixRanges.of(starts, lengths, size)
    gathered = torch.full((size, rows + 3, 4), -7, dtype=torch.int32, device=DEVICE)
    for rank in range(size):
        slots = torch.arange(24 * (len(RANGES) + 1), dtype=torch.int32, device=DEVICE)[rank::size]
        pool = slots.view(-1, 1).expand(-1, 4).contiguous()
        pipeline.pack_prefix(ranges, requests, table, pool, gathered[rank], Place(rank=rank, size=size))
        want = [0 if row is referee.PAD else int(table[row[0], row[1]]) for row in sent[rank]]
        assert gathered[rank, :, 2].tolist() == want + [-7] * 3
    tokens = int(lengths.sum())
    ordered = torch.full((tokens + 2, 4), -9, dtype=torch.int32, device=DEVICE)
    pipeline.reorder(ranges, gathered, ordered)
    want = [int(table[b, start + i]) for b, (start, length) in enumerate(RANGES) for i in range(length)]
    assert ordered[:, 0].tolist() == want + [-9] * 2
    order = token_order(starts, lengths, size, rows + 3)
    assert torch.equal(gathered.view(-1, 4)[order], ordered[:tokens])


@pytest.mark.parametrize("size", SIZES)
def test_aligned_prefixes_need_no_pads(size: int) -> None:
    """`prefix_indices[r::D] div D`, for prefixes that begin at and have multiples of D tokens (contract 8.4)."""
    table = torch.randperm(12 * size, generator=generator(2)).view(2, 6, size).sort(2).values.int().to(DEVICE)
    table = (table[..., :1] // size * size + torch.arange(size, device=DEVICE)).view(2, -1).int()
    prefix_indices = torch.cat([table[0], table[1, : 2 * size]])
    starts, lengths = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.tensor([6, 2], device=DEVICE) * size
    ranges = PrefixRanges.of(starts, lengths, size)
    pool = torch.arange(12, dtype=torch.int32, device=DEVICE).view(-1, 1).expand(-1, 4).contiguous()
    for rank in range(size):
        send = torch.full((8, 4), -1, dtype=torch.int32, device=DEVICE)
        place = Place(rank=rank, size=size)
        pipeline.pack_prefix(ranges, torch.arange(2, device=DEVICE), table, pool, send, place)
        assert torch.equal(send[:, 0], prefix_indices[rank::size] // size)
        assert not torch.cat(pads(starts, lengths, rank, size)).any()


@pytest.mark.parametrize("prefixes, extends", [([3, 0, 8, 1], [2, 4, 0, 1]), ([0], [1]), ([0, 0], [0, 3])])
def test_kv_indices(prefixes: list[int], extends: list[int]) -> None:
    want = referee.kv_indices(prefixes, extends)
    lens = [torch.tensor(each, device=DEVICE) for each in (prefixes, extends)]
    assert kv_indices(*lens).tolist() == want
    out = torch.full((len(want) + 2,), -5, dtype=torch.int32, device=DEVICE)
    pipeline.kv_indices(*lens, out)
    assert out.tolist() == [*want, -5, -5]


# The system ----------------------------------------------------------------------------------------------------------


SYSTEM = SYSTEMS["dcp"]
SMALL = {"context": 37, "request_rows": 9, "topk": 8}
# With these seeds there are heads of which no rank has anything; the first round has a pad row, whose slot is 0.
ROUNDS = [
    Round(bucket=4, seq_lens=(9, 37, 17), requests=(3, 4, 5), seed=8),
    Round(bucket=4, seq_lens=(8, 1, 16, 16), requests=(7, 8, 4, 4), poison="plausible", remap=(4,), seed=2),
    Round(bucket=4, seq_lens=(10, 3, 0, 4), requests=(3, 4, 6, 5), poison="stale", twice=True, seed=5),
]


def geometry_of(**overrides: object) -> Geometry:
    return SYSTEMS["dcp"].geometry("tiny", {**SMALL, "dcp_size": 2, **overrides})


def findings_of(subject: object, rounds: list[Round], **overrides: object) -> list[Finding]:
    setup = ReplaySetup.make(SYSTEM, geometry_of(**overrides), (4,), 0, subject, None, backend())  # type: ignore[arg-type]
    counts = Counts()
    findings = verify_rounds(setup, [setup.table(rounds)], counts, folder=None)
    assert findings or counts.rounds_checked == len(rounds)
    return findings


@pytest.mark.parametrize("size", SIZES)
def test_the_optimised_pipeline_is_right(size: int) -> None:
    """The interpreter is slow, so base and form of the inputs turn with the size."""
    base, form = ("2", "e")[size % 2], ("plain", "offset", "strided")[size % 3]
    rounds = ROUNDS if size == 2 else ROUNDS[:1]
    assert findings_of(Dcp, rounds, dcp_size=size, log_base=base, input_view=form) == []


def test_interleaved_blocks() -> None:
    assert findings_of(Dcp, ROUNDS[1:2], dcp_size=3, dcp_block=2, index_dtype="int32", table_width=20) == []


@pytest.mark.parametrize("size, block", [(1, 1), (2, 1), (3, 2)])
def test_the_referee_agrees_with_the_system(size: int, block: int) -> None:
    geometry = geometry_of(dcp_size=size, dcp_block=block)
    setup = ReplaySetup.make(SYSTEM, geometry, (4,), 0, None, None, backend())
    replayer = setup.open(1)
    replayer.run(setup.table(ROUNDS[:1]))
    captured = replayer.buckets[4]
    slots = captured.inputs.req_to_token.tolist()
    held: list[dict[int, list[int]]] = [{} for _ in range(size)]
    referee.write(held, captured.inputs.out_cache_loc.tolist(), captured.inputs.kv_rows.tolist(), block)
    for side, rank in itertools.product((captured.buffers, captured.oracle_buffers), range(size)):
        place = (rank, size, block)
        share = {name: side[f"rank{rank}_{name}"] for name in oracle.SHARE}
        stored = share["kv_pool"].any(1).nonzero().flatten().tolist()
        assert {row: share["kv_pool"][row].tolist() for row in stored} == held[rank]
        selection = captured.inputs.selection.tolist()
        assert share["localized"].tolist() == [referee.localized(row, *place) for row in selection]
        for b, (request, length) in enumerate(zip(ROUNDS[0].requests, ROUNDS[0].seq_lens, strict=True)):
            packed, count = referee.packed(selection[b], *place)
            assert share["packed"][b].tolist() == packed
            assert int(share["packed_counts"][b]) == count
            assert int(share["local_lengths"][b]) == referee.local_length(length, *place)
            table = share["page_table"][b]
            want = referee.page_table(slots[request], length, len(table), geometry.page_size, *place)
            assert table[: len(want)].tolist() == want
    for side, (b, request) in itertools.product(
        (captured.buffers, captured.oracle_buffers), enumerate(ROUNDS[0].requests)
    ):
        positions = captured.inputs.selected_positions[b].tolist()
        want = referee.selected_slots(slots[request], positions)
        assert side["selected_slots"][b].tolist() == want == captured.inputs.selection[b].tolist()


def test_a_row_of_the_table_begins_beyond_32_bits() -> None:
    """Of rows 2**30 entries apart, request 3's begins at 3 * 2**30; in 32 bits that is before the table: zeros."""
    apart, before = 1 << 30, 1 << 31
    words = before + 3 * apart + 8
    if DEVICE.type == "cuda":
        room = torch.zeros(words, dtype=torch.int32, device=DEVICE)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # without a reserve: hardly any of it is touched
        room = torch.frombuffer(mmap.mmap(-1, words * 4, flags=flags), dtype=torch.int32)
    table = room.as_strided((4, 8), (apart, 1), before)
    table.copy_(torch.arange(32, device=DEVICE).view(4, 8))
    positions = torch.tensor([[7, -1, 0], [2, 2, -1]], dtype=torch.int32, device=DEVICE)
    inputs = Inputs.of(
        {
            "seq_lens": torch.zeros(2, dtype=torch.int64, device=DEVICE),
            "req_pool_indices": torch.tensor([3, 1], dtype=torch.int32, device=DEVICE),
            "req_to_token": table,
            "selected_positions": positions,
        }
    )
    selected = torch.full((2, 3), 77, dtype=torch.int32, device=DEVICE)
    pipeline.select_slots(inputs, selected)
    assert selected.tolist() == [[31, -1, 24], [10, 10, -1]]
    assert torch.equal(oracle.selected_slots(table, inputs.req_pool_indices, positions), selected)


def test_pages_that_do_not_fit_the_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="dcp_block: 8 does not divide page_size 4"):
        dcp(geometry_of(dcp_block=8), 4)
    with pytest.raises(UsageError, match="pooling is refused"):
        check_dcp_geometry(SYSTEMS["dcp"].geometry("tiny_pool", {"dcp_size": 2}))


# Known wrong versions, each caught in the fields where it is wrong ---------------------------------------------------


class Unsharded(Dcp):
    """The write as published for NoPE: every rank, every row, at its virtual slot (contract 8.2)."""

    def _write(self, place: Place) -> None:
        pool, inputs = self._of(place, "kv_pool"), self._inputs
        # A kernel goes past the pool as far as the slot says; this stops at the first row of the guard.
        reach = pool.as_strided((pool.shape[0] + 1, 4), (4, 1))
        reach.index_copy_(0, inputs.out_cache_loc.clamp(max=len(reach) - 1), inputs.kv_rows)


class WritesSlotZero(Dcp):
    def _write(self, place: Place) -> None:
        super()._write(place)
        if place.rank == 0:
            pad = (self._inputs.out_cache_loc == 0).any()
            self._of(place, "kv_pool")[:1].add_(pad)


class KeepsHoles(Dcp):
    def _localize(self, place: Place) -> None:
        super()._localize(place)
        self._of(place, "packed").copy_(self._of(place, "localized"))


class GlobalLengths(Dcp):
    def _shard(self, place: Place) -> None:
        super()._shard(place)
        self._of(place, "local_lengths").copy_(self._inputs.seq_lens)


class WrongBase(Dcp):
    def _merge(self) -> None:
        inputs, out = self._inputs, self._buffers
        pipeline.merge(inputs.partial_out, inputs.partial_lse, "e", out["merged_out"], out["merged_lse"])


class NoEmptyRule(Dcp):
    def _merge(self) -> None:
        out, lse = without_empty_rule(self._inputs.partial_out, self._inputs.partial_lse, "2")
        self._buffers["merged_out"].copy_(out.flatten(1))
        self._buffers["merged_lse"].copy_(lse)


class First(Unsharded, KeepsHoles, WrongBase):
    """One in each part of the work, as a run of its own would cost a second."""


class Second(WritesSlotZero, GlobalLengths, NoEmptyRule):
    """The others."""


@pytest.mark.parametrize(
    "wrong, shares",
    [
        (First, {"rank0_kv_pool", "rank1_kv_pool", "rank0_packed", "rank1_packed"}),
        (Second, {"rank0_kv_pool", "rank0_local_lengths", "rank1_local_lengths"}),
    ],
)
def test_wrong_versions_are_caught(wrong: type, shares: set[str]) -> None:
    """Each where it is wrong, and nowhere else."""
    findings = findings_of(wrong, ROUNDS[:1])
    assert {finding.field for finding in findings} == shares | {"merged_out", "merged_lse"}
    past_the_end = {finding.field for finding in findings if finding.diagnosis is Diagnosis.PAST_THE_END}
    assert past_the_end == ({"rank0_kv_pool", "rank1_kv_pool"} if wrong is First else set())


# Real ranks ----------------------------------------------------------------------------------------------------------


RANKS = """
import os
from dsa_verify.cli import dcp_ranks
print("statuses", dcp_ranks.verify("gloo", 1, 0), end=" ")
from dsa_verify.replay.dcp_rank import RankRun
from dsa_verify.subjects.pipelines.dcp_rank import DcpRank

class SendsAnothersPrefix(DcpRank):
    def _gather_prefix(self):
        self._rank, own = 0, self._rank
        super()._gather_prefix()
        self._rank = own

RankRun.step_factory = SendsAnothersPrefix
os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
print(dcp_ranks.verify("gloo", 1, 0))
"""


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def test_ranks_in_processes_of_their_own(tmp_path: Path) -> None:
    """Two processes with gloo on the CPU: equal as shipped, different where rank 1 sends what it does not own."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_PORT": free_port(), "SECOND_PORT": free_port(), "TRITON_INTERPRET": "1"}
    processes = []
    for rank in ("0", "1"):
        with (tmp_path / rank).open("w") as out, (tmp_path / f"{rank}-err").open("w") as err:
            processes.append(start_rank({**shared, "RANK": rank}, out, err))
    statuses = [process.wait() for process in processes]
    assert statuses == [0, 0], [(tmp_path / f"{rank}-err").read_text() for rank in ("0", "1")]
    said = [(tmp_path / rank).read_text() for rank in ("0", "1")]
    assert ["statuses 0" in each and each.rstrip().endswith("1") for each in said] == [True, True], said
    assert "EQUAL: 2 ranks, 1 rounds" in said[0]
    assert "first in round 0: field prefix" in said[1]


def start_rank(environment: dict[str, str], out: IO[str], err: IO[str]) -> forked.Forked | subprocess.Popen[bytes]:
    if DEVICE.type == "cuda":  # which a rank does not see only if it is hidden before torch is imported
        command = [sys.executable, "-c", RANKS]
        return subprocess.Popen(command, env={**os.environ, **environment}, stdout=out, stderr=err)

    def rank() -> None:
        os.environ.update(environment)
        exec(RANKS, {"__name__": "__main__"})

    return forked.fork(rank, out, err)


def test_ranks_without_gpus_verify_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(dcp_ranks.main, [])
    assert result.exit_code == STATUS_NOTHING_VERIFIED
    assert "2 GPUs are needed, one a rank, and 0 found" in result.output
