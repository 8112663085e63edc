"""What several test files need: the device, an eager decode subject made from scratch, and the short way to a setup."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.subject import Buffers, Inputs, SubjectFactory
from dsa_verify.graphs import Backend, open_backend
from dsa_verify.replay.replayer import Replayer
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.systems.catalogue import SYSTEMS

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
# For parameters that only vary what others show too, where Triton is interpreted.
slow_on_cpu = [pytest.mark.slow] if DEVICE.type == "cpu" else []
SMALL = {"context": 37, "request_rows": 9, "topk": 8}


def backend() -> Backend:
    return open_backend(DEVICE)


def small(system: str = "decode", /, **changes: object) -> Geometry:
    """`tiny`, smaller still: rounds of the eager subject take a millisecond."""
    return SYSTEMS[system].geometry("tiny", {**SMALL, **changes})


def setup_of(
    subject: str | SubjectFactory | None = None,
    *,
    system: str = "decode",
    buckets: tuple[int, ...] = (4, 2),
    fault: str | None = None,
    geometry: Geometry | None = None,
) -> ReplaySetup:
    return ReplaySetup.make(SYSTEMS[system], geometry or small(system), buckets, 0, subject, fault, backend())


def open_replayer(subject: SubjectFactory, rounds: int = 8, **rest: object) -> Replayer:
    return setup_of(subject, **rest).open(rounds)  # type: ignore[arg-type]


def decode_round(bucket: int, *seq_lens: int, **rest: object) -> Round:
    """Request b + 1 in batch row b."""
    requests = tuple(range(1, len(seq_lens) + 1))
    return Round(bucket=bucket, seq_lens=seq_lens, requests=requests, **rest)  # type: ignore[arg-type]


class EagerDecode:
    """Contract 1.1 in a dozen torch operations, all in the graph."""

    name = "eager"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        self.geometry, self.inputs, self.out = geometry, inputs, self.outputs_of(buffers)
        for name in ("cu_seqlens_q", "dsa_cu_seqlens_q"):
            self.out[name].copy_(torch.arange(self.out[name].numel()))

    def outputs_of(self, buffers: Buffers) -> dict[str, torch.Tensor]:
        return dict(buffers)

    def before_replay(self) -> None:
        pass

    def in_graph(self) -> None:
        geometry, inputs, out = self.geometry, self.inputs, self.out
        lengths = inputs.seq_lens.to(torch.int32)
        dsa = lengths.clamp(max=geometry.topk)
        out["cache_seqlens_int32"].copy_(lengths)
        out["dsa_cache_seqlens_int32"].copy_(dsa)
        for name, values in (("cu_seqlens_k", lengths), ("dsa_cu_seqlens_k", dsa)):
            out[name][:1].zero_()
            out[name][1:].copy_(values.cumsum(0))
        slots = inputs.req_to_token[inputs.req_pool_indices.long(), : geometry.columns]
        out["page_table_1"].copy_(slots)
        out["real_page_table"].copy_(slots[:, :: geometry.page_size] // geometry.page_size)
