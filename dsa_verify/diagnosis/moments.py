"""Moments: what a diagnosis may look at, taken from a replayer whose rounds are looked at one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from dsa_verify.contract.owners import held_in
from dsa_verify.contract.round import POISONS, Round
from dsa_verify.contract.round_table import RoundTable
from dsa_verify.diagnosis.evidence import Evidence, Moment
from dsa_verify.replay.bucket import CapturedBucket, host_copy
from dsa_verify.replay.setup import ReplaySetup


def evidence_of(
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


def moment_of(setup: ReplaySetup, captured: CapturedBucket, table: RoundTable, row: int) -> Moment:
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


def capture_moment(setup: ReplaySetup, captured: CapturedBucket) -> Moment:
    """What was right for the inputs at capture: every row a pad row (contract 0.2)."""
    idle = setup.table([Round(bucket=captured.bucket, seq_lens=(), requests=())])
    return dataclasses.replace(moment_of(setup, captured, idle, 0), round=-1, want=captured.at_capture)
