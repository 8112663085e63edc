"""Foreign work: what a subject declares runs between its replays, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import DEVICE, EagerDecode, backend, decode_round, setup_of, small

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.rounds.case_file import parse_case, read_case
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.runner import Runner, new_result
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.systems.catalogue import SYSTEMS
from fuzz.fuzzer import fuzz
from fuzz.reduce.sensitivity import explain
from fuzz.reduce.shrink import shrink
from fuzz.reduce.trials import Signature

ROUNDS = [
    decode_round(4, 5, 17, 37, 1),
    decode_round(4, 9, 8, foreign=True),
    decode_round(2, 4, foreign=True),
    decode_round(2, 7, 6, foreign=True),
    decode_round(4, 9, 8, foreign=True),
]


def verify(subject: type, rounds: list[Round] = ROUNDS, folder: Path | None = None, **rest: object) -> list[Finding]:
    setup = setup_of(subject, **rest)  # type: ignore[arg-type]
    return verify_rounds(setup, [setup.table(rounds)], Counts(), folder=folder)


class Works(EagerDecode):
    """Keeps a log of (bucket, what was called) over all buckets."""

    log: list[tuple[int, str]]

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.bucket = len(inputs.seq_lens)

    def before_replay(self) -> None:
        self.log.append((self.bucket, "before_replay"))

    def foreign_work(self) -> None:
        self.log.append((self.bucket, "foreign_work"))


def test_another_bucket_is_prepared_and_then_foreign_work_runs() -> None:
    subject = type("OfThisTest", (Works,), {"log": []})
    assert verify(subject) == []
    rounds = subject.log[2 * 2 :]  # after two warm-ups of two buckets
    assert rounds == [
        (4, "before_replay"),
        *[(2, "before_replay"), (4, "foreign_work"), (4, "before_replay")],
        *[(4, "before_replay"), (2, "foreign_work"), (2, "before_replay")],
        *[(2, "foreign_work"), (2, "before_replay")],  # no bucket is narrower than this one
        *[(2, "before_replay"), (4, "foreign_work"), (4, "before_replay")],
    ]


def test_without_the_method_only_another_bucket_is_prepared() -> None:
    assert verify(EagerDecode) == []


class PreparesItsOwn(EagerDecode):
    """Eager work writes lengths of a bucket that nobody else has; done for other inputs, they are others."""

    def before_replay(self) -> None:
        self.out["dsa_cache_seqlens_int32"].copy_(self.inputs.seq_lens.clamp(max=self.geometry.topk))


def test_what_another_bucket_prepares_of_its_own_is_no_finding() -> None:
    rounds = [decode_round(2, 4, 3), decode_round(4, 9, 8), decode_round(4, 7, 6, foreign=True)]
    assert verify(PreparesItsOwn, rounds) == [], "looked at when the run ends"
    assert verify(PreparesItsOwn, [*rounds, decode_round(2, 1)]) == [], "and when the bucket comes again"


class PreparesOthers(EagerDecode):
    """The eager work of a bucket leaves its last length in a place that all of them take for 0 in the graph."""

    shared: torch.Tensor

    def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
        super().allocate(geometry, inputs, buffers)
        self.bucket = len(inputs.seq_lens)

    def before_replay(self) -> None:
        if self.bucket == 2:
            self.shared.fill_(1)

    def in_graph(self) -> None:
        super().in_graph()
        self.out["cache_seqlens_int32"].add_(self.shared if self.bucket == 4 else 0)


def test_what_another_bucket_prepares_in_shared_memory_is_found_in_the_same_bucket_only_with_it() -> None:
    def found(foreign: bool) -> list[str | None]:
        PreparesOthers.shared = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        setup = setup_of(PreparesOthers)
        replayer = setup.open(2)
        PreparesOthers.shared.zero_()  # what the warm-ups left
        replayer.run(setup.table([decode_round(4, 9, 8), decode_round(4, 7, 6, foreign=foreign)]))
        return [seen.region.name for tally in replayer.poll().values() for seen in tally.first]

    assert set(found(False)) == set()
    assert set(found(True)) == {"cache_seqlens_int32"}


def test_a_failure_of_foreign_work_and_what_it_changes_are_called_that() -> None:
    class Raises(EagerDecode):
        def foreign_work(self) -> None:
            raise ValueError("no prefill today")

    class Changes(EagerDecode):
        def foreign_work(self) -> None:
            torch.set_default_dtype(torch.float64)

    (finding,) = verify(Raises)
    assert "raises in foreign_work: bucket 4: foreign_work raised ValueError: no prefill today" in finding.sentence
    assert finding.round == 1
    (finding,) = verify(Changes)
    assert finding.diagnosis is Diagnosis.CHANGES_TORCH
    assert "bucket 4: foreign_work changed the default dtype" in finding.sentence


# Drawing it, and reading it back -------------------------------------------------------------------------------------


def test_it_is_drawn_only_where_a_subject_or_a_fault_declares_it() -> None:
    (config,) = diagnostic_matrix(SYSTEMS["decode"], small(), batches=[4])

    def drawn(subject: type, fault: str | None = None, turn: int = 0) -> list[bool]:
        setup = setup_of(subject, fault=fault, buckets=config.buckets)
        return [each.foreign for table in setup.with_foreign_work(config.chunks(), turn) for each in table.rounds()]

    assert not any(drawn(EagerDecode))
    assert not any(drawn(EagerDecode, "off_by_one_page"))
    assert 1 <= sum(drawn(Works)) < 17
    assert drawn(Works) == drawn(EagerDecode, "foreign_clobbers") == drawn(Works)
    assert drawn(Works, turn=1) != drawn(Works)
    plain = [each for table in config.chunks() for each in table.rounds()]
    setup = setup_of(Works, buckets=config.buckets)
    chosen = [each for table in setup.with_foreign_work(config.chunks()) for each in table.rounds()]
    assert [each.seq_lens for each in plain] == [each.seq_lens for each in chosen], "no other draw moves"


def test_the_matrix_finds_what_foreign_work_does() -> None:
    configs = diagnostic_matrix(SYSTEMS["decode"], small(), batches=[4])
    run = new_result("decode", "support:EagerDecode", backend())
    Runner(backend=backend(), folder=None).matrix(configs, EagerDecode, run, fault="foreign_clobbers")
    assert [finding.field for finding in run.findings] == ["cache_seqlens_int32"]


def test_a_fuzzer_finds_it_and_the_case_says_it_needs_it(tmp_path: Path) -> None:
    setup = setup_of(EagerDecode, fault="foreign_clobbers")
    (finding,) = fuzz(setup, 32, folder=tmp_path).findings
    case = read_case(Path(finding.case or ""))
    signature = Signature.of(finding)
    small_case = shrink(case, signature, backend(), subject=EagerDecode).scenario
    (round_,) = small_case.rounds
    assert round_.foreign
    assert parse_case(small_case.to_json()).rounds == small_case.rounds
    said = explain(small_case, signature, backend(), subject=EagerDecode).sentence
    assert "foreign work before it" in said


def test_a_case_says_yes_or_no() -> None:
    text = setup_of(EagerDecode).scenario([decode_round(4, 5, foreign=True)]).to_json()
    assert '"foreign": true' in text
    assert parse_case(text).rounds[0].foreign
    with pytest.raises(UsageError, match=r"rounds\[0\].foreign: 1 is not true or false"):
        parse_case(text.replace('"foreign": true', '"foreign": 1'))
