"""Serves a few steps as SGLang's scheduler process would, with classes of its names, and says how it ended.

python serve_sglang.py [clean | rebound | wrong | raises | dump] [STEPS]
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sglang.srt.model_executor.model_runner as model_runner
import torch
from sglang.srt.plugins import load_plugins

load_plugins()  # before anything of the model is made, as a scheduler process does

from serving_loop import ServingLoop  # noqa: E402
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend  # noqa: E402
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend  # noqa: E402
from support import EagerDecode, backend, small  # noqa: E402

from dsa_verify.buffers.arena import Arena  # noqa: E402
from dsa_verify.contract.geometry import Geometry  # noqa: E402
from dsa_verify.systems.catalogue import get_system  # noqa: E402

BUCKET = 4


class Mode:
    def is_decode_or_idle(self) -> bool:
        return True

    def is_target_verify(self) -> bool:
        return False


class Server:
    """A target model of one rank."""

    def __init__(self, geometry: Geometry):
        model_runner.ModelRunner(rank=0)
        made = ServingLoop(
            EagerDecode, system="decode", geometry=geometry, bucket=BUCKET, backend=backend(), graph=False
        )
        self.loop, self.geometry = made, geometry
        self.backend = DeepseekSparseAttnBackend(geometry, made.inputs.req_to_token, self._make, BUCKET)
        self.graphs = FullCudaGraphBackend(backend().capture)
        self.read: list[torch.Tensor] = []

    def _make(self, bucket: int, batch: Any) -> Any:
        layout = get_system("decode").layout(self.geometry, bucket)
        subject, buffers = EagerDecode(), Arena([layout], self.loop.device, fill=0).at(bucket)
        subject.allocate(self.geometry, self.loop.inputs, buffers)
        return dict(buffers), subject.in_graph

    def batch(self, raw: int) -> SimpleNamespace:
        inputs = self.loop.inputs
        return SimpleNamespace(
            batch_size=BUCKET,
            num_padding=BUCKET - raw,
            forward_mode=Mode(),
            seq_lens=inputs.seq_lens,
            req_pool_indices=inputs.req_pool_indices,
        )

    def capture(self) -> None:
        self.backend.init_forward_metadata_out_graph(self.batch(BUCKET), in_capture=True)
        lens = self.backend.forward_metadata.cache_seqlens_int32
        seen = torch.zeros_like(lens)
        self.read.append(seen)
        self.graphs.capture_one(BUCKET, lambda: seen.copy_(lens))

    def step(self, raw: int, change: str = "") -> None:
        self.loop.step(raw)
        self.backend.init_forward_metadata_out_graph(self.batch(raw))
        record = self.backend.forward_metadata
        if change == "rebound":
            record.cache_seqlens_int32 = record.cache_seqlens_int32.clone()
        self.graphs.replay(BUCKET, None)


def main() -> None:
    what, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 40
    server = Server(small(request_rows=30, table_width=68, token_table_width=68))
    server.capture()
    for step in range(steps):
        if what == "raises" and step == 2:
            server.backend.req_to_token = None  # nothing of the engine's own needs it from here on
        if what == "dump" and step == 20:
            (Path("found") / "dump").touch()
        if what == "wrong" and step == 3:
            _corrupt(server)
        server.step(1 + step % BUCKET, what)
    if what != "rebound":  # then the graph reads memory that nobody writes any more
        assert torch.equal(server.read[0], server.loop.inputs.seq_lens.int())
    print("served", steps)


def _corrupt(server: Server) -> None:
    fill = server.backend._fill[BUCKET]

    def wrong() -> None:
        fill()
        server.backend.decode_cuda_graph_metadata[BUCKET].real_page_table[0, 0] += 1

    server.backend._fill[BUCKET] = wrong


main()
