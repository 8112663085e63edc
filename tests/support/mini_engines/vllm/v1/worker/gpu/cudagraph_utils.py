"""The graphs of the second model runner."""


class CudaGraphManager:
    def __init__(self, descs, capture):
        self.descs, self._capture, self.graphs = descs, capture, {}

    def capture(self, create_forward_fn, progress_bar_desc="Capturing"):
        for desc in self.descs:
            create_forward_fn(desc, warmup=True)()
            self.graphs[desc] = self._capture(create_forward_fn(desc, warmup=False))

    def run_fullgraph(self, desc):
        self.graphs[desc].replay()


class ModelCudaGraphManager(CudaGraphManager):
    def capture(self, create, progress_bar_desc="Capturing"):
        super().capture(create, progress_bar_desc)

    def run_fullgraph(self, desc):
        super().run_fullgraph(desc)
        return desc
