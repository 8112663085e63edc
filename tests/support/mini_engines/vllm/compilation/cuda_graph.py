"""The graphs of the first model runner."""

from types import SimpleNamespace

from vllm.forward_context import get_forward_context


class CUDAGraphWrapper:
    def __init__(self, runnable, runtime_mode, capture):
        self.runnable, self.runtime_mode, self._capture = runnable, runtime_mode, capture
        self.concrete_cudagraph_entries = {}

    def __call__(self):
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.runtime_mode:
            return self.runnable()
        key = context.batch_descriptor
        entry = self.concrete_cudagraph_entries.setdefault(key, SimpleNamespace(cudagraph=None))
        if entry.cudagraph is None:
            entry.cudagraph = self._capture(self.runnable)
        else:
            entry.cudagraph.replay()
