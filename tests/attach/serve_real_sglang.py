"""Serves a few steps with SGLang's own loader, DSA or V4 backend and graph class, on a CPU with the stand-ins of the
adapter (docs/engines.md); the graphs themselves are stood in for.

    python serve_real_sglang.py [decode | target_verify | v4] [clean | rebound | wrong]
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import torch

from dsa_verify.contract.round import Round
from dsa_verify.graphs import open_backend
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.adapters.sglang import backend, backend_engine, backend_stubs
from dsa_verify.subjects.adapters.sglang.backend_padded import PaddedBackend
from dsa_verify.systems.catalogue import get_system

SYSTEM, WHAT = sys.argv[1:]
TINY = {"context": 61, "request_rows": 9, "topk": 8, "token_table_width": 61}
SIZES = {
    # As wide as SGLang's own table is beyond the context.
    "decode": ("tiny", {**TINY, "context": 60, "table_width": 61}),
    "target_verify": ("tiny", {**TINY, "context": 58, "table_width": 61, "draft_tokens": 3}),
    "v4": ("deepseek_v4", {"context": 603, "request_rows": 9, "draft_tokens": 3, "padded_mode": "verify"}),
}
SUBJECTS = {"decode": backend.DecodeBackend, "target_verify": backend.TargetVerifyBackend, "v4": PaddedBackend}
ROUNDS = [
    Round(bucket=4, seq_lens=(9, 33, 17), requests=(3, 4, 5)),
    Round(bucket=2, seq_lens=(31, 5), requests=(7, 8)),
    Round(bucket=4, seq_lens=(20, 1, 12, 3), requests=(7, 8, 1, 3), remap=(8,), poison="stale"),
    Round(bucket=4, seq_lens=(21, 2), requests=(7, 8), poison="stale"),
]


class Graph:
    """Stands for a graph that has been captured."""

    def replay(self) -> None:
        """Do nothing."""


def load() -> Any:
    """Load plugins as a process with a model does, and return SGLang's class of graphs."""
    with backend_stubs.absent_packages(cpu=True):
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
        from sglang.srt.plugins import load_plugins

        ModelRunner.__init__ = lambda self: None  # no model is loaded here
        load_plugins()
        ModelRunner()
    return FullCudaGraphBackend


def graphs_of(kind: Any) -> Any:
    """SGLang's own object, without a device."""
    made = object.__new__(kind)
    made.__dict__.update(
        _graphs={},
        _outputs={},
        _pool=None,
        _cuda_graph_runner=SimpleNamespace(),
        _device_module=SimpleNamespace(synchronize=lambda: None, graph=lambda **_: contextlib.nullcontext()),
        _tp_group=SimpleNamespace(barrier=lambda: None),
        _capture_stream=None,
        _precarve=SimpleNamespace(measure=contextlib.nullcontext, mint=lambda: None),
        _reuse_output_buffer=False,
        _output_buffer=None,
        _memory_saver_adapter=None,
    )
    return made


def main() -> None:
    kind = load()
    torch.cuda.CUDAGraph = Graph  # type: ignore[misc,assignment]
    graphs = graphs_of(kind)
    refresh, replays = backend_engine.Engine.refresh, 0

    def refreshed(self: Any, batch: Any, *, in_capture: bool) -> None:
        """What SGLang's runner does around the hook of its backend."""
        nonlocal replays
        refresh(self, batch, in_capture=in_capture)
        record = self.backend.forward_metadata
        if in_capture:
            graphs.capture_one(batch.batch_size, lambda: None)
            return
        replays += 1
        if WHAT == "rebound" and replays == 3:
            name = "seq_lens" if SYSTEM == "v4" else "real_page_table"
            object.__setattr__(record, name, getattr(record, name).clone())
        graphs.replay(batch.batch_size, None)

    if WHAT == "wrong":
        from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend as Backend

        apply = Backend._apply_cuda_graph_metadata

        def wrong(self: Any, **given: Any) -> None:
            apply(self, **given)
            self.forward_metadata.real_page_table[0, 0] += 1

        Backend._apply_cuda_graph_metadata = wrong
    backend_engine.Engine.refresh = refreshed  # type: ignore[method-assign]
    system = get_system("padded" if SYSTEM == "v4" else SYSTEM)
    preset, sizes = SIZES[SYSTEM]
    geometry = system.geometry(preset, sizes)
    setup = ReplaySetup.make(system, geometry, (4, 2), 0, SUBJECTS[SYSTEM], None, open_backend(torch.device("cpu")))
    verify_rounds(setup, [setup.table(ROUNDS)], Counts(), folder=None)
    assert replays >= len(ROUNDS)
    print("served")


main()
