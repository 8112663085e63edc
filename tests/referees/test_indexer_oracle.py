"""The oracles' indexer metadata as wired into the systems, against the referees and nothing else (contract 3 to 5)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from referees import basic as referee
from referees import kpool, schedule

from dsa_verify.buffers.arena import Arena
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round_table import token_slots
from dsa_verify.contract.schedule_variants import VARIANTS
from dsa_verify.contract.subject import Inputs
from dsa_verify.contract.topk_plan import PLAN_RULES
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.systems.indexer import WRITE_PLAN

DEVICE = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
BUCKET = 5
BASIC = ("decode", "target_verify", "draft_extend")
# The lengths that each schedule and plan is made over, from the contract and not from the layouts.
FULL = {"schedule": "paged_mqa_schedule_metadata", "plan": "topk_v2_plan"}
POOLED_DECODE = {"schedule": "pooled_paged_mqa_schedule_metadata", "plan": "pooled_topk_v2_plan"}
POOLED_DRAFTS = {
    "schedule": WRITE_PLAN + "pool_schedule_metadata",
    "plan": WRITE_PLAN + "pool_topk_v2_plan",
}


@pytest.mark.parametrize("pool_size", [1, 2, 4])
@pytest.mark.parametrize("system", BASIC)
def test_every_field_is_what_the_referees_say(system: str, pool_size: int) -> None:
    n = 1 if system == "decode" else 3
    geometry = Geometry.resolve("tiny_pool", {"draft_tokens": n, "pool_size": pool_size})
    rng = np.random.default_rng([pool_size, n])
    for _ in range(40):
        check(system, geometry, rng)


@pytest.mark.parametrize("system", BASIC)
def test_the_form_for_architecture_100(system: str) -> None:
    n = 1 if system == "decode" else 4
    geometry = Geometry.resolve("tiny_pool", {"draft_tokens": n, "pool_size": 1, "architecture": 100, "schedule": "V5"})
    rng = np.random.default_rng(n)
    for _ in range(20):
        check(system, geometry, rng)


def check(system: str, geometry: Geometry, rng: np.random.Generator) -> None:
    n = geometry.draft_tokens
    shortest = max(SYSTEMS[system].shortest_length(geometry), 1)
    seq_lens = np.exp(rng.random(BUCKET) * np.log(geometry.context)).astype(np.int64).clip(shortest, geometry.context)
    requests = rng.integers(1, geometry.request_rows, BUCKET)
    accepts = rng.integers(1, n + 1, BUCKET)
    rows = np.arange(geometry.request_rows)
    slots = token_slots(geometry, rows, np.zeros_like(rows))
    buffers = run_oracle(system, geometry, seq_lens, requests, accepts, slots)

    basic = referee.expected(system, geometry, seq_lens.tolist(), requests.tolist(), None, slots, BUCKET)
    expanded = basic["dsa_seqlens_expanded"][0].tolist()
    wanted: dict[str, object] = {}
    if geometry.architecture == 100 and system == "target_verify":
        contexts: list[object] = [[length + n] * n for length in seq_lens.tolist()]
    else:
        contexts = list(expanded)
    schedule_and_plan(geometry, FULL, contexts, expanded, wanted)
    if geometry.pool_size > 1:
        lists = seq_lens.tolist(), requests.tolist(), slots
        plan = kpool.expected_write_plan(system, geometry, *lists, accepts.tolist())
        wanted |= {WRITE_PLAN + name: value for name, value in plan.items()}
        if system != "draft_extend":
            wanted |= kpool.expected_views(system, geometry, *lists)
        pooled = [length // geometry.pool_size for length in expanded]
        names = POOLED_DECODE if system == "decode" else POOLED_DRAFTS
        schedule_and_plan(geometry, names, [max(length, 1) for length in pooled], pooled, wanted)

    layout = SYSTEMS[system].layout(geometry, BUCKET)
    assert set(wanted) == {field.name for field in layout} - set(basic), "every field has a referee"
    for name, value in wanted.items():
        got = buffers[name].cpu().numpy().astype(np.int64)
        if name == "pooled_real_page_table":
            got = np.repeat(got, len(value[0]) // BUCKET, axis=0)  # type: ignore[index]
        values, live = value if isinstance(value, tuple) else (value, np.ones_like(got, dtype=bool))
        assert (got == values)[live].all(), f"{name}: {got.tolist()} instead of {values}"


def schedule_and_plan(
    geometry: Geometry, names: dict[str, str], contexts: list, lengths: list[int], wanted: dict[str, object]
) -> None:
    variant, rules = VARIANTS[geometry.schedule], PLAN_RULES[geometry.plan_rules]
    contexts = [c if isinstance(c, list) else [c] for c in contexts]
    wanted[names["schedule"]] = schedule.expected(variant, contexts, geometry.multiprocessors)
    listed = kpool.expected_topk_plan(
        lengths,
        dict(rules.thresholds),
        rules.max_clusters,
        floor=rules.floor,
        static_threshold=rules.static_threshold,
    )
    if listed is not None:
        unused = [(-1, -1)] * (len(lengths) + 1 - len(listed))
        wanted[names["plan"]] = np.array([*listed, *unused])


def run_oracle(
    system: str, geometry: Geometry, seq_lens: np.ndarray, requests: np.ndarray, accepts: np.ndarray, slots: np.ndarray
) -> dict[str, torch.Tensor]:
    layout = SYSTEMS[system].layout(geometry, BUCKET).for_oracle()
    buffers = Arena([layout], DEVICE, -7).at(BUCKET)
    drafts = system == "draft_extend"
    inputs = Inputs(
        seq_lens=torch.from_numpy(seq_lens).to(DEVICE),
        req_pool_indices=torch.from_numpy(requests).to(DEVICE),
        req_to_token=torch.from_numpy(slots.astype(np.int32)).to(DEVICE),
    )
    if drafts:
        extend_lens = torch.full((BUCKET,), geometry.draft_tokens, dtype=torch.int32, device=DEVICE)
        accept_lens = torch.from_numpy(accepts.astype(np.int32)).to(DEVICE)
        inputs = inputs.replace(extend_lens=extend_lens, accept_lens=accept_lens)
    oracle = SYSTEMS[system].make_oracle()
    oracle.allocate(geometry, inputs, buffers)
    oracle.in_graph()
    return dict(buffers)
