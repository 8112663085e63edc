"""OwnStream: how an overlay works beside a server on the same device: a stream, graphs and a memory pool of its own.

On the server's stream nothing but copies of what it holds happens; what is compared is compared on another stream,
while the server goes on. Only `capture` and `synchronise` wait on the host: they belong to start-up and end.
On a CPU all of it is a plain call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch

from dsa_verify.base.errors import HarnessError
from dsa_verify.graphs.capturing import CAPTURE_ERROR_MODE, no_collection

_RAW_BITS = 16  # of a batch of 16,384 at most; the number has the other 47


class OwnStream:
    """Work of the overlay on `device`."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = device.type == "cuda"
        self._kept: list[object] = []
        if self.cuda:
            # First in line: each of its many small kernels would otherwise wait for a large one of the server.
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._pool = torch.cuda.graph_pool_handle()
            self._taken, self._done = torch.cuda.Event(), torch.cuda.Event()
            self._done.record(self._stream)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Return `body` as a graph of this pool, run once before; synchronises. Replays must follow one another."""
        if not self.cuda:
            return body
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream), torch.no_grad():
            body()  # kernels compile outside the capture; who calls undoes what this wrote
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with no_collection():
                graph.capture_begin(pool=self._pool, capture_error_mode=CAPTURE_ERROR_MODE)
                try:
                    body()
                except Exception as error:
                    raise HarnessError(f"the overlay's own work cannot be captured: {error}") from error
                finally:
                    graph.capture_end()
        # A graph holds bare addresses: what its body refers to must live as long as the graph.
        self._kept.append((body, graph))
        return graph.replay

    def reason_not_to_run(self) -> str | None:
        """Say why nothing may be launched now; None if it may."""
        if not self.cuda:
            return None
        if torch.cuda.is_current_stream_capturing():
            return "the server was capturing a graph on this stream; put the hook where it replays"
        if torch.cuda.current_device() != self.device.index:
            return f"the current device is {torch.cuda.current_device()}, the buffers are on {self.device.index}"
        return None

    def before_taking(self) -> torch.cuda.Stream | None:
        """Return the server's stream, which waits until the copies of the check before have been judged: a wait on the
        device.

        None on a CPU. Who takes hands it to `after_taking`: looking it up again costs as much as a launch.
        """
        if not self.cuda:
            return None
        server = torch.cuda.current_stream(self.device)
        server.wait_event(self._done)
        return server

    def after_taking(self, server: torch.cuda.Stream | None, judge: Callable[[], None]) -> None:
        """Let `judge` look at what `server`, the current stream, has just taken, beside whatever it does next."""
        if server is None:
            judge()
            return
        self._taken.record(server)
        self._stream.wait_event(self._taken)
        # torch.cuda.stream() would do the same for five times the price, and the current device is known to be ours.
        torch.cuda.set_stream(self._stream)
        try:
            judge()
        finally:
            torch.cuda.set_stream(server)
        self._done.record(self._stream)

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Launches inside go to the overlay's own stream."""
        if not self.cuda:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def synchronise(self) -> None:
        """Wait until everything that was launched here has ended."""
        if self.cuda:
            self._stream.synchronize()


class Mailbox:
    """Copies of device `tensors` on the host, by the same names: `ask`, and later they are `ready`.

    The memory on the host is pinned and allocated here, once.
    """

    def __init__(self, stream: OwnStream, tensors: Mapping[str, torch.Tensor]):
        self._stream, self._tensors = stream, dict(tensors)
        self.host = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=stream.cuda)
            for name, tensor in self._tensors.items()
        }
        self._sent = torch.cuda.Event() if stream.cuda else None
        self.asked = False

    def ask(self) -> None:
        """Send everything as it will be when the work launched so far has ended; asynchronous."""
        with self._stream.own():
            for name, tensor in self._tensors.items():
                self.host[name].copy_(tensor, non_blocking=True)
            if self._sent is not None:
                self._sent.record(torch.cuda.current_stream(self._stream.device))
        self.asked = True

    def ready(self, *, wait: bool = False) -> bool:
        """Return whether what was asked for is there; with `wait` it is. Nothing is there before it was asked for."""
        if not self.asked:
            return False
        if self._sent is not None:
            if wait:
                self._sent.synchronize()
            elif not self._sent.query():
                return False
        self.asked = False
        return True


class Facts:
    """The host says this of each check: its `number` and the `raw` batch, int64 [1] each, parts of `tensor`."""

    NUMBER, RAW = 0, 1

    def __init__(self, device: torch.device):
        self.tensor = torch.zeros(2, dtype=torch.int64, device=device)
        self.number, self.raw = self.tensor[self.NUMBER].view(1), self.tensor[self.RAW].view(1)
        self._said = torch.zeros(1, dtype=torch.int64, device=device)

    def send(self, number: int, raw: int) -> None:
        """Send both onto the current stream, without waiting: they travel in the argument of one small kernel."""
        self._said.fill_(number << _RAW_BITS | raw)

    def read(self) -> None:
        """Make `tensor` say what was sent last; capturable, and the first thing in a graph that looks at it."""
        torch.bitwise_right_shift(self._said, _RAW_BITS, out=self.number)
        torch.bitwise_and(self._said, (1 << _RAW_BITS) - 1, out=self.raw)
