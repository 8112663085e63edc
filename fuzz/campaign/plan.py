"""Plan: what a campaign is a pure function of, and its endless list of shards. Written once, to campaign.json.

Nothing here imports torch: a supervisor that never touches a device cannot be taken down by one.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import MAX_BATCH, MAX_DRAFT_TOKENS, PRESETS
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.systems.engines import check_system
from dsa_verify.systems.trust import code_options, installed_systems
from fuzz.campaign.shard_folder import read_json, write_json

PLAN_SCHEMA: Final = 1
PLAN_FILE: Final = "campaign.json"
LEDGER_FILE: Final = "ledger.json"  # the waivers of the plan, for replays of its cases
MAX_ROUNDS_A_SHARD: Final = 1 << 24
DEVICES: Final = ("auto", "cpu", "cuda")
_FLAGS: Final = {
    "systems": "--system",
    "settings": "--set",
    "batches": "--batch",
    "drafts": "--draft-tokens",
    "rounds_a_shard": "--rounds-per-shard",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a campaign, which every shard follows. `preset` None: what each system has for the device.
    `settings`: overrides of the geometry. `batches`: buckets instead of those of the diagnostic matrix, over whose
    configurations the shards turn, and `drafts`: draft lengths, likewise, in systems that have drafts. `resident`:
    unsteered rounds, drawn in bulk (resident.py). `fault`: planted in the subject of every shard, whose findings then
    count as any others do; beside it each shard plants one of its own. `waivers`: the entries of a ledger; None: those
    that are shipped. `allow_compilations`: kernels may be compiled while rounds run."""

    systems: tuple[str, ...]
    subject: str | None = None
    fault: str | None = None
    seed: int = 0
    rounds_a_shard: int = 16_384
    preset: str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batches: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    device: str = "auto"
    resident: bool = False
    waivers: tuple[Mapping[str, Any], ...] | None = None
    allow_compilations: bool = False

    def check(self) -> None:
        """Raise UsageError if no shard could run this plan."""
        self._check_names()
        self._check_numbers()
        if self.waivers:
            from dsa_verify.waivers.waivers import parse_ledger

            parse_ledger(self.waivers, LEDGER_FILE)

    def _check_names(self) -> None:
        for system in self.systems:
            if ":" in system:
                continue  # code, which only whoever runs shards imports
            _choice("systems", system, (*SYSTEMS, *installed_systems()))
            check_system(self.subject, system)
        if self.subject == "":
            raise UsageError("subject: empty; name a pipeline, or leave it out")
        if self.fault == "":
            raise UsageError("fault: empty; name one of `dsa-verify faults`, or leave it out")
        if not self.systems or len(set(self.systems)) != len(self.systems):
            raise UsageError(f"systems: {list(self.systems)} must name at least one system, and each once")
        if self.preset is not None:
            _choice("preset", self.preset, tuple(PRESETS))
        _choice("device", self.device, DEVICES)

    def _check_numbers(self) -> None:
        for name, each in (("batches", self.batches), ("drafts", self.drafts)):
            if len(set(each)) != len(each):
                raise UsageError(f"{name}: {list(each)} names one of them twice; give each once")
        if self.drafts and "draft_tokens" in self.settings:
            raise UsageError("drafts: has no effect with a setting of draft_tokens; give one of them")
        limits = {"seed": (self.seed, 0, (1 << 31) - 1), "rounds_a_shard": (self.rounds_a_shard, 1, MAX_ROUNDS_A_SHARD)}
        limits |= {f"batches[{i}]": (batch, 1, MAX_BATCH) for i, batch in enumerate(self.batches)}
        limits |= {f"drafts[{i}]": (draft, 1, MAX_DRAFT_TOKENS) for i, draft in enumerate(self.drafts)}
        for name, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise UsageError(f"{name}: {value} is outside {low}..{high}; choose a value inside")

    def to_dict(self) -> dict[str, Any]:
        return {"schema": PLAN_SCHEMA, **dataclasses.asdict(self)}

    def replay_options(self, root: Path) -> list[str]:
        """Return the words with which `dsa-verify replay` runs this plan's subject with the waivers of `root`."""
        words = [word for system in self.systems for word in code_options(system, None)]
        words += code_options("", self.subject)
        if self.waivers is not None:
            words += ["--waivers", str(root / LEDGER_FILE)] if self.waivers else ["--no-waivers"]
        return [*words, "--allow-compilations"] if self.allow_compilations else words

    def shard(self, number: int) -> ShardSpec:
        return ShardSpec(plan=self, number=number)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """Shard `number` of `plan`; `batch_divisor` makes its batches smaller where memory ran out."""

    plan: Plan
    number: int
    batch_divisor: int = 1

    @property
    def system(self) -> str:
        return self.plan.systems[self.number % len(self.plan.systems)]

    @property
    def turn(self) -> int:
        """Return how many shards of this system came before: which configuration it is, modulo their number."""
        return self.number // len(self.plan.systems)

    @property
    def seed(self) -> int:
        """Return the seed of this shard's rounds: 0 <= seed < 2**31."""
        digest = hashlib.sha256(f"{self.plan.seed}/{self.number}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1

    def to_dict(self) -> dict[str, Any]:
        return {"plan": self.plan.to_dict(), "number": self.number, "batch_divisor": self.batch_divisor}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShardSpec:
        return cls(plan=parse_plan(data["plan"]), number=data["number"], batch_divisor=data["batch_divisor"])


def parse_plan(data: Mapping[str, Any]) -> Plan:
    """Return the plan that `to_dict` gave; UsageError names what is not so."""
    if data.get("schema") != PLAN_SCHEMA:
        raise UsageError(f"schema: {data.get('schema')} is not {PLAN_SCHEMA}, which this version reads; update it")
    # Campaigns of before there were these can be resumed.
    values: dict[str, Any] = {"waivers": None, "fault": None, "drafts": [], "allow_compilations": False} | {
        key: value for key, value in data.items() if key != "schema"
    }
    names = [field.name for field in dataclasses.fields(Plan)]
    for key in (*values, *names):
        if key not in names or key not in values:
            raise UsageError(f"{key}: {'missing' if key in names else 'unknown'}; its keys are {', '.join(names)}")
    kinds: dict[str, tuple[type, ...]] = {
        "systems": (list, tuple),
        "subject": (str, type(None)),
        "fault": (str, type(None)),
        "seed": (int,),
        "rounds_a_shard": (int,),
        "preset": (str, type(None)),
        "settings": (dict,),
        "batches": (list, tuple),
        "drafts": (list, tuple),
        "device": (str,),
        "resident": (bool,),
        "allow_compilations": (bool,),
        "waivers": (list, tuple, type(None)),
    }
    for key, kind in kinds.items():
        if type(values[key]) not in kind:
            raise UsageError(f"{key}: {values[key]!r} is {type(values[key]).__name__}, not {kind[0].__name__}")
    for key, item_kind in (("systems", str), ("batches", int), ("drafts", int), ("waivers", dict)):
        if any(type(item) is not item_kind for item in values[key] or ()):
            raise UsageError(f"{key}: {values[key]!r} must hold {item_kind.__name__} only")
    lists = {key: tuple(values[key]) for key in ("systems", "batches", "drafts", "waivers") if values[key] is not None}
    plan = Plan(**{**values, **lists})
    plan.check()
    return plan


def read_plan(root: Path) -> Plan:
    """Return the plan of the campaign in `root`."""
    path = root / PLAN_FILE
    data = read_json(path)
    if data is None:
        raise UsageError(f"{root}: holds no campaign ({PLAN_FILE} is missing); start one with: campaign {root}")
    try:
        return parse_plan(data)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def load_or_create_plan(root: Path, given: Mapping[str, Any], default: Mapping[str, Any]) -> Plan:
    """Return the plan of the campaign in `root`, which is begun with `given` (over `default`) where there is none.

    UsageError if there is one and `given` says otherwise: its shards would not be those that were run.
    """
    if not (root / PLAN_FILE).exists():
        plan = Plan(**{**default, **given})
        plan.check()
        if plan.waivers:
            from dsa_verify.waivers.waivers import LEDGER_SCHEMA

            write_json(root / LEDGER_FILE, {"schema": LEDGER_SCHEMA, "waiver": list(plan.waivers)})
        write_json(root / PLAN_FILE, plan.to_dict())
        return plan
    plan = read_plan(root)
    for name, value in given.items():
        if value != getattr(plan, name):
            flag = _FLAGS.get(name, "--" + name)
            raise UsageError(
                f"{flag}: {value} differs from {getattr(plan, name)}, which the campaign in {root} was begun with; "
                "leave it out to resume, or use another folder"
            )
    return plan


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}: {value!r} is unknown; use one of {', '.join(choices)}")
