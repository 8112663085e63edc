"""SGLang's own functions of decode context parallelism: KV writes, localised selections, lengths, page tables, the
gather of selected columns and the merges, all ranks on one device (contract 8.1 to 8.4, 8.7).

What a function is given here is what its callers give it. Ranks are acted out one after the other: the topology that a
function looks up is set to the rank's for the call, and a process group that has every rank's tensors already stands in
for the collectives. `Dcp` puts together the functions of one engine; each other subject is one function by itself.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Final
from unittest import mock

import torch
import triton

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.adapters.sglang import wheel
from dsa_verify.subjects.adapters.sglang.backend_stubs import CONTEXT

COMM: Final = "sglang.srt.layers.dcp.comm"
INDEX: Final = "sglang.srt.layers.dcp.layout"
KERNELS: Final = "sglang.kernels.ops.attention.dcp_kernels"
PLATFORMS: Final = "sglang.srt.platforms"
TRANSFORM: Final = "sglang.kernels.ops.attention.dsa.transform_index"
WRITES: Final = "sglang.kernels.ops.kvcache.mla_buffer"

# Tokens that one program of SGLang's page-table kernel covers.
PAGE_TABLE_TOKENS: Final = 4096
INT32_ENTRIES: Final = 1 << 31
_MAP_NORESERVE: Final = 0x4000  # Linux; Python names it from 3.13 on
_ROW_GAP: Final = 64  # behind each row of a selection whose columns are dense
_OTHERS: Final = "this subject is another function of SGLang's"


class _OneFunction:
    """The subjects have this in common. `covers`: the fields that they give, those of a rank without `rank{r}_`.
    `modules`: of SGLang, what they call. `interleaves`: whether that takes an interleave block. `whole_lengths`:
    whether that goes as far as lengths do, whatever a table's width, which it is not told."""

    name = "sglang"
    covers: ClassVar[tuple[str, ...]] = ()
    modules: ClassVar[tuple[str, ...]] = ()
    interleaves = False
    whole_lengths = False

    @classmethod
    def provenance(cls) -> Mapping[str, str]:
        return wheel.provenance(*cls.modules)

    @classmethod
    def not_covered(cls, layout: Layout, device: torch.device) -> Mapping[str, str]:
        return {field.name: _OTHERS for field in layout if _of_any_rank(field.name) not in cls.covers}

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        """UsageError as `wheel.require` has it, and for an interleave block or a table that they do not take."""
        if geometry.dcp_block != 1 and not self.interleaves:
            raise UsageError(
                f"subject {self.name!r}: dcp_block: {geometry.dcp_block} is not 1, and SGLang's kernels deal the slots "
                "out one by one; set dcp_block=1"
            )
        if self.whole_lengths and geometry.columns < geometry.context:
            raise UsageError(
                f"subject {self.name!r}: table_width: {geometry.columns} columns are fewer than the {geometry.context} "
                "tokens of a request, and SGLang's kernels go to the end of a length; leave table_width out"
            )
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        self._ranks = range(geometry.dcp_size)
        self._device = inputs.seq_lens.device
        self._bind()

    def _bind(self) -> None:
        """Import what is needed and fix the buffers."""
        raise NotImplementedError

    def _refuse_one_rank(self) -> None:
        if len(self._ranks) == 1:
            raise UsageError(f"subject {self.name!r}: dcp_size: 1 leaves it nothing to do; set dcp_size to 2 or more")

    def before_replay(self) -> None:
        """Do nothing, unless a subclass says otherwise."""

    def in_graph(self) -> None:
        raise NotImplementedError

    def _of(self, rank: int, name: str) -> torch.Tensor:
        return self._buffers[f"rank{rank}_{name}"]


def _of_any_rank(name: str) -> str:
    return name.partition("_")[2] if name.startswith("rank") else name


# KV writes (contract 8.2) --------------------------------------------------------------------------------------------


class _Write(_OneFunction):
    """The write that a KV pool makes of its rows: the slots as the scheduler has them, virtual ones."""

    covers = ("kv_pool",)
    modules = (WRITES,)
    rope: ClassVar[bool] = True

    def _bind(self) -> None:
        inputs = self._inputs
        self._store = wheel.attribute(WRITES, "set_mla_kv_buffer_dcp_sharded_triton")
        self._locations, self._rows = inputs.out_cache_loc, inputs.kv_rows
        for rank in self._ranks:
            self._pool(rank).zero_()

    def _pool(self, rank: int) -> torch.Tensor:
        return self._of(rank, "kv_pool")

    def in_graph(self) -> None:
        # An engine's slots lie densely, and its rows are fresh and aligned. Half of a row is its part without
        # positions, the other half that with them.
        rows = self._rows.clone(memory_format=torch.contiguous_format)
        nope, rope = rows.split(rows.shape[1] // 2, dim=1) if self.rope else (rows, None)
        locations = self._locations.contiguous()
        for rank in self._ranks:
            with as_rank(rank, len(self._ranks)), with_triton(self._device):
                self._store(self._pool(rank), locations, nope, rope)


class RopeWrite(_Write):
    """`set_mla_kv_buffer_dcp_sharded_triton` of rows that have a part with positions."""

    name = "sglang:dcp_rope"


class NopeWrite(_Write):
    """This stores rows without one, as another kernel does.

    That kernel stores at virtual slots, D times as far as a rank's rows go: the pools lie in memory of their own that
    has room for it, so that what is wrong in them is seen and nothing else is overwritten.
    """

    name = "sglang:dcp_nope"
    rope = False

    def _bind(self) -> None:
        words, slots = self._buffers.layout["rank0_kv_pool"].columns, self._geometry.slots
        self._rooms = [torch.zeros((slots, words), dtype=torch.int32, device=self._device) for _ in self._ranks]
        super()._bind()

    def _pool(self, rank: int) -> torch.Tensor:
        return self._rooms[rank][: self._of(rank, "kv_pool").shape[0]]

    def outputs(self) -> Mapping[str, torch.Tensor]:
        return {**self._buffers, **{f"rank{rank}_kv_pool": self._pool(rank) for rank in self._ranks}}

    def explain(self, field: str, row: int, column: int, got: int, want: int) -> str | None:
        """Say whether what belongs there is at the number of its virtual slot."""
        rank = int(field.removeprefix("rank").partition("_")[0])
        virtual, rows = row * len(self._ranks) + rank, self._of(rank, "kv_pool").shape[0]
        if got == want or virtual == row or not want or int(self._rooms[rank][virtual, column]) != want:
            return None
        beyond = f", beyond the {rows} rows of the pool" if virtual >= rows else ""
        return f"it is at row {virtual}, the number of the virtual slot itself{beyond}"


class NopeWriteWithoutTriton(NopeWrite):
    """`set_mla_kv_buffer_naive`, the same in torch, for platforms without Triton. It waits, so it runs eagerly."""

    name = "sglang:dcp_nope_torch"

    def _bind(self) -> None:
        super()._bind()
        self._store = wheel.attribute(WRITES, "set_mla_kv_buffer_naive")

    def before_replay(self) -> None:
        size = len(self._ranks)
        for rank in self._ranks:
            self._store(
                self._pool(rank),
                self._locations,
                self._rows,
                None,
                reserved_skip_index=0,
                dcp_world_size=size,
                dcp_rank=rank,
            )

    def in_graph(self) -> None:
        """Do nothing."""


@contextlib.contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """SGLang's functions take themselves to be on rank `rank` of `size`."""
    parallel = wheel.attribute(CONTEXT, "get_parallel")()
    with parallel.override(attn_dcp_size=size, attn_dcp_rank=rank):
        yield


@contextlib.contextmanager
def with_triton(device: torch.device) -> Iterator[None]:
    """Let SGLang take a CPU, where kernels are interpreted, to have Triton; it would turn to torch."""
    if device.type == "cuda":
        yield
        return
    platform = SimpleNamespace(capabilities=SimpleNamespace(supports_triton=True))
    with mock.patch.object(wheel.require(PLATFORMS), "current_platform", platform, create=True):
        yield


# Selections (contract 8.3) -------------------------------------------------------------------------------------------


class Npu(_OneFunction):
    """`remap_dcp_sparse_indices`, the packed form in torch of the NPU path, which has no counts. With one rank it
    returns its input as it is, holes and all; there is nothing to localise then, and no such run."""

    name = "sglang:dcp_npu"
    covers = ("packed",)
    modules = (INDEX,)
    interleaves = True

    def _bind(self) -> None:
        self._refuse_one_rank()
        self._remap = wheel.attribute(INDEX, "remap_dcp_sparse_indices")

    def in_graph(self) -> None:
        size, block = len(self._ranks), self._geometry.dcp_block
        for rank in self._ranks:
            self._of(rank, "packed").copy_(self._remap(self._inputs.selection, size, rank, interleave_size=block))


class Columns(_OneFunction):
    """`transform_index_page_table_decode`, of a table of the batch and positions that lie as the run's inputs do."""

    name = "sglang:dcp_columns"
    covers = ("selected_slots",)
    modules = (TRANSFORM,)
    whole_lengths = True
    function: ClassVar[str] = "transform_index_page_table_decode"

    def _bind(self) -> None:
        self._gather = wheel.attribute(TRANSFORM, self.function)
        self._table = self._new_table(self._buffers.layout.bucket, self._geometry.columns)

    def _new_table(self, rows: int, columns: int) -> torch.Tensor:
        return torch.zeros((rows, columns), dtype=torch.int32, device=self._device)

    def before_replay(self) -> None:
        """The wide table is refreshed before the graph (contract 1.4)."""
        rows = self._inputs.req_to_token.index_select(0, self._inputs.req_pool_indices)
        self._table.copy_(rows[:, : self._geometry.columns])

    def in_graph(self) -> None:
        self._buffers["selected_slots"].copy_(self._selected())

    def _selected(self) -> Any:
        return self._gather(page_table=self._table, topk_indices=self._inputs.selected_positions)

    def explain(self, field: str, row: int, column: int, got: int, want: int) -> str | None:
        """Say whether `got` is what dense positions would have had there."""
        positions = self._inputs.selected_positions
        assert positions is not None
        width, (rows_apart, apart) = positions.shape[1], positions.stride()
        position = int(positions.as_strided(positions.shape, (width, 1))[row, column])
        if positions.is_contiguous() or got != (int(self._table[row, position]) if position >= 0 else -1):
            return None
        return (
            f"the positions of a row lie {apart} elements apart, and its first {rows_apart} behind that of the row "
            f"before: this is what they give where they are read 1 and {width} apart, as if they lay densely"
        )


class FarColumns(Columns):
    """This gathers over a table whose rows lie as far apart as in the largest tables: the last one begins 2**31 entries
    behind the first.

    The memory before the table is the subject's too, so that what a product of 32 bits reads is read there. On a CPU
    hardly any of it is touched, and what is not costs no memory.
    """

    name = "sglang:dcp_columns_far"

    def _new_table(self, rows: int, columns: int) -> torch.Tensor:
        self._row_stride = max(columns, -(-INT32_ENTRIES // max(rows - 1, 2)))
        self._room = _room(INT32_ENTRIES + (rows - 1) * self._row_stride + columns, self._device)
        return self._room.as_strided((rows, columns), (self._row_stride, 1), INT32_ENTRIES)

    def explain(self, field: str, row: int, column: int, got: int, want: int) -> str | None:
        """Say whether `got` is what lies where a product of 32 bits leads."""
        position = int(self._inputs.selected_positions[row, column])
        start = row * self._row_stride
        wrapped = (start + INT32_ENTRIES) % (2 * INT32_ENTRIES) - INT32_ENTRIES
        if wrapped == start or position < 0 or int(self._room[INT32_ENTRIES + wrapped + position]) != got:
            return super().explain(field, row, column, got, want)
        return (
            f"row {row} of the table begins at entry {start}, which 32 bits do not hold: this was read {-wrapped} "
            "entries before the table begins"
        )


class FarColumnsOfExtend(FarColumns):
    """`transform_index_page_table_prefill`, one token a request, over such a table with a row a token."""

    name = "sglang:dcp_columns_far_extend"
    function = "transform_index_page_table_prefill"

    def _bind(self) -> None:
        super()._bind()
        bucket = self._buffers.layout.bucket
        self._lens = [1] * bucket
        self._starts = torch.arange(bucket + 1, dtype=torch.int32, device=self._device)

    def _selected(self) -> Any:
        return self._gather(
            page_table=self._table,
            topk_indices=self._inputs.selected_positions,
            extend_lens_cpu=self._lens,
            page_table_is_expanded=True,
            cu_seqlens_q=self._starts,
        )


class _DenseColumns(Columns):
    """This gathers positions that lie densely, as an indexer leaves them."""

    def _selected(self) -> Any:
        return self._gather(page_table=self._table, topk_indices=self._inputs.selected_positions.contiguous())


def _room(entries: int, device: torch.device) -> torch.Tensor:
    """int32 [entries] that are 0; on a CPU only what is written takes memory."""
    if device.type == "cuda":
        return torch.zeros(entries, dtype=torch.int32, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, entries * 4, flags=flags), dtype=torch.int32)


# Merges (contract 8.7) -----------------------------------------------------------------------------------------------


class _Merge(_OneFunction):
    covers = ("merged_out", "merged_lse")

    def _bind(self) -> None:
        inputs = self._inputs
        self._outs, self._lses = inputs.partial_out, inputs.partial_lse
        self._natural = self._geometry.log_base == "e"

    def _store(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """[rows, heads, dim] and [rows, heads]."""
        self._buffers["merged_out"].copy_(out.flatten(1))
        self._buffers["merged_lse"].copy_(lse)


class CombineMerge(_Merge):
    """`dcp_lse_combine_triton` of what the exchange of heads has brought."""

    name = "sglang:dcp_combine"
    modules = (KERNELS,)

    def _bind(self) -> None:
        super()._bind()
        self._combine = wheel.attribute(KERNELS, "dcp_lse_combine_triton")

    def in_graph(self) -> None:
        # Dense: with a strided view its sums would be stored at the view's places (contract 8.7).
        lses = self._lses.contiguous()
        self._store(*self._combine(self._outs, lses, is_lse_base_on_e=self._natural, return_lse=True))


class GatherMerge(_Merge):
    """`correct_attn_out` of each rank, with everyone's log-sum-exps gathered, and the sum over the ranks. It takes a
    power of two of ranks: where there are fewer, ranks that have nothing make up for it."""

    name = "sglang:dcp_gather"
    modules = (KERNELS,)

    def _bind(self) -> None:
        super()._bind()
        self._correct = wheel.attribute(KERNELS, "correct_attn_out")
        size, rows, heads, dim = self._outs.shape
        everyone = (triton.next_power_of_2(size), rows, heads)
        self._gathered = torch.full(everyone, -torch.inf, dtype=torch.float32, device=self._device)
        self._corrected = torch.zeros((size, heads, rows, dim), dtype=torch.float32, device=self._device)

    def in_graph(self) -> None:
        self._gathered[: len(self._lses)].copy_(self._lses)
        for rank in self._ranks:
            _, lse = self._correct(
                self._outs[rank],
                self._gathered,
                rank,
                None,
                new_output=self._corrected[rank],
                is_lse_base_on_e=self._natural,
            )
        self._store(self._corrected.sum(0).transpose(0, 1), lse)


class MhaMerge(_Merge):
    """`cp_lse_ag_out_rs_mha`, the torch form of the MHA backends, whose log-sum-exps are to base e.

    It hands each rank its share of the heads. Where the heads do not divide among the ranks, every rank is given all
    of them, one behind the other.
    """

    name = "sglang:dcp_mha_merge"
    modules = (COMM,)

    def _bind(self) -> None:
        super()._bind()
        if not self._natural:
            raise UsageError(
                f"subject {self.name!r}: log_base: {self._geometry.log_base!r} is not what the MHA backends have; "
                "set log_base=e"
            )
        self._refuse_one_rank()
        self._merge = wheel.attribute(COMM, "cp_lse_ag_out_rs_mha")
        self._times = 1 if self._geometry.heads % len(self._ranks) == 0 else len(self._ranks)

    def in_graph(self) -> None:
        outs, lses = self._outs.repeat(1, 1, self._times, 1), self._lses.repeat(1, 1, self._times)
        # Twice, as each rank's share is cut out of a sum that takes all of them.
        parts: list[torch.Tensor] = []
        for rank in self._ranks:
            self._of_rank(outs, lses, rank, _keep_in(parts))
        total = torch.stack(parts).sum(0)
        shares = [self._of_rank(outs, lses, rank, lambda part: total) for rank in self._ranks]
        heads = self._geometry.heads
        out, lse = (torch.cat(pieces, 1)[:, :heads] for pieces in zip(*shares, strict=True))
        self._store(out, lse)

    def _of_rank(
        self, outs: torch.Tensor, lses: torch.Tensor, rank: int, reduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        group = SimpleNamespace(
            world_size=len(self._ranks),
            rank_in_group=rank,
            all_gather=lambda own, dim: lses.flatten(0, 1),
            all_reduce=reduce,
        )
        # It overwrites the partial results that it is given.
        shares: Sequence[torch.Tensor] = self._merge(outs[rank].clone(), lses[rank], group, return_lse=True)
        return shares


def _keep_in(parts: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def keep(part: torch.Tensor) -> torch.Tensor:
        parts.append(part)
        return part

    return keep


# All of it -----------------------------------------------------------------------------------------------------------


class Dcp(_OneFunction):
    """This calls what a decode step of a rope model under decode context parallelism calls, one function a field."""

    name = "sglang:dcp"
    covers = (
        "kv_pool",
        "localized",
        "packed",
        "packed_counts",
        "local_lengths",
        "page_table",
        "selected_slots",
        "merged_out",
        "merged_lse",
    )
    modules = (WRITES, INDEX, TRANSFORM, KERNELS)
    whole_lengths = True

    def _bind(self) -> None:
        geometry, inputs = self._geometry, self._inputs
        self._parts = (RopeWrite(), CombineMerge(), _DenseColumns())
        for part in self._parts:
            part.allocate(geometry, inputs, self._buffers)
        self._localize = wheel.attribute(INDEX, "localize_dcp_indices")
        self._lengths = wheel.attribute(INDEX, "get_dcp_lens")
        self._pack = wheel.attribute(TRANSFORM, "transform_index_page_table_dcp")
        self._pages: Any = wheel.attribute(KERNELS, "create_mla_kv_page_table_for_dcp")
        # It asserts that columns are dense; rows it takes as they are.
        self._selected = inputs.selection
        rows, columns = self._selected.shape
        room = torch.zeros((rows, columns + _ROW_GAP), dtype=torch.int32, device=self._device)
        self._to_pack = room[:, :columns]

    def before_replay(self) -> None:
        for part in self._parts:
            part.before_replay()

    def in_graph(self) -> None:
        for part in self._parts:
            part.in_graph()
        self._to_pack.copy_(self._selected)
        for rank in self._ranks:
            self._share(rank)

    def _share(self, rank: int) -> None:
        size, inputs = len(self._ranks), self._inputs
        self._of(rank, "localized").copy_(self._localize(self._selected, size, rank))
        packed, counts = self._pack(self._to_pack, size, rank)
        self._of(rank, "packed").copy_(packed)
        self._of(rank, "packed_counts").copy_(counts)
        lengths, table = self._of(rank, "local_lengths"), self._of(rank, "page_table")
        lengths.copy_(self._lengths(inputs.seq_lens, size, rank))
        page = self._geometry.page_size
        pages_per_block = max(PAGE_TABLE_TOKENS // page, 1)
        self._pages[(table.shape[0], triton.cdiv(table.shape[1], pages_per_block))](
            inputs.req_to_token,
            inputs.req_pool_indices.contiguous(),
            lengths,
            table,
            None,
            inputs.req_to_token.stride(0),
            table.stride(0),
            PHYSICAL_PAGE_SIZE=page,
            DCP_SIZE=size,
            DCP_RANK=rank,
            PAGES_PER_BLOCK=pages_per_block,
            HAS_V2P=False,
        )
