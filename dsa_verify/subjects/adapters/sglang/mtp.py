"""SGLang's own metadata of multi-token-prediction draft steps, refreshed before each replay in the order that its
multi-step backend has: a record computed once, then copied to every step (contract 2). A CUDA GPU is needed: the copies
are CUDA kernels, compiled when they are first used.

Record, copies and the sibling rule are SGLang's, methods included. What is restated is the loop over the steps, and how
one step is refreshed from the record, so that all of it goes into guarded tensors; `backend_mtp.py` has the backend as
a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.buffers.arena import GUARD_WORD, TORCH_DTYPES
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.kpool import pooled_indexer
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.adapters.sglang import indexer, kpool, wheel
from dsa_verify.subjects.adapters.sglang.backend_stubs import COPIES, MANAGER, PRECOMPUTE
from dsa_verify.subjects.adapters.sglang.basic import KERNELS, POOLED_KERNELS, Decode
from dsa_verify.subjects.adapters.sglang.indexer import Indexer
from dsa_verify.subjects.adapters.sglang.kpool import KPool
from dsa_verify.systems import basic
from dsa_verify.systems.indexer import WRITE_PLAN
from dsa_verify.systems.mtp import destination_buffers, destinations

COPY_SOURCE: Final = "kernels/jit/csrc/elementwise/fused_metadata_copy.cuh"
FUSED: Final = 3  # steps that one launch copies to; used from n > 3 on (contract 2.3)
DECODE_MODE: Final = 0  # of the copy kernel
_SUMS: Final = ("cu_seqlens_k", "dsa_cu_seqlens_k")
# What the copy to three takes of each step, in its order.
_COPIED: Final = (
    "cache_seqlens_int32",
    "cu_seqlens_k",
    "page_table_1",
    "dsa_cache_seqlens_int32",
    "dsa_cu_seqlens_k",
    "real_page_table",
)
# The same of SGLang's own record.
_OF_PRECOMPUTED: Final = ("cache_seqlens", "cu_seqlens_k", "page_indices", "dsa_cache_seqlens", *_COPIED[4:])
_RECORD_FIELDS: Final = (
    *_COPIED,
    "dsa_seqlens_expanded",
    "paged_mqa_ctx_lens_2d",
    "pooled_cache_seqlens_int32",
    "pooled_real_page_table",
)
_BUILT_FIELDS: Final = (
    "paged_mqa_schedule_metadata",
    "topk_v2_plan",
    "pooled_paged_mqa_schedule_metadata",
    "pooled_topk_v2_plan",
)
_PLAN_FIELDS: Final = ("req", "write_start", "tail_logical_start", "write_loc")
_PLAN_OF_VERIFY: Final = (
    "pool_seqlens_per_q",
    "seqlens_per_q",
    "pool_schedule_metadata",
    "effective_n_per_batch",
    "pool_topk_v2_plan",
)


class _Mode:
    """Stands for SGLang's forward mode DECODE, the only one that draft steps have."""

    def is_decode_or_idle(self) -> bool:
        return True

    def is_target_verify(self) -> bool:
        return False


class _Restated:
    """The inherited methods of one draft step ask this of the backend that they are part of."""

    indexer: Indexer
    kpool: KPool | None
    physical_page_size: int
    decode_cuda_graph_metadata: dict[int, Any]
    forward_metadata: Any = None

    def set_dsa_prefill_impl(self, forward_batch: object = None) -> None:
        """Chooses an attention kernel, which is none of our business."""

    def _transform_table_1_to_real(self, page_table: torch.Tensor) -> torch.Tensor:
        return page_table[:, :: self.physical_page_size] // self.physical_page_size

    def init_forward_metadata_replay_cuda_graph_from_precomputed(
        self, bs: int, precomputed: Any, forward_mode: _Mode
    ) -> None:
        """Base copy, schedule, plan, context lengths, K-pool (contract 2.2, 2.4)."""
        metadata = self.decode_cuda_graph_metadata[bs]
        self._copy_base_replay_buffers(bs, metadata, precomputed, forward_mode)  # type: ignore[attr-defined]
        lengths = metadata.cache_seqlens_int32
        self.indexer.schedule("paged_mqa_schedule_metadata", lengths)
        self.indexer.plan("topk_v2_plan", metadata.dsa_seqlens_expanded, in_place=False)
        metadata.paged_mqa_ctx_lens_2d.copy_(lengths.contiguous().view(-1, 1))
        self.refresh_kpool(precomputed)
        self.forward_metadata = metadata

    def refresh_kpool(self, precomputed: Any) -> None:
        if self.kpool is not None:
            self.kpool.refresh(precomputed.cache_seqlens)


@functools.cache
def _step_type() -> type:
    bases = (
        _Restated,
        wheel.attribute(MANAGER, "DSAMetadataManagementMixin"),
        wheel.attribute(PRECOMPUTE, "DeepseekSparseAttnBackendMTPPrecomputeMixin"),
    )
    return type("DraftStep", bases, {})


class _Steps:
    """Both ways to refresh the steps have this in common. Everything happens before the replay."""

    name = "sglang"
    pooled_fusion = False  # whether pooled metadata comes from the fused kernel (contract 0.3), which decides the way

    @staticmethod
    def provenance() -> Mapping[str, str]:
        modules = (COPIES, MANAGER, PRECOMPUTE, KERNELS, f"{POOLED_KERNELS}.decode", kpool.MODULE)
        return wheel.provenance(*modules, files=(COPY_SOURCE, indexer.PLAN_SOURCE))

    @staticmethod
    def not_covered(layout: Layout, device: torch.device) -> Mapping[str, str]:
        return indexer.not_covered(layout, device)

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        """NothingVerified without a GPU; UsageError for a geometry that SGLang's draft steps do not have, or if the
        copies cannot be compiled."""
        device = inputs.seq_lens.device
        _check(self.name, geometry, device)
        compile_copies(geometry)
        self._inputs, self._batch = inputs, inputs.seq_lens.shape[0]
        targets = [destination_buffers(buffers, step) for step in range(destinations(geometry))]
        self._steps = [_new_step(geometry, inputs, target, fusion=self.pooled_fusion) for target in targets]
        for target, step in zip(targets, self._steps, strict=True):
            _fill_at_capture(target, step.indexer)
        self.ready_before_graph = tuple(buffers)

    def before_replay(self) -> None:
        precomputed = self._steps[0]._precompute_replay_metadata(
            bs=self._batch,
            req_pool_indices=self._inputs.req_pool_indices,
            seq_lens=self._inputs.seq_lens,
            seq_lens_cpu=None,
            forward_mode=_Mode(),
        )
        self.refresh(precomputed)

    def in_graph(self) -> None:
        """Do nothing: this release refreshes all of its metadata before the graph replays."""

    def refresh(self, precomputed: Any) -> None:
        raise NotImplementedError

    def from_precomputed(self, step: Any, precomputed: Any) -> None:
        step.init_forward_metadata_replay_cuda_graph_from_precomputed(
            bs=self._batch, precomputed=precomputed, forward_mode=_Mode()
        )


class Mtp(_Steps):
    """The record to every step: to the first three in one launch where there are as many, else one by one (contract
    2.2, 2.3). With pooling this is what SGLang does where its fusion of pooled metadata is switched off."""

    name = "sglang:mtp"

    def refresh(self, precomputed: Any) -> None:
        together = FUSED if len(self._steps) >= FUSED else 0
        if together:
            records = [step.decode_cuda_graph_metadata[self._batch] for step in self._steps[:together]]
            copy_to_three(
                [getattr(precomputed, name) for name in _OF_PRECOMPUTED], records, self._batch, precomputed.max_len
            )
            for step, record in zip(self._steps[:together], records, strict=True):
                step.refresh_kpool(precomputed)
                step.forward_metadata = record
        for step in self._steps[together:]:
            self.from_precomputed(step, precomputed)


class Sibling(_Steps):
    """Step 0 from the record, the others from step 0 where SGLang allows it (contract 2.4): its way with pooling."""

    name = "sglang:mtp_sibling"
    pooled_fusion = True

    def refresh(self, precomputed: Any) -> None:
        first, *others = self._steps
        self.from_precomputed(first, precomputed)
        for step in others:
            step._copy_replay_metadata_from_sibling(
                src_backend=first, bs=self._batch, precomputed=precomputed, forward_mode=_Mode()
            )


class Copy:
    """The fused copies alone, captured: a record that SGLang's decode kernel fills, whose tables lie as those of the
    destinations do, copied to as many steps at once as there is a kernel for (contract 2.2, 2.3)."""

    name = "sglang:mtp_copy"

    @staticmethod
    def provenance() -> Mapping[str, str]:
        return wheel.provenance(COPIES, KERNELS, f"{POOLED_KERNELS}.decode", kpool.MODULE, files=(COPY_SOURCE,))

    @staticmethod
    def not_covered(layout: Layout, device: torch.device) -> Mapping[str, str]:
        decode = {field.name for field in basic.decode(layout.geometry.replace(indexer=False), layout.bucket)}
        why = "no copy carries it, and this subject is the copies alone"
        return {field.name: why for field in layout if field.name.partition("_")[2] not in decode}

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        _check(self.name, geometry, inputs.seq_lens.device)
        compile_copies(geometry)
        self._batch, self._width, self._real = inputs.seq_lens.shape[0], geometry.columns, geometry.page_size > 1
        self._record = new_record(geometry.replace(indexer=False), self._batch, inputs.seq_lens.device)
        self._precompute = Decode()
        self._precompute.allocate(geometry.replace(indexer=False), inputs, self._record)
        targets = [destination_buffers(buffers, step) for step in range(destinations(geometry))]
        for target in targets:
            _fill_constants(target)
        self._targets = [_metadata(target, geometry) for target in targets]

    def before_replay(self) -> None:
        pass

    def in_graph(self) -> None:
        self._precompute.before_replay()
        source: list[torch.Tensor | None] = [self._record[name] for name in _COPIED[:-1]]
        source.append(self._record["real_page_table"] if self._real else None)
        left = self._targets
        while left:
            if len(left) >= FUSED:
                copy_to_three(source, left[:FUSED], self._batch, self._width)
                left = left[FUSED:]
            else:
                copy_to_one(source, left[0], self._batch, self._width)
                left = left[1:]


def compile_copies(geometry: Geometry) -> None:
    """UsageError if a copy kernel cannot be compiled: SGLang falls back on single copies, in a line nobody reads."""
    real = geometry.page_size > 1
    calls: list[tuple[str, tuple[object, ...]]] = [
        ("_jit_fused_metadata_copy_module", (DECODE_MODE, real, False)),
        ("_jit_fused_metadata_copy_multi_module", (real, False)),
    ]
    for name, arguments in calls[: 2 if destinations(geometry) >= FUSED else 1]:
        try:
            wheel.attribute(COPIES, name)(*arguments)
        except UsageError:
            raise
        except Exception as error:  # the compiler of another project may raise anything
            raise UsageError(
                f"{COPIES}: its kernel cannot be compiled ({type(error).__name__}: {error}); it needs nvcc and "
                "apache-tvm-ffi"
            ) from error


def copy_to_three(source: Sequence[torch.Tensor | None], records: Sequence[Any], batch: int, width: int) -> None:
    """Contract 2.3. `source`: the tensors that _COPIED names; `records`: three objects with such attributes."""
    arguments: list[torch.Tensor | None] = [*source, None, None]
    for record in records:
        arguments += [*(getattr(record, name) for name in _COPIED[:-1]), _real(record, source), None, None]
    wheel.attribute(COPIES, "fused_metadata_copy_multi_cuda")(*arguments, batch, width, batch)


def copy_to_one(source: Sequence[torch.Tensor | None], record: Any, batch: int, width: int) -> None:
    """Contract 2.2 in decode, otherwise as `copy_to_three`. Expanded lengths are an alias and not copied."""
    cache, sums, wide, dsa, dsa_sums, real = source
    wheel.attribute(COPIES, "fused_metadata_copy_cuda")(
        *(cache, sums, wide, dsa, cache, dsa_sums, real, None, None),
        *(record.cache_seqlens_int32, record.cu_seqlens_k, record.page_table_1, record.dsa_cache_seqlens_int32),
        *(record.dsa_seqlens_expanded, record.dsa_cu_seqlens_k, _real(record, source), None, None),
        *(DECODE_MODE, batch, width, width, batch),
    )


def _real(record: Any, source: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the real table; with a page size of 1 there is one table, and it is copied once."""
    found: torch.Tensor | None = record.real_page_table if source[-1] is not None else None
    return found


def new_record(geometry: Geometry, bucket: int, device: torch.device) -> Buffers:
    """Decode buffers of nobody's, whose tables have a gap behind each row where those of the layout have one."""
    layout = basic.decode(geometry, bucket)
    tensors: dict[str, torch.Tensor] = {}
    for field in sorted(layout, key=lambda field: field.alias is not None):
        if field.alias is None:
            gap = field.row_gap
            shape = (*field.shape[:-1], field.shape[-1] + gap)
            # So that a copy from a gap can be told.
            whole = torch.full(shape, GUARD_WORD, dtype=TORCH_DTYPES[field.dtype], device=device)
            tensors[field.name] = whole[..., : field.shape[-1]]
        else:
            source = tensors[field.alias]
            tensors[field.name] = source if tuple(source.shape) == field.shape else source.view(field.shape)
    return Buffers(layout, tensors)


def _check(name: str, geometry: Geometry, device: torch.device) -> None:
    wheel.need_gpu(f"subject {name!r}", device, "copies metadata with CUDA kernels")
    if not geometry.wide_table:
        raise UsageError(f"subject {name!r}: wide_table is false; SGLang's draft steps have that table, set it to true")


def _new_step(geometry: Geometry, inputs: Inputs, target: Buffers, *, fusion: bool) -> Any:
    """One draft step, with the attributes that its inherited methods read."""
    device = inputs.seq_lens.device
    step: Any = _step_type()()
    step.device, step.req_to_token = device, inputs.req_to_token
    step.dsa_index_topk, step.dsa_index_kpool = geometry.topk, geometry.pool_size
    step.physical_page_size, step.dsa_decode_impl = geometry.page_size, ""  # no FlashMLA metadata
    step._init_kpool_metadata_fusion()
    if not fusion:
        step.experimental_kpool_metadata_fusion = False
    elif geometry.pool_size > 1 and not step.experimental_kpool_metadata_fusion:
        raise UsageError(
            f"page_size: {geometry.page_size}; SGLang fuses pooled metadata for page_size 64 and "
            "SGLANG_EXPERIMENTAL_DSA_KPOOL_METADATA_FUSION unset or 1 only; change that, or take sglang:mtp"
        )
    step.indexer = Indexer(geometry, target, device)
    step.kpool = KPool(geometry, inputs, target, step.indexer) if pooled_indexer(geometry) else None
    step.decode_cuda_graph_metadata = {inputs.seq_lens.shape[0]: _metadata(target, geometry, step.indexer)}
    return step


def _metadata(target: Buffers, geometry: Geometry, built: Indexer | None = None) -> SimpleNamespace:
    """The captured record of one draft step, as SGLang names things. What is not built here is None, as it is there."""
    found: dict[str, Any] = {name: target.get(name) for name in _RECORD_FIELDS}
    found |= {name: target.get(name) if built is not None and built.builds(name) else None for name in _BUILT_FIELDS}
    plan = {name: target.get(WRITE_PLAN + name) for name in _PLAN_FIELDS}
    found["kpool_write_plan"] = None
    if built is not None and pooled_indexer(geometry):
        found["kpool_write_plan"] = SimpleNamespace(**plan, **dict.fromkeys(_PLAN_OF_VERIFY))
    return SimpleNamespace(**found, flashmla_metadata=None)


def _fill_at_capture(target: Buffers, built: Indexer) -> None:
    """Write what capturing leaves: constants, and schedules and plans over the lengths at capture, all of them 1."""
    _fill_constants(target)
    lengths = torch.ones_like(target["cache_seqlens_int32"])
    for name in _BUILT_FIELDS:
        pooled = name.startswith("pooled")
        built.schedule(name, lengths)
        built.plan(name, torch.zeros_like(lengths) if pooled else lengths, in_place=pooled)


def _fill_constants(target: Buffers) -> None:
    for name in ("cu_seqlens_q", "dsa_cu_seqlens_q"):
        target[name].copy_(torch.arange(target[name].numel(), dtype=torch.int32, device=target[name].device))
    for name in _SUMS:
        target[name][:1].zero_()  # no copy carries element 0 (contract 2.2)
