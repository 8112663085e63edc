"""`python -m tests.mutants`: trials of a sample of mutants, to lines, JSON and an exit status (docs/mutants.md)."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from tests.mutants import pool, survivors
from tests.mutants.catalogue import PARTS, Mutant, catalogue, sample
from tests.mutants.operators import OPERATORS
from tests.mutants.trial import KILLED, SURVIVED

STATUS_AS_EXPECTED, STATUS_SURPRISE, STATUS_UNHEALTHY = 0, 1, 3


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--part", type=click.Choice(["all", *PARTS]), default="all", show_default=True, help="What the sample is drawn from."
)
@click.option("--sample", "count", type=click.IntRange(min=1), default=150, show_default=True, help="Mutants to draw.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draw; 0 is the fixed sample.")
@click.option("--only", multiple=True, metavar="PATTERN", help="All mutants of that name instead of a sample; * is any.")
@click.option("--unknown", is_flag=True, help="Leave the known survivors of this device out.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Trials at a time.")
@click.option("--healthy/--no-healthy", default=True, show_default=True, help="First run the code as it is.")
@click.option("--list", "listed", is_flag=True, help="Show the mutants and run nothing.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the results there.")
def main(
    device: str,
    part: str,
    count: int,
    seed: int,
    only: tuple[str, ...],
    unknown: bool,
    jobs: int,
    healthy: bool,
    listed: bool,
    json_path: Path | None,
) -> None:
    """Show small defects of our own pipelines and oracles to `replay` and `fuzz` with default options.

    Status 0: what survives is what survivors.toml says. 1: it is not. 3: the code as it is does not pass.
    """
    everything = [mutant for each in PARTS for mutant in catalogue(each)]
    table = survivors.read()
    changes = {mutant.name: mutant.edit.change for mutant in everything}
    drawn = [mutant for each in (PARTS if part == "all" else (part,)) for mutant in catalogue(each)]
    if unknown:
        drawn = [each for each in drawn if each.name not in table or device not in table[each.name].on]
    if only:
        drawn = [each for each in drawn if any(fnmatch.fnmatchcase(each.name, pattern) for pattern in only)]
        if not drawn:
            raise click.UsageError(f"--only: no mutant is called {' or '.join(only)}; see --list")
    else:
        drawn = sample(drawn, count, seed)
    if listed:
        for mutant in drawn:
            click.echo(f"{mutant.name}  line {mutant.line}: {mutant.edit.change}  [{', '.join(map(str, mutant.doors(device)))}]")
        click.echo(f"{len(drawn)} mutants; " + ", ".join(f"{n} {name}" for name, n in _operators(drawn).items()))
        return
    results: list[pool.Result] = []
    started = time.monotonic()
    with _kernels_of_this_run():
        if healthy and not _is_healthy(drawn, device, jobs):
            sys.exit(STATUS_UNHEALTHY)
        for result in pool.run(_tasks(drawn, device), device, jobs):
            results.append(result)
            _say(len(results), len(drawn), result, table)
            if json_path is not None:
                document = _document(results, table, device, part, seed, time.monotonic() - started)
                json_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    named = {outcome: [each.task.name for each in results if each.verdict.outcome == outcome] for outcome in _OUTCOMES}
    wrong = survivors.stale(table, changes)
    wrong += survivors.surprises(table, device, named[SURVIVED], named[KILLED], changes)
    click.echo(_summary(results, table, time.monotonic() - started))
    for line in wrong:
        click.echo(line)
    sys.exit(STATUS_SURPRISE if wrong else STATUS_AS_EXPECTED)


_OUTCOMES = (KILLED, SURVIVED)


class _kernels_of_this_run:
    """Kernels are compiled into a folder of this run, which all trials share: Triton names them by their source."""

    def __enter__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dsa-verify-mutants-", ignore_cleanup_errors=True)
        os.environ["TRITON_CACHE_DIR"] = self._folder.name

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()


def _operators(mutants: Sequence[Mutant]) -> dict[str, int]:
    counts = Counter(mutant.edit.operator for mutant in mutants)
    return {name: counts[name] for name in OPERATORS}


def _tasks(mutants: Sequence[Mutant], device: str) -> Iterator[pool.Task]:
    return (pool.Task(mutant=mutant, doors=mutant.doors(device)) for mutant in mutants)


def _is_healthy(mutants: Sequence[Mutant], device: str, jobs: int) -> bool:
    """Whether every door that the mutants need lets the code pass as it is; all would be killed if not. On the way
    it compiles what the trials share."""
    doors = sorted({door for mutant in mutants for door in mutant.doors(device)})
    tasks = [pool.Task(mutant=None, doors=(door,)) for door in doors]
    healthy = True
    for result in pool.run(tasks, device, jobs):
        passed = result.verdict.outcome == SURVIVED
        healthy &= passed
        told = "passes" if passed else f"fails in {result.verdict.by}: {result.verdict.how}"
        click.echo(f"{result.task.name}: {told}, {result.wall_s:.1f} s")
    return healthy


def _say(number: int, count: int, result: pool.Result, table: dict[str, survivors.Survivor]) -> None:
    verdict, known = result.verdict, result.task.name in table
    told = verdict.outcome if verdict.outcome != SURVIVED else "survived, as known" if known else "SURVIVED"
    by = f" by {verdict.by}" if verdict.by else ""
    change = result.task.mutant.edit.change if result.task.mutant is not None else ""
    click.echo(f"{number}/{count} {told}{by}, {result.wall_s:.1f} s: {result.task.name}: {change}")


def _document(
    results: Sequence[pool.Result],
    table: dict[str, survivors.Survivor],
    device: str,
    part: str,
    seed: int,
    wall_s: float,
) -> dict[str, Any]:
    mutants = [
        {
            "name": each.task.name,
            "line": each.task.mutant.line,
            "change": each.task.mutant.edit.change,
            **dataclasses.asdict(each.verdict),
            "known": each.task.name in table,
            "wall_s": round(each.wall_s, 1),
        }
        for each in results
        if each.task.mutant is not None
    ]
    head = {"device": device, "part": part, "seed": seed, "wall_s": round(wall_s, 1), **_counts(results, table)}
    return {**head, "mutants": mutants}


def _counts(results: Sequence[pool.Result], table: dict[str, survivors.Survivor]) -> dict[str, Any]:
    outcomes = Counter(result.verdict.outcome for result in results)
    names = [result.task.name for result in results if result.verdict.outcome == SURVIVED]
    argued = sum(name in table and table[name].kind != "hole" for name in names)
    judged = outcomes[KILLED] + outcomes[SURVIVED] - argued
    return {
        "trials": len(results),
        **dict(outcomes),
        "argued_equivalent": argued,
        "killed_of_the_others": round(outcomes[KILLED] / judged, 4) if judged else None,
    }


def _summary(results: Sequence[pool.Result], table: dict[str, survivors.Survivor], wall_s: float) -> str:
    counts = _counts(results, table)
    told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in counts.items())
    return f"{told}; {wall_s:.0f} s"


if __name__ == "__main__":
    main()
