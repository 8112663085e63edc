"""Each row of the routing table, in both of its columns (contract 7.4)."""

from __future__ import annotations

import dataclasses

import pytest

from dsa_verify.contract.glue_route import (
    GlueConditions,
    Preparation,
    Release,
    Route,
    declares_glue,
    route,
)

OLD, NEW = Release.V0_5_23, Release.PR_47676
BOTH = pytest.mark.parametrize("release", Release)
DRAFT = GlueConditions(raw_batch=4, bucket=4, preparation=Preparation.DSV4_DRAFT)
VERIFY = dataclasses.replace(DRAFT, preparation=Preparation.DSV4_TARGET_VERIFY, target_verify_switch=True)
GENERIC = dataclasses.replace(DRAFT, preparation=Preparation.GENERIC, generic_switch=True)
EVERY = pytest.mark.parametrize("glued", [DRAFT, VERIFY, GENERIC], ids=lambda c: c.preparation.value)
DSV4 = pytest.mark.parametrize("glued", [DRAFT, VERIFY], ids=lambda c: c.preparation.value)


def changed(conditions: GlueConditions, **changes: object) -> GlueConditions:
    return dataclasses.replace(conditions, **changes)  # type: ignore[arg-type]


@BOTH
@EVERY
def test_a_full_batch_is_glued(release: Release, glued: GlueConditions) -> None:
    assert route(release, glued) is Route.GLUE


@BOTH
@EVERY
@pytest.mark.parametrize("obstacle", ["disabled", "two_batch_overlap", "pd_multiplexing", "lora"])
@pytest.mark.parametrize("raw", [3, 4])
def test_what_keeps_any_batch_eager(release: Release, glued: GlueConditions, obstacle: str, raw: int) -> None:
    assert route(release, changed(glued, raw_batch=raw, **{obstacle: True})) is Route.EAGER


@EVERY
@pytest.mark.parametrize("raw", [1, 3])
def test_a_padded_batch_was_eager(glued: GlueConditions, raw: int) -> None:
    assert route(OLD, changed(glued, raw_batch=raw)) is Route.EAGER


@DSV4
@pytest.mark.parametrize("raw", [1, 3])
def test_a_padded_batch_is_glued_where_declared(glued: GlueConditions, raw: int) -> None:
    assert route(NEW, changed(glued, raw_batch=raw)) is Route.GLUE
    assert route(NEW, changed(glued, raw_batch=raw, trtllm=True)) is Route.EAGER


@DSV4
def test_a_runner_that_verifies_raggedly_glues_full_batches_only(glued: GlueConditions) -> None:
    assert route(NEW, changed(glued, raw_batch=3, runner_ragged_verify=True)) is Route.EAGER
    assert route(NEW, changed(glued, runner_ragged_verify=True)) is Route.GLUE


@BOTH
@EVERY
def test_an_idle_batch_is_eager(release: Release, glued: GlueConditions) -> None:
    assert route(release, changed(glued, raw_batch=0)) is Route.EAGER


@BOTH
def test_the_generic_switch_covers_full_batches_only(release: Release) -> None:
    assert route(release, GENERIC) is Route.GLUE
    assert route(release, changed(GENERIC, raw_batch=3)) is Route.EAGER
    assert route(release, changed(GENERIC, generic_switch=False)) is Route.EAGER


CONDITIONS_OF_DRAFT = [
    {"static_verify": False},
    {"trtllm": True},
    {"online_c128": True},
    {"request_window": True},
    {"context_parallel_size": 2},
]


@DSV4
@pytest.mark.parametrize("change", CONDITIONS_OF_DRAFT, ids=str)
def test_conditions_of_draft_glue_hold_for_target_verify_too(glued: GlueConditions, change: dict[str, object]) -> None:
    assert declares_glue(glued)
    assert not declares_glue(changed(glued, **change))


@pytest.mark.parametrize(
    "change",
    [{"target_verify_switch": False}, {"dspark": False}, {"cpu_seq_lens": True}, {"draft_runner": True}],
    ids=str,
)
def test_conditions_of_target_verify_glue_alone(change: dict[str, object]) -> None:
    assert not declares_glue(changed(VERIFY, **change))
    assert declares_glue(changed(DRAFT, **change))


def test_draft_glue_is_on_by_default_and_the_others_are_off() -> None:
    for preparation in Preparation:
        conditions = GlueConditions(raw_batch=4, bucket=4, preparation=preparation)
        assert declares_glue(conditions) is (preparation is Preparation.DSV4_DRAFT)


@EVERY
def test_the_dflash_family_never_declares_glue(glued: GlueConditions) -> None:
    assert not declares_glue(changed(glued, dflash=True))
