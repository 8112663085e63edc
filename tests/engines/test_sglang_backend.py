"""SGLang's whole attention backend as a subject: what it refuses, what stands in for what, and how its record is read;
and, where SGLang can be imported, that the backend agrees with the oracles but for its published gap."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support import DEVICE, SMALL, backend

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.padded import PADDED_MODES
from dsa_verify.contract.round import Round
from dsa_verify.contract.schedule_variants import VARIANTS
from dsa_verify.contract.subject import Buffers, Inputs, load_attribute
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.adapters import deep_gemm
from dsa_verify.subjects.adapters.sglang import backend as sglang_backend
from dsa_verify.subjects.adapters.sglang import backend_stubs as stubs
from dsa_verify.subjects.adapters.sglang import wheel
from dsa_verify.subjects.adapters.sglang.backend import (
    BackendSubject,
    DecodeBackend,
    DraftExtendBackend,
    TargetVerifyBackend,
    record_names,
)
from dsa_verify.subjects.adapters.sglang.backend_engine import Engine, StaticInput, captured_record
from dsa_verify.subjects.adapters.sglang.backend_mtp import MtpBackend, StepsEngine
from dsa_verify.subjects.adapters.sglang.backend_padded import PaddedBackend, _copy
from dsa_verify.subjects.adapters.traced import SHOWN_DIGITS
from dsa_verify.systems.basic import decode
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.systems.engines import engine_subject
from dsa_verify.systems.mtp import mtp
from dsa_verify.systems.padded import padded

SUBJECTS = {
    "decode": DecodeBackend,
    "target_verify": TargetVerifyBackend,
    "draft_extend": DraftExtendBackend,
    "mtp": MtpBackend,
}
ABSENT = "no_such_package_of_an_engine"
NEEDED = ("sglang", "msgspec", "transformers")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
needs_sglang = pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)} (a tree of SGLang's wheel)")


@pytest.mark.parametrize("system", [*SUBJECTS, "padded"])
def test_each_system_has_its_backend_by_name(system: str) -> None:
    found = engine_subject(f"sglang:{system}_backend")
    assert found is not None
    assert (found.system, found.settings.get("indexer", False)) == (system, system != "padded")
    subject = load_attribute(found.reference)
    assert subject is {**SUBJECTS, "padded": PaddedBackend}[system]
    assert subject.name == found.name


# What is refused before anything of SGLang is imported ---------------------------------------------------------------


def allocate(subject: type[BackendSubject], geometry: Geometry, device: str = "cpu") -> None:
    lengths = SimpleNamespace(device=torch.device(device), shape=(2,))
    subject().allocate(geometry, SimpleNamespace(seq_lens=lengths), SimpleNamespace(layout=None))  # type: ignore[arg-type]


def test_pools_of_other_pages_are_refused() -> None:
    for subject in SUBJECTS.values():
        with pytest.raises(
            UsageError, match=r"page_size 4 with pool_size 4; .* pages of 64 only: give --preset glm53_flash"
        ):
            allocate(subject, Geometry.resolve("tiny_pool"))


def test_draft_extend_needs_rounds_that_are_not_ragged() -> None:
    with pytest.raises(UsageError, match=r"extends every request by N.*give --set indexer=true"):
        allocate(DraftExtendBackend, Geometry.resolve("tiny"))


def test_draft_steps_need_the_wide_table() -> None:
    with pytest.raises(UsageError, match="leave wide_table true"):
        allocate(MtpBackend, SYSTEMS["mtp"].geometry("tiny", {"wide_table": False}))


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"window": 64}, "window: 64 is not 128, which SGLang's backend has built in; give --preset deepseek_v4"),
        ({"topk": 256}, "topk: 256 is not 512 or 1024"),
        ({"replay_floor": 3}, "replay_floor: 3 is not 0"),
    ],
)
def test_sizes_that_the_v4_backend_has_built_in_are_asked_for(changes: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        PaddedBackend()._refuse(SYSTEMS["padded"].geometry("deepseek_v4", changes))


@pytest.mark.parametrize("mode", PADDED_MODES)
def test_what_the_v4_backend_does_not_keep_is_listed(mode: str) -> None:
    geometry = SYSTEMS["padded"].geometry("deepseek_v4", {"padded_mode": mode, "draft_tokens": 3, "low_ratios": True})
    layout = padded(geometry, 2)
    missing = set(PaddedBackend.not_covered(layout, torch.device("cpu")))
    compressed = {field.name for field in layout if re.match(r"c\d+_", field.name)}
    skipped = {name for name in compressed if name.endswith(("full_indices", "full_raw_indices"))}
    target, draft = skipped | {"c128_len_raw"}, compressed
    assert (
        missing
        == {
            "decode": target,
            "verify": target,
            "draft_extend": draft,
            "draft_block": draft | {"raw_out_loc"},
        }[mode]
    )


def test_a_tensor_of_another_form_is_not_converted_on_the_way() -> None:
    copy = torch.zeros(2, dtype=torch.int32)
    _copy("raw_out_loc", torch.ones(2, dtype=torch.int32), copy)
    assert copy.tolist() == [1, 1]
    with pytest.raises(UsageError, match=r"raw_out_loc: .* makes torch.int64 \[2\], the layout has torch.int32 \[2\]"):
        _copy("raw_out_loc", torch.ones(2, dtype=torch.int64), copy)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"architecture": 100}, "architecture: the geometry says 100, this device has 90; give --set architecture=90"),
        ({"multiprocessors": 5}, "multiprocessors: the geometry says 5, this device has 132"),
        ({"schedule": "V4"}, "schedule: the geometry says V4, this device has V4b; give --set schedule=V4b"),
    ],
)
def test_a_geometry_of_another_device_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], told: str
) -> None:
    facts = SimpleNamespace(major=9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(deep_gemm, "installed_variant", lambda _: VARIANTS["V4b"])
    monkeypatch.setattr(deep_gemm, "check_importable", lambda: None)
    with pytest.raises(UsageError, match=told):
        allocate(DecodeBackend, Geometry.resolve("tiny", {"indexer": True, **changes}), "cuda")


def test_without_deep_gemm_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(major=9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(deep_gemm, "package_version", lambda _: None)
    with pytest.raises(UsageError, match="sgl-deep-gemm is not installed"):
        allocate(DecodeBackend, Geometry.resolve("tiny"), "cuda")


def test_a_deep_gemm_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise UsageError("importing deep_gemm raised OSError")

    facts = SimpleNamespace(major=9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(deep_gemm, "installed_variant", lambda _: VARIANTS["V4b"])
    monkeypatch.setattr(deep_gemm, "check_importable", broken)
    with pytest.raises(UsageError, match="importing deep_gemm raised"):
        allocate(DecodeBackend, Geometry.resolve("tiny"), "cuda")


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is there")
def test_without_sglang_both_doors_say_so() -> None:
    with pytest.raises(UsageError, match="sglang is not installed"):
        DecodeBackend.provenance()
    inputs = Inputs(
        seq_lens=torch.ones(2, dtype=torch.int64),
        req_pool_indices=torch.zeros(2, dtype=torch.int64),
        req_to_token=torch.zeros((3, 256), dtype=torch.int32),
    )
    geometry = Geometry.resolve("tiny")
    with pytest.raises(UsageError, match="sglang is not installed"):
        DecodeBackend().allocate(geometry, inputs, Buffers(decode(geometry, 2), {}))


# Inputs and records --------------------------------------------------------------------------------------------------


def test_an_input_as_the_engine_has_it_is_taken_as_it_is() -> None:
    lengths = torch.arange(4)
    assert StaticInput(lengths).tensor is lengths


@pytest.mark.parametrize("source", [torch.arange(4, dtype=torch.int32), torch.arange(8)[::2]], ids=["int32", "strided"])
def test_another_input_is_copied_before_each_replay(source: torch.Tensor) -> None:
    held = StaticInput(source)
    address = held.tensor.data_ptr()
    source.fill_(7)
    held.update()
    assert held.tensor.tolist() == [7] * 4
    assert (held.tensor.dtype, held.tensor.is_contiguous(), held.tensor.data_ptr()) == (torch.int64, True, address)


def test_fields_of_the_write_plan_are_in_a_record_of_their_own() -> None:
    names = record_names(["real_page_table", "write_plan_req"])
    assert names == {"write_plan_req": "kpool_write_plan.req"}


def test_each_draft_step_is_read_from_its_own_record() -> None:
    geometry = SYSTEMS["mtp"].geometry("glm53_flash", {"context": 300, "request_rows": 4, "draft_steps": 3})
    layout = mtp(geometry, 2)
    steps = [SimpleNamespace(kpool_write_plan=SimpleNamespace()) for _ in range(2)]
    for field in layout:
        step, name = field.name.split("_", 1)
        place = steps[int(step.removeprefix("step"))]
        if name.startswith("write_plan_"):
            place, name = place.kpool_write_plan, name.removeprefix("write_plan_")
        setattr(place, name, torch.empty(0))
    subject = MtpBackend()
    subject._layout, subject._records = layout, steps
    found = subject.outputs()
    assert list(found) == [field.name for field in layout]
    assert found["step1_real_page_table"] is steps[1].real_page_table
    assert found["step0_write_plan_req"] is steps[0].kpool_write_plan.req
    steps[1].real_page_table = None
    with pytest.raises(UsageError, match=r"1 field.*step1_real_page_table .*step1.real_page_table is missing"):
        subject.outputs()


def test_a_batch_size_is_captured_once_and_none_is_wider_than_the_first() -> None:
    engine = object.__new__(Engine)
    engine._most, engine._captured = 4, {4}
    assert [engine.takes(bucket) for bucket in (2, 4, 5)] == [True, False, False]


class Leaf:
    """A backend of one record a batch size, as SGLang keeps them."""

    def __init__(self) -> None:
        self.decode_cuda_graph_metadata = {2: object(), 4: object()}
        self.forward_metadata = self.decode_cuda_graph_metadata[4]


def test_a_record_that_no_graph_captured_is_refused() -> None:
    leaf = Leaf()
    assert captured_record(leaf, 4) is leaf.forward_metadata
    with pytest.raises(UsageError, match="not the record that was captured for batch 2"):
        captured_record(leaf, 2)


# Stand-ins -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(stubs, "PACKAGES", (ABSENT, "json"))
    monkeypatch.setattr(stubs, "_used", set())
    with stubs.absent_packages(cpu=False):
        yield importlib.import_module(f"{ABSENT}.deep.down")


def test_what_is_imported_of_an_absent_package_serves_at_import(absent: ModuleType) -> None:
    class Sub(absent.Base.Inner, kind="a keyword of a metaclass"):  # type: ignore[name-defined,misc]
        field: absent.Type | None = absent.Field(default=3)

    def decorated() -> int:
        return 3

    assert absent.decorator(decorated)() == absent.library(flag=True)(decorated)() == 3
    assert issubclass(Sub, absent.Base.Inner.mro()[1])
    assert absent.List[int] is absent.List
    assert list(absent.Choices) == []
    assert absent._is_hip is False
    assert stubs.used() == (ABSENT,)


def test_a_package_that_is_there_is_never_replaced(absent: ModuleType) -> None:
    import json

    assert json.loads("3") == 3
    assert importlib.import_module("json.tool").__file__ is not None


def test_afterwards_an_absent_package_is_absent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stubs, "PACKAGES", (ABSENT,))
    monkeypatch.setattr(stubs, "_used", set())
    with stubs.absent_packages(cpu=False):
        assert importlib.import_module(f"{ABSENT}.module").__name__ in sys.modules
    assert not [name for name in sys.modules if name.startswith(ABSENT)]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(ABSENT)
    assert stubs.used() == (ABSENT,)


def test_replaced_attributes_come_back_whatever_happens() -> None:
    owner = SimpleNamespace(a=1)
    with stubs.replaced([(owner, "a", 2), (owner, "a", 3)]):
        assert owner.a == 3
    assert owner.a == 1
    with pytest.raises(ZeroDivisionError), stubs.replaced([(owner, "a", 0)]):
        owner.a = 1 // owner.a
    assert owner.a == 1


def record(batch: int, columns: int, fill: int, rows: int | None = None) -> list[torch.Tensor]:
    """Sources or destinations of a copy, in the order of its arguments."""
    size = rows or batch
    shapes = [(batch,), (batch + 1,), (size, columns), (size,), (size,), (size + 1,), (size, columns)]
    return [torch.full(shape, fill) for shape in shapes]


def test_the_copy_that_stands_in_carries_what_contract_2_2_says() -> None:
    source, target = record(2, 3, 5), record(4, 6, 0)
    stubs._copy(*source, None, None, *target, None, None, 0, 2, 3, 3, 2)
    cache, cu, pages, dsa, expanded, dsa_cu, real = target
    assert cache.tolist() == dsa.tolist() == [5, 5, 0, 0]
    assert cu.tolist() == dsa_cu.tolist() == [0, 5, 5, 0, 0]  # element 0 is never copied
    assert expanded.tolist() == [0] * 4  # and in decode neither are expanded lengths
    for table in (pages, real):
        assert table.tolist() == [[5, 5, 5, 0, 0, 0]] * 2 + [[0] * 6] * 2


def test_the_copy_of_a_verify_record_carries_expanded_rows() -> None:
    source, target = record(1, 3, 5, rows=2), record(1, 3, 0, rows=2)
    stubs._copy(*source, None, None, *target, None, None, 1, 1, -1, 3, 2)
    assert target[4].tolist() == [5, 5]
    assert target[2].tolist() == [[5] * 3] * 2


def test_the_copy_to_three_is_three_copies() -> None:
    def eight(tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
        return [*tensors[:4], *tensors[5:], None, None]

    targets = [record(2, 3, 0) for _ in range(3)]
    stubs._copy_to_three(*eight(record(2, 3, 5)), *(each for target in targets for each in eight(target)), 2, 3, 2)
    for target in targets:
        assert [tensor.flatten().tolist()[-1] for tensor in target] == [5, 5, 5, 5, 0, 5, 5]


# Guards --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """(guarded builder, what the builder below it was given)."""
    given: list[torch.Tensor] = []

    def build(lengths: torch.Tensor, block_kv: int, multiprocessors: int) -> torch.Tensor:
        given.append(lengths)
        return torch.full((multiprocessors + 1, 2), 7, dtype=torch.int32)

    monkeypatch.setattr(wheel, "attribute", lambda *_: lambda: build)
    return sglang_backend._guarded_builder.__wrapped__(), given


def test_deep_gemm_is_never_asked_about_nothing_but_empty_rows(guarded: tuple) -> None:  # type: ignore[type-arg]
    build, given = guarded
    schedule = build(torch.zeros((64, 1), dtype=torch.int32), 64, 3)
    assert schedule.tolist() == [[64, 0]] * 4  # contract 3.6
    assert (given[0].min().item(), given[0].dtype) == (1, torch.int32)


@pytest.mark.parametrize("rows", [31, 32])
def test_other_rows_go_to_deep_gemm_as_they_are(guarded: tuple, rows: int) -> None:  # type: ignore[type-arg]
    build, given = guarded
    lengths = torch.zeros((rows, 1), dtype=torch.int32)
    lengths[rows // 2] = 9
    assert build(lengths, 64, 3).tolist() == [[7, 7]] * 4
    assert torch.equal(given[0], lengths)


def test_a_copy_that_fails_is_not_passed_over_in_silence() -> None:
    """The backend catches whatever its copy raises, prints, and copies otherwise."""
    engine = object.__new__(StepsEngine)
    engine._failures = []

    def refused(*_: object) -> None:
        raise RuntimeError("too many blocks")

    noting = engine._noting_failures(refused)

    def hook(batch: object) -> None:
        with pytest.raises(RuntimeError, match="too many blocks"):
            noting(1, 2)

    engine._changes, engine._platform = [], {}
    engine.backend = SimpleNamespace(init_forward_metadata_out_graph=hook)
    engine._around = lambda: stubs.replaced([])  # type: ignore[method-assign]
    with pytest.raises(
        UsageError, match="raised RuntimeError: too many blocks; the backend then copies field by field"
    ):
        engine.refresh(None, in_capture=False)


# With SGLang ---------------------------------------------------------------------------------------------------------


def verify(
    system: str, rounds: list[Round], preset: str = "tiny", subject: object = None, **overrides: object
) -> list[Finding]:
    """What is found; the smallest geometry that the system takes."""
    geometry = SYSTEMS[system].geometry(
        preset, {**SMALL, "indexer": True, **overrides} if preset == "tiny" else overrides
    )
    buckets = tuple(sorted({round_.bucket for round_ in rounds}, reverse=True))
    setup = ReplaySetup.make(SYSTEMS[system], geometry, buckets, 0, subject or SUBJECTS[system], None, backend())  # type: ignore[arg-type]
    counts = Counts()
    findings = verify_rounds(setup, [setup.table(rounds)], counts, folder=None)
    assert findings or counts.rounds_checked == len(rounds)
    return findings


TINY = {"schedule": "tiny", "plan_rules": "tiny", "multiprocessors": 5}
POOLED = {"context": 300, "request_rows": 9, "topk": 512, "multiprocessors": 5, "plan_rules": "tiny"}
# Two batch sizes by turns, growing and shrinking, with pad rows and one row of another request's pages.
ROUNDS = [
    Round(bucket=4, seq_lens=(9, 33, 17), requests=(3, 4, 5)),
    Round(bucket=2, seq_lens=(31, 5), requests=(7, 8), poison="plausible"),
    Round(bucket=4, seq_lens=(20, 1, 12, 3), requests=(7, 8, 7, 3), remap=(8,), poison="stale"),
]
V4 = {"context": 603, "request_rows": 9, "draft_tokens": 3}
V4_ROUNDS = [
    Round(bucket=4, seq_lens=(9, 333, 603), requests=(3, 4, 5)),
    Round(bucket=2, seq_lens=(512, 5), requests=(7, 8), poison="plausible"),
    Round(bucket=4, seq_lens=(600, 1, 257, 128), requests=(7, 8, 7, 3), remap=(8,), poison="stale"),
    Round(bucket=4, seq_lens=(), requests=()),
]
LONG = [
    Round(bucket=3, seq_lens=(259, 64), requests=(3, 4)),
    Round(bucket=3, seq_lens=(65, 7, 258), requests=(4, 3, 5), poison="plausible"),
]


@needs_sglang
@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu has it on a device")
class TestTheBackendItself:
    """On a CPU, its Triton kernels interpreted and its CUDA kernels stood in for."""

    @pytest.mark.parametrize("system", ["decode", "target_verify", "draft_extend"])
    @pytest.mark.parametrize("forms", [{}, {"index_dtype": "int32", "input_view": "strided"}], ids=["plain", "strided"])
    def test_agrees_with_the_oracle(self, system: str, forms: dict[str, object]) -> None:
        drafts = {} if system == "decode" else {"draft_tokens": 3}
        assert verify(system, ROUNDS, **TINY, **drafts, **forms) == []

    @pytest.mark.parametrize("system", ["decode", "target_verify", "draft_extend", "mtp"])
    def test_agrees_where_lengths_are_pooled(self, system: str) -> None:
        drafts = {"draft_tokens": 3} if SYSTEMS[system].drafts else {}
        rounds = LONG
        if system == "draft_extend":
            rounds = [
                Round(
                    bucket=r.bucket,
                    seq_lens=r.seq_lens,
                    requests=r.requests,
                    lens={"accept_lens": (1, 3, 2)[: r.raw_batch]},
                )
                for r in LONG
            ]
        assert verify(system, rounds, "glm53_flash", **POOLED, **drafts) == []

    def test_agrees_with_one_context_column_a_draft_token(self) -> None:
        assert verify("target_verify", ROUNDS[:2], **TINY, architecture=100, draft_tokens=2) == []

    def test_agrees_without_the_wide_table(self) -> None:
        assert verify("decode", ROUNDS, **TINY, wide_table=False) == []

    def test_draft_steps_have_the_published_gap_and_no_other(self) -> None:
        """Contract 2.3: with three steps or more, the schedule and the plan of the first three."""
        stale = {f"step{i}_{name}" for i in range(3) for name in ("paged_mqa_schedule_metadata", "topk_v2_plan")}
        findings = verify("mtp", ROUNDS, **TINY, draft_steps=5)
        assert {finding.field for finding in findings} == stale
        assert all("never written" in finding.sentence for finding in findings)
        assert verify("mtp", ROUNDS, **TINY, draft_steps=3) == []

    @pytest.mark.parametrize("low_ratios", [False, True], ids=["", "low"])
    @pytest.mark.parametrize("mode", ["decode", "verify", "draft_block"])
    def test_the_v4_backend_agrees(self, mode: str, low_ratios: bool) -> None:
        sizes = {**V4, "padded_mode": mode, "low_ratios": low_ratios}
        assert verify("padded", V4_ROUNDS, "deepseek_v4", PaddedBackend, **sizes) == []

    def test_the_v4_backend_agrees_where_inputs_are_copied(self) -> None:
        sizes = {**V4, "padded_mode": "verify", "index_dtype": "int32", "input_view": "strided"}
        assert verify("padded", V4_ROUNDS[:2], "deepseek_v4", PaddedBackend, **sizes) == []

    def test_pad_rows_of_draft_extend_have_lengths_below_zero(self) -> None:
        """As published: a pad row is shorter than the draft, and nothing stops its lengths at 0 (contract 7.1)."""
        sizes = {**V4, "padded_mode": "draft_extend"}
        findings = verify("padded", V4_ROUNDS, "deepseek_v4", PaddedBackend, **sizes)
        assert [finding.field for finding in findings] == ["swa_topk_lengths"]
        assert findings[0].got is not None
        assert findings[0].got < 0
        full = [round_ for round_ in V4_ROUNDS if round_.raw_batch == round_.bucket and min(round_.seq_lens) >= 3]
        assert verify("padded", full, "deepseek_v4", PaddedBackend, **sizes) == []

    def test_one_backend_serves_all_batch_sizes_of_a_run(self) -> None:
        made: list[object] = []

        class Counting(DecodeBackend):
            def _new_engine(self, geometry: Geometry, inputs: Inputs) -> Engine:
                made.append(inputs)
                return super()._new_engine(geometry, inputs)

        assert verify("decode", ROUNDS, subject=Counting, **TINY) == []
        assert len(made) == 1

    def test_a_backend_that_forgets_its_plan_is_found(self) -> None:
        class Forgetful(DecodeBackend):
            def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
                super().allocate(geometry, inputs, buffers)
                self._engine.backend._refresh_topk_v2_plan = lambda metadata: None

        found = {finding.field for finding in verify("decode", ROUNDS, subject=Forgetful, **TINY)}
        assert found == {"topk_v2_plan"}

    def test_a_result_says_what_stood_in(self) -> None:
        found = MtpBackend.provenance()
        assert found["stand-ins"].startswith("the model runner and its pools, ")
        assert stubs.CPU_ANSWERS in found["stand-ins"]
        assert len(found["sglang.srt.layers.attention.dsa_backend"]) == SHOWN_DIGITS

    def test_nothing_is_left_changed(self) -> None:
        verify("decode", ROUNDS[:1], **TINY)
        module = sys.modules[stubs.BACKEND]
        assert module.is_cuda() is torch.cuda.is_available()  # type: ignore[attr-defined]
        assert not any(isinstance(finder, stubs._Finder) for finder in sys.meta_path)
