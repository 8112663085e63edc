"""Serves a few steps with vLLM's own loader and its own builder of the sparse indexer's metadata, on a CPU with the
stand-ins of the adapter (docs/engines-vllm.md); what owns the graphs is that in miniature.

    python serve_real_vllm.py [decode | flat | varlen] [clean | rebound]
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from support import small

from dsa_verify.graphs import open_backend
from dsa_verify.subjects.adapters.vllm import wheel
from dsa_verify.subjects.adapters.vllm.runner import BACKEND, INDEXER, Request, Runner

MINI = Path(__file__).parents[1] / "support" / "mini_engines" / "vllm"
BATCHES = (4, 2)


class Mode(enum.Enum):
    FULL = 2


class Desc:
    cg_mode = Mode.FULL

    def __init__(self, requests: int):
        self.requests = requests

    def __repr__(self) -> str:
        return f"{self.requests} requests"


def load(name: str, path: Path) -> ModuleType:
    """Make the file at `path` the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    form, what = sys.argv[1:]
    wheel.require(BACKEND)  # from here on vLLM can be imported
    own = Path(wheel.require(INDEXER).__file__ or "").parents[4]
    for name in ("forward_context", "compilation.cuda_graph", "v1.worker.gpu.cudagraph_utils", "v1.worker.worker_base"):
        load(f"vllm.{name}", MINI / f"{name.replace('.', '/')}.py")
    load("vllm.plugins", own / "plugins" / "__init__.py").load_general_plugins()
    sys.modules["vllm.v1.worker.worker_base"].WorkerWrapperBase().init_device()

    query = 1 if form == "decode" else 3
    geometry = small(request_rows=9)
    forms = {"decode": {}, "flat": {"flatten": True}, "varlen": {"flatten": True, "varlen": True}}
    runner = Runner(geometry, torch.device("cpu"), most_requests=4, query=query, drafts=query - 1, **forms[form])
    descs = {batch: Desc(batch) for batch in BATCHES}
    capture = open_backend(torch.device("cpu")).capture
    manager = sys.modules["vllm.v1.worker.gpu.cudagraph_utils"].ModelCudaGraphManager(descs.values(), capture)
    read = torch.zeros(16, dtype=torch.int32)
    held: dict[str, Any] = {}

    def forward() -> None:
        lens = held["metadata"].decode.seq_lens.flatten()
        read[: len(lens)].copy_(lens)

    def create(desc: Desc, warmup: bool) -> Any:
        held["metadata"] = runner.dummy_step(desc.requests)
        return forward

    manager.capture(create)
    for step in range(8):
        batch = BATCHES[step % 2]
        live = range(1, 1 + max(batch - step % 3, 1))
        requests = [
            Request(row=row, computed=step + row, query=query, blocks=list(range(row, row + 9))) for row in live
        ]
        made = runner.step(requests, batch)
        if what == "rebound" and step == 5:
            made.decode.seq_lens = made.decode.seq_lens.clone()
        manager.run_fullgraph(descs[batch])
        if what == "clean":
            assert torch.equal(read[: made.decode.seq_lens.numel()], made.decode.seq_lens.flatten())
    print("served")


main()
