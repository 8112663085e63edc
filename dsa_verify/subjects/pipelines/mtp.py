"""The optimised metadata of multi-token-prediction draft steps: computed once, then copied to every destination
(contract 2). Everything is in the graph. What the copy does not carry is refreshed from each destination's own lengths
(`Mtp`), or copied from the first destination, where that is allowed (`Sibling`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

import torch
import triton

from dsa_verify.base.errors import UsageError
from dsa_verify.buffers.arena import TORCH_DTYPES
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.pipelines.basic import REQUEST_LANES, Decode, divide_tables
from dsa_verify.subjects.pipelines.indexer import IndexerMetadata
from dsa_verify.subjects.pipelines.mtp_kernel import copy_kernel
from dsa_verify.systems import basic
from dsa_verify.systems.indexer import WRITE_PLAN
from dsa_verify.systems.mtp import destination_buffers, destinations

SUMS: Final = ("cu_seqlens_k", "dsa_cu_seqlens_k")
FUSED: Final = 3  # destinations of one launch, where so many are left
# What a sibling copy moves after the base copy, in this order, where the layout has it (contract 2.4).
COPIED_MODE: Final = "decode"  # the only one that is copied from one backend to another (contract 2.4)
OPTIONAL: Final = (
    "paged_mqa_schedule_metadata",
    "topk_v2_plan",
    "pooled_cache_seqlens_int32",
    "pooled_real_page_table",
    "pooled_paged_mqa_schedule_metadata",
    "pooled_topk_v2_plan",
    *(
        WRITE_PLAN + name
        for name in (
            "req",
            "write_start",
            "tail_logical_start",
            "write_loc",
            "pool_seqlens_per_q",
            "seqlens_per_q",
            "pool_schedule_metadata",
            "effective_n_per_batch",
            "pool_topk_v2_plan",
        )
    ),
)


def fused_copy(source: Mapping[str, torch.Tensor], targets: Sequence[Buffers]) -> None:
    """Contract 2.2 into one target or 2.3 into three: decode lengths, sums and live table columns, in one launch.

    `source` holds tensors of the targets' shapes. Element 0 of both sums is left alone. UsageError for another number
    of targets, or for tables whose row strides differ between targets.
    """
    if len(targets) not in (1, FUSED):
        raise UsageError(f"targets: {len(targets)} destinations in one copy; give 1 or {FUSED}")
    geometry, batch = targets[0].layout.geometry, targets[0].layout.bucket
    tables = [(_wide(target).stride(0), target["real_page_table"].stride(0)) for target in targets]
    if len(set(tables)) > 1:
        raise UsageError(f"targets: row strides {tables} differ; copy to one destination at a time")
    first, second, third = targets if len(targets) == FUSED else [targets[0]] * FUSED
    real = source["real_page_table"]
    division = divide_tables(geometry, batch, interpreted=not real.is_cuda)
    copy_kernel[(1 + division.workers,)](
        *_copied(source),
        *_copied(first),
        *_copied(second),
        *_copied(third),
        batch,
        geometry.columns,
        geometry.pages,
        _wide(source).stride(0),
        real.stride(0),
        *tables[0],
        THREE=len(targets) == FUSED,
        PAGE=geometry.page_size,
        WIDE=geometry.wide_table,
        SHARES=division.shares,
        BLOCK=division.block,
        LANES=min(REQUEST_LANES, triton.next_power_of_2(batch)),
        GROUP=division.group,
    )


def _wide(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return tensors.get("page_table_1", tensors["real_page_table"])


def _copied(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The arguments of the kernel for one source or destination."""
    names = ("cache_seqlens_int32", "cu_seqlens_k", "dsa_cache_seqlens_int32", "dsa_cu_seqlens_k")
    return [*(tensors[name] for name in names), _wide(tensors), tensors["real_page_table"]]


@dataclasses.dataclass(slots=True, kw_only=True)
class Destination:
    """The captured metadata of one draft step. `fresh`: whether the work recorded so far has refreshed all of it.
    `write_plan`: the plan object that its backend holds, empty without pooling."""

    mode: str
    buffers: Buffers
    write_plan: Mapping[str, torch.Tensor]
    fresh: bool = False

    @classmethod
    def of(cls, buffers: Buffers) -> Destination:
        plan = {name: tensor for name, tensor in buffers.items() if name.startswith(WRITE_PLAN)}
        return cls(mode=buffers.layout.system, buffers=buffers, write_plan=plan)


def sibling_refusal(source: Destination, destination: Destination) -> str | None:
    """Say why `destination` may not be copied from `source` and must be recomputed; None if it may (contract 2.4)."""
    if source is destination:
        return "source and destination are the same backend"
    for each in (source, destination):
        if each.mode != COPIED_MODE:
            return f"mode {each.mode} is not {COPIED_MODE}"
    if source.buffers.layout.bucket != destination.buffers.layout.bucket:
        return f"bucket {source.buffers.layout.bucket} is not {destination.buffers.layout.bucket}"
    if not source.fresh:
        return "the source has not been refreshed in this replay"
    return _unequal_fields(source, destination) or _shared_write_plan(source, destination)


def _unequal_fields(source: Destination, destination: Destination) -> str | None:
    for name in OPTIONAL:
        if (name in source.buffers) != (name in destination.buffers):
            where = "source" if name in source.buffers else "destination"
            return f"only the {where} has {name}"
    return None


def _shared_write_plan(source: Destination, destination: Destination) -> str | None:
    if source.write_plan and source.write_plan is destination.write_plan:
        return "both hold the same write plan object"
    for name, tensor in source.write_plan.items():
        if tensor.data_ptr() == destination.write_plan[name].data_ptr():
            return f"both write plans hold the same {name}"
    return None


class _Steps:
    """All arrangements share this: a decode refresh and an indexer for each destination, and the constants."""

    name = "triton"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        self._geometry, self._inputs = geometry, inputs
        self._targets = [destination_buffers(buffers, step) for step in range(destinations(geometry))]
        self._recompute = [Decode() for _ in self._targets]
        for recompute, target in zip(self._recompute, self._targets, strict=True):
            recompute.allocate(geometry, inputs, target)
        for target in self._targets:
            for name in SUMS:
                target[name][:1].zero_()  # no copy carries element 0 (contract 2.2)

    def before_replay(self) -> None:
        pass


class Mtp(_Steps):
    """A record computed once, fused copies, and the indexer's metadata from each destination's own lengths."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        plain = geometry.replace(indexer=False)
        self._record = _new_record(plain, self._targets[0].layout.bucket, inputs.seq_lens.device)
        self._precompute = Decode()
        self._precompute.allocate(plain, inputs, self._record)
        self._indexers = [IndexerMetadata(geometry, inputs, target) for target in self._targets]

    def in_graph(self) -> None:
        self._precompute.in_graph()
        left = self._targets
        while left:
            count = FUSED if len(left) >= FUSED else 1
            fused_copy(self._record, left[:count])
            left = left[count:]
        if self._geometry.indexer:
            for indexer in self._indexers:
                indexer.refresh()


class Sibling(_Steps):
    """Destination 0 in full, the others copied from it or, where that is refused, in full too (contract 2.4)."""

    name = "sibling"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self._destinations = [Destination.of(target) for target in self._targets]

    def in_graph(self) -> None:
        source, *others = self._destinations
        for destination in self._destinations:
            destination.fresh = False
        self._recompute[0].in_graph()
        source.fresh = True
        for recompute, destination in zip(self._recompute[1:], others, strict=True):
            if sibling_refusal(source, destination) is None:
                sibling_copy(source.buffers, destination.buffers)
            else:
                recompute.in_graph()
            destination.fresh = True


def sibling_copy(source: Buffers, target: Buffers) -> None:
    """Every field of an eligible sibling. The context lengths are a view of the target's own and follow by itself."""
    fused_copy(source, [target])
    for name in OPTIONAL:
        if name in source:
            target[name].copy_(source[name])


def _new_record(geometry: Geometry, bucket: int, device: torch.device) -> Buffers:
    """Decode buffers of nobody's: the precomputed record (contract 2.1). Dead table blocks hold arbitrary memory."""
    layout = basic.decode(geometry, bucket)
    tensors: dict[str, torch.Tensor] = {}
    for field in sorted(layout, key=lambda field: field.alias is not None):
        if field.alias is None:
            tensors[field.name] = torch.empty(field.shape, dtype=TORCH_DTYPES[field.dtype], device=device)
        else:
            tensors[field.name] = tensors[field.alias].view(field.shape)
    return Buffers(layout, tensors)
