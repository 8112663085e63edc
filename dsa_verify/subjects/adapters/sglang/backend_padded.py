"""SGLang's whole DeepSeek V4 attention backend as a subject of the system padded: the object itself, driven through its
own hooks of capture and replay (contract 7.1 to 7.3).

What it records inside the graph and what it prepares before is its own affair here. Tensors that it makes in the graph
live in the graph's memory, which another graph may use once this one has been replayed; the graph copies them as its
last act. Its compressor's plans and its indexer's metadata, which the contract does not have, are left out: they ask
for pools of a real model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.padded import LOW_RATIOS, PLACEHOLDER_MODES
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.adapters.sglang import wheel
from dsa_verify.subjects.adapters.sglang.backend import BackendSubject
from dsa_verify.subjects.adapters.sglang.backend_engine import Engine, StaticInput
from dsa_verify.subjects.adapters.sglang.padded import BLOCK, COMPRESSED, CORE

BACKEND: Final = "sglang.srt.layers.attention.deepseek_v4_backend"
POOL: Final = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
# Functions with a form for each kind of device.
DISPATCHED: Final = {
    CORE: ("ExpandPrefillCausally", "BuildPageTablePositions", "BuildCausalSwaPageIndices"),
    BLOCK: ("BuildBlockSeqLensCausal", "ComputeDsparkWindowGather", "BuildDsparkSwaPageIndices"),
}
# Imported by the backend when its first record is made, which may be inside a capture.
LATE: Final = ("sglang.kernels.ops.attention.flash_mla_interface",)

FORWARD_MODES: Final = {
    "decode": "DECODE",
    "verify": "TARGET_VERIFY",
    "draft_block": "TARGET_VERIFY",
    "draft_extend": "DRAFT_EXTEND_V2",
}
# By mode, the fields that are made in the graph, where those are not all.
MADE_IN_GRAPH: Final[dict[str, tuple[str, ...]]] = {
    "draft_block": ("swa_page_indices", "swa_topk_lengths"),
    "draft_extend": (),
}
# What the backend has built in: (field of the geometry, its values).
BUILT_IN: Final[dict[str, tuple[int, ...]]] = {
    "page_size": (256,),
    "window": (128,),
    "sparse_ratio": (4,),
    "dense_ratio": (128,),
    "index_align": (64,),
    "topk": (512, 1024),
    "replay_floor": (0,),
    "request_floors": (False,),
}
HEAD_DIM: Final = 512
# Fields of the layout by their names in the backend's record, where those differ.
NAMES: Final = {
    "c4_len_raw": "c4_topk_lengths_raw",
    **{f"{ratio}_len_clamped": f"{ratio}_topk_lengths_clamp1" for ratio in ("c1", "c2", "c4", "c128")},
    **{f"{ratio}_sparse_lengths": f"{ratio}_sparse_topk_lengths" for ratio in ("c1", "c2", "c4")},
    **{f"{ratio}_sparse_indices": f"{ratio}_sparse_page_indices" for ratio in ("c1", "c2", "c4")},
}
_DRAFT: Final = "SGLang prepares no compressed metadata on the draft side"
_RAW: Final = "SGLang's backend drops it"
_SKIPPED: Final = "SGLang fills it in graphs that skip the indexer of low ratios, which this is none of"
_NARROW: Final = "SGLang's captured draft block holds it in 32 bits, the layout in 64"


class PaddedBackend(BackendSubject):
    """Every `padded_mode`: decode and static verify of the target model, DSpark draft block and draft extend."""

    name = "sglang:padded_backend"
    cpu_answers = "a CUDA device"
    modules = (BACKEND, POOL, CORE, BLOCK, COMPRESSED, *LATE)

    @classmethod
    def provenance(cls) -> Mapping[str, str]:
        found = dict(super().provenance())
        found["stand-ins"] += ", no compressor plans and no indexer metadata"
        return found

    @staticmethod
    def not_covered(layout: Layout, device: torch.device) -> Mapping[str, str]:
        mode = layout.geometry.padded_mode
        return {field.name: why for field in layout if (why := _why_not(field.name, mode)) is not None}

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        self._geometry, self.forward_mode = geometry, FORWARD_MODES[geometry.padded_mode]
        self._locations = StaticInput(inputs.out_cache_loc)
        missing = self.not_covered(buffers.layout, inputs.seq_lens.device)
        covered = buffers.layout.without(missing)
        mode, names = geometry.padded_mode, [field.name for field in covered]
        made_in_graph = MADE_IN_GRAPH.get(mode, names)
        self._copies = {name: buffers[name] for name in made_in_graph}
        super().allocate(geometry, inputs, Buffers(covered, {}))
        self.ready_before_graph = tuple(name for name in names if name not in self._copies)

    def before_replay(self) -> None:
        self._locations.update()
        self._refresh()

    def in_graph(self) -> None:
        """The derived tensors of decode and verify, the window of a draft block."""
        backend = self._engine.backend
        backend.on_after_cuda_graph_warmup()  # back to the raw record, as between an engine's warm-up and its capture
        self._engine.record_in_graph(self._batch)
        self._records = [backend.forward_metadata.core_attn_metadata]
        made = super().outputs()
        for name, copy in self._copies.items():
            _copy(name, made[name], copy)

    def outputs(self) -> dict[str, torch.Tensor]:
        """The fields of the layout: copies of those that the graph makes, the backend's own tensors otherwise."""
        return {**super().outputs(), **self._copies}

    def _read(self) -> list[Any]:
        self.in_graph()
        return self._records

    def _names(self) -> dict[str, str]:
        return {name: NAMES[name] for name in NAMES if name in self._layout}

    def _refuse(self, geometry: Geometry) -> None:
        for name, values in BUILT_IN.items():
            if getattr(geometry, name) not in values:
                allowed = " or ".join(map(str, values))
                raise UsageError(
                    f"subject {self.name!r}: {name}: {getattr(geometry, name)} is not {allowed}, which SGLang's "
                    "backend has built in; give --preset deepseek_v4, smaller with --set context=1203"
                )

    def _check_device(self, geometry: Geometry, device: torch.device) -> None:
        """Accept any device: nothing of the layout depends on it."""

    def _new_engine(self, geometry: Geometry, inputs: Inputs) -> Engine:
        cpu = inputs.seq_lens.device.type == "cpu"
        return Engine(
            lambda: self._make(geometry, inputs),
            cpu=cpu,
            batch=self._layout.bucket,
            rows=self._layout.tokens,
            modules=self.modules,
            settings={
                "page_size": geometry.page_size,
                "speculative_num_draft_tokens": geometry.draft_tokens,
                "speculative_eagle_topk": 1,
            },
            changes=lambda: _changes(cpu=cpu),
            platform={},
        )

    def _make(self, geometry: Geometry, inputs: Inputs) -> Any:
        backend = wheel.attribute(BACKEND, "DeepseekV4AttnBackend")(_runner(geometry, inputs))
        backend.init_forward_metadata_indexer = _nothing
        if inputs.seq_lens.device.type == "cpu":
            backend._move_to_device = lambda values: torch.tensor(values, dtype=torch.int32)  # without pinned memory
        return backend

    def _forward_batch(self, inputs: Inputs) -> Any:
        geometry, batch = self._geometry, super()._forward_batch(inputs)
        batch.out_cache_loc = self._locations.tensor
        batch.positions = torch.zeros(self._layout.tokens, dtype=torch.int64, device=inputs.seq_lens.device)
        if geometry.padded_mode == "draft_block":
            batch.spec_info = SimpleNamespace(draft_token_num=geometry.draft_tokens - 1, ragged_verify_layout=None)
        return batch


def _copy(name: str, made: torch.Tensor, copy: torch.Tensor) -> None:
    """UsageError rather than a conversion on the way."""
    if made.shape != copy.shape or made.dtype != copy.dtype:
        raise UsageError(
            f"{name}: SGLang's backend makes {made.dtype} {list(made.shape)}, the layout has {copy.dtype} "
            f"{list(copy.shape)}; this release of SGLang prepares other metadata than the adapter knows"
        )
    copy.copy_(made)


def _why_not(name: str, mode: str) -> str | None:
    if mode in PLACEHOLDER_MODES and name.startswith(("c1_", "c2_", "c4_", "c128_")):
        return _DRAFT
    if name == "c128_len_raw":
        return _RAW
    if name == "raw_out_loc" and mode == "draft_block":
        return _NARROW
    return _SKIPPED if name.endswith(("_full_indices", "_full_raw_indices")) else None


def _runner(geometry: Geometry, inputs: Inputs) -> Any:
    """Return what the backend reads of the model runner."""
    mode = geometry.padded_mode
    return SimpleNamespace(
        device=str(inputs.seq_lens.device),
        page_size=geometry.page_size,
        model_config=SimpleNamespace(
            context_len=geometry.context,
            head_dim=HEAD_DIM,
            v_head_dim=HEAD_DIM,
            hf_text_config=SimpleNamespace(model_type="deepseek_v4", index_topk=geometry.topk),
        ),
        req_to_token_pool=SimpleNamespace(req_to_token=inputs.req_to_token[:, : geometry.columns]),
        token_to_kv_pool=_pool(geometry, inputs),
        hisparse_coordinator=None,
        is_draft_worker=mode in PLACEHOLDER_MODES,
        spec_algorithm=SimpleNamespace(is_dspark=lambda: mode == "draft_block"),
    )


def _pool(geometry: Geometry, inputs: Inputs) -> Any:
    """A KV pool without KV: of the class that the backend insists on, with what its metadata depends on."""
    ratios = (*(LOW_RATIOS if geometry.low_ratios else ()), geometry.sparse_ratio, geometry.dense_ratio)
    base: Any = wheel.attribute(POOL, "DeepSeekV4TokenToKVPool")
    layout = SimpleNamespace(is_interleaved=False)
    stand_in = type("Pool", (base,), {"__init__": _nothing, "get_swa_key_layout": lambda _: layout})
    pool = stand_in()
    pool.__dict__.update(
        full_to_swa_index_mapping=inputs.full_to_swa,
        page_size=geometry.page_size,
        present_ratios=ratios,
        request_window=None,
        swa_page_size=geometry.page_size,
        swa_req_ring_size=None,
        swa_valid_from=None,
    )
    return pool


def _changes(*, cpu: bool) -> list[tuple[Any, str, Any]]:
    """Return what is left out, and on a CPU kernels instead of the torch forms that SGLang takes for CPU tensors."""
    left_out = [(wheel.require(BACKEND), "create_paged_compressor_data", _nothing)]
    if not cpu:
        return left_out
    kernels = [(wheel.attribute(module, name), "execute") for module, names in DISPATCHED.items() for name in names]
    return [
        *left_out,
        (wheel.require(BACKEND), "_is_cuda", True),
        *((kernel, attribute, kernel.triton) for kernel, attribute in kernels),
    ]


def _nothing(*_: Any, **__: Any) -> None:
    """Stand for what is left out."""
