"""Declared: what a class declares, checked as far as it can be without a geometry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.declare.draws import Constant, Count, Draw, Length, PageTable, RequestRow
from dsa_verify.declare.ports import Form, In, Out
from dsa_verify.declare.sizes import NAMES, Sizes, evaluate, names_in

# Of these there is one in every run, which has a name of its own there, and this form.
SHARED: Final[Mapping[type[Draw], tuple[str, tuple[str, ...]]]] = {
    Length: ("seq_lens", ("B",)),
    RequestRow: ("req_pool_indices", ("B",)),
    PageTable: ("req_to_token", ("R", "C")),
}
_INDICES: Final = ("int64", "int32")
# Sizes that share no factor, but for T, which is B times N.
_PRIMES: Final = dict(zip(NAMES, (5, 7, 35, 11, 13, 17, 19, 23, 29, 31), strict=True))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One input or output: its name in the class, what was declared, and its form."""

    name: str
    declared: Any
    form: Form

    @classmethod
    def of(cls, where: str, name: str, declared: In | Out) -> Port:
        return cls(name=name, declared=declared, form=Form.parse(declared.form, f"{where}.{name}"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Declared:
    """The inputs `ins` and outputs `outs` of a class, in order, and its `own` sizes. `where`: the class, for errors.
    `laws`: what each demands, by method. `sometimes`: by what must occur for a run to count, whether it does now."""

    where: str
    name: str
    ins: tuple[Port, ...]
    outs: tuple[Port, ...]
    own: Mapping[str, int]
    laws: Mapping[str, str]
    sometimes: Mapping[str, Callable[[Any, Any], Any]]

    @classmethod
    def of(
        cls,
        where: str,
        name: str,
        ins: Mapping[str, In],
        outs: Mapping[str, Out],
        own: Mapping[str, int],
        laws: Mapping[str, str],
        sometimes: Mapping[str, Callable[[Any, Any], Any]],
    ) -> Declared:
        """Return the checked declaration. UsageError says which attribute is wrong, and the remedy."""
        for size, value in own.items():
            if size in NAMES or not size.isidentifier() or type(value) is not int or value < 1:
                taken = f"; {size} is {NAMES[size]}" if size in NAMES else ""
                raise UsageError(
                    f"{where}.sizes: {size!r} is no size of your own: give a new name and an int of 1 or more{taken}"
                )
        declared = cls(
            where=where,
            name=name,
            ins=tuple(Port.of(where, each, value) for each, value in ins.items()),
            outs=tuple(Port.of(where, each, value) for each, value in outs.items()),
            own=dict(own),
            laws=laws,
            sometimes=sometimes,
        )
        declared._check()
        return declared

    @property
    def has_drafts(self) -> bool:
        """Return whether anything depends on the draft length."""
        expressions = [each for port in (*self.ins, *self.outs) for each in port.form.dimensions]
        counted = any(isinstance(port.declared.draw, Count) for port in self.ins)
        return counted or any({"N", "T"} & names_in(each) for each in expressions)

    def sizes(self, geometry: Geometry, bucket: int) -> Sizes:
        """Return the sizes of a bucket."""
        own = {name: getattr(geometry, name) for name in self.own}
        return Sizes.of(geometry, bucket, bucket * (geometry.draft_tokens if self.has_drafts else 1), own)

    def rows_of(self, port: Port, sizes: Sizes) -> int:
        """Return how many rows of an input each request owns. UsageError where that is no whole number."""
        where, first = f"{self.where}.{port.name}", port.form.dimensions[0]
        rows = evaluate(first, sizes, where)
        if not {"B", "T"} & names_in(first):
            raise UsageError(
                f"{where}: {port.declared.form!r} has no rows of the batch; make the first dimension a multiple of B, "
                "or draw it by Constant"
            )
        if rows % sizes.B:
            raise UsageError(f"{where}: {first!r} is no multiple of B; each request has as many rows as any other")
        return rows // sizes.B

    # Checks --------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        by_draw: dict[type, str] = {}
        for port in self.ins:
            self._check_input(port)
            kind = type(port.declared.draw)
            if kind in SHARED and kind in by_draw:
                raise UsageError(
                    f"{self.where}.{port.name}: {by_draw[kind]} is drawn by {kind.__name__}, too, of which a run has "
                    "one; use Derived for the other"
                )
            by_draw[kind] = port.name
        for port in self.outs:
            self._check_output(port)

    def _check_input(self, port: Port) -> None:
        where, draw, form = f"{self.where}.{port.name}", port.declared.draw, port.form
        if not isinstance(draw, Draw):
            raise UsageError(
                f"{where}: its draw is {draw!r}; give one of Length(), RequestRow(), PageTable(), Count(), Uniform(), "
                "Permutation(), Derived(), Constant()"
            )
        if type(draw) in SHARED:
            _, dimensions = SHARED[type(draw)]
            dtypes = ("int32",) if isinstance(draw, PageTable) else _INDICES
        elif isinstance(draw, Count):
            dimensions, dtypes = ("B",), ("int32",)
        else:
            if not isinstance(draw, Constant):
                self.rows_of(port, Sizes({**_PRIMES, **self.own}))
            return
        if form.dimensions != dimensions or form.dtype not in dtypes:
            right = f"{' or '.join(dtypes)}[{', '.join(dimensions)}]"
            raise UsageError(f"{where}: {port.declared.form!r} cannot be drawn by {type(draw).__name__}; use {right}")

    def _check_output(self, port: Port) -> None:
        where, out = f"{self.where}.{port.name}", port.declared
        if not 1 <= len(port.form.dimensions) <= 2:
            raise UsageError(f"{where}: {out.form!r} has {len(port.form.dimensions)} dimensions; use one or two")
        out.kind_of_row(port.form, self.own, where)
        if out.view_of is not None and out.view_of not in {each.name for each in self.outs} - {port.name}:
            raise UsageError(f"{where}: view_of={out.view_of!r} is no other output; name one")
        if out.step and out.live is not None:
            raise UsageError(f"{where}: step and live both say which columns are read; give one of them")
        if out.bound and port.form.dtype != "float32":
            raise UsageError(f"{where}: bound={out.bound} is for float32, not {port.form.dtype}")
