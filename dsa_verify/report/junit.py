"""JUnit XML: a suite a system, a case a configuration, a failure a finding."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

from dsa_verify.run.runner import RunResult
from dsa_verify.waivers.waivers import WaiverUse


def of(runs: Sequence[RunResult]) -> str:
    """The text of `runs`."""
    root = ElementTree.Element("testsuites", name="dsa-verify")
    for run in runs:
        failed = sum(bool(outcome.findings) for outcome in run.outcomes)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=f"{run.system}/{run.subject}",
            tests=str(len(run.outcomes) + len(run.gone)),
            failures=str(failed + len(run.gone)),
            time=f"{run.wall_s:.3f}",
        )
        facts = {**run.provenance, **{f"not covered: {field}": why for field, why in run.not_covered.items()}}
        facts |= {f"waiver {use.id}: {use.field}": _used(use) for use in run.counts.waivers.values()}
        if facts:
            properties = ElementTree.SubElement(suite, "properties")
            for name, value in facts.items():
                ElementTree.SubElement(properties, "property", name=name, value=value)
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
                law = f"law: {finding.law}\n" if finding.law else ""
                rule = f"rule: {finding.links}\n" if finding.links else ""
                failure.text = f"{finding.sentence}\n{law}{rule}{finding.loss or finding.reproduce or ''}"
        for use in run.gone:
            name = f"waiver {use.id}: {use.field}"
            case = ElementTree.SubElement(suite, "testcase", classname=f"dsa_verify.{run.system}", name=name)
            ElementTree.SubElement(case, "failure", type="gone", message=use.sentence).text = use.sentence
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text.decode()


def _used(use: WaiverUse) -> str:
    return f"{use.rounds} of {use.checked} rounds, {use.words} words: {use.reason}"
