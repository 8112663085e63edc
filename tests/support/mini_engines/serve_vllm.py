"""Serves a few steps as a worker of vLLM would, with classes of its names.

python serve_vllm.py [wrapper | manager] [clean | rebound | raises]
"""

from __future__ import annotations

import enum
import sys
from types import SimpleNamespace
from typing import Any

from vllm.plugins import load_general_plugins

load_general_plugins()
load_general_plugins()  # a loader may come by again

print("before a device", sorted(name for name in sys.modules if name.startswith("vllm.v1.attention.backends.")))

import torch  # noqa: E402
from support import backend  # noqa: E402
from vllm.compilation.cuda_graph import CUDAGraphWrapper  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder  # noqa: E402
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager  # noqa: E402
from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: E402

LENS = {"4 requests": [7, 8, 9, 10], "2 requests": [5, 6]}


class Mode(enum.Enum):
    FULL = 2


class Desc:
    def __init__(self, name: str, mode: Mode | None):
        self.name, self.cg_mode = name, mode

    def __repr__(self) -> str:
        return f"'{self.name}'"


class Runner:
    """What both model runners have in common. `what`: what goes wrong, if anything."""

    def __init__(self, what: str):
        made = backend()
        self.what, self.capture = what, made.capture
        self.builder = DeepseekV32IndexerMetadataBuilder(8, made.device)
        self.read = torch.zeros(8, dtype=torch.int32, device=made.device)
        self.metadata: Any = None

    def forward(self) -> None:
        lens = self.metadata.decode.seq_lens
        self.read[: len(lens)].copy_(lens)

    def prepare(self, name: str, number: int) -> None:
        self.metadata = self.builder.build(0, [length + number for length in LENS[name]])
        if self.what == "rebound" and number > 1:
            self.metadata.decode.seq_lens = self.metadata.decode.seq_lens.clone()


class WithWrapper(Runner):
    """As the first model runner."""

    def __init__(self, what: str):
        super().__init__(what)
        self.graphs = CUDAGraphWrapper(self.forward, Mode.FULL, self.capture)

    def step(self, name: str, number: int) -> None:
        self.prepare(name, number)
        layers: dict[str, Any] = {"layer.0": self.metadata, "layer.1": self.metadata}
        if self.what == "raises":
            layers = {"layer.0": "metadata without a tensor"}
        set_forward_context(
            SimpleNamespace(attn_metadata=layers, batch_descriptor=name, cudagraph_runtime_mode=Mode.FULL)
        )
        self.graphs()


class WithManager(Runner):
    """As the second model runner."""

    def __init__(self, what: str):
        super().__init__(what)
        mode = None if what == "raises" else Mode.FULL
        self.descs = {name: Desc(name, mode) for name in LENS}
        self.graphs = ModelCudaGraphManager(self.descs.values(), self.capture)
        self.graphs.capture(self.create)

    def create(self, desc: Desc, warmup: bool) -> Any:
        self.metadata = self.builder.build_for_cudagraph_capture(LENS[desc.name])
        return self.forward

    def step(self, name: str, number: int) -> None:
        self.prepare(name, number)
        assert self.graphs.run_fullgraph(self.descs[name]) is self.descs[name]


def main() -> None:
    runner, what = sys.argv[1:]
    WorkerWrapperBase().init_device()
    made = {"wrapper": WithWrapper, "manager": WithManager}[runner](what)
    for number in range(6):
        for name in LENS:
            made.step(name, number)
    print("served")


main()
