"""Every capture of a real CUDA graph keeps to these rules."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Final

# "global" would let an unsafe call of any thread (a poller, a watchdog, a server's worker) spoil the capture; "relaxed"
# would let this thread's own unsafe calls pass. What is captured runs on this thread, so its calls are refused.
CAPTURE_ERROR_MODE: Final = "thread_local"


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Inside, the collector frees nothing: a graph that it freed during a capture would invalidate it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
