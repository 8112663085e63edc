"""Glue routing: whether a replay's metadata is prepared by the captured glue graph or eagerly, and which out_cache_loc
the preparation sees (contract 7.4). Pure functions of the conditions, for both of the table's columns."""

from __future__ import annotations

import dataclasses
from enum import Enum


class Route(Enum):
    GLUE = "glue"
    EAGER = "eager"


class Release(Enum):
    """A column of the table."""

    V0_5_23 = "0.5.23"
    PR_47676 = "PR #47676"


class Preparation(Enum):
    """A backend glues one of these preparations."""

    DSV4_DRAFT = "DSV4 draft"
    DSV4_TARGET_VERIFY = "DSV4 target verify"
    GENERIC = "generic"  # of a backend that is not DSV4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GlueConditions:
    """The route depends on these conditions; the defaults are those of an engine.

    `raw_batch`, `bucket`: live requests and requests of the graph. `static_verify`: the backend verifies N tokens of
    every request, not a ragged number. `runner_ragged_verify`: the graph runner pads by tokens, not by requests.
    `disabled`: a warm-up, capture or replay of this glue graph has failed before. `generic_switch` is
    SGLANG_ENABLE_METADATA_GLUE_GRAPH, `target_verify_switch` SGLANG_OPT_DSV41_TARGET_VERIFY_METADATA_GLUE.
    """

    raw_batch: int
    bucket: int
    preparation: Preparation
    static_verify: bool = True
    runner_ragged_verify: bool = False
    disabled: bool = False
    two_batch_overlap: bool = False
    pd_multiplexing: bool = False
    lora: bool = False
    trtllm: bool = False
    online_c128: bool = False
    request_window: bool = False
    context_parallel_size: int = 1
    generic_switch: bool = False
    target_verify_switch: bool = False
    dspark: bool = True
    cpu_seq_lens: bool = False
    draft_runner: bool = False
    dflash: bool = False


def declares_glue(conditions: GlueConditions) -> bool:
    """Return whether the backend declares glue for this preparation, which is the same for both releases."""
    if conditions.dflash:
        return False
    if conditions.preparation is Preparation.GENERIC:
        return conditions.generic_switch
    shared = (
        conditions.static_verify
        and not conditions.trtllm
        and not conditions.online_c128
        and not conditions.request_window
        and conditions.context_parallel_size == 1
    )
    if conditions.preparation is Preparation.DSV4_DRAFT:
        return shared
    return (
        shared
        and conditions.target_verify_switch
        and conditions.dspark
        and not conditions.cpu_seq_lens
        and not conditions.draft_runner
    )


def route(release: Release, conditions: GlueConditions) -> Route:
    """Return the way that a replay's preparation takes.

    The table lists two-batch overlap and LoRA both as excluded from glue and as having a padding-free route only; the
    stricter is taken, under which neither is ever glued.
    """
    raw, bucket = conditions.raw_batch, conditions.bucket
    if raw == 0 or conditions.disabled or not declares_glue(conditions):
        return Route.EAGER
    if conditions.two_batch_overlap or conditions.pd_multiplexing or conditions.lora:
        return Route.EAGER
    if raw < bucket and not _glues_padded_batches(release, conditions):
        return Route.EAGER
    return Route.GLUE


def _glues_padded_batches(release: Release, conditions: GlueConditions) -> bool:
    return (
        release is Release.PR_47676
        and conditions.preparation is not Preparation.GENERIC
        and not conditions.runner_ragged_verify
    )
