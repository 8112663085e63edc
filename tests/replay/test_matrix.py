"""The diagnostic matrix really holds what it promises: crossings, moves, interleaving, remaps, poisons, pad rows."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import backend

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import INDEX_DTYPES, INPUT_VIEWS, WARM_UPS, Geometry
from dsa_verify.contract.padded import PADDED_MODES
from dsa_verify.contract.round import POISONS, Round
from dsa_verify.contract.round_table import RoundTable, tabulate
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.contract.system import System
from dsa_verify.contract.topk_plan import PLAN_RULES
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.case_file import parse_case
from dsa_verify.rounds.edge_configs import edges
from dsa_verify.rounds.matrix import (
    CHUNK_ROUNDS,
    REMAPS_PER_ROUND,
    SCRIPTED_ROUNDS,
    Config,
    boundaries,
    diagnostic_matrix,
    is_undefined,
)
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.pipelines.basic import Decode, DraftExtend
from dsa_verify.systems.catalogue import OF_OTHERS, SYSTEMS, resolve_geometry
from dsa_verify.systems.engines import EngineSubject, engine_subjects
from dsa_verify.systems.shapes import companion

# `padded` has a matrix of its own shape, see below.
ALIKE = {name: system for name, system in SYSTEMS.items() if name != "padded"}
systems = pytest.mark.parametrize("system", ALIKE.values(), ids=ALIKE)
PRESETS = ("tiny", "deepseek_v32", "glm53_flash")


def matrix(system: System, preset: str = "tiny", **rest: object) -> list[Config]:
    return diagnostic_matrix(system, system.geometry(preset), **rest)  # type: ignore[arg-type]


def rounds_of(config: Config) -> list[Round]:
    return [round_ for table in config.chunks() for round_ in table.rounds()]


@systems
def test_sixteen_configurations_of_seventeen_rounds(system: System):
    configs = matrix(system)
    assert len(configs) == 16
    assert sum(len(rounds_of(config)) for config in configs) == 272
    assert len({(config.buckets, config.geometry.draft_tokens) for config in configs}) == 16
    assert {config.geometry.input_view for config in configs} == set(INPUT_VIEWS)
    assert {config.geometry.index_dtype for config in configs} == set(INDEX_DTYPES)
    assert {config.geometry.warm_ups for config in configs} == set(WARM_UPS)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_fourth_configuration_has_tables_narrower_than_requests(name: str):
    """Beside all forms of inputs, and of a width that no block divides."""
    for preset in ("tiny_v4", "deepseek_v4") if name == "padded" else PRESETS[:2]:
        configs = matrix(SYSTEMS[name], preset)
        narrow = [config.geometry for config in configs if config.geometry.table_width]
        assert len(narrow) == len(configs) / 4
        for geometry in narrow:
            assert geometry.columns < geometry.context
            assert all(geometry.columns % block for block in (2, 64, 128))
        assert {geometry.input_view for geometry in narrow} == set(INPUT_VIEWS)
        assert {geometry.index_dtype for geometry in narrow} == set(INDEX_DTYPES)


@pytest.mark.parametrize("subject", [*engine_subjects()], ids=lambda subject: subject.name)
def test_tables_of_an_engine_are_as_wide_as_it_makes_them(subject: EngineSubject):
    """And its edges, which say widths themselves, are those of any subject."""
    system = SYSTEMS[subject.system]
    geometry, fixed = resolve_geometry(system, subject.name, "cpu")
    assert not any(config.geometry.table_width for config in diagnostic_matrix(system, geometry, fixed=fixed))
    kinds = [edge.kind for edge in edges(system, geometry, seed=0, fixed=fixed)]
    assert kinds == [edge.kind for edge in edges(system, geometry, seed=0, fixed=frozenset(subject.settings))]


class NoClamp(Decode):
    """Writes one column past a table that is narrower than the request."""

    def in_graph(self) -> None:
        super().in_graph()
        table, inputs = self._buffers["page_table_1"], self._inputs
        width = table.shape[1]
        past = table.as_strided((len(table),), (table.stride(0),), table.storage_offset() + width)
        slots = inputs.req_to_token[inputs.req_pool_indices.long(), width]
        past.copy_(torch.where(inputs.seq_lens > width, slots, past))


def test_a_write_past_a_narrow_table_is_found():
    found = []
    for config in matrix(SYSTEMS["decode"])[:3]:
        setup = ReplaySetup.make(config.system, config.geometry, config.buckets, 0, NoClamp, None, backend())
        found.append(bool(verify_rounds(setup, config.chunks(), Counts(), folder=None)))
    assert found == [False, True, False]


# Of a system's subjects that differ in their schedules alone, the first writes the tables as all do.
OURS = [
    pytest.param(name, subject, marks=[pytest.mark.slow] * (subject in ("out_of_graph", "cached", "residual")))
    for name, system in SYSTEMS.items()
    for subject in system.subjects
    if subject != "deep_gemm"
]


@pytest.mark.parametrize("name, subject", OURS)
def test_our_pipelines_keep_to_a_narrow_table(name: str, subject: str):
    settings = {"table_width": 135, "indexer": name not in ("padded", "dcp")} | (
        {"dcp_size": 2} if name == "dcp" else {}
    )
    preset = SYSTEMS[name].preset("cpu")
    for config in diagnostic_matrix(
        SYSTEMS[name],
        SYSTEMS[name].geometry(preset, settings),
        batches=[4],
        drafts=[3] if SYSTEMS[name].drafts else None,
        rounds=9,
        fixed=frozenset(settings),
    ):
        setup = ReplaySetup.make(config.system, config.geometry, config.buckets, 0, subject, None, backend())
        assert verify_rounds(setup, config.chunks(), Counts(), folder=None) == []


@systems
def test_a_field_that_was_asked_for_does_not_turn(system: System):
    geometry = system.geometry("tiny", {"input_view": "offset", "warm_ups": "together"})
    configs = diagnostic_matrix(system, geometry, fixed=frozenset({"input_view", "warm_ups"}))
    assert {config.geometry.input_view for config in configs} == {"offset"}
    assert {config.geometry.warm_ups for config in configs} == {"together"}
    assert {config.geometry.index_dtype for config in configs} == set(INDEX_DTYPES)


@pytest.mark.parametrize(
    "name, field, values, asked",
    [
        ("mtp", "draft_steps", {2, 3, 4, 5}, 3),
        ("dcp", "dcp_block", {1, 4}, 2),
        ("padded", "low_ratios", {False, True}, True),
    ],
)
def test_what_only_our_own_pipelines_are_asked_for(name: str, field: str, values: set[object], asked: object):
    """Others have what the run says, or the default of the field."""
    system = SYSTEMS[name]

    def drawn(subject: object, **settings: object) -> set[object]:
        geometry, fixed = resolve_geometry(system, subject, "cpu", None, settings)
        return {getattr(config.geometry, field) for config in diagnostic_matrix(system, geometry, fixed=fixed)}

    assert drawn(None) == values
    assert drawn(None, **{field: asked}) == {asked}
    assert drawn("a:B") == {getattr(system.geometry("tiny"), field)}
    assert drawn("a:B", **{field: asked}) == {asked}


def test_every_mode_of_padded_has_low_ratios_with_another_draft_length():
    configs = [config.geometry for config in matrix(SYSTEMS["padded"], "tiny_v4")]
    assert len(configs) == 16
    low = [(each.padded_mode, each.draft_tokens) for each in configs if each.low_ratios]
    assert {mode for mode, _ in low} == set(PADDED_MODES)
    assert len({draft for _, draft in low}) == len(low) == 4
    assert not any(
        config.geometry.low_ratios for config in matrix(SYSTEMS["padded"], "tiny_v4", fixed=frozenset({OF_OTHERS}))
    )
    odd = SYSTEMS["padded"].geometry("tiny_v4", {"page_size": 1, "sparse_ratio": 1, "dense_ratio": 1})
    assert not any(config.geometry.low_ratios for config in diagnostic_matrix(SYSTEMS["padded"], odd))


@systems
def test_batches_and_drafts_can_be_chosen(system: System):
    configs = matrix(system, batches=[5, 6], drafts=[3])
    assert [config.buckets[0] for config in configs] == [5, 6]
    assert {config.geometry.draft_tokens for config in configs} == {3 if system.drafts else 1}


@systems
@pytest.mark.parametrize("preset", PRESETS)
def test_lengths_cross_every_boundary_in_both_directions(system: System, preset: str):
    """On the length of one batch row from one round of a bucket to the next."""
    up: set[int] = set()
    down: set[int] = set()
    configs = matrix(system, preset)
    geometry = configs[0].geometry
    centres = {geometry.page_size, 2 * geometry.page_size, geometry.topk, geometry.context - 1}
    for config in configs:
        rounds = [r for r in rounds_of(config) if r.bucket == config.buckets[0]]
        for before, after in itertools.pairwise(rounds):
            for old, new in zip(before.seq_lens, after.seq_lens, strict=False):
                up |= {centre for centre in centres if old <= centre < new}
                down |= {centre for centre in centres if new <= centre < old}
    assert up == down == centres


@systems
@pytest.mark.parametrize("preset", PRESETS)
def test_lengths_lie_on_and_beside_the_boundaries(system: System, preset: str):
    geometry = Geometry.resolve(preset)
    seen = {length for config in matrix(system, preset) for r in rounds_of(config) for length in r.seq_lens}
    for centre in (geometry.page_size, geometry.topk):
        assert {centre - 1, centre, centre + 1} <= seen
    shortest = min(system.shortest_length(config.geometry) for config in matrix(system, preset))
    assert {shortest, max(shortest, 1), geometry.context} <= seen


@systems
def test_the_script_of_every_configuration(system: System):
    for config in matrix(system):
        rounds = rounds_of(config)
        main, other = config.buckets
        assert other == (main * config.geometry.draft_tokens if system.name == "ragged_verify" else companion(main))
        assert other != main
        order = [round_.bucket for round_ in rounds]
        changes = [(a, b, c) for a, b, c in zip(order, order[1:], order[2:], strict=False)]
        assert (main, other, main) in changes, "A-B-A"
        assert {round_.poison for round_ in rounds} == set(POISONS)
        assert sum(round_.twice for round_ in rounds) == 2
        assert any(round_.raw_batch < round_.bucket for round_ in rounds)
        assert any(round_.raw_batch == round_.bucket for round_ in rounds)
        swing = [(round_.bucket, round_.raw_batch) for round_ in rounds[-4:]]
        assert swing == [(main, main), (main, min(3, main)), (main, 0), (main, main)], "large, small, idle, large"
        assert sum(len(set(round_.remap)) for round_ in rounds) >= 5
        for round_ in rounds:
            assert set(round_.remap) <= set(round_.requests), "those that move are those that are looked at"
            assert len(set(round_.remap)) <= REMAPS_PER_ROUND
        taken = [(prefix, round_) for round_ in rounds for prefix in round_.prefixes]
        assert any(row == origin for (row, origin, _), _ in taken), "a request keeps its first pages"
        for (row, origin, pages), round_ in taken:
            for length in (
                n for n, each in zip(round_.seq_lens, round_.requests, strict=True) if each in (row, origin)
            ):
                assert pages <= system.pages_before_writes(config.geometry, length), "what is shared is written"
        if main >= 4:
            assert any({row, origin} <= set(r.requests) and row != origin for (row, origin, _), r in taken)
            self_pairs = [len(set(r.requests)) < r.raw_batch for r in rounds]
            assert any(self_pairs), "two batch rows of one request"


@systems
def test_requests_move_between_batch_rows(system: System):
    for config in matrix(system):
        rows_of: dict[int, set[int]] = {}
        for round_ in rounds_of(config):
            for row, request in enumerate(round_.requests):
                rows_of.setdefault(request, set()).add(row)
        if config.buckets[0] > 2:
            assert sum(len(rows) > 1 for rows in rows_of.values()) >= 2


@systems
def test_some_rounds_are_empty(system: System):
    assert any(round_.raw_batch == 0 for config in matrix(system) for round_ in rounds_of(config))


@systems
def test_an_empty_request_is_first_in_the_middle_and_last_of_a_batch(system: System):
    """Beside others, in every configuration of four requests or more."""
    for config in matrix(system, batches=[4, 16]):
        mixed = [r.seq_lens for r in rounds_of(config) if r.raw_batch >= 4 and any(r.seq_lens)]
        for where in (slice(0, 1), slice(1, -1), slice(-1, None)):
            assert any(0 in lengths[where] for lengths in mixed)


def test_long_runs_ask_for_no_undefined_schedule():
    geometry = Geometry.resolve("tiny", {"indexer": True, "context": 2, "topk": 2})
    config = diagnostic_matrix(SYSTEMS["draft_extend"], geometry, batches=[2], drafts=[16], rounds=400)[0]
    rounds = rounds_of(config)
    assert any(r.seq_lens[:1] == (0,) for r in rounds)
    assert not any(is_undefined(SYSTEMS["draft_extend"], config.geometry, r) for r in rounds)


class NamesTheEmpty(Decode):
    """Where an SM starts with the first tile of a request, it names the request before if that one is empty."""

    def in_graph(self) -> None:
        super().in_graph()
        schedule, lengths = self._buffers["paged_mqa_schedule_metadata"], self._inputs.seq_lens
        before = (schedule[:, 0].long() - 1).clamp(min=0)
        empty = (schedule[:, 1] == 0) & (schedule[:, 0] < len(lengths)) & (schedule[:, 0] > 0) & (lengths[before] == 0)
        schedule[:, 0] -= empty.int()


def test_a_schedule_that_names_an_empty_request_is_found():
    geometry = Geometry.resolve("tiny", {"indexer": True, "multiprocessors": 5, "schedule": "tiny"})
    for config in diagnostic_matrix(SYSTEMS["decode"], geometry, batches=[4, 12]):
        setup = ReplaySetup.make(config.system, config.geometry, config.buckets, 0, NamesTheEmpty, None, backend())
        findings = verify_rounds(setup, config.chunks(), Counts(), folder=None)
        assert {finding.field for finding in findings} == {"paged_mqa_schedule_metadata"}


def test_draft_extend_is_ragged_at_times_and_static_at_others():
    config = matrix(SYSTEMS["draft_extend"], batches=[8], drafts=[4], rounds=300)[0]
    owned = [round_.lens.get("extend_lens") for round_ in rounds_of(config) if round_.raw_batch]
    assert all(lens is not None for lens in owned)
    static = [set(lens) == {4} for lens in owned if lens is not None]
    assert 0.5 < sum(static) / len(static) < 1
    assert any(0 in lens for lens in owned if lens is not None)


def test_scripted_draft_extend_is_ragged_too():
    """Zeros first, between and last, a round in which nobody extends, and static rounds."""
    for config in matrix(SYSTEMS["draft_extend"], batches=[4, 16], fixed=frozenset({"indexer"})):
        n = config.geometry.draft_tokens
        lens = [r.lens.get("extend_lens") for r in rounds_of(config) if r.raw_batch == config.buckets[0]]
        assert sum(set(each) == {n} for each in lens if each) >= 4
        ragged = [each for each in lens if each and len(set(each)) > 1]
        for where in (slice(0, 1), slice(1, -1), slice(-1, None)):
            assert any(0 in each[where] for each in ragged)
        assert (0,) * config.buckets[0] in lens


def test_with_an_indexer_every_request_extends_by_all():
    config = diagnostic_matrix(SYSTEMS["draft_extend"], Geometry.resolve("tiny", {"indexer": True}))[4]
    assert all("extend_lens" not in r.lens for r in rounds_of(config))


class ExtendsAll(DraftExtend):
    """Every request by N, as production does."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        lens = torch.full_like(inputs.seq_lens, geometry.draft_tokens)
        super().allocate(geometry, inputs.replace(extend_lens=lens), buffers)


@pytest.mark.parametrize("batch, draft", [(1, 2), (1, 8), (4, 4)])
def test_a_subject_that_extends_all_by_the_draft_is_found(batch: int, draft: int):
    (config,) = matrix(SYSTEMS["draft_extend"], batches=[batch], drafts=[draft])
    setup = ReplaySetup.make(config.system, config.geometry, config.buckets, 0, ExtendsAll, None, backend())
    findings = verify_rounds(setup, config.chunks(), Counts(), folder=None)
    assert "dsa_seqlens_expanded" in {finding.field for finding in findings}


@systems
@pytest.mark.parametrize("preset", PRESETS)
def test_every_round_survives_the_case_file(system: System, preset: str):
    """Scripted and random rounds alike are legal cases."""
    indexer = Geometry.resolve(preset).indexer and system.name != "ragged_verify"  # which has no pooled one
    geometry = system.geometry(preset, {"indexer": indexer})
    config = diagnostic_matrix(system, geometry, batches=[5], drafts=[3], rounds=120)[0]
    setup = ReplaySetup.make(system, config.geometry, config.buckets, 0, None, None, backend())
    scenario = setup.scenario(rounds_of(config))
    assert len(scenario.rounds) == 120
    assert dataclasses.replace(parse_case(scenario.to_json()), name="") == scenario


@systems
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), batch=st.integers(1, 9), draft=st.integers(1, 4), pool=st.sampled_from([1, 4]))
def test_random_tables_are_what_their_rounds_tabulate_to(system: System, seed: int, batch: int, draft: int, pool: int):
    """A chunk is drawn column by column; as rounds it must say the same, remaps and live bounds included."""
    geometry = system.geometry("tiny", {"pool_size": pool, "request_rows": 12})
    config = diagnostic_matrix(system, geometry, batches=[batch], drafts=[draft], seed=seed, rounds=60)[0]
    chunks = list(config.chunks())
    rounds = [round_ for table in chunks for round_ in table.rounds()]
    again = tabulate(
        system,
        config.geometry,
        rounds,
        np.zeros(config.geometry.request_rows, np.int64),
        widest_bucket=max(config.buckets),
        remap_slots=REMAPS_PER_ROUND,
    )
    for field in dataclasses.fields(RoundTable):
        if field.name == "said":
            assert all(table.said == again.said for table in chunks)
            continue
        if field.name == "lens":
            for name, column in again.lens.items():
                assert np.array_equal(np.concatenate([table.lens[name] for table in chunks]), column), name
            continue
        drawn = np.concatenate([getattr(table, field.name) for table in chunks])
        tabulated = getattr(again, field.name)
        if field.name.startswith("remap"):
            # Which slot holds a remap means nothing.
            drawn, tabulated = np.sort(drawn, axis=1), np.sort(tabulated, axis=1)
        assert np.array_equal(drawn, tabulated), field.name


@systems
def test_the_same_seed_gives_the_same_rounds_and_another_one_others(system: System):
    first, again = (rounds_of(matrix(system, batches=[6], rounds=80)[0]) for _ in range(2))
    assert first == again
    assert rounds_of(matrix(system, batches=[6], rounds=80, seed=1)[0]) != first


@systems
def test_a_long_run_comes_in_chunks(system: System):
    config = matrix(system, batches=[3], drafts=[2], rounds=SCRIPTED_ROUNDS + 2 * CHUNK_ROUNDS + 5)[0]
    assert [len(table) for table in config.chunks()] == [SCRIPTED_ROUNDS, CHUNK_ROUNDS, CHUNK_ROUNDS, 5]
    assert [len(table) for table in dataclasses.replace(config, rounds=4).chunks()] == [4]


def test_too_few_request_rows_are_refused():
    geometry = Geometry.resolve("tiny", {"request_rows": 4})
    with pytest.raises(UsageError, match="request_rows"):
        list(diagnostic_matrix(SYSTEMS["decode"], geometry, batches=[8], fixed=frozenset({"request_rows"}))[0].chunks())


def test_a_fixed_draft_length_is_refused_not_overridden():
    geometry = Geometry.resolve("tiny", {"draft_tokens": 3})
    with pytest.raises(UsageError, match="draft_tokens"):
        diagnostic_matrix(SYSTEMS["target_verify"], geometry, fixed=frozenset({"draft_tokens"}))


def test_boundaries_are_legal_lengths():
    for preset in PRESETS:
        geometry = Geometry.resolve(preset)
        values = boundaries(geometry)
        assert values[0] == 0
        assert values[-1] == geometry.context
        assert (np.diff(values) > 0).all()


@pytest.mark.parametrize("preset", ["deepseek_v32_indexer", "glm53_flash", "tiny_pool"])
def test_boundaries_hold_the_thresholds_of_the_plans(preset: str):
    """Also those of pooled plans, which are reached with as many pools."""
    geometry = Geometry.resolve(preset)
    values = set(boundaries(geometry).tolist())
    for threshold, _ in PLAN_RULES[geometry.plan_rules].thresholds:
        first_above = {threshold + 1, (threshold + 1) * geometry.pool_size}
        wanted = {length + step for length in first_above for step in (-1, 0)} | {threshold - 1}
        assert {length for length in wanted if length <= geometry.context} <= values


@systems
@pytest.mark.parametrize("preset", [*PRESETS, "deepseek_v32_indexer", "tiny_pool"])
def test_scripted_rounds_reach_all_boundaries(system: System, preset: str):
    """Those of narrow tables, which few configurations have, near the width alone; those of an indexer, where it is on
    throughout."""
    seen: dict[bool, set[int]] = {False: set(), True: set()}
    wanted: dict[bool, set[int]] = {False: set(), True: set()}
    for config in matrix(system, preset, fixed=frozenset({"indexer"})):
        width = config.geometry.table_width
        around = boundaries(config.geometry).tolist() if not width else (width - 1, width, width + 1)
        wanted[width > 0] |= {length for length in around if length >= system.shortest_length(config.geometry)}
        seen[width > 0] |= {length for r in rounds_of(config) for length in r.seq_lens}
    assert wanted[False] <= seen[False] | seen[True]
    assert wanted[True] <= seen[True]


def test_companions_differ_from_their_bucket():
    for batch in range(1, 200):
        assert 1 <= companion(batch) != batch


# padded --------------------------------------------------------------------------------------------------------------

PADDED = SYSTEMS["padded"]


def test_padded_takes_every_raw_batch_of_both_buckets_in_every_mode():
    configs = matrix(PADDED, "tiny_v4")
    assert len(configs) == 16
    assert {config.geometry.padded_mode for config in configs} == set(PADDED_MODES)
    for config in configs:
        shapes = [(r.bucket, r.raw_batch) for r in rounds_of(config)]
        assert set(shapes) == {(bucket, raw) for bucket in (48, 14) for raw in range(bucket + 1)}
        assert shapes[:4] == [(48, 48), (48, 3), (48, 0), (48, 48)]
    assert sum(r.raw_batch < r.bucket for config in configs for r in rounds_of(config)) >= 640


def test_padded_captures_the_batches_it_is_given_in_the_mode_it_is_given():
    geometry = SYSTEMS["padded"].geometry("tiny_v4", {"padded_mode": "verify"})
    configs = diagnostic_matrix(
        PADDED, geometry, batches=[5, 2], drafts=[3], rounds=40, fixed=frozenset({"padded_mode"})
    )
    (config,) = configs
    assert (config.buckets, config.geometry.padded_mode, config.geometry.draft_tokens) == ((5, 2), "verify", 3)
    setup = ReplaySetup.make(PADDED, config.geometry, config.buckets, 0, None, None, backend())
    scenario = setup.scenario(rounds_of(config))
    assert len(scenario.rounds) == 40
    assert dataclasses.replace(parse_case(scenario.to_json()), name="") == scenario


def test_a_second_graph_of_ragged_verify_that_would_be_too_large_is_refused():
    with pytest.raises(UsageError, match=r"batch: 2731 requests of draft length 6 .* 16386 requests.*; use 2730 or"):
        diagnostic_matrix(
            SYSTEMS["ragged_verify"], SYSTEMS["ragged_verify"].geometry("tiny"), batches=[2731], drafts=[6]
        )
    (config,) = diagnostic_matrix(
        SYSTEMS["ragged_verify"], SYSTEMS["ragged_verify"].geometry("tiny"), batches=[2730], drafts=[6]
    )
    assert config.buckets == (2730, 16380)
