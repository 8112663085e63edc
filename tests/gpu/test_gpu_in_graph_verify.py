"""On a GPU: in-graph verify at the size of a real model, in live CUDA graphs of two batch sizes, through recaptures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dsa_verify.base.errors import CaptureError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import POISONS, Round
from dsa_verify.contract.subject import SubjectFactory
from dsa_verify.graphs import open_backend
from dsa_verify.judge.judge import Phase
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.pipelines.in_graph_verify import (
    InGraphResidualSubject,
    InGraphSubject,
    InGraphVerify,
    StaticBufferError,
)
from dsa_verify.systems.catalogue import SYSTEMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
VERIFY = SYSTEMS["target_verify"]
SUBJECTS: tuple[SubjectFactory, ...] = (InGraphSubject, InGraphResidualSubject)
BUCKETS = (48, 4)
INPUTS = ("seq_lens", "req_pool_indices")
EDGES = (1, 3, 4, 63, 64, 255, 256, 257, 2047, 2048, 2049, 4096, 100_001)


def setup_of(subject: SubjectFactory, geometry: Geometry, buckets: tuple[int, ...]) -> ReplaySetup:
    backend = open_backend(torch.device("cuda", torch.cuda.current_device()), "cuda")
    return ReplaySetup.make(VERIFY, geometry, buckets, 0, subject, None, backend)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("overrides", [{}, {"pool_size": 1}, {"architecture": 100}], ids=str)
def test_the_matrix_of_a_model(subject: SubjectFactory, overrides: dict[str, object]) -> None:
    geometry = Geometry.resolve("glm53_flash", overrides)
    for config in diagnostic_matrix(VERIFY, geometry, rounds=17, batches=[1, 4, 48], drafts=[2, 6]):
        setup, counts = setup_of(subject, config.geometry, config.buckets), Counts()
        findings = verify_rounds(setup, config.chunks(), counts, folder=None)
        assert [finding.sentence for finding in findings] == []
        assert counts.rounds_checked == 17
        assert counts.compilations_after_warmup == 0


class Idle:
    """Holds the place of a subject while the test plays the engine."""

    name = "idle"

    def allocate(self, *_: object) -> None:
        pass

    def before_replay(self) -> None:
        pass

    def in_graph(self) -> None:
        pass


def interleaved_rounds(rows: int, count: int) -> list[Round]:
    rng = np.random.default_rng(0)
    return [
        Round(
            bucket=(bucket := BUCKETS[i % 2]),
            seq_lens=tuple(int(length) for length in rng.choice(EDGES, bucket - i % 3)),
            requests=tuple((rng.permutation(rows - 1)[: bucket - i % 3] + 1).tolist()),
            remap=(1 + i % (rows - 1),),
            poison=POISONS[i % len(POISONS)],
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("form", ["plain", "offset", "strided"])
def test_live_graphs_survive_the_recapture_of_each_other(residual: bool, form: str) -> None:
    """One batch size is captured again over other inputs, then fails to be captured; the other never notices."""
    geometry = Geometry.resolve("glm53_flash", {"draft_tokens": 3, "input_view": form})
    setup = setup_of(Idle, geometry, BUCKETS)
    rounds = interleaved_rounds(geometry.request_rows, 16)
    replayer = setup.open(len(rounds))
    wide, buckets = BUCKETS[0], replayer.buckets
    verify = InGraphVerify(buckets[wide].inputs.req_to_token, residual=residual)
    static = {name: getattr(buckets[wide].inputs, name) for name in INPUTS}
    handed = {bucket: static for bucket in BUCKETS}
    pool = setup.backend.new_pool()

    def nothing() -> None:
        pass

    def capture(bucket: int, model: Callable[[], None] = nothing) -> None:
        graphs[bucket] = verify.capture(bucket, **handed[bucket], model=model, backend=setup.backend, pool=pool)

    def play() -> int:
        replayer.input_buffers.upload(setup.table(rounds))
        before = sum(tally.count() for tally in replayer.poll().values())
        for round_ in rounds:
            bucket = round_.bucket
            buckets[bucket].prepare()
            if handed[bucket] is not static:
                for name, tensor in handed[bucket].items():
                    tensor.copy_(static[name])
            buckets[bucket].oracle_graph.replay()
            verify.before_replay(bucket, **handed[bucket])
            graphs[bucket].replay()
            buckets[bucket].judge_replay(Phase.REPLAY)
        return sum(tally.count() for tally in replayer.poll().values()) - before

    graphs = {}
    for bucket in BUCKETS:
        verify.register(buckets[bucket].buffers)
        capture(bucket)
    assert play() == 0
    handed[wide] = {name: tensor.clone() for name, tensor in static.items()}
    with pytest.raises(StaticBufferError, match=r"seq_lens: address .*req_pool_indices: address "):
        verify.before_replay(wide, **handed[wide])
    capture(wide)
    assert play() == 0
    with pytest.raises(StaticBufferError, match=r"seq_lens: address .*req_pool_indices: address "):
        verify.before_replay(wide, **static)

    def synchronise() -> None:
        buckets[wide].buffers["cache_seqlens_int32"].sum().item()

    with pytest.raises(CaptureError):
        capture(wide, synchronise)
    assert verify.metadata[wide].state is None
    graphs[wide] = setup.backend.capture(nothing)  # the generic path alone
    assert play() == 0
    handed[wide] = static
    assert play() == 0
