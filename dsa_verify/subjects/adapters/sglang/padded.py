"""SGLang's own DSV4 metadata: lengths, positions, page table, sliding window, DSpark draft block and compressed
lengths, with their work before and inside the graph divided as its backend divides it (contract 7.1, 7.3).

The kernels are SGLang's, imported from its published package. The few lines between them are restated here, because the
backend that holds them cannot be made without a model and a server around it. What no kernel of that package gives is
not covered.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.padded import LOW_RATIOS, page_columns
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.adapters.sglang import wheel
from dsa_verify.systems.padded import token_rows

BLOCK: Final = "sglang.kernels.ops.speculative.dspark.dspark_attn_metadata"
CORE: Final = "sglang.kernels.ops.attention.dsv4.attn_metadata_kernels"
COMPRESSED: Final = "sglang.kernels.ops.attention.dsv4.metadata_kernel"

LENGTHS: Final = ("seq_lens_casual", "positions_casual", "page_table")
WINDOW: Final = ("swa_page_indices", "swa_topk_lengths")
# What the kernels have built in: (field of the geometry, its value).
SPARSE_RATIO, DENSE_RATIO, INDEX_ALIGN = 4, 128, 64
_COPY: Final = "SGLang copies it, with no function of its own"
_TORCH: Final = "SGLang fills it in its backend, which cannot be made without a model"
_DRAFT: Final = "SGLang prepares no compressed metadata on the draft side"
_OTHERS: Final = "this subject is of a model without it"


class Padded:
    """The metadata of DeepSeek V4: decode, static verify, DSpark draft block, draft extend, as `padded_mode` says."""

    name = "sglang:padded"
    # Which of the two forms of a function: the kernel, or the one in torch that SGLang turns to for CPU tensors.
    form: ClassVar[str] = "triton"

    @staticmethod
    def provenance() -> Mapping[str, str]:
        return wheel.provenance(CORE, COMPRESSED, BLOCK)

    @classmethod
    def not_covered(cls, layout: Layout, device: torch.device) -> Mapping[str, str]:
        return {field.name: why for field in layout if (why := cls._why_not(field.name, layout.geometry)) is not None}

    @classmethod
    def _why_not(cls, name: str, geometry: Geometry) -> str | None:
        if name == "raw_out_loc":
            return _COPY
        if name in (*LENGTHS, *WINDOW):
            return None
        if geometry.padded_mode in ("draft_block", "draft_extend"):
            return _DRAFT
        return cls._why_not_compressed(name)

    @classmethod
    def _why_not_compressed(cls, name: str) -> str | None:
        if name.startswith(("c1_", "c2_")):
            return _OTHERS
        return _TORCH if name.startswith("c4_sparse_") else None

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        """UsageError as `wheel.require` has it, and for a geometry that the kernels do not take."""
        _check(self.name, geometry)
        self._geometry, self._inputs, self._buffers = geometry, inputs, buffers
        self._full_to_swa, self._device = inputs.full_to_swa, inputs.seq_lens.device
        self._batch, self._rows = buffers.layout.bucket, token_rows(geometry)
        # Of its raw inputs a captured record has the locations alone in a buffer of its own (contract 7.3).
        dtype = torch.int32 if geometry.padded_mode == "verify" else torch.int64
        self._locations = torch.zeros(buffers.layout.tokens, dtype=dtype, device=self._device)
        self._extend_lens = torch.full((self._batch,), self._rows, dtype=torch.int32, device=self._device)
        floor = torch.full((1,), geometry.replay_floor, dtype=torch.int32, device=self._device)
        # A window's floor is said of each token row, a draft block's of each request row.
        self._floor, self._valid_from = floor.repeat(buffers.layout.tokens), floor.repeat(geometry.request_rows)
        self._has_floor = bool(geometry.replay_floor or geometry.request_floors)
        # 0.5.22 knows no floor, and no argument for one.
        self._from_the_floor = {"valid_from": self._valid_from} if self._has_floor else {}
        self.ready_before_graph = {"draft_block": LENGTHS, "draft_extend": (*LENGTHS, *WINDOW)}.get(
            geometry.padded_mode, ()
        )
        self._bind()

    def _bind(self) -> None:
        self._expand = self._form_of(CORE, "ExpandPrefillCausally")
        self._build_lengths = self._form_of(CORE, "BuildPageTablePositions")
        self._build_window = self._form_of(CORE, "BuildCausalSwaPageIndices")
        self._block_lengths = self._form_of(BLOCK, "BuildBlockSeqLensCausal")
        self._block_gather = self._form_of(BLOCK, "ComputeDsparkWindowGather")
        if self._from_the_floor.keys() - inspect.signature(self._block_gather).parameters.keys():
            raise UsageError(
                f"replay_floor: sglang {wheel.version()} has no floor of a window; set replay_floor=0 and "
                "request_floors=false"
            )
        self._build_block = self._form_of(BLOCK, "BuildDsparkSwaPageIndices")
        self._compress = wheel.attribute(COMPRESSED, "init_compression_metadata")

    def _form_of(self, module: str, name: str) -> Any:
        return getattr(wheel.attribute(module, name), self.form)

    def before_replay(self) -> None:
        """Do what the engine does before it replays: all of the draft side's but a block's window (contract 7.3)."""
        self._locations.copy_(self._inputs.out_cache_loc)
        if "replay_floors" in self._inputs.own:
            # Where the engine places a request it writes that down; batch rows of one request agree.
            requests = self._vector("req_pool_indices").long()
            self._valid_from.index_copy_(0, requests, self._inputs.replay_floors)
            self._floor.copy_(self._inputs.replay_floors.repeat_interleave(self._rows))
        mode = self._geometry.padded_mode
        if mode in ("draft_block", "draft_extend"):
            lengths, requests = self._rows_of_requests(self._rows if mode == "draft_block" else 0)
            prepared = self._prepare(requests, lengths)
            if mode == "draft_extend":
                self._write_window(requests, prepared)

    def in_graph(self) -> None:
        mode = self._geometry.padded_mode
        if mode == "draft_block":
            self._write_block()
        elif mode in ("decode", "verify"):
            lengths, requests = self._vector("seq_lens"), self._vector("req_pool_indices")
            if mode == "verify":
                lengths, requests = self._rows_of_requests(self._rows)
            prepared = self._prepare(requests, lengths)
            self._write_window(requests, prepared)
            self._write_compressed(prepared)

    def _vector(self, name: str) -> torch.Tensor:
        """An engine's slots lie densely."""
        vector: torch.Tensor = getattr(self._inputs, name)
        return vector.contiguous()

    def _rows_of_requests(self, ahead: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(lengths, requests) of all token rows, when each request is `ahead` tokens longer than it says."""
        starts = torch.arange(self._batch, dtype=torch.int32, device=self._device) * self._rows
        lengths, requests = self._vector("seq_lens") + ahead, self._vector("req_pool_indices")
        rows = token_rows_of(self._expand, requests, lengths, self._extend_lens, starts, self._buffers.layout.tokens)
        return rows.seq_lens_casual, rows.req_pool_indices_repeated

    def _prepare(self, requests: torch.Tensor, lengths: torch.Tensor) -> Any:
        geometry = self._geometry
        width = page_columns(geometry) * geometry.page_size
        prepared = self._build_lengths(
            req_to_token=self._inputs.req_to_token,
            req_pool_indices_repeated=requests,
            seq_lens_casual=lengths,
            max_seq_len=min(width, self._inputs.req_to_token.shape[1]),
            page_size=geometry.page_size,
            swa_window=geometry.window,
        )
        for name in LENGTHS:
            self._buffers[name].copy_(getattr(prepared, name))
        return prepared

    def _write_window(self, requests: torch.Tensor, prepared: Any) -> None:
        geometry, floor = self._geometry, self._floor if self._has_floor else None
        indices = self._build_window(
            req_to_token=self._inputs.req_to_token,
            full_to_swa_mapping=self._full_to_swa,
            req_pool_indices_repeated=requests,
            seq_lens_casual=prepared.seq_lens_casual,
            swa_window=geometry.window,
            page_index_aligned_size=geometry.index_align,
            swa_replay_start=floor,
        )
        self._buffers["swa_page_indices"].copy_(indices)
        lengths = prepared.swa_topk_lengths
        if floor is not None:
            lengths = torch.minimum(lengths, (prepared.positions_casual - floor + 1).clamp(min=0))
        self._buffers["swa_topk_lengths"].copy_(lengths)

    def _write_block(self) -> None:
        geometry = self._geometry
        lengths = self._block_lengths(seq_lens=self._vector("seq_lens"), block_size=self._rows, device=self._device)
        gather = self._block_gather(
            seq_lens_casual=lengths,
            req_pool_indices_repeated=self._vector("req_pool_indices").repeat_interleave(self._rows),
            block_size=self._rows,
            swa_window=geometry.window,
            **self._from_the_floor,
        )
        indices, topk_lengths = self._build_block(
            req_to_token=self._inputs.req_to_token,
            full_to_swa_mapping=self._full_to_swa,
            req_pool_indices_per_request=gather.req_pool_indices_per_request,
            offsets=gather.offsets,
            invalid=gather.invalid,
            out_loc=self._vector("out_cache_loc"),
            context_lens=gather.context_lens,
            block_size=self._rows,
            swa_window=geometry.window,
            page_index_aligned_size=geometry.index_align,
        )
        self._buffers["swa_page_indices"].copy_(indices)
        self._buffers["swa_topk_lengths"].copy_(topk_lengths)

    def _write_compressed(self, prepared: Any) -> None:
        c4_loc, _, c4_raw, c4_clamped, c128_loc, _, c128_raw, c128_clamped, pages = self._compress(
            prepared.seq_lens_casual,
            prepared.positions_casual,
            self._locations,
            prepared.page_table,
            self._geometry.page_size,
            compute_page_indices=True,
        )
        out = self._buffers
        for name, value in (
            ("c4_out_loc", c4_loc),
            ("c4_len_raw", c4_raw),
            ("c4_len_clamped", c4_clamped),
            ("c128_out_loc", c128_loc),
            ("c128_len_raw", c128_raw),
            ("c128_len_clamped", c128_clamped),
        ):
            out[name].copy_(value)
        indices = out["c128_page_indices"]
        indices[:, : pages.shape[1]].copy_(pages)
        indices[:, pages.shape[1] :].fill_(-1)


class PaddedInTorch(Padded):
    """This calls the same functions in the torch form that SGLang has for CPU tensors; compressed lengths have none."""

    name = "sglang:padded_torch"
    form = "torch"


class PaddedLowRatios(Padded):
    """The metadata of DeepSeek V4.1, whose compression ratios are 1 and 2, as decode and verify of small batches have
    it: the page table and the low ratios by kernels of their own."""

    name = "sglang:padded_low_ratios"

    @classmethod
    def _why_not_compressed(cls, name: str) -> str | None:
        return None if name.startswith(("c1_", "c2_")) else _OTHERS

    def _bind(self) -> None:
        super()._bind()
        if not self._geometry.low_ratios:
            raise UsageError(f"subject {self.name!r}: low_ratios: the geometry has none; set low_ratios=true")
        if self._geometry.padded_mode in ("decode", "verify"):
            self._build_lengths = wheel.attribute(CORE, "build_page_table_positions_small")
        self._build_low = wheel.attribute(COMPRESSED, "build_low_ratio_metadata")
        self._fill_positions = wheel.attribute(COMPRESSED, "fill_all_compressed_indices")

    def _write_compressed(self, prepared: Any) -> None:
        built = self._build_low(prepared.seq_lens_casual, self._locations, self._geometry.topk)
        for ratio, values in zip(LOW_RATIOS, _fours(built), strict=True):
            names = ("out_loc", "len_clamped", "sparse_lengths", "sparse_indices")
            for name, value in zip(names, values, strict=True):
                self._buffers[f"c{ratio}_{name}"].copy_(value)
            # What takes the indexer's place where it is skipped.
            self._fill_positions(
                prepared.page_table,
                values[2],
                self._buffers[f"c{ratio}_full_indices"],
                compress_ratio=ratio,
                page_size=self._geometry.page_size,
                raw_indices=self._buffers[f"c{ratio}_full_raw_indices"],
            )


def token_rows_of(
    expand: Any, requests: torch.Tensor, lengths: torch.Tensor, extends: torch.Tensor, starts: torch.Tensor, tokens: int
) -> Any:
    """Return what `expand`, a form of ExpandPrefillCausally, makes of a batch of `tokens` token rows."""
    return expand(
        req_pool_indices=requests,
        seq_lens=lengths,
        extend_seq_lens=extends,
        extend_start_loc=starts,
        seq_lens_cpu=None,
        extend_seq_lens_cpu=None,
        num_tokens=tokens,
        padded_num_tokens=tokens,
    )


def _fours(values: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    return (values[start : start + 4] for start in range(0, len(values), 4))


def _check(subject: str, geometry: Geometry) -> None:
    built_in = {"sparse_ratio": SPARSE_RATIO, "dense_ratio": DENSE_RATIO, "index_align": INDEX_ALIGN}
    for name, value in built_in.items():
        if getattr(geometry, name) != value:
            raise UsageError(
                f"subject {subject!r}: {name}: {getattr(geometry, name)} is not {value}, which SGLang's kernels have "
                "built in; use the preset deepseek_v4 or small_v4"
            )
    if geometry.page_size % DENSE_RATIO:
        raise UsageError(
            f"subject {subject!r}: page_size: {geometry.page_size} is no multiple of {DENSE_RATIO}, the compression "
            "ratio that SGLang's kernels have built in; use the preset deepseek_v4 or small_v4"
        )
