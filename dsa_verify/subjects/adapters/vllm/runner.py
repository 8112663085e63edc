"""Runner: what vLLM's model runner does about metadata before each step, with vLLM's own classes and kernels.

Request states (computed tokens, block ids) are staged and written; then lengths and positions are prepared, block
tables gathered into the batch's rows and the metadata of the sparse indexer built, in that order. A batch that is
smaller than its graph is padded by vLLM's own rules: length 0, no query token, block 0. One runner serves all captured
batches of an engine, as vLLM's buffers do.

Lengths here are vLLM's: computed tokens plus the query tokens of this step.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from dsa_verify.contract.geometry import Geometry
from dsa_verify.subjects.adapters.vllm import wheel

INDEXER: Final = "vllm.v1.attention.backends.mla.indexer"
BACKEND: Final = "vllm.v1.attention.backend"
CACHE: Final = "vllm.v1.kv_cache_interface"
WIDTH: Final = "vllm.v1.worker.block_table"
BLOCK_TABLES: Final = "vllm.v1.worker.gpu.block_table"
BUFFERS: Final = "vllm.v1.worker.gpu.buffer_utils"
BATCH: Final = "vllm.v1.worker.gpu.input_batch"
MODULES: Final = (INDEXER, BACKEND, CACHE, WIDTH, BLOCK_TABLES, BUFFERS, BATCH, "vllm.v1.attention.ops.metadata")
Starts = npt.NDArray[np.int32]
INDEX_KEY_BYTES: Final = 132  # 128 fp8 values and a scale


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One live request of a step: its row of `req_to_token`, tokens computed before, query tokens, block ids."""

    row: int
    computed: int
    query: int
    blocks: Sequence[int]


class Runner:
    """`most_requests`: of any step. `query`: tokens that a decoding request has in a step. `drafts`: of a speculating
    engine, tokens that it drafts for each request.

    `flatten`, `varlen`: how the indexer's decode metadata is laid out; None: as vLLM decides on this machine.
    `adaptive`: the device alone knows how many tokens each request verifies, the host their sum. `schedules`: whether
    DeepGEMM is asked for schedules where vLLM would ask it; the real one is not to be given lengths that are all 0
    (contract 3.6). UsageError if vLLM cannot be imported, or this release lacks a part.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        *,
        most_requests: int,
        query: int,
        drafts: int,
        flatten: bool | None = None,
        varlen: bool | None = None,
        adaptive: bool = False,
        schedules: bool = False,
    ):
        self.device, self._query, self._adaptive, self._schedules = device, query, adaptive, schedules
        self.page = geometry.page_size
        # A request may grow past the context by the tokens of its draft, which the contract's lengths do not count.
        self.most_length = geometry.context + query
        blocks = -(-self.most_length // self.page)
        self.width: int = wheel.attribute(WIDTH, "get_block_table_width")(blocks, self.page)
        # Duplicates of a request in one batch get states of their own: vLLM has a request in a batch once.
        self._spare = geometry.request_rows
        self.states = geometry.request_rows + most_requests
        most_tokens = most_requests * query
        self.buffers = wheel.attribute(BATCH, "InputBuffers")(self.states, most_tokens, device)
        self.tables = wheel.attribute(BLOCK_TABLES, "BlockTables")(
            block_sizes=[self.page],
            max_num_reqs=self.states,
            max_num_batched_tokens=most_tokens,
            max_num_blocks_per_group=[self.width],
            device=device,
        )
        self._computed = wheel.attribute(BUFFERS, "StagedWriteTensor")(self.states, dtype=torch.int32, device=device)
        self.request_of_token = torch.zeros(most_tokens, dtype=torch.int32, device=device)
        self._held: dict[int, list[int]] = {}
        config = _config(self.most_length, self.states, most_tokens, drafts, adaptive=adaptive)
        self.builder = self._make_builder(config, flatten, varlen)

    def step(self, requests: Sequence[Request], batch: int) -> Any:
        """Prepare a step of `requests`, padded to `batch` requests of `query` tokens; vLLM's metadata of it.

        A step without a query token is none of vLLM's: where another rank has work, it is vLLM's dummy run.
        """
        if not any(request.query for request in requests):
            return self.dummy_step(batch)
        idx_mapping = self.write_states(requests)
        queries = [request.query for request in requests]
        starts = self._query_start_loc(queries)
        wheel.attribute(BATCH, "prepare_pos_seq_lens")(
            idx_mapping,
            self.buffers.query_start_loc[: batch + 1],
            self._computed.gpu,
            self.buffers.positions,
            self.buffers.seq_lens,
        )
        table = self.gather(idx_mapping, batch)
        lengths = np.zeros(batch, np.int32)
        lengths[: len(requests)] = [request.computed + request.query for request in requests]
        if self._adaptive:
            starts = _starts(_evenly(sum(queries), len(queries)), self.states)
        return self._build(table, starts[: batch + 1], lengths, batch)

    def dummy_step(self, batch: int) -> Any:
        """Prepare what vLLM prepares for a batch of no request: at capture, and where another rank has work."""
        made = wheel.attribute(BATCH, "InputBatch").make_dummy(batch, batch * self._query, self.buffers)
        table = self.tables.get_dummy_block_tables(batch)[0]
        lengths = made.seq_lens_cpu_upper_bound.numpy()
        return self._build(table, made.query_start_loc_np, lengths, batch)

    def gather(self, idx_mapping: torch.Tensor, batch: int) -> torch.Tensor:
        """int32 [batch, width]: the block table of each batch row, that of pad rows reset."""
        table: torch.Tensor = self.tables.gather_block_tables(idx_mapping, num_reqs_padded=batch)[0]
        return table

    def write_states(self, requests: Sequence[Request]) -> torch.Tensor:
        """int64 [requests]: the state row of each, after its blocks and computed tokens have been written there."""
        rows: list[int] = []
        for number, request in enumerate(requests):
            row = request.row if request.row not in rows else self._spare + number
            held, blocks = self._held.get(row), list(request.blocks)
            grown = held is not None and blocks[: len(held)] == held
            # As a scheduler hands them over: new blocks as they are needed, all of them after a preemption.
            new = blocks[len(held) :] if grown and held is not None else blocks
            self.tables.append_block_ids(row, (new,), overwrite=not grown)
            self._held[row] = blocks
            self._computed.stage_write_elem(row, request.computed)
            rows.append(row)
        self.tables.apply_staged_writes()
        self._computed.apply_write()
        return torch.tensor(rows, dtype=torch.int64).to(self.device)

    def _query_start_loc(self, queries: Sequence[int]) -> Starts:
        starts = _starts(queries, self.states)
        self.buffers.query_start_loc.copy_(torch.from_numpy(starts))
        return starts

    def _build(self, table: torch.Tensor, starts: Starts, lengths: Starts, batch: int) -> Any:
        cpu = torch.from_numpy(starts)
        tokens = batch * self._query
        common = wheel.attribute(BACKEND, "CommonAttentionMetadata")(
            query_start_loc=self.buffers.query_start_loc[: batch + 1],
            query_start_loc_cpu=cpu,
            seq_lens=self.buffers.seq_lens[:batch],
            num_reqs=batch,
            num_actual_tokens=tokens,
            max_query_len=self._query if self._adaptive else int(torch.diff(cpu).max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=self.tables.slot_mappings[0, :tokens],
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
            positions=self.buffers.positions[:tokens],
            is_prefilling=torch.zeros(batch, dtype=torch.bool),
        )
        common.token_to_req_indices(self.request_of_token)
        with contextlib.nullcontext() if self._schedules else no_schedules():
            return self.builder.build(0, common)

    def _make_builder(self, config: SimpleNamespace, flatten: bool | None, varlen: bool | None) -> Any:
        spec = wheel.attribute(CACHE, "MLAAttentionSpec")(
            block_size=self.page, num_kv_heads=1, head_size=INDEX_KEY_BYTES, dtype=torch.uint8
        )
        builder = wheel.attribute(INDEXER, "DeepseekV32IndexerMetadataBuilder")(
            spec, ["indexer"], config, self.device, block_table_width=self.width
        )
        # What the constructor has decided for this machine; other machines decide otherwise.
        builder.use_flattening = builder.use_flattening if flatten is None else flatten
        builder.supports_varlen = builder.supports_varlen if varlen is None else varlen
        return builder


def _starts(queries: Sequence[int], states: int) -> Starts:
    """int32 [states + 1]: the first token of each request; beyond the requests, the total."""
    starts = np.zeros(states + 1, np.int32)
    np.cumsum(queries, out=starts[1 : len(queries) + 1])
    starts[len(queries) + 1 :] = starts[len(queries)]
    return starts


def _evenly(total: int, count: int) -> list[int]:
    """Share the tokens out as the host of an engine with adaptive verification does, for want of the right numbers."""
    return [total // count + (row < total % count) for row in range(count)]


@contextlib.contextmanager
def no_schedules() -> Iterator[None]:
    """While it lasts, vLLM's builder is given zeros where it asks DeepGEMM for a schedule."""

    def zeros(context_lens: torch.Tensor, block: int, multiprocessors: int, indices: Any = None) -> torch.Tensor:
        return torch.zeros((multiprocessors + 1, 2), dtype=torch.int32, device=context_lens.device)

    with mock.patch.object(wheel.require(INDEXER), "get_paged_mqa_logits_metadata", zeros):
        yield


def decided_to_flatten(drafts: int) -> bool:
    """Return whether vLLM lays out decode metadata of `drafts` + 1 tokens a request by token rows on this machine."""
    config = _config(1, 1, 1, drafts, adaptive=False)
    return bool(wheel.attribute(INDEXER, "_use_flattening")(config))


def _config(most_length: int, requests: int, tokens: int, drafts: int, *, adaptive: bool) -> SimpleNamespace:
    """Return as much of a VllmConfig as the builder reads."""
    speculative = SimpleNamespace(num_speculative_tokens=drafts, enable_adaptive_verification=adaptive)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=tokens),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            tensor_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        model_config=SimpleNamespace(max_model_len=most_length),
        attention_config=SimpleNamespace(
            sparse_mla_prefill_workspace_factor=5, resolve_indexer_kv_dtype=lambda default: default
        ),
        speculative_config=speculative if drafts else None,
        num_speculative_tokens=drafts,
    )
