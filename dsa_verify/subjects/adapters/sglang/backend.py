"""SGLang's whole DSA attention backend as a subject: the object itself, driven through its own hooks of capture and
replay, and judged by the metadata record that it leaves for the attention layers (contract 1 to 5).

Nothing of a refresh is restated here. `allocate` makes the backend with a stand-in for the model runner around it, has
it allocate its graph state and capture one batch size; `before_replay` is its refresh outside the graph, which in this
release is all of it. Its tensors are its own, so they have no guards; that they stay where they are is checked.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Final
from weakref import WeakValueDictionary

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import POOLED_PAGE_SIZE, Geometry
from dsa_verify.contract.map_outputs import map_outputs
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.adapters import deep_gemm
from dsa_verify.subjects.adapters.sglang import backend_stubs, wheel
from dsa_verify.subjects.adapters.sglang.backend_engine import Engine, StaticInput, captured_record, importable, leaves
from dsa_verify.subjects.adapters.sglang.backend_stubs import BACKEND, KPOOL_INDEX, KPOOL_PLAN, MANAGER, PLANNER
from dsa_verify.subjects.adapters.sglang.basic import KERNELS, POOLED_KERNELS
from dsa_verify.subjects.adapters.traced import capability
from dsa_verify.systems.indexer import WRITE_PLAN

FORWARD: Final = "sglang.srt.model_executor.forward_batch_info"
MODULES: Final = (
    BACKEND,
    MANAGER,
    KPOOL_PLAN,
    KPOOL_INDEX,
    KERNELS,
    *(f"{POOLED_KERNELS}.{mode}" for mode in ("decode", "verify", "draft_extend")),
    PLANNER,
)

# A model whose index heads (32 or 64) have pooled schedules on architecture 90; nothing else depends on it.
QUERY_HEADS: Final = 64
MODEL, POOLED_MODEL = "DeepseekV32ForCausalLM", "Glm5NextForConditionalGeneration"
# Of so many rows, or a multiple, not all may be empty where DeepGEMM builds a schedule on architecture 90.
EMPTY_ROWS: Final = 32

# By subject, geometry and address of the request table; gone when the last subject that it serves is.
_engines: WeakValueDictionary[tuple[Any, ...], Engine] = WeakValueDictionary()


class BackendSubject:
    """The modes have this in common. `forward_mode`: as SGLang calls it. `draft_worker`: whether the draft model's
    worker runs it, else the target model's."""

    name = "sglang:backend"
    forward_mode = "DECODE"
    draft_worker = False
    modules: tuple[str, ...] = MODULES
    cpu_answers = backend_stubs.CPU_ANSWERS
    engine_class: type[Engine] = Engine

    @classmethod
    def provenance(cls) -> Mapping[str, str]:
        """Return as `wheel.provenance`, and what stood in for a package, a device or a kernel."""
        cpu = capability() == "interpreted"
        with importable(cpu=cpu):
            found = wheel.provenance(*cls.modules)
        stood_in = [*backend_stubs.used(), *([cls.cpu_answers] if cpu else [])]
        found["stand-ins"] = ", ".join(["the model runner and its pools", *stood_in])
        settings = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("SGLANG_")]
        return found | ({"environment": " ".join(settings)} if settings else {})

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        """Makes the backend, or takes the one of a wider batch, and captures. UsageError as `wheel.require` has it, or
        for a geometry that this release, or the device, does not have."""
        self._layout = buffers.layout
        self._refuse(geometry)
        self._check_device(geometry, inputs.seq_lens.device)
        self._lengths = StaticInput(inputs.seq_lens)
        self._requests = StaticInput(inputs.req_pool_indices)
        self._engine = self._engine_for(geometry, inputs)
        self._batch = self._forward_batch(inputs)
        self._engine.refresh(self._batch, in_capture=True)
        self._records = self._read()
        self.ready_before_graph = tuple(field.name for field in self._layout)

    def before_replay(self) -> None:
        self._refresh()
        self._records = self._read()

    def _refresh(self) -> None:
        self._lengths.update()
        self._requests.update()
        self._engine.refresh(self._batch, in_capture=False)

    def _read(self) -> list[Any]:
        """The record of each leaf that the attention layers read now."""
        return [captured_record(leaf, self._layout.bucket) for leaf in leaves(self._engine.backend)]

    def in_graph(self) -> None:
        """Record what the engine's graph records of metadata: nothing in this release."""
        self._engine.record_in_graph(self._batch)

    def outputs(self) -> dict[str, torch.Tensor]:
        """The fields of the layout in the records that the attention layers would read now."""
        return map_outputs(self._source(), self._layout, self._names())

    def _source(self) -> Any:
        return self._records[0]

    def _names(self) -> dict[str, str]:
        return record_names(field.name for field in self._layout)

    def _refuse(self, geometry: Geometry) -> None:
        if geometry.pool_size > 1 and geometry.page_size != POOLED_PAGE_SIZE:
            raise UsageError(
                f"subject {self.name!r}: page_size {geometry.page_size} with pool_size {geometry.pool_size}; SGLang "
                f"pools pages of {POOLED_PAGE_SIZE} only: give --preset glm53_flash, smaller with --set context=2048"
            )

    def _check_device(self, geometry: Geometry, device: torch.device) -> None:
        if device.type == "cuda":
            _check_schedules(geometry, device)

    def _engine_for(self, geometry: Geometry, inputs: Inputs) -> Engine:
        """One backend serves all batch sizes of a run, as in the engine, which captures the widest first. Without the
        wide table (contract 1.5) batch sizes share the other one too, which the layout does not allow for."""
        bucket = inputs.seq_lens.shape[0]
        key = (type(self), geometry, inputs.req_to_token.data_ptr())
        engine = _engines.get(key)
        if engine is None or not geometry.wide_table or not engine.takes(bucket):
            engine = self._new_engine(geometry, inputs)
            _engines[key] = engine
        return engine

    def _new_engine(self, geometry: Geometry, inputs: Inputs) -> Engine:
        cpu = inputs.seq_lens.device.type == "cpu"
        return self.engine_class(
            functools.partial(self._make, geometry, inputs),
            cpu=cpu,
            batch=inputs.seq_lens.shape[0],
            rows=self._layout.tokens,
            modules=self.modules,
            settings=_settings(geometry),
            changes=lambda: backend_stubs.cpu_answers(geometry) if cpu else _guards(geometry),
            platform={"is_sm100": geometry.architecture == 100} if cpu else {},
        )

    def _make(self, geometry: Geometry, inputs: Inputs) -> Any:
        runner = _runner(geometry, inputs, draft_worker=self.draft_worker)
        made = self._construct(runner, geometry)
        if inputs.seq_lens.device.type == "cpu":
            for leaf in leaves(made):
                _interpret(leaf, geometry)
        return made

    def _construct(self, runner: Any, geometry: Geometry) -> Any:
        return wheel.attribute(BACKEND, "DeepseekSparseAttnBackend")(runner)

    def _forward_batch(self, inputs: Inputs) -> Any:
        """Return what the hooks read of the engine's batch."""
        mode = getattr(wheel.attribute(FORWARD, "ForwardMode"), self.forward_mode)
        spec = None if "accept_lens" not in inputs.own else SimpleNamespace(num_accept_tokens=inputs.accept_lens)
        return SimpleNamespace(
            batch_size=inputs.seq_lens.shape[0],
            forward_mode=mode,
            actual_forward_mode=mode,
            seq_lens=self._lengths.tensor,
            req_pool_indices=self._requests.tensor,
            # Not kept on the host: this backend does without, which spares the engine a synchronisation.
            seq_lens_cpu=None,
            seq_lens_sum=None,
            out_cache_loc=None,
            spec_info=spec,
        )


class DecodeBackend(BackendSubject):
    """Contract 1.1."""

    name = "sglang:decode_backend"


class TargetVerifyBackend(BackendSubject):
    """Contract 1.2."""

    name = "sglang:target_verify_backend"
    forward_mode = "TARGET_VERIFY"


class DraftExtendBackend(BackendSubject):
    """Contract 1.3. The backend extends every request by N, so rounds must not be ragged; with an indexer none is."""

    name = "sglang:draft_extend_backend"
    forward_mode = "DRAFT_EXTEND_V2"
    draft_worker = True

    def _refuse(self, geometry: Geometry) -> None:
        super()._refuse(geometry)
        if not geometry.indexer:
            raise UsageError(
                f"subject {self.name!r}: SGLang's backend extends every request by N, but rounds without an indexer "
                "may extend some by less; give --set indexer=true"
            )


def record_names(fields: Iterable[str]) -> dict[str, str]:
    """Return the names under which the backend's record has some of `fields`: the write plan has its own record."""
    return {name: name.replace(WRITE_PLAN, "kpool_write_plan.") for name in fields if name.startswith(WRITE_PLAN)}


def _settings(geometry: Geometry) -> dict[str, object]:
    return {
        "page_size": geometry.allocator_page,
        "dsa_prefill_backend": "flashmla_sparse",
        "dsa_decode_backend": "fa3" if geometry.architecture == 90 else "trtllm",
        # Speculative decoding keeps the wide table (contract 1.5).
        "speculative_num_draft_tokens": geometry.draft_tokens if geometry.wide_table else None,
        "speculative_eagle_topk": 1,
    }


def _runner(geometry: Geometry, inputs: Inputs, *, draft_worker: bool) -> Any:
    """Return what the backend reads of the model runner: a model's sizes, two pools, and which worker this is."""
    pooled = geometry.pool_size > 1
    config = SimpleNamespace(
        architectures=[POOLED_MODEL if pooled else MODEL],
        index_topk=geometry.topk,
        index_kpool=geometry.pool_size,
    )
    rope = 0 if pooled else 64
    return SimpleNamespace(
        device=str(inputs.seq_lens.device),
        page_size=geometry.allocator_page,
        model_config=SimpleNamespace(
            hf_config=config,
            context_len=geometry.context,
            num_attention_heads=QUERY_HEADS,
            qk_nope_head_dim=128,
            kv_lora_rank=512,
            qk_rope_head_dim=rope,
        ),
        # The tables are as wide as the layout has them; an engine's are wider by what it over-allocates.
        req_to_token_pool=SimpleNamespace(
            req_to_token=inputs.req_to_token[:, : geometry.columns], size=geometry.request_rows - 1
        ),
        token_to_kv_pool=SimpleNamespace(
            dsa_kv_cache_store_fp8=False,
            kv_cache_dim=512 + rope,
            dtype=torch.bfloat16,
            index_page_size=geometry.page_size,
            size=geometry.slots,
            page_size=geometry.allocator_page,
        ),
        kv_cache_dtype=torch.bfloat16,
        hisparse_coordinator=None,
        is_draft_worker=draft_worker,
        max_running_requests=geometry.request_rows - 1,
    )


def _check_schedules(geometry: Geometry, device: torch.device) -> None:
    """UsageError unless the device, and the DeepGEMM on it, are what the oracle takes from `geometry`."""
    properties = torch.cuda.get_device_properties(device)
    variant = deep_gemm.installed_variant(properties.major * 10)
    deep_gemm.check_importable()
    wanted: dict[str, object] = {"architecture": properties.major * 10}
    if geometry.indexer:  # else schedules are built, but are no field of the layout
        wanted |= {"multiprocessors": properties.multi_processor_count, "schedule": variant.name}
    for name, value in wanted.items():
        if getattr(geometry, name) != value:
            raise UsageError(
                f"{name}: the geometry says {getattr(geometry, name)}, this device has {value}; give --set "
                f"{name}={value}"
            )


def _guards(geometry: Geometry) -> list[tuple[Any, str, Any]]:
    """Guard a device: DeepGEMM is never given a batch of which all is empty, where that would lose the process."""
    backend = wheel.require(BACKEND)
    if geometry.architecture != 90:
        return []
    return [(backend, "resolve_paged_mqa_logits_metadata_fn", _guarded_builder)]


@functools.cache
def _guarded_builder() -> Callable[..., torch.Tensor]:
    build = wheel.attribute("sglang.srt.layers.attention.dsa.utils", "resolve_paged_mqa_logits_metadata_fn")()

    def guarded(context_lens: torch.Tensor, block_kv: int, multiprocessors: int) -> torch.Tensor:
        """Rows that are all empty give the sentinel alone (contract 3.6), which no engine ever asks for."""
        rows = context_lens.shape[0]
        if rows % EMPTY_ROWS:
            result: torch.Tensor = build(context_lens, block_kv, multiprocessors)
            return result
        empty = (context_lens == 0).all()
        schedule = build(torch.where(empty, 1, context_lens), block_kv, multiprocessors)
        sentinel = torch.zeros_like(schedule[0])
        sentinel[:1].fill_(rows)
        return torch.where(empty, sentinel, schedule)

    return guarded


def _interpret(leaf: Any, geometry: Geometry) -> None:
    """Its Triton kernels in the form that takes CPU tensors."""
    device, pooled = torch.device("cpu"), leaf.experimental_kpool_metadata_fusion
    for attribute, module, function in (
        ("_fused_decode_metadata", "decode", "fused_dsa_decode_metadata"),
        ("_fused_verify_metadata", "verify", "fused_dsa_target_verify_metadata"),
        ("_fused_draft_extend_metadata", "draft_extend", "fused_dsa_draft_extend_metadata"),
    ):
        if pooled:
            kernel = wheel.attribute(f"{POOLED_KERNELS}.{module}", f"{function}_kpool", device)
            setattr(leaf, attribute, functools.partial(kernel, index_kpool=geometry.pool_size))
        else:
            setattr(leaf, attribute, wheel.attribute(KERNELS, function, device))
