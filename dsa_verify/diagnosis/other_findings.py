"""Findings that no differing element shows: a failing subject, a late compilation, a difference that was seen once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.judge.judge import Tally
from dsa_verify.replay.compilations import Compilation
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.replay.subject_stages import SubjectError
from dsa_verify.waivers.waivers import Waiver

_OF_FAILURES: Final = {
    "wrong outputs": Diagnosis.WRONG_OUTPUTS,
    "synchronises in capture": Diagnosis.SYNCHRONISES,
    "allocates in replay": Diagnosis.ALLOCATES,
    "changes torch's state": Diagnosis.CHANGES_TORCH,
    "forks": Diagnosis.FORKS,
}


def new_finding(
    setup: ReplaySetup, diagnosis: Diagnosis, bucket: int | None, round_: int | None, sentence: str = ""
) -> Finding:
    """Return a finding about the subject of `setup`, without anything that depends on what is wrong."""
    return Finding(
        system=setup.system.name,
        subject=setup.subject,
        diagnosis=diagnosis,
        sentence=sentence,
        bucket=bucket,
        round=round_,
        draft_tokens=setup.geometry.draft_tokens,
    )


def fault_finding(setup: ReplaySetup, fault: SubjectError) -> Finding:
    """Return the finding that a failing (rather than wrong) subject is."""
    where = "" if fault.bucket is None else f"bucket {fault.bucket}: "
    diagnosis = _OF_FAILURES.get(fault.kind, Diagnosis.RAISES)
    return new_finding(setup, diagnosis, fault.bucket, fault.round, f"{fault.kind}: {where}{fault}")


def late_compilations(setup: ReplaySetup, compiled: Sequence[Compilation]) -> list[Finding]:
    """Return a finding for each kernel's first compilation while rounds ran; this process does not show it again."""
    first: dict[str, Compilation] = {}
    for each in compiled:
        first.setdefault(each.kernel, each)
    count = Counter(each.kernel for each in compiled)
    return [_late_compilation(setup, each, count[kernel]) for kernel, each in first.items()]


def _late_compilation(setup: ReplaySetup, first: Compilation, times: int) -> Finding:
    in_all = f"; {times} times in all" if times > 1 else ""
    where = f"bucket {first.bucket}, round {first.round}"
    sentence = f"recompiles: {where}: {first.sentence}{in_all}; a server would stall there"
    found = new_finding(setup, Diagnosis.RECOMPILES, first.bucket, first.round, sentence)
    return dataclasses.replace(found, differing=times, facts={"kernel": first.kernel, "times": times})


def flaky_finding(setup: ReplaySetup, tallies: Mapping[int, Tally], attempts: int) -> Finding:
    """Return what is left to say when a difference did not show again."""
    seen = [(difference, bucket) for bucket, tally in tallies.items() for difference in tally.first]
    first, bucket = min(seen, key=lambda pair: pair[0].round, default=(None, None))
    name = f"{first.region.kind.value} {first.region.name}" if first else "an address"
    field, round_ = (first.region.name, first.round) if first else (None, None)
    return _flaky(setup, name, field, bucket, round_, attempts)


def flaky_waived(setup: ReplaySetup, waiver: Waiver, round_: int, bucket: int, attempts: int) -> Finding:
    """Return the same for a difference that a waiver covers."""
    so = f", so it is not what waiver {waiver.id} is for"
    return _flaky(setup, f"field {waiver.field}", waiver.field, bucket, round_, attempts, so)


def _flaky(
    setup: ReplaySetup,
    what: str,
    field: str | None,
    bucket: int | None,
    round_: int | None,
    attempts: int,
    so: str = "",
) -> Finding:
    sentence = (
        f"flaky: {what} differed in round {'?' if round_ is None else round_} and was right in {attempts} repeats of "
        f"the same rounds{so}; suspect a race or a read of memory that nothing wrote"
    )
    found = new_finding(setup, Diagnosis.FLAKY, bucket, round_, sentence)
    return dataclasses.replace(found, field=field, facts={"attempts": attempts})
