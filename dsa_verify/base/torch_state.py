"""TorchState: what of torch holds for the whole process, which a subject must leave as it found it.

A changed default dtype or an entered mode would change what the oracle and the judge compute, and look like a broken
oracle. It is noted before the subject works, compared afterwards, and put back.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

# Leaving inference mode is not possible from outside of the guard that entered it, so that another is entered; it must
# live as long as the process.
_GUARDS: Final[list[Any]] = []


@dataclasses.dataclass(frozen=True, slots=True)
class TorchState:
    """The settings of torch that belong to the whole process, by name.

    `stream` is the current CUDA stream and `cuda_device` the current CUDA device; both are None where CUDA is not in
    use.
    """

    default_dtype: torch.dtype
    default_device: torch.device
    grad_mode: bool
    inference_mode: bool
    deterministic_algorithms: bool
    cuda_device: int | None
    stream: torch.cuda.Stream | None
    function_modes: tuple[object, ...]
    dispatch_modes: tuple[object, ...]

    @classmethod
    def now(cls) -> TorchState:
        """Return the settings as they are; it takes a few microseconds and does not synchronise."""
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            default_dtype=torch.get_default_dtype(),
            default_device=torch.get_default_device(),
            grad_mode=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
            cuda_device=torch.cuda.current_device() if cuda else None,
            stream=torch.cuda.current_stream() if cuda else None,
            function_modes=tuple(_get_current_function_mode_stack()),
            dispatch_modes=tuple(_get_current_dispatch_mode_stack()),
        )

    def put_back(self) -> str:
        """Put all settings back as they were noted, and say in words what had changed ("" if nothing had)."""
        now = self.now()
        changes = [] if now == self else self._changes(now)
        if changes:
            self._restore(now)
        return "; ".join(changes)

    def _changes(self, now: TorchState) -> list[str]:
        changes: list[str] = []
        for field in dataclasses.fields(self):
            old, new = getattr(self, field.name), getattr(now, field.name)
            # The default device is a function mode, too, and CUDA may have been initialised only now.
            told = changes and field.name == "function_modes" and self.default_device != now.default_device
            if old != new and not told and not (old is None and field.name in ("cuda_device", "stream")):
                changes.append(f"{field.name.replace('_', ' ')} from {_shown(old)} to {_shown(new)}")
        return changes

    def _restore(self, now: TorchState) -> None:
        if now.default_device != self.default_device:
            torch.set_default_device(None if self.default_device == torch.device("cpu") else self.default_device)
        while len(_get_current_function_mode_stack()) > len(self.function_modes):
            torch._C._pop_torch_function_stack()
        while len(_get_current_dispatch_mode_stack()) > len(self.dispatch_modes):
            _pop_mode()
        torch.set_default_dtype(self.default_dtype)
        torch.set_grad_enabled(self.grad_mode)
        if now.inference_mode != self.inference_mode:
            _GUARDS.append(torch.inference_mode(self.inference_mode))
            _GUARDS[-1].__enter__()
            torch.set_grad_enabled(self.grad_mode)
        if now.deterministic_algorithms != self.deterministic_algorithms:
            torch.use_deterministic_algorithms(self.deterministic_algorithms)
        if self.cuda_device is not None and self.stream is not None:
            torch.cuda.set_device(self.cuda_device)
            torch.cuda.set_stream(self.stream)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " and ".join(type(each).__name__ for each in value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
