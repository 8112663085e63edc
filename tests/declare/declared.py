"""Declarations for tests: one that uses all there is, and those that are wrong in one way each."""

from __future__ import annotations

from typing import Any

import torch

from dsa_verify import (
    Constant,
    Count,
    Derived,
    In,
    Length,
    Metadata,
    Out,
    PageTable,
    Permutation,
    RequestRow,
    Uniform,
    law,
)


class Everything(Metadata):
    """A declaration that uses all there is."""

    sizes = {"H": 3}
    lens = In("int32[B]", Length(before_draft=True, edges=("K",)))
    requests = In("int32[B]", RequestRow())
    slots = In("int32[R, C]", PageTable())
    accepted = In("int32[B]", Count())
    noise = In("int32[B * N, H]", Uniform(5, "P + 5"))
    order = In("int64[B, H]", Permutation())
    twice = In("int64[B]", Derived(lambda sizes, i: i.lens * 2))
    table = In("int32[H]", Constant(lambda sizes, device: torch.arange(sizes.H, dtype=torch.int32, device=device)))

    sums = Out("int64[T + 1]")
    seen = Out("int32[T]", low=0, high="L + N + 1")
    mix = Out("int32[T, H]")
    some = Out("int64[B, 4]", live=lambda sizes, i: i.accepted.clamp(max=4))
    pages = Out("int32[T, cdiv(L, P)]", low=0, step="P")
    third = Out("float32[B]", bound=1e-6)
    fixed = Out("int32[B]", once=True)
    lens_again = Out("int32[T]", view_of="seen")

    def setup(self, i: Any, o: Any) -> None:
        o.fixed.fill_(7)

    def reference(self, i: Any, o: Any) -> dict[str, torch.Tensor]:
        s = self.sizes
        seen = (i.lens[:, None] + torch.arange(1, s.N + 1, device=i.lens.device)).flatten()
        pages = i.slots[i.requests.long(), :: s.P][:, : o.pages.shape[1]] // s.P
        return {
            "seen": seen,
            "sums": torch.nn.functional.pad(seen.long().cumsum(0), (1, 0)),
            "mix": i.noise + i.table + i.order.repeat_interleave(s.N, 0).int(),
            "some": (i.twice + i.accepted)[:, None].expand(-1, 4),
            "pages": pages.repeat_interleave(s.N, 0),
            "third": i.lens.float() / 3,
            "fixed": torch.full_like(o.fixed, 7),
        }

    def subject(self, i: Any, o: Any) -> dict[str, torch.Tensor]:
        made = self.reference(i, o)
        del made["fixed"]
        return made

    def subject_off_by_one(self, i: Any, o: Any) -> dict[str, torch.Tensor]:
        made = self.subject(i, o)
        return {**made, "sums": made["sums"] - 1}

    def subject_beyond_what_is_live(self, i: Any, o: Any) -> dict[str, torch.Tensor]:
        made = self.subject(i, o)
        column = torch.arange(4, device=o.some.device)
        return {**made, "some": torch.where(column < i.accepted[:, None], made["some"], -5)}

    @law
    def sums_begin_with_zero(self, i: Any, o: Any) -> torch.Tensor:
        """The first sum is 0."""
        return o.sums[0] == 0

    sometimes = {"a length past the top-k": lambda sizes, i: i.lens > sizes.K}


class Unmet(Metadata):
    """What it waits for never occurs."""

    lens = In("int64[B]", Length())
    same = Out("int64[B]")
    sometimes = {"a negative length": lambda sizes, i: i.lens < 0, "a length": lambda sizes, i: i.lens > 0}

    def reference(self, i: Any, o: Any) -> None:
        o.same.copy_(i.lens)

    subject = reference


class ReadsOnTheHost(Unmet):
    """Its reference cannot be captured."""

    sometimes: Any = {}

    def reference(self, i: Any, o: Any) -> None:
        for b, length in enumerate(i.lens.tolist()):
            o.same[b] = length

    def subject(self, i: Any, o: Any) -> None:
        o.same.copy_(i.lens)


class Random(ReadsOnTheHost):
    """Its reference is not what is right."""

    def reference(self, i: Any, o: Any) -> None:
        o.same.copy_(torch.rand(len(i.lens), device=o.same.device) * 1000)


class LeavesSome(ReadsOnTheHost):
    """Its reference leaves the first row."""

    def reference(self, i: Any, o: Any) -> None:
        o.same[1:].copy_(i.lens[1:])


class LiveOnTheHost(ReadsOnTheHost):
    """Its live rule is a number of the host."""

    same = Out("int64[B]", live=lambda sizes, i: 1)


class OtherShape(ReadsOnTheHost):
    """An input of it is not made in the form that it is declared in."""

    more = In("int64[B, 2]", Derived(lambda sizes, i: i.lens))


class NothingLive(ReadsOnTheHost):
    """Its live rule lets nobody read anything."""

    same = Out("int64[B]", live=lambda sizes, i: i.lens * 0)
