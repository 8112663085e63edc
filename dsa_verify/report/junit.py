"""JUnit XML: a suite a system, a case a configuration, a failure a finding."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from dsa_verify.runs import Run


def write(runs: Sequence[Run], path: Path) -> None:
    """Write `runs` to `path`."""
    root = ElementTree.Element("testsuites", name="dsa-verify")
    for run in runs:
        failed = sum(bool(outcome.findings) for outcome in run.outcomes)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=f"{run.system}/{run.subject}",
            tests=str(len(run.outcomes)),
            failures=str(failed),
            time=f"{run.wall_s:.3f}",
        )
        for outcome in run.outcomes:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"dsa_verify.{run.system}",
                name=outcome.name,
                time=f"{outcome.wall_s:.3f}",
            )
            for finding in outcome.findings:
                failure = ElementTree.SubElement(
                    case, "failure", type=finding.diagnosis.value, message=finding.sentence
                )
                failure.text = f"{finding.sentence}\n{finding.reproduce or ''}"
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
