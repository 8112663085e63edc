"""Confirm: replays a failing scenario from nothing, one round at a time, and says what is wrong and why.

This is the slow twin of the fast run: it polls after every round and keeps what the oracle gave in the rounds before,
which is what a diagnosis compares a wrong value with. It stops at the first round in which anything is wrong.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

from dsa_verify.base.errors import HarnessError
from dsa_verify.buffers.region import Kind, Region
from dsa_verify.contract.finding import INPUT_RULE, LAW_RULE, MEMORY_RULE, Diagnosis, Finding
from dsa_verify.contract.glue_route import Route
from dsa_verify.contract.owners import held_in
from dsa_verify.contract.round import POISONS, Round
from dsa_verify.contract.round_table import RoundTable
from dsa_verify.diagnosis.diagnose import broken_law, diagnose_field, explain_guard, if_replayed_again
from dsa_verify.diagnosis.evidence import Evidence, Moment
from dsa_verify.judge.judge import RING_ENTRIES, Difference, Phase, Tally, expected_words, live_words
from dsa_verify.replay.bucket import AddressChange, CapturedBucket, WrongRoute, host_copy
from dsa_verify.replay.compilations import Compilation
from dsa_verify.replay.replayer import Replayer
from dsa_verify.replay.setup import ReplaySetup, remap_slots_of
from dsa_verify.replay.subject_stages import SubjectError
from dsa_verify.systems.indexer import scheduled_lengths
from dsa_verify.waivers.mask import WaivedWords
from dsa_verify.waivers.waivers import Waiver

HISTORY_ROUNDS: Final = 32
_Listed = TypeVar("_Listed", AddressChange, WrongRoute)
Covered = tuple[int, str]  # a bucket, and the key of a waiver that covered words of it
_ROUTES: Final = {Route.GLUE: "the captured graph", Route.EAGER: "eager work"}
_FAULT_DIAGNOSES: Final = {
    "wrong outputs": Diagnosis.WRONG_OUTPUTS,
    "synchronises in capture": Diagnosis.SYNCHRONISES,
    "allocates in replay": Diagnosis.ALLOCATES,
    "changes torch's state": Diagnosis.CHANGES_TORCH,
    "forks": Diagnosis.FORKS,
}


def confirm(setup: ReplaySetup, rounds: Sequence[Round], *, waived: set[Covered] | None = None) -> list[Finding]:
    """The findings of the first wrong round of `rounds`, without their cases; empty if all are right.

    A word that a waiver covers is right only if it is called what the waiver is for. `waived` is given what was so.
    """
    waived = set() if waived is None else waived
    slots = remap_slots_of(rounds)
    table = setup.table(rounds, slots)
    history: deque[Moment] = deque(maxlen=HISTORY_ROUNDS)
    found: list[Finding] = []
    doubts: list[_Doubt] = []
    told: set[object] = set()
    try:
        replayer = setup.open(len(rounds), slots, record=True, first=table)
        capture = {bucket: _capture_moment(setup, captured) for bucket, captured in replayer.buckets.items()}

        def look_at_replay(captured: CapturedBucket, row: int) -> None:
            evidence = _evidence(captured, _moment(setup, captured, table, row), history, capture)
            found.extend(_findings(setup, replayer, captured, evidence, doubts, told))
            found.extend(_beyond_waivers(setup, captured, evidence, {finding.field for finding in found}, waived))
            history.append(evidence.now)

        def look(captured: CapturedBucket, row: int) -> bool:
            if table.twice[row]:  # the first replay has been looked at
                evidence = _evidence(captured, history.pop(), history, capture)
                found.extend(_findings(setup, replayer, captured, evidence, doubts, told))
                history.append(evidence.now)
            else:
                look_at_replay(captured, row)
            return bool(found)

        replayer.replay(table, after_round=look, after_first=look_at_replay)
        if doubts:
            _replay_again(setup, replayer, rounds[history[-1].round], slots, doubts)
            found = [_without_doubt(finding, doubts) for finding in found]
        if not found:
            replayer.finish()
            last = replayer.buckets[rounds[-1].bucket] if rounds else None
            if last is not None:
                *earlier, now = history
                evidence = _evidence(last, now, earlier, capture)
                found.extend(_findings(setup, replayer, last, evidence, doubts, told))
    except SubjectError as fault:
        return [fault_finding(setup, fault)]
    return found


@dataclasses.dataclass(slots=True, kw_only=True)
class _Doubt:
    """A `sentence` that one more replay may better: `told` says how, by what the element holds then, which is `got`."""

    difference: Difference
    sentence: str
    told: Mapping[int, tuple[Diagnosis, str]]
    got: int | None = None


def _replay_again(setup: ReplaySetup, replayer: Replayer, round_: Round, slots: int, doubts: Sequence[_Doubt]) -> None:
    """Replay the inputs of `round_`, the last one, once more, and look at what is in doubt."""
    again = dataclasses.replace(round_.with_remap(()), twice=False, foreign=False, poison="loud")
    try:
        replayer.replay(setup.table([again], slots))
    except SubjectError:
        return  # what was found before it stands
    for doubt in doubts:
        seen = doubt.difference
        doubt.got = int(seen.region.got[seen.row, seen.word])


def _without_doubt(finding: Finding, doubts: Sequence[_Doubt]) -> Finding:
    for doubt in doubts:
        if doubt.got is not None and doubt.sentence in finding.sentence and doubt.got in doubt.told:
            diagnosis, sentence = doubt.told[doubt.got]
            told = finding.sentence.replace(doubt.sentence, sentence)
            return dataclasses.replace(finding, diagnosis=diagnosis, sentence=told)
    return finding


def fault_finding(setup: ReplaySetup, fault: SubjectError) -> Finding:
    """The finding that a failing (rather than wrong) subject is."""
    return Finding(
        system=setup.system.name,
        subject=setup.subject,
        diagnosis=_FAULT_DIAGNOSES.get(fault.kind, Diagnosis.RAISES),
        sentence=f"{fault.kind}: {'' if fault.bucket is None else f'bucket {fault.bucket}: '}{fault}",
        bucket=fault.bucket,
        round=fault.round,
        draft_tokens=setup.geometry.draft_tokens,
    )


def late_compilations(setup: ReplaySetup, compiled: Sequence[Compilation]) -> list[Finding]:
    """A finding for each kernel that was compiled while rounds ran, of its first time. It does not show again in this
    process, which has the kernel now."""
    first: dict[str, Compilation] = {}
    for each in compiled:
        first.setdefault(each.kernel, each)
    count = Counter(each.kernel for each in compiled)
    return [
        Finding(
            system=setup.system.name,
            subject=setup.subject,
            diagnosis=Diagnosis.RECOMPILES,
            sentence=(
                f"recompiles: bucket {each.bucket}, round {each.round}: {each.sentence}"
                f"{f'; {count[kernel]} times in all' if count[kernel] > 1 else ''}; a server would stall there"
            ),
            bucket=each.bucket,
            round=each.round,
            differing=count[kernel],
            draft_tokens=setup.geometry.draft_tokens,
        )
        for kernel, each in first.items()
    ]


def flaky_finding(setup: ReplaySetup, tallies: Mapping[int, Tally], attempts: int) -> Finding:
    """What is left to say when a difference did not show again."""
    seen = [(difference, bucket) for bucket, tally in tallies.items() for difference in tally.first]
    first, bucket = min(seen, key=lambda pair: pair[0].round, default=(None, None))
    name = f"{first.region.kind.value} {first.region.name}" if first else "an address"
    return Finding(
        system=setup.system.name,
        subject=setup.subject,
        diagnosis=Diagnosis.FLAKY,
        sentence=(
            f"flaky: {name} differed in round {first.round if first else '?'} and was right in {attempts} repeats of "
            "the same rounds; suspect a race or a read of memory that nothing wrote"
        ),
        field=first.region.name if first else None,
        bucket=bucket,
        round=first.round if first else None,
        draft_tokens=setup.geometry.draft_tokens,
    )


def flaky_waived(setup: ReplaySetup, waiver: Waiver, round_: int, bucket: int, attempts: int) -> Finding:
    """Likewise, where a waiver covers it."""
    base = _base(setup, bucket, round_)
    sentence = (
        f"flaky: field {waiver.field} differed in round {round_} and was right in {attempts} repeats of the same "
        f"rounds, so it is not what waiver {waiver.id} is for; suspect a race or a read of memory that nothing wrote"
    )
    return dataclasses.replace(base, diagnosis=Diagnosis.FLAKY, sentence=sentence, field=waiver.field)


def _findings(
    setup: ReplaySetup,
    replayer: Replayer,
    captured: CapturedBucket,
    evidence: Evidence,
    doubts: list[_Doubt],
    told: set[object],
) -> list[Finding]:
    """What is wrong after this replay, in reporting order, but for what is in `told`; adds to it and to `doubts`."""
    tallies = replayer.poll()
    by_region: dict[tuple[Phase, int], list[tuple[int, Difference]]] = defaultdict(list)
    counts: dict[int, int] = {}
    for bucket, tally in tallies.items():
        for region, count in tally.differing.items():
            counts[id(region)] = count
        for difference in tally.first:
            by_region[(difference.phase, id(difference.region))].append((bucket, difference))
    replaced = {change.field for change in replayer.address_changes}
    findings = [
        dataclasses.replace(
            _base(setup, change.bucket, change.round),
            diagnosis=Diagnosis.BUFFER_REPLACED,
            field=change.field,
            section=MEMORY_RULE,
            sentence=(
                f"buffer replaced: {change.field} of bucket {change.bucket}: {change.change} after capture; "
                "the graph still writes the old one"
            ),
        )
        for change in _untold(replayer.address_changes, told)
    ]
    findings += [
        dataclasses.replace(
            _base(setup, wrong.bucket, wrong.round),
            diagnosis=Diagnosis.WRONG_ROUTE,
            sentence=(
                f"wrong route: raw batch {wrong.raw} of bucket {wrong.bucket} was prepared by {_ROUTES[wrong.taken]}, "
                f"it must be by {_ROUTES[wrong.expected]} (contract 7.4)"
            ),
        )
        for wrong in _untold(replayer.wrong_routes, told)
    ]
    # Wrong inputs come first: what follows from them is wrong, too.
    ordered = sorted(by_region.items(), key=lambda item: item[0][0] is not Phase.FILLED)
    fields = {entries[0][1].region.name for _, entries in ordered if entries[0][1].region.kind is Kind.FIELD}
    seen = [entries[0][1] for entries in by_region.values()]
    for key, entries in ordered:
        bucket, first = entries[0]
        if key in told:
            continue
        if first.region.kind is Kind.FIELD and first.region.name in replaced:
            continue
        if first.region.kind is Kind.LAW and first.region.name in fields:
            continue  # the field's own finding says what the schedule does to its tiles
        if _follows(first, seen):
            continue
        told.add(key)
        differences = [difference for _, difference in entries]
        if first.region.kind is Kind.FIELD and first.phase in (Phase.REPLAY, Phase.SECOND_REPLAY):
            differences = first_differences(first)
        base = dataclasses.replace(_base(setup, bucket, first.round), differing=counts.get(id(first.region), 0))
        findings.append(_judged(base, evidence, differences, captured, doubts))
    return findings


def _untold(items: Sequence[_Listed], told: set[object]) -> list[_Listed]:
    """Those of `items` that are not in `told`, once each; adds them to it."""
    new = [item for item in dict.fromkeys(items) if item not in told]
    told.update(new)
    return new


def _follows(first: Difference, seen: Sequence[Difference]) -> bool:
    """Whether what `first` says follows from another of `seen`, which lie in the same round."""
    region = first.region
    if first.phase is Phase.REPLAY:
        # What was wrong before the graph is still wrong after it.
        before = Phase.FILLED if region.kind is Kind.INPUT else Phase.BEFORE_GRAPH
        return any(each.phase is before and each.region.name == region.name for each in seen)
    if first.phase is Phase.SECOND_REPLAY:
        earlier = [each.region for each in seen if each.phase is Phase.REPLAY]
        if region.kind is Kind.FIELD:
            # The first replay has changed an input, so that the second had another.
            return any(each.kind is Kind.INPUT for each in earlier)
        return any((each.kind, each.name) == (region.kind, region.name) for each in earlier)
    return False


def first_differences(seen: Difference) -> list[Difference]:
    """The differences that a region shows now, the first RING_ENTRIES in row-major order, all like `seen`.

    The ring has whichever the device came to first; after a round the buffers still hold what its last look judged.
    """
    region = seen.region
    want, checked = expected_words(region, live_words(region))
    wrong = (region.got != want) & checked
    # Rows first: a whole table may have more elements than `nonzero` takes.
    rows = wrong.any(1).nonzero().flatten()[:RING_ENTRIES]
    places = wrong[rows].nonzero()[:RING_ENTRIES]
    found = [
        dataclasses.replace(seen, row=row, word=word, got=int(region.got[row, word]), want=int(want[row, word]))
        for row, word in zip(rows[places[:, 0]].tolist(), places[:, 1].tolist(), strict=True)
    ]
    return found or [seen]


def _judged(
    base: Finding,
    evidence: Evidence,
    differences: Sequence[Difference],
    captured: CapturedBucket,
    doubts: list[_Doubt] | None = None,
) -> Finding:
    first = differences[0]
    region: Region = first.region
    place, law = None, None
    if region.kind is Kind.ORACLE_GUARD:
        raise HarnessError(f"the oracle wrote beyond its buffer {region.name}; no verdict can be drawn")
    if region.kind is Kind.GUARD:
        diagnosis, text = explain_guard(first, base.differing)
        sentence = f"{diagnosis.value}: {text}"
    elif region.kind is Kind.BEYOND:
        diagnosis = Diagnosis.OTHER_BUCKET
        row = evidence.layout[region.name].rows + first.row
        sentence = (
            f"{diagnosis.value}: bucket {base.bucket} wrote {region.name} row {row}, "
            f"which belongs to wider buckets only ({base.differing} words)"
        )
    elif region.kind is Kind.LAW:
        diagnosis = Diagnosis.LAW_BROKEN
        broken = captured.laws.broken(region.name)[0]
        law = broken.law.value
        sentence = f"{diagnosis.value}: {region.name} is what the oracle has, and yet {broken.sentence} (contract 3.5)"
    elif first.phase is Phase.FILLED:
        diagnosis = Diagnosis.TAIL_NOT_RESET
        sentence = f"{diagnosis.value}: {_tail(evidence, first)}"
    elif region.kind is Kind.INPUT:
        diagnosis = Diagnosis.INPUT_OVERWRITTEN
        sentence = (
            f"{diagnosis.value}: {region.name}[{first.row}{f', {first.column}' if region.got.shape[1] > 2 else ''}] "
            f"is {first.got} after the replay, it was {first.want}"
        )
    elif first.phase is Phase.BEFORE:
        diagnosis = Diagnosis.OTHER_BUCKET
        sentence = (
            f"{diagnosis.value}: {region.name}[{first.row}, {first.column}] of bucket {base.bucket} was right when "
            f"that bucket was replayed and is {first.got} (was {first.want}) after other buckets were"
        )
    else:
        diagnosis, sentence, place = diagnose_field(evidence, differences)
        told = if_replayed_again(evidence, first, sentence)
        if told and doubts is not None:
            doubts.append(_Doubt(difference=first, sentence=sentence, told=told))
        if first.phase is Phase.BEFORE_GRAPH:
            sentence = f"before the graph replays: {sentence}"
        if said := _own_words(captured, first):
            sentence = f"{sentence}; {said}"
        breaks = broken_law(evidence, region) if scheduled_lengths(region.name) is not None else None
        if breaks is not None:
            law, sentence = breaks.law.value, f"{sentence}; {breaks.sentence}"
    return dataclasses.replace(
        base,
        diagnosis=diagnosis,
        sentence=sentence,
        field=region.name,
        place=place,
        law=law,
        section=LAW_RULE if law is not None else _section(evidence, first),
        got=first.got,
        want=first.want,
    )


def _section(evidence: Evidence, first: Difference) -> str | None:
    """Of the contract, where it is stated what `first` breaks."""
    if first.phase is Phase.FILLED:
        return None  # the sentence says why a pad row is reset
    if first.region.kind is Kind.INPUT:
        return INPUT_RULE
    if first.region.kind is Kind.FIELD and first.phase is not Phase.BEFORE:
        return evidence.layout[first.region.name].section
    return MEMORY_RULE


def _beyond_waivers(
    setup: ReplaySetup, captured: CapturedBucket, evidence: Evidence, known: set[str | None], waived: set[Covered]
) -> list[Finding]:
    """A finding for each field, but those `known`, of which a waiver covers words that are not what it is for."""
    findings = []
    for words in captured.waived:
        waiver = words.waiver
        if not waiver.sampled or waiver.field in known:
            continue
        differences = words.differences(evidence.now.round)
        if not differences:
            continue
        waived.add((captured.bucket, waiver.key))
        law = broken_law(evidence, words.region) if waiver.law is not None else None
        others = differences
        if waiver.law is None or (law is not None and law.law.value == waiver.law):
            others = _other_differences(words, evidence, differences, captured)
        if not others:
            continue
        base = dataclasses.replace(_base(setup, captured.bucket, evidence.now.round), differing=len(others))
        finding = _judged(base, evidence, others, captured)
        sentence = f"{finding.sentence}; waiver {waiver.id} covers only what is {waiver.covered}"
        findings.append(dataclasses.replace(finding, sentence=sentence))
    return findings


def _other_differences(
    words: WaivedWords, evidence: Evidence, differences: Sequence[Difference], captured: CapturedBucket
) -> list[Difference]:
    """Those of `differences` that are not what the waiver of `words` is for, each explained by itself."""
    waiver = words.waiver
    by_device = waiver.says is None and Diagnosis.NEVER_WRITTEN in waiver.diagnoses
    unwritten = words.unwritten() if by_device else None

    def is_waived(difference: Difference) -> bool:
        if unwritten is not None and unwritten[difference.row, difference.word]:
            return True
        diagnosis, sentence, _ = diagnose_field(evidence, [difference])
        if diagnosis not in waiver.diagnoses:
            return False
        return waiver.says is None or waiver.says in f"{sentence}; {_own_words(captured, difference)}"

    return [difference for difference in differences if not is_waived(difference)]


def _own_words(captured: CapturedBucket, difference: Difference) -> str:
    """What the subject itself has to say of a wrong element; empty for most."""
    own = getattr(captured.subject, "explain", None)
    name, column = difference.region.name, difference.column
    try:
        said = own(name, difference.row, column, difference.got, difference.want) if own is not None else None
    except Exception as error:  # a user's method may raise anything, and the finding stands without its words
        said = f"explain raised {type(error).__name__}: {error}"
    return said or ""


def _tail(evidence: Evidence, first: Difference) -> str:
    raw, bucket = evidence.now.raw, evidence.layout.bucket
    element = f"{first.row}{f', {first.column}' if first.region.got.shape[1] > 2 else ''}"
    return (
        f"input {first.region.name}[{element}] is {first.got} before anything has read it, it must be {first.want}: "
        f"with raw batch {raw}, batch rows {raw} to {bucket - 1} are pad rows, which the engine resets (contract 0.2, "
        "7.5)"
    )


def _base(setup: ReplaySetup, bucket: int, round_: int) -> Finding:
    return Finding(
        system=setup.system.name,
        subject=setup.subject,
        diagnosis=Diagnosis.WRONG_VALUE,
        sentence="",
        bucket=bucket,
        round=round_,
        draft_tokens=setup.geometry.draft_tokens,
    )


def _evidence(
    captured: CapturedBucket, now: Moment, earlier: Iterable[Moment], capture: Mapping[int, Moment]
) -> Evidence:
    """What may be said of the round that was replayed last, whose request table lies in the inputs."""
    return Evidence(
        layout=captured.layout,
        now=now,
        earlier=list(earlier),
        capture=capture[captured.bucket],
        owner_of=held_in(captured.layout.geometry, captured.inputs.req_to_token),
    )


def _moment(setup: ReplaySetup, captured: CapturedBucket, table: RoundTable, row: int) -> Moment:
    bucket, given = captured.bucket, captured.inputs.tensors()
    return Moment(
        round=row,
        bucket=bucket,
        raw=int(table.raw[row]),
        seq_lens=tuple(table.seq_lens[row, :bucket].tolist()),
        requests=tuple(table.requests[row, :bucket].tolist()),
        row_request=tuple(table.row_request[row, : table.token_rows[row]].tolist()),
        live_tokens=tuple(table.live_tokens[row, :bucket].tolist()),
        live_candidates=tuple(table.live_candidates[row, :bucket].tolist()),
        token_rows=int(table.token_rows[row]),
        poison=POISONS[int(table.poison[row])],
        want=host_copy(captured.oracle_buffers),
        inputs={name: given[name].cpu().clone() for name in setup.system.told},
    )


def _capture_moment(setup: ReplaySetup, captured: CapturedBucket) -> Moment:
    """What was right for the inputs at capture: every row a pad row (contract 0.2)."""
    idle = setup.table([Round(bucket=captured.bucket, seq_lens=(), requests=())])
    return dataclasses.replace(_moment(setup, captured, idle, 0), round=-1, want=captured.at_capture)
