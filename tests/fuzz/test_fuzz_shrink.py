"""Shrinking and explaining: a failing case becomes small, still fails in the same way, and is put into words."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from support import EagerDecode, backend, decode_round, setup_of, small

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Layout
from dsa_verify.contract.round import Round, Scenario
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.diagnosis.confirm import confirm
from dsa_verify.rounds.case_file import parse_case
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.subjects import faults
from dsa_verify.systems.catalogue import SYSTEMS
from fuzz.reduce.sensitivity import explain
from fuzz.reduce.shrink import Shrunk, shrink
from fuzz.reduce.trials import UNSCREENED, Signature, Trials

# Of these a confirmation shows nothing: the one strikes once a process, the other takes the device down.
NOT_CONFIRMED = {"flaky", "lost_device"}
NEEDS = {"advances_twice": {"warm_ups": "together"}}
DECODE_FAULTS = [name for name in faults.names("decode") if name not in NOT_CONFIRMED]


class Spoiled(EagerDecode):
    """Adds 1 to each length for which `wrong(before, now)` holds, of the lengths in two rounds of the bucket."""

    wrong: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self._before = torch.zeros_like(self.out["cache_seqlens_int32"])

    def in_graph(self) -> None:
        super().in_graph()
        lengths = self.inputs.seq_lens.to(torch.int32)
        self.out["cache_seqlens_int32"].add_(type(self).wrong(self._before, lengths).int())
        self._before.copy_(lengths)


class BeyondTopK(Spoiled):
    wrong = staticmethod(lambda before, now: (before == 8) & (now == 9))


class ThreeOfFour(Spoiled):
    wrong = staticmethod(lambda before, now: (before % 4 == 3) & (now % 4 == 3))


class Growing(EagerDecode):
    """Lengths never become smaller than what the buffer holds; it holds 1 after the warm-up, on pad rows."""

    def in_graph(self) -> None:
        kept = self.out["cache_seqlens_int32"].clone()
        super().in_graph()
        self.out["cache_seqlens_int32"].copy_(torch.maximum(kept, self.out["cache_seqlens_int32"]))


class WrongAtFirst(EagerDecode):
    """Adds 1 to the lengths in the first replay only; the warm-up runs the body twice before."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self._runs = torch.zeros(1, dtype=torch.int32, device=inputs.seq_lens.device)

    def in_graph(self) -> None:
        super().in_graph()
        self._runs.add_(1)
        self.out["cache_seqlens_int32"].add_((self._runs == 3).int())


class Long(Spoiled):
    wrong = staticmethod(lambda before, now: now >= 21)


class LongAndPaged(Long):
    """Wrong pages, too, in the same rounds and in others."""

    def in_graph(self) -> None:
        super().in_graph()
        self.out["real_page_table"].add_((self.inputs.seq_lens > 3).int()[:, None])


class HighRequests(EagerDecode):
    """Adds 1 to the first page of each request row from 3 on."""

    def in_graph(self) -> None:
        super().in_graph()
        self.out["real_page_table"][:, 0].add_((self.inputs.req_pool_indices >= 3).int())


class FewRequests(HighRequests):
    """Likewise, but right if there are more than 4 request rows."""

    def in_graph(self) -> None:
        if self.geometry.request_rows > 4:
            EagerDecode.in_graph(self)
        else:
            super().in_graph()


class HighPages(EagerDecode):
    """Adds 1 to each high page id, which scattered request rows have."""

    def in_graph(self) -> None:
        super().in_graph()
        self.out["real_page_table"].add_((self.out["real_page_table"] > 4500).int())


def scripted(system: str, fault: str | None = None, *, batch: int = 4, subject: type[EagerDecode] | None = None):
    """(setup, scripted case) on a small geometry, with the eager subject where there is one."""
    needed = NEEDS.get(fault or "", {})
    geometry = small(**needed) if subject else SYSTEMS[system].geometry("tiny", needed)
    known = SYSTEMS[system]
    drafts = (2,) if known.drafts else None
    config = diagnostic_matrix(known, geometry, batches=(batch,), drafts=drafts, fixed=frozenset(needed))[0]
    setup = setup_of(subject, system=system, buckets=config.buckets, fault=fault, geometry=config.geometry)
    rounds = [round_ for table in setup.with_foreign_work(config.chunks()) for round_ in table.rounds()]
    return setup, setup.scenario(rounds)


def case_of(*rounds: Round) -> Scenario:
    return Scenario(system="decode", geometry=small(), buckets=(4, 2), rounds=rounds)


def length_bug(subject: type[EagerDecode], case: Scenario) -> Signature:
    findings = confirm(setup_of(subject, geometry=case.geometry, buckets=case.buckets), case.rounds)
    return next(Signature.of(finding) for finding in findings if finding.field == "cache_seqlens_int32")


def shrunk(subject: type[EagerDecode], case: Scenario, **rest: object) -> Shrunk:
    return shrink(case, length_bug(subject, case), backend(), subject=subject, **rest)  # type: ignore[arg-type]


def requests_of(case: Scenario) -> int:
    return sum(round_.raw_batch for round_ in case.rounds)


def check_small(system: str, fault: str, subject: type[EagerDecode] | None) -> None:
    setup, case = scripted(system, fault, subject=subject)
    found = confirm(setup, case.rounds)
    signature = Signature.of(found[0])
    result = shrink(case, signature, backend(), subject=subject)
    assert result.finished
    assert len(result.scenario.rounds) <= 3
    assert requests_of(result.scenario) <= 4
    assert result.scenario.found == result.finding.sentence
    assert parse_case(result.scenario.to_json()) == result.scenario
    small_setup = setup_of(
        subject,
        system=system,
        buckets=result.scenario.buckets,
        fault=fault,
        geometry=result.scenario.geometry,
    )
    again = confirm(small_setup, result.scenario.rounds)
    assert signature in map(Signature.of, again)


@pytest.mark.slow
@pytest.mark.parametrize("fault", DECODE_FAULTS)
def test_every_planted_fault_of_decode_becomes_small(fault: str) -> None:
    check_small("decode", fault, EagerDecode)


@pytest.mark.parametrize(
    "system, fault", [("target_verify", "wrong_draft_offset"), ("draft_extend", "pad_rows_untouched")]
)
def test_faults_of_drafts_become_small(system: str, fault: str) -> None:
    check_small(system, fault, None)


# Rounds that show none of the bugs below, and that a shrinker has to get rid of.
WALK = [decode_round(4, *(1 + (5 * i + 3 * b) % 20 for b in range(4)), remap=(1 + i % 3,)) for i in range(3)]
PAIR = [
    Round(bucket=4, seq_lens=(5, 8, 30), requests=(7, 3, 5), poison="plausible"),
    Round(bucket=2, seq_lens=(4,), requests=(2,)),
    Round(bucket=4, seq_lens=(37, 9), requests=(3, 3), poison="stale", twice=True),
]


def test_two_rounds_that_need_each_other_are_found_and_put_into_words() -> None:
    result = shrunk(BeyondTopK, case_of(*WALK, *PAIR))
    assert [round_.seq_lens for round_ in result.scenario.rounds] == [(8,), (9,)]
    assert [round_.requests for round_ in result.scenario.rounds] == [(1,), (1,)]
    assert result.scenario.buckets == (1,)
    words = explain(result.scenario, Signature.of(result.finding), backend(), subject=BeyondTopK)
    assert words.sentence == "2 rounds, 1 request: length 8 then 9; any request row; everything else is free"
    assert words.finished


@pytest.mark.slow
def test_lengths_that_are_no_range_are_made_least_and_the_others_named() -> None:
    case = case_of(decode_round(2, 35, 7), decode_round(2, 1, 7))
    result, again = (shrunk(ThreeOfFour, case) for _ in range(2))
    assert [round_.seq_lens for round_ in result.scenario.rounds] == [(3,), (3,)]
    assert dataclasses.replace(again, seconds=0.0) == dataclasses.replace(result, seconds=0.0)
    words = explain(result.scenario, Signature.of(result.finding), backend(), subject=ThreeOfFour)
    both = "length 3 (also 7) then 3 (also 7)"
    assert words.sentence == f"2 rounds, 1 request: {both}; any request row; everything else is free"


def test_a_threshold_is_found_beside_another_bug_and_said_as_a_range() -> None:
    last = decode_round(4, 1, 2, 36, 3)
    signature = length_bug(LongAndPaged, case_of(last))
    # The other bug, which is easier to hit, is in an earlier round, too, where a confirmation would stop.
    result = shrink(case_of(*WALK, last), signature, backend(), subject=LongAndPaged)
    assert Signature.of(result.finding) == signature
    assert result.scenario.rounds == (decode_round(1, 21),)
    words = explain(result.scenario, signature, backend(), subject=LongAndPaged)
    # 38 would not be a length that exists, so at the longest one the same bug is out of range instead.
    assert words.sentence == "1 round, 1 request: length 21 to 36; any request row; everything else is free"
    assert [verdict.what for verdict in words.verdicts if not verdict.free] == ["length of round 0, batch row 0"]


@pytest.mark.parametrize(
    "subject, row, words, showing",
    [
        (HighRequests, 3, "length 1 or more; request row 3 or more", {*range(3, 16)}),
        (
            HighPages,
            1,
            "length 5 or more; request row 1 (also 4, 10, 15; not 2, 7, 13)",
            {1, 3, 4, 5, 6, 9, 10, 11, 14, 15},
        ),
    ],
)
def test_the_lowest_request_row_is_found_and_the_others_said_as_they_are(
    subject: type[EagerDecode], row: int, words: str, showing: set[int]
) -> None:
    geometry = Geometry.resolve("tiny", {"request_rows": 16})
    found = Round(bucket=4, seq_lens=(5, 9, 2), requests=(14, 12, 15))
    case = Scenario(system="decode", geometry=geometry, buckets=(4, 2), rounds=(found,))
    signature = Signature.of(confirm(setup_of(subject, geometry=geometry), case.rounds)[0])
    small_case = shrink(case, signature, backend(), subject=subject).scenario
    assert [round_.requests for round_ in small_case.rounds] == [(row,)]
    said = explain(small_case, signature, backend(), subject=subject)
    assert said.sentence == f"1 round, 1 request: {words}; everything else is free"
    assert said.confirmed < 30

    def shows(other: int) -> bool:
        wide = small_case.geometry if other < small_case.geometry.request_rows else geometry
        rounds = [dataclasses.replace(round_, requests=(other,)) for round_ in small_case.rounds]
        found = confirm(setup_of(subject, buckets=small_case.buckets, geometry=wide), rounds)
        return signature in map(Signature.of, found)

    assert {other for other in range(1, 16) if shows(other)} == showing


def test_a_case_that_needs_as_few_request_rows_as_it_has_says_so() -> None:
    case = Scenario(
        system="decode",
        geometry=small(request_rows=4),
        buckets=(1,),
        rounds=(Round(bucket=1, seq_lens=(1,), requests=(3,)),),
    )
    signature = Signature.of(confirm(setup_of(FewRequests, geometry=case.geometry, buckets=(1,)), case.rounds)[0])
    said = explain(case, signature, backend(), subject=FewRequests)
    assert "; request_rows 4; request row 3; " in said.sentence


def test_another_failure_of_the_subject_is_another_signature() -> None:
    setup, case = scripted("decode", "raises_in_capture", subject=EagerDecode)
    found = confirm(setup, case.rounds)[0]
    signature = Signature.of(found)
    elsewhere = dataclasses.replace(found, sentence=found.sentence.replace("capture", "replay"))
    assert signature.stage == "raises in capture"
    assert signature.matches(found)
    assert not signature.matches(elsewhere)
    assert dataclasses.replace(signature, stage="").matches(elsewhere)


def test_the_budget_is_kept_and_the_best_so_far_reproduces() -> None:
    case, ticks = case_of(*WALK, *PAIR), itertools.count()
    seen: list[Scenario] = []
    # Each look at the clock is a second later than the one before; there is one before each replay.
    result = shrunk(BeyondTopK, case, budget_s=8.0, clock=lambda: float(next(ticks)), on_accept=seen.append)
    assert not result.finished
    assert 2 < result.confirmed + result.screened <= 8
    assert result.accepted == len(seen) > 0
    assert dataclasses.replace(result.scenario, found=None) == seen[-1]
    assert length_bug(BeyondTopK, result.scenario) == Signature.of(result.finding)


def test_a_budget_that_allows_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="budget_s: 0 is over"):
        shrunk(BeyondTopK, case_of(*PAIR), budget_s=0.0)


def test_what_does_not_reproduce_is_refused() -> None:
    signature = length_bug(BeyondTopK, case_of(*PAIR))
    with pytest.raises(UsageError, match="does not show 'boundary' of cache_seqlens_int32"):
        shrink(case_of(*WALK), signature, backend(), subject=BeyondTopK)
    with pytest.raises(UsageError, match="nothing to explain"):
        explain(case_of(*WALK), signature, backend(), subject=BeyondTopK)


def test_a_prefix_is_made_short_and_named() -> None:
    """Of three rows that move, of which two take a prefix, one must, and one page of it."""
    rounds = [
        Round(bucket=4, seq_lens=(9, 17), requests=(6, 3), remap=(5,), prefixes=((5, 3, 1),)),
        Round(bucket=4, seq_lens=(19, 17, 4), requests=(6, 3, 5), remap=(2, 6, 4), prefixes=((2, 5, 1), (6, 3, 3))),
    ]
    case = dataclasses.replace(case_of(*rounds), fault="table_of_first_page")
    setup = setup_of(EagerDecode, geometry=case.geometry, buckets=case.buckets, fault=case.fault)
    (found,) = confirm(setup, case.rounds)
    result = shrink(case, Signature.of(found), backend(), subject=EagerDecode)
    (round_,) = result.scenario.rounds
    assert (round_.requests, round_.remap) == ((1, 2), (1,))
    assert round_.prefixes == ((1, 2, 1),)
    words = explain(result.scenario, Signature.of(result.finding), backend(), subject=EagerDecode)
    assert "pages remapped; first pages shared; everything else is free" in words.sentence


class WrongFromFloor(EagerDecode):
    """`padded` with nothing but lengths, which count the floors of 5 and more."""

    @staticmethod
    def not_covered(layout: Layout, device: torch.device) -> dict[str, str]:
        return {field.name: "not given" for field in layout if field.name != "seq_lens_casual"}

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        self.inputs, self.out = inputs, buffers

    def before_replay(self) -> None:
        pass

    def in_graph(self) -> None:
        self.out["seq_lens_casual"].copy_(self.inputs.seq_lens + (self.inputs.replay_floors >= 5))


def test_floors_are_made_low_and_named() -> None:
    geometry = SYSTEMS["padded"].geometry("tiny_v4", {"request_floors": True, "request_rows": 9})
    first = Round(bucket=4, seq_lens=(9, 30, 4), requests=(4, 2, 4), lens={"replay_floors": (3, 25, 3)})
    rounds = (first, first.replace(replay_floors=(17, 9, 17)))
    case = Scenario(system="padded", geometry=geometry, buckets=(4,), rounds=rounds)
    setup = setup_of(WrongFromFloor, system="padded", geometry=geometry, buckets=(4,))
    signature = Signature.of(confirm(setup, rounds)[0])
    result = shrink(case, signature, backend(), subject=WrongFromFloor)
    (round_,) = result.scenario.rounds
    assert (round_.seq_lens, round_.requests, round_.replay_floors) == ((1,), (1,), (5,))
    words = explain(result.scenario, signature, backend(), subject=WrongFromFloor)
    assert "replay floors 5" in words.sentence


def test_what_could_not_be_tried_in_time_is_said() -> None:
    case, ticks = case_of(*PAIR), itertools.count()
    words = explain(
        case, length_bug(BeyondTopK, case), backend(), subject=BeyondTopK, budget_s=9.0, clock=ticks.__next__
    )
    assert not words.finished
    assert words.sentence == "3 rounds, 3 then 1 then 2 requests: not all was tried"


def test_a_screening_forgets_the_candidate_before() -> None:
    """Both sides of what the harness owns: outputs that a stale poison leaves, and pages that a remap moved."""
    stale = {"poison": "stale"}
    grown = case_of(decode_round(4, 5, remap=(1,), **stale), decode_round(4, 2, **stale))
    alone = case_of(decode_round(4, 2, **stale))
    signature = Signature.of(confirm(setup_of(Growing), grown.rounds)[0])
    trials = Trials(signature, backend(), subject=Growing, budget_s=60.0, clock=lambda: 0.0)
    for seed in range(UNSCREENED + 1):
        assert trials.may_show(dataclasses.replace(grown, seed=seed), grown)
    assert not trials.may_show(alone, grown)
    assert trials.finding(alone) is None
    assert (trials.screened, trials.confirmed) == (2, 1)


def test_a_subject_that_remembers_candidates_is_not_screened() -> None:
    result = shrunk(WrongAtFirst, case_of(decode_round(2, 5, 9)))
    assert result.scenario.rounds == (Round(bucket=1, seq_lens=(), requests=()),)
    base = result.scenario
    trials = Trials(Signature.of(result.finding), backend(), subject=WrongAtFirst, budget_s=60.0, clock=lambda: 0.0)
    others = [dataclasses.replace(base, seed=seed) for seed in range(1, UNSCREENED + 3)]
    assert all(trials.may_show(other, base) for other in others)
    assert trials.screened == 0


@pytest.mark.parametrize(
    "case",
    [
        case_of(),
        case_of(decode_round(3, 1)),
        case_of(decode_round(4, 38)),
        case_of(Round(bucket=4, seq_lens=(1,), requests=(9,))),
    ],
)
def test_no_case_that_is_not_legal_is_replayed(case: Scenario) -> None:
    signature = Signature(system="decode", field="cache_seqlens_int32", diagnosis="boundary")
    trials = Trials(signature, backend(), subject=Growing, budget_s=60.0, clock=lambda: 0.0)
    assert not trials.may_show(case, case_of(*PAIR))
    assert trials.finding(case) is None
