"""Machine: a healthy subject passes, a planted fault is found, and what is printed can be pasted and run."""

from __future__ import annotations

import re

import pytest
from hypothesis import Phase, settings
from state_machine import PROFILES, Machine, machine_of, run
from support import SMALL, EagerDecode, setup_of

from dsa_verify.systems.catalogue import SYSTEMS
from fuzz.engine.expansion import RoundSpec

EAGER = "support:EagerDecode"
SHORT = settings(PROFILES["ci"], max_examples=3, stateful_step_count=8)
WITHOUT_SHRINKING = settings(PROFILES["ci"], phases=(Phase.generate,))


def failure(machine: type[Machine], profile: settings) -> AssertionError:
    with pytest.raises(AssertionError) as caught:
        run(machine, profile)
    return caught.value


def pasted(error: AssertionError) -> str:
    """The printed history below the lines that the error says to put above it."""
    _, _, preamble = str(error).partition("put this above it:\n")
    printed = "\n".join(error.__notes__)
    history = re.findall(r"^state.*", printed, re.MULTILINE)
    assert history[0] == "state = Machine()"
    return "\n".join([preamble, *history])


@pytest.mark.parametrize(
    "system", [pytest.param(name, marks=pytest.mark.slow) if name == "dcp" else name for name in sorted(SYSTEMS)]
)
def test_every_system_is_fuzzed_and_all_rounds_are_executed(system: str) -> None:
    """A bounded number of examples in every test run; more of them by the profiles dev and nightly."""
    known = SYSTEMS[system]
    geometry = known.geometry(known.preset("cpu"), {**SMALL, "draft_tokens": 3 if known.drafts else 1})
    machine = machine_of(setup_of(EAGER if system == "decode" else None, system=system, geometry=geometry))
    tally = run(machine, SHORT)
    assert tally.runs >= SHORT.max_examples
    assert tally.requested == tally.executed == machine.coverage.rounds > 0
    assert 0 < tally.captures <= tally.executed


@pytest.mark.parametrize(
    "fault, profile, found",
    [
        ("off_by_one_page", PROFILES["ci"], "boundary: real_page_table"),
        ("not_refreshed", WITHOUT_SHRINKING, r"(stale|never written).*: real_page_table"),
        ("raises_in_capture", PROFILES["ci"], "raises in capture"),
    ],
)
def test_a_planted_fault_is_found_and_its_history_can_be_pasted_and_run(
    fault: str, profile: settings, found: str
) -> None:
    machine = machine_of(setup_of(EAGER, fault=fault))
    error = failure(machine, profile)
    assert re.match(found, str(error))
    with pytest.raises(AssertionError) as again:
        exec(pasted(error), {})  # what a person would do with it
    assert str(again.value) == str(error)
    if profile is PROFILES["ci"]:
        assert len([line for line in error.__notes__ if "replay" in line]) == 1, "one replay shows it"


def test_a_fault_that_takes_two_rounds() -> None:
    """By hand, as a person would write it down."""
    state = machine_of(setup_of(EAGER, fault="not_refreshed"))()
    state.admit(count=2, boundary=9)
    state.replay(twice=False)
    state.jump_to_boundary(place=1, boundary=3)
    with pytest.raises(AssertionError, match="never written: real_page_table"):
        state.replay(twice=False)
    assert (state.tally.requested, state.tally.executed) == (2, 2)


def test_what_one_bucket_does_to_another_is_seen_at_once() -> None:
    state = machine_of(setup_of(EAGER, fault="other_bucket"))()
    state.admit(count=3, boundary=9)
    state.replay(twice=False)
    state.shrink_the_batch(count=1)
    with pytest.raises(AssertionError, match="another bucket's rows: dsa_cache_seqlens_int32"):
        state.replay(twice=False)


def test_every_rule_does_what_it_says() -> None:
    state = machine_of(setup_of(EagerDecode))()
    state.admit(count=3, boundary=5)
    assert len(state.simulator.live) == 3
    state.poison_with(name="plausible")
    state.change_the_bucket(bucket=1)
    state.shrink_the_batch(count=1)
    state.share(place=0)
    state.replay(twice=True)
    (round_,) = state.rounds
    assert (round_.bucket, round_.poison, round_.twice, len(set(round_.requests))) == (4, "plausible", True, 1)
    state.accept()
    state.remap(place=0, pages_only=True)
    state.replay(twice=False)
    assert state.rounds[-1].remap == (state.simulator.live[0].row,)
    state.remap(place=0, pages_only=False)
    state.preempt()
    state.resume()
    state.finish(place=1, swap=True)
    before = state.replayer
    state.recapture()
    assert state.rounds == []
    state.replay_boundary(boundary=7)
    state.replay_outside(spec=RoundSpec(regime="edge", bucket=2, raw=2, hot=0, seed=1))
    assert state.replayer is not before
    assert (state.tally.captures, state.tally.executed) == (2, 4)
    for check in (state.the_simulator_is_sound, state.live_values_are_legal, state.schedules_cover_their_tiles):
        check()


def test_laws_are_looked_at_without_the_oracle() -> None:
    state = machine_of(setup_of("triton", geometry=setup_of().geometry.replace(indexer=True, schedule="tiny")))()
    state.admit(count=2, boundary=9)
    state.replay(twice=False)
    state.live_values_are_legal()
    state.schedules_cover_their_tiles()
    assert state.captured is not None
    state.captured.buffers["paged_mqa_schedule_metadata"][1, 0] += 1
    with pytest.raises(AssertionError, match="paged_mqa_schedule_metadata: "):
        state.schedules_cover_their_tiles()
    state.captured.buffers["real_page_table"][0, 0] = -1
    with pytest.raises(AssertionError, match="out of range: real_page_table"):
        state.live_values_are_legal()


def test_profiles_differ_in_how_much_they_run() -> None:
    sizes = [PROFILES[name].max_examples * PROFILES[name].stateful_step_count for name in ("ci", "dev", "nightly")]
    assert sizes == sorted(sizes)
    assert PROFILES["ci"].derandomize
