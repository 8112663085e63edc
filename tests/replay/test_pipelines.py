"""The shipped subjects are right at odd geometries: small pages, narrow tables, pools, strided and ragged inputs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import backend

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import POISONS, Round
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.replay.setup import ReplaySetup, remap_slots_of
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.pipelines.basic import Decode, DraftExtend, TargetVerify
from dsa_verify.systems.catalogue import SYSTEMS

SUBJECTS = {"decode": Decode, "target_verify": TargetVerify, "draft_extend": DraftExtend}
BASE = {"context": 61, "request_rows": 12, "topk": 16}
GEOMETRIES = {
    "page_size 1, strided": {"page_size": 1, "input_view": "strided"},
    "page wider than the context, int32": {"page_size": 128, "index_dtype": "int32"},
    "architecture 100": {"architecture": 100},
    "pool, int32, offset": {"pool_size": 4, "index_dtype": "int32", "input_view": "offset"},
    "pool, page 1, architecture 100": {"pool_size": 4, "page_size": 1, "architecture": 100},
    "pool beyond top-k": {"pool_size": 16, "topk": 3, "context": 97},
    "one column, int32, strided": {"table_width": 1, "index_dtype": "int32", "input_view": "strided"},
    "table narrower than the context": {"table_width": 17, "page_size": 8},
    "table wider than the context, offset": {"table_width": 90, "input_view": "offset"},
    "several blocks": {"context": 2300, "page_size": 16},
    "top-k 1": {"topk": 1},
    "tight req_to_token": {"token_table_width": 61 + 3},
    "context 1": {"context": 1},
}


def run(system: str, geometry: Geometry, rounds: list[Round], buckets: tuple[int, ...], subject: type) -> list[str]:
    setup = ReplaySetup.make(SYSTEMS[system], geometry, buckets, 0, subject, None, backend())
    counts = Counts()
    table = setup.table(rounds, remap_slots_of(rounds))
    findings = verify_rounds(setup, [table], counts, folder=None)
    assert counts.rounds_checked == len(rounds) or findings
    return [finding.sentence for finding in findings]


def scripted(system: str, geometry: Geometry, batch: int, count: int) -> tuple[list[Round], tuple[int, ...]]:
    (config,) = diagnostic_matrix(
        SYSTEMS[system],
        geometry,
        batches=[batch],
        drafts=[geometry.draft_tokens],
        rounds=count,
        fixed=frozenset({"index_dtype", "input_view"}),
    )
    return [round_ for table in config.chunks() for round_ in table.rounds()], config.buckets


@pytest.mark.parametrize("system", SUBJECTS)
@pytest.mark.parametrize("overrides", GEOMETRIES.values(), ids=GEOMETRIES)
def test_odd_geometries(system: str, overrides: dict[str, object]):
    draft = 3 if SYSTEMS[system].drafts else 1
    geometry = Geometry.resolve("tiny", {**BASE, **overrides, "draft_tokens": draft})
    rounds, buckets = scripted(system, geometry, batch=5, count=5)
    assert run(system, geometry, rounds, buckets, SUBJECTS[system]) == []


@pytest.mark.parametrize("page_size", [2, 64])
def test_decode_without_the_wide_table(page_size: int):
    """Contract 1.5: page_table_1 does not exist."""
    geometry = Geometry.resolve("tiny", {**BASE, "wide_table": False, "page_size": page_size})
    assert "page_table_1" not in SYSTEMS["decode"].layout(geometry, 5)
    rounds, buckets = scripted("decode", geometry, batch=5, count=12)
    assert run("decode", geometry, rounds, buckets, Decode) == []


def test_a_batch_of_several_groups_of_requests():
    """More requests than one lane block or interpreted group holds."""
    geometry = Geometry.resolve("tiny", {**BASE, "context": 20, "draft_tokens": 2, "request_rows": 150})
    for system in ("decode", "target_verify", "draft_extend"):
        draft = 2 if SYSTEMS[system].drafts else 1
        rounds, buckets = scripted(system, geometry.replace(draft_tokens=draft), batch=140, count=5)
        assert run(system, geometry.replace(draft_tokens=draft), rounds, buckets, SUBJECTS[system]) == []


@pytest.mark.parametrize(
    "extend_lens",
    [(0, 0, 0, 0), (3, 0, 0, 0), (0, 0, 0, 3), (0, 2, 0, 1), (3, 3, 3, 3), (1, 2, 3, 0), (2, 2)],
)
def test_ragged_extend_lengths(extend_lens: tuple[int, ...]):
    geometry = Geometry.resolve("tiny", {**BASE, "draft_tokens": 3})
    seq_lens = (1, 60, 2, 33)[: len(extend_lens)]
    requests = (4, 3, 9, 1)[: len(extend_lens)]
    one = Round(bucket=4, seq_lens=seq_lens, requests=requests, lens={"extend_lens": extend_lens})
    two = one.replace(extend_lens=extend_lens[::-1], poison="stale")
    assert run("draft_extend", geometry, [one, two], (4,), DraftExtend) == []


class WrongTopk(Decode):
    """The shipped subject with a top-k that is one too small."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry.replace(topk=geometry.topk - 1), inputs, buffers)


class NarrowTable(TargetVerify):
    """The shipped subject with a table one column too narrow."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry.replace(table_width=geometry.columns - 1), inputs, buffers)


class StaticExtend(DraftExtend):
    """The shipped subject with every extend length taken for N."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        static = inputs.extend_lens.clone().fill_(geometry.draft_tokens)
        super().allocate(geometry, inputs.replace(extend_lens=static), buffers)


@pytest.mark.parametrize(
    "system, subject, word",
    [
        ("decode", WrongTopk, "dsa_cache_seqlens_int32"),
        ("target_verify", NarrowTable, "page_table_1"),
        ("draft_extend", StaticExtend, "dsa_seqlens_expanded"),
    ],
)
def test_a_small_mistake_in_a_shipped_subject_is_found(system: str, subject: type, word: str):
    """The tests above can fail."""
    draft = 3 if SYSTEMS[system].drafts else 1
    geometry = Geometry.resolve("tiny", {**BASE, "draft_tokens": draft})
    lens = (0, 2, 1, 3) if system == "draft_extend" else None
    rounds = [Round(bucket=4, seq_lens=(61, 60, 2, 33), requests=(4, 3, 9, 1)).replace(extend_lens=lens)]
    found = run(system, geometry, rounds, (4,), subject)
    assert any(word in sentence for sentence in found)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Geometry, list[Round], tuple[int, ...]]:
    system = draw(st.sampled_from(sorted(SUBJECTS)))
    n = draw(st.integers(1, 5)) if SYSTEMS[system].drafts else 1
    pool = draw(st.sampled_from([1, 1, 2, 4]))
    context = draw(st.integers(n + pool, 80))
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    rows = draw(st.integers(2, 9))
    geometry = Geometry.resolve(
        "tiny",
        {
            "context": context,
            "page_size": page_size,
            "topk": draw(st.integers(1, 40)),
            "pool_size": pool,
            "draft_tokens": n,
            "request_rows": rows,
            "table_width": draw(st.one_of(st.just(0), st.integers(1, context + 9))),
            "architecture": draw(st.sampled_from([90, 100])),
            "index_dtype": draw(st.sampled_from(["int32", "int64"])),
            "input_view": draw(st.sampled_from(["plain", "offset", "strided"])),
            "wide_table": system != "decode" or page_size == 1 or pool > 1 or draw(st.booleans()),
        },
    )
    buckets = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=2, unique=True)))
    rounds = []
    for _ in range(draw(st.integers(4, 8))):
        bucket = draw(st.sampled_from(buckets))
        raw = draw(st.integers(0, bucket))

        def many(low: int, high: int, raw: int = raw) -> tuple[int, ...]:
            return tuple(draw(st.lists(st.integers(low, high), min_size=raw, max_size=raw)))

        rounds.append(
            Round(
                bucket=bucket,
                seq_lens=many(0, context),
                requests=many(0, rows - 1),
                lens={"extend_lens": many(0, n)} if system == "draft_extend" and draw(st.booleans()) else {},
                remap=tuple(draw(st.lists(st.integers(1, rows - 1), max_size=2))),
                poison=draw(st.sampled_from(POISONS)),
                twice=draw(st.booleans()),
            )
        )
    return system, geometry, rounds, buckets


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases())
def test_drawn_geometries_and_rounds(case: tuple[str, Geometry, list[Round], tuple[int, ...]]):
    system, geometry, rounds, buckets = case
    assert run(system, geometry, rounds, buckets, SUBJECTS[system]) == []
