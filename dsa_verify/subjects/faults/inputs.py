"""Faults that give the wrapped subject inputs other than this round's, or spoil the inputs themselves."""

from __future__ import annotations

import dataclasses

from dsa_verify.contract.subject import Inputs
from dsa_verify.subjects.faults.wrapper import Wrapper


class StaleRequestMap(Wrapper):
    def inputs_for_inner(self, inputs: Inputs) -> Inputs:
        self._requests = inputs.req_pool_indices.clone()
        return dataclasses.replace(inputs, req_pool_indices=self._requests)

    def in_graph(self) -> None:
        self.inner.in_graph()
        self._requests.copy_(self.inputs.req_pool_indices)


class FrozenAtCapture(Wrapper):
    def inputs_for_inner(self, inputs: Inputs) -> Inputs:
        return dataclasses.replace(inputs, seq_lens=inputs.seq_lens.clone())


class InputOverwritten(Wrapper):
    def in_graph(self) -> None:
        self.inner.in_graph()
        self.inputs.seq_lens.add_(1)
