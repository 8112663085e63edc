"""What default runs visit of the indexer: empty requests in schedules, both architectures, pools, and whose runs."""

from __future__ import annotations

import pytest
from support import backend

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.schedule_variants import VARIANTS, Unit
from dsa_verify.contract.subject import SubjectFactory
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.indexer_turns import INDEXED_PRESETS
from dsa_verify.rounds.matrix import Config, diagnostic_matrix, undefined_when_empty
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.pipelines import topk_plan
from dsa_verify.subjects.pipelines.basic import Decode, TargetVerify
from dsa_verify.systems.catalogue import SYSTEMS, resolve_geometry
from fuzz.engine.boundaries import Kind, boundaries

SYSTEMS_WITH_INDEXER = [name for name, system in SYSTEMS.items() if system.indexer]
EMPTY_SYSTEMS = [name for name, system in SYSTEMS.items() if system.empty_rows]
indexed_systems = pytest.mark.parametrize("name", SYSTEMS_WITH_INDEXER)


def default_matrix(name: str, subject: object = None, device: str = "cpu", **rest: object) -> list[Config]:
    geometry, fixed = resolve_geometry(SYSTEMS[name], subject, device, **rest)  # type: ignore[arg-type]
    return diagnostic_matrix(SYSTEMS[name], geometry, fixed=fixed)


def with_indexer(configs: list[Config]) -> list[Config]:
    return [config for config in configs if config.geometry.indexer]


def verify(config: Config, subject: SubjectFactory | str | None = None) -> list[Finding]:
    setup = ReplaySetup.make(config.system, config.geometry, config.buckets, 0, subject, None, backend())
    return verify_rounds(setup, config.chunks(), Counts(), folder=None)


@indexed_systems
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_quarter_of_a_default_run_has_the_indexer(name: str, device: str):
    """On both architectures, alone and with pools, and each says so in its name."""
    configs = default_matrix(name, device=device)
    turned = with_indexer(configs)
    assert len(turned) == 4 == len(configs) / 4
    plain = SYSTEMS[name].preset(device)
    assert {config.geometry.preset for config in configs if config not in turned} == {plain}
    wanted = set(INDEXED_PRESETS[plain][: 1 if name == "ragged_verify" else 2])  # which has no write plan
    assert {config.geometry.preset for config in turned} == wanted
    assert {config.geometry.architecture for config in turned} == {90, 100}
    for config in turned:
        assert config.geometry.architecture in VARIANTS[config.geometry.schedule].architectures
        assert config.name.endswith(config.note)
        assert config.note.startswith(config.geometry.preset)
        assert ("architecture 100" in config.note) is (config.geometry.architecture == 100)
    assert {VARIANTS[config.geometry.schedule].unit for config in turned} == {Unit.ATOM, Unit.TOKEN_RUN}


@pytest.mark.parametrize("name", EMPTY_SYSTEMS)
def test_empty_requests_reach_schedules_and_plans(name: str):
    """Beside others, on either architecture; pools alone forbid them."""
    architectures = set()
    for config in with_indexer(default_matrix(name)):
        lengths = [r.seq_lens for table in config.chunks() for r in table.rounds() if any(r.seq_lens)]
        if any(0 in each for each in lengths):
            architectures.add(config.geometry.architecture)
        else:
            assert config.geometry.pool_size > 1 or max(config.buckets) < 3
    assert architectures == {90, 100}


def test_lengths_of_architecture_100_have_their_own_buffer():
    shapes = set()
    for config in with_indexer(default_matrix("target_verify")):
        field = config.system.layout(config.geometry, 4)["paged_mqa_ctx_lens_2d"]
        shapes.add((config.geometry.architecture, field.alias is None, field.columns > 1))
    assert shapes == {(90, False, False), (100, True, True)}


@pytest.mark.parametrize(
    "subject, turns",
    [(None, True), ("triton", True), ("in_graph", True), ("deep_gemm", False), (TargetVerify, False), ("a:B", False)],
)
def test_only_our_own_pipelines_are_asked_for_it(subject: object, turns: bool):
    assert bool(with_indexer(default_matrix("target_verify", subject))) is turns
    architectures = {c.geometry.architecture for c in default_matrix("target_verify", subject, preset="tiny_pool")}
    assert architectures == ({90, 100} if turns else {90})


def test_what_is_asked_for_does_not_turn():
    assert not with_indexer(default_matrix("decode", preset="tiny"))
    assert not with_indexer(default_matrix("decode", settings={"indexer": False}))
    for settings in ({"architecture": 100}, {"architecture": 90}, {"schedule": "V4b"}):
        for config in with_indexer(default_matrix("target_verify", settings=settings)):
            assert all(getattr(config.geometry, key) == value for key, value in settings.items())
            assert settings.get("architecture", 90) == config.geometry.architecture


def test_settings_that_allow_no_pools_or_no_indexer_are_kept():
    no_pools = with_indexer(default_matrix("decode", settings={"wide_table": False}))
    assert [config.geometry.pool_size for config in no_pools] == [1] * 4
    assert not with_indexer(default_matrix("ragged_verify", settings={"pool_size": 4}))


class NamesTheEmpty(Decode):
    """Where an SM starts with the first tile of a request, it names the request before if that one is empty."""

    def in_graph(self) -> None:
        super().in_graph()
        schedule, lengths = self._buffers.get("paged_mqa_schedule_metadata"), self._inputs.seq_lens
        if schedule is not None:
            before = (schedule[:, 0].long() - 1).clamp(min=0)
            names = (schedule[:, 1] == 0) & (schedule[:, 0] < len(lengths)) & (schedule[:, 0] > 0)
            schedule[:, 0] -= (names & (lengths[before] == 0)).int()


class FirstColumnOnly(TargetVerify):
    """Leaves the lengths of later draft positions as the first replay did, where each has a column of its own."""

    def in_graph(self) -> None:
        lengths = self._buffers["paged_mqa_ctx_lens_2d"][:, 1:]
        kept = lengths.clone()
        super().in_graph()
        lengths.copy_(kept)


@pytest.mark.parametrize(
    "name, subject, field",
    [
        ("decode", NamesTheEmpty, "paged_mqa_schedule_metadata"),
        ("target_verify", FirstColumnOnly, "paged_mqa_ctx_lens_2d"),
    ],
)
def test_what_only_the_indexer_shows_is_found(name: str, subject: SubjectFactory, field: str):
    config = with_indexer(diagnostic_matrix(SYSTEMS[name], SYSTEMS[name].geometry("tiny")))[0]
    assert field in {finding.field for finding in verify(config, subject)}


def test_a_filler_of_the_table_of_thresholds_that_is_no_filler_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(topk_plan, "UNUSED", (0, 512))
    config = with_indexer(default_matrix("decode"))[0]
    assert {finding.field for finding in verify(config)} == {"topk_v2_plan"}


OURS = [
    (name, subject)
    for name in SYSTEMS_WITH_INDEXER
    for subject, reference in SYSTEMS[name].subjects.items()
    if reference.startswith("dsa_verify.subjects.pipelines.") and subject != "triton"
]


@pytest.mark.parametrize("name, subject", OURS)
def test_our_other_pipelines_are_right_on_architecture_100(name: str, subject: str):
    geometry = SYSTEMS[name].geometry("tiny_indexer", {"architecture": 100, "schedule": "tiny_runs"})
    drafts = [3] if SYSTEMS[name].drafts else None
    (config,) = diagnostic_matrix(
        SYSTEMS[name], geometry, batches=[4], drafts=drafts, rounds=6, fixed=frozenset({"architecture", "schedule"})
    )
    assert verify(config, subject) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_default_batches_lie_across_what_kernels_take_at_once(device: str):
    """Groups of 64 requests (interpreted: tables, pools), blocks of 128 (lengths), 1,024 rows (schedules), 256 rows
    (interpreted: padded), 512 (plans), and rows on multiples of 32 and beside them."""
    for name, system in SYSTEMS.items():
        configs = default_matrix(name, device=device)
        rows = {c.system.layout(c.geometry, bucket).tokens for c in configs for bucket in c.buckets}
        if name == "padded":
            assert min(rows) < 256 < max(rows)
            continue
        batches = {c.buckets[0] for c in configs}
        assert batches > {1, 4, 16, 48, 65, 129}
        if not system.drafts:
            assert {32 * k + step for k in (1, 2, 3, 4) for step in (-1, 0, 1)} <= rows
        assert {32, 33, 63, 64, 65, 95, 96, 128, 129} <= rows
        assert {c.buckets[0] > 64 for c in with_indexer(configs)} == ({False, True} if name != "dcp" else set())
        if name in ("target_verify", "draft_extend"):
            unpaired = [c for c in with_indexer(configs) if c.geometry.architecture == 90]
            assert max(c.system.layout(c.geometry, c.buckets[0]).tokens for c in unpaired) > 1024
            assert any(c.geometry.pool_size > 1 and c.buckets[0] == 65 for c in configs)


class OneGroup(Decode):
    """Takes the first 64 requests for all: tables of the others keep what they held."""

    def in_graph(self) -> None:
        tables = [self._buffers[name][64:] for name in ("page_table_1", "real_page_table")]
        kept = [table.clone() for table in tables]
        super().in_graph()
        for table, old in zip(tables, kept, strict=True):
            table.copy_(old)


def test_a_kernel_that_takes_one_group_is_found():
    near = [config for config in default_matrix("decode", OneGroup) if 63 <= config.buckets[0] <= 65]
    assert [bool(verify(config, OneGroup)) for config in near] == [False, False, True]


PAIRS = {"context": 803, "architecture": 100, "schedule": "V4c", "multiprocessors": 5}


def test_schedules_of_pairs_are_replayed():
    """V4c of lengths [bs, 4] is for two pairs of the five SMs; of any other it is for all five."""
    geometry = Geometry.resolve("tiny_indexer", PAIRS)
    configs = diagnostic_matrix(
        SYSTEMS["target_verify"], geometry, batches=[4], drafts=[3, 4], rounds=4, fixed=frozenset(PAIRS)
    )
    shapes = [c.system.layout(c.geometry, 4)["paged_mqa_schedule_metadata"].shape for c in configs]
    assert shapes == [(6, 2), (3, 2)]
    assert verify(configs[1]) == []


class OneRowTooEarly(TargetVerify):
    def in_graph(self) -> None:
        super().in_graph()
        schedule = self._buffers["paged_mqa_schedule_metadata"]
        schedule[1] = schedule[0]


def test_a_wrong_row_is_said_to_be_of_a_pair():
    geometry = Geometry.resolve("tiny_indexer", PAIRS)
    (config,) = diagnostic_matrix(
        SYSTEMS["target_verify"], geometry, batches=[4], drafts=[4], rounds=3, fixed=frozenset(PAIRS)
    )
    sentences = " ".join(finding.sentence for finding in verify(config, OneRowTooEarly))
    assert "SM pair 1" in sentences


def test_of_pairs_no_batch_may_be_all_empty():
    """The shipped builder names the last request then, whatever the number of rows."""
    geometry = Geometry.resolve("tiny_indexer", {"schedule": "V4c"})
    assert undefined_when_empty(SYSTEMS["decode"], geometry, 3)
    assert not undefined_when_empty(SYSTEMS["decode"], geometry.replace(schedule="V4b"), 3)
    assert undefined_when_empty(SYSTEMS["decode"], geometry.replace(schedule="V4b"), 32)
    with pytest.raises(UsageError, match="multiprocessors: 1 makes no pair"):
        geometry.replace(multiprocessors=1)


@pytest.mark.parametrize("draft, slots", [(3, 5), (4, 2)])
def test_the_fuzzer_counts_pairs(draft: int, slots: int):
    geometry = Geometry.resolve("tiny_indexer", {**PAIRS, "draft_tokens": draft})
    totals = {b.value for b in boundaries(SYSTEMS["target_verify"], geometry, (4,)) if b.kind is Kind.TILES}
    # Each of four requests has one tile at the least and four at the most.
    assert totals == {value for k in (1, 2) for step in (-1, 0, 1) if 4 <= (value := k * slots + step) <= 16}
