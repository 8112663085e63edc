"""The engine itself on small texts, then on two mutants; slow and on a GPU: the fixed samples."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.systems.catalogue import SYSTEMS, get_system, resolve_geometry
from tests.mutants import pool, survivors, trial
from tests.mutants.__main__ import main
from tests.mutants.catalogue import PARTS, Mutant, catalogue, mutants_of, sample
from tests.mutants.operators import OPERATORS, apply, edits
from tests.mutants.reach import ROOT, Door, doors
from tests.mutants.survivors import Survivor

# Each is shown to one system alone, of the fast ones.
KILLED = "oracles/decode.py::DecodeOracle.in_graph::store.1"
SURVIVOR = "dsa_verify/subjects/pipelines/mtp.py::Mtp.in_graph::boundary.0"

# By operator: what may stand in a function, and what each mutant of that operator makes of it.
EXAMPLES = {
    "boundary": {"here = row < rows": ["row <= rows"], "x = a >= b": ["a > b"]},
    "arithmetic": {
        "x = a + b": ["(a - b)"],
        "x = a * (b % c)": ["(a + (b % c))", "(b // c)"],
        "x += 1": ["x -= 1"],
        "x = lengths.remainder(size)": ["lengths.floor_divide"],
    },
    "floor": {
        "x = a // b": ["((a + b - 1) // b)"],
        "x = -(-a // b)": ["(a // b)"],
        "x = tl.cdiv(a, b)": ["(a // b)"],
    },
    "clamp": {
        "x = tl.minimum(a, b)": ["(a)", "(b)", "tl.maximum(a, b)", "tl.minimum(a, (b) + 1)"],
        "x = lengths.clamp(min=1)": ["max=1", "lengths"],
        "torch.clamp(a, max=topk, out=b)": ["(topk) + 1", "min=topk"],
    },
    "mask": {
        "x = tl.load(p + i, mask=a & b, other=0)": [
            "tl.load(p + i)",
            "tl.load(p + i, mask=a & b, other=(0) + 1)",
            "a",
            "b",
        ],
        "tl.store(p, x, mask=here)": ["tl.store(p, x)"],
    },
    "narrow": {
        "x = row.to(tl.int64) * width": ["row"],
        "x = tl.zeros((), tl.int64)": ["tl.int32"],
        "x = torch.cumsum(a, 0, dtype=torch.int64)": ["torch.int32"],
    },
    "constant": {"x = rows[:1]": ["2"], "x = -1": ["0"], "x = False": ["True"], "x = tl.sum(a, axis=1)": []},
    "stride": {
        "launch(a.stride(0), b.stride(0))": ["(1)", "b.stride(0)", "(1)", "a.stride(0)"],
        "at = row * row_stride": ["(1)", "pool_stride"],
    },
    "store": {"tl.store(p, x)": ["pass"], "kernel[grid](a, b)": ["pass"], "buffer.zero_()": ["pass"], "x = f()": []},
    "negate": {
        "x = a if b else c": ["(not (b))"],
        "x = tl.where(a, b, c)": ["tl.where(a, c, b)"],
        "x = a == b": ["a != b"],
        "x = a and b": ["(a or b)"],
    },
}


def function(body: str) -> str:
    return f'def kernel(p, row_stride, pool_stride):\n    """It has 1 docstring, which stays."""\n    {body}\n'


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_an_operator_makes(operator: str):
    for body, made in EXAMPLES[operator].items():
        found = [edit for edit in edits(function(body)) if edit.operator == operator]
        assert sorted(edit.change.split(" -> ")[1] for edit in found) == sorted(made), body
        for edit in found:
            ast.parse(apply(function(body), edit))


class Truncated(int):
    """As Triton divides integers: towards zero."""

    def __floordiv__(self, other: int) -> Truncated:
        return Truncated(math.trunc(int(self) / other))

    def __add__(self, other: int) -> Truncated:
        return Truncated(int(self) + other)

    def __sub__(self, other: int) -> Truncated:
        return Truncated(int(self) - other)

    def __neg__(self) -> Truncated:
        return Truncated(-int(self))


def test_a_floor_division_is_rounded_up_in_kernels_too():
    source = "def share(task, shares):\n    return task // shares\n"
    (edit,) = [edit for edit in edits(source) if edit.operator == "floor"]
    space: dict[str, Callable[..., int]] = {}
    exec(apply(source, edit), space)
    assert [space["share"](number(5), number(4)) for number in (int, Truncated)] == [2, 2]


def test_what_is_left_alone():
    source = '''
import torch
from typing import Final

LIMIT: Final[1] = "text"

@decorate(specialize=1)
def function(a: list[1]) -> tuple[1]:
    """1 + 1"""
    assert a > 1, f"{a + 1}"
    raise ValueError(a + 1)
'''
    assert edits(source) == []


def test_a_mutant_keeps_its_name_when_other_definitions_change():
    one = "def first(a):\n    return a + 1\n\n\ndef second(a):\n    return a - 1 < a + 2\n"
    other = "import os\n\n\ndef zeroth(a):\n    return a + 5 < 3\n\n\n" + one.replace("a + 1", "a * 2 + 1")
    before, after = (
        {m.name: m.edit.change for m in mutants_of("oracles/x.py", text) if "::second::" in m.name}
        for text in (one, other)
    )
    assert before == after
    assert before["oracles/x.py::second::arithmetic.1"] == "a + 2 -> (a - 2)"


def test_mutants_of_our_code_are_python_and_keep_their_lines():
    for mutant in [mutant for part in PARTS for mutant in catalogue(part)][::200]:
        source = mutant.source()
        ast.parse(source)
        assert source.count("\n") == (ROOT / mutant.file).read_text(encoding="utf-8").count("\n"), mutant.name


def test_a_mutant_that_python_makes_the_same_of_is_none():
    same, other = mutants_of("oracles/common.py", (ROOT / "oracles/common.py").read_text(encoding="utf-8"))[:2]
    same = dataclasses.replace(same, edit=dataclasses.replace(same.edit, start=0, end=0, text=""))
    assert trial.is_equal(same)
    assert not trial.is_equal(other)


def test_names_are_unique_and_every_operator_is_at_work():
    mutants = [mutant for part in PARTS for mutant in catalogue(part)]
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    assert {mutant.edit.operator for mutant in mutants} == set(OPERATORS)


def test_a_sample_is_drawn_by_name():
    mutants = catalogue("pipelines")
    drawn = sample(mutants, 20, 0)
    assert sample(mutants[::-1], 20, 0) == drawn
    assert sample(mutants, 20, 1) != drawn
    assert sample([each for each in mutants if each is not drawn[3]], 19, 0) == drawn[:3] + drawn[4:]


def test_doors_are_those_that_lead_to_a_definition():
    known = doors("cpu")
    assert known["dsa_verify.subjects.pipelines.mtp:sibling_copy"] == [Door("mtp", "sibling")]
    assert known["dsa_verify.subjects.pipelines.dcp_kernel:merge_kernel"] == [Door("dcp")]
    assert set(known["dsa_verify.subjects.pipelines.topk_plan_kernel:topk_plan_kernel"]) == {
        Door(name) for name in ("decode", "target_verify", "draft_extend")
    }
    assert "dsa_verify.subjects.pipelines.dcp_kernel:pack_prefix_kernel" not in known  # of extend, which is no system
    assert "oracles.schedule:_indexed" not in known
    assert known["dsa_verify.subjects.pipelines.ragged_verify_kernel:_lengths"] == [Door("ragged_verify")]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_door_is_refused(device: str):
    """Every layout exists, and subjects that want an indexer have one in all configurations, others in a few."""
    every = {door for each in doors(device).values() for door in each}
    assert {door.system for door in every} == set(SYSTEMS)
    for door in every:
        system = get_system(door.system)
        geometry, fixed = resolve_geometry(system, door.subject, device, door.preset or None)
        matrix = diagnostic_matrix(system, geometry, fixed=fixed)
        for config in matrix:
            assert system.layout(config.geometry, config.buckets[0]), door
        indexed = [config.geometry.indexer for config in matrix]
        assert all(indexed) is bool(door.preset), door
        assert any(indexed) is (door.system in [name for name, system in SYSTEMS.items() if system.indexer]), door


# The table of survivors ----------------------------------------------------------------------------------------------


def changes() -> dict[str, str]:
    return {mutant.name: mutant.edit.change for part in PARTS for mutant in catalogue(part)}


def test_the_table_is_of_mutants_that_exist():
    assert survivors.stale(survivors.read(changes()), changes()) == []


@pytest.mark.parametrize(
    "entry, complaint",
    [
        ('kind = "luck"\nreason = "it is"', "kind 'luck' is unknown"),
        ('kind = "dead"\nreason = ""', "needs a reason"),
        ('kind = "dead"\nreason = "it is"\non = ["tpu"]', "needs a reason, and `on`"),
    ],
)
def test_an_entry_that_says_too_little_is_refused(entry: str, complaint: str, tmp_path: Path):
    (tmp_path / "table.toml").write_text(f'[[survivor]]\nname = "a"\nchange = "b"\n{entry}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=complaint):
        survivors.read({}, tmp_path / "table.toml")


def test_a_hole_may_be_of_many_mutants(tmp_path: Path):
    entry = '[[survivor]]\nname = "a::*"\nkind = "hole"\nreason = "it is not drawn"\n'
    (tmp_path / "table.toml").write_text(entry, encoding="utf-8")
    now = {"a::1": "x -> y", "a::2": "y -> z", "b::1": "x -> y"}
    table = survivors.read(now, tmp_path / "table.toml")
    assert {name: each.change for name, each in table.items()} == {"a::1": "x -> y", "a::2": "y -> z"}
    assert survivors.stale(table, now) == []
    assert survivors.stale(survivors.read({}, tmp_path / "table.toml"), {})
    (tmp_path / "table.toml").write_text(entry.replace("hole", "dead"), encoding="utf-8")
    with pytest.raises(ValueError, match="a hole of many mutants alone"):
        survivors.read(now, tmp_path / "table.toml")


def test_what_fails_a_run():
    entry = Survivor(name="known", change="a -> b", kind="dead", reason="nobody reads it", on=("cuda",))
    table, now = {"known": entry}, {"known": "a -> b", "new": "c -> d"}
    assert survivors.surprises(table, "cuda", ["known"], ["new"], now) == []
    (new,) = survivors.surprises(table, "cuda", ["known", "new"], [], now)
    assert new.startswith("new: survived, and is not in")
    (gone,) = survivors.surprises(table, "cuda", [], ["known"], now)
    assert gone.startswith("known: is killed now")
    (elsewhere,) = survivors.surprises(table, "cpu", ["known"], [], now)
    assert elsewhere.startswith("known: survived, and is not in")
    assert survivors.stale(table, now) == []
    (moved,) = survivors.stale(table, {"known": "e -> f"})
    assert "is now `e -> f`" in moved
    (missing,) = survivors.stale(table, {})
    assert "there is no such mutant" in missing


# Trials --------------------------------------------------------------------------------------------------------------


def _pretend(mutant: None, doors: tuple[Door, ...], device: str, quick: int | None, send: Connection) -> None:
    """In place of a trial: what the name of its door's system says."""
    if doors[0].system == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if doors[0].system == "hang":
        time.sleep(600)
    send.send(None)
    send.send(trial.Verdict(outcome=trial.NO_MEMORY if doors[0].system == "large" else trial.SURVIVED))
    os._exit(0)


def test_a_trial_that_gives_no_verdict_is_a_kill(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial, "run", _pretend)
    tasks = [pool.Task(mutant=None, doors=(Door(name),)) for name in ("die", "hang", "large", "fine")]
    results = {each.task.doors[0].system: each.verdict for each in pool.run(tasks, "cpu", 2, silence_s=1.0)}
    assert results["fine"].outcome == trial.SURVIVED
    assert (results["die"].outcome, results["die"].by) == (trial.KILLED, "crash")
    assert (results["hang"].outcome, results["hang"].by) == (trial.KILLED, "hang")
    assert list(results)[-1] == "large", "tried again, alone"
    assert results["large"].outcome == trial.KILLED


def _slow_survivor(mutant: Mutant, doors: tuple[Door, ...], device: str, quick: int | None, send: Connection) -> None:
    time.sleep(1.0)
    send.send(trial.Verdict(outcome=trial.SURVIVED))
    os._exit(0)


def test_a_run_that_is_cut_short_has_tried_the_first_of_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial, "run", _slow_survivor)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # which the command sets
    path = tmp_path / "results.json"
    words = ["--part", "pipelines", "--from", "unknown", "--sample", "250", "--seed", "3", "--jobs", "2"]
    ended = CliRunner().invoke(main, [*words, "--no-healthy", "--seconds", "0.5", "--json", str(path)])
    assert "partial: 2 of 250 drawn mutants were tried" in ended.output
    document = json.loads(path.read_text(encoding="utf-8"))
    assert (document["drawn"], document["trials"]) == (250, 2)
    table = survivors.read(changes())
    unknown = [each for each in catalogue("pipelines") if "cpu" not in getattr(table.get(each.name), "on", ())]
    assert {each["name"] for each in document["mutants"]} == {each.name for each in sample(unknown, 2, 3)}


def run(folder: Path, *arguments: str) -> tuple[int, str, dict[str, dict[str, str]]]:
    """(status, what was printed, the results by name) of `python -m tests.mutants`."""
    command = [sys.executable, "-m", "tests.mutants", "--json", str(folder / "results.json"), *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    mutants = json.loads((folder / "results.json").read_text(encoding="utf-8"))["mutants"]
    return ended.returncode, ended.stdout + ended.stderr, {each["name"]: each for each in mutants}


def test_one_is_killed_and_one_survives_as_documented(tmp_path: Path):
    arguments = ("--quick", "1", "--no-healthy", "--jobs", "2", "--only", KILLED, "--only", SURVIVOR)
    status, printed, results = run(tmp_path, *arguments)
    assert status == 0, printed
    assert results[KILLED]["outcome"] == trial.KILLED
    assert results[KILLED]["by"].startswith("replay ")
    assert results[SURVIVOR]["outcome"] == trial.SURVIVED


@pytest.mark.slow
def test_the_fixed_sample_is_killed(tmp_path: Path):
    status, printed, results = run(tmp_path, "--sample", "40", "--from", "unknown", "--jobs", "2")
    assert status == 0, printed
    assert len(results) == 40


@pytest.mark.slow
def test_known_survivors_survive(tmp_path: Path):
    arguments = ("--sample", "10", "--from", "known", "--jobs", "2", "--no-healthy", "--quick", "2")
    status, printed, _ = run(tmp_path, *arguments)
    assert status == 0, printed


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_fixed_sample_on_a_gpu(tmp_path: Path):
    status, printed, results = run(tmp_path, "--device", "cuda", "--sample", "150", "--jobs", "12")
    assert status == 0, printed
    assert len(results) == 150
