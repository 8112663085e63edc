"""What SGLang's DSA backend has prepared for a replay, in the contract's words; and overlay and capture over it."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from dsa_verify.attach.part import Part, Report, is_capturing
from dsa_verify.base.errors import NothingVerified, UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.overlay.overlay import Overlay
from dsa_verify.overlay.ring import CaptureRing
from dsa_verify.overlay.snapshot_file import write_snapshot
from dsa_verify.subjects.adapters import deep_gemm
from dsa_verify.subjects.adapters.sglang.backend import record_names
from dsa_verify.systems.catalogue import get_system

PRESET: Final = "deepseek_v32"  # of which every size is then said
POLL_EVERY: Final = 32  # replays
MAX_RECORDERS: Final = 16  # of one process: overlays, or rings
RING_ROUNDS: Final = 64
ASK: Final = "dump"  # a file of this name, in the folder, asks for a dump
SAID_KINDS: Final = ("difference", "input", "buffer replaced", "could not run")
PLAN: Final = "topk_v2_plan"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What one call of the backend has prepared: `inputs`, and the `record` that the layers read."""

    system: str
    bucket: int
    raw_batch: int
    inputs: Mapping[str, torch.Tensor]
    record: Any

    @classmethod
    def of(cls, backend: Any, batch: Any) -> Prepared | None:
        """Return None for a mode that the contract has nothing for."""
        system = _system_of(backend, batch.forward_mode)
        if system is None:
            return None
        bucket = int(batch.batch_size)
        inputs = {
            "seq_lens": batch.seq_lens[:bucket],
            "req_pool_indices": batch.req_pool_indices[:bucket],
            "req_to_token": backend.req_to_token,
        }
        raw = bucket - int(getattr(batch, "num_padding", 0))
        return cls(system=system, bucket=bucket, raw_batch=raw, inputs=inputs, record=backend.forward_metadata)


def _system_of(backend: Any, mode: Any) -> str | None:
    if mode.is_decode_or_idle():
        return "decode"
    return "target_verify" if mode.is_target_verify() else None


def geometry_of(backend: Any, system: str) -> Geometry:
    """Return the sizes of a live backend. UsageError if the contract does not have such."""
    table = backend.req_to_token
    drafts = int(backend.speculative_num_draft_tokens or 1) if get_system(system).drafts else 1
    width = int(table.shape[1])
    values: dict[str, Any] = {
        "page_size": int(backend.physical_page_size),
        "pool_size": int(backend.dsa_index_kpool),
        "topk": int(backend.dsa_index_topk),
        "context": min(int(backend.max_context_len), width - drafts),
        "draft_tokens": drafts,
        "table_width": width,
        "token_table_width": width,
        "wide_table": not backend.dsa_drop_wide_page_table,
        **_of_device(table.device),
    }
    return get_system(system).geometry(PRESET, values)


def _of_device(device: torch.device) -> dict[str, Any]:
    """Return what schedules depend on; no indexer where it is not known how they are built."""
    if device.type != "cuda":
        return {"indexer": False}
    facts = torch.cuda.get_device_properties(device)
    architecture = facts.major * 10
    try:
        variant = deep_gemm.installed_variant(architecture).name
    except UsageError:
        return {"indexer": False, "architecture": architecture}
    return {
        "indexer": True,
        "architecture": architecture,
        "multiprocessors": facts.multi_processor_count,
        "schedule": variant,
    }


def fields_of(record: Any, geometry: Geometry, system: str, bucket: int) -> tuple[str, ...]:
    """Return the fields that `record` has. Plans are left out: only some batches have one, and when depends on what the
    device has room for (contract 5)."""
    layout = get_system(system).layout(geometry, bucket)
    names = record_names(field.name for field in layout)
    return tuple(
        field.name
        for field in layout
        if isinstance(_at(record, names.get(field.name, field.name)), torch.Tensor) and PLAN not in field.name
    )


def _at(record: Any, path: str) -> Any:
    for name in path.split("."):
        record = getattr(record, name, None)
    return record


class Replays(Part):
    """A part that is told of each replay that was prepared, and keeps something for each backend and system."""

    def __init__(self, name: str, report: Report):
        super().__init__(name, report)
        self._kept: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        self._made: list[Any] = []
        self._replays = 0
        atexit.register(self._at_exit)

    def prepared(self, backend: Any, batch: Any, in_capture: bool = False) -> None:
        """The backend has prepared `batch`."""
        if in_capture or is_capturing():
            return
        found = Prepared.of(backend, batch)
        if found is None:
            return
        self._replays += 1
        systems = self._kept.setdefault(backend, {})
        if found.system not in systems:
            if len(self._made) >= MAX_RECORDERS:
                raise UsageError(f"{len(self._made)} backends have one, and another wants one; that many are the limit")
            systems[found.system] = self._make(backend, found)
            self._made.append(systems[found.system])
        self._take(systems[found.system], backend, found)

    def _at_exit(self) -> None:
        if self.enabled and self._made:
            try:
                self._end()
            except Exception as error:
                self.detach(f"at the end: {type(error).__name__}: {error}")

    def _make(self, backend: Any, found: Prepared) -> Any:
        raise NotImplementedError

    def _take(self, kept: Any, backend: Any, found: Prepared) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError


class DsaOverlays(Replays):
    """Checks what the backend has prepared against the oracle, beside the server."""

    def __init__(self, report: Report):
        super().__init__("overlay", report)
        logger = logging.getLogger("dsa_verify.overlay")  # the same summary is said below
        logger.addHandler(logging.NullHandler())
        logger.propagate = False

    def _make(self, backend: Any, found: Prepared) -> Overlay:
        geometry = geometry_of(backend, found.system)
        fields = fields_of(found.record, geometry, found.system, found.bucket)
        return Overlay.attach(
            system=found.system,
            geometry=geometry,
            directory=self.report.settings.folder,
            rank=self.report.rank,
            every=self.report.settings.every,
            fields=fields,
            output_names=record_names(fields),
            # A pad row is one token long in this release, whatever pools ask for (contract 0.2).
            check_pad_rows=geometry.pool_size == 1,
            widest=_widest(backend),
            on_line=self._on_line,
        )

    def _take(self, kept: Overlay, backend: Any, found: Prepared) -> None:
        kept.check(raw_batch=found.raw_batch, bucket=found.bucket, inputs=found.inputs, outputs=found.record)
        if not self._replays % POLL_EVERY or self.report.settings.strict:
            kept.poll()

    def _on_line(self, line: Mapping[str, Any]) -> None:
        if line["kind"] not in SAID_KINDS:
            return
        case = f"; replay it: dsa-verify replay {line['case']}" if line.get("case") else ""
        if line["kind"] == "could not run":
            text = f"a check could not run (replay {line['replay']}): {line['reason']}"
            if self.report.settings.strict:
                self.found(text)
            else:
                self.report.say(f"overlay: {text}")
        else:
            self.found(f"{line['sentence']} (replay {line['replay']}, bucket {line['bucket']}){case}")

    def _end(self) -> None:
        for overlay in self._made:
            try:
                self.report.say(overlay.close().text())
            except NothingVerified as error:
                self.report.say(str(error))


class DsaCapture(Replays):
    """Keeps the inputs of the last rounds on the device, and writes them as a case, and the step that is then prepared
    as a snapshot, when a file asks for it, and the case once more at the end."""

    def __init__(self, report: Report):
        super().__init__("capture", report)
        report.settings.folder.mkdir(parents=True, exist_ok=True)  # so that a file can be put there that asks
        self._asked: float | None = self._asks()  # what was asked before this server started is not for it
        self._to_snapshot: set[int] = set()
        self._snapshots = 0

    def _make(self, backend: Any, found: Prepared) -> CaptureRing:
        geometry, widest = geometry_of(backend, found.system), _widest(backend)
        rounds = RING_ROUNDS
        while True:
            try:
                return CaptureRing(
                    found.system, geometry, widest=widest, device=found.inputs["seq_lens"].device, rounds=rounds
                )
            except UsageError:
                if rounds == 1:
                    raise
                rounds //= 2  # so many do not fit

    def _take(self, kept: CaptureRing, backend: Any, found: Prepared) -> None:
        kept.record(raw_batch=found.raw_batch, bucket=found.bucket, inputs=found.inputs)
        if not self._replays % POLL_EVERY and (asked := self._asks()) not in (None, self._asked):
            self._asked = asked
            self._dump()
            self._to_snapshot = {id(ring) for ring in self._made}
        if id(kept) in self._to_snapshot:
            self._to_snapshot.discard(id(kept))
            self._write_snapshot(kept, found)

    def _asks(self) -> float | None:
        try:
            return os.stat(self.report.settings.folder / ASK).st_mtime
        except OSError:
            return None

    def _dump(self) -> None:
        for ring in self._made:
            try:
                dump = ring.dump(self.report.settings.folder / f"rank{self.report.rank}")
            except UsageError as error:
                self.report.say(f"capture: no case of {ring.system.name}: {error}")
                continue
            self.report.say(f"capture: the last {len(dump.numbers)} rounds of {ring.system.name} are in {dump.path}")

    def _write_snapshot(self, ring: CaptureRing, found: Prepared) -> None:
        self._snapshots += 1
        system, rank = found.system, self.report.rank
        path = self.report.settings.folder / f"snapshot-{system}-rank{rank}-{self._snapshots}.json"
        fields = fields_of(found.record, ring.geometry, system, found.bucket)
        names = record_names(fields)
        write_snapshot(
            path,
            system=system,
            geometry=ring.geometry,
            bucket=found.bucket,
            raw_batch=found.raw_batch,
            inputs=found.inputs,
            outputs={name: _at(found.record, names.get(name, name)) for name in fields},
        )
        self.report.say(f"capture: this step of {system} is in {path}; dsa-verify judge {path}")

    def _end(self) -> None:
        self._dump()


def _widest(backend: Any) -> int:
    """The widest batch that the backend has graph memory for."""
    return int(backend.decode_cuda_graph_metadata["cu_seqlens_q"].shape[0]) - 1
