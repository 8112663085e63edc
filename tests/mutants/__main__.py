"""`python -m tests.mutants`: trials of a sample of mutants, to lines, JSON and an exit status (docs/mutants.md)."""

from __future__ import annotations

import contextlib
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
from typing import Any, Final

import click

from tests.mutants import pool, survivors
from tests.mutants.catalogue import PARTS, Mutant, catalogue, sample
from tests.mutants.operators import OPERATORS
from tests.mutants.trial import KILLED, SURVIVED

STATUS_AS_EXPECTED, STATUS_SURPRISE, STATUS_UNHEALTHY = 0, 1, 3
# Of each door, for the code as it is; None: all, and fuzz. An interpreter takes too long for that.
HEALTHY_CONFIGS: Final = {"cpu": 1, "cuda": None}


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--part",
    type=click.Choice(["all", *PARTS]),
    default="all",
    show_default=True,
    help="What the sample is drawn from.",
)
@click.option("--sample", "count", type=click.IntRange(min=1), default=150, show_default=True, help="Mutants to draw.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draw; 0 is the fixed sample.")
@click.option(
    "--only", multiple=True, metavar="PATTERN", help="All mutants of that name instead of a sample; * is any."
)
@click.option(
    "--from",
    "source",
    type=click.Choice(["all", "known", "unknown"]),
    default="all",
    show_default=True,
    help="Whether to draw from all mutants, from the known survivors of this device, or from all others.",
)
@click.option(
    "--quick",
    type=click.IntRange(1, 16),
    metavar="N",
    help="N configurations of each replay and no fuzz; more may be killed by all.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Trials at a time.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="Begin no trial later than that after the first; those that have begun are finished.",
)
@click.option("--healthy/--no-healthy", default=True, show_default=True, help="First run the code as it is.")
@click.option("--list", "listed", is_flag=True, help="Show the mutants and run nothing.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the results there.")
def main(
    device: str,
    part: str,
    count: int,
    seed: int,
    only: tuple[str, ...],
    source: str,
    quick: int | None,
    jobs: int,
    seconds: float | None,
    healthy: bool,
    listed: bool,
    json_path: Path | None,
) -> None:
    """Show small defects of our own pipelines and oracles to `replay` and `fuzz` with default options.

    Status 0: what survives is what survivors.toml says. 1: it is not. 3: the code as it is does not pass.
    """
    changes = {mutant.name: mutant.edit.change for each in PARTS for mutant in catalogue(each)}
    table = survivors.read(changes)
    drawn = _drawn(device, part, count, seed, only, source, table, listed=listed)
    if listed:
        _list(drawn, device)
        return
    results: list[pool.Result] = []
    started = time.monotonic()
    with _kernels_of_this_run():
        if healthy and not _is_healthy(drawn, device, jobs, quick or HEALTHY_CONFIGS[device]):
            sys.exit(STATUS_UNHEALTHY)
        tasks = [pool.Task(mutant=mutant, doors=mutant.doors(device)) for mutant in drawn]
        for result in pool.run(_until(seconds, tasks), device, jobs, quick=quick):
            results.append(result)
            _say(len(results), len(drawn), result, table)
            if json_path is not None:  # anew after each, for a run that is cut short
                head = {"device": device, "part": part, "seed": seed, "drawn": len(drawn)}
                head["wall_s"] = round(time.monotonic() - started, 1)
                text = json.dumps({**head, **_document(results, table)}, indent=2)
                json_path.write_text(text + "\n", encoding="utf-8")
    wrong = _wrong(results, table, changes, device)
    click.echo(f"{_summary(results, table)}; {time.monotonic() - started:.0f} s")
    if len(results) < len(drawn):
        click.echo(f"partial: {len(results)} of {len(drawn)} drawn mutants were tried, as {seconds:g} s were over")
    for line in wrong:
        click.echo(line)
    sys.exit(STATUS_SURPRISE if wrong else STATUS_AS_EXPECTED)


def _until(seconds: float | None, tasks: Sequence[pool.Task]) -> Iterator[pool.Task]:
    """`tasks`, until so long after the first was taken; None: all. They are in an order drawn by lot, so that those
    taken are as fair a sample as all."""
    begun = time.monotonic()
    for task in tasks:
        if seconds is not None and time.monotonic() - begun > seconds:
            return
        yield task


def _drawn(
    device: str,
    part: str,
    count: int,
    seed: int,
    only: tuple[str, ...],
    source: str,
    table: dict[str, survivors.Survivor],
    *,
    listed: bool,
) -> list[Mutant]:
    """In an order by lot, of which any beginning is a fair sample, but where they are only listed."""
    mutants = [mutant for each in (PARTS if part == "all" else (part,)) for mutant in catalogue(each)]
    known = {survivor.name for survivor in table.values() if device in survivor.on}
    if source != "all":
        mutants = [each for each in mutants if (each.name in known) == (source == "known")]
    if not only:
        return sample(mutants, count, seed)
    mutants = [each for each in mutants if any(fnmatch.fnmatchcase(each.name, pattern) for pattern in only)]
    if not mutants:
        raise click.UsageError(f"--only: no mutant is called {' or '.join(only)}; see --list")
    return mutants if listed else sample(mutants, len(mutants), seed)


def _list(mutants: Sequence[Mutant], device: str) -> None:
    for mutant in mutants:
        by = ", ".join(map(str, mutant.doors(device)))
        click.echo(f"{mutant.name}  line {mutant.line}: {mutant.edit.change}  [{by}]")
    counts = Counter(mutant.edit.operator for mutant in mutants)
    click.echo(f"{len(mutants)} mutants; " + ", ".join(f"{counts[name]} {name}" for name in OPERATORS))


def _wrong(
    results: Sequence[pool.Result], table: dict[str, survivors.Survivor], changes: dict[str, str], device: str
) -> list[str]:
    """What the table says otherwise, a sentence each."""
    survived, killed = (
        [result.task.name for result in results if result.verdict.outcome == outcome] for outcome in (SURVIVED, KILLED)
    )
    return survivors.stale(table, changes) + survivors.surprises(table, device, survived, killed, changes)


@contextlib.contextmanager
def _kernels_of_this_run() -> Iterator[None]:
    """Kernels are compiled into a folder of this run, which all trials share: Triton names them by their source."""
    with tempfile.TemporaryDirectory(prefix="dsa-verify-mutants-", ignore_cleanup_errors=True) as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        yield


def _is_healthy(mutants: Sequence[Mutant], device: str, jobs: int, quick: int | None) -> bool:
    """Whether every door that the mutants need lets the code pass as it is; all would be killed if not. On the way
    it compiles what the trials share."""
    doors = sorted({door for mutant in mutants for door in mutant.doors(device)})
    tasks = [pool.Task(mutant=None, doors=(door,)) for door in doors]
    healthy = True
    for result in pool.run(tasks, device, jobs, quick=quick):
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


def _document(results: Sequence[pool.Result], table: dict[str, survivors.Survivor]) -> dict[str, Any]:
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
    return {**_counts(results, table), "mutants": mutants}


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


def _summary(results: Sequence[pool.Result], table: dict[str, survivors.Survivor]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in _counts(results, table).items())


if __name__ == "__main__":
    main()
