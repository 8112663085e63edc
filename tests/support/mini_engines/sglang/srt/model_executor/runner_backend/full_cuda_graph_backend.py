class FullCudaGraphBackend:
    """Keeps graphs by their shape."""

    def __init__(self, capture):
        self._capture, self._graphs = capture, {}

    def capture_one(self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None):
        self._graphs[shape_key] = self._capture(forward_fn)

    def replay(self, shape_key, static_forward_batch, **kwargs):
        self._graphs[shape_key].replay()
