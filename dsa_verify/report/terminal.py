"""The terminal shows a person a progress bar, or plain lines where there is no terminal, and the verdict last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from dsa_verify.base.errors import STATUS_EQUAL, STATUS_NOTHING_VERIFIED
from dsa_verify.base.exit_status import exit_status, in_a_line, is_expected
from dsa_verify.contract.finding import Finding
from dsa_verify.graphs import Backend
from dsa_verify.report.streams import report_stream
from dsa_verify.run.runner import RunResult, total
from dsa_verify.run.verify import Counts
from dsa_verify.waivers.waivers import named_waivers, rounds_by_waiver

GOOD: Final = "green"
BAD: Final = "bold red"
SHOWN_FIELDS: Final = 6  # of those that are not covered for one reason; JSON has all


def counted(number: int, noun: str, width: int = 0) -> str:
    """Return "1 replay", "2 replays"; with a `width` of the number as a column, as wide for one as for many."""
    many = noun + ("es" if noun.endswith("ch") else "s")
    word = noun if number == 1 else many
    return f"{number:>{width},} {word:<{len(many)}}" if width else f"{number} {word}"


class Terminal:
    """Lines on standard output; rich leaves the colours out where NO_COLOR is set or there is no terminal."""

    def __init__(self, rounds: int):
        self._console = Console(file=report_stream(), highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=rounds)

    def __enter__(self) -> Terminal:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def heading(self, facts: Mapping[str, Any], backend: Backend) -> None:
        self.say(
            f"dsa-verify {facts['dsa_verify']}, torch {facts['torch']}, triton {facts['triton']}, "
            f"{backend.device} ({facts['device_name']}), {backend.name} graphs"
        )

    def begin(self, label: str) -> None:
        self._progress.update(self._task, description=label)

    def advance(self, rounds: int) -> None:
        self._progress.advance(self._task, rounds)

    def finding(self, finding: Finding) -> None:
        draft = f", N {finding.draft_tokens}" if finding.draft_tokens > 1 else ""
        self.say(f"FOUND in {finding.system} ({finding.subject}, bucket {finding.bucket}{draft})", BAD)
        self.say(f"  {finding.sentence}")
        if finding.law:
            self.say(f"  law: {finding.law} (contract 3.5)")
        if finding.links:
            self.say(f"  rule: {finding.links}")
        if finding.loss:
            self.say(f"  {finding.loss}", BAD)
        if finding.reproduce:
            self.say(f"  reproduce: {finding.reproduce}")

    def end(self, run: RunResult) -> None:
        counts = run.counts
        self.say(
            f"{run.system:<14} {run.subject:<10} {counted(counts.configs, 'config', 3)} "
            f"{counted(counts.rounds_checked, 'replay', 7)} {counted(counts.elements_compared, 'element', 14)}  "
            f"{counted(counts.mismatches, 'mismatch')}  {counted(counts.address_changes, 'address change')}  "
            f"{counted(counts.guard_hits, 'guard hit')}  {run.wall_s:.1f} s",
            BAD if run.findings or run.gone else "",
        )
        if (late := counts.compilations_after_warmup) and run.may_compile:
            were = "was" if late == 1 else "were"
            self.say(
                f"  {counted(late, 'kernel')} {were} compiled while rounds ran, which is allowed: {run.may_compile}"
            )
        waived = named_waivers(rounds_by_waiver(counts.waivers.values()))
        if waived:
            self.say(f"  {counted(counts.mismatches, 'mismatch')}{waived}")
        for use in run.gone:
            self.say(f"GONE: {use.sentence}", BAD)
        for line in run.other_versions:
            self.say(f"  {line}")
        if run.provenance:
            self.say("  of " + ", ".join(f"{name} {value}" for name, value in run.provenance.items()))
        for why in dict.fromkeys(run.not_covered.values()):
            fields = [field for field, reason in run.not_covered.items() if reason == why]
            more = f" and {len(fields) - SHOWN_FIELDS} more" if len(fields) > SHOWN_FIELDS else ""
            self.say(f"  not covered: {', '.join(fields[:SHOWN_FIELDS])}{more}: {why}")
        self._say_of_declaration(counts)
        for why in run.not_run:
            self.say(f"  not run: {why}")
        if run.stopped_early:
            self.say("  stopped at the first failing configuration; --keep-going runs them all")

    def _say_of_declaration(self, counts: Counts) -> None:
        if counts.eager_oracle:
            self.say(f"  the reference cannot be captured, and ran eagerly beside the graph: {counts.eager_oracle}")
        for name in counts.missing:
            self.say(
                f"  never occurred: {name}; the run shows nothing of it, so give it other batches or more rounds", BAD
            )

    def guard(self, work: Callable[[], None]) -> int:
        """Do `work`; what ends it early is said, and the exit status for that is returned: 0 if nothing did."""
        try:
            work()
        except KeyboardInterrupt as error:
            self.say("interrupted; results so far are kept")
            return exit_status(error)
        except (Exception, SystemExit) as error:  # a subject's code may call sys.exit, which is no result
            failed = "" if is_expected(error) else "the harness failed, no verdict: "
            self.say(f"dsa-verify: {failed}{in_a_line(error)}", BAD)
            if failed:
                self._console.print_exception()
            return exit_status(error)
        return STATUS_EQUAL

    def verdict(self, runs: Sequence[RunResult], status: int) -> None:
        counts = total(runs)
        findings = sum(len(run.findings) for run in runs)
        gone = sum(len(run.gone) for run in runs)
        if status == STATUS_EQUAL:
            waived = named_waivers(rounds_by_waiver(counts.waivers.values())).partition(":")[0]
            text = f"{counted(counts.rounds_checked, 'replay')} checked, all equal{waived}"
        elif status == STATUS_NOTHING_VERIFIED:
            text = "nothing was verified: a system or case had no round to check"
            if counts.missing:
                text = f"what must occur has not: {', '.join(counts.missing)}"
        else:
            text = f"{counted(counts.rounds_checked, 'replay')} checked, {findings} finding(s)"
            text += f", {gone} waived difference(s) gone" if gone else ""
        self.say(f"{text}; exit status {status}", GOOD if status == STATUS_EQUAL else BAD)

    def say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style))
