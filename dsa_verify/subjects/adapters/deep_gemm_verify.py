"""Target-verify metadata whose schedules the real DeepGEMM builds, inside the graph (contract 3.2, 3.7)."""

from __future__ import annotations

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.adapters.deep_gemm import check_variant, refresh
from dsa_verify.subjects.pipelines.basic import TargetVerify
from dsa_verify.subjects.pipelines.indexer import IndexerMetadata


class _RealSchedules(IndexerMetadata):
    def _build(self, lengths: torch.Tensor, out: torch.Tensor, clamped: bool) -> None:
        """Every length is at least 1 here, which is what the real builder needs (contract 3.6)."""
        lengths = lengths.clamp(min=1) if clamped else lengths
        refresh(lengths.contiguous() if lengths.dim() == 2 else lengths.unsqueeze(1).contiguous(), out)


class DeepGemmVerify(TargetVerify):
    """This does as `triton`, with `deep_gemm.get_paged_mqa_logits_metadata` as the builder of every schedule.

    UsageError without a CUDA device, without the package, without an indexer in the geometry, or if the installed
    release builds another variant than `geometry.schedule`, which the oracle follows.
    """

    name = "deep_gemm"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        if inputs.seq_lens.device.type != "cuda":
            raise UsageError(
                f"subject {self.name!r}: runs on a CUDA device only; give --device cuda where there is one"
            )
        if not geometry.indexer:
            raise UsageError(f"subject {self.name!r}: the geometry has no schedule to build; set indexer=true")
        check_variant(geometry, inputs.seq_lens.device, f"subject {self.name!r}: ")
        super().allocate(geometry, inputs, buffers)
        self._indexer = _RealSchedules(geometry, inputs, buffers)
