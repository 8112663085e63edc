"""Waiver: a known difference between a published kernel and the contract, which a run counts but does not fail for.

A waiver covers one kind of wrong, in named fields of one subject, within a range of versions, and nothing else. It
fails the run once its difference is gone. What it covers is decided word by word on the device (mask.py). The
ledger that is shipped is waivers.toml; docs/waivers.md says how to write one.

Nothing here imports torch until the names in a ledger are held against the layouts: a campaign reads one, too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from dsa_verify.base.errors import UsageError
from dsa_verify.base.version import package_version
from dsa_verify.contract.explanation import Cause, Explanation
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.contract.geometry import SHARED_FIELDS, Geometry
from dsa_verify.contract.system import System
from dsa_verify.systems.catalogue import SYSTEMS, get_system
from dsa_verify.systems.engines import engine_subject

if TYPE_CHECKING:
    from dsa_verify.contract.subject import SubjectFactory

T = TypeVar("T")
LEDGER_SCHEMA: Final = 1
ALLOW_COMPILATIONS: Final = "--allow-compilations"
SHIPPED: Final = Path(__file__).with_name("waivers.toml")
# What the words of a field can be called. Guards, inputs, routes, addresses and failures are never waived.
WAIVABLE: Final = (
    Diagnosis.NEVER_WRITTEN,
    Diagnosis.STALE,
    Diagnosis.FROZEN,
    Diagnosis.REQUEST_MAP,
    Diagnosis.WRONG_OWNER,
    Diagnosis.DRAFT_OFFSET,
    Diagnosis.BOUNDARY,
    Diagnosis.OUT_OF_RANGE,
    Diagnosis.WRONG_VALUE,
)
# Of these the device itself can say, of every word of every round, whether it is so.
EXACT: Final = frozenset({Diagnosis.NEVER_WRITTEN, Diagnosis.FROZEN})

_REQUIRED: Final = ("id", "subject", "versions", "system", "field", "diagnosis", "reason")
_OPTIONAL: Final = ("cause", "subject_says", "law", "when", "shows")
_ID: Final = re.compile(r"[a-z0-9][a-z0-9._-]*")
_COMPARISON: Final = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+)")
_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """`name` of the geometry, or "bucket", or "rounds" (of one configuration), compared with `value`."""

    name: str
    comparison: str
    value: Any

    def holds(self, facts: Mapping[str, Any]) -> bool:
        return _COMPARE[self.comparison](facts[self.name], self.value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waiver:
    """One field of one entry of a ledger.

    `versions`: (package, PEP 440 specifiers), all of which the subject must be in. `diagnoses`: what its differences
    are called. `causes`: what must have been recognised in each; empty: whatever. `subject_says`: a part of what the
    subject itself says of each. `law`: the law of contract 3.5 that a schedule must break first. `when`: where the
    difference exists; `shows`: where a run must show it, or else it is gone.
    """

    id: str
    subject: str
    versions: tuple[tuple[str, str], ...]
    system: str
    field: str
    diagnoses: frozenset[Diagnosis]
    reason: str
    causes: frozenset[Cause] = frozenset()
    subject_says: str | None = None
    law: str | None = None
    when: tuple[Condition, ...] = ()
    shows: tuple[Condition, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.id} {self.field}"

    @property
    def called(self) -> str:
        """Its diagnoses, in words."""
        return " or ".join(each.value for each in WAIVABLE if each in self.diagnoses)

    @property
    def covered(self) -> str:
        """What it covers, in words."""
        law = f", breaking the law of {self.law}" if self.law is not None else ""
        cause = " or ".join(repr(each.value) for each in Cause if each in self.causes)
        said = f", and of which the subject says {self.subject_says!r}" if self.subject_says is not None else ""
        return f"{self.called}{law}{f', because of {cause}' if cause else ''}{said}"

    @property
    def by_diagnosis(self) -> bool:
        """Whether the diagnosis of a word says alone whether it is what the waiver is for."""
        return not self.causes and self.subject_says is None

    @property
    def sampled(self) -> bool:
        """Whether the device alone cannot say that a word is what the waiver is for, so that rounds are explained."""
        return self.law is not None or not self.by_diagnosis or not self.diagnoses <= EXACT

    def is_for(self, explanation: Explanation, said: str) -> bool:
        """Return whether the waiver is for an element so explained, of which the subject itself said `said`."""
        return (
            explanation.kind in self.diagnoses
            and (not self.causes or explanation.cause in self.causes)
            and (self.subject_says is None or self.subject_says in said)
        )

    def names(self, system: str, subject: str) -> bool:
        return (self.system, self.subject) == (system, subject)

    def covers(self, geometry: Geometry, bucket: int) -> bool:
        return _all_hold(self.when, geometry, bucket=bucket)

    def must_show(self, geometry: Geometry, bucket: int, rounds: int) -> bool:
        """Whether `rounds` of a configuration that captured `bucket` must have shown the difference."""
        return rounds > 0 and _all_hold(self.shows, geometry, bucket=bucket, rounds=rounds)

    def outside(self, versions: Mapping[str, str]) -> str | None:
        """Why it does not apply to a subject that is made of `versions`; None if it does."""
        for package, specifiers in self.versions:
            found = versions.get(package) or package_version(package)
            if found is None:
                return f"{package} is not what {self.subject} is made of, and is not installed"
            try:
                inside = SpecifierSet(specifiers).contains(Version(found), prereleases=True)
            except InvalidVersion:
                return f"{package} {found!r} is no version that can be compared with {specifiers}"
            if not inside:
                return f"{package} {found} is outside {specifiers}"
        return None


def _all_hold(conditions: Sequence[Condition], geometry: Geometry, **facts: Any) -> bool:
    known = {"preset": geometry.preset, **geometry.values(), **facts}
    return all(condition.holds(known) for condition in conditions)


@dataclasses.dataclass(slots=True, kw_only=True)
class WaiverUse:
    """What came of a waiver in a run. `rounds`, `words`: with a covered word, and how many of them; `checked`: rounds
    that were checked where it applies; `due`: those of configurations that had to show it."""

    id: str
    field: str
    reason: str
    rounds: int = 0
    words: int = 0
    checked: int = 0
    due: int = 0

    @property
    def gone(self) -> bool:
        return self.due > 0 and not self.words

    @property
    def sentence(self) -> str:
        """Of one that is gone."""
        return f"waiver {self.id}: the difference in {self.field} was not seen in {self.due} rounds; remove it"

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "gone": self.gone}

    def plus(self, other: WaiverUse) -> WaiverUse:
        counts = ("rounds", "words", "checked", "due")
        return dataclasses.replace(self, **{name: getattr(self, name) + getattr(other, name) for name in counts})


def rounds_by_waiver(uses: Iterable[WaiverUse]) -> dict[str, int]:
    """Rounds in which each difference was seen, if any. Of several fields of one waiver, the most rounds count."""
    rounds: dict[str, int] = {}
    for use in uses:
        if use.words:
            rounds[use.id] = max(rounds.get(use.id, 0), use.rounds)
    return rounds


def named_waivers(rounds: Mapping[str, int]) -> str:
    """ " beyond 2 named waivers: ID (17 rounds), ID (3 rounds)", to be put behind a count; empty if there are none."""
    listed = ", ".join(f"{name} ({count} round{'s' * (count != 1)})" for name, count in rounds.items())
    return f" beyond {len(rounds)} named waiver{'s' * (len(rounds) != 1)}: {listed}" if rounds else ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """`source`: what messages call it. `options`: the words with which `replay` chooses it; none for the shipped.
    `compilations`: whether kernels may be compiled after the warm-up, whatever the subject."""

    source: str
    waivers: tuple[Waiver, ...]
    options: tuple[str, ...] = ()
    compilations: bool = False

    def naming(self, system: str, subject: str) -> list[Waiver]:
        """The waivers of `subject` in `system`, whatever its version."""
        return [waiver for waiver in self.waivers if waiver.names(system, subject)]

    def applying(
        self, system: str, subject: str, geometry: Geometry, buckets: Sequence[int], factory: SubjectFactory
    ) -> tuple[Waiver, ...]:
        """Those that cover something of `subject`, which `factory` makes, where `buckets` are captured.

        UsageError if two cover the same field, so that neither could be seen to be gone.
        """
        named = self.naming(system, subject)
        if not named:
            return ()
        versions = _versions_of(factory)
        found = [waiver for waiver in named if waiver.outside(versions) is None]
        for bucket in buckets:
            by_field: dict[str, str] = {}
            for waiver in found:
                if waiver.covers(geometry, bucket) and by_field.setdefault(waiver.field, waiver.id) != waiver.id:
                    raise UsageError(
                        f"{self.source}: waivers {by_field[waiver.field]} and {waiver.id} both cover {waiver.field} of "
                        f"{subject} at bucket {bucket}; make it one, or set their versions or `when` apart"
                    )
        return tuple(waiver for waiver in found if any(waiver.covers(geometry, bucket) for bucket in buckets))

    def outside(self, system: str, subject: str, factory: SubjectFactory) -> list[str]:
        """A line for each waiver that names `subject` and is for other versions of it."""
        named = self.naming(system, subject)
        versions = _versions_of(factory) if named else {}
        reasons = {waiver.id: waiver.outside(versions) for waiver in named}
        return [f"waiver {name} does not apply: {why}" for name, why in reasons.items() if why]

    def may_compile(self, subject: str) -> str:
        """Why kernels of `subject` may be compiled after the warm-up; empty if they may not."""
        if self.compilations:
            return f"{ALLOW_COMPILATIONS} was given"
        engine = None if "--no-waivers" in self.options else engine_subject(subject)
        return engine.compiles if engine is not None else ""

    def allowing_compilations(self, allowed: bool) -> Ledger:
        """The same, with what the option of that name says."""
        if not allowed:
            return self
        return dataclasses.replace(self, compilations=True, options=(*self.options, ALLOW_COMPILATIONS))

    def refuse_if_idle(self, runs: Sequence[tuple[str, str]]) -> None:
        """UsageError if it was chosen for `runs`, (system, subject) each, and names none of them."""
        if (
            self.options
            and self.options != (ALLOW_COMPILATIONS,)
            and self.waivers
            and not any(self.naming(*run) for run in runs)
        ):
            listed = ", ".join(dict.fromkeys(f"{subject} of {system}" for system, subject in runs))
            raise UsageError(f"{self.source}: has no effect, as it has no waiver for {listed}; leave it out")


NO_WAIVERS: Final = Ledger(source="no waivers", waivers=())


def _versions_of(factory: SubjectFactory) -> Mapping[str, str]:
    from dsa_verify.contract.subject import provenance

    return provenance(factory)


# Reading -------------------------------------------------------------------------------------------------------------


def choose_ledger(path: Path | None, none: bool, *, prefix: str = "") -> Ledger:
    """The ledger at `path`, the shipped one without it, an empty one if `none`. UsageError as `read_ledger`, for a file
    without waivers, and for both at once, whose options begin with `prefix`."""
    if none and path is not None:
        raise UsageError(f"--{prefix}waivers: has no effect with --{prefix}no-waivers; give one of them")
    if none:
        return dataclasses.replace(NO_WAIVERS, options=("--no-waivers",))
    if path is None:
        return read_ledger(SHIPPED)
    ledger = read_ledger(path, options=("--waivers", str(path)))
    if not ledger.waivers:
        raise UsageError(f"{path}: holds no [[waiver]]; add one, or give --{prefix}no-waivers instead")
    return ledger


def read_ledger(path: Path, *, options: tuple[str, ...] = ()) -> Ledger:
    """The ledger in the file `path`: TOML, or the same as JSON where its name ends in .json.

    UsageError names the path, the value and the remedy for anything that is not exactly so.
    """
    ledger = dataclasses.replace(parse_ledger(read_entries(path), str(path)), options=options)
    check_names(ledger)
    return ledger


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The entries in the file `path`, as they are written. UsageError if it is no ledger."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as a ledger of waivers: {error}") from None
    except RecursionError:
        raise UsageError(f"{path}: cannot be read as a ledger of waivers: it nests too deeply; flatten it") from None
    if not isinstance(data, dict) or set(data) - {"schema", "waiver"} or data.get("schema") != LEDGER_SCHEMA:
        raise UsageError(f"{path}: must hold schema = {LEDGER_SCHEMA} and [[waiver]] entries, and nothing else")
    entries = data.get("waiver", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{path}: waiver: must be a list of tables; write [[waiver]] above each")
    return entries


def parse_ledger(entries: Sequence[Mapping[str, Any]], source: str) -> Ledger:
    """A ledger of `entries`, but for whether their fields and laws exist, which `check_names` looks at."""
    waivers: list[Waiver] = []
    for i, entry in enumerate(entries):
        where = f"{source}: waiver[{i}]"
        parsed = _parse_entry(entry, where)
        if any(known.id == parsed[0].id for known in waivers):
            raise UsageError(f"{where}.id: {parsed[0].id!r} is used twice; give each waiver an id of its own")
        waivers += parsed
    return Ledger(source=source, waivers=tuple(waivers))


def _parse_entry(entry: Mapping[str, Any], where: str) -> list[Waiver]:
    for key in (*entry, *_REQUIRED):
        if key not in (*_REQUIRED, *_OPTIONAL):
            raise UsageError(f"{where}.{key}: unknown; its keys are {', '.join((*_REQUIRED, *_OPTIONAL))}")
        if key not in entry:
            raise UsageError(f"{where}.{key}: missing; every waiver has {', '.join(_REQUIRED)}")
    for key in ("id", "subject", "system", "reason", "subject_says", "law"):
        if key in entry and (not isinstance(entry[key], str) or not entry[key].strip()):
            raise UsageError(f"{where}.{key}: {entry[key]!r} is no text; say it in words")
    if not _ID.fullmatch(entry["id"]):
        raise UsageError(f"{where}.id: {entry['id']!r} is not of small letters, digits, '.', '_' and '-'")
    if entry["system"] not in SYSTEMS:
        raise UsageError(f"{where}.system: {entry['system']!r} is unknown; use one of {', '.join(SYSTEMS)}")
    versions = _parse_versions(entry["versions"], f"{where}.versions")
    waivable = {diagnosis.value: diagnosis for diagnosis in WAIVABLE}
    diagnoses = _named(entry["diagnosis"], waivable, f"{where}.diagnosis", "nothing that can be waived")
    causes = {cause.value: cause for cause in Cause}
    when = _parse_conditions(entry.get("when", {}), f"{where}.when", SYSTEMS[entry["system"]], ("bucket",))
    shows = _parse_conditions(entry.get("shows", {}), f"{where}.shows", SYSTEMS[entry["system"]], ("bucket", "rounds"))
    return [
        Waiver(
            id=entry["id"],
            subject=entry["subject"],
            versions=versions,
            system=entry["system"],
            field=field,
            diagnoses=diagnoses,
            reason=entry["reason"],
            causes=_named(entry["cause"], causes, f"{where}.cause", "unknown") if "cause" in entry else frozenset(),
            subject_says=entry.get("subject_says"),
            law=entry.get("law"),
            when=when,
            shows=shows,
        )
        for field in _texts(entry["field"], f"{where}.field")
    ]


def _texts(value: Any, where: str) -> list[str]:
    """One text or a list of different ones."""
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) and text for text in texts) or len(set(texts)) < len(texts):
        raise UsageError(f"{where}: {value!r} is neither a text nor a list of different ones")
    return texts


def _named(value: Any, known: Mapping[str, T], where: str, what: str) -> frozenset[T]:
    """What one text or several name. `what`: what a name is that is not `known`."""
    texts = _texts(value, where)
    for text in texts:
        if text not in known:
            raise UsageError(f"{where}: {text!r} is {what}; use one of {', '.join(known)}")
    return frozenset(known[text] for text in texts)


def _parse_versions(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping) or not value:
        raise UsageError(f'{where}: {value!r} must name packages and their versions, as in {{ sglang = "<0.5.24" }}')
    for package, specifiers in value.items():
        try:
            usable = isinstance(specifiers, str) and bool(list(SpecifierSet(specifiers)))
        except InvalidSpecifier:
            usable = False
        if not usable:
            raise UsageError(f"{where}.{package}: {specifiers!r} is no range of versions; write one as in '>=0.5,<0.6'")
    return tuple(value.items())


def _parse_conditions(value: Any, where: str, system: System, beside: tuple[str, ...]) -> tuple[Condition, ...]:
    if not isinstance(value, Mapping):
        raise UsageError(f'{where}: {value!r} must be a table, as in {{ draft_steps = ">=4" }}')
    kinds = {name: kind.__name__ for name, kind in SHARED_FIELDS.items()} | {"preset": "str"}
    kinds |= {size.name: type(size.default).__name__ for size in system.sizes} | dict.fromkeys(beside, "int")
    found: list[Condition] = []
    for name, wanted in value.items():
        if name not in kinds:
            raise UsageError(f"{where}.{name}: unknown; use {' or '.join(beside)}, or a field of the geometry")
        found += _parse_condition(name, wanted, kinds[name], f"{where}.{name}")
    return tuple(found)


def _parse_condition(name: str, wanted: Any, kind: str, where: str) -> Iterator[Condition]:
    if type(wanted).__name__ == kind:
        yield Condition(name=name, comparison="==", value=wanted)
        return
    parts = [part.strip() for part in wanted.split(",")] if kind == "int" and isinstance(wanted, str) else []
    matches = [_COMPARISON.fullmatch(part) for part in parts]
    if not matches or None in matches:
        example = " or comparisons as in '>=4,<8'" if kind == "int" else ""
        raise UsageError(f"{where}: {wanted!r} does not compare with it; give a value of type {kind}{example}")
    yield from (Condition(name=name, comparison=match[1], value=int(match[2])) for match in matches if match)


# Names ---------------------------------------------------------------------------------------------------------------


def check_names(ledger: Ledger) -> None:
    """UsageError for a field, a law or an engine's subject that does not exist. Imports torch."""
    from dsa_verify.judge.schedule_laws import Law
    from dsa_verify.systems.indexer import scheduled_lengths

    for waiver in ledger.waivers:
        where = f"{ledger.source}: waiver {waiver.id}"
        fields = fields_of(waiver.system)
        if waiver.field not in fields:
            raise UsageError(
                f"{where}: field: {waiver.field!r} is no field of {waiver.system} that owns memory; those are "
                f"{', '.join(fields)}"
            )
        laws = [law.value for law in Law]
        if waiver.law is not None and waiver.law not in laws:
            raise UsageError(f"{where}: law: {waiver.law!r} is unknown; use one of {', '.join(laws)}")
        if waiver.law is not None and scheduled_lengths(waiver.field) is None:
            raise UsageError(
                f"{where}: law: {waiver.field} is no schedule, to which alone the laws apply; leave it out"
            )
        engine = engine_subject(waiver.subject)
        if engine is not None and engine.system != waiver.system:
            raise UsageError(f"{where}: system: {waiver.subject} is of {engine.system}, not of {waiver.system}")


@functools.cache
def fields_of(system: str) -> tuple[str, ...]:
    """The fields that `system` has in one geometry or another, without those that are views of others."""
    found: dict[str, None] = {}
    known = get_system(system)
    for geometry in _many_geometries(known):
        for bucket in (4, 64):
            try:
                layout = known.layout(geometry, bucket)
            except UsageError:  # the system has no such geometry
                continue
            found |= {field.name: None for field in layout if field.alias is None}
    return tuple(found)


def _many_geometries(system: System) -> Iterator[Geometry]:
    """Small ones that between them have every field of `system`."""
    most = {"draft_tokens": 2, "request_rows": 66, **system.all_fields}
    for preset in ("tiny", "tiny_pool", "tiny_v4"):
        for changes in ({}, {"indexer": True}, {"architecture": 100}, {"draft_tokens": 1}):
            try:
                yield system.geometry(preset, {**most, **changes})
            except UsageError:
                continue
