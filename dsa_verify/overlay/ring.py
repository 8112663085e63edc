"""CaptureRing: the inputs of the last rounds of a live server, on the device, and from there to a case file.

Of each round it keeps what a case can say: lengths, request rows, counts of tokens, and on which pages the live tokens
of each request lie. No weights, no prompts, no slots of tokens beyond that. Recording waits for nothing: which entry
is written next is decided on the device, and so is that nothing is written any more once the ring is frozen, by hand
or because a check of the overlay has failed. Reading it back waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.overlay.inputs import input_specs, token_columns
from dsa_verify.overlay.launch import Facts, OwnStream
from dsa_verify.overlay.pages import list_pages
from dsa_verify.overlay.ring_case import Dump, Recorded, to_case
from dsa_verify.overlay.sources import Sources
from dsa_verify.systems.catalogue import get_system

DEFAULT_ROUNDS: Final = 64
MAX_ROUNDS: Final = 4096
MAX_RING_BYTES: Final = 256 << 20
_HEAD: Final = ("number", "raw", "bucket", "broken", "misplaced")


class CaptureRing:
    """The last `rounds` rounds of `system`, of buckets up to `widest`, on `device`. UsageError for sizes beyond
    MAX_ROUNDS or MAX_RING_BYTES.

    `subject`, `fault`: what a case names, so that it replays against the server's own pipeline at home.
    """

    def __init__(
        self,
        system: str,
        geometry: Geometry,
        *,
        widest: int,
        device: torch.device | str,
        rounds: int = DEFAULT_ROUNDS,
        subject: str | None = None,
        fault: str | None = None,
    ):
        if not 1 <= rounds <= MAX_ROUNDS:
            raise UsageError(f"rounds: {rounds} is outside 1..{MAX_ROUNDS}; choose a number inside")
        self.system, self.geometry, self.widest, self.rounds = get_system(system), geometry, widest, rounds
        self.system.check_geometry(geometry)
        self.subject, self.fault = subject, fault
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._drawn = [spec.name for spec in input_specs(self.system, geometry) if spec.drawn]
        self._pages = -(-token_columns(geometry) // geometry.allocator_page)
        width = len(_HEAD) + widest * (len(self._drawn) + self._pages)
        size = 4 * (rounds + 1) * width
        if size > MAX_RING_BYTES:
            raise UsageError(
                f"rounds: {rounds} rounds of {widest} requests with {self._pages} pages each take {size >> 20} MiB, "
                f"the limit is {MAX_RING_BYTES >> 20}; keep fewer rounds"
            )
        with torch.inference_mode(False):
            # The last entry takes what comes while the ring is frozen, and is never read.
            self._store = torch.full((rounds + 1, width), -1, dtype=torch.int32, device=self._device)
            self._cursor = torch.zeros(1, dtype=torch.int64, device=self._device)
            # Int32 [1]: nothing is recorded while it is not 0.
            self.frozen = torch.zeros(1, dtype=torch.int32, device=self._device)
            self._stream = OwnStream(self._device)
            self._facts = Facts(self._device)
        self._writers: dict[int, tuple[Sources, Callable[[], None]]] = {}
        self._number = 0

    def record(self, *, raw_batch: int, bucket: int, inputs: object) -> None:
        """Keep the round whose inputs have just been prepared, on the current stream; waits for nothing.

        `inputs`: a mapping or object with tensors named as in `dsa_verify.contract.subject.Inputs`. The first round of
        a bucket captures a graph, which waits. UsageError for inputs that the system does not have in this form.
        """
        if not 0 <= raw_batch <= bucket <= self.widest:
            raise UsageError(f"raw_batch: {raw_batch} of bucket {bucket}; 0 <= raw_batch <= bucket <= {self.widest}")
        if bucket not in self._writers:
            self._writers[bucket] = self._open(bucket, inputs)
        sources, write = self._writers[bucket]
        tensors = sources.tensors(inputs)
        if sources.moved(tensors):  # or are no tensors, which it refuses
            write = self._writer_of(bucket, sources.checked(tensors))
        with torch.inference_mode():
            self._facts.send(self._number, raw_batch)
            write()
        self._number += 1

    def freeze(self) -> None:
        """Record nothing from here on; asynchronous."""
        self.frozen.fill_(1)

    def thaw(self) -> None:
        """Record again, into a ring as it was; asynchronous."""
        self.frozen.zero_()

    def dump(self, folder: Path, *, found: str | None = None) -> Dump:
        """Write the rounds as a case to `folder`; waits for the device. UsageError if there is none to write."""
        return self.save(self._store.cpu(), self._cursor.cpu(), folder, found=found)

    # For the overlay, which records on a stream of its own and reads back without waiting ---------------------------

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Return what `save` needs, on the device."""
        return {"store": self._store, "cursor": self._cursor}

    def save(self, store: torch.Tensor, cursor: torch.Tensor, folder: Path, *, found: str | None = None) -> Dump:
        """Do as `dump`, from copies of `state` on the host."""
        return to_case(
            self._read(store, int(cursor)),
            self.system,
            self.geometry,
            subject=self.subject,
            fault=self.fault,
            found=found,
        ).written_to(folder)

    def writer(
        self,
        layout: Layout,
        values: Mapping[str, torch.Tensor],
        request_map: torch.Tensor,
        index: torch.Tensor,
        number: torch.Tensor,
        raw: torch.Tensor,
    ) -> Callable[[], None]:
        """Return a body that records `values` of a round of `layout`: asynchronous and capturable.

        `request_map`: int32 [rows, columns]. `index`: int64 [bucket], the legal rows of it that belong to the batch
        rows. `number`, `raw`: int64 [1] on the device.
        """
        bucket, drawn = layout.bucket, len(self._drawn)
        row = torch.full((self._store.shape[1],), -1, dtype=torch.int32, device=self._device)
        head = {name: row[i : i + 1] for i, name in enumerate(_HEAD)}
        head["bucket"].fill_(bucket)
        head["misplaced"].zero_()
        columns = row[len(_HEAD) :][: drawn * self.widest].view(drawn, self.widest)[:, :bucket]
        pages = row[len(_HEAD) + drawn * self.widest :].view(self.widest, self._pages)[:bucket]
        derive = self.system.derive
        seed = torch.zeros(1, dtype=torch.int64, device=self._device)
        per_request = self.system.token_rows(self.geometry)
        token = torch.arange(bucket * per_request, device=self._device)
        batch_row = torch.arange(bucket, device=self._device)
        ends = torch.zeros(bucket, dtype=torch.int32, device=self._device)
        added, most = self.system.drafted(self.geometry), min(token_columns(self.geometry), request_map.shape[1])

        def write() -> None:
            head["number"].copy_(number)
            head["raw"].copy_(raw)
            for column, name in zip(columns, self._drawn, strict=True):
                column.copy_(values[name])
            live = (values["seq_lens"].long() + added).clamp(0, most)
            ends.copy_(live.masked_fill_(batch_row >= raw, 0))
            list_pages(request_map, index, ends, self.geometry.allocator_page, pages, head["broken"])
            if derive is not None:
                lengths = values["seq_lens"].clamp(0, self.geometry.context)
                drawn = {"seq_lens": lengths, "req_pool_indices": index}
                made = derive(self.geometry, drawn, request_map, seed)["out_cache_loc"]
                off = (made != values["out_cache_loc"]) & (token < raw * per_request)
                head["misplaced"].copy_(off.sum().view(1))
            at = torch.where(self.frozen > 0, self.rounds, self._cursor % self.rounds)
            self._store.index_copy_(0, at, row.unsqueeze(0))
            self._cursor.add_((self.frozen == 0).to(torch.int64))

        return write

    def _open(self, bucket: int, inputs: object) -> tuple[Sources, Callable[[], None]]:
        layout = self.system.layout(self.geometry, bucket)
        sources = Sources.of_inputs(layout, inputs)
        if sources.device != self._device:
            raise UsageError(f"device: the inputs are on {sources.device}, the ring is on {self._device}")
        with torch.inference_mode(False):
            cursor, frozen = self._cursor.clone(), self.frozen.clone()
            self.frozen.fill_(1)  # making the graph runs it once
            write = self._stream.capture(self._writer_of(bucket, sources.bound))
            self._cursor.copy_(cursor)
            self.frozen.copy_(frozen)
        return sources, write

    def _writer_of(self, bucket: int, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        layout = self.system.layout(self.geometry, bucket)
        request_map = tensors["req_to_token"]
        index = torch.zeros(bucket, dtype=torch.int64, device=self._device)
        facts = self._facts
        write = self.writer(layout, tensors, request_map, index, facts.number, facts.raw)

        def body() -> None:
            facts.read()
            index.copy_(tensors["req_pool_indices"].clamp(0, request_map.shape[0] - 1))
            write()

        return body

    def _read(self, store: torch.Tensor, cursor: int) -> list[Recorded]:
        """Return the rounds that were recorded, the oldest first."""
        count = min(cursor, self.rounds)
        rows = store[: self.rounds].roll(-(cursor % self.rounds), 0)[self.rounds - count :].numpy()
        found = []
        for row in rows:
            head = dict(zip(_HEAD, row.tolist(), strict=False))
            drawn = row[len(_HEAD) :][: len(self._drawn) * self.widest].reshape(len(self._drawn), self.widest)
            pages = row[len(_HEAD) + drawn.size :].reshape(self.widest, self._pages)
            raw = head["raw"]
            lens = {name: tuple(drawn[i, :raw].tolist()) for i, name in enumerate(self._drawn)}
            found.append(
                Recorded(
                    number=head["number"],
                    bucket=head["bucket"],
                    seq_lens=lens.pop("seq_lens"),
                    requests=lens.pop("req_pool_indices"),
                    lens=lens,
                    pages=tuple(tuple(each[each >= 0].tolist()) for each in pages[:raw]),
                    broken=head["broken"],
                    misplaced=head["misplaced"],
                )
            )
        return found
