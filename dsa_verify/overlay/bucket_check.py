"""BucketCheck: everything of one bucket that a check of the overlay touches, and the check itself.

Lifetimes. What is *taken* from the server (inputs, the rows of its request map, outputs) lies in buffers of the check,
written on the server's stream and read on the overlay's own. What is *wanted* comes from the oracle, over the inputs
that were taken, or from the server's own preparation, which rewrites the live outputs in place before they are put
back. What was wanted in the check *before* is kept, because a wrong value is most often an old one. *Evidence* is a
copy of all that at the first check that shows a difference; the device makes it, and the host collects it at leisure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from dsa_verify.base.errors import UsageError
from dsa_verify.buffers.arena import Arena
from dsa_verify.buffers.region import Control, Region, field_regions
from dsa_verify.contract.layout import DTYPE_BYTES, Compare, Layout
from dsa_verify.contract.subject import Subject
from dsa_verify.judge.judge import Judge, Phase, Tally
from dsa_verify.judge.normalise import SortedItems
from dsa_verify.judge.output_check import no_view
from dsa_verify.overlay.copies import GroupedCopy, copy_plainly
from dsa_verify.overlay.inputs import LegalInputs, Taken, token_columns
from dsa_verify.overlay.launch import Facts, Mailbox, OwnStream
from dsa_verify.overlay.piece import Piece
from dsa_verify.overlay.ring import CaptureRing
from dsa_verify.overlay.setup import Setup, compared
from dsa_verify.overlay.sources import Sources
from dsa_verify.replay.replayer import ORACLE_WORD
from dsa_verify.systems.indexer import WRITE_PLAN

Tensors = dict[str, torch.Tensor]
_PAGES: Final = "pages"
_OLD: Final = "before."


class ReferenceFailed(Exception):
    """The server's own preparation raised; what was live before is live again."""


class BucketCheck:
    """Opened on the tensors of one bucket, which its graphs read from then on; opening it synchronises.

    UsageError for tensors that cannot be those of the layout, or a check that would need more than `setup.max_bytes`.
    """

    def __init__(
        self,
        setup: Setup,
        bucket: int,
        inputs: Any,
        outputs: Any,
        *,
        also: Sequence[torch.Tensor] = (),
        facts: Facts,
        stream: OwnStream,
        ring: CaptureRing | None,
    ):
        self.setup, self.bucket, self.ring, self._stream = setup, bucket, ring, stream
        self.layout = setup.system.layout(setup.geometry, bucket)
        judged = compared(self.layout, setup.fields)
        self.inputs = Sources.of_inputs(self.layout, inputs, setup.input_names)
        # The server's own preparation writes more than what is compared; all of that has to be put back.
        written = self.layout if setup.reference is not None else judged
        self.outputs = Sources.of_outputs(written, outputs, setup.output_names)
        self.judged = _separate(judged, self.outputs.bound)
        self._also = list(also)
        self.device = self.inputs.device
        self._check_size()
        self._facts, self.raw = facts, facts.raw
        self._allocate()
        self._oracle = self._open_oracle()
        self.idle = self._idle_values()
        frozen = None if ring is None else ring.frozen.clone()
        if ring is not None:
            ring.freeze()  # what follows runs everything once
        self._build(facts.number)
        # Here, since memory that is pinned while the server runs would hold it up.
        self.counters, self.evidence = Mailbox(stream, self._counted()), Mailbox(stream, self._evidence)
        self._forget()
        if ring is not None and frozen is not None:
            ring.frozen.copy_(frozen)

    def _forget(self) -> None:
        """Forget all that was checked."""
        self.judge.reset()
        for tensor in (self._seen, self.by_raw, self.kept, self._go):
            tensor.zero_()
        for name, tensor in self._before.items():
            tensor.fill_(-1 if name == _OLD + "facts" else 0)

    # The check -----------------------------------------------------------------------------------------------------

    def run(self, number: int, raw: int, inputs: Any, outputs: Any, also: Sequence[torch.Tensor]) -> dict[str, str]:
        """Launch the check of replay `number`, waiting for nothing; by name, which outputs have moved, and how.

        Raises UsageError for tensors that cannot be those of the layout, ReferenceFailed.
        """
        now_inputs, now_outputs = self.inputs.tensors(inputs), self.outputs.tensors(outputs)
        moved_outputs = self.outputs.moved(now_outputs)
        moved = self.inputs.moved(now_inputs) or moved_outputs
        if moved and "full_to_swa" in self.inputs.changes(now_inputs):
            raise UsageError(f"full_to_swa of bucket {self.bucket} was replaced; call prepare again")
        if [each.data_ptr() for each in also] != [each.data_ptr() for each in self._also]:
            raise UsageError(f"also: not the tensors that bucket {self.bucket} was prepared with; call prepare again")
        take, collect, restore = self._take, self._collect, self._restore
        if moved:
            # The graphs read the tensors that were bound; these are read one by one.
            there = self.inputs.checked(now_inputs), self.outputs.checked(now_outputs)
            take, collect, restore = (_plain(pieces) for pieces in self._exchanges(*there))
        server = self._stream.before_taking()
        self._facts.send(number, raw)
        take()
        if self.setup.reference is not None:
            try:
                self.setup.reference(raw, self.bucket)
                collect()
            except Exception as error:
                raise ReferenceFailed(f"the reference raised {type(error).__name__}: {error}") from error
            finally:
                restore()
        self._stream.after_taking(server, self._judge)
        return self.outputs.changes(now_outputs) if moved_outputs else {}

    # What the host collects ------------------------------------------------------------------------------------------

    def tally(self) -> Tally:
        """Return what the judge had seen when `counters` was last sent."""
        host = self.counters.host
        return self.judge.read((host["differing"], host["compared"], host["ring"]))

    def rearm(self) -> None:
        """Let the next check that shows a difference leave evidence again; asynchronous."""
        with self._stream.own():
            self.kept.zero_()
            if self.ring is not None:
                self.ring.thaw()

    def host_regions(self, evidence: Mapping[str, torch.Tensor]) -> list[Region]:
        """Return the regions that the judge compared, over `evidence` on the host; those of fields only."""
        control = Control(**{name: evidence[name] for name in _control(self.legal.control)})
        got = {field.name: evidence[f"got.{field.name}"] for field in self.judged}
        want = {field.name: evidence[f"want.{field.name}"] for field in self.judged}
        return self._field_regions(got, want, control)

    # Opening ---------------------------------------------------------------------------------------------------------

    def _counted(self) -> Tensors:
        """Return the few and small tensors that are read at every poll."""
        differing, compared, ring = self.judge.counters
        return {"differing": differing, "compared": compared, "ring": ring, "by_raw": self.by_raw, "kept": self.kept}

    def _check_size(self) -> None:
        output_bytes = sum(field.elements * DTYPE_BYTES[field.dtype] for field in self.layout)
        request_map = 4 * self.bucket * token_columns(self.setup.geometry)
        # Taken, wanted, wanted before, and the evidence of these three.
        needed = 6 * output_bytes + request_map
        if needed > self.setup.max_bytes:
            raise UsageError(
                f"bucket {self.bucket}: a check needs {needed >> 20} MiB, the limit is {self.setup.max_bytes >> 20}; "
                "raise max_bytes, or lower the geometry's context"
            )

    def _allocate(self) -> None:
        bound, device = self.inputs.bound, self.device
        values = _like({name: bound[name] for name in bound if name not in ("req_to_token", "full_to_swa")})
        rows = torch.zeros((self.bucket, token_columns(self.setup.geometry)), dtype=torch.int32, device=device)
        self.taken = Taken(values=values, rows=rows, full_to_swa=bound.get("full_to_swa"))
        self.got = _like(self.outputs.bound)
        self._saved = [_zeros(tensor) for tensor in self._also]
        self.legal = LegalInputs(
            self.layout,
            self.taken,
            request_rows=bound["req_to_token"].shape[0],
            raw=self.raw,
            check_pad_rows=self.setup.check_pad_rows,
        )
        self.want: Mapping[str, torch.Tensor] = _like(self.outputs.bound)
        if self.setup.reference is None:
            self.want = Arena([self.layout.for_oracle()], device, ORACLE_WORD).at(self.bucket)

    def _open_oracle(self) -> Subject | None:
        if self.setup.reference is not None:
            return None
        oracle = self.setup.system.make_oracle()
        oracle.allocate(self.setup.geometry, self.legal.inputs, self.want)  # type: ignore[arg-type]
        return oracle

    def _idle_values(self) -> Tensors:
        """Return by field what is right when every row is a pad row, as engines capture; empty without an oracle."""
        if self._oracle is None:
            return {}
        for name, value in self.taken.values.items():
            value.fill_(self.legal.specs[name].pad)
        self.taken.rows.zero_()
        self.legal.update()
        self._oracle.in_graph()
        return {field.name: self.want[field.name].cpu().clone() for field in self.judged}

    def _exchanges(
        self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> Iterator[list[Piece]]:
        """Yield the pieces that take all from the server, that collect what its preparation made, that restore it."""
        take = [Piece.of(to, inputs[name]) for name, to in self.taken.values.items()]
        columns = self.taken.rows.shape[1]
        take.append(Piece.of(self.taken.rows, inputs["req_to_token"][:, :columns], inputs["req_pool_indices"]))
        live = [(self.got[name], tensor) for name, tensor in outputs.items()]
        if self.setup.reference is not None:
            live += zip(self._saved, self._also, strict=True)
        yield take + [Piece.of(to, source) for to, source in live]
        yield [Piece.of(self.want[name], tensor) for name, tensor in outputs.items()]
        yield [Piece.of(source, to) for to, source in live]

    def _build(self, number: torch.Tensor) -> None:
        device, bucket = self.device, self.bucket
        self._items = {
            f"{side}.{field.name}": SortedItems(tensors[field.name])
            for field in self.judged
            if field.compare is Compare.ITEMS
            for side, tensors in (("got", self.got), ("want", self.want))
        }
        compared = {f"got.{field.name}": self.got[field.name] for field in self.judged}
        compared |= {f"want.{field.name}": self.want[field.name] for field in self.judged}
        compared |= {name: items.copy for name, items in self._items.items()}
        fields = self._field_regions(_under("got.", compared), _under("want.", compared), self.legal.control)
        self.judge = Judge([*fields, *self.legal.regions()], device, number)
        self._seen = torch.zeros(1, dtype=torch.int64, device=device)
        self.by_raw = torch.zeros((2, bucket + 1), dtype=torch.int64, device=device)
        self.kept, self._go = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        self._raws = torch.arange(bucket + 1, device=device)
        self._keep_evidence(compared)
        self._record = self._recorder(number)
        exchanges = self._exchanges(self.inputs.bound, self.outputs.bound)
        take, collect, restore = (GroupedCopy(pieces, device) for pieces in exchanges)
        # In this order: making a graph runs it once, and what is restored must have been taken.
        self._take = self._stream.capture(take.launch)
        self._collect: Callable[[], None] = _do_nothing
        self._restore: Callable[[], None] = _do_nothing
        if self.setup.reference is not None:
            self._collect = self._stream.capture(collect.launch)
            self._restore = self._stream.capture(restore.launch)
        self._judge = self._stream.capture(self._judge_what_was_taken)

    def _field_regions(
        self, got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], control: Control
    ) -> list[Region]:
        regions = field_regions(self.judged, got, want, control)
        if self.setup.reference is None:
            return regions
        # Unlike an oracle, the server's own preparation writes each of a request's identical rows.
        return [dataclasses.replace(region, want_per_request=False) for region in regions]

    def _keep_evidence(self, compared: Tensors) -> None:
        now = {"facts": self._facts.tensor, **_control(self.legal.control)}
        now |= {f"taken.{name}": value for name, value in self.taken.values.items()}
        old = {_OLD + name: value for name, value in now.items()}
        old |= {_OLD + name: value for name, value in compared.items() if name.startswith("want.")}
        self._before = _like(old)
        pages = -(-self.taken.rows.shape[1] // self.setup.geometry.allocator_page)
        self._page_list = torch.zeros((self.bucket, pages), dtype=torch.int32, device=self.device)
        kept = {**now, **compared, **self._before, _PAGES: self._page_list, "beyond_pool": self.legal.beyond_pool}
        self._evidence = _like(kept)
        pieces = [Piece.of(self._evidence[name], value) for name, value in kept.items()]
        self._copy_evidence = GroupedCopy(pieces, self.device, when=self._go)
        self._copy_before = GroupedCopy([Piece.of(self._before[name], old[name]) for name in old], self.device)

    def _recorder(self, number: torch.Tensor) -> Callable[[], None]:
        if self.ring is None:
            return _do_nothing
        index = torch.arange(self.bucket, device=self.device)
        return self.ring.writer(self.layout, self.taken.values, self.taken.rows, index, number, self.raw)

    # On the overlay's own stream -----------------------------------------------------------------------------------

    def _judge_what_was_taken(self) -> None:
        self._facts.read()
        self._record()
        self.legal.update()
        if self._oracle is not None:
            self._oracle.in_graph()
            self._name_requests()
        for items in self._items.values():
            items.update()
        self.judge.launch(Phase.REPLAY)
        total = self.judge.counters[0].sum().view(1)
        wrong = total != self._seen
        self._seen.copy_(total)
        mine = self._raws == self.raw
        self.by_raw[0].add_(mine)
        self.by_raw[1].add_(mine & wrong)
        self._go.copy_(wrong & (self.kept == 0))
        page = self.setup.geometry.allocator_page
        torch.div(self.taken.rows[:, ::page], page, rounding_mode="floor", out=self._page_list)
        self._copy_evidence.launch()
        self._copy_before.launch()
        self.kept.copy_(self.kept | self._go)
        if self.ring is not None:
            self.ring.frozen.copy_(self.ring.frozen | self._go)

    def _name_requests(self) -> None:
        """Name requests as the server does in the one field that holds them: the oracle numbers them by batch row."""
        for field in self.layout:
            if field.name.endswith(WRITE_PLAN + "req"):
                self.want[field.name].copy_(self.legal.requests)


def _separate(judged: Layout, outputs: Mapping[str, torch.Tensor]) -> Layout:
    """Return `judged` without aliases that are no views in `outputs`: a server that keeps both has each compared."""
    fields = tuple(
        dataclasses.replace(field, alias=None)
        if field.alias is not None and no_view(field, outputs[field.name], outputs[field.alias])
        else field
        for field in judged
    )
    return dataclasses.replace(judged, fields=fields)


def _like(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: _zeros(tensor) for name, tensor in tensors.items()}


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _control(control: Control) -> Tensors:
    return {field.name: getattr(control, field.name) for field in dataclasses.fields(control)}


def _do_nothing() -> None:
    pass


def _plain(pieces: Sequence[Piece]) -> Callable[[], None]:
    return lambda: copy_plainly(pieces)
