"""In-graph verify decides who may have its target-verify metadata recorded in the graph, and which input buffers such a
graph may be replayed with (contract 6).

`InGraphVerify` is the engine's side of it, for all captured batch sizes. A graph that refreshes its own metadata reads
the buffers it was captured with, whatever it is handed later: so their identity is published at capture and compared
before every replay. The two subjects at the end show it to the verifier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import torch

from dsa_verify.base.errors import ReplayError, UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.graphs import Backend, Graph
from dsa_verify.subjects.pipelines.basic import TargetVerify
from dsa_verify.subjects.pipelines.indexer import IndexerMetadata
from dsa_verify.systems.indexer import WRITE_PLAN

TARGET_VERIFY: Final = "target_verify"
FULL_SCHEDULE, FULL_PLAN = "paged_mqa_schedule_metadata", "topk_v2_plan"
EXPANDED, CONTEXT_LENS = "dsa_seqlens_expanded", "paged_mqa_ctx_lens_2d"


class StaticBufferError(ReplayError, RuntimeError):
    """A graph is about to be replayed for inputs that lie elsewhere than those it reads."""


# Eligibility ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine was started with these, as far as in-graph verify depends on them.

    `enabled`: the flag that asks for it. `platform`: cuda or hip. `dcp_size`: ranks of decode context parallelism.
    `pooled_fusion`: whether the fused kernels serve a pooled indexer. `decode_implementation`: the attention kernels.
    """

    enabled: bool = True
    platform: str = "cuda"
    dcp_size: int = 1
    pooled_fusion: bool = True
    decode_implementation: str = "flashmla_sparse"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that decides whether batch size `bs` is eligible; what follows `captured` means nothing without it.

    `captured`: metadata for `bs` exists. `schedule`, `context_lens`: those buffers do. `context_lens_per_request`: the
    latter is [bs, N] and no view of the expanded lengths, which are `expanded_contiguous`.
    """

    engine: Engine
    mode: str
    bs: int
    captured: bool
    pool_size: int = 1
    draft_tokens: int = 0
    architecture: int = 0
    schedule: bool = False
    context_lens: bool = False
    context_lens_per_request: bool = False
    expanded_contiguous: bool = False

    @classmethod
    def of(cls, engine: Engine, mode: str, bs: int, buffers: Buffers | None) -> Facts:
        """The facts of the buffers captured for `bs`, None where there are none."""
        if buffers is None:
            return cls(engine=engine, mode=mode, bs=bs, captured=False)
        geometry = buffers.layout.geometry
        expanded, context_lens = buffers.get(EXPANDED), buffers.get(CONTEXT_LENS)
        return cls(
            engine=engine,
            mode=mode,
            bs=bs,
            captured=True,
            pool_size=geometry.pool_size,
            draft_tokens=geometry.draft_tokens,
            architecture=geometry.architecture,
            schedule=FULL_SCHEDULE in buffers,
            context_lens=context_lens is not None,
            context_lens_per_request=context_lens is not None
            and tuple(context_lens.shape) == (bs, geometry.draft_tokens)
            and (expanded is None or context_lens.data_ptr() != expanded.data_ptr()),
            expanded_contiguous=expanded is not None and expanded.is_contiguous(),
        )


def ineligibility(facts: Facts) -> str | None:
    """Say why the metadata of `facts.bs` stays out of the graph; None if it may be recorded (contract 6)."""
    engine, bs, n = facts.engine, facts.bs, facts.draft_tokens
    per_request = facts.architecture == 100 and n >= 2
    conditions = (
        (engine.enabled, "in-graph verify is switched off"),
        (engine.platform == "cuda", f"the platform is {engine.platform}, not cuda"),
        (engine.dcp_size <= 1, f"decode context parallelism over {engine.dcp_size} ranks is on"),
        (engine.decode_implementation != "flashmla_kv", "the decode implementation is flashmla_kv"),
        (facts.mode == TARGET_VERIFY, f"the mode is {facts.mode}, not {TARGET_VERIFY}"),
        (facts.captured, f"no metadata is captured for bs {bs}"),
        (facts.pool_size <= 1 or engine.pooled_fusion, f"pool_size is {facts.pool_size} and its fusion is off"),
        (facts.schedule, f"bs {bs} has no {FULL_SCHEDULE}"),
        (n > 0, f"draft_tokens is {n}, not above 0"),
        (facts.context_lens, f"bs {bs} has no {CONTEXT_LENS}"),
        (
            facts.context_lens_per_request or not per_request,
            f"{CONTEXT_LENS} of bs {bs} is no buffer of its own of shape [{bs}, {n}], which architecture 100 needs",
        ),
        (facts.expanded_contiguous, f"{EXPANDED} of bs {bs} is not contiguous"),
    )
    return next((reason for holds, reason in conditions if not holds), None)


# What is published ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """An identity says where a static input lies; a graph has recorded it and the dtype. `stride`: in elements."""

    address: int
    stride: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Identity:
        return cls(tensor.data_ptr(), tensor.stride(0))

    def change_to(self, other: Identity) -> str:
        """Say in words what differs, captured value first; empty if nothing does."""
        changes = []
        if self.address != other.address:
            changes.append(f"address {self.address:#x} became {other.address:#x}")
        if self.stride != other.stride:
            changes.append(f"stride {self.stride} became {other.stride}")
        return " and ".join(changes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFlags:
    """The engine had decided this of the attention kernels when it captured; a replay needs the same."""

    use_mha: bool = False
    prefill_implementation: str = "flashmla_sparse"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PublishedState:
    """A successful capture leaves this. `residual`: the eager work before each replay, if any (contract 3.7)."""

    work: VerifyWork
    seq_lens: Identity
    req_pool_indices: Identity
    residual: Callable[[], None] | None
    attention: AttentionFlags


@dataclasses.dataclass(slots=True, kw_only=True)
class CapturedMetadata:
    """The metadata record of one batch size. A record made from it by `dataclasses.replace` has no state."""

    buffers: Buffers
    state: PublishedState | None = dataclasses.field(default=None, init=False)


class VerifyWork(TargetVerify):
    """The work is recorded in the order of contract 6: lengths and tables, the full schedule and top-k plan, then all
    that belongs to pools. With `residual` the graph builds neither schedule. The geometry must have the indexer."""

    def __init__(self, *, residual: bool = False):
        self._residual = residual

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        assert self._indexer is not None, "eligibility asks for a schedule, which only an indexer has"
        self.schedules_from_raw = self._indexer.schedules_from_raw
        full = {name: tensor for name, tensor in buffers.items() if not name.startswith(("pooled_", WRITE_PLAN))}
        pooled = {name: tensor for name, tensor in buffers.items() if name not in (FULL_SCHEDULE, FULL_PLAN)}
        # An indexer refreshes pools first; told of none, it does the rest alone.
        self._parts = [
            IndexerMetadata(geometry.replace(pool_size=1), inputs, Buffers(buffers.layout, full)),
            IndexerMetadata(geometry, inputs, Buffers(buffers.layout, pooled)),
        ]

    def in_graph(self) -> None:
        self._launch()
        for part in self._parts:
            part.refresh(schedules=not self._residual)


class InGraphVerify:
    """InGraphVerify serves every captured batch size: eligibility, capture, what precedes a replay (contract 6).

    `req_to_token`: int32 [request rows, token columns], static. `metadata`: the record of each batch size, which the
    engine may replace. `attention`: the flags in force. `forward_metadata`: what the attention kernels read next.
    """

    def __init__(self, req_to_token: torch.Tensor, *, engine: Engine | None = None, residual: bool = False):
        self._req_to_token, self._engine, self._residual = req_to_token, engine or Engine(), residual
        self.metadata: dict[int, CapturedMetadata] = {}
        self.attention = AttentionFlags()
        self.forward_metadata: Buffers | None = None
        # A graph holds bare addresses, and an engine may replay one whose state is gone.
        self._recorded: list[VerifyWork] = []

    def register(self, buffers: Buffers) -> None:
        """A new record for the batch size of `buffers`, without state; UsageError for another system's."""
        layout = buffers.layout
        if layout.system != TARGET_VERIFY:
            raise UsageError(f"buffers: of {layout.system}, not {TARGET_VERIFY}; register those of {TARGET_VERIFY}")
        self.metadata[layout.bucket] = CapturedMetadata(buffers=buffers)

    def eligibility(self, bs: int, mode: str = TARGET_VERIFY) -> str | None:
        """None, or why `bs` stays out of the graph."""
        record = self.metadata.get(bs)
        return ineligibility(Facts.of(self._engine, mode, bs, None if record is None else record.buffers))

    def capture(
        self,
        bs: int,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        model: Callable[[], None],
        backend: Backend,
        *,
        pool: object | None = None,
        mode: str = TARGET_VERIFY,
    ) -> Graph:
        """Records `model` behind the metadata work, or alone where `bs` is not eligible, and publishes the state.

        `seq_lens`, `req_pool_indices`: [>= bs], the static buffers of every replay to come. Whatever this raises (what
        `backend.capture` does), the state that `bs` had is gone.
        """
        self._clear(bs)
        if self.eligibility(bs, mode) is not None:
            return backend.capture(model, pool=pool)
        state = self.prepare(bs, seq_lens, req_pool_indices)
        # The refresh that precedes a capture: kernels compile and constants are made outside the graph.
        if state.residual is not None:
            state.residual()
        state.work.in_graph()

        def body() -> None:
            state.work.in_graph()
            model()

        graph = backend.capture(body, pool=pool)
        self.publish(bs, state)
        return graph

    def prepare(self, bs: int, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor) -> PublishedState:
        """Clear the state of `bs` and fix all addresses of the next one, for an engine that captures by itself.

        Its `work.in_graph` is then called at the head of the captured body; `publish` follows a capture that succeeded.
        """
        self._clear(bs)
        record, work = self._record(bs), VerifyWork(residual=self._residual)
        self._recorded.append(work)
        work.allocate(record.buffers.layout.geometry, self._inputs(bs, seq_lens, req_pool_indices), record.buffers)
        return PublishedState(
            work=work,
            seq_lens=Identity.of(seq_lens),
            req_pool_indices=Identity.of(req_pool_indices),
            residual=work.schedules_from_raw if self._residual else None,
            attention=self.attention,
        )

    def publish(self, bs: int, state: PublishedState) -> None:
        """Makes `state` what replays of `bs` go by."""
        self._record(bs).state = state

    def before_replay(self, bs: int, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor) -> None:
        """Do what must precede a replay of `bs`: the whole refresh where nothing is published, else the residual alone.

        In the second case what is captured holds the previous replay's values until the graph replays. Both inputs must
        then be the static buffers, or views that start where they do with the same stride; StaticBufferError if not:
        the graph would overwrite any refresh with what the buffers it captured hold.
        """
        record = self._record(bs)
        if record.state is None:
            self._refresh(bs, seq_lens, req_pool_indices)
        else:
            _check_static(bs, record.state, seq_lens, req_pool_indices)
            self.attention = record.state.attention
            if record.state.residual is not None:
                record.state.residual()
        self.forward_metadata = record.buffers

    def _refresh(self, bs: int, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor) -> None:
        """The generic out-of-graph path: any inputs, into the captured addresses."""
        buffers, work = self._record(bs).buffers, TargetVerify()
        work.allocate(buffers.layout.geometry, self._inputs(bs, seq_lens, req_pool_indices), buffers)
        work.in_graph()

    def _clear(self, bs: int) -> None:
        if bs in self.metadata:
            self.metadata[bs].state = None

    def _record(self, bs: int) -> CapturedMetadata:
        if bs not in self.metadata:
            known = ", ".join(map(str, self.metadata)) or "none"
            raise UsageError(f"bs: {bs} has no metadata record; known batch sizes: {known}; register its buffers first")
        return self.metadata[bs]

    def _inputs(self, bs: int, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor) -> Inputs:
        for name, tensor in (("seq_lens", seq_lens), ("req_pool_indices", req_pool_indices)):
            if tensor.shape[0] < bs:
                raise UsageError(f"{name}: {tensor.shape[0]} rows are fewer than bs {bs}; pass the padded batch")
        return Inputs(seq_lens=seq_lens[:bs], req_pool_indices=req_pool_indices[:bs], req_to_token=self._req_to_token)


def _check_static(bs: int, state: PublishedState, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor) -> None:
    changes = {
        "seq_lens": state.seq_lens.change_to(Identity.of(seq_lens)),
        "req_pool_indices": state.req_pool_indices.change_to(Identity.of(req_pool_indices)),
    }
    told = "; ".join(f"{name}: {change}" for name, change in changes.items() if change)
    if told:
        raise StaticBufferError(
            f"bs {bs} is replayed with other inputs than the static buffers it captured: {told}; "
            f"copy the values into the static buffers, or capture bs {bs} again with these"
        )


# Subjects ------------------------------------------------------------------------------------------------------------


class InGraphSubject:
    """One batch size of `InGraphVerify`; the harness captures. A warm-up publishes too, as if it were a capture."""

    name = "in_graph"
    residual = False

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        self._inputs, self._bs = inputs, buffers.layout.bucket
        self.verify = InGraphVerify(inputs.req_to_token, residual=self.residual)
        self.verify.register(buffers)
        reason = self.verify.eligibility(self._bs)
        if reason is not None:
            hint = "" if geometry.indexer else "; set indexer=true"
            raise UsageError(f"subject {self.name!r}: {reason}{hint}")
        self._state = self.verify.prepare(self._bs, inputs.seq_lens, inputs.req_pool_indices)

    def before_replay(self) -> None:
        self.verify.before_replay(self._bs, self._inputs.seq_lens, self._inputs.req_pool_indices)

    def in_graph(self) -> None:
        self._state.work.in_graph()
        self.verify.publish(self._bs, self._state)


class InGraphResidualSubject(InGraphSubject):
    """Schedules eagerly from the raw lengths, the rest in the graph."""

    name = "in_graph_residual"
    residual = True

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.ready_before_graph = tuple(name for name in buffers if name.endswith("schedule_metadata"))
