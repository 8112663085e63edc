"""Region: a stretch of memory that the judge looks at or the poison is spread over, as int32 words in rows.

One description serves the fields, the guards, the rows that belong to wider buckets and the inputs, so that a single
launch over a table of regions can see to all of them. Words make every dtype comparable bit by bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum

import torch

from dsa_verify.base.errors import HarnessError
from dsa_verify.buffers.arena import GUARD_WORD, Arena, Guard
from dsa_verify.contract.layout import DTYPE_BYTES, Dead, Field, Layout, Lifetime, Live, Row, live_rows_name
from dsa_verify.contract.subject import Inputs

LOUD_WORD = -0x61616162  # int32 of 0x9E9E9E9E: negative, and neither a guard nor a graph's own poison


class Kind(Enum):
    FIELD = "field"  # an output of the subject, against the oracle's
    GUARD = "guard"  # around a buffer or an input of the subject, or behind its rows
    WIDER_BUCKET = "wider bucket"  # rows of a shared buffer that belong to wider buckets only
    INPUT = "input"  # an input of the subject, against the oracle's copy
    LAW = "law"  # what a schedule law found, against what it writes where it holds
    ORACLE_GUARD = "oracle guard"  # a hit here is the harness's own fault


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The judge reads here about the round that a bucket has just replayed; the input buffers' step writes it.

    `live_tokens`, `live_candidates` int32 [bucket]; `token_rows` int32 [1]; `row_request` int32 [token rows].
    """

    live_tokens: torch.Tensor
    live_candidates: torch.Tensor
    token_rows: torch.Tensor
    row_request: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """`got` (and `want`, where there is one): int32 [rows, words], `want` with unit column stride.

    Without `want` every word must equal `constant`. `row_request` maps a row to its request; `want` is read at that
    request's row if `want_per_request`. A word is live iff its row is below `live_rows` and its element column times
    `column_step`, plus `column_start`, is below the request's `live_bound`; dead words must equal `constant` unless
    `dead` is STALE. `poisonable`: overwritten before each replay, but for its first `kept_rows`. `low`, `high`: the
    range a plausible poison is drawn from. `neighbours`, `gaps_per_row`: of a guard, as arena.Guard has them.
    """

    kind: Kind
    name: str
    got: torch.Tensor
    want: torch.Tensor | None = None
    row_request: torch.Tensor | None = None
    want_per_request: bool = False
    live_bound: torch.Tensor | None = None
    column_step: int = 0
    column_start: int = 0
    live_rows: torch.Tensor | None = None
    live_rows_extra: int = 0
    words_per_element: int = 1
    dead: Dead = Dead.STALE
    constant: int = 0
    poisonable: bool = False
    kept_rows: int = 0
    low: int = 0
    high: int = 1
    neighbours: tuple[str | None, str | None] = (None, None)
    gaps_per_row: int = 1


def rows_are_whole(tensor: torch.Tensor) -> bool:
    """Return whether the elements of each row of `tensor` are adjacent, which is all that `as_words` asks for."""
    return tensor.dim() < 2 or tensor.numel() == 0 or tensor[0].is_contiguous()


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, whose rows are whole, as int32 [rows, words]."""
    rows = tensor.shape[0]
    columns = tensor[0].numel() if tensor.dim() > 1 and rows else 1
    return tensor.as_strided((rows, columns), (tensor.stride(0), 1)).view(torch.int32)


def field_regions(
    layout: Layout,
    subject: Mapping[str, torch.Tensor],
    oracle: Mapping[str, torch.Tensor],
    control: Control,
) -> list[Region]:
    """Return a region for each field that owns memory, in layout order. The ledger sees that aliases stay aliases."""
    return [
        _field_region(field, subject[field.name], oracle[field.name], control, oracle.get(live_rows_name(field.name)))
        for field in layout
        if field.alias is None
    ]


def _field_region(
    field: Field, got: torch.Tensor, want: torch.Tensor, control: Control, of_rows: torch.Tensor | None
) -> Region:
    words = DTYPE_BYTES[field.dtype] // 4
    if field.dead is Dead.INTACT:
        # What must stay untouched so far are whole rows of wider buckets, see `wider_bucket_regions`.
        raise HarnessError(f"{field.name}: dead elements of a field cannot be judged intact; use stale or pad")
    bounds = {Live.TOKENS: control.live_tokens, Live.CANDIDATES: control.live_candidates, Live.ROWS: of_rows}
    return Region(
        kind=Kind.FIELD,
        name=field.name,
        got=as_words(got),
        want=as_words(want),
        row_request=control.row_request if field.row is Row.TOKEN and field.live is not Live.ROWS else None,
        want_per_request=field.one_row_per_request,
        live_bound=bounds[field.live] if field.column_step else None,
        column_step=field.column_step,
        column_start=field.column_start,
        live_rows=control.token_rows if field.live_token_rows else None,
        # A prefix sum has one element more than the rows it sums.
        live_rows_extra=1 if field.row is Row.TOKEN_PREFIX else 0,
        words_per_element=words,
        dead=Dead.PAD if field.dead is Dead.PAD else Dead.STALE,
        constant=field.dead_value,
        poisonable=field.lifetime is Lifetime.REPLAY,
        kept_rows=field.kept_rows,
        low=max(field.low, 0),
        high=field.high,
    )


def guard_regions(guards: Sequence[Guard], kind: Kind) -> list[Region]:
    return [
        Region(
            kind=kind,
            name=guard.after or guard.before or "",
            got=guard.words.view(1, -1) if guard.words.dim() == 1 else guard.words,
            want=guard.want,
            constant=GUARD_WORD,
            poisonable=guard.want is None,
            neighbours=(guard.after, guard.before),
            gaps_per_row=guard.gaps_per_row,
        )
        for guard in guards
    ]


def wider_bucket_regions(arena: Arena, bucket: int) -> list[Region]:
    return [
        Region(kind=Kind.WIDER_BUCKET, name=name, got=as_words(rows), constant=LOUD_WORD, poisonable=True)
        for name, rows in arena.wider_bucket_rows(bucket).items()
    ]


def input_regions(subject: Inputs, oracle: Inputs) -> list[Region]:
    """A region for each input, or for each `name[i]` of one with more dimensions whose rows are not whole."""
    wanted = oracle.tensors()
    return [
        region for name, tensor in subject.tensors().items() for region in _input_regions(name, tensor, wanted[name])
    ]


def _input_regions(name: str, got: torch.Tensor, want: torch.Tensor) -> list[Region]:
    if rows_are_whole(got):
        pairs = {name: (as_words(got), as_words(want))}
    elif got.dim() == 2:
        pairs = {name: (_by_last(got), _by_last(want))}
    else:
        pairs = {f"{name}[{i}]": (_by_last(got[i]), _by_last(want[i])) for i in range(len(got))}
    size = got.element_size() // 4
    return [
        Region(kind=Kind.INPUT, name=each, got=words, want=must_be, words_per_element=size)
        for each, (words, must_be) in pairs.items()
    ]


def _by_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` of one word an element as int32 [rows, words], a row for each of its last dimension."""
    return tensor.view(-1, tensor.shape[-1]).view(torch.int32)


def private_fields(layout: Layout, regions: Sequence[Region]) -> list[Region]:
    """Return the field regions that only this bucket may write: they must survive the replays of other buckets."""
    return [region for region in regions if region.kind is Kind.FIELD and not layout[region.name].shared]
