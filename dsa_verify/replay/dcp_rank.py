"""RankRun: one rank's step, captured once and replayed on many rounds beside the oracle of all ranks.

The pieces are those of the replayer (input buffers, arena, poison, judge); what differs is that a step spans processes,
so that the capture warms the communicator up first, and that the oracle runs eagerly on each rank's own device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed

from dsa_verify.buffers.arena import Arena
from dsa_verify.buffers.input_buffers import InputBuffers
from dsa_verify.buffers.poison import Poison
from dsa_verify.buffers.region import LOUD_WORD, Kind, Region, as_words, field_regions, guard_regions, input_regions
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.round import Round
from dsa_verify.contract.round_table import tabulate
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.graphs.capturing import CAPTURE_ERROR_MODE, no_collection
from dsa_verify.judge.judge import Judge, Phase
from dsa_verify.judge.normalise import normalisers
from dsa_verify.subjects.pipelines.dcp_rank import DcpRank, prefix_ranges
from dsa_verify.systems.catalogue import get_system

WARM_UPS = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Words that differed on this rank, and one line that says so."""

    differing: int
    line: str


class RankRun:
    """Rank `rank` of `geometry.dcp_size` at one bucket of `bucket` requests, for up to `capacity` rounds."""

    step_factory: Callable[[int], DcpRank] = DcpRank

    def __init__(self, geometry: Geometry, bucket: int, rank: int, device: torch.device, capacity: int):
        self._geometry, self._bucket, self._rank, self._device = geometry, bucket, rank, device
        system = get_system("dcp")
        layout = system.layout(geometry, bucket)
        self._input_buffers = InputBuffers(
            get_system("dcp"), geometry, bucket, device, capacity=capacity, remap_slots=1
        )
        self._arena = Arena([layout], device, LOUD_WORD)
        self._oracle_buffers = Arena([layout.for_oracle()], device, LOUD_WORD).at(bucket)
        buffers = self._arena.at(bucket)
        inputs, self._oracle_inputs = self._input_buffers.inputs(bucket)
        self._oracle = system.make_oracle()
        self._oracle.allocate(geometry, self._oracle_inputs, self._oracle_buffers)
        self._step = self.step_factory(rank)
        self._step.allocate(geometry, inputs, buffers)
        for pools in (buffers, self._oracle_buffers):
            self._fill_pools(pools)
        self._merged = {name: buffers[name] for name in ("merged_out", "merged_lse")}
        self._first_merged = {name: torch.zeros_like(tensor) for name, tensor in self._merged.items()}
        self._want_prefix = torch.zeros_like(self._step.prefix)
        self._prefix_rows = torch.zeros(1, dtype=torch.int32, device=device)
        self._close = normalisers(layout, buffers, self._oracle_buffers)
        copies = {name: each.copy for name, each in self._close.items()}
        _, poison = self._input_buffers.control(bucket)
        self._judge = Judge(
            self._regions(layout, inputs, {**buffers, **copies}), device, self._input_buffers.round_index
        )
        self._poison = Poison(self._regions(layout, inputs, buffers), device, self._input_buffers.round_index, poison)
        self._graph = self._capture()

    def replay(self, rounds: Sequence[Round]) -> None:
        """Replay and judge each round."""
        generations = np.zeros(self._geometry.request_rows, np.int64)
        table = tabulate(
            get_system("dcp"), self._geometry, rounds, generations, widest_bucket=self._bucket, remap_slots=1
        )
        self._input_buffers.reset()
        self._input_buffers.upload(table)
        for _ in rounds:
            self._input_buffers.step(self._bucket)
            self._poison.launch()
            if self._graph is None:
                self._step.in_graph()
            else:
                self._graph.replay()
            self._oracle.in_graph()
            self._expect_prefix()
            self._share_merged()
            for each in self._close.values():
                each.update()
            self._judge.launch(Phase.REPLAY)

    def report(self) -> RankReport:
        """Return what the judge has seen; synchronises."""
        tally = self._judge.poll()
        line = f"{tally.compared} elements compared, {tally.count()} words differ"
        if tally.first:
            first = tally.first[0]
            place = f"{first.region.kind.value} {first.region.name}[{first.row}, {first.column}]"
            line += f"; first in round {first.round}: {place} is {first.got}, must be {first.want}"
        return RankReport(differing=tally.count(), line=line)

    def close(self) -> None:
        """Let go of the graph, which must not outlive the communicator that it captured."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._graph = None

    def _regions(self, layout: Layout, inputs: Inputs, buffers: Mapping[str, torch.Tensor]) -> list[Region]:
        """Return what this rank writes, the prefix, the merge against rank 0's bit by bit, guards and inputs."""
        others = tuple(f"rank{rank}_" for rank in range(self._geometry.dcp_size) if rank != self._rank)
        own = tuple(field for field in layout if not field.name.startswith(others))
        control, _ = self._input_buffers.control(self._bucket)
        prefix = Region(
            kind=Kind.FIELD,
            name="prefix",
            got=as_words(self._step.prefix),
            want=as_words(self._want_prefix),
            live_rows=self._prefix_rows,
            poisonable=True,
            high=1 << 30,
        )
        return [
            *field_regions(dataclasses.replace(layout, fields=own), buffers, self._oracle_buffers, control),
            prefix,
            *(
                Region(kind=Kind.FIELD, name=f"{name} of all ranks", got=as_words(tensor), want=as_words(first))
                for (name, tensor), first in zip(self._merged.items(), self._first_merged.values(), strict=True)
            ),
            *guard_regions(self._arena.guards, Kind.GUARD),
            *guard_regions(self._input_buffers.guards, Kind.GUARD),
            *input_regions(inputs, self._oracle_inputs),
        ]

    def _fill_pools(self, buffers: Buffers) -> None:
        """Each row says which virtual slot it is, but for slot 0, so that a prefix of old tokens shows its origin."""
        size, block = self._geometry.dcp_size, self._geometry.dcp_block
        for rank in range(size):
            pool = buffers[f"rank{rank}_kv_pool"]
            row = torch.arange(pool.shape[0], device=self._device)
            slot = row // block * size * block + rank * block + row % block
            pool.copy_(slot[:, None] * pool.shape[1] + torch.arange(pool.shape[1], device=self._device))
        buffers["rank0_kv_pool"][0].zero_()

    def _expect_prefix(self) -> None:
        """Make the prefix from the oracle's pools, token by token in eager torch."""
        inputs, size, block = self._oracle_inputs, self._geometry.dcp_size, self._geometry.dcp_block
        starts, lengths = prefix_ranges(inputs.seq_lens)
        request = torch.repeat_interleave(torch.arange(self._bucket, device=self._device), lengths)
        first = lengths.cumsum(0) - lengths
        position = starts[request] + torch.arange(len(request), device=self._device) - first[request]
        slots = inputs.req_to_token[inputs.req_pool_indices[request].long(), position].long()
        pools = torch.stack([self._oracle_buffers[f"rank{rank}_kv_pool"] for rank in range(size)])
        rows = pools[slots // block % size, slots // (size * block) * block + slots % block]
        self._want_prefix[: len(rows)] = rows
        self._prefix_rows.fill_(len(rows))

    def _share_merged(self) -> None:
        for name, first in self._first_merged.items():
            first.copy_(self._merged[name])
            torch.distributed.broadcast(first, src=0)

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """Return the step as one graph; None on a CPU, where it is run eagerly instead."""
        self._input_buffers.reset()
        if self._device.type != "cuda":
            return None
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # Kernels compile and the communicator connects outside the capture. All rows are pad rows: no pool changes.
            for _ in range(WARM_UPS):
                self._step.in_graph()
        torch.cuda.synchronize(self._device)
        torch.distributed.barrier(device_ids=[self._device.index])
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(graph, stream=stream, capture_error_mode=CAPTURE_ERROR_MODE):
            self._step.in_graph()
        torch.cuda.synchronize(self._device)
        return graph
