"""`dsa-verify judge` says what is wrong with one step of a server that somebody has dumped."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Final

import click

from dsa_verify.base.errors import STATUS_EQUAL
from dsa_verify.base.writable import write
from dsa_verify.contract.links import contract_links
from dsa_verify.overlay.snapshot import Judged, judge
from dsa_verify.overlay.snapshot_file import Snapshot, read_snapshot

JUDGED_SCHEMA: Final = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command, as parsed."""

    snapshot: Path
    json_path: Path | None = None


def run(options: Options) -> int:
    """Run the command and return the exit status. UsageError for a file that is no snapshot, or cannot be judged."""
    logging.getLogger("dsa_verify.overlay").addHandler(logging.NullHandler())  # what it says is printed below
    snapshot = read_snapshot(options.snapshot)
    judged = judge(snapshot)
    status = judged.summary.status
    _print(snapshot, judged)
    if options.json_path is None:
        return status
    document = {
        "schema": JUDGED_SCHEMA,
        "snapshot": str(options.snapshot),
        "geometry": {"preset": snapshot.geometry.preset, **snapshot.geometry.overrides()},
        "bucket": snapshot.bucket,
        "raw_batch": snapshot.raw_batch,
        "system": snapshot.system.name,
        "compared": judged.summary.compared,
        "not_compared": judged.summary.not_compared,
        "found": [dataclasses.asdict(each) for each in judged.found],
        "status": status,
    }
    return write(options.json_path, json.dumps(document, indent=2) + "\n", status)


def _print(snapshot: Snapshot, judged: Judged) -> None:
    draft = f", N {snapshot.geometry.draft_tokens}" if snapshot.geometry.draft_tokens > 1 else ""
    place = f"bucket {snapshot.bucket}, raw batch {snapshot.raw_batch}{draft}"
    for each in judged.found:
        click.echo(f"FOUND in {snapshot.system.name} (snapshot, {place})")
        click.echo(f"  {each.sentence}")
        if links := contract_links(each.section, each.sentence):
            click.echo(f"  rule: {', '.join(links)}")
        if each.differing > 1:
            click.echo(f"  {each.differing} words differ")
    summary = judged.summary
    if summary.not_compared:
        click.echo(f"not compared: {', '.join(summary.not_compared)}")
    end = "all equal" if summary.status == STATUS_EQUAL else f"{len(judged.found)} finding(s)"
    judged_fields = f"{len(summary.compared)} fields of {snapshot.system.name} judged ({place})"
    click.echo(f"{judged_fields}, {end}; exit status {summary.status}")
