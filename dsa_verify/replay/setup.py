"""ReplaySetup: one subject on one set of buckets to be captured, which the fast run and its confirmation open."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from dsa_verify.base.errors import NothingVerified
from dsa_verify.base.out_of_memory import translate_out_of_memory
from dsa_verify.contract import progress
from dsa_verify.contract.engine_form import engine_form
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.round import Round, Scenario
from dsa_verify.contract.round_table import Array, RoundTable, tabulate
from dsa_verify.contract.subject import SubjectFactory, has_foreign_work, not_covered
from dsa_verify.contract.system import System
from dsa_verify.graphs import Backend
from dsa_verify.replay.replayer import Replayer
from dsa_verify.rounds.matrix import REMAPS_PER_ROUND, Config
from dsa_verify.subjects.faults import brings_foreign_work, check_field, forgotten_inputs, in_layouts, plant
from dsa_verify.systems.catalogue import get_system, reference_of, subject_factory
from dsa_verify.systems.engines import check_device
from dsa_verify.waivers.waivers import NO_WAIVERS, Ledger, Waiver

_FOREIGN_SHARE: Final = 0.125  # of the rounds
_FOREIGN_STREAM: Final = 0xF0  # so that these draws are none of those that make the rounds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySetup:
    """`subject` names what `factory` makes, so that a case can name it; `fault` is planted around it. `not_covered`: by
    field that is not compared in any bucket that has it, why. `waivers`: those of `ledger` that apply."""

    system: System
    geometry: Geometry
    buckets: tuple[int, ...]
    seed: int
    subject: str
    fault: str | None
    factory: SubjectFactory
    backend: Backend
    not_covered: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ledger: Ledger = NO_WAIVERS
    waivers: tuple[Waiver, ...] = ()

    @property
    def foreign(self) -> bool:
        """Return whether rounds may have foreign work before them."""
        return has_foreign_work(self.factory) or (self.fault is not None and brings_foreign_work(self.fault))

    def with_foreign_work(self, chunks: Iterable[RoundTable], turn: int = 0) -> Iterator[RoundTable]:
        """`chunks` with foreign work before one round of each at least, if there is any; others at another `turn`."""
        rng = np.random.default_rng([self.seed, turn, _FOREIGN_STREAM])
        for table in chunks:
            if not self.foreign or not len(table):
                yield table
                continue
            drawn = rng.random(len(table)) < _FOREIGN_SHARE
            drawn[rng.integers(len(table))] = True
            yield dataclasses.replace(table, foreign=drawn.astype(np.int64))

    @property
    def may_compile(self) -> str:
        """Why kernels may be compiled after the warm-up; empty if that is a finding."""
        return self.ledger.may_compile(self.subject)

    @classmethod
    def make(
        cls,
        system: System,
        geometry: Geometry,
        buckets: tuple[int, ...],
        seed: int,
        subject: str | SubjectFactory | None,
        fault: str | None,
        backend: Backend,
        ledger: Ledger = NO_WAIVERS,
    ) -> ReplaySetup:
        """Make the setup of `subject`: a reference, or the factory itself where it has no name to be loaded by."""
        label, factory = cls.factory_of(system, subject)
        check_device(label, backend.device)
        system.check_geometry(geometry)
        # Refuse a geometry that the system has no layout for, a wrong name or field now, not at the first capture.
        layouts = [system.layout(geometry, bucket) for bucket in buckets]
        missing = {k: v for layout in layouts for k, v in not_covered(factory, layout, backend.device).items()}
        layouts = [layout.without(missing) for layout in layouts]
        if not any(layout.fields for layout in layouts):
            raise NothingVerified(f"subject {label!r} covers no field of {system.name}: {_reasons(missing)}")
        if fault is not None:
            plant(fault, factory, system.name)
            fault = in_layouts(fault, layouts)
            check_field(fault, layouts)
        return cls(
            system=system,
            geometry=geometry,
            buckets=buckets,
            seed=seed,
            subject=label,
            fault=fault,
            factory=factory,
            backend=backend,
            not_covered=missing,
            ledger=ledger,
            waivers=ledger.applying(system.name, label, geometry, buckets, factory),
        )

    @classmethod
    def of_config(
        cls,
        config: Config,
        subject: str | SubjectFactory | None,
        fault: str | None,
        backend: Backend,
        ledger: Ledger = NO_WAIVERS,
    ) -> ReplaySetup:
        """Make the setup of `subject` in a configuration."""
        return cls.make(config.system, config.geometry, config.buckets, config.seed, subject, fault, backend, ledger)

    @classmethod
    def of_case(
        cls,
        case: Scenario,
        backend: Backend,
        ledger: Ledger = NO_WAIVERS,
        *,
        subject: str | SubjectFactory | None = None,
        fault: str | None = None,
    ) -> ReplaySetup:
        """Make the setup of `case`. `subject`, `fault`: instead of those that it names."""
        subject = case.subject if subject is None else subject
        fault = case.fault if fault is None else fault
        system = get_system(case.system)
        return cls.make(system, case.geometry, case.buckets, case.seed, subject, fault, backend, ledger)

    @staticmethod
    def factory_of(system: System, subject: str | SubjectFactory | None) -> tuple[str, SubjectFactory]:
        """Return what results and cases call `subject`, and what makes it."""
        if subject is None or isinstance(subject, str):
            return subject_factory(system, subject)
        module, name = getattr(subject, "__module__", None), getattr(subject, "__qualname__", None)
        return f"{module}:{name}" if module and name else repr(subject), subject

    def opening(self) -> None:
        """Hear that something is about to be allocated."""

    def launching(self, table: RoundTable) -> None:
        """Hear that `table` is about to be launched, for each table that an open replayer is given."""

    def open(
        self,
        rounds: int,
        remap_slots: int = REMAPS_PER_ROUND,
        *,
        record: bool = False,
        resettable: bool = False,
        first: RoundTable | None = None,
    ) -> Replayer:
        """Allocate and capture for tables of up to `rounds` rounds, `first` being what is replayed first. This and what
        it opens raise OutOfMemory where memory does not suffice."""
        self.opening()
        progress.current().open(self.scenario(()).to_json(), self.ledger.options, first)
        # Planted anew each time: a fault knows the buckets of its own run only.
        factory = self.factory if self.fault is None else plant(self.fault, self.factory, self.system.name)
        with translate_out_of_memory():
            return Replayer(
                self.system,
                self.geometry,
                self.buckets,
                factory,
                self.backend,
                capacity=max(rounds, 1),
                remap_slots=remap_slots,
                record=record,
                resettable=resettable,
                skip_tail_reset=forgotten_inputs(self.fault),
                leave_out=self.not_covered,
                form=engine_form(self.factory),
                waivers=self.waivers,
                on_launch=self.launching,
            )

    def generations(self) -> Array:
        """Return how often each request row was remapped when a replayer has just been opened: int64 [request_rows]."""
        return np.zeros(self.geometry.request_rows, np.int64)

    def table(
        self, rounds: Sequence[Round], remap_slots: int = REMAPS_PER_ROUND, generations: Array | None = None
    ) -> RoundTable:
        """Return `rounds` as a table. It counts its remaps in `generations`, where tables follow one another; without
        them it starts from request pages never remapped."""
        return tabulate(
            self.system,
            self.geometry,
            rounds,
            self.generations() if generations is None else generations,
            widest_bucket=max(self.buckets),
            remap_slots=remap_slots,
        )

    def scenario(self, rounds: Sequence[Round], found: str | None = None) -> Scenario:
        """Return a scenario of `rounds` with what this setup was made of."""
        return Scenario(
            system=reference_of(self.system),
            geometry=self.geometry,
            buckets=self.buckets,
            rounds=tuple(rounds),
            seed=self.seed,
            subject=self.subject,
            fault=self.fault,
            found=found,
        )


def remap_slots_of(rounds: Sequence[Round]) -> int:
    """Return how many requests the round that remaps most of them remaps."""
    return max((len(set(round_.remap)) for round_ in rounds), default=0)


def _reasons(missing: Mapping[str, str]) -> str:
    return "; ".join(dict.fromkeys(missing.values())) or "its layout is empty"
