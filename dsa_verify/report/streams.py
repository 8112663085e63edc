"""Standard streams that may end before the run does: what can no longer be printed is dropped, and the run goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast


class _Lasting:
    """`stream`, which nobody may read to its end (`| head -1`), or whose disk may be full."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            # What is left in the buffer goes there, too, so that the interpreter does not fail for it at its end.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if error.errno != errno.EPIPE and sys.stderr is not None:
                print(f"dsa-verify: {self._stream.name} ends here: {error.strerror}", file=sys.stderr)


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """Standard output and error, where there are such, as streams whose end is no error."""
    streams = sys.stdout, sys.stderr
    out, err = (None if stream is None else cast(TextIO, _Lasting(stream)) for stream in streams)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            for stream in (out, err):
                if stream is not None:
                    stream.flush()
