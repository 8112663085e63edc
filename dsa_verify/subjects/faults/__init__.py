"""Faults: planted defects, as wrappers around any subject, that measure what the toolkit can see.

A fault never edits a pipeline. It runs the whole wrapped subject and spoils one thing around it: an output after it
was written, an input before it is read, a buffer, the capture itself. `FAULTS` says of each what the verifier must
call it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.layout import Layout, Lifetime
from dsa_verify.contract.subject import Subject, SubjectFactory, make_subject
from dsa_verify.subjects.faults import conduct, dcp, inputs, outputs
from dsa_verify.subjects.faults.wrapper import Wrapper
from dsa_verify.systems.catalogue import get_system

_ALL: Final = ("decode", "target_verify", "draft_extend")
_DRAFTS: Final = ("target_verify", "draft_extend")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`wrap(inner, field)` spoils `inner`; `field` is its default target. `diagnoses`: what it may be called.
    `of_input`: the target is a static input, which the engine's preparation (our registry) does not reset. `needs`:
    what a geometry must have for `field` to be there. `anywhere`: it shows in any system of a user's own, too, in which
    `field`, where there is none of that name, is the first that replays write.
    """

    name: str
    summary: str
    wrap: Callable[[Subject, str], Wrapper]
    diagnoses: frozenset[Diagnosis]
    field: str = ""
    systems: tuple[str, ...] = _ALL
    of_input: bool = False
    needs: str = ""
    anywhere: bool = False

    def applies(self, system: str) -> bool:
        """Return whether the fault can be planted in `system`."""
        return system in self.systems or (self.anywhere and system not in _shipped())


def _fault(name: str, summary: str, wrap: type[Wrapper], *diagnoses: Diagnosis, **rest: object) -> Fault:
    return Fault(name=name, summary=summary, wrap=wrap, diagnoses=frozenset(diagnoses), **rest)  # type: ignore[arg-type]


D = Diagnosis
FAULTS: Final[dict[str, Fault]] = {
    fault.name: fault
    for fault in (
        _fault(
            "skip_refresh",
            "one field keeps what it held before the replay",
            outputs.SkipRefresh,
            D.NEVER_WRITTEN,
            D.STALE,
            field="dsa_cache_seqlens_int32",
            systems=(*_ALL, "ragged_verify"),
            anywhere=True,
        ),
        _fault(
            "not_refreshed",
            "one field is refreshed by the first replay only",
            outputs.NotRefreshed,
            D.STALE,
            D.NEVER_WRITTEN,
            field="real_page_table",
            systems=(*_ALL, "ragged_verify"),
            anywhere=True,
        ),
        _fault(
            "stale_draft_steps",
            "the copy to three draft steps leaves their schedules and top-k plans as captured",
            outputs.StaleDraftSteps,
            D.STALE,
            D.NEVER_WRITTEN,
            D.FROZEN,
            field=f"step{outputs.FUSED_STEPS - 1}_paged_mqa_schedule_metadata",
            systems=("mtp",),
            needs="an indexer (--preset tiny_pool) and draft_steps of 4 or more",
        ),
        _fault(
            "off_by_one_page",
            "every page of a table is the next one",
            outputs.OffByOne,
            D.BOUNDARY,
            field="real_page_table",
        ),
        _fault(
            "wrong_draft_offset",
            "lengths count the draft position from 0 instead of 1",
            outputs.WrongDraftOffset,
            D.DRAFT_OFFSET,
            field="dsa_seqlens_expanded",
            systems=(*_DRAFTS, "ragged_verify"),
        ),
        _fault(
            "rows_rolled",
            "each batch row gets its neighbour's length",
            outputs.RowsRolled,
            D.REQUEST_MAP,
            field="cache_seqlens_int32",
        ),
        _fault(
            "table_of_first_page",
            "requests that share their first page are given one table (as a cache keyed by it would)",
            outputs.TableOfFirstPage,
            D.REQUEST_MAP,
            field="real_page_table",
            systems=("decode",),
        ),
        _fault(
            "pad_rows_untouched",
            "rows of pad requests are not written",
            outputs.PadRowsUntouched,
            D.NEVER_WRITTEN,
            D.STALE,
            field="cache_seqlens_int32",
            systems=(*_ALL, "ragged_verify"),
        ),
        _fault(
            "unclamped_length",
            "a pad row shorter than the draft gets negative lengths",
            outputs.UnclampedLength,
            D.OUT_OF_RANGE,
            field="dsa_seqlens_expanded",
            systems=("draft_extend",),
        ),
        _fault(
            "unclamped_window",
            "a row shorter than the draft gets a negative window length (padded_mode draft_extend)",
            outputs.UnclampedWindow,
            D.OUT_OF_RANGE,
            field="swa_topk_lengths",
            systems=("padded",),
        ),
        _fault(
            "writes_slot_0",
            "pad rows are stored at the reserved slot",
            dcp.WritesSlotZero,
            D.STALE,
            D.FROZEN,
            D.WRONG_VALUE,
            field="rank0_kv_pool",
            systems=("dcp",),
        ),
        _fault(
            "wrong_owner",
            "a rank stores the rows of other ranks, too",
            dcp.WrongOwner,
            D.WRONG_OWNER,
            D.STALE,
            D.FROZEN,
            D.WRONG_VALUE,
            field="rank0_kv_pool",
            systems=("dcp",),
        ),
        _fault(
            "wrong_log_base",
            "the merged log-sum-exp is in the other base",
            dcp.WrongLogBase,
            D.WRONG_VALUE,
            field="merged_lse",
            systems=("dcp",),
        ),
        _fault(
            "no_empty_rule",
            "a row that no rank owns anything of becomes NaN",
            dcp.NoEmptyRule,
            D.WRONG_VALUE,
            field="merged_out",
            systems=("dcp",),
        ),
        _fault(
            "int32_offset",
            "row offsets of a table wrap around (scaled down to half of the table)",
            outputs.WrappedOffset,
            D.REQUEST_MAP,
            D.NEVER_WRITTEN,
            D.STALE,
            field="page_table_1",
        ),
        _fault(
            "past_the_end",
            "one element is written past the end of a buffer",
            outputs.PastTheEnd,
            D.PAST_THE_END,
            field="dsa_cu_seqlens_k",
            anywhere=True,
        ),
        _fault(
            "before_the_start",
            "one element is written before the start of a buffer",
            outputs.BeforeTheStart,
            D.BEFORE_THE_START,
            field="dsa_cu_seqlens_k",
            anywhere=True,
        ),
        _fault(
            "wider_bucket_rows",
            "a row of a shared table beyond the bucket is written",
            outputs.WiderBucketRows,
            D.OTHER_BUCKET,
            field="page_table_1",
        ),
        _fault(
            "other_bucket",
            "a replay of one bucket writes a buffer that belongs to another",
            outputs.OtherBucket,
            D.OTHER_BUCKET,
            field="dsa_cache_seqlens_int32",
            anywhere=True,
        ),
        _fault(
            "output_replaced",
            "an output is rebound to another tensor after capture",
            outputs.OutputReplaced,
            D.BUFFER_REPLACED,
            field="real_page_table",
            anywhere=True,
        ),
        _fault(
            "second_replay",
            "a sum grows when the same inputs are replayed twice",
            outputs.GrowsOnRepeat,
            D.NOT_IDEMPOTENT,
            D.WRONG_VALUE,
            field="cu_seqlens_k",
        ),
        _fault(
            "advances_twice",
            "lengths are advanced by each warm-up, and set back once (warm_ups together)",
            outputs.AdvancesTwice,
            D.BOUNDARY,
            field="cache_seqlens_int32",
        ),
        _fault(
            "stale_request_map",
            "requests are those of the round before",
            inputs.StaleRequestMap,
            D.REQUEST_MAP,
            D.STALE,
            D.FROZEN,
        ),
        _fault(
            "frozen_at_capture",
            "lengths are those at capture",
            inputs.FrozenAtCapture,
            D.FROZEN,
            D.STALE,
        ),
        _fault(
            "input_overwritten",
            "the lengths are advanced in place",
            inputs.InputOverwritten,
            D.INPUT_OVERWRITTEN,
            anywhere=True,
        ),
        _fault(
            "tail_not_reset",
            "pad rows of one input keep what larger batches left there",
            Wrapper,
            D.TAIL_NOT_RESET,
            field="seq_lens",
            systems=(*_ALL, "mtp", "padded", "ragged_verify", "dcp"),
            of_input=True,
            anywhere=True,
        ),
        _fault(
            "glues_idle",
            "an idle batch is prepared by the captured graph (subjects that have a route)",
            conduct.GluesIdle,
            D.WRONG_ROUTE,
            systems=("padded",),
        ),
        _fault(
            "foreign_clobbers",
            "eager work between replays writes into a workspace of the graph",
            conduct.ForeignClobbers,
            D.BOUNDARY,
            field="cache_seqlens_int32",
        ),
        _fault("raises_in_capture", "in_graph raises", conduct.RaisesInCapture, D.RAISES, anywhere=True),
        _fault(
            "synchronises_in_capture",
            "in_graph reads a length on the host",
            conduct.SynchronisesInCapture,
            D.SYNCHRONISES,
            anywhere=True,
        ),
        _fault(
            "allocates_in_replay",
            "before_replay keeps a new tensor each time",
            conduct.AllocatesInReplay,
            D.ALLOCATES,
            anywhere=True,
        ),
        _fault(
            "flaky",
            "one field is wrong once, and never again in this process",
            conduct.WrongOnce,
            D.FLAKY,
            field="cache_seqlens_int32",
            anywhere=True,
        ),
        _fault(
            "lost_device",
            "a replay ends in an illegal memory access",
            conduct.IllegalAccess,
            systems=(*_ALL, "ragged_verify", "mtp", "padded", "dcp"),
            anywhere=True,
        ),
    )
}


def names(system: str | None = None) -> list[str]:
    """Names of all faults, or of those that apply to `system`."""
    return [name for name, fault in FAULTS.items() if system is None or fault.applies(system)]


def _shipped() -> frozenset[str]:
    """Return the systems that faults are written for: each has one at least."""
    return frozenset(system for fault in FAULTS.values() for system in fault.systems)


def in_layouts(reference: str, layouts: Sequence[Layout]) -> str:
    """Return the fault `NAME` with a field of a user's own system, if it needs one that none of `layouts` has."""
    fault, field = get_fault(reference)
    own = not fault.of_input and layouts[0].system not in fault.systems and fault.applies(layouts[0].system)
    if ":" in reference or not field or not own or any(field in layout for layout in layouts):
        return reference
    written = (each.name for layout in layouts for each in layout if each.lifetime is not Lifetime.CAPTURE)
    return f"{reference}:{next(written, field)}"


def get_fault(reference: str) -> tuple[Fault, str]:
    """(fault, field) of `NAME` or `NAME:FIELD`."""
    name, _, field = reference.partition(":")
    if name not in FAULTS:
        raise UsageError(f"fault {name!r} is unknown; known faults: {', '.join(FAULTS)}")
    fault = FAULTS[name]
    if field and not fault.field:
        raise UsageError(f"fault {name!r} has no field to choose; leave out {':' + field!r}")
    return fault, field or fault.field


def brings_foreign_work(reference: str) -> bool:
    """Return whether the fault `NAME:FIELD` is in work between the replays, which its subject then declares."""
    return hasattr(get_fault(reference)[0].wrap, "foreign_work")


def forgotten_inputs(reference: str | None) -> frozenset[str]:
    """The static inputs whose pad tails the fault `NAME:FIELD` leaves alone."""
    if reference is None:
        return frozenset()
    fault, field = get_fault(reference)
    return frozenset({field}) if fault.of_input else frozenset()


def check_field(reference: str, layouts: Sequence[Layout]) -> None:
    """UsageError unless a fault `NAME:FIELD` finds its field in one of `layouts`, written by replays, or its input."""
    fault, field = get_fault(reference)
    if fault.of_input:
        names = [spec.name for spec in get_system(layouts[0].system).inputs(layouts[0].geometry)]
        if field not in names:
            raise UsageError(f"fault input {field!r} is not in {layouts[0].system}; its inputs: {', '.join(names)}")
        return
    holding = [layout for layout in layouts if field in layout]
    if field and not holding and fault.needs and field == fault.field:
        raise UsageError(f"fault {fault.name!r} needs {fault.needs}")
    if field and not holding:
        known = ", ".join(each.name for each in max(layouts, key=lambda layout: len(layout.fields)))
        raise UsageError(f"fault field {field!r} is not in {layouts[0].system} as captured; its fields: {known}")
    refreshes = fault.wrap in (outputs.SkipRefresh, outputs.NotRefreshed)
    if field and refreshes and holding[0][field].lifetime is Lifetime.CAPTURE:
        raise UsageError(f"fault field {field!r} is written at capture only; choose one that replays write")


def systems_of(reference: str | None) -> tuple[str, ...] | None:
    """The systems that the fault `NAME` or `NAME:FIELD` belongs to; None without one."""
    return None if reference is None else get_fault(reference)[0].systems


def plant(reference: str, factory: SubjectFactory, system: str | None = None) -> SubjectFactory:
    """A factory of subjects with the fault `NAME` or `NAME:FIELD` planted in what `factory` makes."""
    fault, field = get_fault(reference)
    if system is not None and not fault.applies(system):
        raise UsageError(f"fault {fault.name!r} has no effect in {system}; it applies to {', '.join(fault.systems)}")
    siblings: list[Wrapper] = []

    def make() -> Subject:
        wrapper = fault.wrap(make_subject(factory), "" if fault.of_input else field)
        wrapper.siblings = siblings
        siblings.append(wrapper)
        return wrapper

    return make
