"""Ledgers, rounds and subjects of more than one file of tests of waivers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import EagerDecode, backend, decode_round, small

from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.round import Round
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.waivers.waivers import Ledger, parse_ledger

LENGTHS, DSA = "cache_seqlens_int32", "dsa_cache_seqlens_int32"
STALE = [f"step{step}_{name}" for step in range(3) for name in ("paged_mqa_schedule_metadata", "topk_v2_plan")]
# Lengths far enough from each other that one more is no other row's.
ROUNDS = [
    decode_round(4, 5, 17, 33, 11),
    decode_round(2, 9, 25),
    decode_round(4, 14, 23, 2, remap=(1, 3), poison="plausible"),
    decode_round(2, 7, poison="stale", twice=True),
    decode_round(4, 31, 20, 28, 10, poison="stale"),
    decode_round(4, 36, 3, 19, 13, twice=True),
]


def label_of(subject: Any) -> str:
    """What an entry calls a subject of a test."""
    return f"{subject.__module__}:{subject.__name__}"


def entry_of(subject: object, /, **changes: Any) -> dict[str, Any]:
    """A waiver for words of DSA that are never written; a change to None takes the key out."""
    label = subject if isinstance(subject, str) else label_of(subject)
    entry = {
        "id": "known",
        "subject": label,
        "versions": {"dsa-verify": ">=0.0.1"},
        "system": "decode",
        "field": DSA,
        "diagnosis": "never written",
        "reason": "this is how it was published (contract 2.3)",
    } | changes
    return {key: value for key, value in entry.items() if value is not None}


def ledger_of(subject: object, /, **changes: Any) -> Ledger:
    return parse_ledger([entry_of(subject, **changes)], "test")


def verify(
    subject: type, ledger: Ledger, rounds: list[Round] = ROUNDS, fault: str | None = None
) -> tuple[list[Finding], Counts]:
    buckets = tuple(dict.fromkeys(round_.bucket for round_ in rounds))
    setup = ReplaySetup.make(SYSTEMS["decode"], small(), buckets, 0, subject, fault, backend(), ledger)
    counts = Counts()
    return verify_rounds(setup, [setup.table(rounds)], counts, folder=None), counts


def judge(subject: type, ledger: Ledger, fault: str | None = None) -> tuple[list[Finding], Counts]:
    """One round of one bucket, for what shows in the first one."""
    return verify(subject, ledger, ROUNDS[:1], fault)


def seen(findings: list[Finding]) -> list[tuple[str | None, Diagnosis]]:
    return [(finding.field, finding.diagnosis) for finding in findings]


class Unwritten(EagerDecode):
    """Leaves DSA and the sum of lengths as they are."""

    kept = (DSA, "cu_seqlens_k")

    def in_graph(self) -> None:
        before = {name: self.out[name].clone() for name in self.kept}
        super().in_graph()
        for name, tensor in before.items():
            self.out[name].copy_(tensor)
        self.spoil()

    def spoil(self) -> None:
        """What else is wrong."""


class UnwrittenLengths(Unwritten):
    kept = (DSA,)


WAIVED = ledger_of(UnwrittenLengths)


def toml_of(folder: Path, entry: Mapping[str, Any]) -> Path:
    lines = ["schema = 1", "[[waiver]]"]
    for key, value in entry.items():
        text = json.dumps(value)
        if isinstance(value, dict):
            text = "{ " + ", ".join(f"{name} = {json.dumps(each)}" for name, each in value.items()) + " }"
        lines.append(f"{key} = {text}")
    path = folder / "mine.toml"
    path.write_text("\n".join(lines) + "\n")
    return path
