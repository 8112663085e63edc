"""What the toolkit can see: every planted fault is caught, called by its name, and a right pipeline is not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated

from dsa_verify.base.errors import DeviceLost, UsageError
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Lifetime
from dsa_verify.contract.subject import Buffers, Inputs, SubjectFactory
from dsa_verify.graphs import open_backend
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import Config, diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects import faults
from dsa_verify.subjects.faults.conduct import WrongOnce
from dsa_verify.systems.catalogue import SYSTEMS

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
ROUNDS = 6  # of the script: both buckets, every poison, one round replayed twice, pad rows, in padded an idle one
BATCH, DRAFT = 4, 4
ON_A_GPU = torch.cuda.is_available()

# Faults whose finding is about the subject as a whole, not about one output.
WITHOUT_FIELD = {"raises_in_capture", "synchronises_in_capture", "allocates_in_replay", "glues_idle"}
# Faults in the inputs: what they spoil depends on the pipeline.
SPOILS_INPUTS = {
    "stale_request_map": {"page_table_1", "real_page_table"},
    "frozen_at_capture": {"cache_seqlens_int32"},
    "input_overwritten": {"seq_lens"},
}
# What a fault needs of the geometry to have an effect.
NEEDS: dict[str, dict[str, object]] = {
    "unclamped_window": {"padded_mode": "draft_extend"},
    "wrong_owner": {"dcp_size": 2},
    "advances_twice": {"warm_ups": "together"},
}
# Where Triton is interpreted, the shipped cases (test_corpus.py) stand for the scripted rounds, but for one fault of
# each road that a finding can take.
BY_DEFAULT = {"skip_refresh", "past_the_end", "flaky", "raises_in_capture", "allocates_in_replay", "output_replaced"}


def is_slow(system: str, name: str) -> bool:
    return not ON_A_GPU and (system != "target_verify" or name not in BY_DEFAULT)


CASES = [
    pytest.param(system, name, marks=[pytest.mark.slow] * is_slow(system, name))
    for system in SYSTEMS
    for name in faults.names(system)
    if name != "lost_device"
]


@pytest.fixture(autouse=True)
def strikes_again() -> Iterator[None]:
    """The flaky fault strikes once a process."""
    WrongOnce.struck = False
    yield
    WrongOnce.struck = False


def config_of(system: str, fault: str | None = None) -> Config:
    preset = "tiny_pool" if fault == "stale_draft_steps" else SYSTEMS[system].preset("cpu")
    needed = NEEDS.get(fault or "", {})
    return diagnostic_matrix(
        SYSTEMS[system],
        SYSTEMS[system].geometry(preset, needed),
        batches=[BATCH],
        drafts=[DRAFT],
        rounds=ROUNDS,
        fixed=frozenset(needed),
    )[0]


def verify(system: str, fault: str | None, subject: str | SubjectFactory | None = None) -> tuple[list[Finding], Counts]:
    config, counts = config_of(system, fault), Counts()
    subject = "glue" if fault == "glues_idle" else subject
    setup = ReplaySetup.make(SYSTEMS[system], config.geometry, config.buckets, 0, subject, fault, open_backend(DEVICE))
    return verify_rounds(setup, setup.with_foreign_work(config.chunks()), counts, folder=None), counts


def check(findings: list[Finding], name: str, system: str) -> None:
    fault = faults.FAULTS[name]
    assert findings
    assert findings[0].diagnosis in fault.diagnoses
    for finding in findings:
        assert finding.sentence.startswith(finding.diagnosis.value)
        assert finding.sentence.count(": ") >= 1
        assert finding.sentence.rpartition(": ")[2].strip()
        assert finding.system == system
        assert finding.contract or finding.field is None or finding.diagnosis is Diagnosis.FLAKY
        assert finding.bucket in config_of(system).buckets or finding.diagnosis is Diagnosis.FLAKY
    fields = {finding.field for finding in findings}
    if name in WITHOUT_FIELD:
        assert fields == {None}
    elif name in SPOILS_INPUTS:
        assert SPOILS_INPUTS[name] <= fields
    elif name not in ("past_the_end", "before_the_start"):  # a guard is named for what lies before it
        assert fault.field in fields
    if fault.field and name != "flaky":
        assert any(fault.field in finding.sentence for finding in findings)


@pytest.mark.parametrize("system, name", CASES)
def test_a_fault_is_caught_and_called_by_its_name(system: str, name: str):
    check(verify(system, name)[0], name, system)


@pytest.mark.parametrize(
    "system, name, sections",
    [
        ("decode", "skip_refresh:cu_seqlens_k", ["1.1"]),
        ("decode", "past_the_end", ["11.3"]),
        ("decode", "output_replaced", ["11.3"]),
        ("decode", "other_bucket", ["11.3"]),
        ("decode", "input_overwritten", ["0.1"]),
        ("decode", "tail_not_reset:seq_lens", ["0.2", "7.5"]),
        ("padded", "glues_idle", ["7.4"]),
    ],
)
def test_a_finding_leads_to_the_rule_that_is_broken(system: str, name: str, sections: list[str]):
    first = verify(system, name)[0][0]
    assert [link.partition("#")[2] for link in first.contract] == sections


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_right_pipeline_shows_none_of_it_over_the_same_rounds(system: str):
    findings, counts = verify(system, None)
    assert findings == []
    assert counts.rounds_checked == ROUNDS
    assert counts.mismatches == counts.guard_hits == counts.address_changes == counts.compilations_after_warmup == 0


@pytest.mark.skipif(ON_A_GPU, reason="on a GPU the fault is real and ends the process; see tests/gpu")
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_lost_device_ends_the_run(system: str):
    with pytest.raises(DeviceLost, match="illegal memory access"):
        verify(system, "lost_device")


def test_the_flaky_fault_strikes_once_in_a_process():
    assert verify("decode", "flaky", EagerDecode)[0][0].diagnosis is Diagnosis.FLAKY
    assert verify("decode", "flaky", EagerDecode)[0] == []


# Which faults exist --------------------------------------------------------------------------------------------------


def test_every_fault_says_what_it_is_and_what_it_must_be_called():
    for name, fault in faults.FAULTS.items():
        assert fault.name == name
        assert fault.summary
        assert set(fault.systems) <= set(SYSTEMS)
        assert bool(fault.diagnoses) == (name != "lost_device")


def test_names_of_a_system_are_those_that_apply():
    assert set(faults.names()) == set(faults.FAULTS)
    assert "unclamped_length" in faults.names("draft_extend")
    assert "unclamped_length" not in faults.names("decode")
    assert "wrong_draft_offset" not in faults.names("decode")


@pytest.mark.parametrize(
    "reference, system, text",
    [
        ("wrong_draft_offset", "decode", "has no effect in decode; it applies to target_verify, draft_extend"),
        ("unclamped_length", "target_verify", "has no effect in target_verify; it applies to draft_extend"),
        ("no_such_fault", "decode", "fault 'no_such_fault' is unknown; known faults: skip_refresh"),
        ("frozen_at_capture:seq_lens", "decode", "has no field to choose; leave out ':seq_lens'"),
    ],
)
def test_a_fault_that_cannot_be_planted_is_refused(reference: str, system: str, text: str):
    with pytest.raises(UsageError) as caught:
        verify(system, reference)
    assert text in str(caught.value)


def test_a_field_that_does_not_exist_is_refused_with_those_that_do():
    layout = SYSTEMS["decode"].layout(Geometry.resolve("tiny"), 2)
    with pytest.raises(UsageError, match=r"'page_table_9' is not in decode as captured; its fields: cache_seqlens"):
        faults.check_field("skip_refresh:page_table_9", [layout])


def test_a_wrong_field_of_a_fault_is_not_blamed_on_the_subject():
    with pytest.raises(UsageError, match="page_table_9"):
        verify("decode", "skip_refresh:page_table_9", EagerDecode)
    with pytest.raises(UsageError, match="written at capture only"):
        verify("decode", "skip_refresh:cu_seqlens_q", EagerDecode)


def pieces(system: str) -> tuple[Geometry, Inputs, Buffers]:
    geometry = Geometry.resolve("tiny")
    numbers = torch.ones(2, dtype=torch.int64, device=DEVICE)
    inputs = Inputs(seq_lens=numbers, req_pool_indices=numbers, req_to_token=numbers.view(1, 2).int())
    return geometry, inputs, Buffers(SYSTEMS[system].layout(geometry, 2), {})


# Any subject ---------------------------------------------------------------------------------------------------------


class EagerDecode:
    """A pipeline of its own, half of it before the replay: lengths in the graph, tables outside."""

    name = "eager"

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        self.geometry, self.inputs, self.out = geometry, inputs, buffers
        self.wide = torch.zeros_like(buffers["page_table_1"])
        for name in ("cu_seqlens_q", "dsa_cu_seqlens_q"):
            buffers[name].copy_(torch.arange(buffers[name].numel()))

    def before_replay(self) -> None:
        rows = self.inputs.req_to_token[self.inputs.req_pool_indices.long()]
        self.wide.copy_(rows[:, : self.geometry.columns])

    def in_graph(self) -> None:
        out, page = self.out, self.geometry.page_size
        lengths = self.inputs.seq_lens.int()
        out["cache_seqlens_int32"].copy_(lengths)
        out["dsa_cache_seqlens_int32"].copy_(lengths.clamp(max=self.geometry.topk))
        for name, source in (("cu_seqlens_k", lengths), ("dsa_cu_seqlens_k", out["dsa_cache_seqlens_int32"])):
            out[name].copy_(torch.nn.functional.pad(source.cumsum(0), (1, 0)))
        out["page_table_1"].copy_(self.wide)
        out["real_page_table"].copy_(self.wide[:, ::page] // page)


class OwningDecode(EagerDecode):
    """The same with outputs of its own instead of the guarded ones."""

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        own: dict[str, torch.Tensor] = {}
        for field in sorted(buffers.layout, key=lambda field: field.alias is not None):
            source = own[field.alias].view(field.shape) if field.alias else torch.zeros_like(buffers[field.name])
            own[field.name] = source
        super().allocate(geometry, inputs, Buffers(buffers.layout, own))

    def outputs(self) -> Buffers:
        return self.out


# A guard is what sees these, and buffers of one's own have none.
NEEDS_GUARDS = {"past_the_end", "before_the_start", "wider_bucket_rows"}


@pytest.mark.parametrize("subject", [EagerDecode, OwningDecode])
def test_other_subjects_are_right_without_a_fault(subject: Callable[[], EagerDecode]):
    findings, counts = verify("decode", None, subject)
    assert findings == []
    assert counts.rounds_checked == ROUNDS


IN_DECODE = [name for name in faults.names("decode") if name != "lost_device"]
COMPOSED = [(EagerDecode, name) for name in IN_DECODE]
COMPOSED += [(OwningDecode, name) for name in IN_DECODE if name not in NEEDS_GUARDS]


@pytest.mark.parametrize("subject, name", COMPOSED)
def test_faults_compose_with_any_subject(subject: type[EagerDecode], name: str):
    check(verify("decode", name, subject)[0], name, "decode")


WRITTEN = [
    field.name
    for field in SYSTEMS["decode"].layout(Geometry.resolve("tiny"), BATCH)
    if field.lifetime is Lifetime.REPLAY
]


@pytest.mark.parametrize("field", WRITTEN)
@pytest.mark.parametrize("name", ["skip_refresh", "off_by_one_page", "output_replaced"])
def test_a_fault_is_caught_in_whatever_field_it_is_planted(name: str, field: str):
    findings, _ = verify("decode", f"{name}:{field}", EagerDecode)
    layout = SYSTEMS["decode"].layout(Geometry.resolve("tiny"), BATCH)
    assert {finding.field for finding in findings} & {field, layout[field].alias}
    if name != "off_by_one_page":
        assert findings[0].diagnosis in faults.FAULTS[name].diagnoses
