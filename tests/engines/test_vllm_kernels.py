"""vLLM's Triton kernels for the sparse indexer's metadata on their boundaries, against plain restatements in NumPy, and
two things of release 0.33.0 that are not as they should be."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support import DEVICE

from dsa_verify.graphs.interpreter import prepare_interpreter
from dsa_verify.subjects.adapters.vllm import runner, wheel
from dsa_verify.subjects.adapters.vllm.selection import CONVERTER

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vllm, installed or laid out (docs/engines-vllm.md)"
)
COMPRESSOR = "vllm.v1.attention.backends.mla.compressor_utils"
METADATA = "vllm.v1.attention.ops.metadata"
seeds = pytest.mark.parametrize("seed", range(3))
Array = npt.NDArray[Any]


@pytest.fixture(autouse=True)
def interpretable() -> None:
    if DEVICE.type == "cpu":
        prepare_interpreter()


def int32(values: object) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.int32)).to(DEVICE)


def int64(values: object) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(DEVICE)


def starts(queries: Array) -> Array:
    return np.r_[0, np.cumsum(queries)]


def local_length(length: int, world: int, rank: int, interleave: int) -> int:
    """Positions below `length` that `rank` owns (contract 8)."""
    return sum((position // interleave) % world == rank for position in range(length))


def local_position(position: Any, world: int, interleave: int) -> Any:
    return position // (interleave * world) * interleave + position % interleave


# Prefill chunks ------------------------------------------------------------------------------------------------------


@seeds
@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("world, interleave", [(1, 1), (2, 1), (4, 2)])
def test_prefill_chunks_bound_each_token_by_its_own_context(seed: int, ratio: int, world: int, interleave: int) -> None:
    """Row starts and ends of contract 1.8, localised; zero-length queries, contexts on both sides of a page."""
    rng = np.random.default_rng(seed)
    build = wheel.attribute(runner.INDEXER, "build_prefill_chunk_metadata")
    for _ in range(4):
        count = int(rng.integers(1, 6))
        queries = rng.integers(0, 9, count)
        queries[0] = max(queries[0], 1)
        before = rng.choice([0, 1, 2, 15, 16, 17, 63, 64, 65], count)
        lengths = queries + before
        compressed = lengths // ratio
        first = int(rng.integers(0, count))
        last = int(rng.integers(first + 1, count + 1))
        tokens = int(queries[first:last].sum())
        low = int(rng.integers(0, tokens + 1))
        high = int(rng.integers(low, tokens + 1))
        rank = int(rng.integers(0, world))
        begin = starts(queries)
        made = build(
            first,
            last,
            int32(begin),
            int32(begin).cpu(),
            int32(lengths),
            int32(compressed),
            int32(compressed).cpu(),
            torch.zeros((count, 4), dtype=torch.int32, device=DEVICE),
            ratio,
            query_slice=slice(low, high),
            dcp_rank=rank,
            dcp_world_size=world,
            cp_kv_cache_interleave_size=interleave,
        )
        mine = compressed[first:last]
        if not mine.sum():
            assert made is None
            continue
        local = starts(np.array([local_length(int(each), world, rank, interleave) for each in mine]))
        row_start, row_end = [], []
        for row in range(first, last):
            for i in range(queries[row]):
                row_start.append(local[row - first])
                seen = int(before[row] + i + 1) // ratio
                row_end.append(local[row - first] + local_length(seen, world, rank, interleave))
        assert made.cu_seqlen_ks.tolist() == row_start[low:high]
        assert made.cu_seqlen_ke.tolist() == row_end[low:high]
        assert made.cu_seq_lens.tolist() == starts(mine).tolist()
        assert made.token_to_seq.tolist() == np.repeat(np.arange(last - first), mine).tolist()


def test_chunks_of_prefills_cover_every_token_once_within_both_limits() -> None:
    split = wheel.attribute(runner.INDEXER, "DeepseekV32IndexerMetadataBuilder")._split_indexer_prefill_chunks
    rng = np.random.default_rng(0)
    for _ in range(200):
        count = int(rng.integers(1, 8))
        queries, lengths = rng.integers(0, 20, count), rng.integers(0, 90, count)
        space, logits = int(rng.integers(1, 120)), 4 * int(rng.integers(1, 400))
        seen: list[tuple[int, int]] = []
        begin = starts(queries)
        for requests, rows in split(torch.as_tensor(lengths), torch.as_tensor(queries), space, logits):
            total = int(lengths[requests].sum())
            assert total <= space or requests.stop - requests.start == 1
            assert (rows.stop - rows.start) * total <= logits // 4 or rows.stop - rows.start == 1
            seen += [(begin[requests.start] + i, requests.start) for i in range(rows.start, rows.stop)]
        assert [token for token, _ in seen] == list(range(queries.sum()))


# Decode metadata -----------------------------------------------------------------------------------------------------


@seeds
def test_queries_on_the_device_decide_rows_lengths_and_owners(seed: int) -> None:
    """Requests without a query token anywhere, rows of no request, a longer buffer, wider tables."""
    rng = np.random.default_rng(seed)
    kernel = wheel.attribute(METADATA, "_indexer_decode_metadata_kernel")
    for _ in range(8):
        count, width = int(rng.integers(1, 7)), int(rng.integers(1, 9))
        queries = rng.integers(0, 5, count)
        owned = int(queries.sum())
        tokens = owned + int(rng.integers(0, 4))
        if not tokens:
            continue
        before = rng.integers(0, 300, count)
        lengths = np.where(queries > 0, queries + before, 0)
        capacity, wider = tokens + int(rng.integers(0, 600)), width + int(rng.integers(0, 3))
        table = rng.integers(1, 99, (count, width))
        seen, ones, owner, per_request = (
            torch.full((capacity,), 55, dtype=torch.int32, device=DEVICE) for _ in range(4)
        )
        rows = torch.full((capacity, wider), 55, dtype=torch.int32, device=DEVICE)
        grid = max(count, tokens - (tokens - capacity) // 256)
        kernel[(grid,)](
            int32(starts(queries)),
            int32(lengths),
            int32(table),
            seen,
            rows,
            ones,
            owner,
            per_request,
            count,
            tokens,
            capacity,
            width,
            wider,
            BLOCK_COLS=width,
        )
        want = [before[row] + i + 1 for row in range(count) for i in range(queries[row])]
        owners = [row for row in range(count) for _ in range(queries[row])]
        assert seen.tolist() == want + [0] * (capacity - owned)
        assert owner[:tokens].tolist() == owners + [count + i for i in range(tokens - owned)], "no two idle rows share"
        assert rows[:owned, :width].tolist() == table[owners].tolist()
        assert rows[owned:tokens, :width].eq(0).all()
        assert rows[:, width:].eq(55).all()
        assert rows[tokens:].eq(55).all()
        assert per_request[:count].tolist() == queries.tolist()


@seeds
def test_tokens_are_mapped_to_requests_whichever_have_none(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(8):
        queries = rng.integers(0, 4, int(rng.integers(1, 9)))
        tokens, mapped = int(queries.sum()) + 3, int(rng.integers(0, queries.sum() + 1))
        out = torch.full((tokens + 5,), 9, dtype=torch.int32, device=DEVICE)
        wheel.attribute(METADATA, "compute_token_to_req_indices")(int32(starts(queries)), out, mapped, tokens)
        owners = np.repeat(np.arange(len(queries)), queries)[:mapped].tolist()
        assert out.tolist() == owners + [0] * (tokens - mapped) + [9] * 5


# Block tables and slots ----------------------------------------------------------------------------------------------


@seeds
@pytest.mark.parametrize("world, interleave", [(1, 1), (2, 1), (4, 2)])
def test_slots_and_block_tables(seed: int, world: int, interleave: int) -> None:
    """Rows of requests that are not there (-1), groups without slots, sharded and not; rows of an earlier, larger batch
    are reset, whatever the padding."""
    rng = np.random.default_rng(seed)
    states, capacity, sizes = 6, 40, (4, 16)
    blocks = [int(rng.integers(3, 9)) for _ in sizes]
    has_slots, sharded = [True, bool(seed % 2)], [True, False]
    rank = int(rng.integers(0, world))
    tables = wheel.attribute(runner.BLOCK_TABLES, "BlockTables")(
        list(sizes),
        states,
        capacity,
        blocks,
        DEVICE,
        cp_size=world,
        cp_rank=rank,
        cp_interleave=interleave,
        slot_mapping_enabled=has_slots,
        dcp_sharded=sharded,
    )
    held = [rng.integers(1, 500, (states, many)) for many in blocks]
    for row in range(states):
        tables.append_block_ids(row, tuple(each[row, :1].tolist() for each in held), overwrite=True)
        tables.append_block_ids(row, tuple(each[row, 1:].tolist() for each in held), overwrite=False)
    tables.apply_staged_writes()
    for group, each in enumerate(held):
        assert tables.block_tables[group].gpu.tolist() == each.tolist()
    for _ in range(3):
        count = int(rng.integers(1, states + 1))
        rows, padded = rng.permutation(states)[:count], int(rng.integers(count, states + 1))
        found = tables.gather_block_tables(int64(rows), padded)
        for group, each in enumerate(held):
            assert found[group].tolist() == np.r_[each[rows], np.zeros((padded - count, blocks[group]), int)].tolist()
            assert tables.input_block_tables[group][count:].eq(0).all()
    rows = np.where(np.arange(4) == 2, -1, rng.permutation(states)[:4])
    queries = rng.integers(0, 6, 4)
    most = min(many * size for many, size in zip(blocks, sizes, strict=True))
    positions = rng.integers(0, most, int(queries.sum()) + 1)
    slots = tables.compute_slot_mappings(int64(rows), int32(starts(queries)), int64(positions), capacity).tolist()
    owners = np.repeat(rows, queries)
    for group, size in enumerate(sizes):
        want = [-1] * capacity
        for token, row in enumerate(owners):
            position = int(positions[token])
            if world > 1 and sharded[group]:
                if position // interleave % world != rank:
                    continue
                position = local_position(position, world, interleave)
            if row >= 0 and has_slots[group]:
                want[token] = held[group][row, position // size] * size + position % size
        assert slots[group] == want


@seeds
@pytest.mark.parametrize("world, interleave", [(1, 1), (2, 4)])
def test_a_state_is_written_by_the_last_of_its_tokens(seed: int, world: int, interleave: int) -> None:
    rng = np.random.default_rng(seed)
    for ratio, states in ((4, 2), (2, 1)):
        queries, before = rng.integers(0, 2 * ratio + 2, 4), rng.integers(0, 5 * ratio * states, 4)
        queries[-1] = 0
        rank, tokens = int(rng.integers(0, world)), int(queries.sum())
        table = rng.integers(1, 1000, (4, int((queries + before).max()) // (ratio * states) + 2))
        slots, want = [], []
        for row in range(4):
            for i in range(queries[row]):
                position = int(before[row] + i)
                mine = position // interleave % world == rank and rng.random() > 0.1
                slots.append(7 if mine else -1)
                state = local_position(position, world, interleave) // ratio
                closes = mine and (position + 1) % ratio == 0
                want.append(int(table[row, state // states] * states + state % states) if closes else -1)
        out = torch.full((tokens + 5,), 99, dtype=torch.int64, device=DEVICE)
        found = wheel.attribute(COMPRESSOR, "get_compressed_slot_mapping")(
            tokens + 2,
            int64([*slots, -1, -1]),
            int32(starts(queries)),
            int32(queries + before),
            int32(table),
            states,
            ratio,
            out=out,
            dcp_world_size=world,
            cp_interleave=interleave,
        )
        assert found.tolist() == [*want, -1, -1]


@seeds
def test_the_tail_of_a_pool_is_one_circular_block(seed: int) -> None:
    """The kernel, and the torch form that stands for it on a CPU."""
    rng = np.random.default_rng(seed)
    kernel = wheel.attribute(runner.INDEXER, "_kpool_tail_slot_mapping_kernel")
    for _ in range(4):
        queries, pool = rng.integers(0, 8, 4), int(rng.choice([2, 4, 16]))
        tokens = int(queries.sum()) + int(rng.integers(0, 3))
        capacity = tokens + int(rng.integers(1, 300))
        table, positions = rng.integers(0, 5, (4, 3)), rng.integers(0, 1000, capacity)
        before = rng.integers(-1, 100, capacity)
        owners = np.minimum(np.searchsorted(starts(queries), np.arange(tokens), side="right") - 1, 3)
        own = table[owners, 0]
        want = np.r_[np.where(own > 0, own * pool + positions[:tokens] % pool, -1), before[tokens:]].tolist()
        arguments = (int64(before), int32(table), int32(starts(queries)), int64(positions))
        out = torch.full((capacity,), 77, dtype=torch.int64, device=DEVICE)
        grid = (4 + -(-(capacity - tokens) // 256),)
        kernel[grid](arguments[0], arguments[1], 3, *arguments[2:], out, 4, tokens, capacity, pool, BLOCK=256)
        assert out.tolist() == want
        torch_form = wheel.attribute(runner.INDEXER, "compute_kpool_tail_slot_mapping")
        assert torch_form(*(each.cpu() for each in arguments), tokens, 4, pool).tolist() == want


# Selected positions --------------------------------------------------------------------------------------------------


def conversions() -> Iterator[tuple[int, int, int, int, bool]]:
    """(K, page, ranks, interleave, counted)"""
    for columns, page in ((32, 1), (96, 4), (256, 64)):
        for ranks, interleave in ((1, 1), (2, 1), (4, 2)):
            if page % interleave == 0:
                yield columns, page, ranks, interleave, True
                yield columns, page, ranks, interleave, False


@pytest.mark.parametrize("columns, page, ranks, interleave, counted", [*conversions()])
def test_positions_are_looked_up_wherever_they_lie(
    columns: int, page: int, ranks: int, interleave: int, counted: bool
) -> None:
    """Strided tables and selections, blocks beyond the table, other ranks' positions, wider physical blocks."""
    rng = np.random.default_rng(columns + ranks)
    module, tokens, blocks, stride = wheel.require(CONVERTER), 5, 3, page * 3
    table = rng.integers(0, 1000, (4, blocks + 3))
    wide = np.full((tokens, 2 * columns), -5)
    wide[:, :columns] = rng.integers(-1, blocks * page * ranks + 3, (tokens, columns))
    owners, rank = rng.integers(0, 4, tokens), int(rng.integers(0, ranks))
    chosen = wide[:, :columns]
    local = local_position(chosen, ranks, interleave)
    valid = (chosen >= 0) & (chosen // interleave % ranks == rank) & (local // page < blocks)
    slots = table[owners[:, None], np.minimum(local // page, blocks)] * stride + local % page
    want = np.where(valid, slots, -1)
    arguments = (int32(owners), int32(table)[:, :blocks], int32(wide)[:, :columns])
    settings = {"BLOCK_SIZE": page, "BLOCK_STRIDE_ROWS": stride, "NUM_TOPK_TOKENS": columns, "BLOCK_N": 32}
    if ranks == 1:
        found = module.triton_convert_req_index_to_global_index(*arguments, **settings, return_valid_counts=counted)
    else:
        found = module.triton_filter_and_convert_dcp_index(
            *arguments,
            ranks,
            rank,
            interleave,
            **settings,
            return_valid_counts=counted,
            compact_valid_to_front=counted,
        )
    if not counted:
        assert found.tolist() == want.tolist()
        return
    compacted, counts = found[0].tolist(), found[1].tolist()
    assert counts == valid.sum(1).tolist()
    for row, count in enumerate(counts):
        assert sorted(compacted[row][:count]) == sorted(want[row][valid[row]].tolist())
        assert compacted[row][count:] == [-1] * (columns - count)


# Not as it should be in 0.33.0 ---------------------------------------------------------------------------------------

NEXT_DRAFTS = 3


def step_of(
    table: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor, begin: list[int], slots: list[int]
) -> Any:
    """CommonAttentionMetadata of one query token a live request, in buffers that persist."""
    count = len(lengths)
    return wheel.attribute(runner.BACKEND, "CommonAttentionMetadata")(
        query_start_loc=int32(begin),
        query_start_loc_cpu=int32(begin).cpu(),
        seq_lens=lengths,
        num_reqs=count,
        num_actual_tokens=count,
        max_query_len=1,
        max_seq_len=64,
        block_table_tensor=table,
        slot_mapping=int64(slots),
        seq_lens_cpu_upper_bound=lengths.cpu(),
        positions=positions,
        is_prefilling=torch.zeros(count, dtype=torch.bool),
    )


def spec_of(block: int, tokens_per_state: int = 1) -> Any:
    return wheel.attribute(runner.CACHE, "MLAAttentionSpec")(
        block_size=block, num_kv_heads=1, head_size=132, dtype=torch.uint8, tokens_per_state=tokens_per_state
    )


@pytest.mark.xfail(strict=True, reason="vLLM 0.33.0 gives pad rows of a draft step slot 0 of the null block, not -1")
def test_a_draft_step_updated_in_place_has_the_slots_of_one_built_afresh() -> None:
    config = runner._config(1000, 8, 8, NEXT_DRAFTS, adaptive=False)
    builder = wheel.attribute(runner.INDEXER, "DeepseekV32IndexerMetadataBuilder")(
        spec_of(16, 4), ["indexer"], config, DEVICE, block_table_width=8
    )
    table = int32([[5, 6] + [0] * 6, [7] + [0] * 7, [0] * 8, [0] * 8])
    step = step_of(table, int32([16, 9, 0, 0]), int64([15, 8, 0, 0]), [0, 1, 2, 2, 2], [95, 120, -1, -1])
    with runner.no_schedules():
        made = builder.build(0, step)
        built = made.slot_mapping.tolist()
        assert built == [5 * 4 + 3, -1, -1, -1]
        builder.update_draft_decode_metadata(made)
    assert made.slot_mapping.tolist() == built


@pytest.mark.xfail(strict=True, reason="vLLM 0.33.0 takes a tail's block from what was built last, not from the table")
def test_a_tail_updated_in_place_lies_in_the_block_of_its_own_request() -> None:
    """As a captured draft loop does it: nothing is built between the batches that it is replayed for."""
    config = runner._config(1000, 8, 8, NEXT_DRAFTS, adaptive=False)
    builder = wheel.attribute(runner.INDEXER, "KpoolTailMetadataBuilder")(spec_of(4), ["tail"], config, DEVICE)
    assert builder.supports_draft_decode_metadata_update
    table, lengths, positions = int32([[5], [6]]), int32([10, 20]), int64([9, 19])
    made = builder.build(0, step_of(table, lengths, positions, [0, 1, 2], [-1, -1]))
    assert made.slot_mapping.tolist() == [5 * 4 + 1, 6 * 4 + 3]
    table.copy_(int32([[7], [8]]))
    lengths.copy_(int32([4, 31]))
    positions.copy_(int64([3, 30]))
    builder.update_draft_decode_metadata(made)
    assert made.slot_mapping.tolist() == [7 * 4 + 3, 8 * 4 + 2]
