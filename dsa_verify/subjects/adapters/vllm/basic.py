"""vLLM's own metadata of the sparse indexer in decode, target-verify and draft-extend, prepared before each replay in
the order of its model runner (runner.py); in the graph, what its attention layers make of a selection (selection.py).

Lengths mean the same in all three: computed tokens plus the query tokens of the step (contract 1.1 to 1.3). Draft
extend is vLLM's draft prefill, which takes over the metadata of the target's step.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.engine_form import EngineForm, PadRows
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.map_outputs import map_outputs
from dsa_verify.contract.static_inputs import PAD_REQUEST
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.adapters.vllm import runner, wheel
from dsa_verify.subjects.adapters.vllm.runner import Request, Runner
from dsa_verify.subjects.adapters.vllm.selection import CONVERTER, Selection

PER_REQUEST: Final = "vLLM counts query tokens by request, [0, N, 2N, ...], not by token row"
NO_SUMS: Final = "vLLM makes no prefix sums of lengths for decoding requests"
ONE_ROW: Final = "this layout of vLLM's has one row a request; page_table_1 shows what is in it"
NO_SCHEDULE: Final = "it deals out the lengths of pad rows too, which are 0 in vLLM and 1 in the contract"
OTHER_LENGTHS: Final = "vLLM gives every draft position its own length, on every architecture"
NOT_VLLMS: Final = "vLLM has no such tensor"
_COVERED: Final = (
    "cache_seqlens_int32",
    "dsa_seqlens_expanded",
    "paged_mqa_ctx_lens_2d",
    "dsa_cache_seqlens_int32",
    "real_page_table",
    "page_table_1",
)


class _Step:
    """The modes have this in common. `flatten`, `varlen`: how decode metadata is laid out; None: vLLM decides."""

    name = "vllm"
    flatten: ClassVar[bool | None] = None
    varlen: ClassVar[bool | None] = None
    adaptive: ClassVar[bool] = False

    @staticmethod
    def provenance() -> dict[str, str]:
        return wheel.provenance(*runner.MODULES, CONVERTER) | {"pad rows": "length 0, block 0: vLLM's own form"}

    @classmethod
    def not_covered(cls, layout: Layout, device: torch.device) -> Mapping[str, str]:
        reasons = {
            "cu_seqlens_q": PER_REQUEST,
            "dsa_cu_seqlens_q": PER_REQUEST,
            "cu_seqlens_k": NO_SUMS,
            "dsa_cu_seqlens_k": NO_SUMS,
        }
        if cls._query(layout.geometry) > 1 and not cls._one_row_a_token(layout.geometry):
            reasons["real_page_table"] = ONE_ROW
        if layout.geometry.architecture == 100 and layout.geometry.draft_tokens > 1:
            reasons["paged_mqa_ctx_lens_2d"] = OTHER_LENGTHS
        for field in layout:
            if field.name not in _COVERED and field.name not in reasons:
                reasons[field.name] = NO_SCHEDULE if field.name.endswith("schedule_metadata") else NOT_VLLMS
        return {field.name: reasons[field.name] for field in layout if field.name in reasons}

    @staticmethod
    def engine_form() -> EngineForm:
        return EngineForm(
            pads={
                "cache_seqlens_int32": PadRows(value=0),
                "dsa_seqlens_expanded": PadRows(value=0),
                "dsa_cache_seqlens_int32": PadRows(value=0),
                # Of a row that sees no token, vLLM resets the first block only.
                "real_page_table": PadRows(value=0, columns=1),
                "page_table_1": PadRows(value=-1),
            },
            # With pages of one token the two tables are one in the contract, and never in vLLM.
            aliases={"real_page_table": None},
            shared=True,
        )

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        """UsageError for a geometry with pools or a table wider than vLLM's, and as `wheel.require` has it."""
        if geometry.pool_size > 1:
            raise UsageError(
                f"subject {self.name!r}: pool_size {geometry.pool_size}: this adapter knows vLLM's metadata of "
                "unpooled indexers only; set pool_size=1"
            )
        self._geometry, self._inputs = geometry, inputs
        self._batch, device = buffers.layout.bucket, inputs.seq_lens.device
        self._tokens = self._batch * self._query(geometry)
        self._runner = self._shared_runner()
        if self._runner.width < geometry.pages:
            raise UsageError(
                f"subject {self.name!r}: table_width: vLLM's block table has {self._runner.width} columns, as many as "
                f"its longest request needs, and {geometry.pages} are asked for; leave table_width out"
            )
        self._selection = Selection(geometry, self._tokens, device)
        self._layout = buffers.layout.without(self.not_covered(buffers.layout, device))
        self._metadata = self._runner.dummy_step(self._batch)

    def before_replay(self) -> None:
        self._metadata = self._runner.step(self._requests(), self._batch)

    def in_graph(self) -> None:
        state = self._runner
        self._selection.convert(
            state.request_of_token[: self._tokens],
            state.tables.input_block_tables[0][: self._batch],
            state.buffers.seq_lens[: self._batch],
            self._metadata.decode.seq_lens.view(-1),
        )

    def outputs(self) -> Mapping[str, torch.Tensor]:
        decode = self._metadata.decode
        lengths = decode.seq_lens.view(-1)
        found = {
            "cache_seqlens_int32": self._runner.buffers.seq_lens[: self._batch],
            "dsa_seqlens_expanded": lengths,
            "paged_mqa_ctx_lens_2d": lengths.unsqueeze(1),
            "dsa_cache_seqlens_int32": self._selection.counts,
            "real_page_table": decode.block_table[:, : self._geometry.pages],
            "page_table_1": self._selection.every,
        }
        return map_outputs(found, self._layout)

    @classmethod
    def _query(cls, geometry: Geometry) -> int:
        """Query tokens of a decoding request."""
        return geometry.draft_tokens

    @classmethod
    def _drafts(cls, geometry: Geometry) -> int:
        """Tokens that the engine drafts for each request."""
        return cls._query(geometry) - 1

    def _lengths(self) -> list[tuple[int, int]]:
        """(computed, query) tokens of each batch row."""
        raise NotImplementedError

    def _requests(self) -> list[Request]:
        """The live requests; the host of an engine knows them without asking the device."""
        rows = self._inputs.req_pool_indices.tolist()
        live = sum(row != PAD_REQUEST for row in rows)
        page = self._geometry.page_size
        pages = (self._inputs.req_to_token.index_select(0, self._inputs.req_pool_indices)[:, ::page] // page).tolist()
        found = []
        for row, blocks, (computed, query) in zip(rows[:live], pages, self._lengths(), strict=False):
            count = min(-(-max(computed + query, 0) // page), self._runner.width)
            found.append(Request(row=row, computed=computed, query=query, blocks=blocks[:count]))
        return found

    def _shared_runner(self) -> Runner:
        """One for all captured batches of a run, known by their common request table. The first is the largest."""
        table = self._inputs.req_to_token
        key = (table.data_ptr(), table.device, type(self), self._geometry)
        known = _RUNNERS.get(key)
        if known is None:
            known = Runner(
                self._geometry,
                table.device,
                most_requests=self._batch,
                query=self._query(self._geometry),
                drafts=self._drafts(self._geometry),
                flatten=self.flatten,
                varlen=self.varlen,
                adaptive=self.adaptive,
            )
            _RUNNERS[key] = known
        return known

    @classmethod
    def _one_row_a_token(cls, geometry: Geometry) -> bool:
        """Return whether the decode metadata has a row for each query token, and not for each request."""
        if cls.flatten is None and cls.varlen is None:
            return runner.decided_to_flatten(cls._drafts(geometry))
        return bool(cls.flatten or cls.varlen)


_RUNNERS: weakref.WeakValueDictionary[Any, Runner] = weakref.WeakValueDictionary()


def _no_step_of_vllm(inputs: Inputs) -> torch.Tensor:
    """Requests shorter than their extension, since vLLM adds a step's tokens to those computed before, of which there
    would be fewer than none; and all, where none is extended, since vLLM then runs no step."""
    extended = (inputs.extend_lens > 0) & (inputs.req_pool_indices != PAD_REQUEST)
    return (inputs.seq_lens < inputs.extend_lens) | ~extended.any()


class Decode(_Step):
    """Contract 1.1."""

    name = "vllm:decode"

    @classmethod
    def _query(cls, geometry: Geometry) -> int:
        return 1

    def _lengths(self) -> list[tuple[int, int]]:
        return [(length - 1, 1) for length in self._inputs.seq_lens.tolist()]


class TargetVerify(_Step):
    """Contract 1.2, laid out as vLLM decides: one row a request where the kernels take N query tokens of it."""

    name = "vllm:target_verify"

    def _lengths(self) -> list[tuple[int, int]]:
        return [(length, self._geometry.draft_tokens) for length in self._inputs.seq_lens.tolist()]


class TargetVerifyFlat(TargetVerify):
    """One row a query token, made by the kernel for equal queries or, of a padded batch, by torch."""

    name = "vllm:target_verify_flat"
    flatten, varlen = True, False


class TargetVerifyVarlen(TargetVerify):
    """One row a query token, made by the kernel that asks the device for the queries."""

    name = "vllm:target_verify_varlen"
    flatten, varlen = False, True


class DraftExtend(_Step):
    """Contract 1.3: one row a query token, since requests may extend by different numbers of them."""

    name = "vllm:draft_extend"
    flatten, varlen = True, False

    @staticmethod
    def engine_form() -> EngineForm:
        return dataclasses.replace(_Step.engine_form(), outside=_no_step_of_vllm)

    def _lengths(self) -> list[tuple[int, int]]:
        pairs = zip(self._inputs.seq_lens.tolist(), self._inputs.extend_lens.tolist(), strict=True)
        return [(length - query, query) for length, query in pairs]


class DraftExtendVarlen(DraftExtend):
    """This prepares the same by the kernel that asks the device for the queries."""

    name = "vllm:draft_extend_varlen"
    flatten, varlen = False, True


class DraftExtendAdaptive(DraftExtend):
    """This prepares the same where the host knows only the sum of the queries, as with adaptive verification."""

    name = "vllm:draft_extend_adaptive"
    adaptive = True
