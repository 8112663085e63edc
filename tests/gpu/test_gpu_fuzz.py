"""On a GPU: what `fuzz` draws at the sizes of real models compiles and is equal, more than 4,096 rows included."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from dsa_verify.base.errors import STATUS_EQUAL
from dsa_verify.cli import fuzz as command
from dsa_verify.graphs import open_backend
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.matrix import Config
from dsa_verify.systems.catalogue import SYSTEMS, resolve_geometry
from fuzz.configurations import HUGE, configurations, describe
from fuzz.fuzzer import fuzz

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ROUNDS = 24


def drawn(system: str, seed: int) -> list[Config]:
    geometry, fixed = resolve_geometry(SYSTEMS[system], None, "cuda")
    return configurations(SYSTEMS[system], geometry, seed=seed, rounds=1000, device_type="cuda", fixed=fixed)


def expect_equal(config: Config) -> None:
    backend = open_backend(torch.device("cuda", torch.cuda.current_device()), "cuda")
    setup = ReplaySetup.make(config.system, config.geometry, config.buckets, config.seed, None, None, backend)
    result = fuzz(setup, ROUNDS, config.seed, folder=None)
    assert [finding.sentence for finding in result.findings] == [], describe(config.geometry, config.buckets)
    assert result.executed == ROUNDS
    assert result.counts.elements_compared > 0


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_every_configuration_of_a_few_seeds_is_equal(system: str) -> None:
    for seed in range(3):
        for config in drawn(system, seed):
            if config.note != "huge":
                expect_equal(config)


@pytest.mark.parametrize("system", ["decode", "target_verify", "draft_extend", "mtp", "ragged_verify"])
def test_more_rows_than_4096_with_an_indexer_are_equal(system: str) -> None:
    most = 0
    for seed in range(len(HUGE["cuda"])):
        config = drawn(system, seed)[-1]
        assert config.geometry.indexer
        most = max(most, *(SYSTEMS[system].layout(config.geometry, bucket).tokens for bucket in config.buckets))
        expect_equal(config)
    assert most > 4096


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_the_command_with_nothing_but_a_system_is_equal(system: str, tmp_path: Path) -> None:
    """With batches of 48 and more, whose requests ask for more moves than a round has room for."""
    options = command.Options(
        systems=(system,),
        preset=None,
        subject=None,
        fault=None,
        rounds=2000,
        seed=0,
        batches=(),
        drafts=(),
        settings=(),
        resident=False,
        keep_going=False,
        shrink_s=0.0,
        json_path=None,
        folder=tmp_path,
    )
    device = torch.device("cuda", torch.cuda.current_device())
    for changed in (options, dataclasses.replace(options, batches=(48,), rounds=500)):
        assert command.run(changed, device) == STATUS_EQUAL
