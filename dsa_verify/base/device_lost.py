"""What tells a lost device from any other error that a device raises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from dsa_verify.base.errors import DeviceLost

_STICKY: Final = ("illegal memory access", "misaligned address", "device-side assert", "unspecified launch failure")


def raise_if_lost(error: BaseException) -> None:
    """Raise DeviceLost if `error` is one that no later call in this process survives."""
    text = str(error)
    if any(sign in text for sign in _STICKY):
        raise DeviceLost(
            f"the device reported: {text.splitlines()[0]}; this process can verify nothing more"
        ) from error


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Raise DeviceLost for what is raised inside and says that the device is lost; anything else passes through."""
    try:
        yield
    except RuntimeError as error:
        raise_if_lost(error)
        raise
