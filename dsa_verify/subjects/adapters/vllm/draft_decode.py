"""vLLM's own metadata of a draft model's decode step, refreshed inside the graph (contract 1.1).

Before the replay, what the target's step leaves: block tables, and the lengths and positions that the first draft step
starts from. In the graph, what each draft step begins with: its slots, and the indexer's metadata updated in place.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from dsa_verify.contract.engine_form import EngineForm
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.subjects.adapters.vllm import runner, wheel
from dsa_verify.subjects.adapters.vllm.basic import Decode

SPECULATOR: Final = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"
DRAFTS: Final = 3  # of the engine; more than one, so that the indexer keeps lengths of its own
REJECTED: Final = (0, 1, 2)  # drafts that the target rejected, in turn


class DraftDecode(Decode):
    """One draft step of each live request, one token a request."""

    name = "vllm:draft_decode"

    @staticmethod
    def provenance() -> dict[str, str]:
        return Decode.provenance() | wheel.provenance(SPECULATOR)

    @staticmethod
    def engine_form() -> EngineForm:
        # The indexer of a speculating engine has lengths of its own, beside those of the batch.
        form = Decode.engine_form()
        own = {"dsa_seqlens_expanded": None, "paged_mqa_ctx_lens_2d": "dsa_seqlens_expanded"}
        return dataclasses.replace(form, aliases={**form.aliases, **own})

    @classmethod
    def _drafts(cls, geometry: Geometry) -> int:
        return DRAFTS

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        state, device = self._runner, inputs.seq_lens.device
        self._prepare = wheel.attribute(SPECULATOR, "prepare_decode_inputs")
        # Where a draft model keeps the states of its requests; -1: a row that it must not touch.
        self._idx_mapping = torch.full((self._batch,), -1, dtype=torch.int64, device=device)
        self._sampled_at = torch.zeros(state.states, dtype=torch.int64, device=device)

    def before_replay(self) -> None:
        requests, state = self._requests(), self._runner
        live = len(requests)
        rows = state.write_states(requests)
        state.gather(rows, self._batch)
        self._idx_mapping.fill_(-1)
        self._idx_mapping[:live].copy_(rows)
        rejected = [REJECTED[row % len(REJECTED)] for row in range(live)]
        lengths = [request.computed + many for request, many in zip(requests, rejected, strict=True)]
        device = self._inputs.seq_lens.device
        # Where the last token lies that the target has kept; the draft step goes one further.
        last = torch.tensor([request.computed - 1 for request in requests], dtype=torch.int64)
        state.buffers.positions[:live].copy_(last)
        self._prepare(
            torch.zeros(live, dtype=torch.int64, device=device),
            torch.tensor(lengths, dtype=torch.int32).to(device),
            torch.tensor(rejected, dtype=torch.int32).to(device),
            state.buffers,
            self._sampled_at,
            state.most_length,
            state.states,
        )

    def in_graph(self) -> None:
        buffers, batch = self._runner.buffers, self._batch
        self._runner.tables.compute_slot_mappings(
            self._idx_mapping, buffers.query_start_loc[: batch + 1], buffers.positions[:batch], batch
        )
        with runner.no_schedules():
            self._runner.builder.update_draft_decode_metadata(self._metadata)
        super().in_graph()
