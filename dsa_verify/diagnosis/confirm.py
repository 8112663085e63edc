"""Confirm: replays a failing scenario from nothing, one round at a time, and says what is wrong and why.

This is the slow twin of the fast run: it polls after every round and keeps what the oracle gave in the rounds before,
which is what a diagnosis compares a wrong value with. It stops at the first round in which anything is wrong.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Final

from dsa_verify.contract.finding import Finding
from dsa_verify.contract.round import Round
from dsa_verify.diagnosis.account import Account
from dsa_verify.diagnosis.accounts import accounts_of
from dsa_verify.diagnosis.evidence import Moment
from dsa_verify.diagnosis.moments import capture_moment, evidence_of, moment_of
from dsa_verify.diagnosis.not_waived import Covered, not_waived
from dsa_verify.diagnosis.other_findings import fault_finding
from dsa_verify.replay.bucket import CapturedBucket
from dsa_verify.replay.replayer import Replayer
from dsa_verify.replay.setup import ReplaySetup, remap_slots_of
from dsa_verify.replay.subject_stages import SubjectError

HISTORY_ROUNDS: Final = 32


def confirm(setup: ReplaySetup, rounds: Sequence[Round], *, waived: set[Covered] | None = None) -> list[Finding]:
    """Return the findings of the first wrong round of `rounds`, without their cases; empty if all are right.

    A word that a waiver covers is right only if it is called what the waiver is for. `waived` is given what was so.
    """
    waived = set() if waived is None else waived
    slots = remap_slots_of(rounds)
    table = setup.table(rounds, slots)
    history: deque[Moment] = deque(maxlen=HISTORY_ROUNDS)
    found: list[Account] = []
    told: set[object] = set()
    try:
        replayer = setup.open(len(rounds), slots, record=True, first=table)
        capture = {bucket: capture_moment(setup, captured) for bucket, captured in replayer.buckets.items()}

        def look_at_replay(captured: CapturedBucket, row: int) -> None:
            evidence = evidence_of(captured, moment_of(setup, captured, table, row), history, capture)
            found.extend(accounts_of(setup, replayer, captured, evidence, told))
            found.extend(not_waived(setup, captured, evidence, {account.field for account in found}, waived))
            history.append(evidence.now)

        def look(captured: CapturedBucket, row: int) -> bool:
            if table.twice[row]:  # the first replay has been looked at
                evidence = evidence_of(captured, history.pop(), history, capture)
                found.extend(accounts_of(setup, replayer, captured, evidence, told))
                history.append(evidence.now)
            else:
                look_at_replay(captured, row)
            return bool(found)

        replayer.replay(table, after_round=look, after_first=look_at_replay)
        if any(account.after_another_replay for account in found):
            _replay_again(setup, replayer, rounds[history[-1].round], slots, found)
        if not found:
            replayer.finish()
            last = replayer.buckets[rounds[-1].bucket] if rounds else None
            if last is not None:
                *earlier, now = history
                found.extend(accounts_of(setup, replayer, last, evidence_of(last, now, earlier, capture), told))
    except SubjectError as fault:
        return [fault_finding(setup, fault)]
    return [account.finding() for account in found]


def _replay_again(setup: ReplaySetup, replayer: Replayer, round_: Round, slots: int, found: Sequence[Account]) -> None:
    """Replay the inputs of `round_`, the last one, once more, and see what that says of those `found`."""
    again = dataclasses.replace(round_.with_remap(()), twice=False, foreign=False, poison="loud")
    try:
        replayer.replay(setup.table([again], slots))
    except SubjectError:
        return  # what was found before it stands
    for account in found:
        account.look_again()
