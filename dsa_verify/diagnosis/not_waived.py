"""Not waived: words of a field that a waiver covers on the device, but that are not what it is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dsa_verify.contract.finding import Diagnosis
from dsa_verify.diagnosis.account import Account
from dsa_verify.diagnosis.diagnose import broken_law, diagnose_field
from dsa_verify.diagnosis.evidence import Evidence
from dsa_verify.diagnosis.judged import judged, own_words
from dsa_verify.diagnosis.other_findings import new_finding
from dsa_verify.judge.judge import Difference
from dsa_verify.replay.bucket import CapturedBucket
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.waivers.mask import WaiverMask

Covered = tuple[int, str]  # a bucket, and the key of a waiver that covered words of it


def not_waived(
    setup: ReplaySetup, captured: CapturedBucket, evidence: Evidence, known: set[str | None], waived: set[Covered]
) -> list[Account]:
    """Return an account for each field, but those `known`, of which a waiver covers words that are not what it is for.
    `waived` is given the waivers that covered something."""
    found = []
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
        base = new_finding(setup, Diagnosis.WRONG_VALUE, captured.bucket, evidence.now.round)
        account = judged(dataclasses.replace(base, differing=len(others)), evidence, others, captured)
        account.waiver, account.after_another_replay = waiver, {}
        found.append(account)
    return found


def _other_differences(
    words: WaiverMask, evidence: Evidence, differences: Sequence[Difference], captured: CapturedBucket
) -> list[Difference]:
    """Return those of `differences` that are not what the waiver of `words` is for, each explained by itself."""
    waiver = words.waiver
    by_device = waiver.by_diagnosis and Diagnosis.NEVER_WRITTEN in waiver.diagnoses
    unwritten = words.unwritten() if by_device else None

    def is_waived(difference: Difference) -> bool:
        if unwritten is not None and unwritten[difference.row, difference.word]:
            return True
        explanation = diagnose_field(evidence, [difference]).explanation
        return waiver.is_for(explanation, own_words(captured, difference))

    return [difference for difference in differences if not is_waived(difference)]
