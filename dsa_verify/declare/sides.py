"""Sides: reference and subject of a declaration, as the subjects that the replayer captures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import live_rows_name
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.declare.declared import SHARED, Declared, Port
from dsa_verify.declare.sizes import Sizes


class Outputs:
    """The outputs of one side, an attribute each; what is assigned to one takes its place, which a run then finds."""

    _buffers: Buffers
    _names: tuple[str, ...]

    def __init__(self, buffers: Buffers, names: tuple[str, ...]):
        object.__setattr__(self, "_buffers", buffers)
        object.__setattr__(self, "_names", names)

    def __getattr__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise AttributeError(f"there is no output {name!r}; the outputs are {', '.join(self._names)}")
        return self._buffers[name]

    def __setattr__(self, name: str, tensor: torch.Tensor) -> None:
        getattr(self, name)
        self._buffers[name] = tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the tensors in the order of the declaration."""
        return (self._buffers[name] for name in self._names)


def inputs_of(declared: Declared, given: Mapping[str, torch.Tensor]) -> SimpleNamespace:
    """Return the inputs under the names of the declaration."""
    names = {port.name: SHARED.get(type(port.declared.draw), (port.name,))[0] for port in declared.ins}
    return SimpleNamespace(**{name: given[source] for name, source in names.items() if source in given})


class _Side:
    """One method of a declaration, on an instance of its own for each captured batch."""

    def __init__(self, declaration: type, declared: Declared, method: str):
        self.name, self._method = method, method
        self._declaration, self._declared = declaration, declared

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        self.sizes = self._declared.sizes(geometry, buffers.layout.bucket)
        self._instance = self._declaration()
        self._instance.sizes = self.sizes
        self._inputs = inputs_of(self._declared, inputs.tensors())
        self._outputs = Outputs(buffers, tuple(port.name for port in self._declared.outs))
        self._instance.setup(self._inputs, self._outputs)

    def before_replay(self) -> None:
        self._instance.prepare(self._inputs, self._outputs)

    def in_graph(self) -> None:
        made = getattr(self._instance, self._method)(self._inputs, self._outputs)
        if isinstance(made, Mapping):
            for name, value in made.items():
                self._copy(name, value)

    def _copy(self, name: str, value: torch.Tensor) -> None:
        output, where = getattr(self._outputs, name), f"{self._declared.where}.{self._method}: {name}"
        if tuple(value.shape) != tuple(output.shape):
            raise UsageError(f"{where} has shape {list(value.shape)}; it is declared as {list(output.shape)}")
        output.copy_(value)


class Judged(_Side):
    """What is judged, and with it the laws of its outputs."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self._laws = {name: buffers[name] for name in self._declared.laws}

    def in_graph(self) -> None:
        super().in_graph()
        for name, holds in self._laws.items():
            holds.copy_(
                _all(getattr(self._instance, name)(self._inputs, self._outputs), f"{self._declared.where}.{name}")
            )


class Reference(_Side):
    """What is right, and with it how much of each row a consumer reads."""

    may_run_eagerly = True

    def __init__(self, declaration: type, declared: Declared):
        super().__init__(declaration, declared, "reference")

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self._bounds = [
            (port, buffers[live_rows_name(port.name)]) for port in self._declared.outs if port.declared.live is not None
        ]
        self._laws = [buffers[name] for name in self._declared.laws]
        # A rule under which nothing is ever read would make anything right.
        names = (*self._declared.sometimes, *(_read(port) for port, _ in self._bounds))
        self._occurred = {name: torch.zeros((), dtype=torch.bool, device=inputs.seq_lens.device) for name in names}
        check_reference(self, self._declared, buffers)

    def before_replay(self) -> None:
        """Do nothing: a reference has no eager work."""

    def in_graph(self) -> None:
        super().in_graph()
        for port, bounds in self._bounds:
            bounds.copy_(_live(self._declared, port, self.sizes, self._inputs, bounds))
            self._occurred[_read(port)].logical_or_((bounds > 0).any())
        for holds in self._laws:
            holds.fill_(1)
        for name, occurs in self._declared.sometimes.items():
            self._occurred[name].logical_or_(occurs(self.sizes, self._inputs).any())

    def forget(self) -> None:
        """Forget what has occurred."""
        for seen in self._occurred.values():
            seen.zero_()

    def occurred(self) -> dict[str, bool]:
        """Return by what must occur, whether it has; synchronises."""
        return {name: bool(seen) for name, seen in self._occurred.items()}


def _read(port: Port) -> str:
    """Return what must occur of an output with a live rule."""
    return f"something of {port.name} is read"


def _live(declared: Declared, port: Port, sizes: Sizes, inputs: SimpleNamespace, bounds: torch.Tensor) -> torch.Tensor:
    """Return the live columns of each row of an output. UsageError for a rule that gives something else."""
    where = f"{declared.where}.{port.name}: live"
    found = port.declared.live(sizes, inputs)
    if not isinstance(found, torch.Tensor) or found.device != bounds.device:
        got = f"a tensor on {found.device}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
        raise UsageError(f"{where} gives {got}; compute it of the inputs, on {bounds.device}")
    rows = bounds.shape[0]
    if found.dim() == 1 and found.shape[0] == sizes.B and rows == sizes.T:
        found = found.repeat_interleave(sizes.T // sizes.B)
    if tuple(found.shape) != (rows,) or found.dtype.is_floating_point:
        raise UsageError(
            f"{where} gives {str(found.dtype).removeprefix('torch.')} {list(found.shape)}; it must be an integer for "
            f"each of the {rows} rows, or for each of the {sizes.B} requests"
        )
    return found


def _all(holds: object, where: str) -> torch.Tensor:
    """Return whether a law holds of everything. UsageError for a law that gives no tensor."""
    if not isinstance(holds, torch.Tensor):
        raise UsageError(
            f"{where}: a law gives a {type(holds).__name__}; return a bool tensor, and read nothing on the host"
        )
    return holds.all()


# A reference is believed after this ----------------------------------------------------------------------------------

_FILLS: Final = (0x5A5A5A5A, 0x3C3C3C3C)


def check_reference(reference: Reference, declared: Declared, buffers: Buffers) -> None:
    """Run `reference` twice, over outputs that hold something else each time. UsageError if it gives other values on
    the same inputs, or leaves an element that is always read as it was."""
    runs = []
    for fill in _FILLS:
        for port in declared.outs:
            buffers[port.name].view(torch.int32).fill_(fill)
        reference.in_graph()
        runs.append({port.name: buffers[port.name].view(torch.int32).clone() for port in declared.outs})
    for port in declared.outs:
        first, second = (run[port.name] for run in runs)
        kept = (first == _FILLS[0]) & (second == _FILLS[1])
        where = f"{declared.where}.reference"
        if bool(((first != second) & ~kept).any()):
            raise UsageError(
                f"{where} gave {port.name} other values when it ran again on the same inputs; what is right must "
                "follow from the inputs alone"
            )
        always = port.declared.live is None and not port.declared.step
        if always and bool(kept.any()):
            place = kept.nonzero()[0].tolist()
            raise UsageError(
                f"{where} leaves {int(kept.sum())} of {kept.numel()} words of {port.name} as they were, the first at "
                f"{place}; write them, or say which are read (live=, step=)"
            )
