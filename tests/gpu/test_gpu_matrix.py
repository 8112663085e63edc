"""On a GPU: the matrix at the sizes of real models in live CUDA graphs, long runs, and sizes that wrap 32 bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsa_verify.contract.finding import Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.graphs import open_backend
from dsa_verify.replay.compilations import count_compilations
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.edge_configs import EdgeKind, edges
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.systems.catalogue import SYSTEMS, resolve_geometry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
systems = pytest.mark.parametrize("system", ["decode", "target_verify", "draft_extend", "mtp"])
OTHERS = ("ragged_verify", "padded", "dcp")
PRESETS = ("deepseek_v32", "glm53_flash")
MILLION = 1 << 20


def setup_of(system: str, geometry: Geometry, buckets: tuple[int, ...]) -> ReplaySetup:
    backend = open_backend(torch.device("cuda", torch.cuda.current_device()), "cuda")
    return ReplaySetup.make(SYSTEMS[system], geometry, buckets, 0, None, None, backend)


def verify(system: str, geometry: Geometry, buckets: tuple[int, ...], rounds: list[Round]) -> Counts:
    """Verify `rounds`, expecting nothing wrong."""
    setup, counts = setup_of(system, geometry, buckets), Counts()
    expect_clean(verify_rounds(setup, [setup.table(rounds)], counts, folder=None), counts, len(rounds))
    return counts


def expect_clean(findings: list[Finding], counts: Counts, rounds: int) -> None:
    assert [finding.sentence for finding in findings] == []
    assert counts.rounds_checked == rounds
    assert counts.elements_compared > 0
    assert counts.compilations_after_warmup == 0


def run_matrix(system: str, preset: str, rounds: int, batches: list[int], drafts: list[int]) -> None:
    for config in diagnostic_matrix(
        SYSTEMS[system], SYSTEMS[system].geometry(preset), rounds=rounds, batches=batches, drafts=drafts
    ):
        counts = Counts()
        setup = setup_of(system, config.geometry, config.buckets)
        expect_clean(verify_rounds(setup, config.chunks(), counts, folder=None), counts, rounds)


@systems
@pytest.mark.parametrize("preset", PRESETS)
def test_a_reduced_matrix_at_the_size_of_a_model(system: str, preset: str):
    run_matrix(system, preset, rounds=17, batches=[1, 5, 48], drafts=[2, 6])


@pytest.mark.parametrize(
    "system, preset",
    [
        (name, preset)
        for name, system in SYSTEMS.items()
        for preset in PRESETS
        if system.drafts and system.indexer and (system.pools or preset == "deepseek_v32")
    ],
)
def test_a_draft_of_one_token_compiles_for_every_number_of_requests(system: str, preset: str):
    """Triton 3.6 did not compile draft-extend with one token of each of 32 requests or more."""
    run_matrix(system, preset, rounds=4, batches=[1, 31, 32, 33, 200], drafts=[1])


@pytest.mark.parametrize("system", [name for name, system in SYSTEMS.items() if system.indexer])
def test_default_configurations_that_have_the_indexer_or_cross_a_block(system: str):
    """Both architectures, pools, schedules over more than 1,024 rows, batches beyond 128 requests."""
    geometry, fixed = resolve_geometry(SYSTEMS[system], None, "cuda")
    for config in diagnostic_matrix(SYSTEMS[system], geometry, fixed=fixed):
        if config.geometry.indexer or max(config.buckets) > 128:
            counts, setup = Counts(), setup_of(system, config.geometry, config.buckets)
            expect_clean(verify_rounds(setup, config.chunks(), counts, folder=None), counts, config.rounds)


@pytest.mark.parametrize("system, field", [("mtp", "draft_steps"), ("dcp", "dcp_block"), ("padded", "low_ratios")])
def test_default_configurations_of_what_only_our_own_are_asked_for(system: str, field: str):
    """One for each value."""
    geometry, fixed = resolve_geometry(SYSTEMS[system], None, "cuda")
    configs = diagnostic_matrix(SYSTEMS[system], geometry, fixed=fixed)
    for config in {getattr(config.geometry, field): config for config in configs}.values():
        counts, setup = Counts(), setup_of(system, config.geometry, config.buckets)
        expect_clean(verify_rounds(setup, config.chunks(), counts, folder=None), counts, config.rounds)


@pytest.mark.parametrize("system", OTHERS)
def test_a_reduced_matrix_of_the_other_systems(system: str):
    run_matrix(system, SYSTEMS[system].preset("cuda"), rounds=17, batches=[5, 16], drafts=[2, 6])


@pytest.mark.parametrize("system", OTHERS)
def test_a_thousand_rounds_of_the_other_systems(system: str):
    run_matrix(system, SYSTEMS[system].preset("cuda"), rounds=1000, batches=[6], drafts=[4])


@systems
def test_two_thousand_rounds_in_the_same_graphs(system: str):
    run_matrix(system, "deepseek_v32", rounds=2000, batches=[16], drafts=[4])


@systems
@pytest.mark.parametrize("preset", PRESETS)
def test_the_largest_batch(system: str, preset: str, much_memory: None):
    batch = 16_384
    draft = 2 if SYSTEMS[system].drafts else 1
    geometry = SYSTEMS[system].geometry(
        preset, {"context": 4096, "table_width": 512, "request_rows": batch + 2, "draft_tokens": draft}
    )
    rng = np.random.default_rng(0)
    shortest = SYSTEMS[system].shortest_length(geometry)
    rounds = []
    for bucket, poison in ((batch, "loud"), (5, "loud"), (batch, "plausible"), (batch, "stale")):
        raw = bucket - (poison == "stale")
        rounds.append(
            Round(
                bucket=bucket,
                seq_lens=tuple(rng.integers(shortest, 4097, raw).tolist()),
                requests=tuple((rng.permutation(batch)[:raw] + 1).tolist()),
                remap=(1, 2, 3),
                poison=poison,
            )
        )
    verify(system, geometry, (batch, 5), rounds)


@systems
@pytest.mark.parametrize("batch", [1, 2])
def test_a_request_of_a_million_tokens(system: str, batch: int):
    draft = 4 if SYSTEMS[system].drafts else 1
    geometry = SYSTEMS[system].geometry(
        "deepseek_v32", {"context": MILLION, "request_rows": batch + 3, "draft_tokens": draft}
    )
    lengths = [MILLION, 1, MILLION - 1, 64, MILLION - 63, 2048, MILLION]
    rounds = [
        Round(
            bucket=batch,
            seq_lens=tuple(lengths[(i + row) % len(lengths)] for row in range(batch)),
            requests=tuple((i + row) % (batch + 2) + 1 for row in range(batch)),
            remap=(1 + i % (batch + 2),) if i % 2 else (),
            poison=("loud", "plausible", "stale")[i % 3],
        )
        for i in range(len(lengths))
    ]
    verify(system, geometry, (batch,), rounds)


@pytest.mark.parametrize("system", ["decode", "target_verify", "draft_extend"])
def test_sums_that_wrap_at_two_to_the_thirty_one(system: str, much_memory: None):
    """Contract 1.7: 4,096 requests of a million tokens, in a table of one column."""
    batch, rows = 4096, 8
    draft = 2 if SYSTEMS[system].drafts else 1
    geometry = Geometry.resolve(
        "deepseek_v32", {"context": MILLION, "table_width": 1, "request_rows": rows, "draft_tokens": draft}
    )
    requests = tuple(1 + row % (rows - 1) for row in range(batch))
    lengths = [tuple(MILLION - row % spread for row in range(batch)) for spread in (1, 7, 1000)]
    rounds = [Round(bucket=batch, seq_lens=seq_lens, requests=requests) for seq_lens in lengths]
    assert sum(lengths[0]) > 1 << 31
    setup = setup_of(system, geometry, (batch,))
    replayer = setup.open(len(rounds))
    replayer.run(setup.table(rounds))
    tally = replayer.poll()[batch]
    assert tally.count() == 0
    assert tally.compared > 0
    sums = replayer.buckets[batch].subject._buffers["cu_seqlens_k"]  # type: ignore[attr-defined]
    assert (sums < 0).any(), "it did wrap"


def test_tables_with_row_offsets_beyond_two_to_the_thirty_one(much_memory: None):
    """512 x 8 rows of 2**20 columns are 2**32 elements."""
    batch, rows, draft = 512, 8, 8
    geometry = Geometry.resolve("deepseek_v32", {"context": MILLION, "request_rows": rows, "draft_tokens": draft})
    assert batch * draft * geometry.columns > 1 << 31
    requests = tuple(1 + row % (rows - 1) for row in range(batch))
    rounds = [
        Round(bucket=batch, seq_lens=tuple(65 * row + i for row in range(batch)), requests=requests) for i in range(2)
    ]
    rounds.append(Round(bucket=batch, seq_lens=(MILLION - 8,) * batch, requests=requests, poison="stale"))
    verify("target_verify", geometry, (batch,), rounds)


@systems
def test_nothing_is_compiled_when_lengths_change(system: str):
    """Called eagerly too, where a length that had become a constant of the kernel would compile a new one."""
    draft = 4 if SYSTEMS[system].drafts else 1
    geometry = SYSTEMS[system].geometry("deepseek_v32", {"draft_tokens": draft, "request_rows": 50})
    setup = setup_of(system, geometry, (48, 16))
    replayer = setup.open(4)
    compiled = count_compilations()
    before = compiled()
    for length in (1, 2, 16, 63, 64, 65, 2048, 4096, 100_001, 131_072):
        for captured in replayer.buckets.values():
            captured.inputs.seq_lens.fill_(length)
            captured.inputs.req_pool_indices.fill_(length % 49)
            captured.subject.in_graph()
    torch.cuda.synchronize()
    assert compiled() == before


def test_the_compilations_of_another_form_are_counted():
    """The counter above is not blind: another page size is another kernel."""
    compiled = count_compilations()
    before = compiled()
    setup_of("decode", Geometry.resolve("deepseek_v32", {"context": 640, "page_size": 2, "topk": 77}), (3,)).open(1)
    assert compiled() > before


@systems
def test_request_rows_that_are_far_apart(system: str, much_memory: None):
    """Contract 1.7: int32 request indices times a row stride that takes the last row to element 2**31."""
    geometry = SYSTEMS[system].geometry(SYSTEMS[system].preset("cuda"))
    found = edges(SYSTEMS[system], geometry, seed=0, fixed=frozenset())
    (config,) = [edge.config for edge in found if edge.kind is EdgeKind.FAR]
    setup, counts = setup_of(system, config.geometry, config.buckets), Counts()
    expect_clean(verify_rounds(setup, config.chunks(), counts, folder=None), counts, config.rounds)


def test_pools_that_32_bits_do_not_reach(much_memory: None):
    """Contract 8.2: every token of both ranks is stored at word 2**31 or behind it."""
    geometry = SYSTEMS["dcp"].geometry(SYSTEMS["dcp"].preset("cuda"))
    found = edges(SYSTEMS["dcp"], geometry, seed=0, fixed=frozenset())
    (config,) = [edge.config for edge in found if edge.kind is EdgeKind.POOLS]
    setup, counts = setup_of("dcp", config.geometry, config.buckets), Counts()
    expect_clean(verify_rounds(setup, config.chunks(), counts, folder=None), counts, config.rounds)
