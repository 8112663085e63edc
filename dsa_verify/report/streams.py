"""Standard streams that may end before the run does: what can no longer be printed is dropped, and the run goes on.

They go where standard output and error went when the run began, under descriptors of their own: a subject that closes
or redirects its own (os.close(1), sys.stdout.close()) does not silence the report.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, TextIO, cast

_FIRST_FD: Final = 200  # not the next one that a subject opens or closes


class _Lasting:
    """A stand-in for `stream`, which nobody may read to its end (`| head -1`), or whose disk may be full."""

    def __init__(self, stream: TextIO):
        self._private, self._name = False, "a stream"
        try:
            self._public_fd, self._name = stream.fileno(), stream.name
        except (OSError, ValueError):  # a test's, in memory
            self._stream = stream
        else:
            stream.flush()
            self._private = True
            private = fcntl.fcntl(self._public_fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
            self._stream = open(  # noqa: SIM115 (until `end`)
                private,
                "w",
                1 if stream.isatty() else -1,
                encoding=stream.encoding,
                errors=stream.errors,
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def close(self) -> None:
        """It is not the subject's to close."""
        self.flush()

    def fileno(self) -> int:
        """Return the number of the standard stream, which a subject may do with as it likes."""
        return self._public_fd if self._private else self._stream.fileno()

    def end(self) -> None:
        self.flush()
        if self._private:
            with contextlib.suppress(OSError):
                self._stream.close()

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            # What is left in the buffer goes there, too, so that the interpreter does not fail for it at its end.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if error.errno != errno.EPIPE and sys.stderr is not None:
                print(f"dsa-verify: {self._name} ends here: {error.strerror}", file=sys.stderr)


_report: TextIO | None = None


def report_stream() -> TextIO | None:
    """Return where a report goes, whatever sys.stdout is by now; None, for sys.stdout, outside `lasting_streams`."""
    return _report


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """Make standard output and error, where there are such, into streams whose end is no error."""
    global _report
    streams = sys.stdout, sys.stderr
    lasting = [None if stream is None else _Lasting(stream) for stream in streams]
    out, err = (cast(TextIO, each) for each in lasting)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            _report = out
            yield
        finally:
            _report = None
            for stream in lasting:
                if stream is not None:
                    stream.end()
