"""CapturedBucket: oracle and subject of one bucket as they were captured, with the judges over them.

Why judges of their own, and not one over all: each looks at another moment of a round, or seldom, because a look costs
as much as what it looks at is large. Each has a launch beside it, on a CUDA device a captured graph; a judge that has
nothing to look at has one that does nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch

from dsa_verify.buffers.arena import Identity
from dsa_verify.buffers.region import Control, Kind, Region
from dsa_verify.contract.glue_route import Route
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.subject import Buffers, Inputs, Routed, Subject, current_outputs
from dsa_verify.graphs import Graph
from dsa_verify.judge.judge import Judge, Phase, Tally
from dsa_verify.judge.law_regions import LawWatch
from dsa_verify.judge.normalise import SortedItems, WithinTolerance
from dsa_verify.judge.pad_rows import NormalisedPadRows
from dsa_verify.replay.first_replay import FirstReplay
from dsa_verify.waivers.mask import WaiverMask
from dsa_verify.waivers.waivers import Waiver


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AddressChange:
    """An output is no longer where (or what) it was when the graph captured it."""

    bucket: int
    field: str
    round: int
    change: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrongRoute:
    """A replay was prepared in another way than contract 7.4 has for its raw batch."""

    bucket: int
    round: int
    raw: int
    taken: Route
    expected: Route


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Judges:
    """The judges of one bucket, by what they look at.

    `replay`: after each replay, all that it may have touched: fields, guards, rows of wider buckets, inputs.
    `private`: fields that this bucket alone may write, once others were replayed. `constants`: inputs that no round
    writes, once the bucket's rounds are over. `ready`: fields that must be right before the graph replays. `filled`:
    inputs before anybody has read them. `laws`: schedules. `repeat`: a second replay, held against the first; None
    until there was one.
    """

    replay: Judge
    private: Judge
    constants: Judge
    ready: Judge
    filled: Judge
    laws: Judge
    repeat: Judge | None = None

    def __iter__(self) -> Iterator[Judge]:
        yield from (self.replay, self.private, self.constants, self.ready, self.filled, self.laws)
        if self.repeat is not None:
            yield self.repeat

    def tally(self) -> Tally:
        """Return what all of them have seen; synchronises."""
        seen = [judge.poll() for judge in self]
        differing: Counter[Region] = Counter()
        for tally in seen:
            differing.update(tally.differing)
        first = [difference for tally in seen for difference in tally.first]
        first.sort(key=lambda difference: (difference.round, difference.phase))
        return Tally(compared=seen[0].compared, differing=differing, first=tuple(first))

    def reset(self) -> None:
        """Forget everything seen so far."""
        for judge in self:
            judge.reset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shown:
    """Outputs as judges are shown them. `forms`: by field, a copy in which what may lie there in more than one form is
    in one. `waived`: copies in which what a waiver covers is right."""

    forms: Mapping[str, SortedItems | WithinTolerance | NormalisedPadRows]
    waived: tuple[WaiverMask, ...]

    @property
    def righted(self) -> dict[str, torch.Tensor]:
        """Return by field that a waiver covers words of, the copy."""
        return {words.waiver.field: words.copy for words in self.waived}

    @property
    def copies(self) -> dict[str, torch.Tensor]:
        """Return by field that is not shown as it lies in memory, what is shown instead."""
        return {name: form.copy for name, form in self.forms.items()} | self.righted

    def remember(self) -> None:
        """Remember what lies there before the replay; asynchronous and capturable."""
        for words in self.waived:
            words.remember()

    def update(self, phase: Phase) -> None:
        """Make the copies anew for a look in `phase`; asynchronous and capturable."""
        for form in self.forms.values():
            form.update()
        for words in self.waived:
            words.update(phase)

    def reset(self) -> None:
        """Forget what waivers have covered so far."""
        for words in self.waived:
            words.reset()
            words.explained = False


def nothing() -> None:
    """Launch nothing: the judge has nothing to look at."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Sides:
    """Subject and oracle of one bucket once both are captured.

    `outputs`: the subject's, as they were then. `poison_kind`: int32 [1], the poison of the round. `at_capture`: what
    the oracle gave for the inputs at capture, if it was kept. `frozen`: the same of each field that a waiver covers
    words of.
    """

    layout: Layout
    subject: Subject
    oracle: Subject
    inputs: Inputs
    oracle_inputs: Inputs
    buffers: Buffers
    oracle_buffers: Buffers
    outputs: Mapping[str, torch.Tensor]
    control: Control
    poison_kind: torch.Tensor
    subject_graph: Graph
    oracle_graph: Graph
    at_capture: dict[str, torch.Tensor]
    waivers: tuple[Waiver, ...]
    frozen: Mapping[str, torch.Tensor]

    @property
    def bucket(self) -> int:
        return self.layout.bucket


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class CapturedBucket(Sides):
    """Everything of one bucket that a round touches.

    `prepare` and `judge_*` launch the harness's own work, `judge_replay` in its two phases. `fields`: as they lie in
    memory, without those that a waiver covers words of. `ledger`: where each output was at capture. `disturbed`:
    whether its own fields have been prepared for other inputs since its last round. `rounds`: replayed so far.
    """

    prepare: Callable[[], None]
    judge_replay: Callable[[Phase], None]
    judge_private: Callable[[], None]
    judge_constants: Callable[[], None]
    judge_ready: Callable[[], None]
    judge_filled: Callable[[], None]
    judge_laws: Callable[[], None]
    judges: Judges
    shown: Shown
    laws: LawWatch
    fields: Mapping[str, Region]
    routed: Routed | None
    ledger: dict[str, Identity] = dataclasses.field(default_factory=dict)
    first_replay: FirstReplay | None = None
    disturbed: bool = False
    rounds: int = 0

    @property
    def waived(self) -> tuple[WaiverMask, ...]:
        """Return the words that waivers cover."""
        return self.shown.waived

    @property
    def judged_fields(self) -> list[Region]:
        """Return the fields that every replay is judged by, as they are shown."""
        return [region for region in self.judges.replay.regions if region.kind is Kind.FIELD]

    def judge_private_if_due(self) -> None:
        """Judge what the bucket's last round left there, before anything is done to it on purpose."""
        if self.rounds and not self.disturbed:
            self.judge_private()

    def identities(self) -> dict[str, Identity]:
        """Return what each output is now."""
        outputs = current_outputs(self.subject, self.buffers)
        return {field.name: Identity.of(outputs[field.name]) for field in self.layout if field.name in outputs}

    def pointers_hold(self) -> bool:
        """Return whether each output lies where it did: the cheap half of `address_changes`."""
        outputs = current_outputs(self.subject, self.buffers)
        for name, identity in self.ledger.items():
            tensor = outputs.get(name)
            if tensor is None or tensor.data_ptr() != identity.pointer:
                return False
        return True

    def address_changes(self, round_: int) -> list[AddressChange]:
        """Return what differs from the ledger after round `round_`."""
        now = self.identities()
        changes = {
            name: identity.change_to(now[name]) if name in now else "the output is gone"
            for name, identity in self.ledger.items()
        }
        return [
            AddressChange(bucket=self.bucket, field=name, round=round_, change=change)
            for name, change in changes.items()
            if change
        ]

    def keep_first_replay(self, round_index: torch.Tensor) -> FirstReplay:
        """Return what compares a second replay with the first, which has just been judged."""
        if self.first_replay is None:
            regions, device = self.judges.replay.regions, round_index.device
            self.first_replay = FirstReplay(regions, self.waived, device, round_index)
            self.judges.repeat = self.first_replay.judge
        self.first_replay.keep()
        return self.first_replay

    def occurred(self) -> Mapping[str, bool]:
        """Return by what must occur for the run to count (of a declaration), whether it has; synchronises."""
        ask = getattr(self.oracle, "occurred", None)
        return {} if ask is None else ask()

    def reset(self) -> None:
        """Forget the rounds that were replayed."""
        self.rounds, self.disturbed = 0, False
        forget = getattr(self.oracle, "forget", None)
        if forget is not None:
            forget()
        self.judges.reset()
        self.shown.reset()


def host_copy(buffers: Buffers) -> dict[str, torch.Tensor]:
    """Return the tensors of `buffers` on the CPU as they are now, float32 as the int32 of its bits."""
    copies = {name: tensor.cpu().clone() for name, tensor in buffers.items()}
    return {name: copy.view(torch.int32) if copy.dtype is torch.float32 else copy for name, copy in copies.items()}
