"""The oracle of ragged_verify over buffers of its own, for tests that choose every length."""

from __future__ import annotations

import numpy as np
import torch
from engine_inputs import input_of, slots_of
from referees.ragged import expected_ragged
from support import DEVICE

from dsa_verify.buffers.arena import GUARD_WORD, TORCH_DTYPES, Arena
from dsa_verify.buffers.region import LOUD_WORD
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.subject import Inputs, Subject
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.systems.ragged_verify import ragged_verify
from oracles.ragged_verify import RaggedVerifyOracle

RAGGED = SYSTEMS["ragged_verify"]


class Bench:
    """One subject or oracle over one bucket, eagerly, with inputs as an engine pads them."""

    def __init__(self, subject: Subject, geometry: Geometry, bucket: int):
        self.subject, self.geometry, self.bucket = subject, geometry, bucket
        self.slots = slots_of(geometry)
        dtype = TORCH_DTYPES[geometry.index_dtype]
        self.inputs = Inputs.of(
            {
                "seq_lens": input_of(geometry, (bucket,), dtype)[0],
                "req_pool_indices": input_of(geometry, (bucket,), dtype)[0],
                "req_to_token": torch.from_numpy(self.slots.astype(np.int32)).to(DEVICE),
                "verify_lens": input_of(geometry, (bucket,), torch.int32)[0],
            }
        )
        layout = ragged_verify(geometry, bucket)
        self.arena = Arena(
            [layout.for_oracle() if isinstance(subject, RaggedVerifyOracle) else layout], DEVICE, LOUD_WORD
        )
        self.buffers = self.arena.at(bucket)
        subject.allocate(geometry, self.inputs, self.buffers)

    def replay(self, round_: Round) -> dict[str, np.ndarray]:
        pads = self.bucket - round_.raw_batch
        self.round = round_
        self.seq_lens, self.requests = (*round_.seq_lens, *[1] * pads), (*round_.requests, *[0] * pads)
        values = {
            "seq_lens": self.seq_lens,
            "req_pool_indices": self.requests,
            "verify_lens": (*(round_.lens.get("verify_lens", ())), *[0] * pads),
        }
        for name, tensor in self.inputs.tensors().items():
            if name in values:
                tensor.copy_(torch.tensor(values[name], dtype=tensor.dtype))
        self.subject.in_graph()
        assert all(bool((guard.words == GUARD_WORD).all()) for guard in self.arena.guards)
        return {name: tensor.cpu().numpy().copy() for name, tensor in self.buffers.items()}

    def expected(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The referee's word on the last replay."""
        verify_lens, tokens = self.round.lens.get("verify_lens", ()), self.buffers.layout.tokens
        lists = (self.seq_lens, self.requests, verify_lens)
        return expected_ragged(self.geometry, *lists, self.slots, self.bucket, tokens)
