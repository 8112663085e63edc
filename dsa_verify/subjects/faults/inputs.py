"""Faults that give the wrapped subject inputs other than this round's, or spoil the inputs themselves."""

from __future__ import annotations

import dataclasses

from dsa_verify.contract.finding import Diagnosis as D
from dsa_verify.contract.subject import Inputs
from dsa_verify.subjects.faults.fault import ALL, fault, spoils
from dsa_verify.subjects.faults.wrapper import Wrapper


@fault("stale_request_map", "requests are those of the round before", D.REQUEST_MAP, D.STALE, D.FROZEN)
class StaleRequestMap(Wrapper):
    def inputs_for_inner(self, inputs: Inputs) -> Inputs:
        self._requests = inputs.req_pool_indices.clone()
        return dataclasses.replace(inputs, req_pool_indices=self._requests)

    def in_graph(self) -> None:
        self.inner.in_graph()
        self._requests.copy_(self.inputs.req_pool_indices)


@fault("frozen_at_capture", "lengths are those at capture", D.FROZEN, D.STALE)
class FrozenAtCapture(Wrapper):
    def inputs_for_inner(self, inputs: Inputs) -> Inputs:
        return dataclasses.replace(inputs, seq_lens=inputs.seq_lens.clone())


@spoils("input_overwritten", "the lengths are advanced in place", D.INPUT_OVERWRITTEN, anywhere=True)
def input_overwritten(wrapped: Wrapper) -> None:
    wrapped.inputs.seq_lens.add_(1)


@fault(
    "tail_not_reset",
    "pad rows of one input keep what larger batches left there",
    D.TAIL_NOT_RESET,
    field="seq_lens",
    systems=ALL,
    of_input=True,
    anywhere=True,
)
class TailNotReset(Wrapper):
    """The engine forgets the input; the subject itself is right."""
