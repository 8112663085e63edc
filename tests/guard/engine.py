"""A runner in miniature whose metadata is in a graph, for the tests of the guard. Its hooks are those of an engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dsa_verify import MetadataGuard
from dsa_verify.graphs import Backend

BUCKET = 4
COLUMNS = 8


@dataclasses.dataclass
class Layer:
    page_table: torch.Tensor  # int32 [BUCKET, COLUMNS]
    expanded: torch.Tensor  # int32 [BUCKET]
    cu_lens: torch.Tensor  # int32 [BUCKET + 1]


@dataclasses.dataclass
class Metadata:
    lens: torch.Tensor  # int32 [BUCKET]; 1 in pad rows
    tags: torch.Tensor  # int32 [BUCKET]; 0 before a replay
    workspace: torch.Tensor | None
    layers: dict[str, Layer]
    num_padding: int = 0
    scale: float = 1.0


class Runner:
    """Fills static inputs, replays the graph that makes the rest, and gives hooks to a guard."""

    def __init__(self, backend: Backend, guard: MetadataGuard | None = None, key: Any = None) -> None:
        self.backend, self.key = backend, key
        self.memory = {
            "lens": self.new(BUCKET),
            "tags": self.new(BUCKET),
            "workspace": self.new(16),
            "page_table": self.new(BUCKET, COLUMNS),
            "expanded": self.new(BUCKET),
            "cu_lens": self.new(BUCKET + 1),
        }
        self.metadata = self.build()
        self.guard = guard
        self.reset_pads = self.reset_tags = True

    def new(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.backend.device)

    def build(self) -> Metadata:
        """Metadata as a new object, around the same memory."""
        whole = {name: tensor[: len(tensor)] for name, tensor in self.memory.items()}
        layer = Layer(whole["page_table"], whole["expanded"], whole["cu_lens"])
        layers = {"layer.0": layer, "layer.1": layer}
        return Metadata(whole["lens"], whole["tags"], whole["workspace"], layers)

    def body(self, metadata: Metadata | None = None) -> None:
        """What is captured, or eager work over a copy."""
        metadata = metadata or self.metadata
        layer = metadata.layers["layer.0"]
        layer.expanded.copy_((metadata.lens + 3) * (metadata.tags == 0) - 1)  # -1 where a tag is stale
        layer.cu_lens[1:].copy_(torch.cumsum(layer.expanded, 0, dtype=torch.int32))
        layer.page_table.copy_(metadata.lens[:, None] + torch.arange(COLUMNS, device=metadata.lens.device))
        metadata.tags.fill_(1)

    def eager(self, metadata: Metadata) -> None:
        """The contract: tags are 0 before the pipeline runs."""
        metadata.tags.zero_()
        self.body(metadata)

    def capture(self, *lens: int) -> None:
        self.write(lens)
        self.graph = self.backend.capture(self.body)
        if self.guard is not None:
            self.guard.captured(self.metadata, key=self.key)

    def write(self, lens: tuple[int, ...]) -> None:
        self.batch = len(lens)
        self.memory["lens"][: self.batch].copy_(torch.tensor(lens, dtype=torch.int32))
        if self.reset_pads:
            self.memory["lens"][self.batch :].fill_(1)
        if self.reset_tags:
            self.memory["tags"].zero_()

    def step(self, *lens: int, metadata: Metadata | None = None) -> None:
        assert self.guard is not None
        self.write(lens)
        with self.guard.replaying(metadata or self.metadata, key=self.key, batch=self.batch):
            self.graph.replay()

    def step_and_wait(self, *lens: int, metadata: Metadata | None = None) -> None:
        assert self.guard is not None
        self.step(*lens, metadata=metadata)
        self.guard.verdict()

    def check_and_wait(self, **given: Any) -> None:
        assert self.guard is not None
        self.guard.check(**given)
        self.guard.verdict()
